//! The end of the work: what was begun is finished, what was not is given back, nothing is lost.

use crate::support::{
    LANE, PATIENCE, Proxy, Scene, broker_addr, consume, eventually, next, next_job, settle_all,
    within,
};
use anyhow::anyhow;
use futures_util::FutureExt;
use lapin::options::BasicAckOptions;
use lapin_retry::{ErrorKind, Event, Handle, Job, Retry, RetryConsumer, Settled, busy};
use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{sync::Semaphore, time::Instant};

#[tokio::test(flavor = "multi_thread")]
async fn close_waits_for_the_hand_offs_that_were_begun() {
    let scene = Scene::new().await;
    let ids = scene.fill(50).await;
    let publishing = Proxy::start(broker_addr()).await;
    let retry =
        Retry::attach(publishing.url(&scene.url()), "work", scene.settings()).await.unwrap();
    publishing.swallow_confirms(true);
    let channel = scene.connection.create_channel().await.unwrap();
    let _running = settle_all(&retry, consume(&channel, "work", 50).await, |_| Err(anyhow!("no")));
    eventually("all are undecided", PATIENCE, async || scene.journal.undecided() >= 50).await;

    let closing = tokio::spawn(retry.close());
    let undecided = scene.journal.undecided();
    eventually("they are tried again", PATIENCE, async || {
        scene.journal.undecided() >= undecided + 50
    })
    .await;
    assert!(!closing.is_finished());
    assert_eq!(scene.journal.handed_off(), BTreeSet::new());

    publishing.swallow_confirms(false);
    within("close", closing).await.unwrap().unwrap();
    assert_eq!(scene.journal.handed_off(), ids);
    channel.close(200, "done".into()).await.unwrap();
    scene.holds("work", 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn close_gives_up_on_a_hand_off_that_does_not_succeed_and_its_job_is_not_lost() {
    let scene = Scene::new().await;
    scene.fill(100).await;
    let publishing = Proxy::start(broker_addr()).await;
    // More jobs than slots, and every try takes long.
    let settings = scene.settings().hand_offs(4).confirm_timeout(Duration::from_secs(3));
    let retry = Retry::attach(publishing.url(&scene.url()), "work", settings).await.unwrap();
    publishing.swallow_confirms(true);
    let channel = scene.connection.create_channel().await.unwrap();
    let mut consumer = consume(&channel, "work", 100).await;
    let mut settling = Vec::new();
    for _ in 0..100 {
        let job = next_job(&retry, &mut consumer).await;
        settling.push(tokio::spawn(job.settle(Err(anyhow!("no")))));
    }
    eventually("a try failed", PATIENCE, async || scene.journal.undecided() > 0).await;

    let begun = Instant::now();
    let closed = tokio::time::timeout(Duration::from_secs(60), retry.close()).await;
    let error = closed.expect("25 s, and a confirm timeout").expect_err("nothing was confirmed");
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert!(begun.elapsed() >= Duration::from_secs(25), "it is patient first");
    channel.close(200, "done".into()).await.unwrap();
    scene.holds("work", 100).await;
    // Nothing goes on after it.
    let tries = scene.journal.undecided();
    publishing.swallow_confirms(false);
    for settle in settling {
        let receipt = within("settle", settle).await.unwrap().unwrap();
        within("its receipt", receipt.into_future()).await;
    }
    assert_eq!(scene.journal.handed_off(), BTreeSet::new());
    assert!(scene.journal.undecided() <= tries + 4);
}

/// Whoever waits for a receipt does not wait for the confirm of a broker that is silent.
#[tokio::test(flavor = "multi_thread")]
async fn close_gives_up_on_a_first_try_and_says_so() {
    let scene = Scene::new().await;
    scene.fill(2).await;
    let publishing = Proxy::start(broker_addr()).await;
    let settings = scene.settings().confirm_timeout(Duration::from_secs(300));
    let retry = Retry::attach(publishing.url(&scene.url()), "work", settings).await.unwrap();
    let channel = scene.connection.create_channel().await.unwrap();
    let mut consumer = consume(&channel, "work", 2).await;
    let mut receipts = Vec::new();
    for _ in 0..2 {
        let job = next_job(&retry, &mut consumer).await;
        receipts.push(within("settle", job.settle(Err(anyhow!("no")))).await.unwrap());
        // The first goes through, so that the way is open for the second.
        eventually("it is in the lane", PATIENCE, async || scene.journal.handed_off().len() == 1)
            .await;
        publishing.swallow_confirms(true);
    }
    let second = receipts.pop().unwrap();
    let closed = tokio::time::timeout(Duration::from_secs(60), retry.close()).await;
    assert_eq!(closed.expect("25 s").expect_err("no confirm").kind(), ErrorKind::Closed);
    let settled = within("its receipt", second.into_future()).await;
    assert_eq!(settled, Settled::Stale);
    // A confirm that comes now changes nothing of that.
    publishing.swallow_confirms(false);
    channel.close(200, "done".into()).await.unwrap();
    scene.holds("work", 1).await;
    assert_eq!(scene.journal.count(|event| matches!(event, Event::Stale { .. })), 1);
}

/// The ladder for busy jobs is made by the first of them, and a broker that is silent makes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn close_gives_up_while_a_queue_is_being_made() {
    let scene = Scene::new().await;
    scene.fill(1).await;
    let publishing = Proxy::start(broker_addr()).await;
    let retry =
        Retry::attach(publishing.url(&scene.url()), "work", scene.settings()).await.unwrap();
    let channel = scene.connection.create_channel().await.unwrap();
    let mut consumer = consume(&channel, "work", 1).await;
    let job = next_job(&retry, &mut consumer).await;
    publishing.stall(true);
    let receipt = within("settle", job.settle(Err(busy(anyhow!("taken"))))).await.unwrap();
    let closed = tokio::time::timeout(Duration::from_secs(60), retry.close()).await;
    assert_eq!(closed.expect("25 s").expect_err("nothing is made").kind(), ErrorKind::Closed);
    assert_eq!(receipt.into_future().now_or_never(), Some(Settled::Stale));
    channel.close(200, "done".into()).await.unwrap();
    scene.holds("work", 1).await;
}

/// `close` waits a little when nothing is left to do, so that answers are read.
#[tokio::test(flavor = "multi_thread")]
async fn close_waits_for_what_is_settled_while_it_was_about_to_end() {
    let scene = Scene::new().await;
    scene.fill(2).await;
    let publishing = Proxy::start(broker_addr()).await;
    let settings = scene.settings().confirm_timeout(Duration::from_secs(60));
    let retry = Retry::attach(publishing.url(&scene.url()), "work", settings).await.unwrap();
    let channel = scene.connection.create_channel().await.unwrap();
    let mut consumer = consume(&channel, "work", 2).await;
    let first = next_job(&retry, &mut consumer).await;
    let second = next_job(&retry, &mut consumer).await;
    let receipt = within("settle", first.settle(Err(anyhow!("no")))).await.unwrap();
    within("its receipt", receipt.into_future()).await;
    publishing.swallow_confirms(true);
    let closing = tokio::spawn(retry.close());
    tokio::time::sleep(Duration::from_millis(300)).await;
    let receipt = within("settle", second.settle(Err(anyhow!("no")))).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!closing.is_finished(), "there is no confirm yet");
    publishing.swallow_confirms(false);
    publishing.cut().await;
    within("close", closing).await.unwrap().unwrap();
    assert!(matches!(receipt.into_future().now_or_never(), Some(Settled::Retried { .. })));
}

