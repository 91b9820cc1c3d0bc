//! A handler that found something scarce taken: `busy`.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use anyhow::anyhow;
use lapin::{
    BasicProperties,
    types::{AMQPValue, FieldTable},
};
use lapin_retry::{
    BuriedReason, Event, Handle, Jitter, Job, Postponed, RetryConsumer, RetryPolicy, busy,
};

use crate::support::{Attempt, Journal, PATIENCE, Scene, WORK, eventually, ours};

const JOBS: usize = 50;

/// A worker whose n-th call says what the n-th letter is: `b`usy, `f`ailed; then done.
async fn worker(scene: &Scene, policy: RetryPolicy, script: &'static str) -> (Handle, Journal) {
    let journal = Journal::default();
    let calls = journal.clone();
    let handle = RetryConsumer::builder(scene.url(), WORK)
        .policy(policy)
        .on_event(journal.hook())
        .handler(move |job: Job| {
            let says = script.as_bytes().get(calls.begin(&job) - 1).copied();
            async move {
                match says {
                    Some(b'b') => Err(busy(anyhow!("the lock is taken")).into()),
                    Some(_) => Err(anyhow!("no")),
                    None => Ok(()),
                }
            }
        })
        .start()
        .await
        .unwrap();
    (handle, journal)
}

fn one_level() -> RetryPolicy {
    RetryPolicy::new([1]).jitter(Jitter::None)
}

/// What each call of the handler saw of its job.
fn headers(journal: &Journal) -> Vec<FieldTable> {
    let headers = |attempt: Attempt| attempt.job.properties().headers().clone();
    journal.attempts().into_iter().map(headers).map(Option::unwrap_or_default).collect()
}

fn number(headers: &FieldTable, name: &str) -> Option<i64> {
    headers.inner().get(name).map(|value| match value {
        AMQPValue::LongLongInt(n) => *n,
        other => panic!("{name}: {other:?}"),
    })
}

