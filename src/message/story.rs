//! Our headers on a message, as a struct: read from a delivery, told on, written to a copy.

#[cfg(test)]
mod tests;

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use lapin::types::{AMQPValue, FieldArray, FieldTable};

use super::{Message, death, header::*};
use crate::policy::{BuriedReason, FailureKind};

/// How many attempts `retry-history` tells of.
pub(crate) const HISTORY_ENTRIES: usize = 8;
/// How much of an error's text `retry-error` keeps, in bytes.
pub(crate) const ERROR_BYTES: usize = 1024;
/// How much of it each entry of the history keeps.
const HISTORY_ERROR_BYTES: usize = 256;
/// How much of it is kept when room is scarce, before it is given up.
pub(super) const SHORT_ERROR_BYTES: usize = 128;
/// How much of `buried-detail` is kept.
const DETAIL_BYTES: usize = 512;
/// How much of a worker's name is kept. Nothing makes `buried-by` shorter later.
const WORKER_BYTES: usize = 255;

/// What is known of a job from the headers it came with.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Story {
    pub(crate) retry_count: u32,
    pub(crate) busy_count: u32,
    pub(crate) crash_count: u32,
    pub(crate) exhumed_count: u32,
    pub(super) first_failed_at: Option<SystemTime>,
    pub(super) last_failed_at: Option<SystemTime>,
    pub(super) level: Option<String>,
    pub(super) due_at: Option<SystemTime>,
    pub(crate) deadline: Option<SystemTime>,
    /// Only while one lane is not enough: how long the job still waits after this lane, in ms. Each
    /// lane takes off its fixed delay, so that no clock can make it early.
    pub(crate) wait_left: Option<u64>,
    /// The same end as an instant, for people. It decides only for a copy of a version that wrote no
    /// `wait_left`.
    pub(crate) not_before: Option<SystemTime>,
    pub(super) error: Option<String>,
    pub(super) error_kind: Option<String>,
    /// As it came, oldest first.
    pub(super) history: Vec<Arc<AMQPValue>>,
    /// The attempt that comes after, and is told of last.
    pub(super) latest: Option<Latest>,
    pub(super) original_exchange: Option<String>,
    pub(super) original_routing_key: Option<String>,
    pub(super) original_cc: Option<AMQPValue>,
    pub(super) original_user_id: Option<String>,
    /// It came as a dead letter of another queue.
    pub(super) original_death: Option<AMQPValue>,
    pub(super) foreign_count: Option<AMQPValue>,
    pub(super) buried: Option<Burial>,
    /// If it is to be buried: which limit it passed, and by how much.
    pub(crate) detail: Option<String>,
    /// Put back from the buried queue, and not tried since.
    exhumed: bool,
    /// Headers of ours whose value makes no sense. Judged only when a failure needs them.
    pub(super) odd: Vec<(&'static str, AMQPValue)>,
}

/// What the history says of the last failure, beside what the story tells of it anyway.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Latest {
    level: String,
    worker: String,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Burial {
    pub(super) reason: BuriedReason,
    pub(super) at: SystemTime,
    pub(super) by: String,
    /// The foreign headers that had to go, with their sizes.
    pub(super) dropped: Option<String>,
}

/// One failed attempt.
#[derive(Clone, Debug)]
pub(crate) struct Failure<'a> {
    pub(crate) kind: FailureKind,
    pub(crate) error: &'a str,
    pub(crate) at: SystemTime,
    /// The level of the attempt that failed, as `2/7 30s`.
    pub(crate) level: String,
    pub(crate) worker: &'a str,
}

impl Story {
    /// What [`read`](Self::read) finds, if it finds anything.
    pub(crate) fn if_any(message: &Message, work_queue: &str) -> Option<Self> {
        let headers = message.properties.headers().as_ref()?.inner();
        let names = [RETRY_QUEUE, RETRY_COUNT, death::FIRST_DEATH_QUEUE];
        let any = names.iter().any(|name| headers.contains_key(*name));
        any.then(|| Self::read(message, work_queue))
    }

