//! Publish a copy, wait for its confirm: many in flight, and none waits for another. It reports
//! what the broker answered; what to do about it is decided by `settle`.

use std::{sync::Arc, time::Duration};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{
    clock::Backoff,
    link::{Confirmed, Link},
    message::Outgoing,
};

#[derive(Debug)]
pub(crate) struct HandOff {
    link: Arc<dyn Link>,
    slots: Arc<Semaphore>,
}

/// The right to have one publish in flight. A hand-off that waits for its next try has none.
#[derive(Debug)]
pub(crate) struct Slot(#[expect(dead_code, reason = "held, not read")] OwnedSemaphorePermit);

impl HandOff {
    pub(crate) fn new(link: Arc<dyn Link>, in_flight: usize) -> Self {
        Self { link, slots: Arc::new(Semaphore::new(in_flight)) }
    }

    pub(crate) fn free_slot(&self) -> Option<Slot> {
        Arc::clone(&self.slots).try_acquire_owned().ok().map(Slot)
    }

    /// None if it is too late for one.
    pub(crate) async fn slot(&self) -> Option<Slot> {
        Arc::clone(&self.slots).acquire_owned().await.ok().map(Slot)
    }

    /// From now on there are no slots.
    pub(crate) fn close(&self) {
        self.slots.close();
    }

    /// One try. The slot is free again when it is over.
    pub(crate) async fn publish(&self, copy: Box<Outgoing>, _slot: Slot, alone: bool) -> Confirmed {
        self.link.publish(copy, alone).await
    }

    /// One that nobody waits for, if the way is open; see [`Link::publish_at_once`]. If it is not, the
    /// slot comes back.
    pub(crate) fn publish_at_once(
        &self,
        copy: Box<Outgoing>,
        slot: Slot,
        answered: impl FnOnce(Result<Confirmed, Slot>) + Send + 'static,
    ) {
        let answered = move |answer: Option<Confirmed>| match answer {
            Some(answer) => {
                drop(slot);
                answered(Ok(answer));
            }
            None => answered(Err(slot)),
        };
        self.link.publish_at_once(copy, Box::new(answered));
    }

    /// The waits between one job's tries.
    pub(crate) fn backoff() -> Backoff {
        Backoff::new(Duration::from_millis(100), Duration::from_secs(5))
    }
}
