//! The loop of a consumer: subscribe, run jobs, and start over when the broker goes away.

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::{FutureExt, StreamExt};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::BoxHandler;
use crate::{
    Error, ErrorKind, Event, Panicked, TimedOut, UnsettledJob,
    clock::Backoff,
    link::{Incoming, Subscribe, Subscription},
    settle::Engine,
};

/// A subscription that lasted this long ends a series of failures.
const STEADY: Duration = Duration::from_secs(30);
/// How long the broker may take to answer a cancel or a close before it is left alone.
const FAREWELL: Duration = Duration::from_secs(5);

/// The order to stop.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stop {
    deadline: Instant,
}

impl Stop {
    pub(super) fn within(grace: Duration) -> Self {
        // A grace beyond what the clock can hold is as good as a century.
        let now = Instant::now();
        let century = Duration::from_secs(100 * 365 * 24 * 60 * 60);
        Self { deadline: now.checked_add(grace).unwrap_or(now + century) }
    }
}

pub(super) struct Run {
    pub(super) engine: Arc<Engine>,
    pub(super) how: Subscribe,
    pub(super) handler: BoxHandler,
    pub(super) concurrency: usize,
    pub(super) handler_timeout: Duration,
    pub(super) stopping: watch::Receiver<Option<Stop>>,
}

impl Run {
    pub(super) async fn until_stopped(self, first: Subscription) {
        let permits = Arc::new(Semaphore::new(self.concurrency));
        let handlers = TaskTracker::new();
        let cut = CancellationToken::new();
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(30));
        let mut next = Some(first);
        let last = loop {
            let started = Instant::now();
            let ended = match next.take() {
                Some(subscription) => {
                    let ended = self.serve(subscription, &permits, &handlers, &cut).await;
                    if started.elapsed() > STEADY {
                        backoff.reset();
                    }
                    ended
                }
                None => match self.subscribe().await {
                    Ok(subscription) => {
                        next = Some(subscription);
                        continue;
                    }
                    Err(error) => Ended::Lost(error),
                },
            };
            let error = match ended {
                Ended::Stopped(subscription) => break subscription,
                Ended::Lost(error) => error,
            };
            let wait = self.engine.with_rng(|rng| backoff.next(rng));
            self.engine.emit(&Event::Disconnected { queue: self.how.queue.clone(), error, wait });
            tokio::select! {
                () = self.stop() => break None,
                () = tokio::time::sleep(wait) => {}
            }
        };
        self.wind_down(last, &handlers, &cut).await;
    }

    /// Declares or verifies, then consumes: the broker may have come back without our queues.
    async fn subscribe(&self) -> Result<Subscription, Error> {
        let subscribing = async {
            self.engine.redeclare().await?;
            self.engine.link().consume(&self.how).await
        };
        tokio::select! {
            subscription = subscribing => subscription,
            () = self.stop() => Err(Error::new(ErrorKind::Closed, "stopped while connecting")),
        }
    }

    /// Runs jobs until the subscription ends or the consumer is told to stop.
    async fn serve(
        &self,
        mut subscription: Subscription,
        permits: &Arc<Semaphore>,
        handlers: &TaskTracker,
        cut: &CancellationToken,
    ) -> Ended {
        loop {
            let incoming = tokio::select! {
                biased;
                () = self.stop() => return Ended::Stopped(Some(subscription)),
                incoming = subscription.incoming.next() => incoming,
            };
            let incoming = match incoming {
                Some(Ok(incoming)) => incoming,
                Some(Err(error)) => return Ended::Lost(error),
                None => return Ended::Lost(self.cancelled_by_the_broker()),
            };
            let permit = tokio::select! {
                biased;
                () = self.stop() => {
                    self.give_back(incoming).await;
                    return Ended::Stopped(Some(subscription));
                }
                permit = Arc::clone(permits).acquire_owned() => permit,
            };
            // The semaphore is never closed.
            let Ok(permit) = permit else { return Ended::Stopped(Some(subscription)) };
            if let Some(job) = self.engine.admit(incoming) {
                handlers.spawn(self.attempt(job, permit, cut.clone()));
            }
        }
    }

    /// One attempt, in a task of its own: a panic or a timeout in the handler ends with it.
    fn attempt(
        &self,
        job: UnsettledJob,
        permit: OwnedSemaphorePermit,
        cut: CancellationToken,
    ) -> impl Future<Output = ()> + Send + 'static {
        let handler = Arc::clone(&self.handler);
        let after = self.handler_timeout;
        async move {
            // The timeout is inside, so that a panic of what it drops is caught as well.
            let call = async {
                let called = async { handler(job.job().clone()).await };
                let timely = tokio::time::timeout(after, called).await;
                timely.unwrap_or_else(|_| Err(TimedOut { after }.into()))
            };
            let result = tokio::select! {
                called = AssertUnwindSafe(call).catch_unwind() => {
                    called.unwrap_or_else(|payload| Err(Panicked::new(&*payload).into()))
                }
                () = cut.cancelled() => {
                    return job.give_back("its handler was cut short by the shutdown").await;
                }
            };
            // An error here would be the engine's own, and it has told of it.
            let _ = job.settle(result).await;
            drop(permit);
        }
    }

    async fn wind_down(
        &self,
        subscription: Option<Subscription>,
        handlers: &TaskTracker,
        cut: &CancellationToken,
    ) {
        let deadline = (*self.stopping.borrow()).map_or_else(Instant::now, |stop| stop.deadline);
        let mut subscription = subscription;
        if let Some(subscription) = &mut subscription {
            let _ = tokio::time::timeout(FAREWELL, async {
                subscription.control.cancel().await;
                while let Some(Ok(incoming)) = subscription.incoming.next().await {
                    self.give_back(incoming).await;
                }
            })
            .await;
        }
        handlers.close();
        if tokio::time::timeout_at(deadline, handlers.wait()).await.is_err() {
            cut.cancel();
        }
        // Outcomes that wait for a hand-off slot are waited for as long as the hand-offs are.
        let end = deadline.max(Instant::now() + FAREWELL);
        let _ = tokio::time::timeout_at(end, handlers.wait()).await;
        let left = end.saturating_duration_since(Instant::now());
        if let Err(error) = self.engine.close(left).await {
            tracing::warn!(queue = self.engine.queue(), %error, "stopped");
        }
        if let Some(subscription) = subscription {
            let _ = tokio::time::timeout(FAREWELL, subscription.control.close()).await;
        }
    }

    /// Of a job whose handler has not been called.
    async fn give_back(&self, incoming: Incoming) {
        incoming.tag.give_back().await;
    }

    async fn stop(&self) {
        // The sender lives as long as a handle does; without one nobody can give the order.
        if self.stopping.clone().wait_for(Option::is_some).await.is_err() {
            std::future::pending().await
        }
    }

    fn cancelled_by_the_broker(&self) -> Error {
        Error::new(
            ErrorKind::Connection,
            format!(
                "the broker cancelled the consumer of {:?}: the queue was deleted, its leader \
                 moved, or a handler outlasted the consumer timeout",
                self.how.queue
            ),
        )
    }
}

enum Ended {
    /// Told to stop; the subscription still has what is unanswered.
    Stopped(Option<Subscription>),
    Lost(Error),
}
