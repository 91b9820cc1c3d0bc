//! Way in 1: the user keeps the loop.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{
    FutureExt, Stream, StreamExt,
    future::{self, BoxFuture},
    stream::FuturesUnordered,
};
use lapin::{Consumer, message::Delivery};

use crate::{
    Broker, Error, ErrorKind, Settings, Topology, UnsettledJob,
    link::{Lease, incoming, unreadable},
    pause::Pace,
    settle::{Acks, Engine, Probe, Turn},
};

/// How long [`Retry::close`] waits for what is still going on.
const CLOSE_GRACE: Duration = Duration::from_secs(25);

/// Retries for a consumer that you run yourself.
///
/// ```no_run
/// use futures_util::StreamExt;
/// use lapin_retry::{Broker, Retry, RetryPolicy};
///
/// # async fn ship(_: &[u8]) -> anyhow::Result<()> { Ok(()) }
/// # async fn example(consumer: lapin_retry::lapin::Consumer) -> anyhow::Result<()> {
/// let broker = Broker::new("amqp://localhost")?;
/// let retry = Retry::attach(&broker, "orders", RetryPolicy::new([15, 30, 60])).await?;
/// let mut jobs = retry.jobs(consumer);
/// while let Some(job) = jobs.next().await {
///     let job = job?;
///     let result = ship(job.body()).await;
///     job.settle(result).await?;
/// }
/// retry.close().await?;
/// # Ok(())
/// # }
/// ```
///
/// A job that ends the process is not found out here, as a [`RetryConsumer`](crate::RetryConsumer)
/// does: what your consumer has prefetched cannot be given back, so a crash says nothing of any
/// single job.
///
/// The deliveries must not be acked by anybody else, and the consumer must not be started with
/// `no_ack`. The copies travel on a connection of the [`Broker`]'s own, which is opened again when
/// it dies; the consumer's connection is yours.
#[derive(Clone, Debug)]
pub struct Retry {
    engine: Arc<Engine>,
}

impl Retry {
    /// Makes or verifies the queues that `queue` needs, and is ready to settle its jobs.
    ///
    /// # Errors
    /// An impossible setting, a work queue that is missing, a lack of permissions, a lane that
    /// exists with other arguments, a broker that cannot be reached. Each names the queue or the address,
    /// and the remedy where it is not plain.
    pub async fn attach(
        broker: impl Into<Broker>,
        queue: &str,
        settings: impl Into<Settings>,
    ) -> Result<Self, Error> {
        let engine = Engine::start(broker.into(), queue, settings.into()).await?;
        Ok(Self { engine })
    }

    /// The jobs of a consumer of the work queue, until the consumer ends.
    ///
    /// **Leave lapin's own recovery off** on the consumer's connection (`enable_auto_recover`). With
    /// it a lost connection ends nothing here: a channel that does not come back leaves this stream
    /// waiting for ever. Open connection and consumer again yourself, or use
    /// [`RetryConsumer`](crate::RetryConsumer).
    pub fn jobs(&self, consumer: Consumer) -> Jobs {
        Jobs {
            engine: Arc::clone(&self.engine),
            acks: Acks::new(&self.engine),
            lease: Arc::default(),
            consumer: Some(consumer),
            turn: None,
            probe: None,
            waiting: FuturesUnordered::new(),
        }
    }

    /// The job of a single delivery, for loops that cannot use [`jobs`](Self::jobs).
    ///
    /// `None` is a delivery that must not be run: it is stale, so that the broker delivers it
    /// again; or it is not due, or past its deadline, and is on its way to a lane or to the buried
    /// queue; or its work is done ([`Settings::remember_done`]), and it is acked.
    ///
    /// While the consumer pauses this waits.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] after [`close`](Self::close).
    pub async fn accept(&self, delivery: Delivery) -> Result<Option<UnsettledJob>, Error> {
        if self.engine.is_closed() {
            return Err(after_close(&self.engine));
        }
        let mut turn = self.engine.turn().await;
        let taken = self.engine.take(incoming(delivery, &Arc::new(Lease::default())), None);
        let Some(mut job) = self.engine.admit(taken) else { return Ok(None) };
        job.until_due().await;
        while !job.start(turn) {
            turn = self.engine.turn().await;
        }
        // Dropped, a job that became stale in the pause tells of itself.
        Ok(Some(job).filter(UnsettledJob::is_usable))
    }

    /// Until when no jobs are given out, because a handler reported an outage or a hand-off
    /// fails; none if they are, or if the wait is over and one is tried.
    pub fn paused(&self) -> Option<std::time::Instant> {
        match self.engine.pace() {
            Pace::Paused { until } => until.map(tokio::time::Instant::into_std),
            Pace::Stuck { until, .. } => Some(until.into_std()),
            Pace::Open { .. } | Pace::Probing => None,
        }
    }

    /// Ends a pause at once.
    pub fn resume(&self) {
        self.engine.resume_by_hand();
    }