fn in_a_row(event: &Event) -> Option<u32> {
    match event {
        Event::Postponed { why: Postponed::Busy { in_a_row, .. }, .. } => Some(*in_a_row),
        _ => None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_ladder_of_24_lanes_is_made_by_the_first_busy_job_only() {
    let scene = Scene::new().await;
    let (_worker, journal) = worker(&scene, one_level(), "fb").await;
    scene.publish(BasicProperties::default(), "").await;
    journal.first("a failure", |event| matches!(event, Event::Retried { .. }).then_some(())).await;
    assert_eq!(scene.queues(), ["buried", "retry.00001s"]);
    assert_eq!(journal.first("busy", in_a_row).await, 1);
    let queues = scene.queues();
    let ladder: Vec<u64> = queues
        .iter()
        .filter_map(|name| name.strip_prefix("retry.busy.")?.strip_suffix("ms")?.parse().ok())
        .collect();
    assert_eq!(ladder.len(), 24, "{queues:?}");
    assert_eq!(queues.len(), 26, "the hold lanes are not asked for: {queues:?}");
    assert_eq!((ladder[0], ladder[7], ladder[23]), (2_250, 4_000, 60_000));
    for delay in ladder {
        let lane = scene.vhost.api().queue(&format!("{WORK}.retry.busy.{delay:08}ms")).unwrap();
        assert_eq!(lane["arguments"]["x-message-ttl"], delay);
        assert_eq!(lane["arguments"]["x-dead-letter-routing-key"], WORK);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn busy_is_not_charged_and_counted_in_a_row_until_another_outcome() {
    let scene = Scene::new().await;
    let (_worker, journal) =
        worker(&scene, RetryPolicy::new([1, 1]).jitter(Jitter::None), "bbfb").await;
    scene.publish(BasicProperties::default(), "").await;
    journal.until_done(1).await;
    let seen = headers(&journal);
    let counts: Vec<_> = seen
        .iter()
        .map(|headers| (number(headers, "retry-count"), number(headers, "retry-busy-count")))
        .collect();
    assert_eq!(
        counts,
        [(None, None), (Some(0), Some(1)), (Some(0), Some(2)), (Some(1), None), (Some(1), Some(1))]
    );
    assert_eq!(seen[1].inner()["retry-error-kind"], AMQPValue::LongString("busy".into()));
    assert_eq!(seen[1].inner()["retry-error"], AMQPValue::LongString("the lock is taken".into()));
    assert_eq!(journal.all(in_a_row), [1, 2, 1]);
    let windows = journal.all(|event| match event {
        Event::Postponed { delay, why: Postponed::Busy { in_a_row, .. }, .. } => {
            Some((*delay, Duration::from_secs(2 + (1 << in_a_row))))
        }
        _ => None,
    });
    for (delay, end) in windows {
        assert!(delay > Duration::from_secs(2) && delay <= end, "{delay:?} of {end:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_hundred_and_first_busy_in_a_row_is_charged_as_one_failure() {
    let scene = Scene::new().await;
    let (_worker, journal) = worker(&scene, one_level(), "bb").await;
    let count = |n| ("retry-busy-count", AMQPValue::LongLongInt(n));
    scene.publish(ours([count(100)]), "").await;
    assert_eq!(journal.first("a new count", in_a_row).await, 1);
    assert_eq!(journal.delays(), [Duration::from_secs(1)]);
    let seen = headers(&journal);
    assert_eq!(number(&seen[1], "retry-count"), Some(1));
    assert_eq!(number(&seen[1], "retry-busy-count"), None, "it starts again");
    assert_eq!(seen[1].inner()["retry-error-kind"], AMQPValue::LongString("busy".into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_hundredth_busy_is_not_charged_yet_and_a_charge_after_the_last_level_buries() {
    let scene = Scene::new().await;
    let (_worker, journal) = worker(&scene, one_level(), "bb").await;
    let count = |n| ("retry-busy-count", AMQPValue::LongLongInt(n));
    scene.publish(ours([count(99)]), "").await;
    assert_eq!(journal.first("busy", in_a_row).await, 100);
    assert!(journal.delays().is_empty());
    scene.publish(ours([count(100), ("retry-count", AMQPValue::LongLongInt(1))]), "").await;
    assert_eq!(journal.until_buried(1).await, [BuriedReason::Exhausted]);
    let buried = scene.take_buried(1).await.remove(0);
    assert_eq!(buried["headers"]["retry-error-kind"], "busy");
    assert_eq!(buried["headers"]["retry-count"], 2);
}

/// What 50 jobs that want one slot come to: those that got it, and how often one did not.
#[derive(Default)]
struct Contest {
    slot: tokio::sync::Mutex<()>,
    done: AtomicUsize,
    collisions: AtomicUsize,
}

impl Contest {
    async fn start(
        scene: &Scene,
        policy: RetryPolicy,
        mark: fn(anyhow::Error) -> anyhow::Error,
    ) -> Arc<Self> {
        let contest = Arc::new(Self::default());
        let shared = Arc::clone(&contest);
        let worker = RetryConsumer::builder(scene.url(), WORK).policy(policy);
        worker
            .handler(move |_: Job| {
                let contest = Arc::clone(&shared);
                async move {
                    let Ok(_slot) = contest.slot.try_lock() else {
                        contest.collisions.fetch_add(1, SeqCst);
                        return Err(mark(anyhow!("no slot")));
                    };
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    contest.done.fetch_add(1, SeqCst);
                    Ok(())
                }
            })
            .start()
            .await
            .unwrap();
        contest
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_jobs_share_one_slot_with_fewer_collisions_than_at_a_fixed_delay() {
    let (random, fixed) = (Scene::new().await, Scene::new().await);
    // All are there before anybody takes one, so that they do meet.
    for _ in 0..JOBS {
        random.publish(BasicProperties::default(), "").await;
        fixed.publish(BasicProperties::default(), "").await;
    }
    let two_seconds = Duration::from_secs(2);
    let plenty = RetryPolicy::exponential(two_seconds, 1.0, two_seconds, 10_000);
    let at_random = Contest::start(&random, one_level(), |error| busy(error).into()).await;
    let at_fixed = Contest::start(&fixed, plenty.jitter(Jitter::None), |error| error).await;
    // The windows grow to a minute for those without luck.
    eventually("all jobs are done", 9 * PATIENCE, async || at_random.done.load(SeqCst) == JOBS)
        .await;
    let (at_random, at_fixed) = (
        at_random.collisions.load(SeqCst),
        (at_fixed.collisions.load(SeqCst), at_fixed.done.load(SeqCst)),
    );
    println!(
        "{JOBS} jobs done with {at_random} collisions; at a fixed delay {} were done by then, \
         with {} collisions",
        at_fixed.1, at_fixed.0
    );
    assert!(at_random < at_fixed.0, "{at_random} collisions, {} at a fixed delay", at_fixed.0);
}
