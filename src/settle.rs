//! One delivery to its one end: acked, in a lane, or buried.

mod unsettled;

use std::{
    fmt::Write as _,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use rand::rngs::SmallRng;
use tokio::{runtime::Handle, sync::oneshot};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use self::unsettled::{Receipt, Settled, Settling, UnsettledJob};
use crate::{
    BuriedReason, Declare, Error, ErrorKind, Event, FailureKind, Job, Settings, Topology,
    clock::Clock,
    event::emit,
    handoff::{HandOff, Slot},
    link::{Broker, Confirmed, LapinLink, Link, Tag},
    message::{Copier, Failure, Outgoing, Story, TooLarge, cut},
    policy::{Decision, Verdict},
    topology::{Decks, Lane, QueueSpec, declare},
};

/// The most that is kept of an error's text in memory and in events, in bytes.
const ERROR_TEXT: usize = 16 * 1024;

/// All that one work queue needs to settle its jobs.
#[derive(Debug)]
pub(crate) struct Engine {
    settings: Settings,
    topology: Topology,
    link: Arc<dyn Link>,
    handoff: HandOff,
    clock: Clock,
    chance: Mutex<Chance>,
    /// One at a time declares what went missing.
    redeclaring: tokio::sync::Mutex<()>,
    tasks: TaskTracker,
    /// Ends hand-offs that do not succeed; their jobs stay unacked.
    giving_up: CancellationToken,
    runtime: Handle,
}

#[derive(Debug)]
struct Chance {
    rng: SmallRng,
    decks: Decks,
}

/// Where a job goes, and with which story.
#[derive(Debug)]
pub(crate) struct Move {
    story: Story,
    to: To,
    kind: FailureKind,
    error: String,
}

#[derive(Clone, Debug)]
enum To {
    Lane { level: u32, lane: Lane },
    Buried(BuriedReason),
}

impl Move {
    pub(crate) fn bury(story: Story, reason: BuriedReason, error: String) -> Self {
        Self { story, to: To::Buried(reason), kind: FailureKind::Failed, error }
    }
}

impl Engine {
    /// Checks the settings, and makes or verifies the queues. Nothing is consumed before.
    pub(crate) async fn start(
        broker: Broker,
        queue: &str,
        settings: Settings,
    ) -> Result<Arc<Self>, Error> {
        settings.validate()?;
        let topology = Topology::new(queue, &settings.policy, settings.queue_type)?;
        let link: Arc<dyn Link> = Arc::new(LapinLink::new(broker, settings.confirm_timeout));
        declare(&*link, &topology, settings.declare).await?;
        let engine = Arc::new(Self {
            handoff: HandOff::new(Arc::clone(&link), settings.hand_offs),
            settings,
            topology,
            link,
            clock: Clock::start(),
            chance: Mutex::new(Chance { rng: rand::make_rng(), decks: Decks::default() }),
            redeclaring: tokio::sync::Mutex::new(()),
            tasks: TaskTracker::new(),
            giving_up: CancellationToken::new(),
            runtime: Handle::current(),
        });
        let queues = engine.topology.queues().count();
        engine.emit(&Event::Ready { queue: queue.to_owned(), queues });
        Ok(engine)
    }

    pub(crate) fn queue(&self) -> &str {
        self.topology.work_queue()
    }

    pub(crate) fn topology(&self) -> &Topology {
        &self.topology
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.tasks.is_closed()
    }

    pub(crate) fn link(&self) -> &dyn Link {
        &*self.link
    }

    pub(crate) fn worker(&self) -> &str {
        &self.settings.worker
    }

    pub(crate) fn now(&self) -> SystemTime {
        self.clock.now()
    }

    pub(crate) fn emit(&self, event: &Event) {
        emit(self.queue(), &self.settings.observers, event);
    }

    pub(crate) fn with_rng<T>(&self, f: impl FnOnce(&mut SmallRng) -> T) -> T {
        f(&mut self.chance.lock().unwrap_or_else(PoisonError::into_inner).rng)
    }

    /// Runs on the engine's runtime, so that it works from a `Drop` on any thread.
    pub(crate) fn spawn<F>(&self, task: F) -> tokio::task::JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send,
    {
        self.tasks.spawn_on(task, &self.runtime)
    }

    /// Makes or verifies the queues again, after a lost connection.
    pub(crate) async fn redeclare(&self) -> Result<(), Error> {
        declare(&*self.link, &self.topology, self.settings.declare).await
    }

    /// Waits until every ack and hand-off has come to its end, for at most `grace`.
    pub(crate) async fn close(&self, grace: Duration) -> Result<(), Error> {
        self.tasks.close();
        if tokio::time::timeout(grace, self.tasks.wait()).await.is_ok() {
            return Ok(());
        }
        self.giving_up.cancel();
        let left = self.tasks.len();
        // Those that wait between tries or for a slot end now; one that waits for a confirm, at its timeout.
        let last = self.settings.confirm_timeout + Duration::from_secs(1);
        let _ = tokio::time::timeout(last, self.tasks.wait()).await;
        Err(Error::new(
            ErrorKind::Closed,
            format!(
                "queue {:?}: {left} hand-offs or acks did not succeed within {grace:?}; their jobs \
                 stay unacked, and the broker delivers them again",
                self.queue()
            ),
        ))
    }

    /// Settles a job. Returns when the outcome is accepted: at once for a success, after a free
    /// hand-off slot for a failure. The ack and the confirm follow.
    pub(crate) async fn settle(
        self: &Arc<Self>,
        job: Job,
        tag: Box<dyn Tag>,
        result: Result<(), anyhow::Error>,
    ) -> Receipt {
        let engine = Arc::clone(self);
        let task = match self.plan(&job, Verdict::from_result(result)) {
            None => self.spawn(async move { engine.ack(&job, &*tag).await }),
            // The wait for a slot is part of the task, so that close() knows of it, and a caller
            // who gives up waiting leaves no job behind that nobody settles.
            Some(to) => {
                let (accepted, accepting) = oneshot::channel();
                let task = self.spawn(async move {
                    let Some(slot) = engine.slot().await else { return Settled::Stale };
                    let _ = accepted.send(());
                    engine.hand_off(Some(slot), &job, &*tag, to).await
                });
                // An error means that the task has ended already.
                let _ = accepting.await;
                task
            }
        };
        Receipt::new(task)
    }

    /// A free hand-off slot; none if it is too late for one.
    async fn slot(&self) -> Option<Slot> {
        tokio::select! {
            biased;
            () = self.giving_up.cancelled() => None,
            slot = self.handoff.slot() => Some(slot),
        }
    }

    /// Where a job goes after an attempt; nowhere if it is done.
    fn plan(&self, job: &Job, verdict: Verdict) -> Option<Move> {
        let mut story = job.story().clone();
        let decision = self.settings.policy.decide(story.retry_count, &verdict);
        let Verdict::Failed { kind, error, .. } = verdict else { return None };
        let (now, error) = (self.now(), chain(&error));
        let failure = Failure {
            kind,
            error: &error,
            at: now,
            level: self.settings.policy.level_label(story.retry_count),
            worker: self.worker(),
        };
        let odd = story.is_odd();
        if matches!(decision, Decision::Bury(BuriedReason::Rejected | BuriedReason::Undecodable)) {
            story.note(&failure);
        } else {
            story.charge(&failure);
        }
        story.remember(job.message(), now);
        let to = match decision {
            Decision::Done => return None,
            // A failure needs the headers, so now they are judged.
            _ if odd => To::Buried(BuriedReason::InvalidHeaders),
            Decision::Bury(reason) => To::Buried(reason),
            Decision::Retry(level) => self.place(level, &story, now),
        };
        Some(Move { story, to, kind, error })
    }

    /// A lane of this level, or the buried queue if its delay would end after the deadline.
    fn place(&self, level: u32, story: &Story, now: SystemTime) -> To {
        let Some(level_ms) = self.settings.policy.level_ms(level) else {
            return To::Buried(BuriedReason::Exhausted);
        };
        let lanes = self.topology.lanes(level_ms);
        let lane = {
            let mut chance = self.chance.lock().unwrap_or_else(PoisonError::into_inner);
            let Chance { rng, decks } = &mut *chance;
            decks.draw(level_ms, lanes, rng).clone()
        };
        let due = now + Duration::from_millis(lane.delay_ms);
        if story.deadline.is_some_and(|deadline| due > deadline) {
            return To::Buried(BuriedReason::Expired);
        }
        To::Lane { level, lane }
    }

    async fn ack(&self, job: &Job, tag: &dyn Tag) -> Settled {
        if tag.ack().await {
            self.emit(&Event::Done { job: job.clone() });
            return Settled::Acked;
        }
        self.emit(&Event::Stale { job: job.clone() });
        Settled::Stale
    }

    /// The safety rule: publish the copy, wait for its confirm, and only then ack the original.
    /// While it fails the original stays unacked, and it is tried again.
    pub(crate) async fn hand_off(
        &self,
        mut slot: Option<Slot>,
        job: &Job,
        tag: &dyn Tag,
        to: Move,
    ) -> Settled {
        let mut backoff = HandOff::backoff();
        let mut tries = 0;
        let (copy, event, settled) = loop {
            let slot = match slot.take() {
                Some(slot) => slot,
                None => match self.slot().await {
                    Some(slot) => slot,
                    None => return Settled::Stale,
                },
            };
            // The broker delivers it again, so a copy would be one too many.
            if !tag.usable() {
                self.emit(&Event::Stale { job: job.clone() });
                return Settled::Stale;
            }
            let (copy, event, settled) = self.copy(job, &to);
            let answer = self.handoff.publish(&copy, slot).await;
            let (why, undecided) = match answer {
                Confirmed::Yes => break (copy, event, settled),
                Confirmed::Returned(why) => (self.declare_again(&copy.queue, &why).await, false),
                Confirmed::Nacked => {
                    ("the queue refused it: it is full, or not there".into(), false)
                }
                Confirmed::NotSent(error) => (error.to_string(), false),
                Confirmed::Undecided(connection, why) => {
                    // Each job is published at most once through a publishing connection that
                    // left it undecided.
                    self.link.retire(connection);
                    (why, true)
                }
            };
            tries += 1;
            let (job, queue) = (job.clone(), copy.queue);
            self.emit(&Event::HandOffFailed { job, queue, why, undecided, tries });
            let wait = self.with_rng(|rng| backoff.next(rng));
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.giving_up.cancelled() => return Settled::Stale,
            }
        };
        drop(copy);
        // Never a reason to publish again: the job will be seen again.
        if !tag.ack().await {
            self.emit(&Event::Duplicated { job: job.clone() });
        }
        self.emit(&event);
        settled
    }

    /// The copy for one try, what to say when it is confirmed, and what became of the job.
    fn copy(&self, job: &Job, to: &Move) -> (Outgoing, Event, Settled) {
        let limits = self.link.limits();
        let copier =
            Copier { work_queue: self.queue(), user: &limits.user, frame_max: limits.frame_max };
        let (message, id) = (job.message(), job.id());
        let now = self.now();
        let reason = match &to.to {
            To::Buried(reason) => *reason,
            To::Lane { level, lane } => {
                let delay = Duration::from_millis(lane.delay_ms);
                let due = now + delay;
                let mut story = to.story.clone();
                story.go_to(self.settings.policy.level_label(*level), due);
                match copier.retry(message, id, story, &lane.queue.name, lane.delay_ms) {
                    Ok(copy) => {
                        let event = Event::Retried {
                            job: job.clone(),
                            level: *level,
                            delay,
                            due,
                            kind: to.kind,
                            error: to.error.clone(),
                        };
                        return (copy, event, Settled::Retried { level: *level, due });
                    }
                    Err(TooLarge) => BuriedReason::TooLarge,
                }
            }
        };
        let buried = &self.topology.buried().name;
        let story = to.story.clone();
        let (copy, reason) =
            copier.burial(message, id, story, buried, (reason, now, self.worker()));
        let event = Event::Buried { job: job.clone(), reason, error: to.error.clone() };
        (copy, event, Settled::Buried)
    }

    /// The queue went missing under us: it is made again, unless that is not ours to do.
    async fn declare_again(&self, name: &str, why: &str) -> String {
        let missing: Option<&QueueSpec> = self.topology.queues().find(|queue| queue.name == name);
        let Some(queue) = missing.filter(|_| self.settings.declare == Declare::Create) else {
            return format!(
                "the queue is missing ({why}); make it, or start with declare = \"create\""
            );
        };
        let _one_at_a_time = self.redeclaring.lock().await;
        match self.link.declare(queue).await {
            Ok(()) => format!("the queue was missing ({why}) and has been declared again"),
            Err(error) => format!("the queue is missing ({why}) and cannot be declared: {error}"),
        }
    }
}

