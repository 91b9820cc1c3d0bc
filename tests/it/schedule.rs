//! A failed job comes back as often as there are levels, each time inside the level's window and
//! never early; then it is buried with its story.

use std::{
    collections::BTreeSet,
    time::{Duration, SystemTime},
};

use crate::support::{
    End, Journal, PATIENCE, Scene, Vhost, as_the_body_says, count, declare_work_queue, eventually,
    publish, table,
};
use futures_util::future::join_all;
use lapin::{
    BasicProperties, Channel,
    options::{BasicGetOptions, QueueBindOptions},
    types::{AMQPValue, FieldTable},
};
use lapin_retry::{BuriedReason, Handle, Jitter, QueueType, RetryConsumer, RetryPolicy, Settings};
use serde_json::{Value, json};

const LEVELS_MS: [u64; 3] = [300, 600, 900];
const LANES: u64 = 4;
/// How late a job may be on a machine that is busy with other things.
const LATE: Duration = Duration::from_secs(5);
/// The engine's clock runs on from its start, so the wall's may be set in between.
const CLOCKS: Duration = Duration::from_secs(1);

fn policy(jitter: Jitter) -> RetryPolicy {
    RetryPolicy::new(LEVELS_MS.map(Duration::from_millis)).jitter(jitter).lanes(LANES as u32)
}

/// The window of a level as the documentation states it, in milliseconds.
fn window(jitter: Jitter, level: u64) -> (u64, u64) {
    match jitter {
        Jitter::None => (level, level),
        Jitter::Equal => (level / 2, level),
        Jitter::Proportional(_) => (level * 8 / 10, level * 12 / 10),
        Jitter::Full => (1, level),
        other => panic!("{other:?}"),
    }
}

fn lanes(jitter: Jitter, level: u64) -> BTreeSet<Duration> {
    let (lo, hi) = match (jitter, window(jitter, level)) {
        (Jitter::Full, (_, hi)) => (0, hi),
        (_, window) => window,
    };
    (1..=LANES).map(|i| Duration::from_millis(lo + i * (hi - lo) / LANES)).collect()
}

