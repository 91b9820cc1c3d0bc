//! The same in a user's own loop, where the channel is the user's, and lapin reports a cancel by the
//! broker like one by the user.

use crate::support::{
    LANE, PATIENCE, Proxy, Scene, WORK, broker_addr, connect, consume, count, eventually, next_job,
    within,
};
use futures_util::StreamExt;
use lapin::{
    Channel, Connection,
    options::{BasicConsumeOptions, QueueDeleteOptions},
    types::FieldTable,
};
use lapin_retry::{ErrorKind, Event, Jobs, Retry, Settled, UnsettledJob};

struct Loop {
    scene: Scene,
    proxy: Proxy,
    retry: Retry,
    channel: Channel,
    _connection: Connection,
}

impl Loop {
    async fn start() -> Self {
        let (scene, proxy) = (Scene::new().await, Proxy::start(broker_addr()).await);
        let retry = Retry::attach(scene.url(), WORK, scene.settings()).await.unwrap();
        let connection = connect(&proxy.url(&scene.url())).await;
        let channel = connection.create_channel().await.unwrap();
        Self { scene, proxy, retry, channel, _connection: connection }
    }

    /// Ten jobs are prefetched, and one of them is given out.
    async fn one_of_ten(&self) -> (Jobs, UnsettledJob) {
        let mut jobs = self.jobs().await;
        self.scene.fill(10).await;
        let job = next(&mut jobs).await;
        self.scene.unacked(10).await;
        (jobs, job)
    }

    async fn jobs(&self) -> Jobs {
        self.retry.jobs(consume(&self.channel, WORK, 10).await)
    }

    /// There were as many messages before, and no copy is beside them.
    async fn all_are_back(&self, jobs: usize) {
        self.channel.close(200, "done".into()).await.unwrap();
        self.scene.holds(WORK, jobs).await;
        assert_eq!(count(&self.scene.channel, LANE).await, 0, "a copy is one too many");
        assert_eq!(self.scene.journal.done(), Vec::<String>::new());
    }
}

async fn next(jobs: &mut Jobs) -> UnsettledJob {
    within("a job", jobs.next()).await.expect("no end").expect("no error")
}

async fn settled(job: UnsettledJob, result: anyhow::Result<()>) -> Settled {
    let receipt = job.settle(result).await.unwrap();
    within("the receipt", receipt.into_future()).await
}

fn too_late() -> anyhow::Result<()> {
    Err(anyhow::anyhow!("too late"))
}

/// Nobody polls the stream while the handler runs.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_by_the_broker_is_noticed_while_the_handler_runs() {
    let user = Loop::start().await;
    let mut jobs = user.jobs().await;
    user.scene.fill(3).await;
    let (failure, success) = (next(&mut jobs).await, next(&mut jobs).await);
    user.scene.unacked(3).await;
    user.proxy.cancel_consumers();
    // A frame that the client answers only after it has read the one before.
    user.channel.basic_qos(10, Default::default()).await.unwrap();
    assert_eq!(settled(failure, too_late()).await, Settled::Stale);
    assert_eq!(settled(success, Ok(())).await, Settled::Stale);
    for _ in 0..2 {
        assert!(within("the end", jobs.next()).await.is_none());
    }
    let stale = user.scene.journal.count(|event| matches!(event, Event::Stale { .. }));
    assert_eq!(stale, 3, "the one that waited, too");
    assert!(user.channel.status().connected(), "it is the user's");
    user.all_are_back(3).await;
}

/// The broker closes a channel on which a revoked delivery is acked, at the second one.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_revoked_is_not_acked_by_the_next_consumer_on_its_channel() {
    let user = Loop::start().await;
    let mut jobs = user.jobs().await;
    user.scene.fill(3).await;
    let revoked = [next(&mut jobs).await, next(&mut jobs).await, next(&mut jobs).await];
    user.proxy.cancel_consumers();
    assert!(within("the end", jobs.next()).await.is_none());
    let mut jobs = user.jobs().await;
    user.scene.fill(20).await;
    for _ in 0..20 {
        next(&mut jobs).await.settle(anyhow::Ok(())).await.unwrap();
    }
    for job in revoked {
        assert_eq!(settled(job, Ok(())).await, Settled::Stale);
    }
    user.scene.journal.until_done(20).await;
    user.scene.unacked(3).await;
    user.channel.close(200, "done".into()).await.unwrap();
    user.scene.holds(WORK, 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_accepted_job_is_stale_once_the_user_says_so() {
    let user = Loop::start().await;
    let mut consumer = consume(&user.channel, WORK, 10).await;
    user.scene.fill(2).await;
    let failure = next_job(&user.retry, &mut consumer).await;
    let success = next_job(&user.retry, &mut consumer).await;
    user.proxy.cancel_consumers();
    assert!(within("the end", consumer.next()).await.is_none());
    user.retry.revoked();
    assert_eq!(settled(failure, too_late()).await, Settled::Stale);
    assert_eq!(settled(success, Ok(())).await, Settled::Stale);
    // Another consumer is another matter.
    let mut consumer = consume(&user.channel, WORK, 10).await;
    user.scene.fill(1).await;
    let job = next_job(&user.retry, &mut consumer).await;
    assert_eq!(settled(job, Ok(())).await, Settled::Acked);
    user.scene.unacked(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_queue_ends_the_loop_with_an_error() {
    let user = Loop::start().await;
    let mut jobs = user.jobs().await;
    user.scene.fill(1).await;
    let job = next(&mut jobs).await;
    user.scene.channel.queue_delete(WORK.into(), QueueDeleteOptions::default()).await.unwrap();
    let error = within("the end", jobs.next()).await.expect("an error").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::MissingQueue);
    assert!(error.to_string().contains(r#""work": the queue was deleted"#), "{error}");
    assert!(within("the end", jobs.next()).await.is_none());
    assert_eq!(settled(job, too_late()).await, Settled::Stale);
    assert_eq!(count(&user.scene.channel, LANE).await, 0, "its job went with the queue");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_of_our_own_requeues_what_was_not_given_out() {
    let user = Loop::start().await;
    let (mut jobs, job) = user.one_of_ten().await;
    within("the cancel", jobs.cancel()).await;
    assert!(within("the end", jobs.next()).await.is_none());
    user.scene.holds(WORK, 9).await;
    assert_eq!(settled(job, Ok(())).await, Settled::Acked);
    user.scene.journal.nothing_broke();
    eventually("no consumer is left", PATIENCE, async || {
        user.scene.vhost.api().consumers().is_empty()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_stream_requeues_what_was_not_given_out() {
    let user = Loop::start().await;
    let (jobs, job) = user.one_of_ten().await;
    drop(jobs);
    user.scene.holds(WORK, 9).await;
    assert_eq!(settled(job, Ok(())).await, Settled::Acked);
    user.scene.journal.nothing_broke();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_without_acks_is_named() {
    let user = Loop::start().await;
    let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
    let (queue, tag) = (WORK.into(), "".into());
    let consumer = user.channel.basic_consume(queue, tag, options, FieldTable::default()).await;
    let mut jobs = user.retry.jobs(consumer.unwrap());
    user.scene.fill(1).await;
    next(&mut jobs).await.settle(anyhow::Ok(())).await.unwrap();
    let error = within("the end", jobs.next()).await.expect("an error").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.to_string().contains("no_ack = false"), "{error}");
}
