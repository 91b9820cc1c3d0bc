//! Header names, and the reading of values that anybody may have written.

use std::{borrow::Cow, time::SystemTime};

use lapin::types::{AMQPValue, FieldArray, FieldTable};

pub(super) const RETRY_COUNT: &str = "retry-count";
pub(super) const RETRY_LEVEL: &str = "retry-level";
pub(super) const RETRY_DUE_AT: &str = "retry-due-at";
pub(super) const RETRY_WAIT_LEFT: &str = "retry-wait-left";
pub(super) const RETRY_NOT_BEFORE: &str = "retry-not-before";
pub(super) const RETRY_FIRST_FAILED_AT: &str = "retry-first-failed-at";
pub(super) const RETRY_LAST_FAILED_AT: &str = "retry-last-failed-at";
pub(super) const RETRY_ERROR: &str = "retry-error";
pub(super) const RETRY_ERROR_KIND: &str = "retry-error-kind";
pub(super) const RETRY_HISTORY: &str = "retry-history";
pub(super) const RETRY_QUEUE: &str = "retry-queue";
pub(super) const RETRY_ORIGINAL_EXCHANGE: &str = "retry-original-exchange";
pub(super) const RETRY_ORIGINAL_ROUTING_KEY: &str = "retry-original-routing-key";
pub(super) const RETRY_ORIGINAL_CC: &str = "retry-original-cc";
pub(super) const RETRY_ORIGINAL_USER_ID: &str = "retry-original-user-id";
pub(super) const RETRY_ORIGINAL_DEATH: &str = "retry-original-death";
pub(super) const RETRY_FOREIGN_COUNT: &str = "retry-foreign-count";
pub(super) const RETRY_BUSY_COUNT: &str = "retry-busy-count";
pub(super) const RETRY_CRASH_COUNT: &str = "retry-crash-count";
pub(super) const RETRY_EXHUMED_COUNT: &str = "retry-exhumed-count";
pub(super) const RETRY_DEADLINE: &str = "retry-deadline";
pub(super) const BURIED_REASON: &str = "buried-reason";
pub(super) const BURIED_DETAIL: &str = "buried-detail";
pub(super) const BURIED_AT: &str = "buried-at";
pub(super) const BURIED_BY: &str = "buried-by";
pub(super) const BURIED_DROPPED_HEADERS: &str = "buried-dropped-headers";

/// All of ours. None is copied as it is: each is written anew from the story, or left out.
pub(super) const OURS: [&str; 26] = [
    RETRY_COUNT,
    RETRY_LEVEL,
    RETRY_DUE_AT,
    RETRY_WAIT_LEFT,
    RETRY_NOT_BEFORE,
    RETRY_FIRST_FAILED_AT,
    RETRY_LAST_FAILED_AT,
    RETRY_ERROR,
    RETRY_ERROR_KIND,
    RETRY_HISTORY,
    RETRY_QUEUE,
    RETRY_ORIGINAL_EXCHANGE,
    RETRY_ORIGINAL_ROUTING_KEY,
    RETRY_ORIGINAL_CC,
    RETRY_ORIGINAL_USER_ID,
    RETRY_ORIGINAL_DEATH,
    RETRY_FOREIGN_COUNT,
    RETRY_BUSY_COUNT,
    RETRY_CRASH_COUNT,
    RETRY_EXHUMED_COUNT,
    RETRY_DEADLINE,
    BURIED_REASON,
    BURIED_DETAIL,
    BURIED_AT,
    BURIED_BY,
    BURIED_DROPPED_HEADERS,
];

/// The broker's own, which must not be sent back to it: RabbitMQ 3.10 believes a copied `x-death`
/// and drops messages on it, a copied `x-delivery-count` arrives as if it were true, and `CC` and
/// `BCC` would send copies elsewhere.
pub(super) fn is_the_brokers(name: &str) -> bool {
    const NAMES: [&str; 11] = [
        "x-death",
        "x-first-death-exchange",
        super::death::FIRST_DEATH_QUEUE,
        "x-first-death-reason",
        "x-last-death-exchange",
        "x-last-death-queue",
        "x-last-death-reason",
        super::DELIVERY_COUNT,
        super::ACQUIRED_COUNT,
        "CC",
        "BCC",
    ];
    NAMES.contains(&name) || name.starts_with("x-opt-")
}