/// A consumer whose handlers wait at a gate, and which jobs were begun.
struct Worker {
    handle: Handle,
    gate: Arc<Semaphore>,
    begun: Arc<Mutex<Vec<String>>>,
}

impl Worker {
    /// Starts to run `concurrency` of the `prefetch` jobs that it was sent.
    async fn start(scene: &Scene, url: String, prefetch: u16, concurrency: usize) -> Self {
        let gate = Arc::new(Semaphore::new(0));
        let begun = Arc::new(Mutex::new(Vec::new()));
        let (at, note) = (Arc::clone(&gate), Arc::clone(&begun));
        let handle = RetryConsumer::builder(url, "work")
            .settings(scene.settings())
            .prefetch(prefetch)
            .concurrency(concurrency)
            .handler(move |job: Job| {
                let (at, note) = (Arc::clone(&at), Arc::clone(&note));
                async move {
                    note.lock().unwrap().push(job.id().to_owned());
                    at.acquire().await?.forget();
                    if job.id().ends_with('0') { Err(anyhow!("no")) } else { Ok(()) }
                }
            })
            .start()
            .await
            .unwrap();
        let worker = Self { handle, gate, begun };
        eventually("they are running", PATIENCE, async || worker.begun().len() == concurrency)
            .await;
        worker
    }

