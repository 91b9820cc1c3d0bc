//! Messages whose headers were written by somebody who does not know us, or means no good. Each ends
//! done, retried or buried with the right reason; none crashes, blocks or kills a connection.

use crate::support::{
    BURIED, HEADERS, Journal, PATIENCE, RawPublisher, Scene, WORK, count, eventually, header,
    quick, raw_table, short, table, text,
};
use lapin::types::{AMQPValue, ByteArray, DecimalValue, FieldArray, FieldTable};
use lapin_retry::{BuriedReason, Event, Handle, Job, QueueType, RetryConsumer};
use std::{collections::BTreeSet, time::Duration};

fn long_string(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

/// Values that make sense as neither a count nor an instant.
fn silly_values() -> Vec<AMQPValue> {
    vec![
        AMQPValue::ShortShortInt(-1),
        AMQPValue::ShortInt(-1),
        AMQPValue::LongInt(i32::MIN),
        AMQPValue::LongLongInt(-1),
        AMQPValue::LongLongInt(i64::MAX),
        long_string("9223372036854775808"),
        long_string("abc"),
        long_string(""),
        AMQPValue::LongString(vec![0xFF, 0xFE].into()),
        AMQPValue::Boolean(true),
        AMQPValue::Double(1.5),
        AMQPValue::Double(1e300),
        AMQPValue::Float(-0.5),
        AMQPValue::DecimalValue(DecimalValue { scale: 2, value: 314 }),
        AMQPValue::Timestamp(u64::MAX),
        AMQPValue::ByteArray(ByteArray::from(vec![0; 16])),
        AMQPValue::Void,
        AMQPValue::FieldArray(FieldArray::from(vec![AMQPValue::LongInt(1), AMQPValue::Void])),
        AMQPValue::FieldTable(nested(100)),
        AMQPValue::FieldTable(wide(100_000)),
    ]
}

/// Tables in tables.
fn nested(levels: u32) -> FieldTable {
    (0..levels).fold(table([]), |inner, _| table([("t", AMQPValue::FieldTable(inner))]))
}

/// A table of this many bytes, in tables of some 1,000.
fn wide(bytes: usize) -> FieldTable {
    let mut outer = FieldTable::default();
    for n in 0..bytes / 1_000 {
        let inner = table([("inner", long_string(&"v".repeat(970)))]);
        outer.insert(format!("table {n:04}").into(), AMQPValue::FieldTable(inner));
    }
    outer
}

/// Of ours, beside the `retry-queue` that makes them believed.
fn beside_our_queue(name: &str, value: AMQPValue) -> FieldTable {
    table([("retry-queue", long_string(WORK)), (name, value)])
}

const COUNTS: [&str; 4] =
    ["retry-count", "retry-busy-count", "retry-crash-count", "retry-exhumed-count"];
const INSTANTS: [&str; 2] = ["retry-first-failed-at", "retry-deadline"];
const TEXTS: [&str; 2] = ["retry-original-exchange", "retry-original-routing-key"];
/// What decides nothing.
const FOR_PEOPLE: [&str; 9] = [
    "retry-level",
    "retry-due-at",
    "retry-last-failed-at",
    "retry-error",
    "retry-error-kind",
    "retry-history",
    "retry-original-cc",
    "retry-original-user-id",
    "retry-foreign-count",
];

/// Every header that decides something with every value that makes no sense there.
fn odd_headers() -> Vec<(String, &'static str, AMQPValue)> {
    let mut odd = Vec::new();
    for (index, value) in silly_values().into_iter().enumerate() {
        let is_text = matches!(value, AMQPValue::LongString(_));
        let texts = TEXTS.iter().filter(|_| !is_text);
        for name in COUNTS.iter().chain(&INSTANTS).chain(texts) {
            odd.push((format!("{name}/{index}"), *name, value.clone()));
        }
    }
    odd
}

/// Fails each job but those with the body `good`.
async fn consumer(scene: &Scene, journal: &Journal) -> Handle {
    RetryConsumer::builder(scene.url(), WORK)
        .policy(quick())
        .on_event(journal.hook())
        .handler(|job: Job| async move {
            anyhow::ensure!(job.body() == b"good", "no use");
            Ok(())
        })
        .start()
        .await
        .unwrap()
}

fn buried(event: &Event) -> Option<(String, BuriedReason)> {
    match event {
        Event::Buried { job, reason, .. } => Some((job.id().to_owned(), *reason)),
        _ => None,
    }
}

fn retried(event: &Event) -> Option<String> {
    match event {
        Event::Retried { job, .. } => Some(job.id().to_owned()),
        _ => None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_job_with_an_odd_header_of_ours_is_buried_with_the_value_as_it_came() {
    let scene = Scene::new().await;
    let odd = odd_headers();
    for (id, name, value) in &odd {
        scene.job(id, beside_our_queue(name, value.clone()), b"bad").await;
    }
    scene.job("behind", table([]), b"good").await;
    let journal = Journal::default();
    let handle = consumer(&scene, &journal).await;

    journal.is_done("behind").await;
    let buried = scene.buried(odd.len()).await;

    for (id, name, value) in &odd {
        let properties = &buried[id].properties;
        assert_eq!(text(properties, "buried-reason").as_deref(), Some("invalid-headers"), "{id}");
        assert_eq!(header(properties, name), Some(value), "{id}");
        assert_eq!(text(properties, "retry-error").as_deref(), Some("no use"), "{id}");
    }
    assert!(journal.all(retried).is_empty());
    journal.nothing_broke();
    handle.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_succeeds_is_done_whatever_our_headers_on_it_say() {
    let scene = Scene::of(QueueType::Classic).await;
    let mut ids = BTreeSet::new();
    for (id, name, value) in odd_headers() {
        scene.job(&id, beside_our_queue(name, value), b"good").await;
        ids.insert(id);
    }
    let journal = Journal::default();
    let handle = consumer(&scene, &journal).await;
    eventually("all are done", PATIENCE, async || journal.done().len() == ids.len()).await;
    assert_eq!(journal.done().into_iter().collect::<BTreeSet<_>>(), ids);
    assert_eq!(count(&scene.channel, BURIED).await, 0);
    journal.nothing_broke();
    handle.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn silly_values_in_headers_that_are_for_people_change_nothing() {
    let scene = Scene::new().await;
    let mut jobs = 0;
    for (index, value) in silly_values().into_iter().enumerate() {
        for name in FOR_PEOPLE {
            let headers = beside_our_queue(name, value.clone());
            scene.job(&format!("{name}/{index}"), headers, b"bad").await;
            jobs += 1;
        }
    }
    let journal = Journal::default();
    let handle = consumer(&scene, &journal).await;

    let buried = scene.buried(jobs).await;

    for (id, message) in &buried {
        let properties = &message.properties;
        assert_eq!(text(properties, "buried-reason").as_deref(), Some("exhausted"), "{id}");
        assert_eq!(header(properties, "retry-count"), Some(&AMQPValue::LongLongInt(3)), "{id}");
        assert_eq!(text(properties, "retry-error").as_deref(), Some("no use"), "{id}");
    }
    assert_eq!(journal.all(retried).len(), 2 * jobs);
    journal.nothing_broke();
    handle.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_count_is_believed_in_every_width_that_a_client_may_write() {
    let scene = Scene::new().await;
    let one = [
        AMQPValue::ShortShortInt(1),
        AMQPValue::ShortShortUInt(1),
        AMQPValue::ShortInt(1),
        AMQPValue::ShortUInt(1),
        AMQPValue::LongInt(1),
        AMQPValue::LongUInt(1),
        AMQPValue::LongLongInt(1),
        AMQPValue::Float(1.0),
        AMQPValue::Double(1.0),
        long_string(" 1 "),
    ];
    for (index, value) in one.iter().enumerate() {
        let headers = beside_our_queue("retry-count", value.clone());
        scene.job(&format!("{index}"), headers, b"bad").await;
    }
    let journal = Journal::default();
    let handle = consumer(&scene, &journal).await;
    for (id, message) in scene.buried(one.len()).await {
        let count = header(&message.properties, "retry-count");
        assert_eq!(count, Some(&AMQPValue::LongLongInt(3)), "{id}");
    }
    // One failure was on them already.
    assert_eq!(journal.all(retried).len(), one.len());
    handle.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_count_of_somebody_else_counts_nothing_and_is_kept_under_another_name() {
    let scene = Scene::new().await;
    let mut foreign = silly_values();
    foreign.push(AMQPValue::LongLongInt(5));
    for (index, value) in foreign.iter().enumerate() {
        let alone = table([("retry-count", value.clone())]);
        scene.job(&format!("alone/{index}"), alone, b"bad").await;
        let elsewhere = table([
            ("retry-count", value.clone()),
            ("retry-queue", long_string("elsewhere")),
            ("retry-deadline", long_string("1970-01-01T00:00:00Z")),
            ("buried-reason", long_string("theirs")),
        ]);
        scene.job(&format!("elsewhere/{index}"), elsewhere, b"bad").await;
    }
    let journal = Journal::default();
    let handle = consumer(&scene, &journal).await;

    let jobs = 2 * foreign.len();
    for (id, message) in scene.buried(jobs).await {
        let index: usize = id.split_once('/').unwrap().1.parse().unwrap();
        let properties = &message.properties;
        assert_eq!(text(properties, "buried-reason").as_deref(), Some("exhausted"), "{id}");
        assert_eq!(header(properties, "retry-count"), Some(&AMQPValue::LongLongInt(3)), "{id}");
        assert_eq!(header(properties, "retry-foreign-count"), Some(&foreign[index]), "{id}");
        assert_eq!(text(properties, "retry-error").as_deref(), Some("no use"), "{id}");
        assert_eq!(text(properties, "retry-queue").as_deref(), Some(WORK), "{id}");
        assert_eq!(header(properties, "retry-exhumed-count"), None, "{id}");
    }
    journal.nothing_broke();
    handle.shutdown(Duration::from_secs(5)).await;
}

/// RabbitMQ 3.10 drops a message for the first two, if they come back to it.
#[tokio::test(flavor = "multi_thread")]
async fn a_forged_x_death_or_delivery_count_is_not_sent_back_to_the_broker() {
    let scene = Scene::new().await;
    let death = |reason: &str, queue: &str| {
        AMQPValue::FieldArray(FieldArray::from(vec![AMQPValue::FieldTable(table([
            ("count", AMQPValue::LongLongInt(7)),
            ("reason", long_string(reason)),
            ("queue", long_string(queue)),
            ("exchange", long_string("")),
        ]))]))
    };
    let numbers = AMQPValue::FieldArray(FieldArray::from(vec![AMQPValue::LongInt(1)]));
    let forged = [
        death("expired", WORK),
        numbers,
        death("rejected", WORK),
        death("expired", "work.retry.00000020ms"),
        long_string("x-death"),
        AMQPValue::LongInt(7),
        AMQPValue::FieldTable(nested(50)),
    ];
    for (index, value) in forged.iter().enumerate() {
        let headers = table([
            ("x-death", value.clone()),
            ("x-first-death-queue", long_string("forged")),
            ("x-first-death-reason", long_string("forged")),
            ("x-last-death-reason", AMQPValue::LongInt(1)),
            ("x-delivery-count", AMQPValue::LongLongInt(19)),
            ("x-acquired-count", AMQPValue::LongLongInt(19)),
            ("x-opt-forged", AMQPValue::Boolean(true)),
            ("x-mine", AMQPValue::Boolean(true)),
        ]);
        scene.job(&format!("{index}"), headers, b"bad").await;
    }
    let journal = Journal::default();
    let handle = consumer(&scene, &journal).await;

    for (id, message) in scene.buried(forged.len()).await {
        let properties = &message.properties;
        assert_eq!(text(properties, "buried-reason").as_deref(), Some("exhausted"), "{id}");
        assert_eq!(header(properties, "x-mine"), Some(&AMQPValue::Boolean(true)), "{id}");
        for name in ["x-death", "x-first-death-queue", "x-last-death-reason", "x-opt-forged"] {
            assert_eq!(header(properties, name), None, "{id}");
        }
        let deliveries = header(properties, "x-delivery-count");
        assert_ne!(deliveries, Some(&AMQPValue::LongLongInt(19)), "{id}");
    }
    assert_eq!(journal.all(retried).len(), 2 * forged.len(), "each came back twice");
    journal.nothing_broke();
    handle.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_that_no_lapin_client_writes_are_read_and_passed_on() {
    let scene = Scene::new().await;
    let mut publisher = RawPublisher::connect(&scene.url());
    let fields = [
        &short(b"")[..],
        b"V",
        &short(&[b'k'; 255]),
        b"L\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF",
        // The same name twice.
        &short(b"twice"),
        b"I\x00\x00\x00\x01",
        &short(b"twice"),
        b"I\x00\x00\x00\x02",
    ]
    .concat();
    publisher.publish(WORK, HEADERS, &raw_table(&fields), b"bad");
    let journal = Journal::default();
    let handle = consumer(&scene, &journal).await;
    let (_, reason) = journal.first("it is buried", buried).await;
    assert_eq!(reason, BuriedReason::Exhausted);
    let message = scene.buried(1).await.into_values().next().unwrap();
    assert_eq!(header(&message.properties, ""), Some(&AMQPValue::Void));
    let longest = header(&message.properties, &"k".repeat(255));
    assert_eq!(longest, Some(&AMQPValue::LongLongInt(-1)));
    journal.nothing_broke();
    handle.shutdown(Duration::from_secs(5)).await;
}
