//! A hand-off that fails for long: nothing more is taken, and no job is lost, run twice or dropped.

use crate::{
    support::{
        BURIED, PATIENCE, User, WORK, connect, consume, count, declare_work_queue, eventually,
        steps, try_publish, within,
    },
    workshop::{Workshop, ms},
};
use futures_util::{FutureExt, StreamExt};
use lapin::{BasicProperties, Confirmation};
use lapin_retry::{
    Builder, Declare, Event, Handle, Jitter, Job, PauseKind, QueueType, Resumed, Retry,
    RetryConsumer, RetryPolicy, Settled, reject,
};
use serde_json::json;
use std::{
    future::{IntoFuture, ready},
    time::Duration,
};

const GRACE: Duration = Duration::from_secs(10);
const LANE: &str = "work.retry.00001s";
/// The id of what fills up a queue.
const FILLING: &str = "filling";

fn worker(shop: &Workshop) -> User {
    shop.vhost.user(".*", ".*", ".*")
}

/// Its hand-offs are refused for as long as it may not write.
fn refuse(user: &User) {
    user.allow(".*", "", ".*");
}

/// Hand-offs may fail for half a second before the consumer pauses.
fn consumer(shop: &Workshop, user: &User, concurrency: usize) -> Builder {
    let settings = shop.settings(ms(200), ms(800)).hand_off_bound(ms(500));
    RetryConsumer::builder(user.url(), WORK).settings(settings).concurrency(concurrency)
}

/// A worker that may not publish, and has requeued its only job before half the consumer timeout.
async fn whose_job_is_requeued() -> (Workshop, User, Handle) {
    let shop = Workshop::in_an_outage().await;
    let user = worker(&shop);
    let consumer = consumer(&shop, &user, 20);
    let consumer = consumer.handler_timeout(ms(1000)).consumer_timeout(ms(5000));
    let handle = start(&shop, consumer).await;
    refuse(&user);
    shop.jobs(1).await;
    eventually("the job is requeued", PATIENCE, async || given_back(&shop) > 0).await;
    (shop, user, handle)
}

/// Every job fails once.
async fn start(shop: &Workshop, consumer: Builder) -> Handle {
    let journal = shop.journal.clone();
    let consumer = consumer.handler(move |job: Job| {
        let journal = journal.clone();
        async move {
            journal.begin(&job);
            anyhow::ensure!(job.retry_count() > 0, "a failure of its own");
            journal.succeed(&job);
            Ok(())
        }
    });
    consumer.start().await.unwrap()
}

/// The waits of the pauses for hand-offs.
fn waits(shop: &Workshop) -> Vec<u128> {
    let wait = |event: &Event| match event {
        Event::Paused { kind: PauseKind::HandOff, wait, .. } => wait.map(|wait| wait.as_millis()),
        _ => None,
    };
    shop.journal.all(wait)
}

async fn until_waits(shop: &Workshop, waited: usize) {
    let what = format!("{waited} waits for hand-offs");
    eventually(&what, PATIENCE, async || waits(shop).len() >= waited).await;
}

