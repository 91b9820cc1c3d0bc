//! A broker that allows few channels on a connection: `channel_max`. What a client asks for is what
//! it gets, if the broker allows more, so an address with a low one is as good.

use anyhow::anyhow;
use futures_util::future::try_join_all;
use lapin::BasicProperties;
use lapin_retry::{Broker, Error, Handle, Job, RetryConsumer, RetryPolicy};
use std::time::Duration;

use crate::support::{Journal, Scene, WORK};

const SECOND: Duration = Duration::from_secs(1);

fn broker(scene: &Scene, channel_max: u16) -> Broker {
    Broker::from(format!("{}?channel_max={channel_max}", scene.url()))
}

/// 57 queues. A job fails once.
async fn worker(broker: &Broker, journal: &Journal) -> Result<Handle, Error> {
    let calls = journal.clone();
    RetryConsumer::builder(broker, WORK)
        .policy(RetryPolicy::new(["100ms", "15s", "30s", "1m", "2m", "4m", "8m"]))
        .on_event(journal.hook())
        .handler(move |job: Job| {
            calls.begin(&job);
            async move {
                match job.retry_count() {
                    0 => Err(anyhow!("no")),
                    _ => Ok(()),
                }
            }
        })
        .start()
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn all_queues_are_declared_and_a_job_fails_and_comes_back_however_few_channels_there_are() {
    for channel_max in [2, 3, 8] {
        let scene = Scene::new().await;
        let broker = broker(&scene, channel_max);
        let worker = worker(&broker, &scene.journal).await.unwrap();
        assert_eq!(scene.queues().len(), 57, "with {channel_max} channels");
        scene.publish(BasicProperties::default(), "").await;
        scene.journal.until_done(1).await;
        scene.journal.nothing_broke();
        worker.shutdown(SECOND).await;
        worker.stopped().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn consumers_of_one_broker_that_start_together_declare_in_turn() {
    let scene = Scene::new().await;
    let broker = broker(&scene, 8);
    let workers = (0..5).map(|_| worker(&broker, &scene.journal));
    let workers = try_join_all(workers).await.unwrap();
    for worker in workers {
        worker.shutdown(SECOND).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_without_a_channel_waits_for_one_or_says_what_is_to_be_raised() {
    let scene = Scene::new().await;
    let broker = broker(&scene, 2);
    let first = worker(&broker, &scene.journal).await.unwrap();
    let _second = worker(&broker, &scene.journal).await.unwrap();
    let refused = worker(&broker, &scene.journal).await.unwrap_err().to_string();
    for part in [WORK, "channel_max", "Broker of their own"] {
        assert!(refused.contains(part), "{refused}");
    }
    let (third, ()) = tokio::join!(worker(&broker, &scene.journal), first.shutdown(SECOND));
    third.unwrap().shutdown(SECOND).await;
}
