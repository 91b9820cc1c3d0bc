//! The consuming half of the lapin link: a subscription, and the ack or nack of each delivery.

use std::{
    future::Future,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::Poll,
};

use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream};
use lapin::{
    Acker, Channel,
    message::Delivery,
    options::{
        BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions,
    },
    types::ShortString,
};

use tokio::runtime::Handle;

use super::{
    Broker, Control, Incoming, LINGER, Lease, Subscribe, Subscription, Tag,
    connection::{Purpose, Session, Shared, refused, unreadable},
    io::Io,
    lapin::{ANSWER, DEAD_CHECK, in_time},
    watched::Watched,
};
use crate::{Error, ErrorKind, message::Message};

/// Why a consumer has ended. Every consumer on a connection is told the same, whichever queue the
/// message that killed it was in.
fn not_consuming(error: &lapin::Error, queue: &str, alone: bool) -> Error {
    let Some(why) = unreadable(error) else {
        return refused(error, &format!("consuming queue {queue:?}"));
    };
    let text = if alone {
        format!("consuming queue {queue:?}: a message at its head {why}")
    } else {
        format!(
            "consuming queue {queue:?}: a message near its head, or in another queue that is \
             consumed over the same connection, {why}; the next try, on a connection of its own, \
             tells which"
        )
    };
    Error::new(ErrorKind::Unreadable, text).because(error.clone())
}

pub(super) async fn subscribe(
    broker: Broker,
    how: Subscribe,
    alone: bool,
) -> Result<Subscription, Error> {
    let own = Shared::default();
    let connection = if alone { &own } else { &broker.0.consuming };
    let session = connection.session(&broker, Purpose::Consuming).await?;
    let prefetch = if alone { 1 } else { how.prefetch };
    let subscribing = async {
        let channel = session.channel().await?;
        channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
        let options = BasicConsumeOptions::default();
        let (queue, tag) = (how.queue.as_str().into(), how.tag.as_str().into());
        let consumer = channel.basic_consume(queue, tag, options, how.arguments).await?;
        Ok((channel, consumer))
    };
    let queue = how.queue.clone();
    let failed = move |error| not_consuming(&error, &queue, alone);
    let what = format!("consuming queue {:?}", how.queue);
    let (channel, consumer) = in_time(subscribing, &what, &session).await?.map_err(&failed)?;
    let (tag, runtime) = (consumer.tag(), Handle::current());
    let (lease, unanswered) = (Arc::default(), AtomicUsize::new(0));
    let control = Arc::new(Consuming { channel, tag, session, lease, unanswered, runtime });
    let [open, watched, ending] = std::array::from_fn(|_| Arc::clone(&control));
    let incoming = consumer.map(move |delivery| match delivery {
        Ok(delivery) => Ok(split(delivery, Arc::clone(&open.lease), Some(Arc::clone(&open)))),
        Err(error) => Err(failed(error)),
    });
    let dead = format!("consuming queue {:?}: its channel died without a word", how.queue);
    let incoming = Watched::new(incoming, move || watched.is_alive(), dead);
    let lease = Arc::clone(&control.lease);
    let incoming = incoming.inspect(move |item| {
        if item.is_err() {
            lease.revoke();
        }
    });
    let end = stream::poll_fn(move |_| {
        ending.end();
        Poll::Ready(None)
    });
    let incoming = incoming.chain(end);
    Ok(Subscription { incoming: incoming.boxed(), control, prefetch: prefetch.into() })
}

#[derive(Debug)]
struct Consuming {
    channel: Channel,
    tag: ShortString,
    /// Dropping the last handle of a connection closes it.
    session: Arc<Session>,
    lease: Arc<Lease>,
    unanswered: AtomicUsize,
    runtime: Handle,
}

impl Consuming {
    fn is_alive(&self) -> bool {
        self.session.connection.status().connected() && self.channel.status().connected()
    }

