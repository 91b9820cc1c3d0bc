//! The seam's implementation with lapin.

use std::{
    future::Future,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::Poll,
    time::Duration,
};

use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream};
use lapin::{
    Acker, Channel,
    message::Delivery,
    options::{
        BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions,
        BasicQosOptions, QueueDeclareOptions,
    },
    types::{FieldTable, ShortString},
};

use tokio::{runtime::Handle, sync::oneshot, time::Instant};

use super::{
    Answered, Broker, Confirmed, Control, Incoming, LINGER, Lease, Limits, Link, Subscribe,
    Subscription, Tag,
    connection::{Purpose, Session, Shared, refused, unreadable},
    dial::until_back,
    io::Io,
    pipe::{ENDED, Pipe, not_sent, undecided},
    probe,
    watched::Watched,
};
use crate::{
    Error, ErrorKind,
    message::{Message, Outgoing},
    topology::QueueSpec,
};

/// What RabbitMQ negotiates unless told otherwise, in bytes.
const FRAME_MAX: u32 = 131_072;
/// How long a declare, a check or a consume may take.
const ANSWER: Duration = Duration::from_secs(30);
/// How often who waits for an answer looks whether it can still come.
const DEAD_CHECK: Duration = Duration::from_secs(1);
const BUSY: &str = "no channel to publish on came free in time";

/// One work queue's way to a broker.
#[derive(Debug)]
pub(crate) struct LapinLink {
    broker: Broker,
    confirm_timeout: Duration,
}

impl LapinLink {
    pub(crate) fn new(broker: Broker, confirm_timeout: Duration) -> Self {
        Self { broker, confirm_timeout }
    }

    async fn publishing(&self) -> Result<Arc<Session>, Error> {
        self.broker.0.publishing.session(&self.broker, Purpose::Publishing).await
    }

    /// Each declare and check has a channel to itself, for a refusal closes it; and not on the
    /// consuming connection, which a refusal can take down while a large delivery arrives. While the
    /// publishing connection is blocked nothing is written on it: one that publishes nothing is not.
    async fn queue_declare(
        &self,
        what: &str,
        queue: &str,
        options: QueueDeclareOptions,
        arguments: FieldTable,
    ) -> Result<(), Error> {
        let broker = &self.broker.0;
        let blocked = broker.publishing.is_blocked();
        let (shared, purpose) = if blocked {
            (&broker.declaring, Purpose::Declaring)
        } else {
            broker.declaring.let_go();
            (&broker.publishing, Purpose::Publishing)
        };
        let session = shared.session(&self.broker, purpose).await?;
        let declared = async {
            let _turn = session.declaring().await;
            let channel = session.channel().await?;
            let declared = channel.queue_declare(queue.into(), options, arguments).await?;
            // Dropped, it would be closed some time later, and count until then.
            let _ = channel.close(200, "done".into()).await;
            Ok(declared)
        };
        let declared = in_time(declared, what, &session).await?;
        declared.map(drop).map_err(|error| refused(&error, what))
    }

    /// On the channel for its queue, or alone on one of its own.
    async fn land(&self, session: &Arc<Session>, copy: Box<Outgoing>, alone: bool) -> Confirmed {
        if is_blocked(session) {
            let why = "the broker blocks publishers (a memory or disk alarm)";
            return not_sent(&copy.queue, why);
        }
        let _turn = if alone {
            let waiting = tokio::time::timeout(self.confirm_timeout, session.alone());
            let Ok(turn) = waiting.await else { return not_sent(&copy.queue, BUSY) };
            Some(turn)
        } else {
            None
        };
        let (tell, told) = oneshot::channel();
        let open = if alone { None } else { session.open_pipe(&copy.queue) };
        let pipe = match open {
            Some(pipe) => pipe,
            None => match self.pipe(session, &copy.queue, alone).await {
                Ok(pipe) => pipe,
                Err(why) => return not_sent(&copy.queue, why),
            },
        };
        // Nobody waits any more if the engine gave up.
        let answered = Box::new(move |answer| drop(tell.send(answer)));
        let queue = Arc::clone(&copy.queue);
        if session.publish(pipe, copy, self.confirm_timeout, answered).is_err() {
            return not_sent(&queue, ENDED);
        }
        told.await.ok().flatten().unwrap_or_else(undecided)
    }

    /// A channel to publish on, opened if there is none; or why there is none.
    async fn pipe(&self, session: &Session, queue: &Arc<str>, alone: bool) -> Result<Pipe, String> {
        let opening = async {
            match alone {
                true => Pipe::open(&session.connection).await.map(Some),
                false => session.pipe(queue).await,
            }
        };
        match tokio::time::timeout(self.confirm_timeout, opening).await {
            Ok(Ok(Some(pipe))) => Ok(pipe),
            Ok(Ok(None)) => Err(BUSY.to_owned()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => {
                session.retire();
                Err("the broker opened no channel in time".to_owned())
            }
        }
    }
}

/// What is published then would be sent, and confirmed, only when the alarm is over.
fn is_blocked(session: &Session) -> bool {
    session.connection.status().blocked()
}

impl Link for LapinLink {
    fn publish(&self, copy: Box<Outgoing>, alone: bool) -> BoxFuture<'_, Confirmed> {
        async move {
            match self.publishing().await {
                Ok(session) => self.land(&session, copy, alone).await,
                Err(error) => Confirmed::NotSent(error),
            }
        }
        .boxed()
    }

