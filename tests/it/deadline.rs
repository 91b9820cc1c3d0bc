//! A job with a deadline is not kept beyond it, and a buried job that was put back starts afresh.

use std::time::{Duration, SystemTime};

use crate::support::{End, PATIENCE, Scene, as_the_body_says, count, eventually, publish};
use lapin::{
    BasicProperties,
    options::{BasicAckOptions, BasicGetOptions},
};
use lapin_retry::{BuriedReason, Event, Handle, Jitter, QueueType, RetryConsumer, RetryPolicy};
use serde_json::{Value, json};

const EXPIRED: End = End::Buried(BuriedReason::Expired);
const EXHAUSTED: End = End::Buried(BuriedReason::Exhausted);

struct Orders {
    scene: Scene,
}

impl Orders {
    async fn new() -> Self {
        Self { scene: Scene::with("orders", QueueType::Quorum).await }
    }

    /// A worker of exactly these levels.
    async fn worker<const N: usize>(&self, levels: [&str; N]) -> Handle {
        RetryConsumer::builder(self.scene.vhost.url(), "orders")
            .policy(RetryPolicy::new(levels).jitter(Jitter::None))
            .on_event(self.scene.journal.hook())
            .handler(self.scene.journal.handler(as_the_body_says))
            .start()
            .await
            .unwrap()
    }

    /// A job that always fails; it dies in its queue unless it is taken within `lifetime`.
    async fn publish(&self, id: &str, lifetime: Duration, timestamp: Option<u64>) {
        let mut properties = BasicProperties::default()
            .with_message_id(id.into())
            .with_expiration(lifetime.as_millis().to_string().into());
        if let Some(timestamp) = timestamp {
            properties = properties.with_timestamp(timestamp);
        }
        publish(&self.scene.channel, "", "orders", properties, b"99").await;
    }

    async fn ends(&self, jobs: usize) -> Vec<(String, End)> {
        let ended = async || self.scene.journal.ends().len() >= jobs;
        eventually("the jobs end", PATIENCE, ended).await;
        self.scene.journal.assert_no_trouble();
        self.scene.journal.ends()
    }

    /// The only job in the buried queue. It leaves the queue.
    fn buried(&self) -> Value {
        let mut buried = self.scene.vhost.api().take("orders.buried", 9);
        assert_eq!(buried.len(), 1);
        buried.remove(0)
    }

    /// As an operator does it in the management UI: "Get messages", "Publish message".
    fn put_back(&self, taken: &Value) {
        let answer = self.scene.vhost.api().post(
            &format!("exchanges/{}/amq.default/publish", self.scene.vhost.name()),
            &json!({
                "properties": taken["properties"],
                "routing_key": "orders",
                "payload": taken["payload"],
                "payload_encoding": taken["payload_encoding"],
            }),
        );
        assert_eq!(answer["routed"], true);
    }

    fn retry_counts(&self, id: &str) -> Vec<u32> {
        self.scene.journal.attempts_of(id).iter().map(|attempt| attempt.job.retry_count()).collect()
    }
}

fn seconds(at: SystemTime) -> u64 {
    at.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()
}

