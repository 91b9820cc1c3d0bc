//! `close` and `shutdown` say Ok only when no delivery is left that is unacked and still ours; and a
//! consumer that has stopped takes no other settings.

use crate::support::{
    PATIENCE, Scene, WORK, connect, consume, count, eventually, next_job, quick, within,
};
use lapin::{Channel, Connection, Consumer};
use lapin_retry::{ErrorKind, Job, Retry, RetryConsumer, UnsettledJob};
use std::{sync::mpsc, time::Duration};
use tokio::time::Instant;

/// A loop of the user's own that has taken its only job.
struct UserWithAJob {
    scene: Scene,
    retry: Retry,
    connection: Connection,
    channel: Channel,
    /// Dropped, it would be cancelled.
    consumer: Consumer,
    job: UnsettledJob,
}

impl UserWithAJob {
    async fn start() -> Self {
        let scene = Scene::new().await;
        scene.fill(1).await;
        let retry = Retry::attach(scene.url(), WORK, scene.settings()).await.unwrap();
        let connection = connect(&scene.url()).await;
        let channel = connection.create_channel().await.unwrap();
        let mut consumer = consume(&channel, WORK, 1).await;
        let job = next_job(&retry, &mut consumer).await;
        Self { scene, retry, connection, channel, consumer, job }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn close_waits_for_a_job_that_is_not_settled_yet() {
    let UserWithAJob { scene, retry, connection, channel: _channel, consumer: _consumer, job } =
        UserWithAJob::start().await;
    let settling = tokio::spawn(async move {
        // Longer than a close that waits for nothing takes.
        tokio::time::sleep(Duration::from_secs(3)).await;
        job.settle(anyhow::Ok(())).await.unwrap();
    });
    within("the close", retry.close()).await.unwrap();
    assert_eq!(scene.journal.done(), ["0000"]);
    settling.await.unwrap();
    connection.close(200, "done".into()).await.unwrap();
    scene.holds(WORK, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn close_does_not_wait_for_a_job_that_the_broker_has_again() {
    let UserWithAJob { scene, retry, connection: _connection, channel, consumer: _consumer, job } =
        UserWithAJob::start().await;
    channel.close(200, "lost".into()).await.unwrap();
    within("the close", retry.close()).await.unwrap();
    assert_eq!(job.id(), "0000");
    scene.holds(WORK, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_that_leaves_a_job_with_a_handler_that_blocks_says_so() {
    let scene = Scene::new().await;
    scene.fill(1).await;
    let (unblock, blocked) = mpsc::channel::<()>();
    let blocked = std::sync::Mutex::new(blocked);
    let journal = scene.journal.clone();
    let handle = RetryConsumer::builder(scene.url(), WORK)
        .settings(scene.settings())
        .handler(move |job: Job| {
            journal.begin(&job);
            // The thread, not the task.
            let _ = blocked.lock().unwrap().recv();
            std::future::ready(Ok(()))
        })
        .start()
        .await
        .unwrap();
    eventually("it runs", PATIENCE, async || scene.journal.attempted() == 1).await;
    let began = Instant::now();
    within("the end", handle.shutdown(Duration::from_millis(100))).await;
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    let error = handle.stopped().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert!(error.to_string().contains("1 job"), "{error}");
    drop(unblock);
    eventually("it is back", PATIENCE, async || count(&scene.channel, WORK).await == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_after_the_stop_is_an_error_and_declares_nothing() {
    let scene = Scene::new().await;
    let builder = RetryConsumer::builder(scene.url(), WORK).settings(scene.settings());
    let handle = builder.handler(|_: Job| std::future::ready(Ok(()))).start().await.unwrap();
    let before = scene.queues();
    within("the end", handle.shutdown(Duration::ZERO)).await;
    let error = handle.reload(quick()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert!(error.to_string().contains(WORK), "{error}");
    assert_eq!(scene.queues(), before);
}
