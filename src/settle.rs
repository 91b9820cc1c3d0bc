//! One delivery to its one end: acked, in a lane, back in its queue, or buried.

mod ack_book;
mod acks;
mod finished;
mod hand_off;
mod key;
mod made;
mod overdue;
mod pacing;
mod plan;
mod stuck;
mod suspects;
mod unsettled;
mod unwinding;

use std::{
    collections::HashSet,
    future::Future,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::{Duration, SystemTime},
};

use rand::rngs::SmallRng;
use tokio::{runtime::Handle, sync::watch, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use self::unsettled::{Receipt, Settled, Settling, UnsettledJob};
pub(crate) use self::{
    acks::Acks,
    overdue::Revoked,
    pacing::{Probe, Turn},
    plan::{Arrival, Move, Rules},
    suspects::Arrived,
    unsettled::Teller,
};
use self::{
    finished::Finished, hand_off::Leaving, overdue::Overdue, stuck::Owed, suspects::Custody,
};
use crate::{
    Error, ErrorKind, Event, Job, Settings, Topology,
    clock::{Clock, later},
    doctor::examine,
    event::emit,
    handoff::HandOff,
    link::{Broker, LINGER, LapinLink, Link, Subscribe, Subscription, Tag},
    pause::{Epoch, Pace, Pacing},
    policy::Verdict,
    topology::{about_permissions, declare, probe},
};

/// All that one work queue needs to settle its jobs.
#[derive(Debug)]
pub(crate) struct Engine {
    /// The work queue.
    queue: String,
    settings: Settings,
    rules: RwLock<Arc<Rules>>,
    /// One reload at a time, for each builds on the one before.
    reloading: tokio::sync::Mutex<()>,
    link: Arc<dyn Link>,
    handoff: HandOff,
    clock: Clock,
    rng: Mutex<SmallRng>,
    pacing: Mutex<Pacing>,
    pace: watch::Sender<Pace>,
    owed: Mutex<Owed>,
    finished: Mutex<Finished>,
    overdue: Overdue,
    custody: Custody,
    /// When the broker was last told of a delivery.
    answered: Mutex<Option<Instant>>,
    /// False while a consumer of ours takes jobs from the queue at full speed.
    quiet: watch::Sender<bool>,
    /// The queues made on first use that are known to be there. One at a time makes another, or
    /// declares again what went missing.
    made: tokio::sync::Mutex<HashSet<String>>,
    tasks: TaskTracker,
    /// Ends hand-offs that do not succeed; their jobs stay unacked.
    giving_up: CancellationToken,
    runtime: Handle,
}

impl Engine {
    /// Checks the settings, and makes or verifies the queues. Nothing is consumed before.
    pub(crate) async fn start(
        broker: Broker,
        queue: &str,
        settings: Settings,
    ) -> Result<Arc<Self>, Error> {
        settings.validate()?;
        let rules = Rules::new(queue, settings.clone(), settings.queue_type)?;
        let link: Arc<dyn Link> = Arc::new(LapinLink::new(broker, settings.confirm_timeout));
        let unchecked = probe(&*link, &rules.topology).await?;
        declare(&*link, &rules.topology, settings.declare).await?;
        examine(&*link, &rules.topology, &settings, unchecked).await?;
        let pacing = Pacing::new(settings.pauses, Instant::now());
        let engine = Arc::new(Self {
            queue: queue.to_owned(),
            handoff: HandOff::new(Arc::clone(&link), settings.hand_offs),
            rules: RwLock::new(Arc::new(rules)),
            reloading: tokio::sync::Mutex::default(),
            link,
            clock: Clock::start(),
            rng: Mutex::new(rand::make_rng()),
            pace: watch::Sender::new(pacing.pace()),
            pacing: Mutex::new(pacing),
            owed: Mutex::default(),
            finished: Mutex::new(Finished::new(settings.remember_done)),
            overdue: Overdue::default(),
            custody: Custody::default(),
            answered: Mutex::default(),
            quiet: watch::Sender::new(true),
            made: tokio::sync::Mutex::default(),
            tasks: TaskTracker::new(),
            giving_up: CancellationToken::new(),
            runtime: Handle::current(),
            settings,
        });
        let queues = engine.rules().topology.queues().len();
        engine.emit(&Event::Ready { queue: queue.to_owned(), queues });
        Ok(engine)
    }

    /// What these settings set of policies, pauses, classifiers and crash limit, from the next job on.
    /// New lanes are declared before they are used; running jobs are settled under the rules that
    /// they came in with.
    pub(crate) async fn reload(&self, settings: &Settings) -> Result<(), Error> {
        let _one_at_a_time = self.reloading.lock().await;
        let settings = self.rules().settings.clone().then(settings);
        settings.validate()?;
        let (queue, pauses) = (self.queue(), settings.pauses);
        let rules = Rules::new(&queue, settings, self.settings.queue_type)?;
        declare(&*self.link, &rules.topology, self.settings.declare).await?;
        let queues = rules.topology.queues().len();
        *self.rules.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(rules);
        self.reconfigure_pauses(pauses);
        self.emit(&Event::Ready { queue, queues });
        Ok(())
    }

    pub(crate) fn rules(&self) -> Arc<Rules> {
        Arc::clone(&self.rules.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn queue(&self) -> String {
        self.queue.clone()
    }

    pub(crate) fn topology(&self) -> Topology {
        self.rules().topology.clone()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.tasks.is_closed()
    }

    /// Alone: on a connection of its own, and job by job.
    pub(crate) async fn consume(
        &self,
        how: &Subscribe,
        alone: bool,
    ) -> Result<Subscription, Error> {
        let refused = |error| about_permissions(error, &how.queue);
        self.link.consume(how, alone).await.map_err(refused)
    }

    pub(crate) fn worker(&self) -> &str {
        &self.settings.worker
    }

    pub(crate) fn now(&self) -> SystemTime {
        self.clock.now()
    }

    pub(crate) fn at(&self, instant: Instant) -> SystemTime {
        self.clock.at(instant)
    }

    pub(crate) async fn until_broker_is_back(&self) {
        self.link.until_back().await;
    }

    pub(crate) fn is_blocked(&self) -> bool {
        self.link.is_blocked()
    }

    pub(crate) fn emit(&self, event: &Event) {
        emit(&self.queue, &self.settings.observers, event);
    }

    pub(crate) fn with_rng<T>(&self, f: impl FnOnce(&mut SmallRng) -> T) -> T {
        f(&mut self.rng.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Runs on the engine's runtime, so that it works from a `Drop` on any thread.
    pub(crate) fn spawn<F>(&self, task: F) -> tokio::task::JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send,
    {
        self.tasks.spawn_on(task, &self.runtime)
    }

    /// The same for what [`close`](Self::close) does not wait for.
    pub(crate) fn spawn_aside(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(task);
    }

    /// Verifies that the work queue is there.
    pub(crate) async fn check_queue(&self) -> Result<(), Error> {
        self.link.check(&self.queue).await
    }

    /// Waits until every job is settled and every ack and hand-off has come to its end, for at most
    /// `grace`. The channel may be closed after.
    pub(crate) async fn close(&self, grace: Duration) -> Result<(), Error> {
        self.tasks.close();
        let until = later(Instant::now(), grace);
        let ended = async || {
            self.until_none_is_unacked().await;
            self.tasks.wait().await;
        };
        while tokio::time::timeout_at(until, ended()).await.is_ok() {
            self.until_answers_are_read().await;
            // What was settled meanwhile is waited for as well.
            if self.tasks.is_empty() && self.unacked() == 0 {
                return Ok(());
            }
        }
        // With a task of ours, it is the task that did not succeed.
        let held = if self.tasks.is_empty() { self.unacked() } else { 0 };
        self.giving_up.cancel();
        self.handoff.close();
        let _ = tokio::time::timeout(Duration::from_secs(1), self.tasks.wait()).await;
        let queue = self.queue();
        let text = match held {
            0 => format!(
                "queue {queue:?}: some hand-offs or acks did not succeed within {grace:?}; their jobs \
                 stay unacked, and the broker delivers them again"
            ),
            held => format!(
                "queue {queue:?}: {held} {} not settled within {grace:?}, as with a handler that blocks \
                 its thread or an UnsettledJob that is kept; what is unacked when the channel closes is \
                 delivered again",
                if held == 1 { "job was" } else { "jobs were" }
            ),
        };
        Err(Error::new(ErrorKind::Closed, text))
    }

    /// Settles a job. One that is to leave has yet to be set on its way.
    pub(crate) fn settle(
        self: &Arc<Self>,
        job: Job,
        tag: Arc<dyn Tag>,
        (rules, epoch): (&Rules, Epoch),
        result: Result<(), anyhow::Error>,
        teller: Teller,
    ) -> Option<Leaving> {
        let verdict = Verdict::from_result(result, &rules.settings.classifiers);
        // First of all: no other job is to be started if the consumer is to pause.
        self.heed(&verdict, epoch);
        let Some(to) = rules.after_attempt(&job, verdict, self.now(), self.worker()) else {
            self.finished(&job);
            self.ack(job, tag, |job| Event::Done { job }, teller);
            return None;
        };
        Some(self.leaving(job, tag, Box::new(to)).telling(teller))
    }

    async fn ack_by(&self, tag: &dyn Tag, multiple: bool) -> bool {
        let told = tag.ack(multiple).await;
        self.note_answer();
        told
    }

    /// A channel that dies before takes with it what its broker has not worked off.
    async fn until_answers_are_read(&self) {
        let answered = *self.answered.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(answered) = answered {
            tokio::time::sleep_until(answered + LINGER).await;
        }
    }

    fn note_answer(&self) {
        let mut answered = self.answered.lock().unwrap_or_else(PoisonError::into_inner);
        *answered = Some(Instant::now());
    }

    /// Acks a job without a hand-off, and tells of it.
    pub(crate) fn ack(
        self: &Arc<Self>,
        job: Job,
        tag: Arc<dyn Tag>,
        event: fn(Job) -> Event,
        teller: Teller,
    ) {
        let engine = Arc::clone(self);
        self.ack_and_tell(tag, move |acked| {
            if acked {
                engine.emit(&event(job));
                teller.tell(Settled::Acked);
            } else {
                teller.tell(engine.given_up(&job));
            }
        });
    }

    /// Together with others, if it may be.
    fn ack_and_tell(self: &Arc<Self>, tag: Arc<dyn Tag>, told: impl FnOnce(bool) + Send + 'static) {
        if let Err(told) = tag.ack_with_others(Box::new(told)) {
            let engine = Arc::clone(self);
            self.spawn(async move { told(engine.ack_by(&*tag, false).await) });
        }
    }

    /// The job stays unacked, and the broker delivers it again.
    fn given_up(&self, job: &Job) -> Settled {
        self.emit(&Event::Stale { job: job.clone() });
        Settled::Stale
    }
}
