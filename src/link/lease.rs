//! Whether a delivery is still ours. An open channel does not mean that it is: when the broker
//! cancels a consumer it takes back all that it had delivered to it, and leaves the channel open.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// What the deliveries of one consumer have in common. Once revoked, none of them is acked, nacked
/// or published for: RabbitMQ 4.3 ignores the first ack of such a delivery and closes the channel at
/// the second.
#[derive(Debug, Default)]
pub(crate) struct Lease {
    revoked: AtomicBool,
    cancelled: AtomicBool,
}

impl Lease {
    pub(crate) fn is_revoked(&self) -> bool {
        self.revoked.load(SeqCst)
    }

    pub(crate) fn revoke(&self) {
        self.revoked.store(true, SeqCst);
    }

    /// We are about to cancel the consumer. What it was delivered stays ours.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, SeqCst);
    }

    /// The consumer has ended without an error. True if it was the broker who cancelled it, and this is
    /// the first to notice.
    pub(crate) fn end(&self) -> bool {
        !self.cancelled.load(SeqCst) && !self.revoked.swap(true, SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancel_by_the_broker_revokes_and_one_of_ours_does_not() {
        let brokers = Lease::default();
        assert!(!brokers.is_revoked());
        assert!(brokers.end() && brokers.is_revoked());
        assert!(!brokers.end(), "a consumer may be cancelled twice");
        let ours = Lease::default();
        ours.cancel();
        assert!(!ours.end() && !ours.is_revoked());
    }
}
