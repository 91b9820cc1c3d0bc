//! A runtime that is blocked, or gone: connections outlive it, and health and log say so.

use crate::support::{PATIENCE, Scene, eventually, table, within};
use lapin_retry::{Broker, Handle, Job, Reconnect, RetryConsumer};
use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::runtime::{Builder, Runtime};

/// Of the worker, and not the test's.
fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// As when the worker's process goes on without it. Elsewhere, since it waits for what is blocked.
async fn end(runtime: Runtime) {
    tokio::task::spawn_blocking(|| drop(runtime)).await.unwrap();
}

/// A consumer on another runtime.
async fn start(
    runtime: &Runtime,
    scene: &Scene,
    broker: impl Into<Broker>,
    handler: impl Fn(&Job) + Send + Sync + 'static,
) -> Handle {
    let handler = Arc::new(handler);
    let consumer = RetryConsumer::builder(broker, "work")
        .settings(scene.settings())
        .reconnect(Reconnect::default().max(Duration::from_millis(500)))
        .handler(move |job: Job| {
            let handler = Arc::clone(&handler);
            async move {
                handler(&job);
                Ok(())
            }
        });
    within("started", runtime.spawn(consumer.start())).await.unwrap().unwrap()
}

/// The broker drops a client that is silent for two heartbeats.
#[tokio::test(flavor = "multi_thread")]
async fn handlers_that_block_all_threads_cost_no_connection_and_no_job_runs_twice() {
    let scene = Scene::new().await;
    let (worker, runs) = (runtime(), Arc::new(AtomicUsize::new(0)));
    let running = Arc::clone(&runs);
    let handle = start(&worker, &scene, format!("{}?heartbeat=1", scene.url()), move |_| {
        if running.fetch_add(1, SeqCst) < 2 {
            std::thread::sleep(Duration::from_secs(8));
        }
    })
    .await;
    let ids = scene.fill(4).await;
    eventually("all are acked", PATIENCE, async || scene.journal.finished() == ids).await;
    scene.holds("work", 0).await;
    scene.unacked(0).await;
    assert_eq!(scene.journal.disconnected(), 0);
    assert_eq!(runs.load(SeqCst), ids.len(), "each once");
    within("shutdown", handle.shutdown(Duration::from_secs(5))).await;
    end(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_outlives_the_runtime_that_used_it_first() {
    let scene = Scene::new().await;
    let broker = Broker::from(scene.url());
    let first = runtime();
    let handle = start(&first, &scene, &broker, |_| ()).await;
    scene.job("1", table([]), b"job").await;
    scene.journal.is_done("1").await;
    end(first).await;
    assert!(within("it says so", handle.stopped()).await.is_err());

    let second = runtime();
    let begun = std::time::Instant::now();
    let handle = start(&second, &scene, &broker, |_| ()).await;
    scene.job("2", table([]), b"job").await;
    scene.journal.is_done("2").await;
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    assert_eq!(scene.journal.disconnected(), 0);
    assert_eq!(scene.journal.finished(), BTreeSet::from(["1", "2"].map(str::to_owned)));
    within("shutdown", handle.shutdown(Duration::from_secs(5))).await;
    end(second).await;
}
