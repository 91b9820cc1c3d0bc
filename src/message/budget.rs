//! Keeps the headers within one frame. A larger header frame kills the connection, and the job
//! that made it would come back and kill the next one.

use std::{borrow::Cow, collections::HashSet};

use lapin::{
    BasicProperties,
    types::{AMQPValue, FieldTable, ShortString},
};

use super::{
    Story,
    header::{
        BURIED_DROPPED_HEADERS, BURIED_REASON, RETRY_QUEUE, cut, entry_len, string, table_len,
    },
    story::{SHORT_ERROR_BYTES, shrink},
};
use crate::policy::BuriedReason;

/// The most that ours together may take, in bytes.
const OURS_BYTES: usize = 16 * 1024;
/// Kept free in the frame, for the `x-death` that the broker adds on the way back.
const RESERVE: usize = 4 * 1024;
/// How long the list of dropped headers may be, in bytes.
const DROPPED_BYTES: usize = 1024;

/// One of the headers that somebody else wrote.
type Header<'a> = (&'a ShortString, &'a AMQPValue);

/// How large the headers table may be beside these properties.
pub(super) fn room(frame_max: u32, properties: &BasicProperties) -> usize {
    // Frame type, channel, size and end; class, weight, body size and property flags.
    const FRAME: usize = 8 + 14;
    let short = |value: &Option<ShortString>| value.as_ref().map_or(0, |s| 1 + s.as_str().len());
    let properties = [
        short(properties.content_type()),
        short(properties.content_encoding()),
        short(properties.correlation_id()),
        short(properties.reply_to()),
        short(properties.message_id()),
        short(properties.kind()),
        short(properties.user_id()),
        short(properties.app_id()),
        short(properties.cluster_id()),
        // Expiration, timestamp, priority and delivery mode at their longest.
        21 + 8 + 1 + 1,
    ];
    let used = FRAME + RESERVE + properties.iter().sum::<usize>();
    (frame_max as usize).saturating_sub(used)
}

/// The headers of a copy for the buried queue. Where ours do not fit even as short as can be,
/// foreign ones go, the largest first, and are listed with their sizes.
pub(super) fn fit_buried(
    work_queue: &str,
    mut foreign: Vec<Header<'_>>,
    mut story: Story,
    reason: BuriedReason,
    (room, frame_max): (usize, u32),
) -> (FieldTable, BuriedReason) {
    let mut shortest = match fit(work_queue, &foreign, &story, room) {
        Ok(headers) => return (headers, reason),
        Err(shortest) => shortest,
    };
    if reason != BuriedReason::TooLarge {
        let before = story.detail.take().map_or(String::new(), |detail| format!(": {detail}"));
        let detail = too_large(frame_max) + &format!("; it was to be buried as {reason}{before}");
        shortest.detail = Some(cut(&detail, SHORT_ERROR_BYTES).into_owned());
        story.detail = Some(detail);
    }
    // Where an odd value goes, a value of ours takes its place.
    shortest.drop_kept(|_| true);
    let list_len = entry_len(BURIED_DROPPED_HEADERS, &string("")) + DROPPED_BYTES;
    let ours_len = ours(work_queue, &shortest).1 + list_len;
    let dropped = largest(&foreign, &story, room.saturating_sub(ours_len));
    let gone: HashSet<&str> = dropped.iter().map(|(_, name)| name.as_str()).collect();
    foreign.retain(|(name, _)| !gone.contains(name.as_str()));
    story.drop_kept(|name| gone.contains(name));
    if let Some(burial) = &mut story.buried {
        burial.reason = BuriedReason::TooLarge;
        burial.dropped = Some(list(&dropped));
    }
    let headers = fit(work_queue, &foreign, &story, room).unwrap_or_else(|_| {
        // Ours alone do not fit only where the frame is absurdly small.
        let mut bare = FieldTable::default();
        bare.insert(RETRY_QUEUE.into(), string(work_queue));
        bare.insert(BURIED_REASON.into(), string(BuriedReason::TooLarge.as_str()));
        bare
    });
    (headers, BuriedReason::TooLarge)
}

/// What a burial says of headers that do not fit.
pub(super) fn too_large(frame_max: u32) -> String {
    format!(
        "its headers leave no room for the retry headers in an AMQP frame of {frame_max} bytes \
         (frame_max)"
    )
}

