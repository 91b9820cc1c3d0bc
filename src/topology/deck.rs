//! The choice of a lane: the randomness of the jitter.

use std::collections::HashMap;

use rand::{Rng, seq::SliceRandom};

use super::Lane;

/// A shuffled deck for each level: every lane is drawn once before any is drawn twice, in an order
/// that is new for each round. That evens a herd out further than independent draws do: 2,000 jobs
/// on 16 lanes are 125 a lane, where independent draws put about 150 on the fullest.
#[derive(Debug, Default)]
pub(crate) struct Decks {
    left: HashMap<(usize, u64), Vec<usize>>,
}

impl Decks {
    /// One of these lanes, which are those of this policy's level; never none.
    pub(crate) fn draw<'a>(
        &mut self,
        level: (usize, u64),
        lanes: &'a [Lane],
        rng: &mut impl Rng,
    ) -> &'a Lane {
        let deck = self.left.entry(level).or_default();
        loop {
            match deck.pop() {
                Some(index) if index < lanes.len() => return &lanes[index],
                Some(_) => {}
                None => {
                    deck.extend(0..lanes.len());
                    deck.shuffle(rng);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{QueueType, RetryPolicy, Topology};
    use rand::{SeedableRng, rngs::SmallRng};

    #[test]
    fn every_lane_is_drawn_once_before_any_is_drawn_twice() {
        let policy = RetryPolicy::new([10]).lanes(16);
        let topology = Topology::new("orders", policy, QueueType::Quorum).unwrap();
        let lanes = topology.lanes(0, 10_000);
        let mut rng = SmallRng::seed_from_u64(7);
        let mut decks = Decks::default();
        let mut rounds = Vec::new();
        for _ in 0..50 {
            let round: Vec<u64> =
                (0..16).map(|_| decks.draw((0, 10_000), lanes, &mut rng).delay_ms).collect();
            let mut sorted = round.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, lanes.iter().map(|lane| lane.delay_ms).collect::<Vec<_>>());
            rounds.push(round);
        }
        rounds.dedup();
        assert_eq!(rounds.len(), 50, "each round has an order of its own");
    }
}
