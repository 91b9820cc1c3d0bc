//! A job that waits here for its handler is unacked like one that runs, and the broker's consumer
//! timeout counts for both. So no job waits for longer than a quarter of it.

use std::time::Duration;

use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

use super::{
    intake::{Back, Intake},
    run::{Ended, Run},
};

/// How often in the longest wait it is looked at.
const LOOKS: usize = 4;

/// How many jobs the broker sends ahead: fewer than it was told while they wait too long here.
#[derive(Debug)]
pub(super) struct Prefetch {
    most: u16,
    /// As many as handlers may run: those start at once.
    least: u16,
    now: u16,
}

impl Prefetch {
    pub(super) fn new(most: u16, handlers: usize) -> Self {
        let least = u16::try_from(handlers).unwrap_or(u16::MAX).min(most);
        Self { most, least, now: most }
    }

    pub(super) fn now(&self) -> u16 {
        self.now
    }

    pub(super) fn is_low(&self) -> bool {
        self.now < self.most
    }

    /// `started` jobs in the longest wait: half of them wait for half as long.
    fn lower(&mut self, started: usize) {
        let half = u16::try_from(started / 2).unwrap_or(u16::MAX);
        self.now = half.min(self.now / 4 * 3).max(self.least);
    }

    fn raise(&mut self) {
        self.now = self.now.saturating_mul(2).min(self.most);
    }
}

/// Watches how long jobs wait while one subscription is served.
pub(super) struct Waiting {
    longest: Duration,
    look: Interval,
    /// How many jobs were started between the last looks.
    started: [usize; LOOKS],
    /// Nothing waited for long since.
    calm_since: Instant,
}

/// What to do about it.
pub(super) enum Wait {
    Short,
    TooLong,
    /// For long: more may be sent ahead.
    ShortForLong,
}

impl Waiting {
    pub(super) fn new(longest: Duration) -> Self {
        let period = (longest / LOOKS as u32).max(Duration::from_millis(1));
        let mut look = interval(period);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { longest, look, started: [0; LOOKS], calm_since: Instant::now() }
    }

    pub(super) fn started(&mut self) {
        self.started[0] += 1;
    }

    pub(super) async fn next_look(&mut self) {
        self.look.tick().await;
    }

    /// `since` when the first of those that wait does.
    pub(super) fn judge(&mut self, since: Option<Instant>) -> Wait {
        let waited = since.map_or(Duration::ZERO, |since| since.elapsed());
        // The next look would be too late.
        if waited + self.look.period() >= self.longest {
            return Wait::TooLong;
        }
        self.started.rotate_right(1);
        self.started[0] = 0;
        if waited >= self.longest / 2 {
            self.calm_since = Instant::now();
        }
        // The whole consumer timeout.
        let calm = self.calm_since.elapsed() >= 4 * self.longest;
        if calm && since.is_none() { Wait::ShortForLong } else { Wait::Short }
    }
}

impl Run {
    /// Jobs have waited for too long: what was not started leaves as copies to the tail of the queue,
    /// no step nearer to a delivery limit, and fewer are sent ahead from now on.
    pub(super) async fn thin_out(
        &self,
        intake: Intake,
        waiting: &Waiting,
        prefetch: &mut Prefetch,
    ) -> Ended {
        let (before, unrun) = (prefetch.now(), intake.arrived.len());
        prefetch.lower(waiting.started.iter().sum());
        tracing::warn!(
            queue = self.how.queue,
            "{unrun} jobs waited for a handler for about a quarter of the broker's consumer timeout; \
             they go to the tail of the queue, and the prefetch is {} for now instead of {before}: \
             set a smaller prefetch, or run more handlers at a time",
            prefetch.now()
        );
        self.give_up_as(intake, Back::Tail).await;
        // What runs keeps its place. Fetched before, the next job would only wait again.
        tokio::select! {
            biased;
            () = self.stop() => Ended::Stopped(None),
            () = self.engine.until_not_open() => Ended::Paused,
            _ = self.permit() => Ended::Paused,
        }
    }

    /// Nothing has waited for long: more are sent ahead again.
    pub(super) async fn fill_up(&self, intake: Intake, prefetch: &mut Prefetch) -> Ended {
        prefetch.raise();
        self.give_up_as(intake, Back::Tail).await;
        Ended::Paused
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prefetch_falls_to_what_is_started_in_time_and_rises_again() {
        let mut prefetch = Prefetch::new(100, 2);
        assert_eq!(prefetch.now(), 100);
        prefetch.lower(14);
        assert_eq!(prefetch.now(), 7);
        prefetch.lower(14);
        assert_eq!(prefetch.now(), 3, "it falls in any case");
        prefetch.lower(0);
        assert_eq!(prefetch.now(), 2, "each handler has its job");
        for expected in [4, 8, 16, 32, 64, 100, 100] {
            prefetch.raise();
            assert_eq!(prefetch.now(), expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_is_too_long_before_the_limit_and_not_long_before() {
        let longest = Duration::from_secs(40);
        let mut waiting = Waiting::new(longest);
        let since = Instant::now();
        let mut looks = 0;
        loop {
            waiting.next_look().await;
            looks += 1;
            if let Wait::TooLong = waiting.judge(Some(since)) {
                break;
            }
        }
        assert_eq!((since.elapsed(), looks), (Duration::from_secs(30), 4));
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_calm_of_a_whole_consumer_timeout_fills_up() {
        let longest = Duration::from_secs(40);
        let mut waiting = Waiting::new(longest);
        let begun = Instant::now();
        loop {
            waiting.next_look().await;
            // Something waits a little while until the end.
            let since = (begun.elapsed() < 4 * longest).then(Instant::now);
            if let Wait::ShortForLong = waiting.judge(since) {
                break;
            }
        }
        assert_eq!(begun.elapsed(), 4 * longest);
    }
}
