//! Way in 1: the user keeps the loop.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{Stream, StreamExt};
use lapin::{Consumer, message::Delivery};

use crate::{
    Broker, Error, ErrorKind, Settings, Topology, UnsettledJob,
    link::{incoming, unreadable},
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
    /// exists with other arguments, a broker that cannot be reached. Each names the remedy.
    pub async fn attach(
        broker: impl Into<Broker>,
        queue: &str,
        settings: impl Into<Settings>,
    ) -> Result<Self, Error> {
        let engine = Engine::start(broker.into(), queue, settings.into()).await?;
        Ok(Self { engine })
    }

    /// The jobs of a consumer of the work queue, until the consumer ends.
    pub fn jobs(&self, consumer: Consumer) -> Jobs {
        Jobs { engine: Arc::clone(&self.engine), consumer: Some(consumer) }
    }

    /// The job of a single delivery, for loops that cannot use [`jobs`](Self::jobs).
    ///
    /// `None` is a delivery that must not be run: it is stale, so that the broker delivers it
    /// again, or it is past its deadline, and is being buried.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] after [`close`](Self::close).
    pub async fn accept(&self, delivery: Delivery) -> Result<Option<UnsettledJob>, Error> {
        if self.engine.is_closed() {
            return Err(Error::new(
                ErrorKind::Closed,
                format!("queue {:?}: a delivery came after close()", self.engine.queue()),
            ));
        }
        Ok(self.engine.admit(incoming(delivery)))
    }

    /// The queues that this work queue has.
    pub fn topology(&self) -> &Topology {
        self.engine.topology()
    }

    /// Waits until every ack and hand-off that was begun has come to its end, for at most 25 s.
    /// Call it before the consumer's channel is closed.
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
pub struct Jobs {
    engine: Arc<Engine>,
    /// Gone at the end: a consumer that is polled after its end never wakes again.
    consumer: Option<Consumer>,
}

impl Stream for Jobs {
    type Item = Result<UnsettledJob, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Some(consumer) = &mut self.consumer else { return Poll::Ready(None) };
            match std::task::ready!(consumer.poll_next_unpin(cx)) {
                Some(Ok(delivery)) => {
                    if let Some(job) = self.engine.admit(incoming(delivery)) {
                        return Poll::Ready(Some(Ok(job)));
                    }
                }
                Some(Err(error)) => {
                    self.consumer = None;
                    return Poll::Ready(Some(Err(ended(self.engine.queue(), error))));
                }
                None => self.consumer = None,
            }
        }
    }
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
