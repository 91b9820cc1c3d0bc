//! When the consumer takes no jobs, because the failure is not theirs. A state machine that knows
//! no channel and is told the time.

#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::Deserialize;
use tokio::time::Instant;

use crate::Error;

/// How the consumer pauses in an outage.
///
/// | setting | default |
/// |---|---|
/// | [`first`](Self::first) | 5 s |
/// | [`max`](Self::max) | 5 min |
/// | [`minimum`](Self::minimum) | 0: the first wait as it is |
///
/// The n-th wait in a row is `max(minimum, min(max, first * 2^(n - 1)))`. After each wait one job is
/// tried; if it gets through, the consumer goes on at full speed. After one first wait's length
/// without an outage the next pause begins with the first wait again; sooner, it goes on with the
/// next longer one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Pauses {
    #[serde(deserialize_with = "crate::policy::duration")]
    first: Duration,
    #[serde(deserialize_with = "crate::policy::duration")]
    max: Duration,
    #[serde(deserialize_with = "crate::policy::duration")]
    minimum: Duration,
}

impl Default for Pauses {
    fn default() -> Self {
        Self {
            first: Duration::from_secs(5),
            max: Duration::from_secs(5 * 60),
            minimum: Duration::ZERO,
        }
    }
}

impl Pauses {
    /// The first wait. Default: 5 s.
    #[must_use]
    pub fn first(mut self, wait: Duration) -> Self {
        self.first = wait;
        self
    }

    /// The longest wait. Default: 5 min.
    #[must_use]
    pub fn max(mut self, wait: Duration) -> Self {
        self.max = wait;
        self
    }

    /// No wait is shorter than this. Default: 0.
    #[must_use]
    pub fn minimum(mut self, wait: Duration) -> Self {
        self.minimum = wait;
        self
    }

    pub(crate) fn validate(&self) -> Result<(), Error> {
        if self.first.is_zero() {
            return Err(Error::configuration("pause.first: zero; the consumer would not pause"));
        }
        if self.max < self.first || self.max < self.minimum {
            return Err(Error::configuration(format!(
                "pause.max: {:?} is shorter than the first or the minimum wait",
                self.max
            )));
        }
        Ok(())
    }
}

/// Why the consumer pauses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PauseKind {
    /// A handler said so.
    Outage,
    /// By hand, until it is resumed.
    Manual,
    /// A hand-off does not succeed: a job that fails now would have nowhere to go.
    HandOff,
}

/// Between one change of pace and the next. What a handler reports counts only in the epoch that
/// it was started in: that of the probe is the probe's own. The default is no handler's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Epoch(u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// Full speed.
    Open { since: Instant },
    /// Nothing is taken. Without an end, until it is resumed by hand.
    Paused { until: Option<Instant> },
    /// Nothing is taken, for hand-offs fail. They are tried again then; if none is left but some are
    /// `owed`, one of their jobs is fetched then.
    Stuck { until: Instant, owed: bool },
    /// One job is tried.
    Probing,
}

#[derive(Debug)]
pub(crate) struct Pacing {
    settings: Pauses,
    /// The next wait, before the minimum.
    step: Duration,
    pace: Pace,
    epoch: Epoch,
    /// How many hand-offs fail for so long that nothing is taken.
    stuck: usize,
    /// Jobs were given back whose hand-off never succeeded: one at a time is taken.
    owing: bool,
}

impl Pacing {
    pub(crate) fn new(settings: Pauses, now: Instant) -> Self {
        let pace = Pace::Open { since: now };
        let step = settings.first;
        Self { settings, step, pace, epoch: Epoch(1), stuck: 0, owing: false }
    }

    pub(crate) fn pace(&self) -> Pace {
        self.pace
    }

    pub(crate) fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Asked at the last moment before a handler is called: in which epoch it is, if it may be.
    /// While a job is tried, only with the epoch of the probe.
    pub(crate) fn start(&self, probe: Option<Epoch>) -> Option<Epoch> {
        let may = match self.pace {
            Pace::Open { .. } => true,
            Pace::Paused { .. } | Pace::Stuck { .. } => false,
            Pace::Probing => probe == Some(self.epoch),
        };
        may.then_some(self.epoch)
    }

    /// Jobs come in again: only from now on does their going well say anything.
    pub(crate) fn consuming(&mut self, now: Instant) {
        if let Pace::Open { since } = &mut self.pace {
            *since = now;
        }
    }

    /// A handler reports an outage. The length of the pause that begins; none if it was started
    /// before the last pause began or ended: one pause counts for all who were running then, and
    /// who resumes knows better than they.
    pub(crate) fn outage(&mut self, started: Epoch, now: Instant) -> Option<Duration> {
        if started != self.epoch {
            return None;
        }
        if let Pace::Paused { .. } | Pace::Stuck { .. } = self.pace {
            return None;
        }
        let wait = self.next_wait(now);
        self.turn_to(Pace::Paused { until: now.checked_add(wait) });
        Some(wait)
    }

