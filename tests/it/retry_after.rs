//! A handler that says how long to wait: `retry_after`.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::anyhow;
use futures_util::StreamExt;
use lapin::{BasicProperties, types::AMQPValue};
use lapin_retry::{
    BuriedReason, Event, Handle, Jitter, Job, Retry, RetryConsumer, RetryPolicy, Settings,
    retry_after,
};

use crate::support::{Journal, PATIENCE, Scene, WORK, consume, count, eventually, ours, within};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);

/// A worker that asks `say` how long a job is to wait; without an answer the job is done.
async fn worker(
    scene: &Scene,
    policy: RetryPolicy,
    say: impl Fn(&Job) -> Option<Duration> + Send + Sync + 'static,
) -> (Handle, Journal) {
    let journal = Journal::default();
    let called = journal.clone();
    let say = Arc::new(say);
    let handle = RetryConsumer::builder(scene.url(), WORK)
        .policy(policy)
        .on_event(journal.hook())
        .handler(move |job: Job| {
            called.begin(&job);
            let answer = say(&job);
            async move {
                match answer {
                    Some(wait) => Err(retry_after(anyhow!("too many requests"), wait).into()),
                    None => Ok(()),
                }
            }
        })
        .start()
        .await
        .unwrap();
    (handle, journal)
}

fn without_jitter(levels: &[&str]) -> RetryPolicy {
    RetryPolicy::new(levels).jitter(Jitter::None)
}

/// In whole milliseconds, as a header can tell it.
fn in_the_future(wait: Duration) -> SystemTime {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap() + wait;
    SystemTime::UNIX_EPOCH + Duration::from_millis(since.as_millis() as u64)
}

fn not_before(at: SystemTime) -> (&'static str, AMQPValue) {
    let text = humantime::format_rfc3339_millis(at).to_string();
    ("retry-not-before", AMQPValue::LongString(text.into()))
}

fn one() -> (&'static str, AMQPValue) {
    ("retry-count", AMQPValue::LongLongInt(1))
}

