//! A runtime that is blocked, or gone: connections outlive it, and its consumer's health says so.

use crate::support::{
    PATIENCE, Proxy, Scene, broker_addr, eventually, next_job, quick, table, within,
};
use anyhow::anyhow;
use lapin_retry::{Broker, Handle, Health, Job, Reconnect, Retry, RetryConsumer, Settled};
use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::{
    runtime::{Builder, Runtime},
    time::timeout,
};

const SECOND: Duration = Duration::from_secs(1);

/// The worker's, with two threads. The test has another.
fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// As when the worker's part of the process is over, and the rest goes on.
async fn end(runtime: Runtime) {
    // It waits for what blocks its threads.
    tokio::task::spawn_blocking(|| drop(runtime)).await.unwrap();
}

/// A consumer on another runtime.
async fn start<F>(
    runtime: &Runtime,
    scene: &Scene,
    broker: impl Into<Broker>,
    handler: impl Fn(Job) -> F + Send + Sync + 'static,
) -> Handle
where
    F: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    let consumer = RetryConsumer::builder(broker, "work")
        .settings(scene.settings())
        .reconnect(Reconnect::default().max(SECOND / 2))
        .handler(handler);
    within("started", runtime.spawn(consumer.start())).await.unwrap().unwrap()
}

/// The broker drops a client that is silent for two heartbeats.
#[tokio::test(flavor = "multi_thread")]
async fn handlers_that_block_all_threads_cost_no_connection_and_no_job_runs_twice() {
    let scene = Scene::new().await;
    let (worker, runs) = (runtime(), Arc::new(AtomicUsize::new(0)));
    let running = Arc::clone(&runs);
    let handler = move |job: Job| {
        let run = running.fetch_add(1, SeqCst);
        async move {
            if run < 2 {
                std::thread::sleep(10 * SECOND);
            }
            if job.id() == "0000" { Err(anyhow!("no")) } else { Ok(()) }
        }
    };
    let handle = start(&worker, &scene, format!("{}?heartbeat=2", scene.url()), handler).await;
    assert_eq!(handle.health(), Health::Running);
    let mut ids = scene.fill(4).await;
    eventually("health says so", PATIENCE, async || {
        matches!(handle.health(), Health::Unresponsive { .. })
    })
    .await;
    ids.remove("0000");
    eventually("all others are acked", PATIENCE, async || scene.journal.finished() == ids).await;
    eventually("healthy", PATIENCE, async || handle.health().is_healthy()).await;
    eventually("it is handed off", PATIENCE, async || scene.journal.handed_off().len() == 1).await;
    scene.holds("work", 0).await;
    scene.unacked(0).await;
    assert_eq!(scene.journal.disconnected(), 0);
    assert_eq!(runs.load(SeqCst), 4, "each once");
    within("shutdown", handle.shutdown(5 * SECOND)).await;
    end(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_outlives_the_runtime_that_used_it_first() {
    let scene = Scene::new().await;
    let broker = Broker::from(scene.url());
    let first = runtime();
    let handler = |job: Job| async move {
        if job.id() == "stays" {
            std::future::pending::<()>().await;
        }
        Ok(())
    };
    let handle = start(&first, &scene, &broker, handler).await;
    scene.job("1", table([]), b"job").await;
    scene.journal.is_done("1").await;
    scene.job("stays", table([]), b"job").await;
    scene.unacked(1).await;
    end(first).await;
    assert_eq!(handle.health(), Health::Stopped);
    assert!(within("it says so", handle.stopped()).await.is_err());

    let (second, begun) = (runtime(), Instant::now());
    let handle = start(&second, &scene, &broker, |_: Job| async { Ok(()) }).await;
    scene.job("2", table([]), b"job").await;
    scene.journal.is_done("2").await;
    assert!(begun.elapsed() < 5 * SECOND, "at once: {:?}", begun.elapsed());
    scene.journal.is_done("stays").await;
    assert_eq!(scene.journal.disconnected(), 0);
    assert_eq!(scene.journal.finished(), BTreeSet::from(["1", "2", "stays"].map(str::to_owned)));
    within("shutdown", handle.shutdown(5 * SECOND)).await;
    end(second).await;
}

/// A quorum queue forgets acks whose channel is closed too soon after.
#[tokio::test(flavor = "multi_thread")]
async fn acks_that_were_sent_outlive_their_runtime() {
    let scene = Scene::new().await;
    let ids = scene.fill(200).await;
    let worker = runtime();
    let _handle = start(&worker, &scene, scene.url(), |_: Job| async { Ok(()) }).await;
    eventually("all are acked", PATIENCE, async || scene.journal.finished() == ids).await;
    end(worker).await;
    eventually("its channel is closed", PATIENCE, async || {
        scene.vhost.api().queue("work").is_some_and(|queue| queue["consumers"] == 0)
    })
    .await;
    scene.unacked(0).await;
}

/// The one who opens a connection may have stopped: another runtime, that nobody drives any more.
#[tokio::test(flavor = "multi_thread")]
async fn an_attach_that_nobody_polls_any_more_keeps_no_other_from_the_connection() {
    let scene = Scene::new().await;
    let proxy = Proxy::start(broker_addr()).await;
    let broker = Broker::from(proxy.url(&scene.url()));
    proxy.stall(true);
    let mut first = Box::pin(Retry::attach(&broker, "work", quick()));
    assert!(timeout(SECOND, &mut first).await.is_err());
    proxy.stall(false);
    within("attached", Retry::attach(&broker, "work", quick())).await.unwrap();
    within("the first as well", first).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn receipts_say_that_the_runtime_which_attached_is_gone() {
    let scene = Scene::new().await;
    let worker = runtime();
    let attach = Retry::attach(scene.url(), "work", scene.settings());
    let retry = worker.spawn(attach).await.unwrap().unwrap();
    scene.fill(2).await;
    let mut consumer = crate::support::consume(&scene.channel, "work", 10).await;
    let (one, other) =
        (next_job(&retry, &mut consumer).await, next_job(&retry, &mut consumer).await);
    end(worker).await;
    let settled = within("settled", one.settle(Ok::<_, anyhow::Error>(()))).await.unwrap();
    assert_eq!(within("its receipt", settled.into_future()).await, Settled::Stale);
    let settled = within("settled", other.settle(Err(anyhow!("no")))).await.unwrap();
    assert_eq!(within("its receipt", settled.into_future()).await, Settled::Stale);
}
