//! The window that a level's jitter allows, and how lanes cut it. The heart of the crate.
//!
//! RabbitMQ expires messages only at the head of a queue, so a random expiration in one queue
//! spreads nothing: every message waits for the longest one before it. Here each level's window is
//! cut into lanes, every lane is a queue of its own, and **every message in a lane has the same
//! expiration**: the order of arrival is the order of expiry, and nothing waits behind another.
//! Jitter is the choice of the lane.

use serde::Deserialize;

use super::MAX_DELAY_MS;
use crate::Error;

/// How a level's nominal delay `d` is spread, so that jobs that failed together do not come back
/// together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Jitter {
    /// Exactly `d`. One lane.
    None,
    /// `d/2..d`, the default: half fixed, half random.
    #[default]
    Equal,
    /// `d(1-f)..d(1+f)` for a factor `f` in `0..=1`.
    Proportional(f64),
    /// `0..d` (at least 1 ms). Spreads the most; some jobs come back at once.
    Full,
}

/// The range of delays that a level's jitter allows, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) lo: u64,
    pub(crate) hi: u64,
}

impl Jitter {
    pub(super) fn validate(self) -> Result<(), Error> {
        match self {
            // A NaN is in no range.
            Self::Proportional(factor) if !(0.0..=1.0).contains(&factor) => {
                Err(Error::configuration(format!(
                    "jitter: the factor {factor} of proportional jitter is outside 0..=1"
                )))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn window(self, level_ms: u64) -> Window {
        let (lo, hi) = match self {
            Self::None => (level_ms, level_ms),
            Self::Equal => (level_ms / 2, level_ms),
            Self::Proportional(factor) => {
                // `as` saturates, and takes NaN for 0.
                let spread = (level_ms as f64 * factor).round() as u64;
                (level_ms.saturating_sub(spread), level_ms.saturating_add(spread))
            }
            Self::Full => (0, level_ms),
        };
        let hi = hi.min(MAX_DELAY_MS);
        Window { lo: lo.min(hi), hi }
    }
}

/// The delays of the lanes that a window is cut into, in milliseconds and rising: lane `i` of `K`
/// is `floor(lo + i * (hi - lo) / K)`, at least 1; equal delays are one lane.
pub(crate) fn lane_delays(window: Window, lanes: u32) -> Vec<u64> {
    let width = window.hi - window.lo;
    let mut delays: Vec<u64> = if u64::from(lanes) > width {
        // More lanes than milliseconds: each millisecond is one.
        (window.lo..=window.hi).map(|delay| delay.max(1)).collect()
    } else {
        // The product needs 128 bits; the quotient is at most the window's width.
        let (width, lanes) = (u128::from(width), u128::from(lanes));
        (1..=lanes).map(|i| (window.lo + (i * width / lanes) as u64).max(1)).collect()
    };
    delays.dedup();
    delays
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_level_of_15_s_has_the_lanes_of_the_design() {
        let delays = lane_delays(Jitter::Equal.window(15_000), 8);
        assert_eq!(delays, [8_437, 9_375, 10_312, 11_250, 12_187, 13_125, 14_062, 15_000]);
    }

    #[test]
    fn windows_of_each_kind() {
        for (jitter, lo, hi) in [
            (Jitter::None, 10_000, 10_000),
            (Jitter::Equal, 5_000, 10_000),
            (Jitter::Proportional(0.2), 8_000, 12_000),
            (Jitter::Proportional(0.0), 10_000, 10_000),
            (Jitter::Proportional(1.0), 0, 20_000),
            (Jitter::Full, 0, 10_000),
        ] {
            assert_eq!(jitter.window(10_000), Window { lo, hi }, "{jitter:?}");
        }
    }

    #[test]
    fn a_window_narrower_than_its_lanes_has_fewer_of_them() {
        assert_eq!(lane_delays(Jitter::Full.window(3), 8), [1, 2, 3]);
        assert_eq!(lane_delays(Jitter::None.window(7), 8), [7]);
    }

    fn jitters() -> impl Strategy<Value = Jitter> {
        prop_oneof![
            Just(Jitter::None),
            Just(Jitter::Equal),
            Just(Jitter::Full),
            (0.0..=1.0f64).prop_map(Jitter::Proportional),
        ]
    }

    proptest! {
        #[test]
        fn every_lane_is_inside_the_window_and_the_last_is_its_end(
            jitter in jitters(), level in 1..=MAX_DELAY_MS, lanes in 1u32..=200,
        ) {
            let window = jitter.window(level);
            let delays = lane_delays(window, lanes);
            prop_assert!(delays.iter().all(|&d| d >= 1 && d >= window.lo && d <= window.hi.max(1)));
            prop_assert!(delays.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(delays.len() <= lanes as usize);
            prop_assert_eq!(*delays.last().unwrap(), window.hi);
            prop_assert!(window.hi <= MAX_DELAY_MS);
        }

        #[test]
        fn lanes_are_even_to_a_millisecond(level in 10_000..=MAX_DELAY_MS, lanes in 1u32..=200) {
            let window = Jitter::Equal.window(level);
            let delays = lane_delays(window, lanes);
            let step = (window.hi - window.lo) as f64 / f64::from(lanes);
            for pair in delays.windows(2) {
                prop_assert!(((pair[1] - pair[0]) as f64 - step).abs() <= 1.0);
            }
        }

        #[test]
        fn any_jitter_and_level_are_survived(factor: f64, level: u64) {
            let window = Jitter::Proportional(factor).window(level);
            prop_assert!(window.lo <= window.hi);
        }
    }
}