    /// Reads a delivery of `work_queue`. Ours are believed only beside a `retry-queue` that names
    /// this very queue; otherwise they are another queue's or another system's.
    pub(crate) fn read(message: &Message, work_queue: &str) -> Self {
        let nothing = FieldTable::default();
        let headers = message.properties.headers().as_ref().unwrap_or(&nothing).inner();
        let named = |key: &str| headers.get(key);

        if named(RETRY_QUEUE).and_then(text).as_deref() != Some(work_queue) {
            let original_death = death::first(headers);
            let foreign_count = named(RETRY_COUNT).cloned();
            return Self { original_death, foreign_count, ..Self::default() };
        }

        let mut odd = Vec::new();
        let mut judged = |key: &'static str, sense: bool| {
            if let (Some(value), false) = (named(key), sense) {
                odd.push((key, value.clone()));
            }
        };
        let mut count = |key| {
            let read = named(key).map(number);
            judged(key, read != Some(None));
            read.flatten().unwrap_or(0)
        };
        let (retry_count, busy_count) = (count(RETRY_COUNT), count(RETRY_BUSY_COUNT));
        let (crash_count, exhumed_count) = (count(RETRY_CRASH_COUNT), count(RETRY_EXHUMED_COUNT));
        let mut time = |key| {
            let read = named(key).map(instant);
            judged(key, read != Some(None));
            read.flatten()
        };
        let first_failed_at = time(RETRY_FIRST_FAILED_AT);
        let deadline = time(RETRY_DEADLINE);
        let not_before = time(RETRY_NOT_BEFORE);
        let wait_left = named(RETRY_WAIT_LEFT).map(integer);
        judged(RETRY_WAIT_LEFT, wait_left != Some(None));
        let mut origin = |key| {
            let read = named(key).map(text);
            // AMQP has no longer names.
            let name = read.flatten().filter(|name| name.len() <= 255);
            judged(key, name.is_some());
            name
        };
        let mut story = Self {
            retry_count,
            busy_count,
            crash_count,
            exhumed_count,
            first_failed_at,
            deadline,
            wait_left: wait_left.flatten(),
            not_before,
            original_exchange: origin(RETRY_ORIGINAL_EXCHANGE),
            original_routing_key: origin(RETRY_ORIGINAL_ROUTING_KEY),
            // What follows is for people and decides nothing, so it is taken as it comes.
            last_failed_at: named(RETRY_LAST_FAILED_AT).and_then(instant),
            level: named(RETRY_LEVEL).and_then(text).map(|level| cut(level, 64).into_owned()),
            due_at: None,
            error: named(RETRY_ERROR)
                .and_then(text)
                .map(|error| cut(error, ERROR_BYTES).into_owned()),
            error_kind: named(RETRY_ERROR_KIND)
                .and_then(text)
                .map(|kind| cut(kind, 64).into_owned()),
            history: named(RETRY_HISTORY).map(told).unwrap_or_default(),
            latest: None,
            original_cc: named(RETRY_ORIGINAL_CC).cloned(),
            original_user_id: named(RETRY_ORIGINAL_USER_ID)
                .and_then(text)
                .map(|user| cut(user, 255).into_owned()),
            original_death: named(RETRY_ORIGINAL_DEATH).and_then(death::kept),
            foreign_count: named(RETRY_FOREIGN_COUNT).cloned(),
            buried: None,
            detail: None,
            exhumed: false,
            odd,
        };
        if headers.contains_key(BURIED_REASON) {
            story.exhume();
        }
        story
    }

    /// A buried job on the work queue was put back, by hand or by a tool: it starts afresh.
    fn exhume(&mut self) {
        self.exhumed_count = self.exhumed_count.saturating_add(1);
        self.retry_count = 0;
        self.busy_count = 0;
        self.crash_count = 0;
        self.first_failed_at = None;
        self.exhumed = true;
        self.time_has_come();
        // An odd count was what it was buried for; whoever put it back knows.
        self.odd.clear();
    }

    /// It has waited, or waits no longer.
    pub(crate) fn time_has_come(&mut self) {
        self.wait_left = None;
        self.not_before = None;
    }

    /// How long it is still to wait. The clock is looked at only where nothing else is known.
    pub(crate) fn still_to_wait(&self, now: SystemTime) -> Duration {
        match self.wait_left {
            Some(ms) => Duration::from_millis(ms),
            None => self.not_before.and_then(|at| at.duration_since(now).ok()).unwrap_or_default(),
        }
    }

    /// The header that says how long, and its value.
    pub(crate) fn wait_text(&self) -> String {
        match (self.wait_left, self.not_before) {
            (Some(ms), _) => format!("the header {RETRY_WAIT_LEFT} is {ms} ms"),
            (None, Some(at)) => format!("the header {RETRY_NOT_BEFORE} is {}", rfc3339(at)),
            (None, None) => "no header says how long it waits".to_owned(),
        }
    }

    /// Whoever put a buried job back wants it run: a deadline that is past is forgotten.
    pub(crate) fn forgive(&mut self, now: SystemTime) {
        if self.exhumed {
            self.deadline = self.deadline.filter(|deadline| *deadline > now);
        }
    }

    /// Charges a failure to the job.
    pub(crate) fn charge(&mut self, failure: Failure<'_>) {
        self.retry_count = self.retry_count.saturating_add(1);
        self.note(failure);
    }

    /// Counts one more time in a row that the job was busy. How many that are now.
    pub(crate) fn note_busy(&mut self, failure: Failure<'_>) -> u32 {
        let in_a_row = self.busy_count.saturating_add(1);
        self.note(failure);
        self.busy_count = in_a_row;
        in_a_row
    }

    /// It is to be run alone, one more time.
    pub(crate) fn count_lone_run(&mut self) {
        self.crash_count = self.crash_count.saturating_add(1);
        // An odd one counts from here on; it would be kept as it came, and count nothing for ever.
        self.odd.retain(|(name, _)| *name != RETRY_CRASH_COUNT);
    }

    /// Its handler reported an outcome: no process died of it.
    pub(crate) fn survived(&mut self) {
        self.crash_count = 0;
    }

    /// Notes a failure that is charged to nobody.
    pub(crate) fn note(&mut self, failure: Failure<'_>) {
        if let Some(before) = self.latest.take() {
            self.history.push(Arc::new(self.entry(&before)));
            let surplus = self.history.len().saturating_sub(HISTORY_ENTRIES);
            self.history.drain(..surplus);
        }
        self.first_failed_at.get_or_insert(failure.at);
        self.last_failed_at = Some(failure.at);
        self.error = Some(cut(failure.error, ERROR_BYTES).into_owned());
        self.error_kind = Some(failure.kind.as_str().to_owned());
        self.busy_count = 0;
        let worker = cut(failure.worker, WORKER_BYTES).into_owned();
        self.latest = Some(Latest { level: failure.level, worker });
    }

    /// The last attempts, as they are written.
    fn told_history(&self) -> Option<AMQPValue> {
        let latest = self.latest.as_ref().map(|latest| self.entry(latest));
        let most = HISTORY_ENTRIES - usize::from(latest.is_some());
        let before = &self.history[self.history.len().saturating_sub(most)..];
        let before = before.iter().map(|entry| AMQPValue::clone(entry));
        let entries: Vec<_> = before.chain(latest).collect();
        (!entries.is_empty()).then(|| AMQPValue::FieldArray(entries.into()))
    }

    fn entry(&self, latest: &Latest) -> AMQPValue {
        let error = cut(self.error.as_deref().unwrap_or_default(), HISTORY_ERROR_BYTES);
        let mut entry = FieldTable::default();
        for (key, value) in [
            ("at", string(rfc3339(self.last_failed_at.unwrap_or(SystemTime::UNIX_EPOCH)))),
            ("kind", string(self.error_kind.as_deref().unwrap_or_default())),
            ("error", string(&*error)),
            ("level", string(latest.level.as_str())),
            ("worker", string(latest.worker.as_str())),
        ] {
            entry.insert(key.into(), value);
        }
        AMQPValue::FieldTable(entry)
    }

    /// Remembers what only the first delivery tells: where the job was published to, and what the
    /// copy cannot carry. `timestamp` in seconds and `expiration` in milliseconds are the
    /// message's own properties; together they are its deadline.
    pub(crate) fn remember(&mut self, message: &Message, now: SystemTime) {
        let properties = &message.properties;
        self.deadline = self.end_of_life(properties, now);
        self.original_exchange.get_or_insert_with(|| message.exchange.to_string());
        self.original_routing_key.get_or_insert_with(|| message.routing_key.to_string());
        if let Some(headers) = properties.headers() {
            let copies: Vec<_> = ["CC", "BCC"]
                .iter()
                .filter_map(|key| headers.inner().get(*key))
                .flat_map(|value| match value {
                    AMQPValue::FieldArray(names) => names.as_slice().to_vec(),
                    other => vec![other.clone()],
                })
                .collect();
            if !copies.is_empty() {
                self.original_cc.get_or_insert(AMQPValue::FieldArray(FieldArray::from(copies)));
            }
        }
    }

    /// Whether nothing was remembered of the job yet: it comes from its publisher.
    pub(crate) fn is_first(&self) -> bool {
        self.original_exchange.is_none()
    }

    /// Goes on to a lane, which gives it back then.
    pub(crate) fn go_to(&mut self, due_at: SystemTime) {
        self.due_at = Some(due_at);
    }

    /// As `2/7 30s`.
    pub(crate) fn set_level(&mut self, label: String) {
        self.level = Some(label);
    }

    /// It did not get any further.
    pub(crate) fn stay_on_level_of(&mut self, before: &Self) {
        self.level.clone_from(&before.level);
    }

    pub(crate) fn bury(&mut self, reason: BuriedReason, at: SystemTime, by: &str) {
        self.due_at = None;
        self.wait_left = None;
        self.buried =
            Some(Burial { reason, at, by: cut(by, WORKER_BYTES).into_owned(), dropped: None });
    }

    /// Whether a header of ours that decides something makes no sense.
    pub(crate) fn is_odd(&self) -> bool {
        !self.odd.is_empty()
    }

    /// Which headers those are, what they hold, and what they should.
    pub(crate) fn odd_text(&self) -> String {
        let texts = self.odd.iter().map(|(name, value)| {
            format!("the header {name} is {}, not {}", shown(value), sense(name))
        });
        texts.collect::<Vec<_>>().join("; ")
    }

    /// The exchange that the job was published to, unless the delivery's own still tells.
    pub(crate) fn original_exchange(&self) -> Option<&str> {
        self.original_exchange.as_deref()
    }

    pub(crate) fn original_routing_key(&self) -> Option<&str> {
        self.original_routing_key.as_deref()
    }

    /// The values that somebody else wrote and that we keep, under our names. They are of any size.
    pub(super) fn kept(&self) -> impl Iterator<Item = (&str, &AMQPValue)> {
        let foreign_count = self.foreign_count.iter().map(|value| (RETRY_FOREIGN_COUNT, value));
        let original_cc = self.original_cc.iter().map(|value| (RETRY_ORIGINAL_CC, value));
        self.odd.iter().map(|(key, value)| (*key, value)).chain(foreign_count).chain(original_cc)
    }

    /// Leaves some of them out.
    pub(super) fn drop_kept(&mut self, goes: impl Fn(&str) -> bool) {
        self.odd.retain(|(name, _)| !goes(name));
        self.foreign_count.take_if(|_| goes(RETRY_FOREIGN_COUNT));
        self.original_cc.take_if(|_| goes(RETRY_ORIGINAL_CC));
    }

    /// Writes all of it into a copy's headers.
    pub(super) fn write(&self, work_queue: &str, headers: &mut FieldTable) {
        let mut set = |key: &str, value: Option<AMQPValue>| {
            if let Some(value) = value {
                headers.insert(key.into(), value);
            }
        };
        let counted = |n: u32| (n > 0).then(|| long(n));
        let time = |at: Option<SystemTime>| at.map(|at| string(rfc3339(at)));
        let words = |text: &Option<String>| text.as_deref().map(string);

        set(RETRY_QUEUE, Some(string(work_queue)));
        set(RETRY_COUNT, Some(long(self.retry_count)));
        set(RETRY_BUSY_COUNT, counted(self.busy_count));
        set(RETRY_CRASH_COUNT, counted(self.crash_count));
        set(RETRY_EXHUMED_COUNT, counted(self.exhumed_count));
        set(RETRY_FIRST_FAILED_AT, time(self.first_failed_at));
        set(RETRY_LAST_FAILED_AT, time(self.last_failed_at));
        set(RETRY_LEVEL, words(&self.level));
        set(RETRY_DUE_AT, time(self.due_at));
        set(RETRY_DEADLINE, time(self.deadline));
        set(RETRY_WAIT_LEFT, self.wait_left.map(long));
        set(RETRY_NOT_BEFORE, time(self.not_before));
        set(RETRY_ERROR, words(&self.error));
        set(RETRY_ERROR_KIND, words(&self.error_kind));
        set(RETRY_HISTORY, self.told_history());
        set(RETRY_ORIGINAL_EXCHANGE, words(&self.original_exchange));
        set(RETRY_ORIGINAL_ROUTING_KEY, words(&self.original_routing_key));
        set(RETRY_ORIGINAL_CC, self.original_cc.clone());
        set(RETRY_ORIGINAL_USER_ID, words(&self.original_user_id));
        set(RETRY_ORIGINAL_DEATH, self.original_death.clone());
        set(RETRY_FOREIGN_COUNT, self.foreign_count.clone());
        if let Some(burial) = &self.buried {
            set(BURIED_REASON, Some(string(burial.reason.as_str())));
            set(BURIED_DETAIL, self.detail.as_deref().map(|why| string(cut(why, DETAIL_BYTES))));
            set(BURIED_AT, time(Some(burial.at)));
            set(BURIED_BY, Some(string(&burial.by)));
            set(BURIED_DROPPED_HEADERS, words(&burial.dropped));
        }
        // Last, so that an odd value is kept as it came.
        for (key, value) in &self.odd {
            set(key, Some(value.clone()));
        }
    }
}

