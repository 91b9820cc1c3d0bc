//! A delivery that the broker took back is no longer ours, though its channel may live on: nothing is
//! acked, published or reported as done for it.

use crate::support::{LANE, PATIENCE, Proxy, Scene, WORK, broker_addr, count, eventually, within};
use lapin::options::QueueDeleteOptions;
use lapin_retry::{Event, Handle, Job, RetryConsumer, Settings};
use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};
use tokio::sync::watch;

const GRACE: Duration = Duration::from_secs(10);

/// A worker with one job that runs until the gate opens, and one that waits.
struct Worker {
    scene: Scene,
    proxy: Proxy,
    handle: Handle,
    gate: watch::Sender<bool>,
}

impl Worker {
    /// It pauses as soon as it has lost its consumer, so that nothing is delivered again before the
    /// test says so. The first run ends with `fails`, all others succeed.
    async fn start(fails: bool) -> Self {
        let (scene, proxy) = (Scene::new().await, Proxy::start(broker_addr()).await);
        let (gate, pausing) = (watch::Sender::new(false), Arc::new(OnceLock::<Handle>::new()));
        let handle = RetryConsumer::builder(proxy.url(&scene.url()), WORK)
            .settings(pausing_once_lost(scene.settings().remember_done(10), &pausing))
            .prefetch(2)
            .concurrency(1)
            .handler(gated(&scene, &gate, fails))
            .start()
            .await
            .unwrap();
        pausing.set(handle.clone()).unwrap();
        scene.fill(2).await;
        eventually("one runs", PATIENCE, async || scene.journal.attempted() == 1).await;
        scene.unacked(2).await;
        Self { scene, proxy, handle, gate }
    }

    async fn until_lost(&self) {
        let lost = "the loss is reported";
        eventually(lost, PATIENCE, async || self.scene.journal.disconnected() > 0).await;
    }

    /// The handler returns when its delivery is not ours any more, and both jobs are ready again:
    /// there were two messages, and there are two.
    async fn ends_stale(&self) {
        self.gate.send_replace(true);
        // The other one never ran.
        self.scene.until_stale(2).await;
        self.scene.holds(WORK, 2).await;
        assert_eq!(count(&self.scene.channel, LANE).await, 0, "a copy is one too many");
        assert_eq!(self.scene.journal.done(), Vec::<String>::new());
    }

    /// What was taken back is delivered again.
    async fn goes_on(self) -> Scene {
        self.handle.resume();
        eventually("both are through", PATIENCE, async || {
            let through =
                |event: &Event| matches!(event, Event::Done { .. } | Event::AlreadyDone { .. });
            self.scene.journal.count(through) == 2
        })
        .await;
        within("the end", self.handle.shutdown(GRACE)).await;
        self.scene.unacked(0).await;
        let copies = |event: &Event| {
            matches!(event, Event::Retried { .. } | Event::Buried { .. } | Event::Duplicated { .. })
        };
        assert_eq!(self.scene.journal.count(copies), 0);
        self.scene
    }
}

fn pausing_once_lost(settings: Settings, handle: &Arc<OnceLock<Handle>>) -> Settings {
    let handle = Arc::clone(handle);
    settings.on_event(move |event| {
        if let (Event::Disconnected { .. }, Some(handle)) = (event, handle.get()) {
            handle.pause();
        }
    })
}

fn gated(
    scene: &Scene,
    gate: &watch::Sender<bool>,
    fails: bool,
) -> impl Fn(Job) -> futures_util::future::BoxFuture<'static, anyhow::Result<()>> + Send + Sync + 'static
{
    let (journal, gate) = (scene.journal.clone(), gate.subscribe());
    move |job| {
        let (journal, mut gate) = (journal.clone(), gate.clone());
        Box::pin(async move {
            let first = journal.begin(&job) == 1;
            gate.wait_for(|open| *open).await?;
            anyhow::ensure!(!(first && fails), "too late");
            Ok(())
        })
    }
}

impl Scene {
    async fn until_stale(&self, jobs: usize) {
        eventually("they are stale", PATIENCE, async || {
            self.journal.count(|event| matches!(event, Event::Stale { .. })) == jobs
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_cancel_by_the_broker_a_failure_makes_no_copy() {
    let worker = Worker::start(true).await;
    worker.proxy.cancel_consumers();
    worker.until_lost().await;
    worker.ends_stale().await;
    let scene = worker.goes_on().await;
    assert_eq!(scene.journal.attempted(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_cancel_by_the_broker_a_success_is_remembered_but_not_done() {
    let worker = Worker::start(false).await;
    worker.proxy.cancel_consumers();
    worker.until_lost().await;
    worker.ends_stale().await;
    let scene = worker.goes_on().await;
    assert_eq!(scene.journal.attempted(), 2, "its work was done");
    assert_eq!(scene.journal.count(|event| matches!(event, Event::AlreadyDone { .. })), 1);
}

/// As RabbitMQ 4.3 does when a second delivery reaches the consumer timeout.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_is_cancelled_twice_is_lost_once() {
    let worker = Worker::start(true).await;
    worker.proxy.cancel_consumers();
    worker.until_lost().await;
    worker.proxy.cancel_consumers();
    worker.ends_stale().await;
    let scene = worker.goes_on().await;
    assert_eq!((scene.journal.attempted(), scene.journal.disconnected()), (3, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_closed_channel_a_failure_makes_no_copy() {
    let worker = Worker::start(true).await;
    worker.proxy.close_channels(406, "PRECONDITION_FAILED - unknown delivery tag 7");
    worker.until_lost().await;
    worker.ends_stale().await;
    let scene = worker.goes_on().await;
    assert_eq!(scene.journal.attempted(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_cut_connection_a_failure_makes_no_copy() {
    let worker = Worker::start(true).await;
    worker.proxy.cut().await;
    worker.until_lost().await;
    worker.ends_stale().await;
    let scene = worker.goes_on().await;
    assert_eq!(scene.journal.attempted(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_queue_is_deleted_a_failure_makes_no_copy() {
    let worker = Worker::start(true).await;
    let options = QueueDeleteOptions::default();
    worker.scene.channel.queue_delete(WORK.into(), options).await.unwrap();
    worker.until_lost().await;
    worker.gate.send_replace(true);
    worker.scene.until_stale(2).await;
    within("the end", worker.handle.shutdown(GRACE)).await;
    // The jobs went with their queue.
    assert_eq!(count(&worker.scene.channel, LANE).await, 0);
    assert_eq!(worker.scene.journal.done(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_of_our_own_revokes_nothing_that_runs() {
    let worker = Worker::start(false).await;
    worker.handle.pause();
    // The one that waits is requeued.
    worker.scene.holds(WORK, 1).await;
    worker.gate.send_replace(true);
    worker.scene.journal.until_done(1).await;
    let scene = worker.goes_on().await;
    assert_eq!((scene.journal.attempted(), scene.journal.done().len()), (2, 2));
    scene.journal.nothing_broke();
}