    /// The queues that this work queue has.
    pub fn topology(&self) -> Topology {
        self.engine.topology()
    }

    /// Waits until every ack and hand-off that was begun has come to its end, for about 25 s at most.
    /// Call it before the consumer's channel is closed. It closes all clones: a delivery that comes
    /// after is an error in [`jobs`](Self::jobs) and [`accept`](Self::accept), and stays unacked.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`]: some did not succeed. Their jobs stay unacked, and the broker
    /// delivers them again once the channel is closed.
    pub async fn close(self) -> Result<(), Error> {
        self.engine.close(CLOSE_GRACE).await
    }
}

/// The stream of [`Retry::jobs`].
///
/// It ends when the consumer ends: cancelled by you, or by the broker because the queue was
/// deleted. An error is its last item. To drop it cancels the consumer.
///
/// While the consumer pauses it waits: what was prefetched stays with it.
#[must_use = "a stream of jobs takes none until it is polled"]
pub struct Jobs {
    engine: Arc<Engine>,
    acks: Arc<Acks>,
    lease: Arc<Lease>,
    /// Gone at the end: a consumer that is polled after its end never wakes again.
    consumer: Option<Consumer>,
    /// Waits for its turn, in a pause.
    turn: Option<BoxFuture<'static, Turn>>,
    /// One job may be given out although the consumer pauses.
    probe: Option<Probe>,
    /// Jobs with less than a second of their wait left, and those that a pause keeps back.
    waiting: FuturesUnordered<BoxFuture<'static, UnsettledJob>>,
}

impl Jobs {
    fn poll_turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.probe.as_ref().is_some_and(|probe| probe.is_valid()) {
            return Poll::Ready(());
        }
        self.probe = None;
        if self.turn.is_none() && self.engine.is_open() {
            return Poll::Ready(());
        }
        let engine = Arc::clone(&self.engine);
        let turn = self.turn.get_or_insert_with(|| async move { engine.turn().await }.boxed());
        let turn = std::task::ready!(turn.poll_unpin(cx));
        self.turn = None;
        if let Turn::Probe(probe) = turn {
            self.probe = Some(probe);
        }
        Poll::Ready(())
    }

    /// None if a pause keeps the job back, or if it became stale.
    fn give_out(&mut self, mut job: UnsettledJob) -> Option<UnsettledJob> {
        let turn = self.probe.take().map_or(Turn::Open, Turn::Probe);
        if job.start(turn) {
            // Dropped, a stale job tells of itself.
            return Some(job).filter(UnsettledJob::is_usable);
        }
        self.waiting.push(future::ready(job).boxed());
        None
    }
}

impl Stream for Jobs {
    type Item = Result<UnsettledJob, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            std::task::ready!(self.poll_turn(cx));
            if let Poll::Ready(Some(job)) = self.waiting.poll_next_unpin(cx) {
                match self.give_out(job) {
                    Some(job) => return Poll::Ready(Some(Ok(job))),
                    None => continue,
                }
            }
            let Some(consumer) = &mut self.consumer else {
                if !self.waiting.is_empty() {
                    return Poll::Pending;
                }
                self.probe = None;
                return Poll::Ready(None);
            };
            match std::task::ready!(consumer.poll_next_unpin(cx)) {
                Some(Ok(_)) if self.engine.is_closed() => {
                    self.consumer = None;
                    return Poll::Ready(Some(Err(after_close(&self.engine))));
                }
                Some(Ok(delivery)) => {
                    let taken = self.engine.take(incoming(delivery, &self.lease), Some(&self.acks));
                    match self.engine.admit(taken) {
                        Some(job) if job.is_due() => {
                            if let Some(job) = self.give_out(job) {
                                return Poll::Ready(Some(Ok(job)));
                            }
                        }
                        Some(job) => self.waiting.push(
                            async move {
                                job.until_due().await;
                                job
                            }
                            .boxed(),
                        ),
                        None => {}
                    }
                }
                Some(Err(error)) => {
                    self.consumer = None;
                    return Poll::Ready(Some(Err(ended(&self.engine.queue(), error))));
                }
                None => self.consumer = None,
            }
        }
    }
}

fn after_close(engine: &Engine) -> Error {
    Error::new(
        ErrorKind::Closed,
        format!("queue {:?}: a delivery came after close()", engine.queue()),
    )
}

fn ended(queue: &str, error: lapin::Error) -> Error {
    let (kind, what) = match unreadable(&error) {
        Some(why) => (
            ErrorKind::Unreadable,
            format!(
                "a message near its head, or in another queue that is consumed over the same \
                 connection, {why}; consuming again before that kills the connection again, and a \
                 quorum queue of RabbitMQ 4 drops a message after 21 deliveries"
            ),
        ),
        None => (ErrorKind::Connection, error.to_string()),
    };
    Error::new(kind, format!("consuming queue {queue:?}: {what}")).because(error)
}

impl fmt::Debug for Jobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Jobs").field("queue", &self.engine.queue()).finish_non_exhaustive()
    }
}
