//! Keeps the headers within one frame. A larger header frame kills the connection, and the job
//! that made it would come back and kill the next one.

use std::collections::BTreeMap;

use lapin::{
    BasicProperties,
    types::{AMQPValue, FieldTable, ShortString},
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
    let ours = shrunk(work_queue, table_len(foreign), story, room)?;
    Ok(together(foreign.inner().clone(), &ours))
}

/// The headers of a copy for the buried queue. Once ours are as short as can be, foreign ones go,
/// the largest first, and are listed with their sizes.
pub(super) fn fit_buried(
    work_queue: &str,
    foreign: FieldTable,
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
    let mut foreign_len = table_len(&foreign);
    let mut foreign = foreign.inner().clone();
    let kept = story.kept().map(|(key, value)| (entry_len(key, value), key.into()));
    let mut by_size: Vec<(usize, ShortString)> = foreign
        .iter()
        .map(|(key, value)| (entry_len(key.as_str(), value), key.clone()))
        .chain(kept)
        .collect();
    by_size.sort_unstable();
    let mut dropped = Vec::new();
    loop {
        if let Ok(ours) = shrunk(work_queue, foreign_len, &mut story.clone(), room) {
            let mut headers = together(foreign, &ours);
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
        match foreign.remove(&key) {
            Some(_) => foreign_len -= size,
            None => story.drop_kept(key.as_str()),
        }
        dropped.push(format!("{key} ({size} bytes)"));
    }
}

/// Ours, as short as they must be beside foreign headers of this length.
fn shrunk(
    work_queue: &str,
    foreign_len: usize,
    story: &mut Story,
    room: usize,
) -> Result<FieldTable, TooLarge> {
    let mut step = 0;
    loop {
        let mut ours = FieldTable::default();
        story.write(work_queue, &mut ours);
        // What somebody else wrote is foreign under any name, and counts as such.
        let kept: usize = story.kept().map(|(key, value)| entry_len(key, value)).sum();
        let ours_len = table_len(&ours).saturating_sub(kept);
        if ours_len <= OURS_BYTES && foreign_len + kept + ours_len <= room {
            return Ok(ours);
        }
        if !shrink(story, &mut step) {
            return Err(TooLarge);
        }
    }
}

fn together(mut foreign: BTreeMap<ShortString, AMQPValue>, ours: &FieldTable) -> FieldTable {
    foreign.extend(ours.inner().iter().map(|(key, value)| (key.clone(), value.clone())));
    FieldTable::from(foreign)
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
            story.original_user_id = None;
            story.original_exchange = None;
            story.original_routing_key = None;
        }
        _ => return false,
    }
    true
}