fn given_back(shop: &Workshop) -> usize {
    let given_back = |event: &Event| matches!(event, Event::GivenBack { .. });
    shop.journal.count(given_back)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hand_off_that_fails_for_long_pauses_the_consumer_and_is_tried_at_each_step() {
    let shop = Workshop::in_an_outage().await;
    let user = worker(&shop);
    // At most twenty hand-offs can be under way before the first is stuck.
    let consumer = consumer(&shop, &user, 20).prefetch(20);
    let handle = start(&shop, consumer).await;
    refuse(&user);
    shop.jobs(100).await;
    until_waits(&shop, 5).await;
    assert_eq!(waits(&shop)[..5], [200, 400, 800, 800, 800]);
    let api = shop.vhost.api();
    eventually("no consumer is listed", PATIENCE, async || api.consumers().is_empty()).await;
    let calls = shop.journal.attempted();
    assert!(calls <= 20, "{calls} were prefetched");
    shop.holds(WORK, 100 - calls).await;
    until_waits(&shop, 8).await;
    assert_eq!(shop.journal.attempted(), calls, "no handler runs");

    user.allow(".*", ".*", ".*");
    shop.until_done(100).await;
    handle.shutdown(GRACE).await;
    // Once to fail and once to succeed.
    assert_eq!(shop.journal.attempted(), 200);
    assert_eq!(given_back(&shop), 0);
    shop.is_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_given_back_before_half_the_consumer_timeout_and_handed_off_without_another_run() {
    let (shop, user, handle) = whose_job_is_requeued().await;
    shop.holds(WORK, 1).await;
    let held = shop.journal.attempts()[0].started.elapsed();
    assert!(held >= ms(2500), "{held:?}");
    user.allow(".*", ".*", ".*");
    shop.until_done(1).await;
    let calls = shop.journal.attempts();
    assert_eq!(calls.len(), 2, "{calls:?}");
    assert_eq!((calls[0].job.retry_count(), calls[1].job.retry_count()), (0, 1));
    // All is as it was before.
    shop.jobs(30).await;
    shop.until_done(30).await;
    handle.shutdown(GRACE).await;
    assert_eq!(shop.journal.resumed(), [Resumed::GotThrough]);
    assert_eq!(shop.journal.attempted(), 2 + 29 * 2 + 2);
    shop.is_empty().await;
}

/// Burying is a hand-off like any other.
#[tokio::test(flavor = "multi_thread")]
async fn a_buried_queue_that_stays_full_costs_one_run_and_no_step_more_than_one() {
    let shop = Workshop::in_an_outage().await;
    let (user, journal) = (worker(&shop), shop.journal.clone());
    let consumer = consumer(&shop, &user, 20);
    let consumer = consumer.handler_timeout(ms(500)).consumer_timeout(ms(3000));
    let handle = consumer.handler(move |job: Job| {
        journal.begin(&job);
        async { Err(reject(anyhow::anyhow!("no use")).into()) }
    });
    let handle = handle.start().await.unwrap();
    let full = json!({ "max-length": 1, "overflow": "reject-publish" });
    shop.vhost.api().set_policy("full", "^work.buried$", 1, &full);
    eventually("the buried queue is full", PATIENCE, async || {
        let answer = try_publish(&shop.channel, "", BURIED, BasicProperties::default(), b"").await;
        matches!(answer, Ok(Confirmation::Nack(_)))
    })
    .await;
    shop.jobs(1).await;
    // On all versions but 4.3 each giving back counts.
    eventually("it is given back again and again", 2 * PATIENCE, async || given_back(&shop) >= 4)
        .await;
    shop.channel.queue_purge(BURIED.into(), Default::default()).await.unwrap();
    eventually("the job is buried", PATIENCE, async || count(&shop.channel, BURIED).await == 1)
        .await;
    shop.jobs(1).await;
    within("the end", handle.shutdown(GRACE)).await;
    let ids: Vec<_> =
        shop.journal.attempts().into_iter().map(|call| call.job.id().to_owned()).collect();
    assert!(ids == ["0"] || ids == ["0", "0"], "the first, and the one after: {ids:?}");
    let given_back = shop.journal.all(|event| match event {
        Event::GivenBack { job, .. } => job.properties().headers().clone(),
        _ => None,
    });
    for headers in given_back {
        assert!(steps(Some(&headers)) <= 1, "{headers:?}");
    }
}

/// Twenty jobs, of which five are to be buried and cannot be until it is mended.
async fn burying_goes_on_by_itself(
    declare: Declare,
    spoil: impl AsyncFnOnce(&Workshop, &User),
    mend: impl AsyncFnOnce(&Workshop, &User),
) {
    let shop = Workshop::in_an_outage().await;
    let user = worker(&shop);
    let makes = shop.consumer(ms(50), ms(50)).handler(|_: Job| async { Ok(()) });
    makes.start().await.unwrap().shutdown(GRACE).await;
    let settings = shop.settings(ms(200), ms(800)).hand_off_bound(ms(500)).declare(declare);
    let (consumer, journal) = (consumer(&shop, &user, 4).settings(settings), shop.journal.clone());
    let handle = consumer.prefetch(4).handler(move |job: Job| {
        journal.begin(&job);
        let no_use = job.id().parse::<u32>().unwrap() % 4 == 0;
        if !no_use {
            journal.succeed(&job);
        }
        ready(if no_use { Err(reject(anyhow::anyhow!("no use")).into()) } else { Ok(()) })
    });
    let handle = handle.start().await.unwrap();
    spoil(&shop, &user).await;
    shop.jobs(20).await;

    until_waits(&shop, 5).await;
    assert_eq!(waits(&shop)[..5], [200, 400, 800, 800, 800]);
    let (calls, tries) = (shop.journal.attempted(), shop.journal.refused());
    let stuck = calls - shop.journal.succeeded();
    assert!((1..=4).contains(&stuck), "no more than are prefetched: {stuck}");
    until_waits(&shop, 8).await;
    assert_eq!(shop.journal.attempted(), calls, "no handler runs");
    let tries = shop.journal.refused() - tries;
    assert!(tries <= 4 * stuck, "one try a step of each: {tries} of {stuck}");
    shop.holds(WORK, 20 - calls).await;

    mend(&shop, &user).await;
    shop.until_done(15).await;
    shop.journal.until_buried(5).await;
    handle.shutdown(GRACE).await;
    assert_eq!(shop.journal.attempted(), 20, "each was run once");
    assert_eq!(given_back(&shop), 0);
    assert_eq!(shop.journal.resumed(), [Resumed::GotThrough]);
    shop.is_empty().await;
    let mut buried = shop.look(BURIED).await;
    buried.retain(|id| id != FILLING);
    assert_eq!(buried, ["0", "12", "16", "4", "8"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn burying_goes_on_by_itself_when_the_limit_of_a_full_queue_is_lifted() {
    let fill = async |shop: &Workshop, _: &User| {
        let full = json!({ "max-length": 1, "overflow": "reject-publish" });
        shop.vhost.api().set_policy("full", "^work.buried$", 1, &full);
        eventually("the buried queue is full", PATIENCE, async || {
            let filling = BasicProperties::default().with_message_id(FILLING.into());
            let answer = try_publish(&shop.channel, "", BURIED, filling, b"").await;
            matches!(answer, Ok(Confirmation::Nack(_)))
        })
        .await;
    };
    let lift = async |shop: &Workshop, _: &User| shop.vhost.api().delete_policy("full");
    burying_goes_on_by_itself(Declare::Create, fill, lift).await;
}

/// What is not the worker's to make is not made.
#[tokio::test(flavor = "multi_thread")]
async fn burying_goes_on_by_itself_when_a_queue_that_was_deleted_is_there_again() {
    for declare in [Declare::Check, Declare::Off] {
        let delete = async |shop: &Workshop, _: &User| {
            shop.channel.queue_delete(BURIED.into(), Default::default()).await.unwrap();
        };
        let make = async |shop: &Workshop, _: &User| {
            assert!(shop.vhost.api().queue(BURIED).is_none());
            declare_work_queue(&shop.channel, BURIED, QueueType::Quorum).await;
        };
        burying_goes_on_by_itself(declare, delete, make).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn burying_goes_on_by_itself_when_the_worker_may_write_again() {
    let forbid = async |_: &Workshop, user: &User| refuse(user);
    let allow = async |_: &Workshop, user: &User| user.allow(".*", ".*", ".*");
    burying_goes_on_by_itself(Declare::Create, forbid, allow).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_is_owed_its_hand_off_is_not_fetched_while_its_queue_is_missing() {
    let shop = Workshop::in_an_outage().await;
    let user = shop.vhost.user("", ".*", ".*");
    let makes = shop.consumer(ms(50), ms(50)).handler(|_: Job| async { Ok(()) });
    makes.start().await.unwrap().shutdown(GRACE).await;
    shop.channel.queue_delete(LANE.into(), Default::default()).await.unwrap();
    let settings = shop.settings(ms(200), ms(400)).hand_off_bound(ms(500));
    let settings = settings.declare(Declare::Off);
    shop.jobs(1).await;
    let consumer = consumer(&shop, &user, 5).settings(settings);
    let consumer = consumer.handler_timeout(ms(1000)).consumer_timeout(ms(5000));
    let handle = start(&shop, consumer).await;
    eventually("the job is given back", PATIENCE, async || given_back(&shop) > 0).await;
    let waited = waits(&shop).len();
    until_waits(&shop, waited + 10).await;
    // It has stayed where it is: given back once, and never fetched.
    assert_eq!(given_back(&shop), 1);
    assert_eq!(count(&shop.channel, WORK).await, 1);
    within("the end", handle.shutdown(GRACE)).await;
    let left = shop.take_all().await;
    assert!(left.len() == 1 && left[0].1 <= 1, "{left:?}");
    assert_eq!(shop.journal.attempted(), 1);
}

/// Whatever became of the job that was requeued: here somebody else took it, and its lane is gone.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_reload_in_an_outage_a_later_outage_ends() {
    let (shop, user, handle) = whose_job_is_requeued().await;
    eventually("it is taken", PATIENCE, async || !shop.take_all().await.is_empty()).await;
    user.allow(".*", ".*", ".*");
    handle.reload(RetryPolicy::new([2]).jitter(Jitter::None)).await.unwrap();
    shop.channel.queue_delete(LANE.into(), Default::default()).await.unwrap();

    refuse(&user);
    let waited = waits(&shop).len();
    shop.jobs(3).await;
    until_waits(&shop, waited + 2).await;
    user.allow(".*", ".*", ".*");
    shop.until_done(3).await;
    handle.shutdown(GRACE).await;
    shop.is_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_tries_stuck_hand_offs_at_once_and_a_shutdown_leaves_their_jobs_in_the_queue() {
    let shop = Workshop::in_an_outage().await;
    let user = worker(&shop);
    let long = Duration::from_secs(3600);
    let settings = shop.settings(long, long).hand_off_bound(ms(500));
    let handle = start(&shop, consumer(&shop, &user, 5).settings(settings.clone())).await;
    refuse(&user);
    shop.jobs(5).await;
    until_waits(&shop, 1).await;
    handle.resume();
    // They fail again, and it pauses again.
    until_waits(&shop, 2).await;
    within("the end", handle.shutdown(ms(500))).await;
    shop.holds(WORK, 5).await;
    shop.take_all().await;

    user.allow(".*", ".*", ".*");
    let handle = start(&shop, consumer(&shop, &user, 5).settings(settings)).await;
    refuse(&user);
    shop.jobs(5).await;
    until_waits(&shop, 3).await;
    user.allow(".*", ".*", ".*");
    handle.resume();
    shop.until_done(5).await;
    handle.shutdown(GRACE).await;
    shop.is_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn in_the_users_own_loop_the_stream_waits_until_the_hand_off_succeeds() {
    let shop = Workshop::in_an_outage().await;
    let user = worker(&shop);
    let settings = shop.settings(ms(200), ms(800)).hand_off_bound(ms(500));
    let retry = Retry::attach(user.url(), WORK, settings).await.unwrap();
    refuse(&user);
    shop.jobs(5).await;
    let connection = connect(&shop.vhost.url()).await;
    let channel = connection.create_channel().await.unwrap();
    let mut jobs = retry.jobs(consume(&channel, WORK, 5).await);
    let first = within("a job", jobs.next()).await.unwrap().unwrap();
    let receipt = first.settle(Err(anyhow::anyhow!("a failure of its own"))).await.unwrap();
    until_waits(&shop, 3).await;
    assert!(retry.paused().is_some());
    assert!(jobs.next().now_or_never().is_none(), "no job while a hand-off is stuck");

    user.allow(".*", ".*", ".*");
    let settled = within("the hand-off", receipt.into_future()).await;
    assert!(matches!(settled, Settled::Retried { level: 1, .. }), "{settled:?}");
    for _ in 0..5 {
        let job = within("a job", jobs.next()).await.unwrap().unwrap();
        job.settle(anyhow::Ok(())).await.unwrap();
    }
    assert_eq!(shop.journal.resumed(), [Resumed::GotThrough]);
    retry.close().await.unwrap();
}
