//! The loop of a consumer: subscribe, run jobs, and start over when the broker goes away.

use std::{
    panic::AssertUnwindSafe,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::{FutureExt, StreamExt};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    BoxHandler,
    health::Lost,
    intake::Intake,
    prefetch::{Prefetch, Wait, Waiting},
    reconnect::{Reconnect, STEADY, Tags, Tries, Try},
};
use crate::{
    Error, ErrorKind, Event, Panicked, TimedOut, UnsettledJob,
    clock::later,
    link::{Subscribe, Subscription, timeout_named},
    pause::Pace,
    policy::Suspicion,
    settle::{Engine, Probe, Revoked, Teller, Turn},
};

/// How long the broker may take to answer a cancel or a close before it is left alone.
pub(super) const FAREWELL: Duration = Duration::from_secs(5);

/// A wait that ends soon anyway is not worth a look whether the broker is back: its log tells of each.
const SOON: Duration = Duration::from_secs(2);

/// The order to stop.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stop {
    deadline: Instant,
}

impl Stop {
    pub(super) fn within(grace: Duration) -> Self {
        Self { deadline: later(Instant::now(), grace) }
    }
}

pub(super) struct Run {
    pub(super) engine: Arc<Engine>,
    pub(super) how: Subscribe,
    pub(super) tags: Mutex<Tags>,
    pub(super) handler: BoxHandler,
    pub(super) permits: Arc<Semaphore>,
    pub(super) handler_timeout: Duration,
    pub(super) stopping: watch::Receiver<Option<Stop>>,
    pub(super) handlers: TaskTracker,
    /// Ends the handlers that outlast a shutdown.
    pub(super) cut: CancellationToken,
    pub(super) reconnect: Reconnect,
    /// The broker was lost since our queues were last declared or verified.
    pub(super) lost: watch::Sender<Option<Lost>>,
}

impl Run {
    /// An error says what was left undone at the stop.
    pub(super) async fn until_stopped(self, first: Subscription) -> Result<(), Error> {
        let mut tries = Tries::new(self.reconnect);
        let mut prefetch = Prefetch::new(self.how.prefetch, self.permits.available_permits());
        let mut next = Some(first);
        let mut one_by_one = false;
        let mut gave_up = None;
        let last = loop {
            let started = Instant::now();
            let ended = match next.take() {
                Some(subscription) => self.serve(subscription, tries.alone, &mut prefetch).await,
                None if !self.engine.is_open() => self.sit_out(tries.alone).await,
                None if one_by_one => self.one_by_one(tries.alone).await,
                None => match self.subscribe(prefetch.now(), tries.alone).await {
                    Ok(subscription) => {
                        self.engine.consuming();
                        next = Some(subscription);
                        continue;
                    }
                    Err(error) => Ended::Lost(error),
                },
            };
            let error = match ended {
                Ended::Stopped(intake) => break intake,
                Ended::Paused => continue,
                Ended::Suspect => {
                    one_by_one = true;
                    continue;
                }
                Ended::NoSuspects => {
                    one_by_one = false;
                    continue;
                }
                Ended::Readable => {
                    tries = Tries::new(self.reconnect);
                    continue;
                }
                Ended::Lost(error) => error,
            };
            self.engine.quiet();
            self.engine.suspects().expect_back(self.how.prefetch);
            // Stopped while it connected: that is no news.
            if self.stopping.borrow().is_some() {
                break None;
            }
            let (kind, consumed) = (error.kind(), self.lost.borrow().is_none());
            let ended = Try { error: kind, lasted: started.elapsed(), consumed };
            self.note_lost(&error);
            let Some(wait) = self.engine.with_rng(|rng| tries.after(ended, rng)) else {
                gave_up = Some(self.give_up_for_good(tries.failed(), &error));
                break None;
            };
            self.engine.emit(&Event::Disconnected { queue: self.how.queue.clone(), error, wait });
            tokio::select! {
                () = self.stop() => break None,
                () = tokio::time::sleep(wait) => {}
                // Those who share a connection draw again how soon it is opened.
                () = self.engine.until_broker_is_back(),
                    if kind == ErrorKind::Connection && wait > SOON => {}
            }
        };
        let wound_down = self.wind_down(last).await;
        gave_up.map_or(wound_down, Err)
    }

