//! The guard of a job that is not settled yet, and what is heard of it after.

use std::{
    future::{Future, IntoFuture},
    ops::Deref,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::SystemTime,
};

use tokio::{sync::oneshot, time::Instant};

use super::{Arrived, Engine, Leaving, Probe, Rules, Turn, unwinding::Unwinding};
use crate::{Error, Event, Job, Panicked, event::Postponed, link::Tag, pause::Epoch};

const DROPPED: &str = "dropped without being settled";

/// A job whose outcome is still open. It derefs to its [`Job`].
///
/// [`settle`](Self::settle) consumes it. Dropped unsettled, with a warning,
///
/// - by a panic, it has failed: [`FailureKind::Panic`](crate::FailureKind::Panic). If the same panic drops
///   several jobs, none of them is charged, and they come back like jobs that are busy;
/// - otherwise it is requeued if it was never delivered before, and the broker delivers it again at
///   once. The next time it comes back like a job that is busy, so that nothing spins, and no delivery
///   limit is used up. The 101st time in a row is charged as one failure.
#[must_use = "a job that is dropped unsettled goes back to its queue"]
#[derive(Debug)]
pub struct UnsettledJob {
    job: Job,
    engine: Arc<Engine>,
    /// Those it was admitted under; a reload does not change them.
    rules: Arc<Rules>,
    due: Option<Instant>,
    /// In which its handler was started.
    epoch: Epoch,
    /// Held while the handler of the job that is tried runs.
    probe: Option<Probe>,
    /// Taken when the job is settled.
    tag: Option<Arc<dyn Tag>>,
}

impl UnsettledJob {
    pub(crate) fn new(
        engine: Arc<Engine>,
        rules: Arc<Rules>,
        job: Job,
        tag: Arc<dyn Tag>,
        due: Option<Instant>,
    ) -> Self {
        let epoch = Epoch::default();
        Self { job, engine, rules, due, epoch, probe: None, tag: Some(tag) }
    }

    /// Asked at the last moment before its handler is called. False if the consumer pauses, and
    /// this is not the job that is tried.
    pub(crate) fn start(&mut self, turn: Turn) -> bool {
        self.probe = match turn {
            Turn::Open => None,
            Turn::Probe(probe) => Some(probe),
        };
        let epoch = self.engine.may_start(self.probe.as_ref());
        self.epoch = epoch.unwrap_or_default();
        if let (Some(_), Some(tag)) = (epoch, &self.tag) {
            tag.runs(true);
        }
        Unwinding::is_over();
        epoch.is_some()
    }

    /// Whether somebody else has it: a handler, or a loop of the user's own.
    fn is_started(&self) -> bool {
        self.epoch != Epoch::default()
    }

    /// False once its channel is dead: the broker delivers the job again.
    pub(crate) fn is_usable(&self) -> bool {
        self.tag.as_ref().is_some_and(|tag| tag.usable())
    }

    /// Whether nothing is left of its wait.
    pub(crate) fn is_due(&self) -> bool {
        self.due.is_none()
    }

    /// Waits out what is left of a wait and shorter than a second.
    pub(crate) async fn until_due(&self) {
        if let Some(due) = self.due {
            tokio::time::sleep_until(due).await;
        }
    }

    /// The job, to be handed to a handler.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// Acks the job after a success; after an error sends it to its next level, or buries it.
    ///
    /// Returns when the outcome is accepted: at once for a success or an outage, for another failure
    /// when its turn for a hand-off has come ([`Settings::hand_offs`](crate::Settings::hand_offs)), so
    /// that a loop that settles one job after the other still has many hand-offs in flight. The broker's
    /// confirm and the ack follow by themselves; await the [`Receipt`] to hear of them.
    ///
    /// # Errors
    /// None today. A dead channel is no error: the broker delivers the job again, and the receipt
    /// says [`Settled::Stale`].
    pub async fn settle<E: Into<anyhow::Error>>(
        self,
        result: Result<(), E>,
    ) -> Result<Receipt, Error> {
        let (receipt, teller) = Receipt::new();
        let (held, accepted) = result.is_err().then(oneshot::channel::<()>).unzip();
        self.settle_keeping(result.map_err(Into::into), teller, held);
        if let Some(accepted) = accepted {
            // Nothing is ever sent. Where nothing is to be waited for it returns at once, as often as
            // it is asked.
            let _ = tokio::task::unconstrained(accepted).await;
        }
        Ok(receipt)
    }

    /// The same without a wait: what is held is let go of when the outcome is accepted.
    pub(crate) fn settle_keeping(
        mut self,
        result: Result<(), anyhow::Error>,
        teller: Teller,
        held: impl Send + 'static,
    ) {
        let tag = self.tag.take().expect("only settling takes the tag, and it consumes the job");
        tag.runs(false);
        let under = (&*self.rules, self.epoch);
        if let Some(leaving) = self.engine.settle(self.job.clone(), tag, under, result, teller) {
            leaving.go_holding(held);
        }
    }

