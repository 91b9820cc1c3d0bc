//! Whose headers, which values, and that all that is written is read back.

use super::*;
use crate::message::{
    header::tests::values,
    tests::{failed_once, failure, headers, message, second, table, with_headers},
};
use lapin::BasicProperties;
use proptest::prelude::*;

/// Beside `retry-queue: orders`, and what else there is.
fn read(fields: impl IntoIterator<Item = (&'static str, AMQPValue)>) -> Story {
    let whose = [(RETRY_QUEUE, string("orders"))];
    Story::read(&with_headers(whose.into_iter().chain(fields)), "orders")
}

/// What a copy's headers are read as, where the same worker consumes it.
fn read_again(headers: FieldTable) -> Story {
    Story::read(&message(BasicProperties::default().with_headers(headers)), "orders")
}

#[test]
fn a_message_without_headers_has_no_story() {
    assert_eq!(Story::read(&message(BasicProperties::default()), "orders"), Story::default());
    assert_eq!(read([]), Story::default());
}

#[test]
fn headers_beside_another_retry_queue_are_foreign() {
    let ours = [
        (RETRY_COUNT, AMQPValue::LongInt(3)),
        (RETRY_BUSY_COUNT, string("abc")),
        (RETRY_DEADLINE, string("2026-01-01T00:00:00Z")),
        (RETRY_ORIGINAL_EXCHANGE, string("theirs")),
        (BURIED_REASON, string("exhausted")),
    ];
    let alone = Story { foreign_count: Some(AMQPValue::LongInt(3)), ..Story::default() };
    for whose in [Some(string("invoices")), Some(AMQPValue::Boolean(true)), None] {
        let whose = whose.map(|whose| (RETRY_QUEUE, whose));
        let message = with_headers(ours.clone().into_iter().chain(whose));
        assert_eq!(Story::read(&message, "orders"), alone);

        let (copy, _) = failed_once(&message);
        let copy = copy.inner();
        assert_eq!(copy[RETRY_COUNT], long(1));
        assert_eq!(copy[RETRY_FOREIGN_COUNT], AMQPValue::LongInt(3));
        assert_eq!(copy[RETRY_ORIGINAL_EXCHANGE], string("shop"));
        for gone in [RETRY_BUSY_COUNT, RETRY_DEADLINE, BURIED_REASON, RETRY_EXHUMED_COUNT] {
            assert!(!copy.contains_key(gone), "{gone}");
        }
    }
}

#[test]
fn a_foreign_count_is_kept_from_copy_to_copy() {
    let (copy, _) = failed_once(&with_headers([(RETRY_COUNT, string("five"))]));
    let (copy, story) = failed_once(&message(BasicProperties::default().with_headers(copy)));
    assert_eq!(story.retry_count, 2);
    assert_eq!(copy.inner()[RETRY_FOREIGN_COUNT], string("five"));
}

#[test]
fn a_header_that_decides_and_makes_no_sense_is_odd() {
    let silly = [
        AMQPValue::LongLongInt(-1),
        AMQPValue::LongLongInt(i64::MAX),
        AMQPValue::Double(f64::NAN),
        AMQPValue::Double(0.5),
        AMQPValue::Boolean(true),
        AMQPValue::Void,
        AMQPValue::ByteArray(b"7".to_vec().into()),
        AMQPValue::FieldTable(table([("a", AMQPValue::FieldTable(FieldTable::default()))])),
        AMQPValue::FieldArray(vec![long(7)].into()),
    ];
    let texts = ["9223372036854775808", "abc", "", "1.5", "0x7"].map(string);
    let counts = [RETRY_COUNT, RETRY_BUSY_COUNT, RETRY_CRASH_COUNT, RETRY_EXHUMED_COUNT];
    let instants = [RETRY_FIRST_FAILED_AT, RETRY_DEADLINE];
    for key in counts.into_iter().chain(instants) {
        for value in silly.iter().chain(&texts) {
            let story = read([(key, value.clone())]);
            assert!(story.is_odd(), "{key}: {value:?}");
            assert_eq!(Story { odd: Vec::new(), ..story }, Story::default());
        }
    }
    for key in [RETRY_ORIGINAL_EXCHANGE, RETRY_ORIGINAL_ROUTING_KEY] {
        for value in &silly {
            assert!(read([(key, value.clone())]).is_odd(), "{key}: {value:?}");
        }
    }
}

#[test]
fn a_header_for_people_is_never_odd() {
    for key in [
        RETRY_LEVEL,
        RETRY_DUE_AT,
        RETRY_LAST_FAILED_AT,
        RETRY_ERROR,
        RETRY_ERROR_KIND,
        RETRY_HISTORY,
        RETRY_ORIGINAL_CC,
        RETRY_ORIGINAL_USER_ID,
        RETRY_FOREIGN_COUNT,
    ] {
        assert!(!read([(key, AMQPValue::Double(f64::NAN))]).is_odd(), "{key}");
    }
    let entries = vec![long(1), AMQPValue::FieldTable(FieldTable::default()), string("x")];
    let story = read([(RETRY_HISTORY, AMQPValue::FieldArray(entries.into()))]);
    assert_eq!(story.history, [Arc::new(AMQPValue::FieldTable(FieldTable::default()))]);
}

#[test]
fn an_exhumed_job_starts_afresh_and_is_counted() {
    let mut story = read([
        (RETRY_COUNT, long(7)),
        (RETRY_BUSY_COUNT, string("abc")),
        (RETRY_CRASH_COUNT, long(2)),
        (RETRY_EXHUMED_COUNT, long(1)),
        (RETRY_DEADLINE, string("2020-01-01T00:00:00Z")),
        (RETRY_FIRST_FAILED_AT, string("2020-01-01T00:00:00Z")),
        (RETRY_ERROR, string("no route to host")),
        (RETRY_ORIGINAL_EXCHANGE, string("shop")),
        // Whatever it says: only a buried job has it.
        (BURIED_REASON, AMQPValue::Boolean(true)),
    ]);
    story.forgive(second(2_000_000_000));
    let afresh = Story {
        exhumed_count: 2,
        exhumed: true,
        error: Some("no route to host".to_owned()),
        original_exchange: Some("shop".to_owned()),
        ..Story::default()
    };
    assert_eq!(story, afresh);
    assert_eq!(read([(BURIED_REASON, string("")), (RETRY_COUNT, string("abc"))]), {
        Story { exhumed_count: 1, exhumed: true, ..Story::default() }
    });
}

#[test]
fn counts_saturate() {
    let most = long(u32::MAX);
    let mut story = read([(RETRY_COUNT, most.clone()), (RETRY_EXHUMED_COUNT, most)]);
    story.charge(failure(""));
    assert_eq!(story.retry_count, u32::MAX);
    story.exhume();
    assert_eq!(story.exhumed_count, u32::MAX);
}

#[test]
fn the_history_keeps_the_last_attempts_and_texts_are_cut() {
    let mut story = Story::default();
    let (long_error, long_worker) = ("ä".repeat(5000), "w".repeat(5000));
    for n in 0..20 {
        let failure = Failure { at: second(n), worker: &long_worker, ..failure(&long_error) };
        story.charge(failure);
    }
    let Some(AMQPValue::FieldArray(history)) = story.told_history() else { panic!("{story:?}") };
    assert_eq!(history.as_slice().len(), HISTORY_ENTRIES);
    let entry = |n: usize| match &history.as_slice()[n] {
        AMQPValue::FieldTable(entry) => entry.inner().clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(entry(0)["at"], string("2026-01-01T00:00:12.000Z"));
    assert_eq!(entry(7)["at"], string("2026-01-01T00:00:19.000Z"));
    let len = |value: &AMQPValue| text(value).unwrap().len();
    assert!(len(&entry(7)["error"]) <= HISTORY_ERROR_BYTES);
    assert!(len(&entry(7)["worker"]) <= WORKER_BYTES);
    assert!(story.error.as_ref().unwrap().len() <= ERROR_BYTES);
    story.bury(BuriedReason::Exhausted, second(20), &long_worker);
    assert!(story.buried.unwrap().by.len() <= WORKER_BYTES);
}

#[test]
fn the_deadline_counts_from_the_timestamp_or_the_first_failure() {
    let now = second(1000);
    let deadline = |timestamp: Option<u64>, expiration: &str| {
        let mut properties = BasicProperties::default().with_expiration(expiration.into());
        if let Some(timestamp) = timestamp {
            properties = properties.with_timestamp(timestamp);
        }
        let mut story = Story::default();
        story.charge(failure(""));
        story.remember(&message(properties), now);
        story.deadline
    };
    let unix = |at: SystemTime| at.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    assert_eq!(deadline(Some(unix(second(10))), "5000"), Some(second(15)));
    assert_eq!(deadline(Some(unix(now)), "5000"), Some(second(1005)));
    // Published in the future: a clock that is wrong, or milliseconds.
    assert_eq!(deadline(Some(unix(now) + 1), "5000"), Some(second(65)));
    assert_eq!(deadline(Some(unix(now) * 1000), "5000"), Some(second(65)));
    assert_eq!(deadline(Some(u64::MAX), "5000"), Some(second(65)));
    assert_eq!(deadline(None, "5000"), Some(second(65)));
    assert!(deadline(None, "18446744073709551615") > Some(second(1 << 40)));
    assert_eq!(deadline(None, "soon"), None);
}

#[test]
fn only_the_first_delivery_tells_where_a_job_came_from() {
    let first = message(BasicProperties::default().with_expiration("5000".into()));
    let (copy, story) = failed_once(&first);
    let mut again = Message {
        exchange: "".into(),
        routing_key: "orders".into(),
        redelivered: false,
        // Put into the lane by hand, with an expiration of its own.
        properties: BasicProperties::default().with_expiration("1".into()),
        body: Vec::new(),
    };
    again.properties = again.properties.with_headers(copy);
    let mut later = Story::read(&again, "orders");
    later.remember(&again, second(100));
    assert_eq!(later.original_exchange(), Some("shop"));
    assert_eq!(later.original_routing_key(), Some("order.new"));
    assert_eq!(later.deadline, story.deadline);
}

fn instants() -> impl Strategy<Value = Option<SystemTime>> {
    let ms = 0u64..253_402_300_799_000;
    proptest::option::of(ms.prop_map(|ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms)))
}

/// A story as this code tells it.
fn stories() -> impl Strategy<Value = Story> {
    let counts = any::<[u32; 4]>();
    let times = (instants(), instants(), instants());
    let word = || proptest::option::of(".{0,40}");
    let words = (word(), word(), word(), word(), word());
    let kept = (proptest::option::of(values()), proptest::option::of(values()), 0..3usize);
    (counts, times, words, kept).prop_map(|(counts, times, words, kept)| {
        let mut story = Story {
            retry_count: counts[0],
            busy_count: counts[1],
            crash_count: counts[2],
            exhumed_count: counts[3],
            first_failed_at: times.0,
            last_failed_at: times.1,
            deadline: times.2,
            original_exchange: words.0,
            original_routing_key: words.1,
            original_user_id: words.2,
            error: words.3.map(|error| cut(error, ERROR_BYTES).into_owned()),
            level: words.4.map(|level| cut(level, 64).into_owned()),
            original_cc: kept.0,
            foreign_count: kept.1,
            ..Story::default()
        };
        for _ in 0..kept.2 {
            let entry = AMQPValue::FieldTable(table([("at", string("then"))]));
            story.history.push(Arc::new(entry));
        }
        story
    })
}

proptest! {
    #[test]
    fn any_headers_are_read_and_a_failure_makes_a_copy_of_them(headers in headers()) {
        let message = message(BasicProperties::default().with_headers(headers));
        let story = Story::read(&message, "orders");
        // Not as values: among them may be some that are not equal to themselves.
        let if_any = Story::if_any(&message, "orders").unwrap_or_default();
        prop_assert_eq!(format!("{if_any:?}"), format!("{story:?}"));
        prop_assert!(story.odd.iter().all(|(key, _)| OURS.contains(key)));
        let (copy, after) = failed_once(&message);
        if !after.is_odd() {
            prop_assert_eq!(after.retry_count, story.retry_count.saturating_add(1));
            prop_assert!(!read_again(copy).is_odd());
        }
    }

    #[test]
    fn what_is_written_is_read_back(story in stories()) {
        let mut headers = FieldTable::default();
        story.write("orders", &mut headers);
        prop_assert_eq!(format!("{:?}", read_again(headers)), format!("{story:?}"));
    }

    #[test]
    fn what_another_queue_wrote_is_not_read(story in stories()) {
        let mut headers = FieldTable::default();
        story.write("invoices", &mut headers);
        let read = read_again(headers);
        prop_assert_eq!(read.foreign_count, Some(long(story.retry_count)));
        prop_assert_eq!(Story { foreign_count: None, ..read }, Story::default());
    }

    #[test]
    fn a_buried_story_is_read_as_one_exhumed(mut story in stories()) {
        story.bury(BuriedReason::Exhausted, second(0), "host:1");
        let mut headers = FieldTable::default();
        story.write("orders", &mut headers);
        story.buried = None;
        story.exhume();
        prop_assert_eq!(format!("{:?}", read_again(headers)), format!("{story:?}"));
    }
}