    fn begun(&self) -> Vec<String> {
        self.begun.lock().unwrap().clone()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_finishes_running_jobs_and_gives_waiting_ones_to_another_consumer() {
    let scene = Scene::new().await;
    let ids = scene.fill(60).await;
    let worker = Worker::start(&scene, scene.url(), 50, 10).await;
    let shutdown = tokio::spawn({
        let handle = worker.handle.clone();
        async move { handle.shutdown(Duration::from_secs(60)).await }
    });
    let other = scene.connection.create_channel().await.unwrap();
    let mut consumer = consume(&other, "work", 60).await;
    let mut elsewhere = BTreeSet::new();
    for _ in 0..50 {
        let delivery = next(&mut consumer).await;
        elsewhere.insert(delivery.properties.message_id().as_ref().unwrap().to_string());
        delivery.ack(BasicAckOptions::default()).await.unwrap();
    }
    assert!(!shutdown.is_finished(), "ten are running");
    worker.gate.add_permits(10);
    within("shutdown", shutdown).await.unwrap();

    let mut here = scene.journal.finished();
    here.extend(scene.journal.handed_off());
    let begun = worker.begun();
    assert_eq!(begun.len(), 10, "none was begun after");
    assert_eq!(begun.into_iter().collect::<BTreeSet<_>>(), here);
    assert!(here.is_disjoint(&elsewhere));
    assert_eq!(&here | &elsewhere, ids);
    assert_eq!(scene.look(LANE).await.len(), scene.journal.handed_off().len());
    other.close(200, "done".into()).await.unwrap();
    scene.holds("work", 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_cuts_what_outlasts_its_grace_and_gives_it_back() {
    let scene = Scene::new().await;
    let ids = scene.fill(60).await;
    let worker = Worker::start(&scene, scene.url(), 50, 10).await;
    within("shutdown", worker.handle.shutdown(Duration::from_millis(300))).await;
    assert_eq!(worker.begun().len(), 10);
    scene.holds("work", 60).await;
    assert_eq!(scene.look("work").await.into_iter().collect::<BTreeSet<_>>(), ids);
    let given_back = |event: &Event| matches!(event, Event::GivenBack { .. });
    assert_eq!(scene.journal.count(given_back), 10);
    assert_eq!(scene.journal.finished().len() + scene.journal.handed_off().len(), 0);
    within("a second one", worker.handle.shutdown(Duration::ZERO)).await;
}

/// The slots are taken by hand-offs that are not confirmed; the other outcomes wait for one.
#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_ends_though_no_hand_off_succeeds_and_nothing_is_lost() {
    let scene = Scene::new().await;
    let ids = scene.fill(60).await;
    let proxy = Proxy::start(broker_addr()).await;
    proxy.swallow_confirms(true);
    let settings = scene.settings().hand_offs(2).confirm_timeout(Duration::from_secs(2));
    let handle = RetryConsumer::builder(proxy.url(&scene.url()), "work")
        .settings(settings)
        .prefetch(60)
        .handler(|_: Job| async { Err(anyhow!("no")) })
        .start()
        .await
        .unwrap();
    eventually("a try failed", PATIENCE, async || scene.journal.undecided() > 0).await;
    // The grace, 5 s for the hand-offs, a confirm timeout: far from 60 jobs' turns at two slots.
    within("shutdown", handle.shutdown(Duration::from_secs(1))).await;
    assert_eq!(scene.journal.handed_off(), BTreeSet::new());
    scene.holds("work", 60).await;
    assert_eq!(scene.look("work").await.into_iter().collect::<BTreeSet<_>>(), ids);
}

/// Neither for an answer, nor for the wait before the next try.
#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_does_not_wait_for_a_broker_that_is_away() {
    let scene = Scene::new().await;
    let ids = scene.fill(20).await;
    let proxy = Proxy::start(broker_addr()).await;
    let worker = Worker::start(&scene, proxy.url(&scene.url()), 20, 10).await;
    proxy.refuse(true);
    proxy.cut().await;
    eventually("it is missed", PATIENCE, async || scene.journal.disconnected() >= 3).await;
    let begun = Instant::now();
    let shutdown = tokio::spawn({
        let handle = worker.handle.clone();
        async move { handle.shutdown(Duration::from_secs(60)).await }
    });
    worker.gate.add_permits(10);
    within("shutdown", shutdown).await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    within("how it went", worker.handle.stopped()).await.unwrap();
    assert_eq!(worker.begun().len(), 10, "none was begun after");
    scene.holds("work", 20).await;
    assert_eq!(scene.look("work").await.into_iter().collect::<BTreeSet<_>>(), ids);
    assert!(scene.journal.handed_off().is_empty());
}

/// Neither cancel, nack nor close is answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_keeps_its_grace_with_a_broker_that_is_frozen() {
    let scene = Scene::new().await;
    scene.fill(20).await;
    let proxy = Proxy::start(broker_addr()).await;
    let worker = Worker::start(&scene, proxy.url(&scene.url()), 20, 10).await;
    proxy.stall(true);
    let begun = Instant::now();
    within("shutdown", worker.handle.shutdown(Duration::from_secs(2))).await;
    // And 6 s, and what a busy machine adds.
    assert!(begun.elapsed() < Duration::from_secs(11), "{:?}", begun.elapsed());
    proxy.cut().await;
    proxy.stall(false);
    scene.holds("work", 20).await;
}
