//! How many publishes may be in flight, and who is next.

use std::{
    collections::VecDeque,
    fmt, mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Unlike a semaphore it calls whoever is next, so that the wait for a slot needs no task.
pub(super) struct Slots(Mutex<State>);

#[derive(Default)]
struct State {
    free: usize,
    /// Nobody overtakes them.
    waiting: VecDeque<Takes>,
    /// Somebody calls those who wait.
    calling: bool,
    is_closed: bool,
}

type Takes = Box<dyn FnOnce(Option<Slot>) + Send>;

/// The right to have one publish in flight. A hand-off that waits for its next try has none.
#[derive(Debug)]
pub(crate) struct Slot(Arc<Slots>);

impl Slots {
    pub(super) fn new(free: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State { free, ..State::default() })))
    }

    /// Calls with the next slot, in turn; with none if there are no more. What is called must not wait.
    pub(super) fn next(self: &Arc<Self>, takes: impl FnOnce(Option<Slot>) + Send + 'static) {
        let mut state = self.lock();
        if state.is_closed {
            drop(state);
            return takes(None);
        }
        if state.take() {
            drop(state);
            return takes(Some(Slot(Arc::clone(self))));
        }
        // If one is free, somebody is calling those who wait, and comes to this one, too.
        state.waiting.push_back(Box::new(takes));
    }

    /// From now on there are none.
    pub(super) fn close(&self) {
        let waiting = {
            let mut state = self.lock();
            state.is_closed = true;
            mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(|takes| call(takes, None));
    }

    /// One after the other: who is called may give back what he got before he returns, or on another
    /// thread, and the next is called here all the same.
    fn call_those_who_wait(self: &Arc<Self>) {
        if mem::replace(&mut self.lock().calling, true) {
            return;
        }
        loop {
            let Some(takes) = self.lock().whose_turn() else { return };
            call(takes, Some(Slot(Arc::clone(self))));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn take(&mut self) -> bool {
        let is_there = self.free > 0 && self.waiting.is_empty();
        self.free -= usize::from(is_there);
        is_there
    }

    fn whose_turn(&mut self) -> Option<Takes> {
        let next = if self.free > 0 { self.waiting.pop_front() } else { None };
        self.free -= usize::from(next.is_some());
        self.calling = next.is_some();
        next
    }
}

/// A panic has been told of, and is not to hold up those behind.
fn call(takes: Takes, slot: Option<Slot>) {
    let _ = catch_unwind(AssertUnwindSafe(|| takes(slot)));
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.lock().free += 1;
        self.0.call_those_who_wait();
    }
}

impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        let mut shown = f.debug_struct("Slots");
        shown.field("free", &state.free).field("waiting", &state.waiting.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::{
            atomic::{AtomicUsize, Ordering::SeqCst},
            mpsc,
        },
        thread,
    };

    /// Keeps what it is called with.
    #[derive(Clone, Default)]
    struct Taken(Arc<Mutex<Vec<Call>>>);

    /// By its name.
    type Call = (u32, Option<Slot>);

    impl Taken {
        fn next(&self, slots: &Arc<Slots>, name: u32) {
            let taken = self.clone();
            slots.next(move |slot| taken.0.lock().unwrap().push((name, slot)));
        }

        /// Who was called since, and whether with a slot. They give their slots back.
        fn all(&self) -> Vec<(u32, bool)> {
            let taken = mem::take(&mut *self.0.lock().unwrap());
            taken.into_iter().map(|(name, slot)| (name, slot.is_some())).collect()
        }
    }

    fn held(slots: &Arc<Slots>) -> Slot {
        let (tell, told) = mpsc::channel();
        slots.next(move |slot| tell.send(slot).unwrap());
        told.recv().unwrap().unwrap()
    }

    #[test]
    fn each_gets_one_in_turn_and_nobody_overtakes() {
        let (slots, taken) = (Slots::new(2), Taken::default());
        for name in 1..=5 {
            taken.next(&slots, name);
        }
        assert_eq!(taken.all(), [(1, true), (2, true)]);
        assert_eq!(taken.all(), [(3, true), (4, true)]);
        assert_eq!(taken.all(), [(5, true)]);
        assert_eq!(taken.all(), []);
        assert_eq!(slots.lock().free, 2);
    }

    #[test]
    fn none_are_given_once_it_is_closed() {
        let (slots, taken) = (Slots::new(1), Taken::default());
        taken.next(&slots, 1);
        taken.next(&slots, 2);
        slots.close();
        assert_eq!(taken.all(), [(1, true), (2, false)]);
        taken.next(&slots, 3);
        assert_eq!(taken.all(), [(3, false)]);
    }

    #[test]
    fn however_many_give_theirs_back_at_once_the_stack_stays_small() {
        let (slots, called) = (Slots::new(1), Arc::new(AtomicUsize::new(0)));
        let slot = held(&slots);
        for _ in 0..100_000 {
            let called = Arc::clone(&called);
            slots.next(move |slot| {
                called.fetch_add(1, SeqCst);
                drop(slot);
            });
        }
        drop(slot);
        assert_eq!((called.load(SeqCst), slots.lock().free), (100_000, 1));
    }

    #[test]
    fn one_that_panics_keeps_no_slot_from_the_next() {
        let (slots, taken) = (Slots::new(1), Taken::default());
        let slot = held(&slots);
        slots.next(|_slot| panic!("as it should"));
        taken.next(&slots, 1);
        drop(slot);
        assert_eq!(taken.all(), [(1, true)]);
        assert_eq!(slots.lock().free, 1);
    }

    #[test]
    fn there_are_never_more_of_them_and_none_gets_lost() {
        let (slots, taken) = (Slots::new(3), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let slot = held(&slots);
                        assert!(taken.fetch_add(1, SeqCst) < 3);
                        taken.fetch_sub(1, SeqCst);
                        drop(slot);
                    }
                });
            }
        });
        assert_eq!(slots.lock().free, 3);
    }
}