fn text(at: SystemTime) -> String {
    humantime::format_rfc3339_millis(at).to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_next_delay_would_pass_its_deadline_is_buried_as_expired_at_once() {
    let orders = Orders::new().await;
    let worker = orders.worker(["300ms", "10m"]).await;
    let stamp = seconds(SystemTime::now());
    // The first delay fits in, the second does not. To wait for either would take minutes.
    orders.publish("1", Duration::from_secs(300), Some(stamp)).await;
    let ends = orders.ends(1).await;
    worker.shutdown(Duration::from_secs(5)).await;

    assert_eq!(ends, [("1".to_owned(), EXPIRED)]);
    assert_eq!(orders.retry_counts("1"), [0, 1]);
    let buried = orders.buried();
    let (properties, headers) = (&buried["properties"], &buried["headers"]);
    let deadline = SystemTime::UNIX_EPOCH + Duration::from_secs(stamp + 300);
    assert_eq!(headers["retry-deadline"], text(deadline));
    assert_eq!(headers["buried-reason"], "expired");
    assert_eq!(headers["retry-count"], 2);
    assert_eq!(headers["retry-error"], "attempt 1: out of luck");
    let detail = headers["buried-detail"].as_str().unwrap();
    assert!(detail.starts_with("its next delay of 10m would end "), "{detail}");
    assert!(headers.get("retry-due-at").is_none(), "{headers}");
    assert!(properties.get("expiration").is_none(), "{properties}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_deadline_counts_from_the_timestamp_or_else_from_the_first_failure() {
    let orders = Orders::new().await;
    let worker = orders.worker(["2m"]).await;
    let now = SystemTime::now();
    let (lifetime, minute) = (Duration::from_secs(150), Duration::from_secs(60));
    // A minute of the two and a half is over, so the next delay does not fit in.
    orders.publish("past", lifetime, Some(seconds(now - minute))).await;
    orders.publish("none", lifetime, None).await;
    // What many clients write where no timestamp is set.
    orders.publish("unset", lifetime, Some(0)).await;
    // A clock that is wrong must not give a job more time than it has.
    orders.publish("future", lifetime, Some(seconds(now + 60 * minute))).await;
    let retried = |id: &str| orders.scene.journal.retried(id, 0).is_some();
    eventually("each is in its place", PATIENCE, async || {
        ["none", "unset", "future"].into_iter().all(retried)
            && !orders.scene.journal.ends().is_empty()
    })
    .await;
    worker.shutdown(Duration::from_secs(5)).await;
    orders.scene.journal.assert_no_trouble();
    assert_eq!(orders.scene.journal.ends(), [("past".to_owned(), EXPIRED)]);

    let waiting = orders.scene.vhost.api().peek("orders.retry.00120s", 9);
    assert_eq!(waiting.len(), 3);
    for waiting in waiting {
        let headers = &waiting["headers"];
        let failed = headers["retry-first-failed-at"].as_str().unwrap();
        let failed = humantime::parse_rfc3339(failed).unwrap();
        assert_eq!(headers["retry-deadline"], text(failed + lifetime), "{waiting}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_comes_back_past_its_deadline_is_buried_without_a_run() {
    let orders = Orders::new().await;
    let worker = orders.worker(["1s"]).await;
    let lifetime = Duration::from_secs(4);
    orders.publish("1", lifetime, None).await;
    eventually("it is in its lane", PATIENCE, async || {
        orders.scene.journal.retried("1", 0).is_some()
    })
    .await;
    let late = SystemTime::now() + lifetime;
    worker.shutdown(Duration::ZERO).await;
    eventually("it waits for a worker in vain", PATIENCE, async || {
        SystemTime::now() > late && count(&orders.scene.channel, "orders").await == 1
    })
    .await;

    let worker = orders.worker(["1s"]).await;
    let ends = orders.ends(1).await;
    worker.shutdown(Duration::from_secs(5)).await;
    assert_eq!(ends, [("1".to_owned(), EXPIRED)]);
    assert_eq!(orders.retry_counts("1"), [0]);
    let headers = &orders.buried()["headers"];
    assert_eq!(headers["buried-reason"], "expired");
    assert_eq!(headers["retry-count"], 1);
    assert_eq!(headers["retry-error"], "attempt 0: out of luck");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_comes_for_the_first_time_past_its_deadline_is_buried_without_a_run() {
    let orders = Orders::new().await;
    let worker = orders.worker(["1s"]).await;
    let stamp = seconds(SystemTime::now()) - 600;
    orders.publish("1", Duration::from_secs(60), Some(stamp)).await;
    let ends = orders.ends(1).await;
    worker.shutdown(Duration::from_secs(5)).await;
    assert_eq!(ends, [("1".to_owned(), EXPIRED)]);
    assert_eq!(orders.retry_counts("1"), [0; 0]);
    let headers = &orders.buried()["headers"];
    let deadline = SystemTime::UNIX_EPOCH + Duration::from_secs(stamp + 60);
    assert_eq!(headers["retry-deadline"], text(deadline));
    let detail = headers["buried-detail"].as_str().unwrap();
    assert!(detail.starts_with("it arrived 9m"), "{detail}");
    assert!(detail.contains(&format!(" after its deadline of {}", text(deadline))), "{detail}");
    let told = orders.scene.journal.first("its burial", |event| match event {
        Event::Buried { detail, error, .. } => Some([detail.clone(), error.clone()]),
        _ => None,
    });
    assert_eq!(told.await, [detail, detail]);
    assert_eq!(headers["retry-count"], 0);
    assert_eq!(headers["retry-original-routing-key"], "orders");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_buried_job_that_is_put_back_by_hand_goes_through_all_levels_again() {
    let orders = Orders::new().await;
    let worker = orders.worker(["100ms", "200ms"]).await;
    let properties = BasicProperties::default().with_message_id("1".into());
    publish(&orders.scene.channel, "", "orders", properties, b"99").await;
    orders.ends(1).await;
    let mut buried = orders.buried();
    assert!(buried["headers"].get("retry-exhumed-count").is_none());

    for exhumed in 1..=2 {
        orders.put_back(&buried);
        let rounds = exhumed + 1;
        let ends = orders.ends(rounds).await;
        assert_eq!(ends, vec![("1".to_owned(), EXHAUSTED); rounds]);
        assert_eq!(orders.retry_counts("1"), [0, 1, 2].repeat(rounds));
        buried = orders.buried();
        let headers = &buried["headers"];
        assert_eq!(headers["retry-exhumed-count"], exhumed);
        assert_eq!(headers["retry-count"], 3);
        assert_eq!(headers["buried-reason"], "exhausted");
        let round = orders.scene.journal.attempts().split_off(3 * exhumed);
        assert!(round.iter().all(|attempt| attempt.job.id() == "1"));
        // It is told apart once: a retry of it is no burial.
        let buried_reason = |attempt: &crate::support::Attempt| {
            attempt.job.properties().headers().as_ref().unwrap().contains_key("buried-reason")
        };
        assert_eq!(round.iter().map(buried_reason).collect::<Vec<_>>(), [true, false, false]);
    }
    worker.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_job_that_is_put_back_after_its_deadline_goes_through_all_levels_again() {
    let orders = Orders::new().await;
    let worker = orders.worker(["200ms", "2s"]).await;
    let lifetime = Duration::from_secs(2);
    orders.publish("1", lifetime, None).await;
    assert_eq!(orders.ends(1).await, [("1".to_owned(), EXPIRED)]);
    let late = SystemTime::now() + lifetime;
    eventually("its deadline is past", PATIENCE, async || SystemTime::now() > late).await;

    // As a shovel does it: the message as it is.
    let got = orders.scene.channel.basic_get("orders.buried".into(), BasicGetOptions::default());
    let buried = got.await.unwrap().expect("the buried job").delivery;
    publish(&orders.scene.channel, "", "orders", buried.properties.clone(), &buried.data).await;
    assert!(buried.ack(BasicAckOptions::default()).await.unwrap());
    let ends = orders.ends(2).await;
    worker.shutdown(Duration::from_secs(5)).await;
    assert_eq!(ends[1], ("1".to_owned(), EXHAUSTED));
    assert_eq!(orders.retry_counts("1"), [0, 1, 0, 1, 2]);
    let headers = &orders.buried()["headers"];
    assert!(headers.get("retry-deadline").is_none(), "{headers}");
    assert_eq!(headers["retry-exhumed-count"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_job_that_is_put_back_before_its_deadline_keeps_it() {
    let orders = Orders::new().await;
    let worker = orders.worker(["200ms", "1h"]).await;
    orders.publish("1", Duration::from_secs(1800), None).await;
    let mut deadline = Value::Null;
    for round in 1..=2 {
        assert_eq!(orders.ends(round).await.pop(), Some(("1".to_owned(), EXPIRED)));
        assert_eq!(orders.retry_counts("1"), [0, 1].repeat(round));
        let buried = orders.buried();
        if round == 1 {
            deadline = buried["headers"]["retry-deadline"].clone();
            orders.put_back(&buried);
        }
        assert!(deadline.is_string());
        assert_eq!(buried["headers"]["retry-deadline"], deadline);
    }
    worker.shutdown(Duration::from_secs(5)).await;
}
