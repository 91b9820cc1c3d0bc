//! When a job is given up, and why, for people.

use std::time::{Duration, SystemTime};

use lapin::BasicProperties;

use super::{Story, header::rfc3339};

/// What ends there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// The one that its own expiration set.
    Deadline,
    /// The policy's.
    Age(Duration),
}

impl Limit {
    /// As `its deadline of 2026-01-01T00:01:00.000Z`.
    pub(crate) fn text(self, at: SystemTime) -> String {
        match self {
            Self::Deadline => {
                format!("its deadline of {}, which its expiration set", rfc3339(at))
            }
            Self::Age(age) => {
                format!("its age limit of {} (max_age), reached at {}", span(age), rfc3339(at))
            }
        }
    }
}

impl Story {
    /// When the job is given up: at its own deadline, or at the end of its policy's maximum age,
    /// whichever is earlier.
    pub(crate) fn expires_at(
        &self,
        properties: &BasicProperties,
        max_age: Option<Duration>,
        now: SystemTime,
    ) -> Option<(SystemTime, Limit)> {
        let too_old = max_age
            .and_then(|age| Some((self.born(properties, now).checked_add(age)?, Limit::Age(age))));
        let deadline = self.end_of_life(properties, now).map(|at| (at, Limit::Deadline));
        deadline.into_iter().chain(too_old).min_by_key(|(at, _)| *at)
    }

    /// The job's own deadline: what its headers say, or at first its lifetime.
    pub(super) fn end_of_life(
        &self,
        properties: &BasicProperties,
        now: SystemTime,
    ) -> Option<SystemTime> {
        if self.deadline.is_some() || !self.is_first() {
            // The expiration of a copy of ours is a lane's.
            return self.deadline;
        }
        let life = properties.expiration().as_ref()?.as_str().parse().ok()?;
        self.born(properties, now).checked_add(Duration::from_millis(life))
    }

    /// When the job's life began: its timestamp if it has one that is not 0 nor in the future, else
    /// its first failure. A job that was put back lives from its first failure after.
    fn born(&self, properties: &BasicProperties, now: SystemTime) -> SystemTime {
        let stamp = properties
            .timestamp()
            .and_then(|s| SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(s)))
            // Many clients write 0 where none was set.
            .filter(|stamp| *stamp > SystemTime::UNIX_EPOCH && *stamp <= now)
            .filter(|_| self.exhumed_count == 0);
        stamp.or(self.first_failed_at).unwrap_or(now)
    }
}

/// A length of time for people: whole seconds, if there are any to speak of.
pub(crate) fn span(long: Duration) -> String {
    let whole = match long.as_secs() {
        0..10 => Duration::from_millis(long.as_millis() as u64),
        seconds => Duration::from_secs(seconds),
    };
    humantime::format_duration(whole).to_string()
}
