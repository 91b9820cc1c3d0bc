//! Connections that are opened when needed and opened again when they die.

use std::{
    collections::HashMap,
    fmt::Display,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use lapin::{
    Channel, Connection, ErrorKind as LapinErrorKind,
    protocol::{AMQPErrorKind, AMQPSoftError},
};

use tokio::{
    runtime::Handle,
    sync::{OnceCell, Semaphore, SemaphorePermit},
    time::Instant,
};
use tokio_util::task::AbortOnDropHandle;

use super::{
    Answered, Broker,
    dial::open,
    io::Io,
    pipe::{Carrier, Pipe, Tell},
};
use crate::{Error, ErrorKind, clock::Backoff, message::Outgoing};

/// What RabbitMQ negotiates unless told otherwise.
const CHANNEL_MAX: u16 = 2047;

/// How long a channel is waited for where as many are open as may be. A consumer's is closed 5 s after
/// its last delivery is acked.
const CHANNEL_WAIT: Duration = Duration::from_secs(10);
const CHANNEL_LOOK: Duration = Duration::from_millis(20);

/// A connection that several users share, on whatever runtimes they are.
#[derive(Clone, Debug, Default)]
pub(super) struct Shared(Arc<Sharing>);

#[derive(Debug, Default)]
struct Sharing {
    current: Mutex<Option<Arc<Session>>>,
    opening: tokio::sync::Mutex<Opening>,
    /// How many times connecting was tried, to tell a waiter whether its turn was somebody else's.
    tries: AtomicU64,
}

#[derive(Debug)]
struct Opening {
    last_error: Option<Error>,
    /// However many users ask for it, a connection that cannot be opened is tried in the rhythm of
    /// one.
    backoff: Backoff,
    /// None: at once.
    next_try: Option<Instant>,
}

impl Default for Opening {
    fn default() -> Self {
        Self {
            last_error: None,
            backoff: Backoff::new(Duration::from_millis(100), Duration::from_secs(5)),
            next_try: None,
        }
    }
}

/// One connection's life. It is closed when the last user lets go of it.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) connection: Connection,
    /// lapin's own thread ends before its tasks have told that the connection is dead: without the
    /// I/O thread it would look alive for ever.
    _io: Io,
    retired: AtomicBool,
    /// The channels that publish, by queue, for all consumers together.
    pipes: Mutex<HashMap<Arc<str>, Arc<OnceCell<Pipe>>>>,
    /// Only a connection that publishes has one.
    carrier: Option<Carrier>,
    /// One at a time publishes on a channel of its own.
    alone: Semaphore,
    /// The right to declare or check a queue, as many at a time as fit on the connection.
    declaring: Semaphore,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    Consuming,
    Publishing,
    /// While publishers are blocked.
    Declaring,
}

impl Purpose {
    /// As the management UI shows it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Consuming => "lapin-retry consuming",
            Self::Publishing => "lapin-retry publishing",
            Self::Declaring => "lapin-retry declaring",
        }
    }
}

impl Shared {
    /// The connection, opened if there is none that works.
    pub(super) async fn session(
        &self,
        broker: &Broker,
        purpose: Purpose,
    ) -> Result<Arc<Session>, Error> {
        match self.working() {
            Some(session) => Ok(session),
            // Out of the way of those who find one: what they wait for stays small.
            None => Box::pin(self.open(broker, purpose)).await,
        }
    }

    /// On the I/O thread: whoever opens it, others wait for it, and their runtimes may go on when this
    /// one does not.
    async fn open(&self, broker: &Broker, purpose: Purpose) -> Result<Arc<Session>, Error> {
        let ended = |why: &dyn Display| {
            Error::new(
                ErrorKind::Connection,
                format!(
                    "connecting: no thread can be started for it ({why}); raise the process's limit of threads or memory"
                ),
            )
        };
        let (shared, broker, users) = (self.clone(), broker.clone(), Handle::current());
        let io = Io::get().map_err(|error| ended(&error))?;
        let opening =
            io.clone().spawn(async move { shared.open_here(&broker, purpose, &users, io).await });
        AbortOnDropHandle::new(opening).await.unwrap_or_else(|error| Err(ended(&error)))
    }

    /// `users`: the runtime of the one who opens it.
    async fn open_here(
        &self,
        broker: &Broker,
        purpose: Purpose,
        users: &Handle,
        io: Io,
    ) -> Result<Arc<Session>, Error> {
        let Self(shared) = self;
        let tries = shared.tries.load(Ordering::Relaxed);
        let mut opening = shared.opening.lock().await;
        if let Some(session) = self.working() {
            return Ok(session);
        }
        // Those who waited while connecting failed share the failure; else each of them would
        // wait for the broker anew, one after the other.
        if shared.tries.load(Ordering::Relaxed) != tries
            && let Some(error) = &opening.last_error
        {
            return Err(error.clone());
        }
        if let Some(next_try) = opening.next_try {
            tokio::time::sleep_until(next_try).await;
        }
        shared.tries.fetch_add(1, Ordering::Relaxed);
        match open(broker, purpose).await {
            Ok(connection) => {
                opening.last_error = None;
                opening.backoff.reset();
                opening.next_try = None;
                let publishes = matches!(purpose, Purpose::Publishing);
                let declares = most_declares(connection.configuration().channel_max());
                let session = Arc::new(Session {
                    carrier: publishes.then(|| Carrier::start(&connection, users)),
                    connection,
                    _io: io,
                    retired: AtomicBool::new(false),
                    pipes: Mutex::default(),
                    alone: Semaphore::new(1),
                    declaring: Semaphore::new(declares),
                });
                *lock(&shared.current) = Some(Arc::clone(&session));
                Ok(session)
            }
            Err(error) => {
                *lock(&shared.current) = None;
                opening.last_error = Some(error.clone());
                let wait = opening.backoff.next(&mut rand::rng());
                opening.next_try = Some(Instant::now() + wait);
                Err(error)
            }
        }
    }