    fn publish_at_once(&self, copy: Box<Outgoing>, answered: Answered) {
        let working = self.broker.0.publishing.working();
        let open = working.filter(|session| !is_blocked(session));
        let way = open.and_then(|session| Some((session.open_pipe(&copy.queue)?, session)));
        let Some((pipe, session)) = way else { return answered(None) };
        if let Err(answered) = session.publish(pipe, copy, self.confirm_timeout, answered) {
            answered(None);
        }
    }

    fn declare<'a>(&'a self, queue: &'a QueueSpec) -> BoxFuture<'a, Result<(), Error>> {
        async move {
            let what = format!("declaring queue {:?}", queue.name);
            let durable = QueueDeclareOptions { durable: true, ..Default::default() };
            self.queue_declare(&what, &queue.name, durable, queue.arguments.clone()).await
        }
        .boxed()
    }

    fn is_stream<'a>(&'a self, queue: &'a str) -> BoxFuture<'a, Result<Option<bool>, Error>> {
        async move {
            let what = format!("looking at the type of queue {queue:?}");
            let publishing = self.publishing().await?;
            // The refusal closes the channel. Where the broker allows few, lapin gives its number to the
            // next one too early, and the request there fails with the same refusal.
            let session = if publishing.has_few_channels() {
                Shared::default().session(&self.broker, Purpose::Declaring).await?
            } else {
                publishing
            };
            let asked = in_time(probe::is_stream(&session, queue), &what, &session).await?;
            asked.map_err(|error| refused(&error, &what))
        }
        .boxed()
    }

    fn may_publish(&self) -> BoxFuture<'_, Result<bool, Error>> {
        async move {
            let what = "publishing to the default exchange";
            let session = self.publishing().await?;
            // Nothing is written while it is blocked.
            if is_blocked(&session) {
                return Ok(false);
            }
            let asking = probe::may_publish(&session, self.confirm_timeout);
            let asked = in_time(asking, what, &session).await?;
            asked.map_err(|error| refused(&error, what))
        }
        .boxed()
    }

    fn check<'a>(&'a self, queue: &'a str) -> BoxFuture<'a, Result<(), Error>> {
        async move {
            let what = format!("looking for queue {queue:?}");
            let passive = QueueDeclareOptions { passive: true, ..Default::default() };
            self.queue_declare(&what, queue, passive, FieldTable::default()).await
        }
        .boxed()
    }

    fn consume<'a>(
        &'a self,
        how: &'a Subscribe,
        alone: bool,
    ) -> BoxFuture<'a, Result<Subscription, Error>> {
        let subscribing = subscribe(self.broker.clone(), how.clone(), alone);
        let what = how.queue.clone();
        let (tell, told) = oneshot::channel();
        // A task of its own: the broker would go on to send jobs to a consumer that nobody waited
        // for, and lapin keeps such a one, with its channel.
        tokio::spawn(async move {
            if let Err(Ok(mut unwanted)) = tell.send(subscribing.await) {
                unwanted.control.cancel().await;
                while let Some(Ok(incoming)) = unwanted.incoming.next().await {
                    incoming.tag.give_back().await;
                }
            }
        });
        async move {
            let ended = || format!("consuming queue {what:?}: the runtime shuts down");
            told.await.unwrap_or_else(|_| Err(Error::new(ErrorKind::Closed, ended())))
        }
        .boxed()
    }

    fn vhost(&self) -> String {
        let first = self.broker.addresses().ok().and_then(<[_]>::first);
        first.map(|uri| uri.vhost.clone()).unwrap_or_default()
    }

    fn limits(&self) -> Limits {
        let session = self.broker.0.publishing.last();
        let negotiated = session.map_or(0, |s| s.connection.configuration().frame_max());
        let first = self.broker.addresses().ok().and_then(<[_]>::first);
        Limits {
            user: first.map(|uri| uri.authority.userinfo.username.clone()).unwrap_or_default(),
            // 0 means that the broker sets no limit of its own.
            frame_max: if negotiated == 0 { FRAME_MAX } else { negotiated },
        }
    }

    fn until_back(&self) -> BoxFuture<'_, ()> {
        until_back(&self.broker).boxed()
    }

    fn is_blocked(&self) -> bool {
        self.broker.0.publishing.is_blocked()
    }
}

/// To what lapin is asked while its connection dies it may never answer. A connection that does
/// not answer is not used again.
async fn in_time<T>(
    asked: impl Future<Output = T>,
    what: &str,
    session: &Session,
) -> Result<T, Error> {
    let mut asked = pin!(asked);
    let (end, mut dead) = (Instant::now() + ANSWER, false);
    loop {
        if let Ok(answer) = tokio::time::timeout(DEAD_CHECK, &mut asked).await {
            return Ok(answer);
        }
        // What it has to say of its death may still be on its way.
        let was_dead = std::mem::replace(&mut dead, !session.connection.status().connected());
        let why = if was_dead && dead {
            "the connection died".to_owned()
        } else if Instant::now() >= end {
            format!("the broker did not answer within {ANSWER:?}")
        } else {
            continue;
        };
        session.retire();
        return Err(Error::new(ErrorKind::Connection, format!("{what}: {why}")));
    }
}

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

async fn subscribe(broker: Broker, how: Subscribe, alone: bool) -> Result<Subscription, Error> {
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
