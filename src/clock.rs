//! The wall clock, read afresh each time; virtual while tokio's clock is paused.

use std::time::{Duration, SystemTime};

use rand::{Rng, RngExt};
use tokio::time::Instant;

/// A clock that is set right after the start, or a machine that slept, must not stay wrong for life:
/// the system's time is read each time. Under [`tokio::time::pause`] it is the time at the start and
/// what has passed on tokio's clock, so that the whole engine is virtual.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    wall: SystemTime,
    anchor: Instant,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self { wall: SystemTime::now(), anchor: Instant::now() }
    }

    pub(crate) fn now(&self) -> SystemTime {
        // Tokio's clock is std's, unless it is or was paused.
        let before = std::time::Instant::now();
        let tokio = Instant::now();
        let real = before..=std::time::Instant::now();
        if real.contains(&tokio.into_std()) {
            SystemTime::now()
        } else {
            self.wall + tokio.duration_since(self.anchor)
        }
    }

    /// When that is, or was, on the wall.
    pub(crate) fn at(&self, instant: Instant) -> SystemTime {
        let (now, wall) = (Instant::now(), self.now());
        match instant.checked_duration_since(now) {
            Some(left) => wall + left,
            None => wall - now.duration_since(instant),
        }
    }
}

/// A wait beyond what the clock can hold is as good as a century.
pub(crate) fn later(from: Instant, wait: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    from.checked_add(wait).unwrap_or(from + CENTURY)
}

/// Waits between tries at something the broker does not do: doubling, with full jitter.
///
/// Wait n is uniform in `0..min(max, first * 2^n)` ("full jitter" of the AWS Architecture Blog,
/// "Exponential Backoff And Jitter", 2015).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    first: Duration,
    max: Duration,
    tries: u32,
}

impl Backoff {
    pub(crate) const fn new(first: Duration, max: Duration) -> Self {
        Self { first, max, tries: 0 }
    }

    pub(crate) fn next(&mut self, rng: &mut impl Rng) -> Duration {
        let ceiling = self.first.saturating_mul(2u32.saturating_pow(self.tries)).min(self.max);
        self.tries = self.tries.saturating_add(1);
        ceiling.mul_f64(rng.random())
    }

    pub(crate) fn reset(&mut self) {
        self.tries = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{SeedableRng, rngs::SmallRng};

    const HOUR: Duration = Duration::from_secs(3600);

    /// How far a time is from what the system's clock says now.
    fn off(time: SystemTime) -> Duration {
        let now = SystemTime::now();
        time.duration_since(now).unwrap_or_else(|past| past.duration())
    }

    #[test]
    fn a_clock_that_was_an_hour_slow_at_the_start_is_right_once_it_is_set_right() {
        let clock = Clock { wall: SystemTime::now() - HOUR, anchor: Instant::now() };
        assert!(off(clock.now()) < HOUR / 60, "{:?}", off(clock.now()));
        let later = clock.at(Instant::now() + HOUR);
        assert!(off(later - HOUR) < HOUR / 60);
        assert!(off(clock.at(Instant::now() - HOUR / 2) + HOUR / 2) < HOUR / 60);
    }

    #[tokio::test(start_paused = true)]
    async fn an_hour_of_a_paused_clock_is_an_hour_on_the_wall() {
        let clock = Clock::start();
        let start = clock.now();
        tokio::time::sleep(HOUR).await;
        let passed = clock.now().duration_since(start).unwrap();
        assert!(passed >= HOUR && passed < HOUR + HOUR / 60, "{passed:?}");
        // Virtual time does not go by while nothing sleeps.
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(clock.now(), start + passed);
        tokio::time::resume();
        let resumed = clock.now().duration_since(start).unwrap();
        assert!(resumed >= HOUR, "it does not jump back: {resumed:?}");
    }

    #[test]
    fn waits_grow_to_the_maximum_and_never_overflow() {
        let mut rng = SmallRng::seed_from_u64(1);
        let (first, max) = (Duration::from_millis(100), Duration::from_secs(30));
        let mut backoff = Backoff::new(first, max);
        for n in 0..100u32 {
            let ceiling = max.as_secs_f64().min(0.1 * 2f64.powi(n as i32));
            assert!(backoff.next(&mut rng).as_secs_f64() <= ceiling);
        }
        backoff.tries = u32::MAX;
        assert!(backoff.next(&mut rng) <= max);
        backoff.reset();
        assert!(backoff.next(&mut rng) <= first);
    }
}