/// The headers of a copy for a lane. Over the budget ours shrink: history, error, originals. An error
/// is the shortest story, which does not fit either.
pub(super) fn fit(
    work_queue: &str,
    foreign: &[Header<'_>],
    story: &Story,
    room: usize,
) -> Result<FieldTable, Box<Story>> {
    let mut story = Cow::Borrowed(story);
    let theirs = foreign.iter().map(|(name, value)| entry_len(name.as_str(), value));
    let foreign_len = 4 + theirs.sum::<usize>() + kept_len(&story);
    let mut step = 0;
    loop {
        let (mut headers, ours_len) = ours(work_queue, &story);
        if ours_len <= OURS_BYTES && foreign_len + ours_len <= room {
            // Nothing of ours is among them.
            for (name, value) in foreign {
                headers.insert(ShortString::clone(name), AMQPValue::clone(value));
            }
            return Ok(headers);
        }
        if !shrink(story.to_mut(), &mut step) {
            return Err(Box::new(story.into_owned()));
        }
    }
}

/// Ours as they are written, and how long they are without what somebody else wrote.
fn ours(work_queue: &str, story: &Story) -> (FieldTable, usize) {
    let mut ours = FieldTable::default();
    story.write(work_queue, &mut ours);
    let len = table_len(&ours) - kept_len(story);
    (ours, len)
}

/// What somebody else wrote is foreign under any name, and counts as such.
fn kept_len(story: &Story) -> usize {
    story.kept().map(|(name, value)| entry_len(name, value)).sum()
}

/// The largest of what others wrote: all that must go for the rest to fit.
fn largest(foreign: &[Header<'_>], story: &Story, room: usize) -> Vec<(usize, String)> {
    let foreign = foreign.iter().map(|(name, value)| (name.as_str(), *value));
    let mut by_size: Vec<_> =
        foreign.chain(story.kept()).map(|(name, value)| (entry_len(name, value), name)).collect();
    by_size.sort_unstable();
    let mut left: usize = 4 + by_size.iter().map(|(size, _)| size).sum::<usize>();
    let mut gone = Vec::new();
    while left > room {
        let Some((size, name)) = by_size.pop() else { break };
        left -= size;
        gone.push((size, name.to_owned()));
    }
    gone
}

/// `big (70000 bytes), less-big (60000 bytes) and 7 more`
fn list(dropped: &[(usize, String)]) -> String {
    let mut text = String::new();
    for (listed, (size, name)) in dropped.iter().enumerate() {
        let comma = if listed == 0 { "" } else { ", " };
        let entry = format!("{comma}{name} ({size} bytes)");
        let more = format!(" and {} more", dropped.len() - listed);
        if text.len() + entry.len() + more.len() > DROPPED_BYTES {
            return text + &more;
        }
        text += &entry;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{
        Message, TooLarge,
        copy::Copier,
        header::{OURS, long, text},
        story::HISTORY_ENTRIES,
        tests::{COPIER, bulky_headers, failure, header_frame_len, message, second, with_headers},
    };
    use proptest::prelude::*;
    use std::{sync::Arc, time::Instant};

    /// The headers of the copy for the lane.
    fn retried(message: &Arc<Message>, story: &Story) -> Result<FieldTable, TooLarge> {
        let copy = COPIER.onward(message, "id", &mut story.clone(), "lane", Some(15_000))?;
        assert!(header_frame_len(&copy.properties) <= 131_072 - RESERVE);
        Ok(copy.properties.headers().clone().unwrap())
    }

    fn buried_with(
        copier: Copier<'_>,
        message: &Arc<Message>,
        story: &Story,
    ) -> (usize, FieldTable) {
        let what = (BuriedReason::Exhausted, second(0), "host:1");
        let (copy, reason) = copier.burial(message, "id", story.clone(), "orders.buried", what);
        let headers = copy.properties.headers().clone().unwrap();
        assert_eq!(headers.inner()["buried-reason"], string(reason.as_str()));
        (header_frame_len(&copy.properties), headers)
    }

    fn buried(message: &Arc<Message>, story: &Story) -> FieldTable {
        let (frame, headers) = buried_with(COPIER, message, story);
        assert!(frame <= 131_072 - RESERVE);
        headers
    }

    /// After failures enough to fill all that a story has.
    fn full_story(message: &Arc<Message>) -> Story {
        let mut story = Story::read(message, "orders");
        let error = "no route to host, ".repeat(100);
        for _ in 0..HISTORY_ENTRIES {
            story.charge(failure(&error));
        }
        story.remember(message, second(0));
        story
    }

    fn ours_bytes(headers: &FieldTable, story: &Story) -> usize {
        let odd = |name: &str| story.odd.iter().any(|(odd, _)| *odd == name);
        let ours = headers.inner().iter().filter(|(name, _)| OURS.contains(&name.as_str()));
        let ours = ours.filter(|(name, _)| !odd(name.as_str()));
        ours.map(|(name, value)| entry_len(name.as_str(), value)).sum()
    }

    fn bytes(len: usize) -> AMQPValue {
        AMQPValue::ByteArray(vec![0; len].into())
    }

    #[test]
    fn ours_shrink_history_first_then_the_error_then_the_originals() {
        let mut last = "";
        let mut seen = Vec::new();
        for size in (120_000..127_000).step_by(20) {
            let message = with_headers([("big", bytes(size)), ("CC", string("audit"))]);
            let Ok(headers) = retried(&message, &full_story(&message)) else {
                seen.push("too large");
                break;
            };
            let len = |name| headers.inner().get(name).and_then(text).map(|text| text.len());
            let (error, history) = (len("retry-error"), headers.contains_key("retry-history"));
            let origin = headers.contains_key("retry-original-exchange");
            assert_eq!(headers.inner()["retry-count"], long(8));
            assert!(headers.contains_key("retry-original-cc"), "as foreign as can be");
            let left = match (history, error, origin) {
                (true, Some(1000..), true) => "all",
                (false, Some(1000..), true) => "error",
                (false, Some(100..=128), true) => "short error",
                (false, None, true) => "originals",
                (false, None, false) => "least",
                other => panic!("{other:?}"),
            };
            if left != last {
                seen.push(left);
                last = left;
            }
        }
        assert_eq!(seen, ["all", "error", "short error", "originals", "least", "too large"]);
    }

    #[test]
    fn ours_are_bounded_also_where_the_frame_has_room() {
        let message = with_headers([("big", bytes(10))]);
        let mut story = full_story(&message);
        story.history = (0..HISTORY_ENTRIES).map(|_| Arc::new(bytes(4_000))).collect();
        let headers = retried(&message, &story).unwrap();
        assert!(headers.contains_key("retry-history"));
        assert!(ours_bytes(&headers, &story) <= OURS_BYTES);
    }

    #[test]
    fn foreign_headers_go_the_largest_first_and_no_more_than_must() {
        let message = with_headers([
            ("a", bytes(50_000)),
            ("b", bytes(70_000)),
            ("c", bytes(40_000)),
            ("d", bytes(100)),
        ]);
        let story = full_story(&message);
        assert_eq!(retried(&message, &story), Err(TooLarge));
        let headers = buried(&message, &story);
        assert!(!headers.contains_key("b"));
        assert!(["a", "c", "d"].iter().all(|kept| headers.contains_key(kept)));
        assert_eq!(headers.inner()["buried-reason"], string("too-large"));
        assert_eq!(headers.inner()["buried-dropped-headers"], string("b (70007 bytes)"));
        let detail = text(&headers.inner()["buried-detail"]).unwrap();
        assert!(detail.contains("an AMQP frame of 131072 bytes"), "{detail}");
        assert!(detail.ends_with("it was to be buried as exhausted"), "{detail}");
        // Now that there is room, the story is told in full.
        assert!(headers.contains_key("retry-history"));
    }

    #[test]
    fn an_odd_value_stays_unless_it_is_what_does_not_fit() {
        let ours = |count: AMQPValue| {
            with_headers([
                ("retry-queue", string("orders")),
                ("retry-count", count),
                ("big", bytes(100_000)),
                ("small", bytes(100)),
            ])
        };
        let message = ours(bytes(40_000));
        let headers = buried(&message, &full_story(&message));
        assert!(headers.inner()["retry-count"] == bytes(40_000));
        assert_eq!(headers.inner()["buried-dropped-headers"], string("big (100009 bytes)"));

        let message = ours(bytes(110_000));
        let headers = buried(&message, &full_story(&message));
        assert_eq!(headers.inner()["retry-count"], long(8));
        assert!(headers.inner()["big"] == bytes(100_000));
        let dropped = string("retry-count (110017 bytes)");
        assert_eq!(headers.inner()["buried-dropped-headers"], dropped);
    }

    #[test]
    fn ten_thousand_headers_are_dropped_in_no_time() {
        let names: Vec<_> = (0..10_000).map(|n| format!("header-{n:05}")).collect();
        let message = with_headers(names.iter().map(|name| (name.as_str(), bytes(20))));
        let story = full_story(&message);
        let start = Instant::now();
        assert_eq!(retried(&message, &story), Err(TooLarge));
        let headers = buried(&message, &story);
        // 0.2 s on an idle machine; 47 s where each drop copies the rest.
        assert!(start.elapsed().as_secs() < 3, "{:?}", start.elapsed());
        let left = headers.inner().keys().filter(|name| name.as_str().starts_with("header-"));
        let gone = names.len() - left.count();
        let list = text(&headers.inner()["buried-dropped-headers"]).unwrap();
        assert!(list.len() <= DROPPED_BYTES);
        let listed = list.matches("(38 bytes)").count();
        assert!(list.ends_with(&format!(" and {} more", gone - listed)), "{list} of {gone}");
    }

    #[test]
    fn a_burial_fits_into_the_smallest_frame_that_amqp_knows() {
        let name = "n".repeat(255);
        let short = || ShortString::from(name.as_str());
        let properties = BasicProperties::default()
            .with_content_type(short())
            .with_content_encoding(short())
            .with_correlation_id(short())
            .with_reply_to(short())
            .with_type(short())
            .with_app_id(short())
            .with_cluster_id(short())
            .with_user_id(short());
        let message = message(properties);
        let copier = Copier { work_queue: &name, user: &name, frame_max: 4096 };
        let (frame, headers) = buried_with(copier, &message, &full_story(&message));
        assert!(frame <= 4096, "{frame}");
        assert_eq!(headers.inner()["retry-queue"], string(&name));
    }

    proptest! {
        #[test]
        fn no_copy_is_larger_than_the_frame(headers in bulky_headers(), property in ".{0,60}") {
            let properties = BasicProperties::default()
                .with_headers(headers.clone())
                .with_reply_to(property.as_str().into())
                .with_app_id(property.as_str().into())
                .with_priority(1)
                .with_timestamp(1);
            let message = message(properties);
            let story = full_story(&message);
            let wanted = table_len(&headers);
            match retried(&message, &story) {
                Ok(copy) => prop_assert!(ours_bytes(&copy, &story) <= OURS_BYTES),
                Err(TooLarge) => prop_assert!(wanted > 100_000, "{wanted} bytes would have fit"),
            }
            let copy = buried(&message, &story);
            prop_assert!(ours_bytes(&copy, &story) <= OURS_BYTES);
            let dropped = copy.inner().get(BURIED_DROPPED_HEADERS);
            let whole = copy.inner()[BURIED_REASON] == string("exhausted");
            prop_assert_eq!(dropped.is_none(), whole);

            // What went is larger than what stayed, and is listed.
            let size = |name: &str| entry_len(name, &headers.inner()[name]);
            let theirs = headers.inner().keys().map(ShortString::as_str);
            let theirs = theirs.filter(|name| name.starts_with("big-"));
            let (stayed, gone): (Vec<_>, Vec<_>) = theirs.partition(|name| copy.contains_key(name));
            let largest = stayed.iter().map(|name| size(name)).max().unwrap_or(0);
            for name in gone {
                prop_assert!(size(name) >= largest);
                let list = text(dropped.unwrap()).unwrap();
                prop_assert!(list.contains(&format!("{name} ({} bytes)", size(name))), "{list}");
            }
        }

        #[test]
        fn a_burial_fits_into_a_frame_of_any_size(headers in bulky_headers(), max in 4096u32..200_000) {
            let message = message(BasicProperties::default().with_headers(headers));
            let copier = Copier { frame_max: max, ..COPIER };
            let story = full_story(&message);
            let (frame, _) = buried_with(copier, &message, &story);
            prop_assert!(frame <= max as usize);
            if let Ok(copy) = copier.onward(&message, "id", &mut story.clone(), "lane", Some(u64::MAX)) {
                prop_assert!(header_frame_len(&copy.properties) + RESERVE <= max as usize);
            }
        }
    }
}
