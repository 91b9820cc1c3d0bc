//! Reads a consumer of the user's. Its end revokes what it delivered, and is noticed at once, however
//! long the user's handler takes.

use std::{sync::Arc, time::Duration};

use futures_util::StreamExt;
use lapin::{Consumer, message::Delivery};
use tokio::sync::{mpsc, oneshot};

use crate::{
    Error, ErrorKind,
    link::{Lease, ON_ITS_WAY, TAKE_IN, incoming, timeout_named, unreadable},
    settle::{Acks, Arrived, Engine, Revoked},
};

/// Dropped once the consumer is cancelled.
pub(super) type Cancelled = oneshot::Sender<()>;

/// How often, and after which time again, it is checked whether the queue is still there: the broker
/// cancels the consumers of a queue shortly before it is gone.
const CHECKS: u32 = 5;
const CHECK_AGAIN: Duration = Duration::from_millis(200);
/// How long the answers may take together.
const CHECKED: Duration = Duration::from_secs(10);

pub(super) struct Reader {
    engine: Arc<Engine>,
    acks: Arc<Acks>,
    lease: Arc<Lease>,
    deliver: mpsc::UnboundedSender<Result<Arrived, Error>>,
}

impl Reader {
    pub(super) fn new(
        engine: &Arc<Engine>,
        deliver: mpsc::UnboundedSender<Result<Arrived, Error>>,
    ) -> Self {
        Self { engine: Arc::clone(engine), acks: Acks::new(engine), lease: Arc::default(), deliver }
    }

    /// Until the consumer ends, or is to be cancelled.
    pub(super) async fn read(
        self,
        mut consumer: Consumer,
        mut cancel: oneshot::Receiver<Cancelled>,
    ) {
        let end = loop {
            let delivery = tokio::select! {
                biased;
                cancelled = &mut cancel => {
                    self.cancel(consumer).await;
                    return drop(cancelled);
                }
                delivery = consumer.next() => delivery,
            };
            match delivery {
                Some(Ok(delivery)) => self.deliver(delivery).await,
                Some(Err(error)) => break Some(error),
                None => break None,
            }
        };
        self.lease.revoke();
        let error = match end {
            Some(error) => {
                if let Some(timeout) = timeout_named(&error.to_string()) {
                    self.engine.revoked(&self.acks, Revoked::TimedOut(timeout));
                }
                Some(ended(&self.engine.queue(), error))
            }
            None => {
                self.engine.revoked(&self.acks, Revoked::Cancelled);
                self.why_cancelled().await
            }
        };
        if let Some(error) = error {
            // Nobody waits for it once the stream was dropped.
            let _ = self.deliver.send(Err(error));
        }
    }

    async fn deliver(&self, delivery: Delivery) {
        let arrived = self.engine.take(incoming(delivery, &self.lease), Some(&self.acks));
        if let Err(mpsc::error::SendError(Ok(arrived))) = self.deliver.send(Ok(arrived)) {
            self.engine.set_aside(arrived).await;
        }
    }

    /// lapin cancels a consumer whose last handle is dropped, and nobody reads then what still comes:
    /// so first all that is on its way is read.
    async fn cancel(&self, mut consumer: Consumer) {
        self.lease.cancel();
        self.acks.hurry();
        let mut unrun = Vec::new();
        let taking_in = async {
            while let Ok(Some(Ok(delivery))) =
                tokio::time::timeout(ON_ITS_WAY, consumer.next()).await
            {
                unrun.push(self.engine.take(incoming(delivery, &self.lease), Some(&self.acks)));
            }
        };
        let _ = tokio::time::timeout(TAKE_IN, taking_in).await;
        drop(consumer);
        // Requeued before the broker has cancelled it, they would be delivered to it once more.
        tokio::time::sleep(ON_ITS_WAY).await;
        for arrived in unrun {
            self.engine.set_aside(arrived).await;
        }
    }

    /// An error if the queue is gone. lapin does not say who cancelled the consumer.
    async fn why_cancelled(&self) -> Option<Error> {
        let queue = self.engine.queue();
        let missing = tokio::time::timeout(CHECKED, self.is_queue_missing()).await;
        if let Ok(Some(error)) = missing {
            let text = format!(
                "consuming queue {queue:?}: the queue was deleted, and the broker cancelled the \
                 consumer; declare the queue and consume anew"
            );
            return Some(Error::new(ErrorKind::MissingQueue, text).because(error));
        }
        tracing::warn!(
            queue,
            "the consumer has ended, and not by Jobs::cancel(): the broker cancelled it (a job was \
             held longer than the consumer timeout, or the queue's leader moved), or the program \
             itself cancelled it or closed its channel; jobs that were not settled are stale, and \
             the broker delivers them again"
        );
        None
    }

    async fn is_queue_missing(&self) -> Option<Error> {
        for check in 0..CHECKS {
            if check > 0 {
                tokio::time::sleep(CHECK_AGAIN).await;
            }
            match self.engine.check_queue().await {
                Err(error) if error.kind() == ErrorKind::MissingQueue => return Some(error),
                Err(_) => return None,
                Ok(()) => {}
            }
        }
        None
    }
}

fn ended(queue: &str, error: lapin::Error) -> Error {
    let text = error.to_string();
    let (kind, what) = match unreadable(&error) {
        Some(why) => (
            ErrorKind::Unreadable,
            format!(
                "a message near its head, or in another queue that is consumed over the same \
                 connection, {why}; consuming again before that kills the connection again, and a \
                 quorum queue of RabbitMQ 4 drops a message after 21 deliveries"
            ),
        ),
        None if text.contains("unknown delivery tag") => (
            ErrorKind::Refused,
            format!(
                "{text}: a delivery was acked that the broker does not wait for; start the consumer \
                 with no_ack = false, and ack no delivery yourself that Retry was given"
            ),
        ),
        None => (ErrorKind::Connection, text),
    };
    Error::new(kind, format!("consuming queue {queue:?}: {what}")).because(error)
}
