//! A work queue that is itself the dead-letter queue of another.

use lapin::{BasicProperties, options::QueueDeclareOptions, types::AMQPValue};
use lapin_retry::{QueueType, RetryConsumer, Settings};
use serde_json::json;

use crate::support::{Scene, WORK, publish, quick, table};

#[tokio::test(flavor = "multi_thread")]
async fn what_a_dead_letter_died_of_at_first_is_kept_through_its_retries() {
    for kind in [QueueType::Quorum, QueueType::Classic] {
        let scene = Scene::of(kind).await;
        let arguments = table([
            ("x-dead-letter-exchange", AMQPValue::LongString("".into())),
            ("x-dead-letter-routing-key", AMQPValue::LongString(WORK.into())),
            ("x-message-ttl", AMQPValue::LongInt(1)),
        ]);
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        scene.channel.queue_declare("incoming".into(), durable, arguments).await.unwrap();
        let worker = RetryConsumer::builder(scene.url(), WORK)
            .settings(Settings::new(quick()).on_event(scene.journal.hook()))
            .handler(scene.journal.handler(|_| 99))
            .start()
            .await
            .unwrap();
        publish(&scene.channel, "", "incoming", BasicProperties::default(), b"").await;
        let mut buried = scene.take_buried(1).await.remove(0);
        let headers = buried["headers"].as_object_mut().unwrap();
        assert_eq!(headers["retry-count"], 3);
        let mut death = headers.remove("retry-original-death").expect("it died before");
        let at = death["at"].take();
        assert!(humantime::parse_rfc3339(at.as_str().unwrap()).is_ok(), "{at}");
        let first = json!({
            "queue": "incoming",
            "reason": "expired",
            "exchange": "",
            "routing-key": "incoming",
            "count": 1,
            "at": null,
        });
        assert_eq!(death, first);
        // The first handler saw it as the broker tells it, the second as it was kept.
        let attempts = scene.journal.attempts();
        let has = |n: usize, name: &str| {
            attempts[n].job.properties().headers().as_ref().unwrap().contains_key(name)
        };
        assert!(has(0, "x-first-death-queue") && !has(0, "retry-original-death"));
        assert!(has(1, "retry-original-death") && has(2, "retry-original-death"));
        worker.shutdown(std::time::Duration::from_secs(1)).await;
    }
}
