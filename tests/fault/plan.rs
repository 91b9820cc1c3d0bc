//! What becomes of each job: decided from the seed, the job's id and how far it has come, so that
//! every copy of it meets the same fate, whoever runs it.

use lapin::types::AMQPValue;
use lapin_retry::{Job, RetryPolicy};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::{
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

pub(crate) const WORK: &str = "work";
pub(crate) const BURIED: &str = "work.buried";
/// After which a handler is cut.
pub(crate) const HANDLER_TIMEOUT: Duration = Duration::from_secs(2);
/// The work queue's, where the broker heeds one, and the node's.
pub(crate) const CONSUMER_TIMEOUT: Duration = Duration::from_secs(8);
/// How long a handler works that outlasts the consumer timeout.
pub(crate) const OVERSTAY: Duration = Duration::from_secs(11);
/// Of workers whose runtime is blocked at times.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(2);
/// How long a handler blocks its thread: the broker has missed the heartbeats by then.
pub(crate) const BLOCK: Duration = Duration::from_secs(7);
/// Ids of jobs that fail once, so that a lane is full of them, begin with it.
pub(crate) const BURST: char = 'b';
/// Ids of jobs that fail once, and that a slow wire is busy with, begin with it.
pub(crate) const LARGE: char = 'l';

pub(crate) fn body(id: &str) -> Vec<u8> {
    let length = if id.starts_with(LARGE) { 200_000 } else { id.len() };
    let mut body = id.as_bytes().to_vec();
    body.resize(length, b'.');
    body
}

const LEVELS: u32 = 3;

/// Each variant has lanes of its own, as after a change of the configuration.
pub(crate) fn policy(variant: u32) -> RetryPolicy {
    let level = |seconds: u32| Duration::from_millis((1000 * seconds + 10 * variant).into());
    RetryPolicy::new((1..=LEVELS).map(level)).lanes(2)
}

/// How far a job has come. It is there once in a life without duplicates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Step {
    /// Charged.
    pub(crate) failures: u32,
    pub(crate) busy: u32,
    /// Returned after an outage.
    pub(crate) outage: bool,
}

impl Step {
    pub(crate) fn of(job: &Job) -> Self {
        let busy = header(job, "retry-busy-count").and_then(|value| match value {
            AMQPValue::LongLongInt(n) => u32::try_from(*n).ok(),
            AMQPValue::LongInt(n) => u32::try_from(*n).ok(),
            _ => None,
        });
        Self {
            failures: job.retry_count(),
            busy: busy.unwrap_or(0),
            outage: text(job, "retry-error-kind").as_deref() == Some("outage"),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.failures, self.busy, u8::from(self.outage))
    }
}

/// What tells two copies of a job at the same step from one that is delivered twice: when the
/// hand-off was made. A job as it was published has none.
pub(crate) fn copy_id(job: &Job) -> String {
    match (text(job, "retry-due-at"), text(job, "retry-last-failed-at")) {
        (None, None) => "-".to_owned(),
        (due, failed) => format!("{}/{}", due.unwrap_or_default(), failed.unwrap_or_default()),
    }
}

fn header<'a>(job: &'a Job, name: &str) -> Option<&'a AMQPValue> {
    job.properties().headers().as_ref()?.inner().get(name)
}

fn text(job: &Job, name: &str) -> Option<String> {
    Some(header(job, name)?.as_long_string()?.to_string())
}

/// What a handler says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Say {
    Done,
    Fail,
    Reject,
    Undecodable,
    Busy,
    Outage,
    RetryAfter,
    Hang,
    Panic,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Course {
    first: Say,
    /// How often the first is said, before the job is done or rejected.
    times: u32,
    then: Say,
}

impl Course {
    pub(crate) fn of(seed: u64, id: &str) -> Self {
        let mut rng = rng(seed, id);
        let times = rng.random_range(1..=LEVELS);
        let (first, times, then) = match rng.random_range(0..1000) {
            _ if id.starts_with([BURST, LARGE]) => (Say::Fail, 1, Say::Done),
            0..480 => (Say::Done, 0, Say::Done),
            480..700 => (Say::Fail, times, Say::Done),
            700..750 => (Say::Fail, LEVELS + 1, Say::Fail),
            750..790 => (Say::Fail, times - 1, Say::Reject),
            790..820 => (Say::Undecodable, 1, Say::Undecodable),
            820..880 => (Say::Busy, times.min(2), Say::Done),
            880..930 => (Say::RetryAfter, 1, Say::Done),
            930..950 => (Say::Hang, 1, Say::Done),
            950..970 => (Say::Panic, 1, Say::Done),
            970..972 => (Say::Outage, 1, Say::Done),
            _ => (Say::Done, 0, Say::Done),
        };
        Self { first, times, then }
    }

    pub(crate) fn say(self, step: Step) -> Say {
        let so_far = match self.first {
            Say::Busy => step.busy,
            Say::Outage => u32::from(step.outage),
            _ => step.failures,
        };
        if so_far < self.times { self.first } else { self.then }
    }

    /// Whether it succeeds at the first attempt.
    pub(crate) fn is_plain(self) -> bool {
        self.times == 0 && self.then == Say::Done
    }

    pub(crate) fn ends_buried(self) -> bool {
        self.then != Say::Done
    }
}

/// How long the handler works: mostly a moment, at times a second.
pub(crate) fn effort(seed: u64, id: &str) -> Duration {
    let mut rng = rng(seed + 1, id);
    let longest = if rng.random_range(0..100) == 0 { 1000 } else { 30 };
    Duration::from_millis(rng.random_range(0..longest))
}

fn rng(seed: u64, id: &str) -> SmallRng {
    let mut hasher = DefaultHasher::new();
    (seed, id).hash(&mut hasher);
    SmallRng::seed_from_u64(hasher.finish())
}
