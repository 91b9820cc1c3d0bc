//! Whether a job may have ended the process that ran it. A crash marks all that was in hand, so this
//! is a suspicion and no more: only what ran alone is known to have done it.

/// How often a message was delivered without an answer, as far as its queue tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interrupted {
    Never,
    /// A quorum queue counts.
    Times(u32),
    /// A classic queue says that it was, not how often.
    Before,
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
}

/// From so many on it is no accident.
const SUSPECT: u32 = 3;
/// Half of the way to where a quorum queue of RabbitMQ 4 drops a message. The copy starts afresh.
const FAR: u32 = 10;

/// What one process knows and may still suspect. Whom it excuses wrongly may end it, once: the next
/// process knows nothing and suspects again.
#[derive(Debug, Default)]
pub(crate) struct Suspects {
    /// Deliveries that it left unanswered itself, and that have not come again. Which of them one
    /// is does not matter.
    returned: usize,
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

impl Suspects {
    /// No crash leaves more in a classic queue than that.
    pub(crate) fn doubt_at_most(&mut self, jobs: u16) {
        self.doubts = jobs.into();
    }

    pub(crate) fn give_back(&mut self) {
        self.returned = self.returned.saturating_add(1);
    }

    /// A channel died with up to so many deliveries without an answer.
    pub(crate) fn expect_back(&mut self, jobs: u16) {
        self.returned = self.returned.max(jobs.into());
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

    /// Of a delivery, once. `lone_runs` is how often it was sent back to be run alone.
    pub(crate) fn look(&mut self, interrupted: Interrupted, lone_runs: u32) -> Suspicion {
        self.seen = self.seen.saturating_add(1);
        let ours = interrupted != Interrupted::Never && take(&mut self.returned);
        if lone_runs > 0 {
            let crashed = !matches!(interrupted, Interrupted::Never | Interrupted::Times(0));
            if !crashed
                || ours
                || take(&mut self.adrift)
                || std::mem::replace(&mut self.counted, true)
            {
                return Suspicion::Alone;
            }
            return Suspicion::Count;
        }
        let suspect = match interrupted {
            Interrupted::Never => false,
            Interrupted::Times(n) => n >= if ours { FAR } else { SUSPECT },
            Interrupted::Before => !ours && take(&mut self.doubts),
        };
        if suspect { Suspicion::Count } else { Suspicion::Clear }
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

    fn a_new_process() -> Suspects {
        Suspects { doubts: 2, ..Suspects::default() }
    }

    #[test]
    fn a_quorum_queue_has_to_tell_three_times_and_a_classic_one_once() {
        for (interrupted, expected) in [
            (Never, Clear),
            (Times(0), Clear),
            (Times(2), Clear),
            (Times(3), Count),
            (Before, Count),
        ] {
            assert_eq!(a_new_process().look(interrupted, 0), expected, "{interrupted:?}");
        }
    }

    #[test]
    fn what_was_sent_back_to_be_run_alone_runs_alone_and_its_interruption_counts() {
        for lone_runs in [1, 2, u32::MAX] {
            // The second was given back, on 4.3.
            for interrupted in [Never, Times(0)] {
                assert_eq!(a_new_process().look(interrupted, lone_runs), Alone);
            }
            for interrupted in [Times(1), Before] {
                assert_eq!(a_new_process().look(interrupted, lone_runs), Count);
            }
        }
    }

    #[test]
    fn of_one_process_one_job_at_most_is_counted_as_what_ended_the_one_before() {
        let mut process = a_new_process();
        assert_eq!([(); 3].map(|()| process.look(Times(1), 1)), [Count, Alone, Alone]);
    }

    #[test]
    fn what_was_on_its_way_to_a_cancelled_consumer_has_ended_no_process_alone() {
        let mut process = a_new_process();
        process.cancel(1);
        assert_eq!(process.look(Times(1), 1), Count, "it has just begun");

        let mut process = a_new_process();
        assert_eq!([(); 2].map(|()| process.look(Never, 0)), [Clear, Clear]);
        process.cancel(1);
        assert_eq!(process.look(Times(3), 0), Count, "in company it makes no difference");
        assert_eq!([(); 2].map(|()| process.look(Times(1), 1)), [Alone, Count], "no more than it");

        let mut process = a_new_process();
        assert_eq!([(); 2].map(|()| process.look(Never, 0)), [Clear, Clear]);
        process.cancel(1);
        process.are_through();
        assert_eq!(process.look(Times(1), 1), Count);
    }

    #[test]
    fn a_classic_queue_in_which_all_was_delivered_before_is_not_crawled_through() {
        let mut process = a_new_process();
        assert_eq!([(); 4].map(|()| process.look(Before, 0)), [Count, Count, Clear, Clear]);
    }

    #[test]
    fn what_this_process_left_unanswered_is_no_suspect_until_its_queue_would_drop_it() {
        for (interrupted, lone_runs, expected) in
            [(Before, 0, Clear), (Times(9), 0, Clear), (Times(10), 0, Count), (Before, 2, Alone)]
        {
            let mut process = a_new_process();
            process.expect_back(1);
            assert_eq!(process.look(Never, 0), Clear);
            assert_eq!(process.look(interrupted, lone_runs), expected, "{interrupted:?}");
            assert_eq!(process.look(Before, 0), Count, "no more than it left");
        }
    }
}
