//! The two ways in: the user's own loop, and a handler that we call.

use crate::support::{
    BURIED, Journal, PATIENCE, Scene, WORK, connect, consume, count, declare_work_queue,
    eventually, next, next_job, quick, table, text, within,
};
use futures_util::StreamExt;
use lapin::{BasicProperties, Channel, Connection};
use lapin_retry::{
    Broker, Event, Handle, Job, Jobs, QueueType, Retry, RetryConsumer, Settings, Settled,
    UnsettledJob, reject,
};
use serde::{Deserialize, Serialize};
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::sync::Semaphore;

/// A user's own loop: a consumer on a connection of the user's.
struct Loop {
    retry: Retry,
    jobs: Jobs,
    channel: Channel,
    journal: Journal,
    _connection: Connection,
}

impl Loop {
    async fn start(scene: &Scene) -> Self {
        let journal = Journal::default();
        let settings = Settings::new(quick()).on_event(journal.hook());
        let retry = Retry::attach(scene.url(), WORK, settings).await.unwrap();
        let connection = connect(&scene.url()).await;
        let channel = connection.create_channel().await.unwrap();
        let jobs = retry.jobs(consume(&channel, WORK, 10).await);
        Self { retry, jobs, channel, journal, _connection: connection }
    }

    async fn next(&mut self) -> UnsettledJob {
        within("a job", self.jobs.next()).await.expect("no end").expect("no error")
    }

    /// Polled twice, since a stream that is not fused would never answer the second time.
    async fn ends(&mut self) {
        assert!(within("the end", self.jobs.next()).await.is_none());
        assert!(within("the end again", self.jobs.next()).await.is_none());
    }
}