    /// A handler reports anything but an outage. True if that ends the pause.
    pub(crate) fn through(&mut self, started: Epoch, now: Instant) -> bool {
        let through = started == self.epoch && self.pace == Pace::Probing;
        if through && self.owing {
            // It says nothing of the hand-offs: the next one is tried, at once.
            self.pace = Pace::Paused { until: Some(now) };
        } else if through {
            self.pace = Pace::Open { since: now };
        }
        through && !self.owing
    }

    /// One more hand-off fails for so long that nothing is to be taken.
    pub(crate) fn get_stuck(&mut self) {
        self.stuck += 1;
        if let Pace::Stuck { owed, .. } = &mut self.pace {
            *owed = false;
        }
    }

    /// A hand-off of those failed again: when to try next, and the length of the wait that begins
    /// with it, if one does. All of them are tried at the same steps.
    pub(crate) fn still_stuck(&mut self, now: Instant) -> (Instant, Option<Duration>) {
        let within = |wait: Duration| now.checked_add(wait).unwrap_or(now);
        match self.pace {
            Pace::Stuck { until, .. } if until > now => (until, None),
            // Paused by hand it remains.
            Pace::Paused { until: None } => (within(self.settings.first), None),
            _ => {
                let wait = self.next_wait(now);
                let (until, owed) = (within(wait), self.stuck == 0);
                self.turn_to(Pace::Stuck { until, owed });
                (until, Some(wait))
            }
        }
    }

    /// One of those has come to its end.
    pub(crate) fn get_unstuck(&mut self, now: Instant) {
        self.stuck = self.stuck.saturating_sub(1);
        self.after_stuck(now);
    }

    /// Whether there are jobs that were given back with their hand-off still to do.
    pub(crate) fn owe(&mut self, owing: bool, now: Instant) {
        self.owing = owing;
        self.after_stuck(now);
    }

    pub(crate) fn is_owing(&self) -> bool {
        self.owing
    }

    /// No hand-off is stuck any longer: one job is tried, after the step if some are owed.
    fn after_stuck(&mut self, now: Instant) {
        match &mut self.pace {
            Pace::Stuck { owed, .. } if self.stuck == 0 && self.owing => *owed = true,
            Pace::Stuck { .. } if self.stuck == 0 => {
                self.turn_to(Pace::Paused { until: Some(now) });
            }
            _ => {}
        }
    }

    /// The right to try one job, if the wait is over.
    pub(crate) fn probe(&mut self, now: Instant) -> Option<Epoch> {
        let over = match self.pace {
            Pace::Paused { until } => until.is_some_and(|until| until <= now),
            Pace::Stuck { until, owed } => owed && until <= now,
            Pace::Open { .. } | Pace::Probing => false,
        };
        over.then(|| {
            self.turn_to(Pace::Probing);
            self.epoch
        })
    }

    /// The job that was tried went away without an outcome; another may be tried at once.
    pub(crate) fn probe_lost(&mut self, probe: Epoch, now: Instant) -> bool {
        let lost = probe == self.epoch && self.pace == Pace::Probing;
        if lost {
            self.pace = Pace::Paused { until: Some(now) };
        }
        lost
    }

    /// Pauses by hand. True if that is news.
    pub(crate) fn hold(&mut self) -> bool {
        let held = Pace::Paused { until: None };
        let news = self.pace != held;
        if news {
            self.turn_to(held);
        }
        news
    }

    /// Full speed at once, and the next pause begins with the first wait. True if it paused.
    pub(crate) fn resume(&mut self, now: Instant) -> bool {
        let paused = !matches!(self.pace, Pace::Open { .. });
        self.step = self.settings.first;
        self.owing = false;
        if paused {
            self.turn_to(Pace::Open { since: now });
        }
        paused
    }

    /// New settings clear a pause.
    pub(crate) fn reconfigure(&mut self, settings: Pauses, now: Instant) -> bool {
        self.settings = settings;
        self.resume(now)
    }

    fn next_wait(&mut self, now: Instant) -> Duration {
        if let Pace::Open { since } = self.pace
            && now.duration_since(since) >= self.settings.first
        {
            self.step = self.settings.first;
        }
        let wait = self.step.max(self.settings.minimum);
        self.step = self.step.saturating_mul(2).min(self.settings.max);
        wait
    }

    fn turn_to(&mut self, pace: Pace) {
        self.pace = pace;
        self.epoch = Epoch(self.epoch.0.wrapping_add(1));
    }
}
