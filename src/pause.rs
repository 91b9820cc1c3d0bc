//! When the consumer takes no jobs, because the failure is not theirs. A state machine that knows
//! no channel and is told the time.

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
}

impl Pacing {
    pub(crate) fn new(settings: Pauses, now: Instant) -> Self {
        let pace = Pace::Open { since: now };
        Self { settings, step: settings.first, pace, epoch: Epoch(1) }
    }

    pub(crate) fn pace(&self) -> Pace {
        self.pace
    }

    /// Asked at the last moment before a handler is called: in which epoch it is, if it may be.
    /// While a job is tried, only with the epoch of the probe.
    pub(crate) fn start(&self, probe: Option<Epoch>) -> Option<Epoch> {
        let may = match self.pace {
            Pace::Open { .. } => true,
            Pace::Paused { .. } => false,
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
        match self.pace {
            Pace::Paused { .. } => return None,
            Pace::Open { since } if now.duration_since(since) >= self.settings.first => {
                self.step = self.settings.first;
            }
            Pace::Open { .. } | Pace::Probing => {}
        }
        let wait = self.step.max(self.settings.minimum);
        self.step = self.step.saturating_mul(2).min(self.settings.max);
        self.turn_to(Pace::Paused { until: now.checked_add(wait) });
        Some(wait)
    }

    /// A handler reports anything but an outage. True if that ends the pause.
    pub(crate) fn through(&mut self, started: Epoch, now: Instant) -> bool {
        let ends = started == self.epoch && self.pace == Pace::Probing;
        if ends {
            self.pace = Pace::Open { since: now };
        }
        ends
    }

    /// The right to try one job, if the wait is over.
    pub(crate) fn probe(&mut self, now: Instant) -> Option<Epoch> {
        let over = matches!(self.pace, Pace::Paused { until: Some(until) } if until <= now);
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

    fn turn_to(&mut self, pace: Pace) {
        self.pace = pace;
        self.epoch = Epoch(self.epoch.0.wrapping_add(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn pacing(settings: Pauses) -> (Pacing, Instant) {
        let now = Instant::now();
        (Pacing::new(settings, now), now)
    }

    impl Pacing {
        fn epoch(&self) -> Epoch {
            self.epoch
        }
    }

    /// Ends the wait, and tries one job.
    fn probe(pacing: &mut Pacing) -> Instant {
        let Pace::Paused { until: Some(until) } = pacing.pace() else { panic!("not paused") };
        let soon = until - Duration::from_nanos(1);
        assert_eq!(pacing.probe(soon), None, "not before the wait is over");
        assert_eq!(pacing.probe(until), Some(pacing.epoch));
        until
    }

    #[test]
    fn waits_double_from_5_s_to_5_min_while_each_probe_fails() {
        let (mut pacing, mut now) = pacing(Pauses::default());
        let mut waits = Vec::new();
        for _ in 0..9 {
            waits.push(pacing.outage(pacing.epoch(), now).unwrap().as_secs());
            now = probe(&mut pacing);
        }
        assert_eq!(waits, [5, 10, 20, 40, 80, 160, 300, 300, 300]);
    }

    #[test]
    fn ten_minutes_of_outage_cost_at_most_ten_probes() {
        let (mut pacing, start) = pacing(Pauses::default());
        let (mut now, mut probes) = (start, 0);
        while now < start + 600 * SECOND {
            pacing.outage(pacing.epoch(), now).unwrap();
            now = probe(&mut pacing);
            probes += 1;
        }
        assert!(probes <= 10, "{probes}");
    }

    #[test]
    fn those_who_were_running_when_a_pause_began_lengthen_nothing() {
        let (mut pacing, now) = pacing(Pauses::default());
        let started = pacing.epoch();
        assert_eq!(pacing.outage(started, now), Some(5 * SECOND));
        for _ in 0..100 {
            assert_eq!(pacing.outage(started, now), None);
            assert!(!pacing.through(started, now), "an old success is no news");
        }
        probe(&mut pacing);
        assert!(!pacing.through(started, now));
        assert!(pacing.through(pacing.epoch(), now));
        assert_eq!(pacing.outage(started, now + SECOND), None);
    }

    #[test]
    fn the_wait_returns_to_the_first_after_one_first_wait_without_outage_and_not_sooner() {
        let (mut pacing, now) = pacing(Pauses::default());
        pacing.outage(pacing.epoch(), now);
        let now = probe(&mut pacing);
        pacing.through(pacing.epoch(), now);
        let soon = now + 5 * SECOND - Duration::from_millis(1);
        assert_eq!(pacing.outage(pacing.epoch(), soon), Some(10 * SECOND));
        let now = probe(&mut pacing);
        pacing.through(pacing.epoch(), now);
        assert_eq!(pacing.outage(pacing.epoch(), now + 5 * SECOND), Some(5 * SECOND));
        probe(&mut pacing);
    }

    #[test]
    fn with_one_of_five_providers_down_the_waits_grow() {
        // Four of five probes get through, and the next bad job is never far.
        let (mut pacing, mut now) = pacing(Pauses::default());
        let mut waits = Vec::new();
        for _ in 0..8 {
            waits.push(pacing.outage(pacing.epoch(), now).unwrap().as_secs());
            now = probe(&mut pacing);
            pacing.through(pacing.epoch(), now);
            now += SECOND;
        }
        assert_eq!(waits, [5, 10, 20, 40, 80, 160, 300, 300]);
    }

    #[test]
    fn resume_clears_at_once_and_the_next_wait_is_the_first() {
        let (mut pacing, now) = pacing(Pauses::default());
        pacing.outage(pacing.epoch(), now);
        let now = probe(&mut pacing);
        pacing.outage(pacing.epoch(), now);
        assert!(pacing.resume(now));
        assert!(matches!(pacing.pace(), Pace::Open { .. }));
        assert_eq!(pacing.outage(pacing.epoch(), now), Some(5 * SECOND));
        assert_eq!(pacing.probe(now), None);
    }

    #[test]
    fn a_new_configuration_clears_and_its_first_wait_is_the_next_not_a_stale_one() {
        let (mut pacing, now) = pacing(Pauses::default());
        pacing.outage(pacing.epoch(), now);
        let now = probe(&mut pacing);
        pacing.outage(pacing.epoch(), now);
        assert!(pacing.reconfigure(Pauses::default().first(2 * SECOND), now));
        assert_eq!(pacing.outage(pacing.epoch(), now), Some(2 * SECOND));
        let now = probe(&mut pacing);
        assert_eq!(pacing.outage(pacing.epoch(), now), Some(4 * SECOND));
    }

    #[test]
    fn a_minimum_above_the_first_wait_floors_it() {
        let settings = Pauses::default().first(SECOND).minimum(3 * SECOND);
        let (mut pacing, mut now) = pacing(settings);
        let mut waits = Vec::new();
        for _ in 0..5 {
            waits.push(pacing.outage(pacing.epoch(), now).unwrap().as_secs());
            now = probe(&mut pacing);
        }
        assert_eq!(waits, [3, 3, 4, 8, 16]);
    }

    #[test]
    fn a_lost_probe_is_followed_by_another_at_once() {
        let (mut pacing, now) = pacing(Pauses::default());
        pacing.outage(pacing.epoch(), now);
        let now = probe(&mut pacing);
        let first = pacing.epoch();
        assert!(pacing.probe_lost(first, now));
        let second = pacing.probe(now).unwrap();
        assert!(!pacing.probe_lost(first, now), "it has lost its say");
        assert_eq!(pacing.outage(first, now), None);
        assert!(pacing.through(second, now));
    }

    #[test]
    fn in_a_pause_no_handler_starts_but_that_of_the_probe() {
        let (mut pacing, now) = pacing(Pauses::default());
        let open = pacing.start(None).unwrap();
        pacing.outage(open, now);
        assert_eq!(pacing.start(None), None);
        assert_eq!(pacing.start(Some(open)), None);
        probe(&mut pacing);
        let right = pacing.epoch();
        assert_eq!(pacing.start(None), None);
        assert_eq!(pacing.start(Some(open)), None);
        assert_eq!(pacing.start(Some(right)), Some(right));
        pacing.hold();
        assert_eq!(pacing.start(Some(right)), None);
        pacing.resume(now);
        assert!(pacing.start(None).is_some() && pacing.start(Some(right)).is_some());
    }

    #[test]
    fn who_was_tried_before_a_resume_pauses_nothing_after() {
        let (mut pacing, now) = pacing(Pauses::default());
        pacing.outage(pacing.epoch(), now);
        probe(&mut pacing);
        let tried = pacing.epoch();
        pacing.resume(now);
        assert_eq!(pacing.outage(tried, now), None);
        assert!(pacing.outage(pacing.epoch(), now).is_some());
    }

    #[test]
    fn the_time_until_jobs_come_in_again_is_not_time_without_outage() {
        let (mut pacing, now) = pacing(Pauses::default());
        pacing.outage(pacing.epoch(), now);
        let now = probe(&mut pacing);
        pacing.through(pacing.epoch(), now);
        // The broker took a minute to take the consumer back.
        let now = now + 60 * SECOND;
        pacing.consuming(now);
        assert_eq!(pacing.outage(pacing.epoch(), now + SECOND), Some(10 * SECOND));
    }

    #[test]
    fn a_pause_by_hand_lasts_until_it_is_resumed() {
        let (mut pacing, now) = pacing(Pauses::default());
        assert!(pacing.hold());
        assert!(!pacing.hold(), "no news");
        assert_eq!(pacing.probe(now + 1_000_000 * SECOND), None);
        assert!(pacing.resume(now));
    }

    #[test]
    fn impossible_pauses_are_refused_with_the_name_of_the_field() {
        for (settings, field) in [
            (Pauses::default().first(Duration::ZERO), "pause.first"),
            (Pauses::default().max(SECOND), "pause.max"),
            (Pauses::default().minimum(600 * SECOND), "pause.max"),
        ] {
            let error = settings.validate().unwrap_err().to_string();
            assert!(error.starts_with(field), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_wait_is_longer_than_the_maximum_or_shorter_than_the_minimum(
            first in 1u64..1 << 40, max in 1u64..1 << 40, minimum in 0u64..1 << 40,
            steps in 0usize..200,
        ) {
            let ms = Duration::from_millis;
            let settings = Pauses::default().first(ms(first)).max(ms(max)).minimum(ms(minimum));
            prop_assume!(settings.validate().is_ok());
            let mut pacing = Pacing::new(settings, Instant::now());
            for _ in 0..steps {
                let wait = pacing.outage(pacing.epoch(), Instant::now()).unwrap();
                prop_assert!(wait >= ms(minimum) && wait <= ms(max));
                pacing.pace = Pace::Probing;
            }
        }
    }
}
