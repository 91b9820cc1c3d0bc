//! One clock for everything: an anchor on the wall and tokio's monotonic time since, so that a
//! paused tokio clock makes the whole engine virtual.

use std::time::{Duration, SystemTime};

use rand::{Rng, RngExt};
use tokio::time::Instant;

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
        self.wall + self.anchor.elapsed()
    }

    /// An instant that is not before the start, on the wall.
    pub(crate) fn at(&self, instant: Instant) -> SystemTime {
        self.wall + instant.duration_since(self.anchor)
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
