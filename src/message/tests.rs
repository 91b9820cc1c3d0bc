//! Messages that anybody may have sent, and what the broker would say of the answer.

use std::{
    io::Cursor,
    sync::Arc,
    time::{Duration, SystemTime},
};

use amq_protocol::frame::{AMQPContentHeader, AMQPFrame, WriteContext, gen_frame};
use lapin::{
    BasicProperties,
    types::{AMQPValue, FieldTable},
};
use proptest::prelude::*;

use super::{
    Copier, Failure, Message, Story,
    header::{OURS, string, tests::values},
};
use crate::{BuriedReason, FailureKind};

pub(super) const COPIER: Copier<'static> =
    Copier { work_queue: "orders", user: "worker", frame_max: 131_072 };

/// 2026-01-01T00:00:00Z and so many seconds.
pub(super) fn second(s: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_225_600 + s)
}

pub(super) fn table<'a>(fields: impl IntoIterator<Item = (&'a str, AMQPValue)>) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in fields {
        table.insert(name.into(), value);
    }
    table
}

/// A delivery of a job that was published to the exchange `shop` with `order.new`.
pub(super) fn message(properties: BasicProperties) -> Arc<Message> {
    Arc::new(Message {
        exchange: "shop".into(),
        routing_key: "order.new".into(),
        redelivered: false,
        properties,
        body: b"{}".to_vec(),
    })
}

pub(super) fn with_headers<'a>(
    fields: impl IntoIterator<Item = (&'a str, AMQPValue)>,
) -> Arc<Message> {
    message(BasicProperties::default().with_headers(table(fields)))
}

pub(super) fn failure(error: &str) -> Failure<'_> {
    Failure {
        kind: FailureKind::Failed,
        error,
        at: second(60),
        level: "0/7".to_owned(),
        worker: "host:1",
    }
}

/// What becomes of a delivery that fails: the headers of the copy, and what it was read as.
pub(super) fn failed_once(message: &Arc<Message>) -> (FieldTable, Story) {
    let mut story = Story::read(message, "orders");
    story.charge(failure("no route to host"));
    story.remember(message, second(60));
    let mut told = story.clone();
    told.set_level("1/7 15s".to_owned());
    told.go_to(second(70));
    let copy = COPIER
        .onward(message, "id", &mut told.clone(), "orders.retry.00015s", Some(15_000))
        .unwrap();
    (copy.properties.headers().clone().unwrap(), story)
}

pub(super) fn buried(message: &Arc<Message>, reason: BuriedReason) -> FieldTable {
    let mut story = Story::read(message, "orders");
    story.charge(failure("no route to host"));
    story.remember(message, second(60));
    let what = (reason, second(61), "host:1");
    let (copy, _) = COPIER.burial(message, "id", story, "orders.buried", what);
    copy.properties.headers().clone().unwrap()
}

/// The bytes of the copy's header frame, as lapin's own generator writes it.
pub(crate) fn header_frame_len(properties: &BasicProperties) -> usize {
    let header =
        AMQPContentHeader { class_id: 60, body_size: u64::MAX, properties: properties.clone() };
    let frame = AMQPFrame::Header(u16::MAX, header);
    let mut buffer = vec![0; 1 << 20];
    let written = gen_frame(&frame)(WriteContext::from(Cursor::new(&mut buffer[..]))).unwrap();
    usize::try_from(written.position).unwrap()
}

/// The broker closes the connection at a short string inside a table.
pub(crate) fn has_short_string(table: &FieldTable) -> bool {
    fn within(value: &AMQPValue) -> bool {
        match value {
            AMQPValue::ShortString(_) => true,
            AMQPValue::FieldArray(array) => array.as_slice().iter().any(within),
            AMQPValue::FieldTable(table) => has_short_string(table),
            _ => false,
        }
    }
    table.inner().values().any(within)
}

/// Header names: ours, the broker's, and anybody's.
fn names() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => proptest::sample::select(OURS.as_slice()).prop_map(str::to_owned),
        1 => proptest::sample::select(
            ["x-death", "x-first-death-queue", "x-delivery-count", "x-opt-a", "CC", "BCC"].as_slice()
        )
        .prop_map(str::to_owned),
        2 => "[a-z-]{0,12}",
    ]
}

/// Values of any kind, among them such as ours have.
fn likely_values() -> impl Strategy<Value = AMQPValue> {
    let texts = proptest::sample::select(
        ["orders", "invoices", "0", "7", "-1", "9223372036854775808", "abc", "exhausted"]
            .as_slice(),
    );
    prop_oneof![
        3 => values(),
        1 => texts.prop_map(string),
        1 => (-2i64..1000).prop_map(AMQPValue::LongLongInt),
        1 => Just(AMQPValue::Double(f64::NAN)),
        1 => "[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(\\.[0-9]{0,10})?[Zä]?"
            .prop_map(|s| string(&s)),
    ]
}

/// Any headers, in half of the cases beside a `retry-queue` that makes ours believed.
pub(crate) fn headers() -> impl Strategy<Value = FieldTable> {
    let fields = proptest::collection::vec((names(), likely_values()), 0..25);
    (any::<bool>(), fields).prop_map(|(believed, fields)| {
        let mut table = table(fields.iter().map(|(name, value)| (name.as_str(), value.clone())));
        if believed {
            table.insert("retry-queue".into(), string("orders"));
        }
        table
    })
}

/// Foreign headers up to some 200 KB: many small, few large.
pub(crate) fn bulky_headers() -> impl Strategy<Value = FieldTable> {
    let sizes = prop_oneof![
        3 => 0usize..300,
        2 => 300usize..20_000,
        1 => 20_000usize..150_000,
    ];
    let fields = proptest::collection::vec(("[a-z]{1,30}", sizes), 0..25);
    (headers(), fields).prop_map(|(mut table, fields)| {
        for (name, size) in fields {
            table.insert(format!("big-{name}").into(), string("x".repeat(size)));
        }
        table
    })
}
