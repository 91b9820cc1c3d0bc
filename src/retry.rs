//! Way in 1: the user keeps the loop.

mod jobs;
mod reader;

use std::{
    mem,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use lapin::{Consumer, message::Delivery};
use tokio::sync::watch;

pub use self::jobs::Jobs;
use crate::{
    Broker, Error, ErrorKind, Settings, Topology, UnsettledJob,
    link::{BEAT, Lease, incoming, watch_over},
    pause::Pace,
    settle::Engine,
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
    /// Of all deliveries that were accepted since [`Retry::revoked`].
    accepted: Arc<Mutex<Arc<Lease>>>,
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
        let (beat, beats) = watch::channel(());
        watch_over(engine.queue(), beats);
        let alive = Arc::downgrade(&engine);
        tokio::spawn(async move {
            while alive.strong_count() > 0 && beat.send(()).is_ok() {
                tokio::time::sleep(BEAT).await;
            }
        });
        Ok(Self { engine, accepted: Arc::default() })
    }

    /// The jobs of a consumer of the work queue, until the consumer ends.
    ///
    /// **Leave lapin's own recovery off** on the consumer's connection (`enable_auto_recover`). With
    /// it a lost connection ends nothing here: a channel that does not come back leaves this stream
    /// waiting for ever. Open connection and consumer again yourself, or use
    /// [`RetryConsumer`](crate::RetryConsumer).
    pub fn jobs(&self, consumer: Consumer) -> Jobs {
        Jobs::new(&self.engine, consumer)
    }

    /// The job of a single delivery, for loops that cannot use [`jobs`](Self::jobs).
    ///
    /// `None` is a delivery that must not be run: it is stale, so that the broker delivers it
    /// again; or it is not due, or past its deadline, and is on its way to a lane or to the buried
    /// queue; or its work is done ([`Settings::remember_done`]), and it is acked.
    ///
    /// While the consumer pauses this waits. Call [`revoked`](Self::revoked) when your consumer ends.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] after [`close`](Self::close).
    pub async fn accept(&self, delivery: Delivery) -> Result<Option<UnsettledJob>, Error> {
        if self.engine.is_closed() {
            return Err(after_close(&self.engine));
        }
        let mut turn = self.engine.turn().await;
        let lease = Arc::clone(&*self.accepted());
        let taken = self.engine.take(incoming(delivery, &lease), None);
        let Some(mut job) = self.engine.admit(taken) else { return Ok(None) };
        job.until_due().await;
        while !job.start(turn) {
            turn = self.engine.turn().await;
        }
        // Dropped, a job that became stale in the pause tells of itself.
        Ok(Some(job).filter(UnsettledJob::is_usable))
    }

    /// Call this when the consumer whose deliveries you [`accept`](Self::accept) has ended, unless you
    /// cancelled it yourself: a delivery does not know its consumer, so nobody else can notice.
    ///
    /// The broker has taken back all that it had delivered then, and the channel may still be open.
    /// The jobs that were accepted so far and are not settled become stale: no copy is published and
    /// no ack sent for them, which would count for nothing and make two jobs out of one. With several
    /// consumers in one `Retry` the jobs of all of them do. [`jobs`](Self::jobs) needs no such call.
    ///
    /// ```no_run
    /// # use futures_util::StreamExt;
    /// # async fn example(retry: lapin_retry::Retry, mut consumer: lapin_retry::lapin::Consumer)
    /// # -> anyhow::Result<()> {
    /// while let Some(Ok(delivery)) = consumer.next().await {
    ///     if let Some(job) = retry.accept(delivery).await? {
    ///         // …
    /// #       job.settle(anyhow::Ok(())).await?;
    ///     }
    /// }
    /// retry.revoked();
    /// # Ok(())
    /// # }
    /// ```
    pub fn revoked(&self) {
        mem::take(&mut *self.accepted()).revoke();
    }

    fn accepted(&self) -> std::sync::MutexGuard<'_, Arc<Lease>> {
        self.accepted.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Waits until every job that was given out is settled, and its ack or hand-off has come to its end,
    /// for about 25 s at most. Call it before the consumer's channel is closed, and drop a stream of
    /// [`jobs`](Self::jobs) before: it may hold jobs that are not due yet. It closes all clones: a delivery
    /// that comes after is an error in [`jobs`](Self::jobs), which requeues it, and in
    /// [`accept`](Self::accept), where it
    /// stays unacked.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`]: a job is not settled, or its ack or hand-off did not succeed. It stays
    /// unacked, and the broker delivers it again once the channel is closed.
    pub async fn close(self) -> Result<(), Error> {
        self.engine.close(CLOSE_GRACE).await
    }
}

fn after_close(engine: &Engine) -> Error {
    Error::new(
        ErrorKind::Closed,
        format!("queue {:?}: a delivery came after close()", engine.queue()),
    )
}