    /// The connection that was opened last, whatever its state.
    pub(super) fn last(&self) -> Option<Arc<Session>> {
        lock(&self.0.current).clone()
    }

    /// The broker blocks whoever publishes over it: a memory or disk alarm.
    pub(super) fn is_blocked(&self) -> bool {
        self.working().is_some_and(|session| session.connection.status().blocked())
    }

    /// Leaves the connection to those who still use it.
    pub(super) fn let_go(&self) {
        lock(&self.0.current).take();
    }

    /// The connection, if there is one that works.
    pub(super) fn working(&self) -> Option<Arc<Session>> {
        lock(&self.0.current).as_ref().filter(|session| session.works()).cloned()
    }
}

impl Session {
    fn works(&self) -> bool {
        let carries = self.carrier.as_ref().is_none_or(Carrier::works);
        carries && self.connection.status().connected() && !self.retired.load(Ordering::Relaxed)
    }

    /// Whoever comes next opens another connection; those who still use this one keep it. One that
    /// the broker blocks is kept: the next would be blocked as well.
    pub(super) fn retire(&self) {
        if !self.connection.status().blocked() {
            self.retired.store(true, Ordering::Relaxed);
        }
    }

    /// The channel on which copies for this queue are published, if it is open.
    pub(super) fn open_pipe(&self, queue: &str) -> Option<Pipe> {
        let pipe = lock(&self.pipes).get(queue)?.get().cloned();
        pipe.filter(Pipe::is_open)
    }

    /// The same, opened if there is none; none if there are as many as may be.
    pub(super) async fn pipe(&self, queue: &Arc<str>) -> Result<Option<Pipe>, lapin::Error> {
        let Some(cell) = self.pipe_cell(queue) else { return Ok(None) };
        // Nobody who wants another waits while this one is opened.
        let opened = cell.get_or_try_init(|| Pipe::open(&self.connection)).await?;
        Ok(Some(opened.clone()))
    }

    fn pipe_cell(&self, queue: &Arc<str>) -> Option<Arc<OnceCell<Pipe>>> {
        let is_open = |cell: &Arc<OnceCell<Pipe>>| cell.get().is_none_or(Pipe::is_open);
        let mut pipes = lock(&self.pipes);
        if let Some(cell) = pipes.get(queue).filter(|cell| is_open(cell)) {
            return Some(Arc::clone(cell));
        }
        pipes.retain(|_, cell| is_open(cell));
        let most = most_pipes(self.connection.configuration().channel_max());
        if pipes.len() >= most {
            let is_idle = |cell: &Arc<OnceCell<Pipe>>| {
                Arc::strong_count(cell) == 1 && cell.get().is_none_or(Pipe::is_idle)
            };
            pipes.retain(|_, cell| !is_idle(cell));
        }
        (pipes.len() < most).then(|| Arc::clone(pipes.entry(Arc::clone(queue)).or_default()))
    }

    /// Tells what the broker answers; or gives `answered` back, if no task publishes here any more.
    pub(super) fn publish(
        self: &Arc<Self>,
        pipe: Pipe,
        copy: Box<Outgoing>,
        timeout: Duration,
        answered: Answered,
    ) -> Result<(), Answered> {
        let Some(carrier) = &self.carrier else { return Err(answered) };
        let tell = Tell { answered: Some(answered), timeout, session: Arc::clone(self) };
        let Err(mut tell) = carrier.publish(pipe, copy, tell) else { return Ok(()) };
        tell.answered.take().map_or(Ok(()), Err)
    }

    /// A new channel. Where the broker allows few, one that has just been closed may still be counted,
    /// or is about to be closed: that is waited for.
    pub(super) async fn channel(&self) -> Result<Channel, lapin::Error> {
        let until = Instant::now() + CHANNEL_WAIT;
        loop {
            match self.connection.create_channel().await {
                Err(error) if is_channel_limit(&error) && Instant::now() < until => {
                    tokio::time::sleep(CHANNEL_LOOK).await;
                }
                opened => return opened,
            }
        }
    }

    /// So few that the number of a channel is soon used again.
    pub(super) fn has_few_channels(&self) -> bool {
        most_pipes(self.connection.configuration().channel_max()) < 100
    }

