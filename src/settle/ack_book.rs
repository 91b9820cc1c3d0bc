//! Which finished deliveries of one consumer can be acked together. It knows no channel and is told
//! the time.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, VecDeque},
    mem,
    time::Duration,
};

use tokio::time::Instant;

/// How long a finished delivery waits for those before it that are still at work.
pub(super) const STRAGGLE: Duration = Duration::from_millis(5);

/// How many are worth an ack, however many the broker would send without one.
const ENOUGH: usize = 100;

/// A delivery in its book. A channel numbers its deliveries from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    channel: u64,
    tag: u64,
}

/// The deliveries of one consumer.
///
/// An ack with `multiple` covers every delivery of its *channel* up to its tag. So only a row that
/// has no gap from the channel's first delivery on is acked together. A gap is a delivery that is not
/// in this book: of another consumer, or one that the user settles himself. From then on each is
/// acked alone.
#[derive(Debug)]
pub(super) struct AckBook<T> {
    /// Counts the channels, for a consumer that came back on another.
    channel: u64,
    last: u64,
    gap: bool,
    /// Those without an answer, as many as the prefetch at most. All between them have one.
    row: BTreeMap<u64, Place<T>>,
    /// How many of them are finished.
    waiting: usize,
    /// The longest row so far. The broker sends at least as many without an ack.
    longest: usize,
    /// The tags that are finished, the first to finish first. Some may have been acked since.
    finished: VecDeque<(Instant, u64)>,
    /// Finished as well, and not to be acked with others.
    alone: Vec<T>,
    hurry: bool,
}

#[derive(Debug)]
enum Place<T> {
    AtWork,
    Finished(T),
}

impl<T> AckBook<T> {
    pub(super) fn new() -> Self {
        Self {
            channel: 0,
            last: 0,
            gap: false,
            row: BTreeMap::new(),
            waiting: 0,
            longest: 0,
            finished: VecDeque::new(),
            alone: Vec::new(),
            hurry: false,
        }
    }

    /// Enters a delivery, as it comes from its consumer.
    pub(super) fn enter(&mut self, tag: u64) -> Entry {
        if tag <= self.last {
            // Tags begin anew on a new channel. Those of the old one are dead, each for itself.
            self.part();
            self.channel += 1;
            self.last = 0;
            self.gap = false;
            self.longest = 0;
        }
        if tag != self.last + 1 {
            self.part();
            self.gap = true;
        }
        self.last = tag;
        if !self.gap {
            self.row.insert(tag, Place::AtWork);
            self.longest = self.longest.max(self.row.len());
        }
        Entry { channel: self.channel, tag }
    }

    /// It is to be acked. `what` comes back from [`take`](Self::take).
    pub(super) fn finish(&mut self, entry: Entry, what: T, now: Instant) {
        if self.is_at_work(entry) {
            self.row.insert(entry.tag, Place::Finished(what));
            self.finished.push_back((now, entry.tag));
            self.waiting += 1;
        } else {
            self.alone.push(what);
        }
    }

    /// It has been answered otherwise. Told too early, an ack of those after it would cover it.
    pub(super) fn answered(&mut self, entry: Entry) {
        if self.is_at_work(entry) {
            self.row.remove(&entry.tag);
        }
    }

    /// Whether there were deliveries on the channel that are not in this book.
    pub(super) fn has_gap(&self) -> bool {
        self.gap
    }

    /// Whether nothing is to be acked, now or later.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting == 0 && self.alone.is_empty()
    }

    /// Whether an ack is better now than together with more of them.
    pub(super) fn is_enough(&self) -> bool {
        self.waiting >= self.most_to_keep().min(ENOUGH) || !self.alone.is_empty()
    }

    /// From now on none waits for others.
    pub(super) fn hurry(&mut self) {
        self.hurry = true;
    }

    /// With more of them unacked the broker might run out of what it may send.
    fn most_to_keep(&self) -> usize {
        if self.hurry { 0 } else { self.longest / 2 }
    }

    /// What is to be acked now, each row by an ack of its last, with `multiple` if there are more.
    /// What has waited for long enough comes alone, and so do the first of too many.
    pub(super) fn take(&mut self, now: Instant) -> Vec<Vec<T>> {
        let mut rows: Vec<Vec<T>> = self.alone.drain(..).map(|what| vec![what]).collect();
        let mut row = Vec::new();
        while let Some(first) = self.row.first_entry()
            && let Place::Finished(_) = first.get()
        {
            row.extend(first.remove().finished());
        }
        self.waiting -= row.len();
        if !row.is_empty() {
            rows.push(row);
        }
        while let Some((since, tag)) = self.finished.front().copied() {
            if self.row.contains_key(&tag) {
                let too_many = self.waiting >= self.most_to_keep();
                if !too_many && now < since + STRAGGLE {
                    break;
                }
                let what = self.row.remove(&tag).and_then(Place::finished);
                rows.extend(what.map(|what| vec![what]));
                self.waiting -= 1;
            }
            self.finished.pop_front();
        }
        rows
    }

    /// When one that waits has waited for long enough.
    pub(super) fn next(&self) -> Option<Instant> {
        self.finished.front().map(|(since, _)| *since + STRAGGLE)
    }

    fn is_at_work(&self, entry: Entry) -> bool {
        entry.channel == self.channel && matches!(self.row.get(&entry.tag), Some(Place::AtWork))
    }

    /// No row goes on from here.
    fn part(&mut self) {
        self.finished.clear();
        self.waiting = 0;
        self.alone.extend(mem::take(&mut self.row).into_values().filter_map(Place::finished));
    }
}

impl<T> Place<T> {
    fn finished(self) -> Option<T> {
        match self {
            Self::Finished(what) => Some(what),
            Self::AtWork => None,
        }
    }
}