    /// Gives back a job whose handler was not called, for the consumer pauses.
    pub(crate) async fn set_aside(mut self) {
        if let Some(tag) = self.tag.take() {
            // Before, it would come to this very worker again.
            self.engine.until_quiet().await;
            self.engine.set_aside(Arrived::again(self.job.clone(), tag)).await;
        }
    }

    /// Gives back a job whose handler was cut short.
    pub(crate) async fn give_back(mut self, why: &'static str) {
        let Some(tag) = self.tag.take() else { return };
        let job = self.job.clone();
        let usable = tag.usable();
        let given_back = self.engine.set_aside(Arrived::again(job.clone(), tag)).await && usable;
        self.engine.emit(&if given_back {
            Event::GivenBack { job, why }
        } else {
            Event::Stale { job }
        });
    }
}

impl Deref for UnsettledJob {
    type Target = Job;

    fn deref(&self) -> &Job {
        &self.job
    }
}

impl Drop for UnsettledJob {
    fn drop(&mut self) {
        let Some(tag) = self.tag.take() else { return };
        let unwinding = if self.is_started() { Unwinding::count() } else { None };
        let (engine, job, rules) =
            (Arc::clone(&self.engine), self.job.clone(), Arc::clone(&self.rules));
        let (epoch, probe) = (self.epoch, self.probe.take());
        self.engine.spawn(async move {
            match unwinding {
                None => engine.dropped(job, tag, &rules).await,
                Some(unwinding) if unwinding.dropped_one().await => {
                    let panicked = Panicked::new("its job was dropped by the panic");
                    let under = (&*rules, epoch);
                    let teller = Teller::nobody();
                    let leaving = engine.settle(job, tag, under, Err(panicked.into()), teller);
                    leaving.into_iter().for_each(Leaving::go);
                }
                Some(_) => engine.postpone(job, tag, &rules, "dropped by a panic with others"),
            }
            drop(probe);
        });
    }
}

impl Engine {
    /// Of no fault that is known. Requeued at once it would spin, if its loop drops it each time; and
    /// each time is a step towards the delivery limit of a quorum queue. So that no worker has to keep
    /// count, only a first delivery is requeued.
    async fn dropped(self: &Arc<Self>, job: Job, tag: Arc<dyn Tag>, rules: &Rules) {
        if job.redelivered() || job.message().delivery_count() > 0 || job.story().crash_count > 0 {
            return self.postpone(job, tag, rules, DROPPED);
        }
        let given_back = self.give_back(&job, &*tag).await;
        let why = DROPPED;
        self.emit(&if given_back { Event::GivenBack { job, why } } else { Event::Stale { job } });
    }

    fn postpone(self: &Arc<Self>, job: Job, tag: Arc<dyn Tag>, rules: &Rules, error: &str) {
        let why = (Postponed::Dropped, error);
        let to = rules.postpone(&job, why, self.now(), self.worker());
        if let Some(to) = to {
            self.leaving(job, tag, Box::new(to)).go();
        }
    }
}

/// What happened to a job in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Settled {
    /// It is done and acked.
    Acked,
    /// Its copy is in a lane, confirmed, and the original is acked.
    #[non_exhaustive]
    Retried {
        /// The level it is on now, from 1.
        level: u32,
        /// When it is run again: the end of the whole wait, through however many lanes.
        due: SystemTime,
    },
    /// It waits in a lane without being charged: it was busy, or its time has not come.
    #[non_exhaustive]
    Postponed {
        /// When it is run, after all lanes that it still has to go through.
        due: SystemTime,
    },
    /// It is back at the tail of its work queue, unharmed, and the consumer pauses.
    Returned,
    /// It is in the buried queue.
    Buried,
    /// Its channel died, or its hand-off had not succeeded when it had to be given back or the work
    /// ended: the broker delivers it again. Its copy may be there all the same.
    Stale,
}

/// What [`UnsettledJob::settle`] returns: await it to hear what happened in the end. To drop it
/// cancels nothing.
#[derive(Debug)]
pub struct Receipt(oneshot::Receiver<Settled>);

impl Receipt {
    pub(super) fn new() -> (Self, Teller) {
        let (tell, told) = oneshot::channel();
        (Self(told), Teller(Some(tell)))
    }
}

/// Tells whoever has the receipt.
pub(crate) struct Teller(Option<oneshot::Sender<Settled>>);

impl Teller {
    /// There is no receipt.
    pub(crate) fn nobody() -> Self {
        Self(None)
    }

    pub(super) fn tell(self, settled: Settled) {
        if let Some(tell) = self.0 {
            // It may have been dropped.
            let _ = tell.send(settled);
        }
    }
}

impl IntoFuture for Receipt {
    type Output = Settled;
    type IntoFuture = Settling;

    fn into_future(self) -> Settling {
        Settling(self.0)
    }
}

/// The future of a [`Receipt`].
#[derive(Debug)]
pub struct Settling(oneshot::Receiver<Settled>);

impl Future for Settling {
    type Output = Settled;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Settled> {
        // Without an answer the runtime has gone, and then nothing was acked.
        Pin::new(&mut self.0).poll(cx).map(|settled| settled.unwrap_or(Settled::Stale))
    }
}