async fn start(vhost: &Vhost, queue: &str, settings: Settings, journal: &Journal) -> Handle {
    RetryConsumer::builder(vhost.url(), queue)
        .settings(settings.worker("worker-1"))
        .on_event(journal.hook())
        .handler(journal.handler(as_the_body_says))
        .start()
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_comes_back_at_each_level_inside_its_window_and_never_early_by_quorum_lanes() {
    keeps_the_schedule(QueueType::Quorum).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_comes_back_at_each_level_inside_its_window_and_never_early_by_classic_lanes() {
    keeps_the_schedule(QueueType::Classic).await;
}

async fn keeps_the_schedule(kind: QueueType) {
    let scene = Scene::bare().await;
    let jitters = [
        ("none", Jitter::None),
        ("equal", Jitter::Equal),
        ("proportional", Jitter::Proportional(0.2)),
        ("full", Jitter::Full),
    ];
    let each = jitters.map(|(queue, jitter)| one_jitter(&scene, queue, jitter, kind));
    join_all(each).await;
}

/// Jobs that fail 0 to 3 times are done, and those that fail 4 times are buried.
async fn one_jitter(scene: &Scene, queue: &str, jitter: Jitter, kind: QueueType) {
    const JOBS_EACH: usize = 4;
    let (vhost, channel) = (&scene.vhost, &scene.channel);
    declare_work_queue(channel, queue, kind).await;
    let journal = Journal::default();
    let settings = Settings::new(policy(jitter)).queue_type(kind);
    let worker = start(vhost, queue, settings, &journal).await;
    for failures in 0..=4 {
        for job in 0..JOBS_EACH {
            let id = format!("{failures}-{job}");
            let properties = BasicProperties::default().with_message_id(id.into());
            publish(channel, "", queue, properties, failures.to_string().as_bytes()).await;
        }
    }
    // Of each kind of job 0, 1, 2, 3 and 3 retries.
    let (jobs, retries) = (5 * JOBS_EACH, 9 * JOBS_EACH);
    eventually("all jobs come to an end", PATIENCE, async || {
        journal.ends().len() >= jobs && journal.retries().len() >= retries
    })
    .await;
    worker.shutdown(LATE).await;
    journal.assert_no_trouble();
    assert_eq!((journal.ends().len(), journal.retries().len()), (jobs, retries));

    for (id, end) in journal.ends() {
        let failures: u32 = id.split('-').next().unwrap().parse().unwrap();
        let buried = End::Buried(BuriedReason::Exhausted);
        assert_eq!(end, if failures > 3 { buried } else { End::Done }, "{queue} {id}");
        let attempts = journal.attempts_of(&id);
        assert_eq!(attempts.len(), failures.min(3) as usize + 1, "{queue} {id}");
        for (before, pair) in attempts.windows(2).enumerate() {
            let (failed, next) = (&pair[0], &pair[1]);
            assert_eq!(failed.job.retry_count() as usize, before, "{queue} {id}");
            assert_eq!(next.job.retry_count() as usize, before + 1, "{queue} {id}");
            let (level, delay) = journal.retried(&id, before as u32).expect("a retry");
            assert_eq!(level as usize, before + 1, "{queue} {id}");
            let (lo, hi) = window(jitter, LEVELS_MS[before]);
            let window = Duration::from_millis(lo)..=Duration::from_millis(hi);
            assert!(window.contains(&delay), "{queue} {id}: {delay:?} at level {level}");
            let waited = next.started - failed.ended.unwrap();
            assert!(waited >= delay, "{queue} {id}: {waited:?} is earlier than {delay:?}");
            assert!(waited <= delay + LATE, "{queue} {id}: {waited:?} instead of {delay:?}");
        }
    }
    for (level, nominal) in (1..).zip(LEVELS_MS) {
        let retries = journal.retries().into_iter();
        let used: BTreeSet<_> = retries.filter(|r| r.0 == level).map(|r| r.1).collect();
        assert_eq!(used, lanes(jitter, nominal), "{queue}: the lanes of level {level}");
    }
    assert_eq!(count(channel, &format!("{queue}.buried")).await as usize, JOBS_EACH);
    assert_eq!(count(channel, queue).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_always_fails_is_buried_with_its_whole_story_in_a_quorum_queue() {
    is_buried_with_its_story(QueueType::Quorum).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_always_fails_is_buried_with_its_whole_story_in_a_classic_queue() {
    is_buried_with_its_story(QueueType::Classic).await;
}

async fn is_buried_with_its_story(kind: QueueType) {
    let scene = Scene::with("orders", kind).await;
    let (vhost, channel) = (&scene.vhost, &scene.channel);
    let (key, exchange) = ("order.*", "amq.topic");
    let bound = channel.queue_bind(
        "orders".into(),
        exchange.into(),
        key.into(),
        QueueBindOptions::default(),
        FieldTable::default(),
    );
    bound.await.unwrap();
    let journal = Journal::default();
    let settings = Settings::new(policy(Jitter::Equal)).queue_type(kind);
    let worker = start(vhost, "orders", settings, &journal).await;

    let before = instant(SystemTime::now() - CLOCKS);
    let headers = table([("tenant", AMQPValue::LongString("acme".into()))]);
    let properties = BasicProperties::default().with_headers(headers);
    publish(channel, exchange, "order.created", properties, b"99").await;
    eventually("it is buried", PATIENCE, async || !journal.ends().is_empty()).await;
    worker.shutdown(LATE).await;
    journal.assert_no_trouble();
    let after = instant(SystemTime::now() + CLOCKS);

    assert_eq!(journal.attempts().len(), 4);
    let buried = vhost.api().peek("orders.buried", 9);
    assert_eq!(buried.len(), 1);
    let properties = &buried[0]["properties"];
    assert_eq!(buried[0]["payload"], "99");
    assert_eq!(properties["delivery_mode"], 2);
    assert!(properties.get("expiration").is_none(), "{properties}");
    assert_eq!(properties["message_id"], journal.attempts()[0].job.id());

    let headers = &buried[0]["headers"];
    let instants = check_the_story(headers);
    let bounds = [before.clone()].into_iter().chain(instants).chain([after]);
    assert!(bounds.is_sorted(), "published at {before}: {headers:#}");
    check_the_types(channel).await;
}

/// Every header of the documentation's table; the answer is its instants in their order.
fn check_the_story(headers: &Value) -> Vec<String> {
    let instant = |value: &Value| {
        let text = value.as_str().unwrap_or_else(|| panic!("no text: {value}")).to_owned();
        humantime::parse_rfc3339(&text).unwrap_or_else(|why| panic!("{text}: {why}"));
        assert_eq!(text.len(), "2026-01-31T12:00:00.000Z".len(), "{text} is not to the ms");
        text
    };
    let expected = json!({
        "tenant": "acme",
        "retry-count": 4,
        "retry-level": "3/3 900ms",
        "retry-error": "attempt 3: out of luck",
        "retry-error-kind": "failed",
        "retry-queue": "orders",
        "retry-original-exchange": "amq.topic",
        "retry-original-routing-key": "order.created",
        "buried-reason": "exhausted",
        "buried-detail": "it failed 4 times, and its policy has 3 levels",
        "buried-by": "worker-1",
    });
    let mut rest = headers.as_object().unwrap().clone();
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(rest.remove(key).as_ref(), Some(value), "{key}");
    }
    let mut take = |key: &str| rest.remove(key).unwrap_or_else(|| panic!("no {key}: {headers:#}"));
    let first = instant(&take("retry-first-failed-at"));
    let last = instant(&take("retry-last-failed-at"));
    let buried = instant(&take("buried-at"));
    let history = take("retry-history");
    // What a quorum queue counts by itself.
    rest.retain(|key, _| key != "x-delivery-count" && key != "x-acquired-count");
    assert_eq!(rest.keys().collect::<Vec<_>>(), Vec::<&String>::new(), "and nothing else");

    let levels = ["0/3", "1/3 300ms", "2/3 600ms", "3/3 900ms"];
    let history = history.as_array().unwrap();
    assert_eq!(history.len(), levels.len());
    let mut instants = Vec::new();
    for (attempt, (entry, level)) in history.iter().zip(levels).enumerate() {
        instants.push(instant(&entry["at"]));
        let expected = json!({
            "at": entry["at"],
            "kind": "failed",
            "error": format!("attempt {attempt}: out of luck"),
            "level": level,
            "worker": "worker-1",
        });
        assert_eq!(*entry, expected);
    }
    assert_eq!((instants.first(), instants.last()), (Some(&first), Some(&last)));
    instants.push(buried);
    instants
}

/// The management API shows any number as a number: the AMQP types are seen by AMQP only.
async fn check_the_types(channel: &Channel) {
    // The look of before may not be over yet for the queue.
    let got = eventually("the buried job is ready", PATIENCE, async || {
        channel.basic_get("orders.buried".into(), BasicGetOptions::default()).await.unwrap()
    })
    .await;
    let headers = got.delivery.properties.headers().as_ref().unwrap().inner();
    for (key, value) in headers {
        let key = key.as_str();
        match (key, value) {
            ("retry-count", AMQPValue::LongLongInt(4)) => {}
            ("retry-history", AMQPValue::FieldArray(entries)) => {
                for entry in entries.as_slice() {
                    let AMQPValue::FieldTable(entry) = entry else { panic!("{entry:?}") };
                    let text = |value: &AMQPValue| matches!(value, AMQPValue::LongString(_));
                    assert!(entry.inner().values().all(text), "{entry:?}");
                }
            }
            // What the broker counts on a quorum queue, the look of before included.
            ("x-delivery-count" | "x-acquired-count", _) => {}
            (_, AMQPValue::LongString(_)) if key != "retry-count" && key != "retry-history" => {}
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_waits_in_a_quorum_lane_shows_when_it_comes_back() {
    shows_when_it_comes_back(QueueType::Quorum).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_waits_in_a_classic_lane_shows_when_it_comes_back() {
    shows_when_it_comes_back(QueueType::Classic).await;
}

async fn shows_when_it_comes_back(kind: QueueType) {
    let scene = Scene::with("orders", kind).await;
    let (vhost, channel) = (&scene.vhost, &scene.channel);
    let journal = Journal::default();
    let policy = RetryPolicy::new(["1m", "2m", "3m"]).lanes(4);
    let settings = Settings::new(policy).queue_type(kind);
    let worker = start(vhost, "orders", settings, &journal).await;
    let properties = BasicProperties::default().with_message_id("1".into()).with_delivery_mode(1);
    publish(channel, "", "orders", properties, b"99").await;
    let (level, delay) =
        eventually("it is in a lane", PATIENCE, async || journal.retried("1", 0)).await;
    worker.shutdown(LATE).await;
    assert_eq!(level, 1);
    let ms = delay.as_millis();
    assert!([37_500, 45_000, 52_500, 60_000].contains(&ms), "{delay:?}");

    let waiting = vhost.api().peek(&format!("orders.retry.00060s.{ms:08}ms"), 9);
    assert_eq!(waiting.len(), 1, "in the lane of {delay:?}");
    let (properties, headers) = (&waiting[0]["properties"], &waiting[0]["headers"]);
    assert_eq!(properties["expiration"], ms.to_string());
    assert_eq!(properties["delivery_mode"], 2);
    assert_eq!(headers["retry-level"], "1/3 1m");
    assert_eq!(headers["retry-count"], 1);
    assert!(headers.get("buried-reason").is_none(), "{headers}");
    let instant = |key: &str| humantime::parse_rfc3339(headers[key].as_str().unwrap()).unwrap();
    let (failed, due) = (instant("retry-last-failed-at"), instant("retry-due-at"));
    let wait = due.duration_since(failed).unwrap() + Duration::from_millis(1);
    assert!(wait >= delay && wait <= delay + LATE, "due {wait:?} after the failure: {headers}");
}

/// As the headers write it, so that texts compare as instants do.
fn instant(at: SystemTime) -> String {
    humantime::format_rfc3339_millis(at).to_string()
}
