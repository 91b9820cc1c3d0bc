//! Jobs whose ack is lost are delivered again. With `remember_done` they are not run again.

use crate::support::{
    PATIENCE, Proxy, Scene, WORK, broker_addr, connect, consume, count, eventually, within,
};
use futures_util::StreamExt;
use lapin_retry::{Builder, Event, Job, Retry, RetryConsumer};
use std::{collections::BTreeSet, time::Duration};
use tokio::sync::watch;

const JOBS: usize = 20;
const GRACE: Duration = Duration::from_secs(10);

fn already_done(scene: &Scene) -> Vec<String> {
    scene.journal.all(|event| match event {
        Event::AlreadyDone { job, .. } => Some(job.id().to_owned()),
        _ => None,
    })
}

/// As many handlers as there are jobs, so that one that is delivered again waits for its own.
fn worker(scene: &Scene, url: String, remembered: usize) -> Builder {
    let settings = scene.settings().remember_done(remembered);
    RetryConsumer::builder(url, WORK).settings(settings).prefetch(JOBS as u16)
}

/// A handler that waits for a gate, and succeeds.
fn gated(
    scene: &Scene,
    gate: &watch::Sender<bool>,
) -> impl Fn(Job) -> futures_util::future::BoxFuture<'static, anyhow::Result<()>> + Send + Sync + 'static
{
    let (journal, gate) = (scene.journal.clone(), gate.subscribe());
    move |job| {
        let (journal, mut gate) = (journal.clone(), gate.clone());
        Box::pin(async move {
            journal.begin(&job);
            gate.wait_for(|open| *open).await?;
            Ok(())
        })
    }
}

async fn until_run(scene: &Scene, times: usize) {
    eventually("the jobs run", PATIENCE, async || scene.journal.attempted() >= times).await;
}

/// Closes the consuming connection under running handlers, whose acks are refused then, and which
/// end as their jobs are delivered again.
async fn close_under_handlers(remembered: usize) -> (Scene, BTreeSet<String>) {
    let scene = Scene::new().await;
    let gate = watch::Sender::new(false);
    let builder = worker(&scene, scene.url(), remembered);
    let handle = builder.handler(gated(&scene, &gate)).start().await.unwrap();
    let ids = scene.fill(JOBS).await;
    until_run(&scene, JOBS).await;
    let name = scene.connection_called("lapin-retry consuming").await;
    scene.vhost.api().close_connection(&name);
    eventually("the loss is told", PATIENCE, async || scene.journal.disconnected() > 0).await;
    gate.send_replace(true);
    eventually("all are back", PATIENCE, async || {
        already_done(&scene).len() + scene.journal.done().len() >= JOBS
    })
    .await;
    within("the end", handle.shutdown(GRACE)).await;
    assert_eq!(scene.journal.count(|event| matches!(event, Event::Stale { .. })), JOBS);
    (scene, ids)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_ack_was_refused_is_acked_and_not_run_again() {
    let (scene, ids) = close_under_handlers(JOBS).await;
    assert_eq!(scene.journal.attempted(), JOBS);
    assert_eq!(already_done(&scene).len(), JOBS);
    assert_eq!(already_done(&scene).into_iter().collect::<BTreeSet<_>>(), ids);
    assert_eq!(count(&scene.channel, WORK).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn unless_it_is_asked_for_no_job_is_remembered() {
    let (scene, ids) = close_under_handlers(0).await;
    assert_eq!(scene.journal.attempted(), 2 * JOBS);
    assert!(already_done(&scene).is_empty());
    assert_eq!(scene.journal.done().len(), JOBS);
    assert_eq!(scene.journal.finished(), ids);
}

/// lapin has written the acks, so the jobs count as done; but none of them reaches the broker.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_ack_got_lost_on_the_way_is_acked_and_not_run_again() {
    let scene = Scene::new().await;
    let (gate, proxy) = (watch::Sender::new(false), Proxy::start(broker_addr()).await);
    let builder = worker(&scene, proxy.url(&scene.url()), JOBS);
    let handle = builder.handler(gated(&scene, &gate)).start().await.unwrap();
    let ids = scene.fill(JOBS).await;
    until_run(&scene, JOBS).await;
    proxy.stall(true);
    gate.send_replace(true);
    scene.journal.until_done(JOBS).await;
    proxy.cut().await;
    proxy.stall(false);
    eventually("all are back", PATIENCE, async || already_done(&scene).len() == JOBS).await;
    assert_eq!(already_done(&scene).into_iter().collect::<BTreeSet<_>>(), ids);
    within("the end", handle.shutdown(GRACE)).await;
    assert_eq!(scene.journal.attempted(), JOBS);
    assert_eq!(count(&scene.channel, WORK).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_and_a_job_that_was_given_back_unrun_are_run() {
    let scene = Scene::new().await;
    let settings = lapin_retry::Settings::new(crate::support::quick())
        .remember_done(JOBS)
        .on_event(scene.journal.hook());
    let handle = RetryConsumer::builder(scene.url(), WORK)
        .settings(settings)
        .handler(scene.journal.handler(|job| u32::from(job.body() == b"fails")))
        .start()
        .await
        .unwrap();
    // An id that is used again, for other jobs and for retries.
    for body in [b"first", b"fails", b"first"] {
        let done = scene.journal.done().len();
        scene.job("1", Default::default(), body).await;
        scene.journal.until_done(done + 1).await;
    }
    // And for one that somebody has looked at before.
    handle.shutdown(GRACE).await;
    scene.job("1", Default::default(), b"first").await;
    scene.vhost.api().peek(WORK, 1);
    let settings = scene.settings().remember_done(JOBS);
    let builder = RetryConsumer::builder(scene.url(), WORK).settings(settings);
    let handle = builder.handler(scene.journal.handler(|_| 0)).start().await.unwrap();
    scene.journal.until_done(4).await;
    handle.shutdown(GRACE).await;
    assert!(scene.journal.attempts().last().unwrap().job.redelivered());
    assert_eq!(scene.journal.attempted(), 5);
    assert!(already_done(&scene).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn in_the_users_own_loop_a_job_that_is_done_is_not_given_out_again() {
    let scene = Scene::new().await;
    let proxy = Proxy::start(broker_addr()).await;
    let settings = scene.settings().remember_done(JOBS);
    let retry = Retry::attach(scene.url(), WORK, settings).await.unwrap();
    let connection = connect(&proxy.url(&scene.url())).await;
    let channel = connection.create_channel().await.unwrap();
    let mut jobs = retry.jobs(consume(&channel, WORK, 2).await);
    scene.job("done", Default::default(), b"job").await;
    scene.job("unrun", Default::default(), b"job").await;
    let job = within("a job", jobs.next()).await.unwrap().unwrap();
    proxy.stall(true);
    job.settle(anyhow::Ok(())).await.unwrap();
    scene.journal.until_done(1).await;
    proxy.cut().await;
    proxy.stall(false);

    let connection = connect(&proxy.url(&scene.url())).await;
    let channel = connection.create_channel().await.unwrap();
    let mut jobs = retry.jobs(consume(&channel, WORK, 2).await);
    let job = within("the other job", jobs.next()).await.unwrap().unwrap();
    assert_eq!((job.id(), job.redelivered()), ("unrun", true));
    job.settle(anyhow::Ok(())).await.unwrap();
    retry.close().await.unwrap();
    assert_eq!(already_done(&scene), ["done"]);
    channel.close(200, "done".into()).await.unwrap();
    assert_eq!(count(&scene.channel, WORK).await, 0);
}
