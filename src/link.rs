//! The seam: all that the engine knows of the broker. Nothing above it is generic over it.

mod broker;
mod connection;
mod consuming;
mod dial;
mod hints;
mod io;
mod lapin;
mod lease;
mod pipe;
mod probe;
mod watched;

use std::{fmt::Debug, sync::Arc, time::Duration};

use futures_util::{StreamExt, future::BoxFuture, stream::BoxStream};
use tokio::time::Instant;

pub use self::broker::Broker;
pub(crate) use self::{
    connection::{timeout_named, unreadable},
    consuming::{LapinTag, incoming},
    io::{BEAT, SILENT, watch_over},
    lapin::LapinLink,
    lease::Lease,
};
use crate::{
    Error,
    message::{Message, Outgoing},
    topology::QueueSpec,
};

/// How long a channel stays open after its last ack. Of a quorum queue the broker works off some 32
/// acks of a channel at a time, and forgets the rest if the channel is closed before: 167 of 200
/// jobs came back (3.10, 4.0, 4.3), some even when it was closed 50 ms later.
pub(crate) const LINGER: Duration = Duration::from_secs(1);

/// How long a delivery is on its way. Between an ack and the delivery that takes its place a quorum
/// queue writes to disk.
pub(crate) const ON_ITS_WAY: Duration = Duration::from_millis(250);
/// How long the ack of a job that has just ended is on its way.
const ALL_TAKEN: Duration = Duration::from_millis(50);
/// Where jobs come all the time, that is enough.
pub(crate) const TAKE_IN: Duration = Duration::from_secs(1);

/// What the broker answered to a publish.
#[derive(Debug)]
pub(crate) enum Confirmed {
    /// It has the copy.
    Yes,
    /// It does not: the queue is missing.
    Returned(String),
    /// It does not: the queue refused the copy.
    Nacked,
    /// It does not: the copy could not be sent at all.
    NotSent(Error),
    /// It may or may not: the answer did not come in time, or the channel died before. Nothing more is
    /// published through that connection.
    Undecided(String),
    /// The broker refused a copy and closed the channel. Which of those on it is not told, nor what
    /// became of the others: to be tried again alone.
    Crowded(String),
}

/// Is called in any case: with what the broker answered; or with `None`, if nothing was tried. It must
/// not wait; the most that it does is to make the copies that are published next.
pub(crate) type Answered = Box<dyn FnOnce(Option<Confirmed>) + Send>;

/// What a copy must respect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// The broker accepts only this `user_id`.
    pub(crate) user: String,
    /// Bytes; the broker closes the connection at a larger frame.
    pub(crate) frame_max: u32,
}

/// How a consumer is started.
#[derive(Clone, Debug)]
pub(crate) struct Subscribe {
    pub(crate) queue: String,
    pub(crate) prefetch: u16,
    pub(crate) tag: String,
    pub(crate) arguments: ::lapin::types::FieldTable,
}

/// A delivery, and the means to answer for it.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub(crate) message: Message,
    pub(crate) tag: LapinTag,
}

/// Hears whether the broker was told.
pub(crate) type Told = Box<dyn FnOnce(bool) + Send>;

/// The one place that answers the broker for a delivery.
pub(crate) trait Tag: Debug + Send + Sync {
    /// Its number on its channel, from 1.
    fn number(&self) -> u64;
    /// Whether the delivery is still ours. False once its channel is dead or the broker has cancelled
    /// its consumer: the job is delivered again.
    fn usable(&self) -> bool;
    /// True if it was sent; false if the delivery is no longer ours, so that the broker delivers the
    /// job again. Never a reason to publish again. With `multiple` it answers for all deliveries of its channel up to this one.
    fn ack(&self, multiple: bool) -> BoxFuture<'_, bool>;
    /// The same when it can be done together with other deliveries, without anybody waiting for it;
    /// else it gives `told` back.
    fn ack_with_others(&self, told: Told) -> Result<(), Told> {
        Err(told)
    }
    /// Whether the job's handler runs.
    fn runs(&self, _running: bool) {}
    /// `basic.nack(requeue)`, which alone does not count towards the delivery limit of 4.3.
    fn give_back(&self) -> BoxFuture<'_, bool>;
}

/// A running consumer.
pub(crate) struct Subscription {
    /// Ends with `None` when the consumer was cancelled, by us or by the broker; in the second case all
    /// that it delivered is revoked by then. An `Err` is the last item.
    pub(crate) incoming: BoxStream<'static, Result<Incoming, Error>>,
    pub(crate) control: Arc<dyn Control>,
    prefetch: usize,
}

impl Subscription {
    /// Takes in what is on its way, until nothing comes any more, for a second at most.
    ///
    /// What reaches the channel of a cancelled consumer the broker takes back by itself. Nobody here
    /// hears of it, and a quorum queue counts it towards its delivery limit before RabbitMQ 4.3.
    pub(crate) async fn take_in(&mut self) -> Vec<Incoming> {
        let (mut taken, end) = (Vec::new(), Instant::now() + TAKE_IN);
        loop {
            let full = self.control.unanswered() >= self.prefetch;
            let wait = if full { ALL_TAKEN } else { ON_ITS_WAY };
            let until = end.min(Instant::now() + wait);
            match tokio::time::timeout_at(until, self.incoming.next()).await {
                Ok(Some(Ok(incoming))) => taken.push(incoming),
                _ => return taken,
            }
        }
    }
}

pub(crate) trait Control: Send + Sync {
    /// Stops deliveries; those already here stay ours and still come out of the stream.
    fn cancel(&self) -> BoxFuture<'_, ()>;
    /// How many deliveries have come out of the stream and are not answered yet.
    fn unanswered(&self) -> usize;
    /// Closes the channel. The broker delivers again what is unanswered.
    fn close(&self) -> BoxFuture<'_, ()>;
}

pub(crate) trait Link: Debug + Send + Sync {
    /// Publishes with `mandatory`, and waits for the broker's confirm for a bounded time. `alone` no
    /// other copy is on its channel.
    fn publish(&self, copy: Box<Outgoing>, alone: bool) -> BoxFuture<'_, Confirmed>;
    /// The same without anybody waiting for it, if the way is open.
    fn publish_at_once(&self, copy: Box<Outgoing>, answered: Answered);
    fn declare<'a>(&'a self, queue: &'a QueueSpec) -> BoxFuture<'a, Result<(), Error>>;
    /// Whether a queue is a stream; `None` if the broker does not say.
    fn is_stream<'a>(&'a self, queue: &'a str) -> BoxFuture<'a, Result<Option<bool>, Error>>;
    /// Whether copies can be published; false if that could not be found out in time.
    fn may_publish(&self) -> BoxFuture<'_, Result<bool, Error>>;
    /// Verifies that a queue is there.
    fn check<'a>(&'a self, queue: &'a str) -> BoxFuture<'a, Result<(), Error>>;
    /// All consumers of a broker share one connection. `alone` it has one of its own and a prefetch
    /// of 1: what kills it is a message of its own queue, and no other job is in its way.
    fn consume<'a>(
        &'a self,
        how: &'a Subscribe,
        alone: bool,
    ) -> BoxFuture<'a, Result<Subscription, Error>>;
    fn limits(&self) -> Limits;
    /// Empty if the address is wrong.
    fn vhost(&self) -> String;
    /// Waits until a broker that was away answers again.
    fn until_back(&self) -> BoxFuture<'_, ()>;
    /// The broker blocks publishers: a memory or disk alarm.
    fn is_blocked(&self) -> bool;
}
