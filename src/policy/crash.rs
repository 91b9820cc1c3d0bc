//! Whether a job may have ended the process that ran it. A crash marks all that was in hand, so this
//! is a suspicion and no more: only what ran alone is known to have done it.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::Hash,
};

/// How often a message was delivered without an answer, as far as its queue tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interrupted {
    Never,
    /// A quorum queue counts, also what was given back.
    Times(u32),
    /// One of RabbitMQ 4.3 counts no more than that a consumer was lost.
    Failed(u32),
    /// A classic queue says that it was, not how often.
    Before,
    /// It was, since somebody moved it out of the buried queue. How often is not known: "Move messages"
    /// of the management UI copies the count of that queue, and a classic queue keeps the copy.
    Exhumed,
}

/// What is to be done with a job for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Suspicion {
    /// It may run beside others.
    Clear,
    /// It is run, with nothing else in hand.
    Alone,
    /// First of all a crash of it is to be counted.
    Count,
    /// It may have been interrupted in another queue only, as by looks at a lane. It goes unrun to the
    /// tail of the work queue, as a copy without counts, and is charged with nothing.
    Afresh,
}

impl Suspicion {
    /// It must not run beside others.
    pub(crate) fn is_suspect(self) -> bool {
        matches!(self, Self::Alone | Self::Count)
    }
}

/// From so many on it is no accident.
const SUSPECT: u32 = 3;
/// Half of the way to where a quorum queue of RabbitMQ 4 drops a message. The copy starts afresh.
const FAR: u32 = 10;
/// How many that were given back are remembered at most: no consumer prefetches more.
const REMEMBERED: usize = u16::MAX as usize;

/// What one process knows and may still suspect. Whom it excuses wrongly may end it, once: the next
/// process knows nothing and suspects again.
///
/// `K` tells deliveries apart: one that ended the process before may come back late, amid those that
/// this one gave back.
#[derive(Debug)]
pub(crate) struct Suspects<K> {
    /// Deliveries that it gave back, and that have not come again; and how many are alike.
    given_back: HashMap<K, u32>,
    /// How many it left unanswered on channels that died. Which of them one is does not matter.
    lost: usize,
    /// How many more it suspects for what a classic queue says. After a broker was killed, a classic
    /// queue says of everything in it that it was delivered before.
    doubts: usize,
    /// How many deliveries it has looked at.
    seen: usize,
    /// How many jobs that are to be run alone may have been on their way to a consumer when it was
    /// cancelled. The broker returns them by itself, and before 4.3 a quorum queue counts that.
    adrift: usize,
    /// It has counted a lone crash. The process before it died of one job, whatever else looks so.
    counted: bool,
}

impl<K> Default for Suspects<K> {
    fn default() -> Self {
        Self { given_back: HashMap::new(), lost: 0, doubts: 0, seen: 0, adrift: 0, counted: false }
    }
}

impl<K: Hash + Eq> Suspects<K> {
    /// No crash leaves more in a classic queue than that.
    pub(crate) fn doubt_at_most(&mut self, jobs: u16) {
        self.doubts = jobs.into();
    }

    pub(crate) fn give_back(&mut self, which: K) {
        // Others may take them, and then none comes again.
        if self.given_back.len() >= REMEMBERED {
            self.given_back.clear();
        }
        *self.given_back.entry(which).or_default() += 1;
    }

    /// Its channel had died, and [`expect_back`](Self::expect_back) tells of it.
    pub(crate) fn did_not_give_back(&mut self, which: K) {
        self.comes_again(|| which);
    }

    /// A channel died with up to so many deliveries without an answer.
    pub(crate) fn expect_back(&mut self, jobs: u16) {
        self.lost = self.lost.max(jobs.into());
    }

    /// The consumer is cancelled amid suspects. Not if it has just begun: then one that ended the
    /// process before may still be on its way back.
    pub(crate) fn cancel(&mut self, prefetch: u16) {
        let prefetch = usize::from(prefetch);
        self.adrift = if self.seen > prefetch { prefetch } else { 0 };
    }

    /// None of them comes any more.
    pub(crate) fn are_through(&mut self) {
        self.adrift = 0;
    }

