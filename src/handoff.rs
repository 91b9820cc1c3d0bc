//! Publish a copy, wait for its confirm: many in flight, and none waits for another. It reports
//! what the broker answered; what to do about it is decided by `settle`.

mod slots;

use std::{
    collections::HashMap,
    fmt, mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::oneshot;

pub(crate) use self::slots::Slot;
use self::slots::Slots;
use crate::{
    clock::Backoff,
    link::{Confirmed, Link},
    message::Outgoing,
};

#[derive(Debug)]
pub(crate) struct HandOff {
    link: Arc<dyn Link>,
    slots: Arc<Slots>,
    untold: Arc<Untold>,
}

/// What becomes of a try that nobody waits for.
#[derive(Debug)]
pub(crate) enum Told {
    Answer(Confirmed),
    /// Nothing was published, for that has to be waited for.
    NotNow(Slot),
    /// It is too late for an answer.
    TooLate,
}

/// Those who are to hear of their try.
#[derive(Default)]
struct Untold(Mutex<(u64, HashMap<u64, Hears>)>);

type Hears = Box<dyn FnOnce(Told) + Send>;

impl Untold {
    fn add(&self, hears: Hears) -> u64 {
        let (last, all) = &mut *self.lock();
        *last += 1;
        all.insert(*last, hears);
        *last
    }

    fn take(&self, number: u64) -> Option<Hears> {
        self.lock().1.remove(&number)
    }

    fn take_all(&self) -> impl Iterator<Item = Hears> {
        mem::take(&mut self.lock().1).into_values()
    }

    fn lock(&self) -> MutexGuard<'_, (u64, HashMap<u64, Hears>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Untold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Untold").field(&self.lock().1.len()).finish()
    }
}

impl HandOff {
    pub(crate) fn new(link: Arc<dyn Link>, in_flight: usize) -> Self {
        Self { link, slots: Slots::new(in_flight), untold: Arc::default() }
    }

    pub(crate) fn free_slot(&self) -> Option<Slot> {
        self.slots.free()
    }

    /// Calls with the next slot; with none if it is too late. What is called must not wait.
    pub(crate) fn next_slot(&self, takes: impl FnOnce(Option<Slot>) + Send + 'static) {
        self.slots.next(takes);
    }

    /// None if it is too late for one.
    pub(crate) async fn slot(&self) -> Option<Slot> {
        let (tell, told) = oneshot::channel();
        // Nobody waits any more: the next one gets it.
        self.next_slot(|slot| drop(tell.send(slot)));
        told.await.ok().flatten()
    }

    /// From now on there are no slots, and for tries that nobody waits for it is too late.
    pub(crate) fn close(&self) {
        self.slots.close();
        self.untold.take_all().for_each(|hears| hears(Told::TooLate));
    }

    /// One try. The slot is free again when it is over.
    pub(crate) async fn publish(&self, copy: Box<Outgoing>, _slot: Slot, alone: bool) -> Confirmed {
        self.link.publish(copy, alone).await
    }

    /// One that nobody waits for, if it can be published at once. `hears` is told, and must not wait.
    pub(crate) fn publish_at_once(
        &self,
        copy: Box<Outgoing>,
        slot: Slot,
        hears: impl FnOnce(Told) + Send + 'static,
    ) {
        let (untold, number) = (Arc::clone(&self.untold), self.untold.add(Box::new(hears)));
        if self.slots.is_closed() {
            // `close` may have been before this one was among them.
            untold.take(number).into_iter().for_each(|hears| hears(Told::TooLate));
            return;
        }
        let answered = move |answer: Option<Confirmed>| {
            let Some(hears) = untold.take(number) else { return };
            hears(match answer {
                Some(answer) => {
                    drop(slot);
                    Told::Answer(answer)
                }
                None => Told::NotNow(slot),
            });
        };
        self.link.publish_at_once(copy, Box::new(answered));
    }

    /// The waits between one job's tries.
    pub(crate) fn backoff() -> Backoff {
        Backoff::new(Duration::from_millis(100), Duration::from_secs(5))
    }
}