/// How far a time in a header is from this one.
fn apart(header: &serde_json::Value, from: SystemTime) -> Duration {
    let at = humantime::parse_rfc3339(header.as_str().expect("a time")).expect("a time");
    at.duration_since(from).unwrap_or_else(|early| early.duration())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_herd_that_is_told_to_wait_spreads_over_a_quarter_more_and_nothing_is_early() {
    let scene = Scene::new().await;
    let wait = Duration::from_millis(1500);
    // Lanes of 1062 to 2000 ms in steps of 62.5.
    let policy = RetryPolicy::new([2]).lanes(16);
    let say = move |job: &Job| (job.retry_count() == 0).then_some(wait);
    let (worker, journal) = worker(&scene, policy, say).await;
    for job in 0..40 {
        scene.publish(BasicProperties::default().with_message_id(job.to_string().into()), "").await;
    }
    journal.until_done(40).await;
    let mut lanes: Vec<u128> = journal.delays().iter().map(Duration::as_millis).collect();
    lanes.sort_unstable();
    lanes.dedup();
    let near = [1500, 1562, 1625, 1687, 1750, 1812, 1875];
    assert!(lanes.iter().all(|lane| near.contains(lane)), "{lanes:?}");
    assert!(lanes.len() >= 4, "a herd on so few lanes: {lanes:?}");
    let calls = journal.attempts();
    for again in calls.iter().filter(|call| call.job.retry_count() == 1) {
        let first = calls.iter().find(|earlier| earlier.job.id() == again.job.id()).unwrap();
        assert!(again.started - first.started >= wait, "{again:?} is early");
    }
    worker.shutdown(SECOND).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_lane_nearby_the_first_that_is_not_shorter_is_taken() {
    let scene = Scene::new().await;
    let (_worker, journal) = worker(&scene, without_jitter(&["1s", "20s", "40s"]), |job| {
        Some(Duration::from_millis(std::str::from_utf8(job.body()).unwrap().parse().unwrap()))
    })
    .await;
    for (wait_ms, lane) in [("0", 1), ("1000", 1), ("1001", 20), ("15000", 20), ("20001", 40)] {
        let before = journal.delays().len();
        scene.publish(BasicProperties::default(), wait_ms).await;
        eventually("it is retried", PATIENCE, async || journal.delays().len() > before).await;
        assert_eq!(journal.delays()[before], lane * SECOND, "for {wait_ms} ms");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_longer_than_the_longest_lane_goes_hop_by_hop_also_over_a_restart() {
    let scene = Scene::new().await;
    let wait = 12 * SECOND;
    let policy = || without_jitter(&["1s"]);
    let (first, before) = worker(&scene, policy(), move |_| Some(wait)).await;
    let now = SystemTime::now();
    scene.publish(BasicProperties::default(), "").await;
    before
        .first("the first hop", |event| matches!(event, Event::Retried { .. }).then_some(()))
        .await;
    assert_eq!(before.delays(), [SECOND]);
    first.shutdown(SECOND).await;

    eventually("the first hop ends", PATIENCE, async || count(&scene.channel, WORK).await == 1)
        .await;
    let hopping = scene.vhost.api().peek(WORK, 1).remove(0);
    assert_eq!(hopping["headers"]["retry-count"], 1);
    for header in ["retry-not-before", "retry-due-at"] {
        let end = apart(&hopping["headers"][header], now);
        assert!(end >= wait && end < wait + 5 * SECOND, "{header}: {end:?}");
    }
    assert_eq!(hopping["headers"]["retry-wait-left"], 11_000);
    let due = before.first("its retry", |event| match event {
        Event::Retried { due, .. } => due.duration_since(now).ok(),
        _ => None,
    });
    assert!(due.await >= wait, "of the whole wait, not of its first lane");

    let say = |job: &Job| (job.retry_count() == 0).then_some(SECOND);
    let (second, journal) = worker(&scene, policy(), say).await;
    journal.until_done(1).await;
    assert!(journal.postponed() >= 1, "it should have hopped on");
    let (first_calls, calls) = (before.attempts(), journal.attempts());
    assert_eq!((first_calls.len(), calls.len()), (1, 1), "called in between");
    assert_eq!(calls[0].job.retry_count(), 1, "charged once");
    assert!(calls[0].started - first_calls[0].started >= wait, "early");
    second.shutdown(SECOND).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_time_that_is_reached_is_told_no_longer_and_the_last_level_still_buries() {
    let scene = Scene::new().await;
    let (_worker, journal) =
        worker(&scene, without_jitter(&["1s"]), |_| Some(2500 * SECOND / 1000)).await;
    scene.publish(BasicProperties::default(), "").await;
    assert_eq!(journal.until_buried(1).await, [BuriedReason::Exhausted]);
    let buried = scene.take_buried(1).await.remove(0);
    assert_eq!(buried["headers"]["retry-count"], 2);
    assert_eq!(buried["headers"]["buried-reason"], "exhausted");
    assert!(buried["headers"].get("retry-not-before").is_none(), "{buried}");
    let calls = journal.attempts();
    let header = |job: &Job| {
        let headers = job.properties().headers().clone().unwrap_or_default();
        headers.contains_key("retry-not-before")
    };
    assert_eq!(calls.len(), 2);
    assert!(!header(&calls[0].job) && header(&calls[1].job), "{calls:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_whose_clocks_differ_by_two_seconds_do_not_loop() {
    let scene = Scene::new().await;
    let (_worker, journal) = worker(&scene, without_jitter(&["1s"]), |_| None).await;
    // Its time has come by the clock of a worker that is 2 s ahead of this one.
    let end = in_the_future(2 * SECOND);
    scene.publish(ours([one(), not_before(end)]), "ahead").await;
    journal.until_done(1).await;
    assert!(SystemTime::now() >= end, "this worker's own clock decides");
    assert!(journal.postponed() <= 2, "{} hops", journal.postponed());
    // And by that of one that is 2 s behind it came too late.
    let before = journal.postponed();
    scene.publish(ours([one(), not_before(SystemTime::now() - 2 * SECOND)]), "behind").await;
    journal.until_done(2).await;
    assert_eq!(journal.postponed(), before);
    assert!(journal.attempts().iter().all(|call| call.job.retry_count() == 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_left_of_a_wait_decides_and_no_clock_does() {
    let scene = Scene::new().await;
    let (_worker, journal) = worker(&scene, without_jitter(&["1s"]), |_| None).await;
    let left = |ms| ("retry-wait-left", AMQPValue::LongLongInt(ms));
    // By the clock of the worker that sent it there it would be over, or not for a day.
    for (ms, end, hops) in [(2_500, SystemTime::now() - HOUR, 2), (0, in_the_future(DAY), 0)] {
        let (done, postponed) = (journal.done().len(), journal.postponed());
        let published = Instant::now();
        scene.publish(ours([one(), left(ms), not_before(end)]), "").await;
        journal.until_done(done + 1).await;
        let waited = journal.attempts().pop().unwrap().started - published;
        assert!(waited >= Duration::from_millis(ms.unsigned_abs()), "early: {waited:?}");
        assert_eq!(journal.postponed() - postponed, hops, "{ms}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_day_on_levels_of_seconds_goes_through_the_hold_lanes_made_at_first_use() {
    let scene = Scene::new().await;
    let (_worker, journal) = worker(&scene, without_jitter(&["1s", "2s", "4s"]), |job| {
        (job.body() == b"a day").then_some(DAY)
    })
    .await;
    scene.publish(BasicProperties::default(), "done at once").await;
    journal.until_done(1).await;
    let from_the_start = ["buried", "retry.00001s", "retry.00002s", "retry.00004s"];
    assert_eq!(scene.queues(), from_the_start);

    let now = SystemTime::now();
    scene.publish(BasicProperties::default(), "a day").await;
    let held = scene.only_job_in("retry.hold.21600000ms").await;
    let hold = ["retry.hold.00600000ms", "retry.hold.03600000ms", "retry.hold.21600000ms"];
    assert_eq!(scene.queues(), [from_the_start.as_slice(), &hold].concat());
    assert_eq!(held["properties"]["expiration"], "21600000");
    assert_eq!(held["headers"]["retry-count"], 1);
    assert_eq!(held["headers"]["retry-level"], "1/3 1s");
    let end = apart(&held["headers"]["retry-not-before"], now);
    assert!(end >= DAY && end < DAY + 60 * SECOND, "{end:?}");
    let due = apart(&held["headers"]["retry-due-at"], now);
    assert!(due >= DAY && due < DAY + 60 * SECOND, "{due:?}");
    assert_eq!(held["headers"]["retry-wait-left"], 18 * 3_600_000);
    let lane = scene.vhost.api().queue("work.retry.hold.21600000ms").unwrap();
    assert_eq!(lane["arguments"]["x-message-ttl"], 21_600_000);
    assert_eq!(lane["arguments"]["x-dead-letter-routing-key"], WORK);

    // The later hops, each as it would arrive.
    let calls_so_far = journal.attempted();
    for (left, lane) in [
        (6 * HOUR + 120 * SECOND, "retry.hold.21600000ms"),
        (4 * HOUR, "retry.hold.03600000ms"),
        (2400 * SECOND, "retry.hold.00600000ms"),
        // A quarter more than this is enough for 10 min.
        (570 * SECOND, "retry.hold.00600000ms"),
    ] {
        scene.vhost.api().take(&format!("{WORK}.{lane}"), 10);
        let end = in_the_future(left);
        scene.publish(ours([one(), not_before(end)]), "a day").await;
        let held = scene.only_job_in(lane).await;
        assert!(apart(&held["headers"]["retry-not-before"], end) < Duration::from_millis(2));
        assert_eq!(held["headers"]["retry-count"], 1);
    }
    assert_eq!(journal.attempted(), calls_so_far, "the handler was called in between");
    // The end of it fits into a lane of the policy's own.
    let end = in_the_future(3500 * SECOND / 1000);
    scene.publish(ours([one(), not_before(end)]), "done at last").await;
    journal.until_done(2).await;
    assert!(SystemTime::now() >= end, "early");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_that_is_too_long_buries_and_says_so() {
    let scene = Scene::new().await;
    let (_worker, journal) = worker(&scene, without_jitter(&["1s"]), |job| match job.body() {
        b"11 years" => Some(11 * 365 * DAY),
        // 10,220 hops of 6 h.
        b"7 years" => Some(7 * 365 * DAY),
        b"ever" => Some(Duration::MAX),
        _ => Some(2000 * DAY),
    })
    .await;
    for body in ["11 years", "7 years", "ever"] {
        scene.publish(BasicProperties::default(), body).await;
    }
    assert_eq!(journal.until_buried(3).await, [BuriedReason::Expired; 3]);
    for buried in scene.take_buried(3).await {
        assert_eq!(buried["headers"]["buried-reason"], "expired");
        let detail = buried["headers"]["buried-detail"].as_str().unwrap();
        assert!(detail.contains("the longest is 10 years, and 10,000 hops"), "{detail}");
        assert_eq!(buried["headers"]["retry-error"], "too many requests");
    }
    scene.publish(BasicProperties::default(), "5 years").await;
    scene.only_job_in("retry.hold.21600000ms").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_time_out_of_reach_buries_without_a_run_and_one_that_makes_no_sense_once_it_fails() {
    let scene = Scene::new().await;
    let soon = |job: &Job| (job.body() == b"fails").then_some(Duration::from_secs(1));
    let (_worker, journal) = worker(&scene, without_jitter(&["1s"]), soon).await;
    let text = |text: &str| AMQPValue::LongString(text.into());
    for (forged, kept, body) in [
        (text("9999-12-31T23:59:59Z"), serde_json::json!("9999-12-31T23:59:59.000Z"), ""),
        (text("soon"), serde_json::json!("soon"), "fails"),
        (AMQPValue::LongLongInt(5), serde_json::json!(5), "fails"),
        (AMQPValue::Boolean(true), serde_json::json!(true), "fails"),
    ] {
        let before = journal.until_buried(0).await.len();
        scene.publish(ours([one(), ("retry-not-before", forged)]), body).await;
        assert_eq!(journal.until_buried(before + 1).await[before], BuriedReason::InvalidHeaders);
        let buried = scene.take_buried(1).await.remove(0);
        assert_eq!(buried["headers"]["retry-not-before"], kept);
        assert_eq!(buried["headers"]["buried-reason"], "invalid-headers");
        let detail = buried["headers"]["buried-detail"].as_str().unwrap();
        assert!(detail.contains("retry-not-before"), "{detail}");
    }
    assert_eq!(journal.attempted(), 3, "the one out of reach was not run");
    // It means something beside our own `retry-queue` only.
    let foreign = crate::support::table([not_before(in_the_future(DAY))]);
    scene.publish(BasicProperties::default().with_headers(foreign), "").await;
    journal.until_done(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_left_of_a_wait_under_a_second_is_waited_out_in_the_worker() {
    let left = Duration::from_millis(900);
    let forged = || {
        let end = in_the_future(left);
        (end, ours([one(), not_before(end)]))
    };

    let scene = Scene::new().await;
    let (worker, journal) = worker(&scene, without_jitter(&["1s"]), |_| None).await;
    let (end, job) = forged();
    scene.publish(job, "").await;
    journal.until_done(1).await;
    assert!(SystemTime::now() >= end, "early, with a handler");
    assert_eq!(journal.postponed(), 0);
    worker.shutdown(SECOND).await;

    let journal = Journal::default();
    let settings = Settings::new(without_jitter(&["1s"])).on_event(journal.hook());
    let retry = Retry::attach(scene.url(), WORK, settings).await.unwrap();
    let consumer = consume(&scene.channel, WORK, 10).await;
    let mut jobs = retry.jobs(consumer);
    let (end, job) = forged();
    scene.publish(job, "late").await;
    scene.publish(BasicProperties::default(), "at once").await;
    for body in ["at once", "late"] {
        let job = within("a job", jobs.next()).await.unwrap().unwrap();
        assert_eq!(job.body(), body.as_bytes(), "one that waits holds up no other");
        assert!(body == "at once" || SystemTime::now() >= end, "early, in a loop");
        job.settle(anyhow::Ok(())).await.unwrap();
    }
    drop(jobs);

    let mut consumer = consume(&scene.channel, WORK, 10).await;
    let (end, job) = forged();
    scene.publish(job, "").await;
    let delivery = within("a delivery", consumer.next()).await.unwrap().unwrap();
    let job = within("the wait", retry.accept(delivery)).await.unwrap().expect("a job to run");
    assert!(SystemTime::now() >= end, "early, by accept");
    job.settle(anyhow::Ok(())).await.unwrap().await;
    assert_eq!(journal.postponed(), 0);
    retry.close().await.unwrap();
}