/// A count. `None` is a value that makes no sense as one: negative, over `u32::MAX`, or no number.
pub(super) fn number(value: &AMQPValue) -> Option<u32> {
    integer(value)?.try_into().ok()
}

/// The one reader of a number in a header, which any client of any language may have written:
/// every integer width, a float without a fraction, a decimal string. `None` if it is negative, over
/// `u64::MAX`, or no number.
pub(super) fn integer(value: &AMQPValue) -> Option<u64> {
    let integer: i128 = match value {
        AMQPValue::ShortShortInt(n) => (*n).into(),
        AMQPValue::ShortShortUInt(n) => (*n).into(),
        AMQPValue::ShortInt(n) => (*n).into(),
        AMQPValue::ShortUInt(n) => (*n).into(),
        AMQPValue::LongInt(n) => (*n).into(),
        AMQPValue::LongUInt(n) => (*n).into(),
        AMQPValue::LongLongInt(n) => (*n).into(),
        AMQPValue::Float(n) => whole(f64::from(*n))?,
        AMQPValue::Double(n) => whole(*n)?,
        AMQPValue::LongString(_) | AMQPValue::ShortString(_) => text(value)?.trim().parse().ok()?,
        _ => return None,
    };
    u64::try_from(integer).ok()
}

fn whole(n: f64) -> Option<i128> {
    // `as` saturates, which is over u64::MAX all the same.
    (n.fract() == 0.0).then_some(n as i128)
}

/// A string in a header. Bytes that are no UTF-8 are replaced.
pub(super) fn text(value: &AMQPValue) -> Option<String> {
    match value {
        AMQPValue::LongString(s) => Some(String::from_utf8_lossy(s.as_bytes()).into_owned()),
        AMQPValue::ShortString(s) => Some(s.to_string()),
        _ => None,
    }
}

/// An instant: RFC 3339 text.
pub(super) fn instant(value: &AMQPValue) -> Option<SystemTime> {
    humantime::parse_rfc3339_weak(text(value)?.trim()).ok()
}

pub(super) fn long(n: impl TryInto<i64>) -> AMQPValue {
    AMQPValue::LongLongInt(n.try_into().unwrap_or(i64::MAX))
}

/// What a header of ours should hold.
pub(super) fn sense(name: &str) -> &'static str {
    match name {
        RETRY_WAIT_LEFT => "a number of milliseconds",
        RETRY_FIRST_FAILED_AT | RETRY_DEADLINE | RETRY_NOT_BEFORE => {
            "an instant such as 2026-01-31T12:00:00Z"
        }
        RETRY_ORIGINAL_EXCHANGE | RETRY_ORIGINAL_ROUTING_KEY => "a name of at most 255 bytes",
        _ => "a whole number from 0 to 4294967295",
    }
}

/// A value for an error's text.
pub(super) fn shown(value: &AMQPValue) -> String {
    match value {
        AMQPValue::Void => "empty".to_owned(),
        AMQPValue::Boolean(n) => n.to_string(),
        AMQPValue::ShortShortInt(n) => n.to_string(),
        AMQPValue::ShortShortUInt(n) => n.to_string(),
        AMQPValue::ShortInt(n) => n.to_string(),
        AMQPValue::ShortUInt(n) => n.to_string(),
        AMQPValue::LongInt(n) => n.to_string(),
        AMQPValue::LongUInt(n) => n.to_string(),
        AMQPValue::LongLongInt(n) => n.to_string(),
        AMQPValue::Float(n) => n.to_string(),
        AMQPValue::Double(n) => n.to_string(),
        AMQPValue::Timestamp(n) => format!("the timestamp {n}"),
        AMQPValue::DecimalValue(_) => "a decimal".to_owned(),
        AMQPValue::ByteArray(bytes) => format!("{} bytes", bytes.len()),
        AMQPValue::FieldArray(array) => format!("a list of {}", array.as_slice().len()),
        AMQPValue::FieldTable(table) => format!("a table of {}", table.inner().len()),
        AMQPValue::LongString(_) | AMQPValue::ShortString(_) => {
            format!("{:?}", cut(text(value).unwrap_or_default(), 64))
        }
    }
}

