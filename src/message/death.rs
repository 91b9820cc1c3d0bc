//! A job that came to its work queue as a dead letter of another queue. A copy that comes back from a
//! lane has the lane in the broker's `x-first-death` headers, so what they said at first is kept under
//! a name of ours.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use lapin::types::{AMQPValue, FieldTable, ShortString};

use super::header::{cut, integer, long, rfc3339, string, text};

pub(super) const FIRST_DEATH_QUEUE: &str = "x-first-death-queue";
/// What is kept of it.
const FIELDS: [&str; 6] = ["queue", "reason", "exchange", "routing-key", "count", "at"];
/// How much of each of them, in bytes.
const FIELD_BYTES: usize = 255;

/// The first death of a message, as the broker tells it.
pub(super) fn first(headers: &BTreeMap<ShortString, AMQPValue>) -> Option<AMQPValue> {
    let first = |field: &str| headers.get(format!("x-first-death-{field}").as_str());
    let queue = first("queue").and_then(text)?;
    let reason = first("reason").and_then(text);
    let deaths = match headers.get("x-death") {
        Some(AMQPValue::FieldArray(deaths)) => deaths.as_slice(),
        _ => &[],
    };
    let tables = deaths.iter().filter_map(|death| match death {
        AMQPValue::FieldTable(table) => Some(table.inner()),
        _ => None,
    });
    let is_it = |death: &&BTreeMap<ShortString, AMQPValue>| {
        death.get("queue").and_then(text).as_ref() == Some(&queue)
            && death.get("reason").and_then(text) == reason
    };
    let death = tables.into_iter().find(is_it);
    bounded(|field| match field {
        "queue" | "reason" | "exchange" => first(field).cloned(),
        "routing-key" => match death?.get("routing-keys")? {
            AMQPValue::FieldArray(keys) => keys.as_slice().first().cloned(),
            _ => None,
        },
        "at" => match death?.get("time")? {
            AMQPValue::Timestamp(seconds) => {
                let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(*seconds));
                at.map(|at| string(rfc3339(at)))
            }
            _ => None,
        },
        _ => death?.get(field).cloned(),
    })
}

/// The same from a copy of ours, which anybody may have changed.
pub(super) fn kept(value: &AMQPValue) -> Option<AMQPValue> {
    let AMQPValue::FieldTable(table) = value else { return None };
    bounded(|field| table.inner().get(field).cloned())
}

fn bounded(value: impl Fn(&str) -> Option<AMQPValue>) -> Option<AMQPValue> {
    let mut kept = FieldTable::default();
    for field in FIELDS {
        let value = value(field).and_then(|value| match text(&value) {
            Some(text) => Some(string(cut(text, FIELD_BYTES))),
            None => integer(&value).map(long),
        });
        if let Some(value) = value {
            kept.insert(field.into(), value);
        }
    }
    (!kept.inner().is_empty()).then_some(AMQPValue::FieldTable(kept))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::tests::{failed_once, table, with_headers};

    /// A dead letter of the queue `incoming`, as RabbitMQ 4.3 delivers it.
    fn dead_letter() -> [(&'static str, AMQPValue); 4] {
        let list = |values: Vec<AMQPValue>| AMQPValue::FieldArray(values.into());
        let death = |queue: &str, reason: &str| {
            AMQPValue::FieldTable(table([
                ("count", AMQPValue::LongLongInt(3)),
                ("exchange", string("shop")),
                ("queue", string(queue)),
                ("reason", string(reason)),
                ("routing-keys", list(vec![string("order.new"), string("audit")])),
                ("time", AMQPValue::Timestamp(1_767_225_600)),
            ]))
        };
        let later = death("parking", "expired");
        [
            ("x-death", list(vec![later, death("incoming", "rejected")])),
            ("x-first-death-exchange", string("shop")),
            ("x-first-death-queue", string("incoming")),
            ("x-first-death-reason", string("rejected")),
        ]
    }

    fn whole() -> AMQPValue {
        AMQPValue::FieldTable(table([
            ("queue", string("incoming")),
            ("reason", string("rejected")),
            ("exchange", string("shop")),
            ("routing-key", string("order.new")),
            ("count", long(3)),
            ("at", string("2026-01-01T00:00:00.000Z")),
        ]))
    }

    #[test]
    fn the_first_death_is_kept_through_all_retries() {
        let mut message = with_headers(dead_letter());
        for _ in 0..3 {
            let (copy, _) = failed_once(&message);
            assert_eq!(copy.inner()["retry-original-death"], whole());
            assert!(!copy.contains_key("x-death"));
            // It comes back from a lane.
            let mut back = copy.clone();
            back.insert("x-first-death-queue".into(), string("orders.retry.00015s"));
            back.insert("x-first-death-reason".into(), string("expired"));
            message = with_headers(back.inner().iter().map(|(k, v)| (k.as_str(), v.clone())));
        }
    }

    #[test]
    fn a_job_that_never_died_before_has_none_also_after_a_lane() {
        let (copy, _) = failed_once(&with_headers([]));
        let mut back = copy.clone();
        back.insert("x-first-death-queue".into(), string("orders.retry.00015s"));
        let back = with_headers(back.inner().iter().map(|(k, v)| (k.as_str(), v.clone())));
        assert!(!failed_once(&back).0.contains_key("retry-original-death"));
    }

    #[test]
    fn what_is_kept_is_bounded_whoever_wrote_it() {
        let long = || string("ä".repeat(70_000));
        let forged = table([("queue", long()), ("count", long()), ("more", long())]);
        let death = AMQPValue::FieldTable(forged);
        for message in [
            with_headers([("x-first-death-queue", long()), ("x-first-death-reason", long())]),
            with_headers([("retry-queue", string("orders")), ("retry-original-death", death)]),
        ] {
            let (copy, _) = failed_once(&message);
            let AMQPValue::FieldTable(kept) = &copy.inner()["retry-original-death"] else {
                panic!("{copy:?}")
            };
            assert_eq!(kept.inner().len(), 2);
            let texts = kept.inner().values().filter_map(text);
            assert!(texts.into_iter().all(|text| text.len() <= FIELD_BYTES));
        }
    }
}