    fn note_lost(&self, error: &Error) {
        self.lost.send_modify(|lost| Lost::note(lost, error, self.engine.now()));
    }

    fn give_up_for_good(&self, tries: u32, last: &Error) -> Error {
        let queue = self.how.queue.clone();
        let text = format!("queue {queue:?}: {tries} failed tries to consume in a row; the last: ");
        let error = Error::new(last.kind(), format!("{text}{last}")).because(last.clone());
        self.engine.emit(&Event::GaveUp { queue, error: error.clone() });
        error
    }

    /// Consumes; after a loss it first declares or verifies, for the broker may have come back
    /// without our queues.
    pub(super) async fn subscribe(
        &self,
        prefetch: u16,
        alone: bool,
    ) -> Result<Subscription, Error> {
        // The broker refuses a consumer tag that it has cancelled.
        let tag = self.tags.lock().unwrap_or_else(PoisonError::into_inner).next();
        let how = Subscribe { prefetch, tag, ..self.how.clone() };
        let subscribing = async {
            if self.lost.borrow().is_some() {
                self.engine.redeclare().await?;
            }
            self.engine.consume(&how, alone).await
        };
        tokio::select! {
            subscription = subscribing => {
                match &subscription {
                    Ok(_) => drop(self.lost.send_replace(None)),
                    Err(error) => self.note_lost(error),
                }
                subscription
            }
            () = self.stop() => Err(Error::new(ErrorKind::Closed, "stopped while connecting")),
        }
    }

    /// Runs jobs until the subscription ends, or the consumer is to pause or to stop.
    async fn serve(
        &self,
        subscription: Subscription,
        alone: bool,
        prefetch: &mut Prefetch,
    ) -> Ended {
        let mut intake = Intake::new(&self.engine, subscription);
        let mut waiting = Waiting::new(self.engine.longest_wait());
        let mut readable = false;
        // Made once: a job costs no new watcher.
        let (mut stop, mut pause) = (pin!(self.stop()), pin!(self.engine.until_not_open()));
        let mut steady = pin!(tokio::time::sleep(STEADY));
        // Alone it goes job by job. As many as were prefetched when the connection died of one of
        // them must be read, or none come any more, before they are known to be readable.
        let (mut judging, mut unread, mut idle) = (alone, self.how.prefetch, false);
        loop {
            if readable && intake.arrived.is_empty() {
                return Ended::Readable;
            }
            let incoming = tokio::select! {
                biased;
                () = &mut stop => return Ended::Stopped(Some(intake)),
                () = &mut pause => {
                    self.give_up(intake).await;
                    return Ended::Paused;
                }
                () = &mut steady, if judging => {
                    // A job at work keeps the next one from coming, and nothing is known of that;
                    // and one that has just ended may be followed by it.
                    let nothing = self.handlers.is_empty() && intake.arrived.is_empty();
                    if nothing && idle {
                        unread = 0;
                    }
                    idle = nothing;
                    steady.as_mut().reset(Instant::now() + STEADY);
                    continue;
                }
                () = std::future::ready(()), if judging && unread == 0 => {
                    // What has been delivered still comes out, and is answered on this channel.
                    let cancelling = intake.subscription.control.cancel();
                    let _ = tokio::time::timeout(FAREWELL, cancelling).await;
                    judging = false;
                    continue;
                }
                incoming = intake.subscription.incoming.next(), if !readable => incoming,
                () = waiting.next_look() => {
                    match waiting.judge(intake.arrived.front().map(|first| first.job.received())) {
                        Wait::TooLong => return self.thin_out(intake, &waiting, prefetch).await,
                        Wait::ShortForLong if prefetch.is_low() => {
                            return self.fill_up(intake, prefetch).await;
                        }
                        Wait::Short | Wait::ShortForLong => continue,
                    }
                }
                permit = self.permit(), if !intake.arrived.is_empty() => {
                    waiting.started();
                    if let Some(job) = intake.arrived.pop_front().and_then(|a| self.engine.admit(a)) {
                        self.handlers.spawn(self.attempt(job, Turn::Open, permit));
                    }
                    continue;
                }
            };
            let incoming = match incoming {
                Some(Ok(incoming)) => {
                    if judging {
                        unread = unread.saturating_sub(1);
                        idle = false;
                        steady.as_mut().reset(Instant::now() + STEADY);
                    }
                    incoming
                }
                Some(Err(error)) => return self.lost(intake, Some(error)),
                // What came before is still to be run.
                None if alone && !judging => {
                    readable = true;
                    continue;
                }
                None => return self.lost(intake, None),
            };
            let arrived = self.engine.arrive(incoming, &intake.acks);
            if arrived.suspicion.is_suspect() {
                return self.meet_suspect(intake, arrived).await;
            }
            intake.arrived.push_back(arrived);
        }
    }

