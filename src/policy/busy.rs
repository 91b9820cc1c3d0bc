//! Busy: when a job that found something scarce taken comes back. Random, so that jobs that compete
//! do not meet again.

/// How many times in a row a job may be busy before a failure is charged.
pub(super) const CEILING: u32 = 100;

const SOONEST_MS: u64 = 2_000;
const LATEST_MS: u64 = 60_000;
/// So many lanes cut the first window, and so many the rest.
const FIRST_LANES: u64 = 8;
const LATER_LANES: u32 = 16;

/// The window of a job that is busy for the n-th time in a row, in milliseconds:
/// `2 s ..= min(60 s, 2 s + 2^n s)`.
pub(crate) fn busy_window_ms(n: u32) -> std::ops::RangeInclusive<u64> {
    let width = 2u64.saturating_pow(n).saturating_mul(1_000);
    SOONEST_MS..=SOONEST_MS.saturating_add(width).min(LATEST_MS)
}

/// The ladder of 24 lanes: 8 cut 2 s to 4 s evenly, 16 go on to 60 s at a constant ratio, which is
/// `15^(1/16)`. Rising, in milliseconds.
pub(crate) fn busy_delays() -> impl Iterator<Item = u64> {
    let first_end = 2 * SOONEST_MS;
    let first =
        (1..=FIRST_LANES).map(move |i| SOONEST_MS + i * (first_end - SOONEST_MS) / FIRST_LANES);
    let ratio = LATEST_MS as f64 / first_end as f64;
    let later = (1..=LATER_LANES).map(move |i| {
        (first_end as f64 * ratio.powf(f64::from(i) / f64::from(LATER_LANES))).round() as u64
    });
    first.chain(later)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_ladder_has_24_lanes_from_2_s_to_60_s() {
        let ladder: Vec<u64> = busy_delays().collect();
        assert_eq!(ladder.len(), 24);
        assert_eq!(ladder[..8], [2_250, 2_500, 2_750, 3_000, 3_250, 3_500, 3_750, 4_000]);
        assert_eq!(ladder[23], 60_000);
        assert!(ladder.windows(2).all(|pair| pair[0] < pair[1]));
        for pair in ladder[7..].windows(2) {
            assert!((pair[1] as f64 / pair[0] as f64 - 1.1844).abs() < 0.001, "{pair:?}");
        }
    }

    #[test]
    fn windows_double_to_a_minute() {
        assert_eq!(busy_window_ms(1), 2_000..=4_000);
        assert_eq!(busy_window_ms(2), 2_000..=6_000);
        assert_eq!(busy_window_ms(6), 2_000..=60_000);
    }

    proptest! {
        #[test]
        fn no_n_overflows(n: u32) {
            let window = busy_window_ms(n);
            prop_assert!(*window.end() <= LATEST_MS && window.start() < window.end());
        }
    }
}
