//! Which lane a wait is spent in. Pure.

use rand::{Rng, RngExt, seq::IndexedRandom};

use super::{Lane, Topology};
use crate::policy::{MAX_DELAY_MS, busy_window_ms};

/// The hold lanes, for waits longer than the longest lane: 10 min, 1 h and 6 h.
pub(super) const HOLD_MS: [u64; 3] = [600_000, 3_600_000, 21_600_000];
/// A wait that needs more hops than this, or more than 10 years, makes no sense.
const MAX_HOPS: u64 = 10_000;

impl Topology {
    /// Whether hops can spend this wait at all.
    pub(crate) fn in_reach(&self, policy: usize, wait_ms: u64) -> bool {
        wait_ms <= MAX_DELAY_MS && self.hops(policy, wait_ms) <= MAX_HOPS
    }

    /// How many lanes a wait goes through before the one that ends it.
    fn hops(&self, policy: usize, wait_ms: u64) -> u64 {
        let own = self.ladders[policy].values().flatten().map(|lane| lane.delay_ms).max();
        let own = own.unwrap_or(HOLD_MS[0]);
        let longer = HOLD_MS.into_iter().rev().filter(|hold| *hold > own);
        let mut left = wait_ms;
        let mut hops = 0;
        for lane in longer.chain([own]) {
            hops += left / lane;
            left %= lane;
        }
        hops
    }

    /// A lane that is not shorter than the wait: one of the policy's in `wait..=1.25 wait`, at
    /// random, for a herd that was sent away together must not return together; else the first
    /// not shorter. A longer wait goes hop by hop: the longest lane that fits takes a part of it.
    pub(crate) fn place(&self, policy: usize, wait_ms: u64, rng: &mut impl Rng) -> &Lane {
        let mut own: Vec<&Lane> = self.ladders[policy].values().flatten().collect();
        own.sort_unstable_by_key(|lane| lane.delay_ms);
        let near = |lane: &Lane| {
            lane.delay_ms >= wait_ms && lane.delay_ms <= wait_ms.saturating_add(wait_ms / 4)
        };
        let nearby: Vec<&Lane> = own.iter().copied().filter(|lane| near(lane)).collect();
        if let Some(lane) = nearby.choose(rng) {
            return lane;
        }
        if let Some(lane) = own.iter().find(|lane| lane.delay_ms >= wait_ms) {
            return lane;
        }
        if let Some(lane) = self.hold.iter().find(|lane| near(lane)) {
            return lane;
        }
        let fitting = self.hold.iter().filter(|lane| lane.delay_ms <= wait_ms);
        // All of the policy's are shorter, and there is at least one.
        let longest = own.last().copied().into_iter().chain(fitting).max_by_key(|l| l.delay_ms);
        longest.unwrap_or(&self.hold[0])
    }

    /// The lane of a job that is busy for the n-th time in a row: the first not shorter than a
    /// random time, among those in its window.
    pub(crate) fn place_busy(&self, n: u32, rng: &mut impl Rng) -> &Lane {
        let window = busy_window_ms(n);
        let inside = self.busy.partition_point(|lane| lane.delay_ms <= *window.end());
        let inside = &self.busy[..inside];
        // The first window has eight lanes.
        let last = &inside[inside.len() - 1];
        // The window's start itself is no lane, so that the first is drawn as often as the others.
        let wanted = rng.random_range(window.start() + 1..=last.delay_ms);
        inside.iter().find(|lane| lane.delay_ms >= wanted).unwrap_or(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Jitter, QueueType, RetryPolicy};
    use proptest::prelude::*;
    use rand::{SeedableRng, rngs::SmallRng};
    use std::collections::HashMap;

    fn topology(policy: RetryPolicy) -> Topology {
        Topology::new("orders", policy, QueueType::Quorum).unwrap()
    }

    #[test]
    fn a_herd_that_was_sent_away_together_is_spread_over_a_quarter_more() {
        let topology = topology(RetryPolicy::new([10]).lanes(16));
        let mut rng = SmallRng::seed_from_u64(1);
        let mut drawn: Vec<u64> =
            (0..200).map(|_| topology.place(0, 8_000, &mut rng).delay_ms).collect();
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn, [8_125, 8_437, 8_750, 9_062, 9_375, 9_687, 10_000]);
    }

    #[test]
    fn a_day_on_levels_of_seconds_takes_few_hops_and_is_never_early() {
        let topology = topology(RetryPolicy::new([1, 2, 4]).jitter(Jitter::None));
        let mut rng = SmallRng::seed_from_u64(1);
        let (mut left, mut hops) = (86_400_000u64, 0);
        loop {
            hops += 1;
            let lane = topology.place(0, left, &mut rng);
            let Some(still) = left.checked_sub(lane.delay_ms) else { break };
            left = still;
        }
        assert!(hops < 30, "{hops}");
    }

    #[test]
    fn busy_jobs_are_spread_evenly_over_their_window() {
        let topology = topology(RetryPolicy::new([1]));
        let mut rng = SmallRng::seed_from_u64(1);
        let mut drawn: HashMap<u64, u32> = HashMap::new();
        for _ in 0..8_000 {
            *drawn.entry(topology.place_busy(1, &mut rng).delay_ms).or_default() += 1;
        }
        assert_eq!(drawn.len(), 8);
        assert!(drawn.values().all(|&n| (850..1_150).contains(&n)), "{drawn:?}");
        for n in [2, 3, 4, 5, 6, 100, u32::MAX] {
            let most = (0..2_000).map(|_| topology.place_busy(n, &mut rng).delay_ms).max();
            let end = *busy_window_ms(n).end();
            assert!(most.is_some_and(|ms| ms >= end - end / 5 && ms <= end), "{n}: {most:?}");
        }
    }

    #[test]
    fn a_wait_of_more_than_ten_thousand_hops_is_out_of_reach_however_short_the_lanes_are() {
        let second = 1_000;
        let day = 86_400 * second;
        let of = |levels: &[&str]| topology(RetryPolicy::new(levels).jitter(Jitter::None));
        let slow = of(&["1s", "4s"]);
        assert_eq!(slow.hops(0, day), 4);
        assert_eq!(slow.hops(0, 2 * day - second), 7 + 5 + 5 + 149);
        assert_eq!(slow.hops(0, 3 * second), 0);
        assert!(slow.in_reach(0, 2_500 * day));
        assert!(!slow.in_reach(0, 2_501 * day));
        let long = of(&["90d"]);
        assert!(long.in_reach(0, MAX_DELAY_MS) && !long.in_reach(0, MAX_DELAY_MS + 1));
        let quick = of(&["1ms"]);
        assert!(quick.in_reach(0, 10 * second) && !quick.in_reach(0, 10 * second + 1));
    }

    proptest! {
        #[test]
        fn a_wait_that_fits_into_a_lane_is_spent_there_and_a_hop_is_no_longer_than_a_quarter_more(
            wait in 1u64..=MAX_DELAY_MS, levels in proptest::collection::vec(1u64..100_000, 1..5),
            lanes in 1u32..8, seed: u64,
        ) {
            let topology = topology(RetryPolicy::new(levels).lanes(lanes));
            let lane = topology.place(0, wait, &mut SmallRng::seed_from_u64(seed)).delay_ms;
            let own = topology.ladders[0].values().flatten().map(|lane| lane.delay_ms);
            if own.max().is_some_and(|longest| longest >= wait) {
                prop_assert!(lane >= wait);
            } else {
                prop_assert!(lane <= wait + wait / 4);
            }
        }
    }
}
