//! Publish a copy, wait for its confirm: so many in flight, and whoever comes after them is called in
//! turn. It reports what the broker answered; what to do about it is decided by `settle`.

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
pub(crate) enum FirstTry {
    Answer(Confirmed),
    /// Nothing was published: no channel is open for that, and to open one takes a wait.
    NotNow(Slot),
    /// The work ends. Whether the broker has the copy is not known.
    TooLate,
}

type Hears = Box<dyn FnOnce(FirstTry) + Send>;

/// Those who are to hear of their try, each once.
#[derive(Default)]
struct Untold(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    last: u64,
    by_number: HashMap<u64, Hears>,
    is_closed: bool,
}

impl Untold {
    /// The number to take it by. Comes back if it is too late.
    fn add(&self, hears: Hears) -> Result<u64, Hears> {
        let mut waiting = self.lock();
        if waiting.is_closed {
            return Err(hears);
        }
        waiting.last += 1;
        let number = waiting.last;
        waiting.by_number.insert(number, hears);
        Ok(number)
    }

    fn take(&self, number: u64) -> Option<Hears> {
        self.lock().by_number.remove(&number)
    }

    fn close(&self) -> impl Iterator<Item = Hears> {
        let mut waiting = self.lock();
        waiting.is_closed = true;
        mem::take(&mut waiting.by_number).into_values()
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Untold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Untold").field(&self.lock().by_number.len()).finish()
    }
}

impl HandOff {
    pub(crate) fn new(link: Arc<dyn Link>, in_flight: usize) -> Self {
        Self { link, slots: Slots::new(in_flight), untold: Arc::default() }
    }

    /// Calls with the next slot; with none if it is too late. What is called must not wait.
    pub(crate) fn next_slot(&self, takes: impl FnOnce(Option<Slot>) + Send + 'static) {
        self.slots.next(takes);
    }

    /// None if it is too late for one.
    pub(crate) async fn slot(&self) -> Option<Slot> {
        let (tell, told) = oneshot::channel();
        // If nobody waits any more, the next one gets it.
        self.next_slot(|slot| drop(tell.send(slot)));
        told.await.ok().flatten()
    }

    /// From now on there are no slots, and for tries that nobody waits for it is too late.
    pub(crate) fn close(&self) {
        self.slots.close();
        self.untold.close().for_each(|hears| hears(FirstTry::TooLate));
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
        hears: impl FnOnce(FirstTry) + Send + 'static,
    ) {
        let untold = Arc::clone(&self.untold);
        let number = match untold.add(Box::new(hears)) {
            Ok(number) => number,
            Err(hears) => return hears(FirstTry::TooLate),
        };
        let answered = move |answer: Option<Confirmed>| {
            let Some(hears) = untold.take(number) else { return };
            hears(match answer {
                Some(answer) => {
                    drop(slot);
                    FirstTry::Answer(answer)
                }
                None => FirstTry::NotNow(slot),
            });
        };
        self.link.publish_at_once(copy, Box::new(answered));
    }

    /// The waits between one job's tries.
    pub(crate) fn backoff() -> Backoff {
        Backoff::new(Duration::from_millis(100), Duration::from_secs(5))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn each_hears_once_of_its_try_by_the_answer_or_at_the_end() {
        let (untold, (tell, told)) = (Untold::default(), mpsc::channel());
        let add = |name: &'static str| {
            let tell = tell.clone();
            untold.add(Box::new(move |heard| tell.send((name, heard)).unwrap()))
        };
        let (answered, open) = (add("answered").ok().unwrap(), add("open").ok().unwrap());
        let hears = untold.take(answered).unwrap();
        hears(FirstTry::Answer(Confirmed::Yes));
        assert!(untold.take(answered).is_none());
        assert!(matches!(told.try_recv(), Ok(("answered", FirstTry::Answer(Confirmed::Yes)))));
        untold.close().for_each(|hears| hears(FirstTry::TooLate));
        assert!(matches!(told.try_recv(), Ok(("open", FirstTry::TooLate))));
        assert!(untold.take(open).is_none(), "an answer comes too late");
        assert!(add("after").is_err());
        assert!(told.try_recv().is_err());
    }
}