async fn settled(job: UnsettledJob, result: anyhow::Result<()>) -> Settled {
    let receipt = job.settle(result).await.unwrap();
    within("the receipt", receipt.into_future()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_receipt_of_a_job_from_the_stream_says_what_became_of_it() {
    let scene = Scene::new().await;
    let mut user = Loop::start(&scene).await;
    for id in ["done", "rejected", "failed"] {
        scene.job(id, table([]), b"").await;
    }
    assert_eq!(settled(user.next().await, Ok(())).await, Settled::Acked);
    let no_use = Err(reject(anyhow::anyhow!("no use")).into());
    assert_eq!(settled(user.next().await, no_use).await, Settled::Buried);
    for level in 1..=2 {
        let job = user.next().await;
        assert_eq!((job.id(), job.retry_count()), ("failed", level - 1));
        let answer = settled(job, Err(anyhow::anyhow!("later"))).await;
        assert!(
            matches!(answer, Settled::Retried { level: now, .. } if now == level),
            "{answer:?}"
        );
    }
    let last = settled(user.next().await, Err(anyhow::anyhow!("for the last time"))).await;
    assert_eq!(last, Settled::Buried);
    let buried = scene.buried(2).await;
    let reason = |id: &str| text(&buried[id].properties, "buried-reason").unwrap();
    assert_eq!((reason("rejected"), reason("failed")), ("rejected".into(), "exhausted".into()));
    user.journal.nothing_broke();
    user.retry.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_single_delivery_is_accepted_and_settled_in_the_same_way() {
    let scene = Scene::new().await;
    let retry = Retry::attach(scene.url(), WORK, quick()).await.unwrap();
    let mut consumer = consume(&scene.channel, WORK, 10).await;
    scene.job("1", table([]), b"").await;
    for attempt in 0..2 {
        let job = next_job(&retry, &mut consumer).await;
        assert_eq!(job.retry_count(), attempt);
        let answer = settled(job, Err(anyhow::anyhow!("later"))).await;
        assert!(matches!(answer, Settled::Retried { .. }), "{answer:?}");
    }
    let job = retry.accept(next(&mut consumer).await).await.unwrap().unwrap();
    assert_eq!(settled(job, Ok(())).await, Settled::Acked);
    assert_eq!(count(&scene.channel, WORK).await, 0);
    scene.job("late", table([]), b"").await;
    let late = next(&mut consumer).await;
    retry.clone().close().await.unwrap();
    let error = retry.accept(late).await.unwrap_err();
    assert!(error.to_string().contains("after close()"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_is_dropped_goes_back_and_to_another_consumer() {
    let scene = Scene::new().await;
    let mut user = Loop::start(&scene).await;
    scene.job("1", table([]), b"job").await;
    let job = user.next().await;
    let mut other = consume(&scene.channel, WORK, 10).await;
    // So that the job has no other place to go to.
    let api = scene.vhost.api();
    eventually("both consumers are known", PATIENCE, async || api.consumers().len() == 2).await;
    within("the cancel", user.jobs.cancel()).await;

    drop(job);

    let delivery = next(&mut other).await;
    assert_eq!(delivery.data, b"job");
    let why = user.journal.first("it is given back", |event| match event {
        Event::GivenBack { job, why, .. } if job.id() == "1" => Some(*why),
        _ => None,
    });
    assert!(why.await.contains("without being settled"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stream_ends_once_and_for_all_when_the_consumer_is_cancelled() {
    let scene = Scene::new().await;
    let retry = Retry::attach(scene.url(), WORK, quick()).await.unwrap();
    let mut jobs = retry.jobs(consume(&scene.channel, WORK, 10).await);
    scene.job("1", table([]), b"").await;
    let job = within("a job", jobs.next()).await.unwrap().unwrap();
    within("the cancel", jobs.cancel()).await;
    for _ in 0..2 {
        assert!(within("the end", jobs.next()).await.is_none());
    }
    // The channel is still there for what was taken before.
    assert_eq!(settled(job, Ok(())).await, Settled::Acked);
    retry.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_buffered_when_the_channel_died_is_not_run() {
    let scene = Scene::new().await;
    let mut user = Loop::start(&scene).await;
    for id in ["1", "2", "3"] {
        scene.job(id, table([]), b"").await;
    }
    let first = user.next().await;
    // With the first taken, the others wait in the consumer's buffer.
    eventually("all are delivered", PATIENCE, async || count(&scene.channel, WORK).await == 0)
        .await;
    // On the same channel after the deliveries, so that they are here when it is answered.
    user.channel.basic_qos(20, lapin::options::BasicQosOptions::default()).await.unwrap();
    user.channel.close(200, "done".into()).await.unwrap();
    user.ends().await;
    let stale = user.journal.all(|event| match event {
        Event::Stale { job, .. } => Some(job.id().to_owned()),
        _ => None,
    });
    assert_eq!(stale, ["2", "3"]);

    // Neither an ack nor a copy is possible or needed now: the broker delivers it again.
    assert_eq!(settled(first, Err(anyhow::anyhow!("too late"))).await, Settled::Stale);
    eventually("all are back", PATIENCE, async || count(&scene.channel, WORK).await == 3).await;
    assert_eq!(count(&scene.channel, BURIED).await, 0);
    user.retry.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn to_settle_a_success_on_a_dead_channel_is_no_error() {
    let scene = Scene::of(QueueType::Classic).await;
    let mut user = Loop::start(&scene).await;
    scene.job("1", table([]), b"").await;
    let job = user.next().await;
    user.channel.close(200, "done".into()).await.unwrap();
    assert_eq!(settled(job, Ok(())).await, Settled::Stale);
    user.retry.close().await.unwrap();
}

/// Panics when it is dropped, unless a panic is on its way.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "a destructor panicked");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn panics_and_timeouts_are_failures_of_their_job_and_not_of_the_consumer() {
    let scene = Scene::new().await;
    let journal = Journal::default();
    let handle = RetryConsumer::builder(scene.url(), WORK)
        .policy(quick())
        .on_event(journal.hook())
        .handler_timeout(Duration::from_millis(300))
        .handler(|job: Job| {
            assert!(job.body() != b"sync", "before the future");
            async move {
                match job.body() {
                    b"async" => panic!("in the future"),
                    b"slow" => std::future::pending().await,
                    b"bomb" => {
                        let _bomb = Bomb;
                        std::future::pending().await
                    }
                    b"payload" => std::panic::panic_any(7),
                    _ => Ok(()),
                }
            }
        })
        .start()
        .await
        .unwrap();
    let expected = [
        ("sync", "panic", "before the future"),
        ("async", "panic", "in the future"),
        ("slow", "timeout", "cancelled after 300ms"),
        ("bomb", "panic", "a destructor panicked"),
        ("payload", "panic", "the handler panicked"),
    ];
    for (body, ..) in expected {
        scene.job(body, table([]), body.as_bytes()).await;
    }
    scene.job("good", table([]), b"good").await;
    journal.is_done("good").await;
    let buried = scene.buried(expected.len()).await;
    for (id, kind, error) in expected {
        let properties = &buried[id].properties;
        assert_eq!(text(properties, "buried-reason").as_deref(), Some("exhausted"), "{id}");
        assert_eq!(text(properties, "retry-error-kind").as_deref(), Some(kind), "{id}");
        let said = text(properties, "retry-error").unwrap();
        assert!(said.contains(error), "{id}: {said}");
    }
    journal.nothing_broke();
    handle.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_more_handlers_run_than_the_concurrency_allows() {
    let scene = Scene::new().await;
    for id in 0..12 {
        scene.job(&id.to_string(), table([]), b"").await;
    }
    let (running, most, gate) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
    let journal = Journal::default();
    let handle = RetryConsumer::builder(scene.url(), WORK)
        .policy(quick())
        .on_event(journal.hook())
        .concurrency(3)
        .handler({
            let (running, most, gate) = (running.clone(), most.clone(), gate.clone());
            move |_| {
                let (running, most, gate) = (running.clone(), most.clone(), gate.clone());
                async move {
                    most.fetch_max(running.fetch_add(1, SeqCst) + 1, SeqCst);
                    gate.acquire().await?.forget();
                    running.fetch_sub(1, SeqCst);
                    Ok(())
                }
            }
        })
        .start()
        .await
        .unwrap();
    eventually("three run", PATIENCE, async || running.load(SeqCst) >= 3).await;
    eventually("all are here", PATIENCE, async || count(&scene.channel, WORK).await == 0).await;
    gate.add_permits(12);
    eventually("all are done", PATIENCE, async || journal.done().len() == 12).await;
    assert_eq!(most.load(SeqCst), 3);
    handle.shutdown(Duration::from_secs(5)).await;
}

async fn idle(broker: &Broker, queue: &str) -> Handle {
    RetryConsumer::builder(broker, queue)
        .policy(quick())
        .consumer_tag(format!("worker of {queue}"))
        .priority(7)
        .prefetch(5)
        .handler(|_| async { Ok(()) })
        .start()
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn all_consumers_of_a_broker_share_two_connections_and_are_told_apart_by_their_tags() {
    let scene = Scene::new().await;
    declare_work_queue(&scene.channel, "more", QueueType::Classic).await;
    let broker = Broker::from(scene.url());
    let handles = [idle(&broker, WORK).await, idle(&broker, "more").await];
    let api = scene.vhost.api();
    eventually("the broker lists both consumers", PATIENCE, async || api.consumers().len() == 2)
        .await;
    let ours = || {
        let connections = api.connections();
        let name = |connection: &serde_json::Value| {
            let name = connection["user_provided_name"].as_str()?;
            name.starts_with("lapin-retry").then(|| name.to_owned())
        };
        let mut names: Vec<_> = connections.iter().filter_map(name).collect();
        names.sort();
        names
    };
    // The scene's own is the third.
    eventually("all connections are listed", PATIENCE, async || api.connections().len() >= 3).await;
    assert_eq!(ours(), ["lapin-retry consuming", "lapin-retry publishing"]);
    for consumer in api.consumers() {
        let queue = consumer["queue"]["name"].as_str().unwrap();
        assert_eq!(consumer["consumer_tag"], format!("worker of {queue}"));
        assert_eq!(consumer["arguments"]["x-priority"], 7);
        assert_eq!(consumer["prefetch_count"], 5);
    }
    for handle in handles {
        handle.shutdown(Duration::from_secs(5)).await;
    }
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Order {
    id: u64,
    items: Vec<String>,
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_are_decoded_by_their_content_type_at_every_attempt() {
    let scene = Scene::new().await;
    let order = || Order { id: 7, items: vec!["tea".into(), "カップ".into()] };
    let json = serde_json::to_vec(&order()).unwrap();
    let pack = rmp_serde::to_vec(&order()).unwrap();
    for (content_type, body) in [("application/json", json), ("application/msgpack", pack)] {
        let properties = BasicProperties::default().with_message_id(content_type.into());
        scene.publish(properties.with_content_type(content_type.into()), &body).await;
    }
    let journal = Journal::default();
    let handle = RetryConsumer::builder(scene.url(), WORK)
        .policy(quick())
        .on_event(journal.hook())
        .handler(move |job: Job| async move {
            anyhow::ensure!(job.decode::<Order>()? == order(), "another order");
            anyhow::ensure!(job.retry_count() == 1, "once more");
            Ok(())
        })
        .start()
        .await
        .unwrap();
    journal.is_done("application/json").await;
    journal.is_done("application/msgpack").await;
    journal.nothing_broke();
    handle.shutdown(Duration::from_secs(5)).await;
}
