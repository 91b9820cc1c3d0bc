//! How a consumer that lost its broker goes on.

use std::time::Duration;

use rand::Rng;
use serde::Deserialize;

use crate::{Error, ErrorKind, clock::Backoff, message::cut};

/// A subscription that lasted this long ends a series of failures.
pub(super) const STEADY: Duration = Duration::from_secs(30);
/// How long the consumer stays away from a queue whose head it cannot read. Each try is a delivery,
/// and a quorum queue of RabbitMQ 4 drops a message after 21 of them.
const UNREADABLE: Duration = Duration::from_secs(5 * 60);

/// How a consumer that lost its broker starts over.
///
/// | setting | default |
/// |---|---|
/// | [`first`](Self::first) | 100 ms |
/// | [`max`](Self::max) | 30 s |
/// | [`limit`](Self::limit) | none: for ever |
///
/// The wait before the n-th try in a row is drawn from `0..min(max, first * 2^(n - 1))` (full
/// jitter), so that workers that lost their broker together do not come back together. Having
/// consumed for 30 s ends the row. A broker that did not answer at all is looked for every 2 s, and its
/// return ends the wait. With TLS, one that takes connections counts as one that answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Reconnect {
    #[serde(deserialize_with = "crate::policy::duration")]
    first: Duration,
    #[serde(deserialize_with = "crate::policy::duration")]
    max: Duration,
    limit: Option<u32>,
}

impl Default for Reconnect {
    fn default() -> Self {
        Self { first: Duration::from_millis(100), max: Duration::from_secs(30), limit: None }
    }
}

impl Reconnect {
    /// The longest that the first wait may be. Default: 100 ms.
    #[must_use]
    pub fn first(mut self, wait: Duration) -> Self {
        self.first = wait;
        self
    }

    /// The longest that any wait may be. Default: 30 s.
    #[must_use]
    pub fn max(mut self, wait: Duration) -> Self {
        self.max = wait;
        self
    }

    /// After so many failed tries in a row the consumer stops, and
    /// [`Handle::stopped`](crate::Handle::stopped) says why. A try that gets to consume ends the
    /// row. Default: none, it tries for ever.
    #[must_use]
    pub fn limit(mut self, tries: u32) -> Self {
        self.limit = Some(tries);
        self
    }

    pub(super) fn validate(&self) -> Result<(), Error> {
        if self.first.is_zero() {
            return Err(Error::configuration(
                "reconnect.first: zero; a broker that is away would be tried without a pause",
            ));
        }
        if self.max < self.first {
            return Err(Error::configuration(format!(
                "reconnect.max: {:?} is shorter than the first wait",
                self.max
            )));
        }
        if self.limit == Some(0) {
            return Err(Error::configuration(
                "reconnect.limit: 0; use 1 or more, or leave it out to try for ever",
            ));
        }
        Ok(())
    }
}

/// How long to wait before the next try, and which kind of try it is.
#[derive(Debug)]
pub(super) struct Tries {
    backoff: Backoff,
    limit: Option<u32>,
    failed: u32,
    /// A message that cannot be read kills the connection of every consumer that shares it, and
    /// counts as a delivery of all that was unacked there. So once that has happened each of them
    /// goes on alone and job by job: one meets the message at its queue's head and keeps away, the
    /// others go back to the shared connection.
    pub(super) alone: bool,
}

/// A try that has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Try {
    pub(super) error: ErrorKind,
    pub(super) lasted: Duration,
    /// It got to consume.
    pub(super) consumed: bool,
}

impl Tries {
    pub(super) fn new(reconnect: Reconnect) -> Self {
        let backoff = Backoff::new(reconnect.first, reconnect.max);
        Self { backoff, limit: reconnect.limit, failed: 0, alone: false }
    }

    /// The wait before the next one; none if there is to be none.
    pub(super) fn after(&mut self, ended: Try, rng: &mut impl Rng) -> Option<Duration> {
        if ended.consumed && ended.lasted > STEADY {
            self.backoff.reset();
        }
        self.failed = if ended.consumed { 0 } else { self.failed.saturating_add(1) };
        if self.limit.is_some_and(|limit| self.failed >= limit) {
            return None;
        }
        let unreadable = ended.error == ErrorKind::Unreadable;
        if unreadable && self.alone {
            return Some(UNREADABLE);
        }
        self.alone |= unreadable;
        Some(self.backoff.next(rng))
    }

    /// How many failed in a row.
    pub(super) fn failed(&self) -> u32 {
        self.failed
    }
}

/// Consumer tags, each of them once.
#[derive(Debug)]
pub(super) struct Tags {
    first: String,
    used: u32,
}

impl Tags {
    pub(super) fn new(first: String) -> Self {
        Self { first, used: 0 }
    }

    /// The first one as it is, then with `.2`, `.3` and so on, in at most 255 bytes.
    pub(super) fn next(&mut self) -> String {
        self.used += 1;
        if self.used == 1 {
            return self.first.clone();
        }
        let number = format!(".{}", self.used);
        cut(&self.first, 255 - number.len()).into_owned() + &number
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{SeedableRng, rngs::SmallRng};

    #[test]
    fn only_a_probe_that_dies_of_a_message_makes_the_consumer_keep_away() {
        let mut rng = SmallRng::seed_from_u64(1);
        let mut tries = Tries::new(Reconnect::default());
        let mut wait = |error, lasted| {
            let ended = Try { error, lasted: Duration::from_secs(lasted), consumed: true };
            let wait = tries.after(ended, &mut rng).expect("for ever");
            (wait, tries.alone)
        };
        assert!(!wait(ErrorKind::Connection, 0).1);
        // It may be another queue's message: look at once, but alone.
        let (first, probing) = wait(ErrorKind::Unreadable, 3600);
        assert!(first <= Duration::from_secs(30) && probing);
        assert_eq!(wait(ErrorKind::Unreadable, 0), (UNREADABLE, true));
        assert_eq!(wait(ErrorKind::Unreadable, 3600), (UNREADABLE, true));
        // A broker that is away says nothing about the message.
        let (away, probing) = wait(ErrorKind::Connection, 0);
        assert!(away <= Duration::from_secs(30) && probing);
        assert_eq!(wait(ErrorKind::Unreadable, 0), (UNREADABLE, true));
    }

    #[test]
    fn the_limit_counts_failed_tries_in_a_row() {
        let mut rng = SmallRng::seed_from_u64(1);
        let (error, lasted) = (ErrorKind::Connection, Duration::ZERO);
        let mut tries = Tries::new(Reconnect::default().limit(3));
        let mut goes_on =
            |consumed| tries.after(Try { error, lasted, consumed }, &mut rng).is_some();
        assert!(goes_on(false) && goes_on(false) && goes_on(true), "the third one consumed");
        assert!(goes_on(false) && goes_on(false));
        assert!(!goes_on(false));

        let mut tries = Tries::new(Reconnect::default());
        let ended = Try { error, lasted, consumed: false };
        assert!((0..10_000).all(|_| tries.after(ended, &mut rng).is_some()), "for ever");
    }

    #[test]
    fn no_consumer_tag_is_used_twice_or_too_long() {
        let mut tags = Tags::new("worker".to_owned());
        assert_eq!([(); 3].map(|()| tags.next()), ["worker", "worker.2", "worker.3"]);
        let mut long = Tags::new("é".repeat(127));
        assert_eq!([(); 2].map(|()| long.next().len()), [254, 255]);
        assert_eq!(Tags::new("t".repeat(255)).next().len(), 255);
    }
}
