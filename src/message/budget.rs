//! Keeps the headers within one frame. A larger header frame kills the connection, and the job
//! that made it would come back and kill the next one.

use lapin::{
    BasicProperties,
    types::{FieldTable, ShortString},
};

use super::{
    Story, TooLarge,
    header::{self, cut, entry_len, string, table_len},
};
use crate::policy::BuriedReason;

/// The most that ours together may take, in bytes.
const OURS_BYTES: usize = 16 * 1024;
/// Kept free in the frame, for the `x-death` that the broker adds on the way back.
const RESERVE: usize = 4 * 1024;
/// What an error is cut to before it is given up.
const SHORT_ERROR: usize = 128;
/// How long the list of dropped headers may be, in bytes.
const DROPPED_BYTES: usize = 1024;

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
        20 + 8 + 1 + 1,
    ];
    let used = FRAME + RESERVE + properties.iter().sum::<usize>();
    (frame_max as usize).saturating_sub(used)
}

/// The headers of a copy for a lane. Over the budget ours shrink: history, error, originals.
pub(super) fn fit(
    work_queue: &str,
    foreign: &FieldTable,
    story: &mut Story,
    room: usize,
) -> Result<FieldTable, TooLarge> {
    let foreign_len = table_len(foreign);
    let mut step = 0;
    loop {
        let mut ours = FieldTable::default();
        story.write(work_queue, &mut ours);
        // The odd values of a buried job are as foreign as can be, and count as such.
        let odd: usize = story.odd.iter().map(|(key, value)| entry_len(key, value)).sum();
        let ours_len = table_len(&ours).saturating_sub(odd);
        if ours_len <= OURS_BYTES && foreign_len + odd + ours_len <= room {
            let mut headers = foreign.clone();
            for (key, value) in ours.inner() {
                headers.insert(key.clone(), value.clone());
            }
            return Ok(headers);
        }
        if !shrink(story, &mut step) {
            return Err(TooLarge);
        }
    }
}

/// The headers of a copy for the buried queue. Once ours are as short as can be, foreign ones go,
/// the largest first, and are listed with their sizes.
pub(super) fn fit_buried(
    work_queue: &str,
    mut foreign: FieldTable,
    mut story: Story,
    reason: BuriedReason,
    room: usize,
) -> (FieldTable, BuriedReason) {
    if let Ok(headers) = fit(work_queue, &foreign, &mut story.clone(), room) {
        return (headers, reason);
    }
    // The list itself needs room, too.
    let room = room.saturating_sub(DROPPED_BYTES + 64);
    if let Some(burial) = &mut story.buried {
        burial.reason = BuriedReason::TooLarge;
    }
    for (key, value) in std::mem::take(&mut story.odd) {
        foreign.insert(key.into(), value);
    }
    let mut by_size: Vec<(usize, ShortString)> = foreign
        .inner()
        .iter()
        .map(|(key, value)| (entry_len(key.as_str(), value), key.clone()))
        .collect();
    by_size.sort_unstable();
    let mut dropped = Vec::new();
    loop {
        if let Ok(mut headers) = fit(work_queue, &foreign, &mut story.clone(), room) {
            let list = cut(&dropped.join(", "), DROPPED_BYTES);
            headers.insert(header::BURIED_DROPPED_HEADERS.into(), string(&list));
            return (headers, BuriedReason::TooLarge);
        }
        let Some((size, key)) = by_size.pop() else {
            // Ours alone do not fit only where the frame is absurdly small.
            let mut bare = FieldTable::default();
            bare.insert(header::RETRY_QUEUE.into(), string(work_queue));
            bare.insert(header::BURIED_REASON.into(), string(BuriedReason::TooLarge.as_str()));
            return (bare, BuriedReason::TooLarge);
        };
        foreign = without(&foreign, &key);
        dropped.push(format!("{key} ({size} bytes)"));
    }
}

/// One step shorter; false when nothing is left to cut.
fn shrink(story: &mut Story, step: &mut u32) -> bool {
    if !story.history.is_empty() {
        story.history.remove(0);
        return true;
    }
    *step += 1;
    match step {
        1 => story.error = story.error.take().map(|error| cut(&error, SHORT_ERROR)),
        2 => story.error = None,
        3 => {
            story.original_cc = None;
            story.original_user_id = None;
            story.foreign_count = None;
        }
        4 => {
            story.original_exchange = None;
            story.original_routing_key = None;
        }
        _ => return false,
    }
    true
}

fn without(table: &FieldTable, key: &ShortString) -> FieldTable {
    let kept = table.inner().iter().filter(|(name, _)| *name != key);
    FieldTable::from(
        kept.map(|(name, value)| (name.clone(), value.clone()))
            .collect::<std::collections::BTreeMap<_, _>>(),
    )
}
