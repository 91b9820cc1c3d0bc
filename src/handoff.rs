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

    pub(crate) async fn slot(&self) -> Slot {
        // The semaphore is never closed.
        Slot(Arc::clone(&self.slots).acquire_owned().await.expect("an open semaphore"))
    }

    /// One try. The slot is free again when it is over.
    pub(crate) async fn publish(&self, copy: Box<Outgoing>, _slot: Slot, alone: bool) -> Confirmed {
        self.link.publish(copy, alone).await
    }

    /// The waits between one job's tries.
    pub(crate) fn backoff() -> Backoff {
        Backoff::new(Duration::from_millis(100), Duration::from_secs(5))
    }
}