    /// A consumer that the broker cancelled still counts as one, the active one even of a queue with a
    /// single active consumer, until its channel is closed. Acks on their way are waited for.
    fn end(self: &Arc<Self>) {
        if self.lease.end() {
            let cancelled = Arc::clone(self);
            self.runtime.spawn(async move {
                tokio::time::sleep(LINGER).await;
                cancelled.close().await;
            });
        }
    }
}

impl Drop for Consuming {
    fn drop(&mut self) {
        // Dropping the last handle of a channel closes it, and that of the last answer is dropped
        // right after it. Nobody waits for this, so that a slow broker may have longer.
        let last = (self.channel.clone(), Arc::clone(&self.session));
        // Not on a runtime that may be about to end. The thread runs while there is a connection.
        if let Ok(io) = Io::get() {
            io.spawn(async move {
                tokio::time::sleep(5 * LINGER).await;
                drop(last);
            });
        }
    }
}

impl Control for Consuming {
    fn cancel(&self) -> BoxFuture<'_, ()> {
        self.lease.cancel();
        async {
            // It fails only where the channel is gone, and the consumer with it; and where the
            // connection dies meanwhile it may never be answered.
            let cancelled =
                self.channel.basic_cancel(self.tag.clone(), BasicCancelOptions::default());
            let _ = tokio::time::timeout(ANSWER, cancelled).await;
        }
        .boxed()
    }

    fn unanswered(&self) -> usize {
        self.unanswered.load(Ordering::Relaxed)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        async {
            let _ = self.channel.close(200, "done".into()).await;
        }
        .boxed()
    }
}

#[derive(Debug)]
pub(crate) struct LapinTag {
    number: u64,
    acker: Acker,
    lease: Arc<Lease>,
    /// A consumer that we cancelled leaves its channel open, so that what still runs can be acked: the
    /// channel lives as long as any of its deliveries is unacked.
    channel: Option<Arc<Consuming>>,
}

impl Drop for LapinTag {
    fn drop(&mut self) {
        if let Some(channel) = &self.channel {
            channel.unanswered.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Tag for LapinTag {
    fn number(&self) -> u64 {
        self.number
    }

    fn usable(&self) -> bool {
        !self.lease.is_revoked() && self.acker.usable()
    }

    fn ack(&self, multiple: bool) -> BoxFuture<'_, bool> {
        self.answered(self.acker.ack(BasicAckOptions { multiple })).boxed()
    }

    fn give_back(&self) -> BoxFuture<'_, bool> {
        let requeue = BasicNackOptions { requeue: true, ..Default::default() };
        self.answered(self.acker.nack(requeue)).boxed()
    }
}

impl LapinTag {
    /// Nothing is sent for a delivery that is no longer ours.
    ///
    /// On a dead channel lapin answers `Ok(false)`, not an error. To what it was told while the
    /// connection was dying it never answers at all.
    async fn answered(&self, answer: impl Future<Output = lapin::Result<bool>> + Send) -> bool {
        if self.lease.is_revoked() {
            return false;
        }
        let mut answer = pin!(answer);
        loop {
            tokio::select! {
                biased;
                told = &mut answer => return told.unwrap_or(false),
                () = tokio::time::sleep(DEAD_CHECK) => {
                    if self.acker.poisoned() {
                        return false;
                    }
                }
            }
        }
    }
}

/// A delivery of a consumer that is the user's.
pub(crate) fn incoming(delivery: Delivery, lease: &Arc<Lease>) -> Incoming {
    split(delivery, Arc::clone(lease), None)
}

/// Splits a delivery into what it says and the means to answer for it.
fn split(delivery: Delivery, lease: Arc<Lease>, channel: Option<Arc<Consuming>>) -> Incoming {
    if let Some(channel) = &channel {
        channel.unanswered.fetch_add(1, Ordering::Relaxed);
    }
    Incoming {
        message: Message {
            exchange: delivery.exchange,
            routing_key: delivery.routing_key,
            redelivered: delivery.redelivered,
            properties: delivery.properties,
            body: delivery.data,
        },
        tag: LapinTag { number: delivery.delivery_tag, acker: delivery.acker, lease, channel },
    }
}