/// Always a long string: the broker closes the connection at a short one.
pub(super) fn string(s: impl Into<String>) -> AMQPValue {
    AMQPValue::LongString(s.into().into())
}

/// RFC 3339 with milliseconds, in UTC. Instants that it cannot write are cut to those it can.
pub(super) fn rfc3339(at: SystemTime) -> String {
    // humantime writes the years 1970 to 9999 and refuses others.
    let last = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(253_402_300_799);
    humantime::format_rfc3339_millis(at.clamp(SystemTime::UNIX_EPOCH, last)).to_string()
}

/// At most `bytes` of `text`, cut between characters, with an ellipsis where something is missing.
pub(crate) fn cut<'a>(text: impl Into<Cow<'a, str>>, bytes: usize) -> Cow<'a, str> {
    const ELLIPSIS: &str = "…";
    let text = text.into();
    if text.len() <= bytes {
        return text;
    }
    let mut end = bytes.saturating_sub(ELLIPSIS.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{}", &text[..end], if bytes >= ELLIPSIS.len() { ELLIPSIS } else { "" }).into()
}

/// The bytes that a table takes on the wire, its length prefix included.
pub(super) fn table_len(table: &FieldTable) -> usize {
    4 + table.inner().iter().map(|(key, value)| entry_len(key.as_str(), value)).sum::<usize>()
}

pub(super) fn entry_len(key: &str, value: &AMQPValue) -> usize {
    1 + key.len() + value_len(value)
}

fn value_len(value: &AMQPValue) -> usize {
    let content = match value {
        AMQPValue::Void => 0,
        AMQPValue::Boolean(_) | AMQPValue::ShortShortInt(_) | AMQPValue::ShortShortUInt(_) => 1,
        AMQPValue::ShortInt(_) | AMQPValue::ShortUInt(_) => 2,
        AMQPValue::LongInt(_) | AMQPValue::LongUInt(_) | AMQPValue::Float(_) => 4,
        AMQPValue::DecimalValue(_) => 5,
        AMQPValue::LongLongInt(_) | AMQPValue::Double(_) | AMQPValue::Timestamp(_) => 8,
        AMQPValue::ShortString(s) => 1 + s.as_str().len(),
        AMQPValue::LongString(s) => 4 + s.len(),
        AMQPValue::ByteArray(bytes) => 4 + bytes.len(),
        AMQPValue::FieldArray(array) => array_len(array),
        AMQPValue::FieldTable(table) => table_len(table),
    };
    1 + content
}