    /// The consumer has ended, and what it delivered is no longer ours.
    pub(super) fn lost(&self, intake: Intake, end: Option<Error>) -> Ended {
        let (why, error) = match end {
            Some(error) => (timeout_named(&error.to_string()).map(Revoked::TimedOut), error),
            None => (Some(Revoked::Cancelled), self.cancelled_by_the_broker()),
        };
        if let Some(why) = why {
            self.engine.revoked(&intake.acks, why);
        }
        // Not admitted, each of them emits that it is stale.
        intake.arrived.into_iter().for_each(|arrived| drop(self.engine.admit(arrived)));
        Ended::Lost(error)
    }

    /// Waits for the end of a pause. After each wait one job is tried.
    async fn sit_out(&self, alone: bool) -> Ended {
        let turn = tokio::select! {
            biased;
            () = self.stop() => return Ended::Stopped(None),
            turn = self.engine.turn() => turn,
        };
        let Turn::Probe(probe) = turn else { return Ended::Paused };
        let clear = tokio::select! {
            biased;
            () = self.stop() => return Ended::Stopped(None),
            clear = self.engine.is_way_clear() => clear,
        };
        if !clear {
            return Ended::Paused;
        }
        if let Err(error) = self.try_one(probe, alone).await {
            return Ended::Lost(error);
        }
        // The job that is tried decides how it goes on.
        tokio::select! {
            biased;
            () = self.stop() => Ended::Stopped(None),
            () = self.engine.pace_other_than(Pace::Probing) => Ended::Paused,
        }
    }

    /// Starts one job, and takes no second one: the consumer that fetched it is cancelled before.
    async fn try_one(&self, probe: Probe, alone: bool) -> Result<(), Error> {
        // Ends the probe: told to stop; or resumed, by hand or by a new configuration.
        let over = async {
            tokio::select! {
                () = self.stop() => {}
                () = self.engine.pace_other_than(Pace::Probing) => {}
            }
        };
        let mut over = pin!(over);
        // First of all, so that no job waits here for a handler to end.
        let permit = tokio::select! {
            biased;
            () = &mut over => return Ok(()),
            permit = self.permit() => permit,
        };
        let mut intake = Intake::new(&self.engine, self.subscribe(1, alone).await?);
        let job = loop {
            let incoming = tokio::select! {
                biased;
                () = &mut over => break None,
                incoming = intake.subscription.incoming.next() => incoming,
            };
            let arrived = match incoming {
                Some(Ok(incoming)) => self.engine.arrive(incoming, &intake.acks),
                Some(Err(error)) => return Err(error),
                None => return Err(self.cancelled_by_the_broker()),
            };
            if arrived.suspicion == Suspicion::Alone {
                tokio::select! {
                    biased;
                    () = &mut over => {
                        intake.arrived.push_back(arrived);
                        break None;
                    }
                    () = self.engine.until_in_hand(1) => {}
                }
            }
            if let Some(job) = self.engine.admit(arrived) {
                break Some(job);
            }
        };
        self.give_up(intake).await;
        if let Some(job) = job {
            self.handlers.spawn(self.attempt(job, Turn::Probe(probe), permit));
        }
        Ok(())
    }