/// An error and its sources, as `outer: inner`. Layers that say the same, as markers do, are told
/// once.
///
/// It is the user's code that writes them, and a panic here would leave the job without an answer.
fn chain(error: &anyhow::Error) -> String {
    catch_unwind(AssertUnwindSafe(|| written(error)))
        .unwrap_or_else(|_| "an error that panicked when it was written".to_owned())
}

fn written(error: &anyhow::Error) -> String {
    let mut text = String::new();
    let mut last = String::new();
    for layer in error.chain() {
        let said = layer.to_string();
        if said != last {
            let colon = if text.is_empty() { "" } else { ": " };
            // Writing to a String cannot fail.
            let _ = write!(text, "{colon}{said}");
            last = said;
        }
        if text.len() > ERROR_TEXT {
            break;
        }
    }
    cut(&text, ERROR_TEXT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reject;
    use anyhow::{Context, anyhow};

    #[test]
    fn a_chain_tells_each_layer_once() {
        let io = std::io::Error::other("disk full");
        let error = anyhow::Error::new(io).context("saving");
        assert_eq!(chain(&error), "saving: disk full");
        assert_eq!(chain(&reject(anyhow!("no use")).into()), "no use");
        let marked = Err::<(), _>(reject(anyhow!("no use"))).context("outer").unwrap_err();
        assert_eq!(chain(&marked), "outer: no use");
    }

    #[test]
    fn an_error_of_a_megabyte_is_cut() {
        let long = "ü".repeat(1 << 20);
        assert!(chain(&anyhow!(long)).len() <= ERROR_TEXT);
    }
}
