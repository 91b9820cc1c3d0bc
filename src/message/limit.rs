//! Why a job is given up at some instant, for people.

use std::time::{Duration, SystemTime};

use super::header::rfc3339;

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

/// A length of time for people: whole seconds, if there are any to speak of.
pub(crate) fn span(long: Duration) -> String {
    let whole = match long.as_secs() {
        0..10 => Duration::from_millis(long.as_millis() as u64),
        seconds => Duration::from_secs(seconds),
    };
    humantime::format_duration(whole).to_string()
}