fn array_len(array: &FieldArray) -> usize {
    4 + array.as_slice().iter().map(value_len).sum::<usize>()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Any value that a header can hold, nested a few levels deep.
    pub(in crate::message) fn values() -> impl Strategy<Value = AMQPValue> {
        let leaf = prop_oneof![
            any::<bool>().prop_map(AMQPValue::Boolean),
            any::<i8>().prop_map(AMQPValue::ShortShortInt),
            any::<u8>().prop_map(AMQPValue::ShortShortUInt),
            any::<i16>().prop_map(AMQPValue::ShortInt),
            any::<u16>().prop_map(AMQPValue::ShortUInt),
            any::<i32>().prop_map(AMQPValue::LongInt),
            any::<u32>().prop_map(AMQPValue::LongUInt),
            any::<i64>().prop_map(AMQPValue::LongLongInt),
            proptest::num::f32::ANY.prop_map(AMQPValue::Float),
            proptest::num::f64::ANY.prop_map(AMQPValue::Double),
            any::<u64>().prop_map(AMQPValue::Timestamp),
            ".{0,20}".prop_map(|s| AMQPValue::LongString(s.into())),
            "-?[0-9]{1,22}".prop_map(|s| AMQPValue::LongString(s.into())),
            any::<Vec<u8>>().prop_map(|b| AMQPValue::LongString(b.into())),
            any::<Vec<u8>>().prop_map(|b| AMQPValue::ByteArray(b.into())),
            (any::<u8>(), any::<u32>()).prop_map(|(scale, value)| AMQPValue::DecimalValue(
                lapin::types::DecimalValue { scale, value }
            )),
            Just(AMQPValue::Void),
        ];
        leaf.prop_recursive(3, 16, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4)
                    .prop_map(|v| AMQPValue::FieldArray(v.into())),
                proptest::collection::btree_map("[a-z]{0,8}", inner, 0..4).prop_map(|map| {
                    let mut table = FieldTable::default();
                    for (key, value) in map {
                        table.insert(key.into(), value);
                    }
                    AMQPValue::FieldTable(table)
                }),
            ]
        })
    }

    #[test]
    fn a_count_is_read_in_every_width_and_nothing_else_is() {
        for value in [
            AMQPValue::ShortShortInt(7),
            AMQPValue::ShortShortUInt(7),
            AMQPValue::ShortInt(7),
            AMQPValue::ShortUInt(7),
            AMQPValue::LongInt(7),
            AMQPValue::LongUInt(7),
            AMQPValue::LongLongInt(7),
            AMQPValue::Float(7.0),
            AMQPValue::Double(7.0),
            string("7"),
            string(" 7 "),
            string("+7"),
            string("007"),
        ] {
            assert_eq!(number(&value), Some(7), "{value:?}");
        }
        for value in [
            AMQPValue::LongLongInt(-1),
            AMQPValue::LongLongInt(i64::MAX),
            AMQPValue::Double(7.5),
            AMQPValue::Double(f64::NAN),
            AMQPValue::Double(9.3e18),
            AMQPValue::Double(f64::INFINITY),
            string("9223372036854775808"),
            string("99999999999999999999999999999999999999999999"),
            string("abc"),
            string(""),
            AMQPValue::Boolean(true),
            AMQPValue::Void,
            AMQPValue::FieldTable(FieldTable::default()),
        ] {
            assert_eq!(number(&value), None, "{value:?}");
        }
        assert_eq!(number(&AMQPValue::LongUInt(u32::MAX)), Some(u32::MAX));
        assert_eq!(number(&AMQPValue::LongLongInt(1 << 32)), None);
        assert_eq!(integer(&AMQPValue::LongLongInt(i64::MAX)), Some(i64::MAX as u64));
        assert_eq!(integer(&string("18446744073709551616")), None);
        assert_eq!(integer(&AMQPValue::Double(2e19)), None);
    }

    #[test]
    fn a_text_is_cut_between_characters() {
        assert_eq!(cut("short", 10), "short");
        assert_eq!(cut("ääääää", 8), "ää…");
        assert_eq!(cut("日本語", 2), "");
    }

    #[test]
    fn instants_outside_the_calendar_are_written_as_its_ends() {
        assert_eq!(rfc3339(SystemTime::UNIX_EPOCH), "1970-01-01T00:00:00.000Z");
        let late = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1 << 40);
        assert_eq!(rfc3339(late), "9999-12-31T23:59:59.000Z");
    }

    proptest! {
        #[test]
        fn reading_never_panics(value in values()) {
            let _ = (number(&value), text(&value), instant(&value), shown(&value));
        }

        #[test]
        fn a_cut_text_has_at_most_that_many_bytes(text in ".{0,200}", bytes in 0usize..300) {
            let short = cut(&text, bytes);
            prop_assert!(short.len() <= bytes);
            prop_assert!(text.len() > bytes || short == text);
        }

        #[test]
        fn a_value_of_any_kind_has_the_length_that_lapin_writes(value in values()) {
            let mut table = FieldTable::default();
            table.insert("key".into(), value);
            prop_assert_eq!(table_len(&table), written_len(&table));
        }
    }

    fn written_len(table: &FieldTable) -> usize {
        use amq_protocol::{frame::WriteContext, types::generation::gen_field_table};
        gen_field_table(table)(WriteContext::from(Vec::new())).unwrap().position as usize
    }
}