    /// Of a delivery, once. `lone_runs` is how often it was sent back to be run alone; `which` is not
    /// asked for in vain.
    pub(crate) fn look(
        &mut self,
        interrupted: Interrupted,
        lone_runs: u32,
        dead_lettered: bool,
        which: impl FnOnce() -> K,
    ) -> Suspicion {
        self.seen = self.seen.saturating_add(1);
        let given_back = interrupted != Interrupted::Never && self.comes_again(which);
        let ours = match interrupted {
            Interrupted::Never | Interrupted::Failed(0) => false,
            Interrupted::Failed(_) => take(&mut self.lost),
            Interrupted::Times(_) | Interrupted::Before | Interrupted::Exhumed => {
                given_back || take(&mut self.lost)
            }
        };
        if lone_runs > 0 {
            let crashed = match interrupted {
                Interrupted::Never | Interrupted::Times(0) | Interrupted::Failed(0) => false,
                Interrupted::Failed(_) => !ours,
                Interrupted::Times(_) | Interrupted::Before | Interrupted::Exhumed => {
                    !ours && !take(&mut self.adrift)
                }
            };
            return if crashed && !std::mem::replace(&mut self.counted, true) {
                Suspicion::Count
            } else {
                Suspicion::Alone
            };
        }
        let suspect = match interrupted {
            Interrupted::Never => false,
            Interrupted::Times(n) | Interrupted::Failed(n) => n >= if ours { FAR } else { SUSPECT },
            Interrupted::Before => !ours && take(&mut self.doubts),
            Interrupted::Exhumed => !ours,
        };
        match interrupted {
            _ if !suspect => Suspicion::Clear,
            Interrupted::Exhumed => Suspicion::Afresh,
            // Before 4.3 each queue counts from 0, and a classic one tells nothing of that.
            Interrupted::Failed(_) | Interrupted::Before if dead_lettered => Suspicion::Afresh,
            _ => Suspicion::Count,
        }
    }

    fn comes_again(&mut self, which: impl FnOnce() -> K) -> bool {
        if self.given_back.is_empty() {
            return false;
        }
        let Entry::Occupied(mut alike) = self.given_back.entry(which()) else { return false };
        *alike.get_mut() -= 1;
        if *alike.get() == 0 {
            alike.remove();
        }
        true
    }
}

fn take(from: &mut usize) -> bool {
    let some = *from > 0;
    *from -= usize::from(some);
    some
}

#[cfg(test)]
mod tests {
    use super::{Interrupted::*, Suspicion::*, *};

    fn a_new_process() -> Suspects<u32> {
        Suspects { doubts: 2, ..Suspects::default() }
    }

    impl Suspects<u32> {
        /// Of the first job of all.
        fn looks(&mut self, interrupted: Interrupted, lone_runs: u32) -> Suspicion {
            self.look(interrupted, lone_runs, false, || 1)
        }
    }

    #[test]
    fn a_quorum_queue_has_to_tell_three_times_and_a_classic_one_once() {
        for (interrupted, expected) in [
            (Never, Clear),
            (Times(0), Clear),
            (Times(2), Clear),
            (Times(3), Count),
            (Failed(2), Clear),
            (Failed(3), Count),
            (Before, Count),
        ] {
            assert_eq!(a_new_process().looks(interrupted, 0), expected, "{interrupted:?}");
        }
    }

    #[test]
    fn what_may_have_been_interrupted_in_another_queue_starts_afresh_and_is_no_suspect() {
        for (interrupted, expected) in [
            (Never, Clear),
            (Failed(2), Clear),
            (Failed(3), Afresh),
            (Times(2), Clear),
            (Times(3), Count),
            (Before, Afresh),
            (Exhumed, Afresh),
        ] {
            let mut process = a_new_process();
            assert_eq!(process.look(interrupted, 0, true, || 1), expected, "{interrupted:?}");
            process.give_back(1);
            let again = process.look(interrupted, 0, true, || 1);
            let excused = matches!(interrupted, Times(_) | Before | Exhumed);
            assert_eq!(
                again,
                if excused { Clear } else { expected },
                "{interrupted:?}, given back"
            );
        }
        assert_eq!(a_new_process().look(Failed(1), 1, true, || 1), Count, "it ran alone");
        assert_eq!(a_new_process().looks(Exhumed, 0), Afresh);
    }