    pub(super) async fn permit(&self) -> OwnedSemaphorePermit {
        // The semaphore is never closed.
        Arc::clone(&self.permits).acquire_owned().await.expect("an open semaphore")
    }

    /// One attempt, in a task of its own: a panic or a timeout in the handler ends with it. Each job
    /// has one, so what is rare is out of the way, in a box.
    pub(super) fn attempt(
        &self,
        mut job: UnsettledJob,
        turn: Turn,
        permit: OwnedSemaphorePermit,
    ) -> impl Future<Output = ()> + Send + 'static {
        let handler = Arc::clone(&self.handler);
        let (engine, most) = (Arc::clone(&self.engine), self.handler_timeout);
        let cut = self.cut.clone();
        async move {
            if !job.is_due() {
                Box::pin(job.until_due()).await;
            }
            if !job.start(turn) {
                // A pause has begun since it came in.
                drop(permit);
                return Box::pin(job.set_aside()).await;
            }
            let after = engine.time_to_run(job.job(), most);
            // The timeout is inside, so that a panic of what it drops is caught as well.
            let call = async {
                let called = async { handler(job.job().clone()).await };
                let timely = tokio::time::timeout(after, called).await;
                timely.unwrap_or_else(|_| Err(TimedOut { after }.into()))
            };
            let result = tokio::select! {
                // A handler that does not wait costs no watch for the shutdown.
                biased;
                called = AssertUnwindSafe(call).catch_unwind() => {
                    called.unwrap_or_else(|payload| Err(Panicked::by(payload).into()))
                }
                () = cut.cancelled() => {
                    let why = "its handler was cut short by the shutdown";
                    return Box::pin(job.give_back(why)).await;
                }
            };
            job.settle_keeping(result, Teller::nobody(), permit);
        }
    }

    async fn wind_down(&self, intake: Option<Intake>) -> Result<(), Error> {
        let deadline = (*self.stopping.borrow()).map_or_else(Instant::now, |stop| stop.deadline);
        let control = intake.as_ref().map(|intake| Arc::clone(&intake.subscription.control));
        if let Some(intake) = intake {
            self.give_up(intake).await;
        }
        self.engine.quiet();
        self.handlers.close();
        if tokio::time::timeout_at(deadline, self.handlers.wait()).await.is_err() {
            self.cut.cancel();
        }
        // Those that were cut short give their jobs back. Outcomes that wait for a hand-off slot are waited
        // for with the hand-offs.
        let end = deadline.max(Instant::now() + FAREWELL).min(later(deadline, FAREWELL));
        let _ = tokio::time::timeout_at(end, self.handlers.wait()).await;
        let left = end.saturating_duration_since(Instant::now());
        let closed = self.engine.close(left).await;
        if let Err(error) = &closed {
            tracing::warn!(queue = self.engine.queue(), %error, "stopped");
        }
        if let Some(control) = control {
            let close_by = end.min(Instant::now() + FAREWELL);
            let _ = tokio::time::timeout_at(close_by, control.close()).await;
        }
        closed
    }

    pub(super) async fn stop(&self) {
        // The sender lives as long as a handle does; without one nobody can give the order.
        if self.stopping.clone().wait_for(Option::is_some).await.is_err() {
            std::future::pending().await
        }
    }

    pub(super) fn cancelled_by_the_broker(&self) -> Error {
        Error::new(
            ErrorKind::Connection,
            format!(
                "the broker cancelled the consumer of {:?}: the queue was deleted, its leader \
                 moved, or a handler outlasted the consumer timeout; the broker's log says which. \
                 For the last, shorten handler_timeout or raise the timeout, and name it with \
                 Builder::consumer_timeout",
                self.how.queue
            ),
        )
    }
}

pub(super) enum Ended {
    /// Told to stop; the intake still has what is unanswered.
    Stopped(Option<Intake>),
    /// The consumer is to pause, or a pause is over: look again.
    Paused,
    /// It has met a job that may have ended another process.
    Suspect,
    /// It took jobs one by one, and the suspects among them are through.
    NoSuspects,
    /// It consumed alone, and all that it met could be read.
    Readable,
    Lost(Error),
}
