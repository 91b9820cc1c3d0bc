//! One delivery to its one end: acked, in a lane, back in its queue, or buried.

mod ack_book;
mod acks;
mod finished;
mod key;
mod made;
mod pacing;
mod plan;
mod stuck;
mod suspects;
mod unsettled;

use std::{
    collections::HashSet,
    future::Future,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::{Duration, SystemTime},
};

use rand::rngs::SmallRng;
use tokio::{
    runtime::Handle,
    sync::{oneshot, watch},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use self::unsettled::{Receipt, Settled, Settling, UnsettledJob};
pub(crate) use self::{
    acks::Acks,
    pacing::{Probe, Turn},
    plan::{Arrival, Move, Rules},
    suspects::Arrived,
};
use self::{
    finished::Finished,
    plan::To,
    stuck::{Next, Owed, Trouble},
    suspects::Custody,
};
use crate::{
    BuriedReason, Error, ErrorKind, Event, Job, Settings, Topology,
    clock::Clock,
    doctor::examine,
    event::emit,
    handoff::{HandOff, Slot},
    link::{Broker, Confirmed, LINGER, LapinLink, Link, Subscribe, Subscription, Tag},
    message::{Copier, Outgoing, TooLarge},
    pause::{Epoch, Pace, Pacing},
    policy::Verdict,
    topology::{about_permissions, declare},
};

/// All that one work queue needs to settle its jobs.
#[derive(Debug)]
pub(crate) struct Engine {
    /// The work queue.
    queue: String,
    settings: Settings,
    rules: RwLock<Arc<Rules>>,
    link: Arc<dyn Link>,
    handoff: HandOff,
    clock: Clock,
    rng: Mutex<SmallRng>,
    pacing: Mutex<Pacing>,
    pace: watch::Sender<Pace>,
    owed: Mutex<Owed>,
    finished: Mutex<Finished>,
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
        let rules = Rules::new(queue, &settings, settings.queue_type)?;
        let link: Arc<dyn Link> = Arc::new(LapinLink::new(broker, settings.confirm_timeout));
        declare(&*link, &rules.topology, settings.declare).await?;
        examine(&*link, &rules.topology, &settings).await?;
        let pacing = Pacing::new(settings.pauses, Instant::now());
        let engine = Arc::new(Self {
            queue: queue.to_owned(),
            handoff: HandOff::new(Arc::clone(&link), settings.hand_offs),
            rules: RwLock::new(Arc::new(rules)),
            link,
            clock: Clock::start(),
            rng: Mutex::new(rand::make_rng()),
            pace: watch::Sender::new(pacing.pace()),
            pacing: Mutex::new(pacing),
            owed: Mutex::default(),
            finished: Mutex::new(Finished::new(settings.remember_done)),
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

    /// Other policies, pauses and classifiers from the next job on. Their lanes are made before
    /// they are used; jobs at work are settled under the rules that they came in with.
    pub(crate) async fn reload(&self, settings: &Settings) -> Result<(), Error> {
        settings.validate()?;
        let queue = self.queue();
        let rules = Rules::new(&queue, settings, self.settings.queue_type)?;
        declare(&*self.link, &rules.topology, self.settings.declare).await?;
        let queues = rules.topology.queues().len();
        *self.rules.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(rules);
        self.reconfigure_pauses(settings.pauses);
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

    /// Waits until every ack and hand-off has come to its end, for at most `grace`. The channel may
    /// be closed after.
    pub(crate) async fn close(&self, grace: Duration) -> Result<(), Error> {
        self.tasks.close();
        if tokio::time::timeout(grace, self.tasks.wait()).await.is_ok() {
            self.until_answers_are_read().await;
            return Ok(());
        }
        self.giving_up.cancel();
        let left = self.tasks.len();
        let _ = tokio::time::timeout(Duration::from_secs(1), self.tasks.wait()).await;
        Err(Error::new(
            ErrorKind::Closed,
            format!(
                "queue {:?}: {left} hand-offs or acks did not succeed within {grace:?}; their jobs \
                 stay unacked, and the broker delivers them again",
                self.queue()
            ),
        ))
    }

    /// Settles a job. The outcome of a failure is accepted once there is a free hand-off slot for it:
    /// then whoever settled may go on. The ack and the confirm follow.
    pub(crate) fn settle(
        self: &Arc<Self>,
        job: Job,
        tag: Arc<dyn Tag>,
        (rules, epoch): (&Rules, Epoch),
        result: Result<(), anyhow::Error>,
    ) -> (Receipt, Option<oneshot::Receiver<()>>) {
        let verdict = Verdict::from_result(result, &rules.classifiers);
        // First of all: no other job is to be started if the consumer is to pause.
        self.heed(&verdict, epoch);
        let (receipt, tell) = Receipt::new();
        let to = rules.after_attempt(&job, verdict, self.now(), self.worker());
        let Some(to) = to.map(Box::new) else {
            self.finished(&job);
            self.ack(job, tag, |job| Event::Done { job }, tell);
            return (receipt, None);
        };
        let (engine, free) = (Arc::clone(self), self.free_slot());
        let (accepted, accepting) = free.is_none().then(oneshot::channel::<()>).unzip();
        // The wait for a slot is part of the task, so that close() knows of it, and a caller who
        // gives up waiting leaves no job behind that nobody settles.
        self.spawn(async move {
            let slot = match free {
                Some(slot) => Some(slot),
                None => engine.slot().await,
            };
            drop(accepted);
            tell(match slot {
                Some(slot) => engine.hand_off(Some(slot), &job, &*tag, to).await,
                None => engine.given_up(&job),
            });
        });
        (receipt, accepting)
    }

    /// A hand-off slot that nobody has to wait for.
    fn free_slot(&self) -> Option<Slot> {
        if self.giving_up.is_cancelled() { None } else { self.handoff.free_slot() }
    }

    /// A free hand-off slot; none if it is too late for one.
    async fn slot(&self) -> Option<Slot> {
        tokio::select! {
            biased;
            () = self.giving_up.cancelled() => None,
            slot = self.handoff.slot() => Some(slot),
        }
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
        tell: impl FnOnce(Settled) + Send + 'static,
    ) {
        let engine = Arc::clone(self);
        let told = Box::new(move |acked| {
            if acked {
                engine.emit(&event(job));
                tell(Settled::Acked);
            } else {
                tell(engine.given_up(&job));
            }
        });
        if let Err(told) = tag.ack_with_others(told) {
            let engine = Arc::clone(self);
            self.spawn(async move { told(engine.ack_by(&*tag, false).await) });
        }
    }

    /// The job stays unacked, and the broker delivers it again.
    fn given_up(&self, job: &Job) -> Settled {
        self.emit(&Event::Stale { job: job.clone() });
        Settled::Stale
    }

    /// The safety rule: publish the copy, wait for its confirm, and only then ack the original.
    /// While it fails the original stays unacked, and it is tried again.
    pub(crate) fn hand_off(
        &self,
        slot: Option<Slot>,
        job: &Job,
        tag: &dyn Tag,
        to: Box<Move>,
    ) -> impl Future<Output = Settled> + Send {
        self.hand_off_again(slot, job, tag, to, false)
    }

    /// The same for one that may be owed: it has failed for long, before it was given back.
    ///
    /// Of each job that fails this is kept until its ack, so what is rare is out of the way, in a box.
    pub(crate) async fn hand_off_again(
        &self,
        mut slot: Option<Slot>,
        job: &Job,
        tag: &dyn Tag,
        mut to: Box<Move>,
        owed: bool,
    ) -> Settled {
        if let To::WorkQueue | To::Alone = to.to {
            drop(slot.take());
            Box::pin(self.until_quiet()).await;
        }
        let mut trouble = Trouble::new(self, job, owed);
        let (mut tries, mut alone) = (0, false);
        let (event, settled, queue) = loop {
            let slot = match slot.take() {
                Some(slot) => slot,
                None => match self.slot().await {
                    Some(slot) => slot,
                    None => return self.given_up(job),
                },
            };
            // The broker delivers it again, so a copy would be one too many.
            if !tag.usable() {
                if owed {
                    self.still_owed(job, to);
                }
                return self.given_up(job);
            }
            let (copy, event, settled) = self.copy(job, &mut to);
            let queue = copy.queue.clone();
            let answer = match self.make_on_first_use(&queue).await {
                Ok(()) => tokio::select! {
                    biased;
                    answer = self.handoff.publish(copy, slot, alone) => answer,
                    // The original is not acked, so nothing is lost.
                    () = self.giving_up.cancelled() => return self.given_up(job),
                },
                Err(error) => {
                    drop(slot);
                    Confirmed::NotSent(error)
                }
            };
            let crowded = matches!(answer, Confirmed::Crowded(_));
            let (why, undecided) = match answer {
                Confirmed::Yes => break (event, settled, queue),
                Confirmed::Returned(why) => {
                    (Box::pin(self.declare_again(to.lane(), &queue, &why)).await, false)
                }
                Confirmed::Nacked => {
                    ("the queue refused it: it is full, or not there".into(), false)
                }
                Confirmed::NotSent(error) => {
                    (about_permissions(error, &self.queue()).to_string(), false)
                }
                Confirmed::Undecided(connection, why) => {
                    // Nothing is published again through a connection that left it undecided.
                    self.link.retire(connection);
                    (why, true)
                }
                Confirmed::Crowded(why) => (why, true),
            };
            tries += 1;
            self.emit(&Event::HandOffFailed {
                job: job.clone(),
                queue: queue.clone(),
                why: why.clone(),
                undecided,
                tries,
                stuck: trouble.is_stuck(),
            });
            if crowded {
                // No reason to wait: alone it is told what becomes of it.
                alone = true;
                continue;
            }
            match Box::pin(trouble.next(&queue, &why)).await {
                Next::Try => {}
                Next::GiveBack => {
                    return Box::pin(self.give_back_owed(job, tag, to, (queue, &why))).await;
                }
                Next::GiveUp => return self.given_up(job),
            }
        };
        // Never a reason to publish again: the job will be seen again.
        if !self.ack_by(tag, false).await {
            self.emit(&Event::Duplicated { job: job.clone() });
        }
        self.emit(&event);
        self.reached(&queue);
        settled
    }

    /// The copy for one try, what to say when it is confirmed, and what became of the job.
    fn copy(&self, job: &Job, to: &mut Move) -> (Box<Outgoing>, Event, Settled) {
        let limits = self.link.limits();
        let queue = self.queue.as_str();
        let copier = Copier { work_queue: queue, user: &limits.user, frame_max: limits.frame_max };
        let (message, id, now) = (job.message(), job.id(), self.now());
        let reason = match to.onward(job, queue, now) {
            Ok(onward) => {
                match copier.onward(message, id, &mut to.story, &onward.queue, onward.delay_ms) {
                    Ok(copy) => return (Box::new(copy), onward.event, onward.settled),
                    Err(TooLarge) => {
                        to.story.stay_on_level_of(job.story());
                        BuriedReason::TooLarge
                    }
                }
            }
            Err(reason) => reason,
        };
        let buried = &self.rules().topology.buried().name.clone();
        let story = to.story.clone();
        let (copy, reason) =
            copier.burial(message, id, story, buried, (reason, now, self.worker()));
        let event = Event::Buried { job: job.clone(), reason, error: to.error.clone() };
        (Box::new(copy), event, Settled::Buried)
    }
}
