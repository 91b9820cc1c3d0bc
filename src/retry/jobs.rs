//! The jobs of a consumer that is the user's.

use std::{
    fmt, mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::{
    FutureExt, Stream, StreamExt,
    future::{self, BoxFuture},
    stream::FuturesUnordered,
};
use lapin::Consumer;
use tokio::sync::{mpsc, oneshot};

use super::{
    after_close,
    reader::{Cancelled, Reader},
};
use crate::{
    Error, UnsettledJob,
    settle::{Arrived, Engine, Probe, Turn},
};

/// How long [`Jobs::cancel`] may take.
const CANCEL: Duration = Duration::from_secs(5);

/// The stream of [`Retry::jobs`](crate::Retry::jobs).
///
/// It ends with `None` after [`cancel`](Self::cancel). lapin reports every other cancel in the same
/// way, by you (`basic_cancel`) and by the broker: since the broker takes back what it had delivered,
/// all unsettled jobs are stale then ([`Settled::Stale`](crate::Settled::Stale)), and the end is
/// `None` with a warning in the log. Where the queue was deleted the end is an error, and so it is
/// where the channel or its connection fails. An error is the last item.
///
/// A task reads the consumer, so that its end is noticed while your loop is busy. As many jobs wait
/// here as the consumer's prefetch allows. To drop the stream cancels the consumer and requeues them.
///
/// While the consumer pauses it waits: what was prefetched stays with it.
#[must_use = "a stream of jobs takes none until it is polled"]
pub struct Jobs {
    engine: Arc<Engine>,
    /// Gone at the end.
    delivered: Option<mpsc::UnboundedReceiver<Result<Arrived, Error>>>,
    /// Dropped, it cancels the consumer as well.
    cancel: Option<oneshot::Sender<Cancelled>>,
    /// Waits for its turn, in a pause.
    turn: Option<BoxFuture<'static, Turn>>,
    /// One job may be given out although the consumer pauses.
    probe: Option<Probe>,
    /// Jobs with less than a second of their wait left, and those that a pause keeps back.
    waiting: FuturesUnordered<BoxFuture<'static, UnsettledJob>>,
    /// A job waited here for so long that the broker may take it back.
    waited_long: bool,
}

impl Jobs {
    pub(super) fn new(engine: &Arc<Engine>, consumer: Consumer) -> Self {
        let (deliver, delivered) = mpsc::unbounded_channel();
        let (cancel, cancelled) = oneshot::channel();
        let reader = Reader::new(engine, deliver);
        engine.spawn_aside(reader.read(consumer, cancelled));
        Self {
            engine: Arc::clone(engine),
            delivered: Some(delivered),
            cancel: Some(cancel),
            turn: None,
            probe: None,
            waiting: FuturesUnordered::new(),
            waited_long: false,
        }
    }

    /// Cancels the consumer and requeues what was prefetched and not given out yet; the stream ends
    /// with `None`. Jobs that were given out stay yours to settle. Call it for a shutdown, before
    /// [`Retry::close`](crate::Retry::close); it takes up to 5 s.
    pub async fn cancel(&mut self) {
        self.end().await;
    }

    /// Cancels the consumer and requeues what was not given out, in this order: else it would be
    /// delivered to the same consumer again.
    fn end(&mut self) -> impl Future<Output = ()> + Send + 'static {
        let (done, cancelled) = oneshot::channel();
        if let Some(cancel) = self.cancel.take() {
            // The reader may have ended; then `cancelled` is known at once.
            let _ = cancel.send(done);
        }
        let (engine, mut unrun) = (Arc::clone(&self.engine), Vec::new());
        if let Some(mut delivered) = self.delivered.take() {
            delivered.close();
            while let Ok(item) = delivered.try_recv() {
                unrun.extend(item);
            }
        }
        let waiting = mem::take(&mut self.waiting);
        async move {
            let _ = tokio::time::timeout(CANCEL, cancelled).await;
            for arrived in unrun {
                engine.set_aside(arrived).await;
            }
            waiting.for_each(UnsettledJob::set_aside).await;
        }
    }

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
        let turn = ready!(turn.poll_unpin(cx));
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
            self.warn_of_waiting(&job);
            // Dropped, a stale job tells of itself.
            return Some(job).filter(UnsettledJob::is_usable);
        }
        self.waiting.push(future::ready(job).boxed());
        None
    }

    /// Only its own loop can do something about it.
    fn warn_of_waiting(&mut self, job: &UnsettledJob) {
        let (waited, limit) = (job.received().elapsed(), self.engine.longest_wait());
        if waited > limit && !mem::replace(&mut self.waited_long, true) {
            tracing::warn!(
                queue = self.engine.queue(),
                "a job waited {waited:.0?} in this loop before it was given out, more than a \
                 quarter of the broker's consumer timeout; the broker may take jobs back before \
                 they are settled: consume with a smaller prefetch, or settle them faster"
            );
        }
    }
}

impl Stream for Jobs {
    type Item = Result<UnsettledJob, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            ready!(self.poll_turn(cx));
            if let Poll::Ready(Some(job)) = self.waiting.poll_next_unpin(cx) {
                match self.give_out(job) {
                    Some(job) => return Poll::Ready(Some(Ok(job))),
                    None => continue,
                }
            }
            let Some(delivered) = &mut self.delivered else {
                if !self.waiting.is_empty() {
                    return Poll::Pending;
                }
                self.probe = None;
                return Poll::Ready(None);
            };
            match ready!(delivered.poll_recv(cx)) {
                Some(Ok(late)) if self.engine.is_closed() => {
                    let (engine, ending) = (Arc::clone(&self.engine), self.end());
                    self.engine.spawn_aside(async move {
                        ending.await;
                        engine.set_aside(late).await;
                    });
                    return Poll::Ready(Some(Err(after_close(&self.engine))));
                }
                Some(Ok(arrived)) => match self.engine.admit(arrived) {
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
                },
                Some(Err(error)) => {
                    self.delivered = None;
                    return Poll::Ready(Some(Err(error)));
                }
                None => self.delivered = None,
            }
        }
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        if self.cancel.is_some() {
            let ending = self.end();
            self.engine.spawn_aside(ending);
        }
    }
}

impl fmt::Debug for Jobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Jobs").field("queue", &self.engine.queue()).finish_non_exhaustive()
    }
}