    #[test]
    fn what_was_sent_back_to_be_run_alone_runs_alone_and_its_interruption_counts() {
        for lone_runs in [1, 2, u32::MAX] {
            // The second was given back, on 4.3.
            for interrupted in [Never, Failed(0), Times(0)] {
                assert_eq!(a_new_process().looks(interrupted, lone_runs), Alone);
            }
            for interrupted in [Times(1), Failed(1), Before] {
                assert_eq!(a_new_process().looks(interrupted, lone_runs), Count);
            }
        }
    }

    #[test]
    fn of_one_process_one_job_at_most_is_counted_as_what_ended_the_one_before() {
        let mut process = a_new_process();
        assert_eq!([(); 3].map(|()| process.looks(Times(1), 1)), [Count, Alone, Alone]);
    }

    #[test]
    fn what_was_on_its_way_to_a_cancelled_consumer_has_ended_no_process_alone() {
        let mut process = a_new_process();
        process.cancel(1);
        assert_eq!(process.looks(Times(1), 1), Count, "it has just begun");

        let mut process = a_new_process();
        assert_eq!([(); 2].map(|()| process.looks(Never, 0)), [Clear, Clear]);
        process.cancel(1);
        assert_eq!(process.looks(Times(3), 0), Count, "in company it makes no difference");
        assert_eq!([(); 2].map(|()| process.looks(Times(1), 1)), [Alone, Count], "no more than it");

        let mut process = a_new_process();
        assert_eq!([(); 2].map(|()| process.looks(Never, 0)), [Clear, Clear]);
        process.cancel(1);
        process.are_through();
        assert_eq!(process.looks(Times(1), 1), Count);

        let mut process = a_new_process();
        assert_eq!([(); 2].map(|()| process.looks(Never, 0)), [Clear, Clear]);
        process.cancel(1);
        assert_eq!(process.looks(Failed(1), 1), Count, "from 4.3 on it is not counted");
    }

    #[test]
    fn what_this_process_gave_back_is_known_and_excuses_no_other() {
        for interrupted in [Times(1), Before] {
            let mut process = a_new_process();
            process.give_back(1);
            process.give_back(1);
            // Before one is counted: after that no other is.
            assert_eq!([(); 2].map(|()| process.looks(interrupted, 1)), [Alone; 2]);
            assert_eq!(process.looks(interrupted, 1), Count, "no more than it gave back");

            let mut process = a_new_process();
            process.give_back(1);
            assert_eq!(process.look(interrupted, 1, false, || 2), Count, "it comes back late");
        }
        let mut process = a_new_process();
        process.give_back(1);
        assert_eq!(process.looks(Failed(1), 1), Count, "from 4.3 on giving back is not counted");
    }

    #[test]
    fn no_more_are_remembered_than_a_consumer_prefetches() {
        let mut process = a_new_process();
        (0..100_000).for_each(|job| process.give_back(job));
        assert!(process.given_back.len() <= REMEMBERED);
    }

    #[test]
    fn a_classic_queue_in_which_all_was_delivered_before_is_not_crawled_through() {
        let mut process = a_new_process();
        assert_eq!([(); 4].map(|()| process.looks(Before, 0)), [Count, Count, Clear, Clear]);
    }

    #[test]
    fn what_this_process_left_unanswered_is_no_suspect_until_its_queue_would_drop_it() {
        for (interrupted, lone_runs, expected) in
            [(Before, 0, Clear), (Times(9), 0, Clear), (Times(10), 0, Count), (Before, 2, Alone)]
        {
            let mut process = a_new_process();
            process.expect_back(1);
            assert_eq!(process.looks(Never, 0), Clear);
            assert_eq!(process.looks(interrupted, lone_runs), expected, "{interrupted:?}");
            assert_eq!(process.looks(Before, 0), Count, "no more than it left");
        }
    }
}