    /// The right to declare or check a queue.
    pub(super) async fn declaring(&self) -> SemaphorePermit<'_> {
        self.declaring.acquire().await.expect("an open semaphore")
    }

    /// The right to publish on a channel of its own.
    pub(super) async fn alone(&self) -> SemaphorePermit<'_> {
        // The semaphore is never closed.
        self.alone.acquire().await.expect("an open semaphore")
    }
}

/// Half of the channels that the broker allows: the others are for declaring and checking queues, and
/// for those that are about to be closed.
fn most_pipes(channel_max: u16) -> usize {
    // 0 means that the broker sets no limit.
    let channels = if channel_max == 0 { CHANNEL_MAX } else { channel_max };
    usize::from(channels / 2).max(1)
}

/// Half of the others, at most eight: a quorum queue takes 7-25 ms to declare, so they go side by side.
fn most_declares(channel_max: u16) -> usize {
    (most_pipes(channel_max) / 2).clamp(1, 8)
}

/// Nothing panics while it holds one of these.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why a consumer's connection died, if it was of a message that lapin cannot read. The message
/// goes back to its queue, and the next connection dies of it, too.
pub(crate) fn unreadable(error: &lapin::Error) -> Option<String> {
    match error.kind() {
        // The broker sends what outgrew the frame in a lane or in a quorum queue all the same.
        // Its own complaint about a frame of ours has another text.
        LapinErrorKind::ProtocolError(amqp)
            if amqp.get_message().as_str().starts_with("frame too large") =>
        {
            Some(format!(
                "has headers larger than a frame ({}); take it out with the management UI (\"Get \
                 messages\" with an automatic ack), or raise frame_max in rabbitmq.conf",
                amqp.get_message()
            ))
        }
        LapinErrorKind::ParsingError(_) => Some(
            "has properties that are not AMQP, such as a correlation id or a header's name that is \
             not UTF-8; take it out with the management UI (\"Get messages\" with an automatic ack, \
             which removes it even where the answer is an error 500)"
                .to_owned(),
        ),
        _ => None,
    }
}

/// The consumer timeout that a broker names when it closes a channel for it: "delivery
/// acknowledgement on channel 1 timed out. Timeout value used: 1800000 ms".
pub(crate) fn timeout_named(error: &str) -> Option<Duration> {
    let (_, named) = error.split_once("timed out. Timeout value used: ")?;
    let (ms, _) = named.split_once(" ms")?;
    ms.parse().ok().map(Duration::from_millis)
}

/// Translates lapin's errors. `what` says what was tried, and on which queue.
pub(super) fn refused(error: &lapin::Error, what: &str) -> Error {
    if is_channel_limit(error) {
        let text = format!(
            "{what}: as many channels are open on the connection as the broker allows; raise \
             channel_max in rabbitmq.conf, or give some of the consumers a Broker of their own"
        );
        return Error::new(ErrorKind::Refused, text).because(error.clone());
    }
    let LapinErrorKind::ProtocolError(amqp) = error.kind() else {
        return Error::new(ErrorKind::Connection, format!("{what}: {error}"))
            .because(error.clone());
    };
    let text = amqp.get_message().as_str();
    let kind = match amqp.kind() {
        AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND) => ErrorKind::MissingQueue,
        AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED) => ErrorKind::Permission,
        AMQPErrorKind::Soft(AMQPSoftError::PRECONDITIONFAILED) if text.contains("queue limit") => {
            ErrorKind::QueueLimit
        }
        AMQPErrorKind::Soft(AMQPSoftError::PRECONDITIONFAILED)
            if text.contains("inequivalent arg") =>
        {
            ErrorKind::Inequivalent
        }
        AMQPErrorKind::Soft(_) => ErrorKind::Refused,
        AMQPErrorKind::Hard(_) => ErrorKind::Connection,
    };
    Error::new(kind, format!("{what}: {text}")).because(error.clone())
}

/// True if the broker answered that it does not do what was asked. It closes the channel, so with
/// several requests in flight there all of them hear it.
pub(super) fn is_refusal(error: &lapin::Error) -> bool {
    matches!(error.kind(), LapinErrorKind::ProtocolError(amqp)
        if matches!(amqp.kind(), AMQPErrorKind::Soft(_)))
}

fn is_channel_limit(error: &lapin::Error) -> bool {
    matches!(error.kind(), LapinErrorKind::ChannelsLimitReached)
}

/// True if lapin found the channel or its connection closed.
pub(super) fn is_closed(error: &lapin::Error) -> bool {
    use LapinErrorKind::{InvalidChannel, InvalidChannelState, InvalidConnectionState};
    matches!(error.kind(), InvalidChannel(_) | InvalidChannelState(..) | InvalidConnectionState(_))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_consumer_timeout_is_read_from_the_brokers_text() {
        let text = "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out. Timeout \
                    value used: 42000 ms. This timeout value can be configured, see consumers doc \
                    guide to learn more";
        assert_eq!(timeout_named(text), Some(Duration::from_secs(42)));
        assert_eq!(timeout_named("PRECONDITION_FAILED - unknown delivery tag 7"), None);
    }
}
