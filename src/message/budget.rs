//! Keeps the headers within one frame. A larger header frame kills the connection, and the job
//! that made it would come back and kill the next one.

use std::collections::{BTreeMap, HashSet};

use lapin::{
    BasicProperties,
    types::{FieldTable, ShortString},
};

use super::{
    Story, TooLarge,
    header::{BURIED_DROPPED_HEADERS, BURIED_REASON, RETRY_QUEUE, entry_len, string, table_len},
    story::shrink,
};
use crate::policy::BuriedReason;

/// The most that ours together may take, in bytes.
const OURS_BYTES: usize = 16 * 1024;
/// Kept free in the frame, for the `x-death` that the broker adds on the way back.
const RESERVE: usize = 4 * 1024;
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
        21 + 8 + 1 + 1,
    ];
    let used = FRAME + RESERVE + properties.iter().sum::<usize>();
    (frame_max as usize).saturating_sub(used)
}

/// The headers of a copy for a lane. Over the budget ours shrink: history, error, originals.
pub(super) fn fit(
    work_queue: &str,
    mut foreign: FieldTable,
    mut story: Story,
    room: usize,
) -> Result<FieldTable, TooLarge> {
    shorten(work_queue, table_len(&foreign), &mut story, room)?;
    story.write(work_queue, &mut foreign);
    Ok(foreign)
}

/// The headers of a copy for the buried queue. Where ours do not fit even as short as can be,
/// foreign ones go, the largest first, and are listed with their sizes.
pub(super) fn fit_buried(
    work_queue: &str,
    foreign: FieldTable,
    mut story: Story,
    reason: BuriedReason,
    room: usize,
) -> (FieldTable, BuriedReason) {
    let mut shortest = story.clone();
    if shorten(work_queue, table_len(&foreign), &mut shortest, room).is_ok() {
        let mut headers = foreign;
        shortest.write(work_queue, &mut headers);
        return (headers, reason);
    }

    // Where an odd value goes, a value of ours takes its place.
    shortest.odd.clear();
    let list_len = entry_len(BURIED_DROPPED_HEADERS, &string("")) + DROPPED_BYTES;
    let ours_len = ours_len(work_queue, &shortest) + list_len;
    let dropped = largest(&foreign, &story, room.saturating_sub(ours_len));
    let gone: HashSet<&str> = dropped.iter().map(|(_, name)| name.as_str()).collect();
    let kept = foreign.inner().iter().filter(|(name, _)| !gone.contains(name.as_str()));
    let kept: BTreeMap<_, _> = kept.map(|(name, value)| (name.clone(), value.clone())).collect();
    story.odd.retain(|(name, _)| !gone.contains(name));
    if let Some(burial) = &mut story.buried {
        burial.reason = BuriedReason::TooLarge;
        burial.dropped = Some(list(&dropped));
    }
    let headers = fit(work_queue, kept.into(), story, room).unwrap_or_else(|TooLarge| {
        // Ours alone do not fit only where the frame is absurdly small.
        let mut bare = FieldTable::default();
        bare.insert(RETRY_QUEUE.into(), string(work_queue));
        bare.insert(BURIED_REASON.into(), string(BuriedReason::TooLarge.as_str()));
        bare
    });
    (headers, BuriedReason::TooLarge)
}

/// Shortens ours until they fit beside so many bytes of foreign headers.
fn shorten(
    work_queue: &str,
    foreign_len: usize,
    story: &mut Story,
    room: usize,
) -> Result<(), TooLarge> {
    let foreign_len = foreign_len + odd_len(story);
    let mut step = 0;
    loop {
        let ours_len = ours_len(work_queue, story);
        if ours_len <= OURS_BYTES && foreign_len + ours_len <= room {
            return Ok(());
        }
        if !shrink(story, &mut step) {
            return Err(TooLarge);
        }
    }
}

fn ours_len(work_queue: &str, story: &Story) -> usize {
    let mut ours = FieldTable::default();
    story.write(work_queue, &mut ours);
    table_len(&ours) - odd_len(story)
}

/// The odd values of a buried job are as foreign as can be, and count as such.
fn odd_len(story: &Story) -> usize {
    story.odd.iter().map(|(name, value)| entry_len(name, value)).sum()
}

/// The largest of the foreign headers and the odd values: all that must go for the rest to fit.
fn largest(foreign: &FieldTable, story: &Story, room: usize) -> Vec<(usize, String)> {
    let foreign = foreign.inner().iter().map(|(name, value)| (name.as_str(), value));
    let odd = story.odd.iter().map(|(name, value)| (*name, value));
    let mut by_size: Vec<_> =
        foreign.chain(odd).map(|(name, value)| (entry_len(name, value), name)).collect();
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