/// One step shorter: history, error, originals. False when nothing is left to cut.
pub(super) fn shrink(story: &mut Story, step: &mut u32) -> bool {
    if !story.history.is_empty() {
        story.history.remove(0);
        return true;
    }
    if story.latest.take().is_some() {
        return true;
    }
    *step += 1;
    match step {
        1 => {
            story.error = story.error.take().map(|error| cut(error, SHORT_ERROR_BYTES).into_owned())
        }
        2 => {
            story.error = None;
            story.detail = story.detail.take().map(|why| cut(why, SHORT_ERROR_BYTES).into_owned());
        }
        3 => {
            story.original_user_id = None;
            story.original_death = None;
            story.original_exchange = None;
            story.original_routing_key = None;
        }
        _ => return false,
    }
    true
}

/// A history that somebody else may have written: entries that are no tables are left out.
fn told(value: &AMQPValue) -> Vec<Arc<AMQPValue>> {
    let AMQPValue::FieldArray(entries) = value else { return Vec::new() };
    let entries = entries.as_slice();
    let entries = entries[entries.len().saturating_sub(HISTORY_ENTRIES)..].iter();
    let tables = entries.filter(|entry| matches!(entry, AMQPValue::FieldTable(_)));
    tables.cloned().map(Arc::new).collect()
}
