//! The safety rule: publish the copy, wait for its confirm, and only then ack the original. While it
//! fails the original stays unacked, and it is tried again.

use std::{sync::Arc, time::SystemTime};

use tokio_util::task::task_tracker::TaskTrackerToken;

use super::{
    Engine, Move, Teller,
    plan::To,
    stuck::{Begun, Next, Trouble},
};
use crate::{
    BuriedReason, Event, Job,
    handoff::{FirstTry, Slot},
    link::{Confirmed, Tag},
    message::{Copier, Outgoing, TooLarge},
    topology::about_permissions,
};

/// A job on its way to a lane, to the buried queue, or back to its own.
pub(crate) struct Leaving {
    engine: Arc<Engine>,
    job: Job,
    tag: Arc<dyn Tag>,
    to: Box<Move>,
    /// It has failed for long, before it was given back.
    owed: bool,
    teller: Teller,
    /// The engine waits for its end when it closes.
    _counted: TaskTrackerToken,
}

/// Where a copy goes, and when it is due there; or why it is a burial.
pub(super) struct Destination {
    pub(super) queue: Arc<str>,
    pub(super) due: Result<SystemTime, BuriedReason>,
}

/// A try that was made.
struct Tried {
    answer: Confirmed,
    destination: Destination,
    begun: Begun,
}

/// What a hand-off in a task begins with.
enum Begin {
    /// A wait for what must not be in its way.
    Quiet,
    Slot(Slot),
    /// What to do about a try. None if it is too late for one.
    Tried(Option<Tried>),
}

impl Leaving {
    pub(super) fn telling(self, teller: Teller) -> Self {
        Self { teller, ..self }
    }

    pub(crate) fn owed(self) -> Self {
        Self { owed: true, ..self }
    }

    pub(crate) fn go(self) {
        self.go_holding(());
    }

    /// Sets it on its way, in its turn. What is held is let go of when that has come.
    pub(crate) fn go_holding(self, held: impl Send + 'static) {
        if let To::WorkQueue | To::Alone = self.to.to {
            return self.by_itself(Begin::Quiet);
        }
        let engine = Arc::clone(&self.engine);
        engine.handoff.next_slot(|slot| {
            match slot {
                Some(slot) => self.start(slot),
                None => self.by_itself(Begin::Tried(None)),
            }
            drop(held);
        });
    }

    /// Its first try. Of most jobs it is the only one, so it needs no task of its own. All that may take
    /// long, as what others do at an event, is left to a task.
    fn start(mut self, slot: Slot) {
        let engine = Arc::clone(&self.engine);
        if !self.tag.usable() {
            return self.by_itself(Begin::Slot(slot));
        }
        let begun = Begun::now(&engine);
        let (copy, destination) = engine.copy(&self.job, &mut self.to);
        if !engine.is_made(&destination.queue) {
            return self.by_itself(Begin::Slot(slot));
        }
        engine.handoff.publish_at_once(copy, slot, move |heard| match heard {
            FirstTry::Answer(Confirmed::Yes) => self.confirmed(destination),
            FirstTry::Answer(answer) => {
                self.by_itself(Begin::Tried(Some(Tried { answer, destination, begun })));
            }
            FirstTry::NotNow(slot) => self.by_itself(Begin::Slot(slot)),
            FirstTry::TooLate => self.by_itself(Begin::Tried(None)),
        });
    }

    fn by_itself(self, begin: Begin) {
        // Not among the engine's tasks: it is counted already.
        let runtime = self.engine.runtime.clone();
        runtime.spawn(self.hand_off(begin));
    }

    /// Try after try.
    async fn hand_off(mut self, begin: Begin) {
        let engine = Arc::clone(&self.engine);
        let mut tried = match begin {
            Begin::Quiet => {
                engine.until_quiet().await;
                self.one_try(None, false).await
            }
            Begin::Slot(slot) => self.one_try(Some(slot), false).await,
            Begin::Tried(tried) => tried,
        };
        let (mut trouble, mut tries, mut alone) = (None, 0, false);
        loop {
            let Some(Tried { answer, destination, begun }) = tried else { return self.gives_up() };
            let queue = destination.queue.to_string();
            let crowded = matches!(answer, Confirmed::Crowded(_));
            let why_not = tokio::select! {
                biased;
                why_not = self.why_not(answer, &queue) => why_not,
                () = engine.giving_up.cancelled() => return self.gives_up(),
            };
            let Some((why, undecided)) = why_not else { return self.confirmed(destination) };
            let trouble =
                trouble.get_or_insert_with(|| Trouble::new(&engine, &self.job, self.owed, begun));
            tries += 1;
            engine.emit(&Event::HandOffFailed {
                job: self.job.clone(),
                queue: queue.clone(),
                why: why.clone(),
                undecided,
                tries,
                stuck: trouble.is_stuck(),
            });
            // Alone it is told what becomes of it, so there is no reason to wait.
            alone |= crowded;
            let next = if crowded { Next::Try } else { trouble.next(&queue, &why).await };
            match next {
                Next::Try => tried = self.one_try(None, alone).await,
                Next::GiveBack => {
                    let to = (self.to, queue, why.as_str());
                    let settled = engine.give_back_owed(&self.job, &*self.tag, to).await;
                    return self.teller.tell(settled);
                }
                Next::GiveUp => return self.gives_up(),
            }
        }
    }

    /// None if the work ends, or if the broker delivers the job again, so that a copy would be one too
    /// many.
    async fn one_try(&mut self, slot: Option<Slot>, alone: bool) -> Option<Tried> {
        let engine = Arc::clone(&self.engine);
        let slot = match slot {
            Some(slot) => slot,
            None => engine.handoff.slot().await?,
        };
        if !self.tag.usable() {
            return None;
        }
        let begun = Begun::now(&engine);
        let (copy, destination) = engine.copy(&self.job, &mut self.to);
        let answering = async {
            match engine.make_on_first_use(&destination.queue).await {
                Ok(()) => engine.handoff.publish(copy, slot, alone).await,
                Err(error) => Confirmed::NotSent(error),
            }
        };
        let answer = tokio::select! {
            biased;
            answer = answering => answer,
            () = engine.giving_up.cancelled() => return None,
        };
        Some(Tried { answer, destination, begun })
    }

    /// Why the copy is not safe, and whether the broker may have it all the same. None if it is.
    async fn why_not(&self, answer: Confirmed, queue: &str) -> Option<(String, bool)> {
        let engine = &self.engine;
        Some(match answer {
            Confirmed::Yes => return None,
            Confirmed::Returned(why) => {
                (engine.declare_again(self.to.lane(), queue, &why).await, false)
            }
            Confirmed::Nacked => ("the queue refused it: it is full, or not there".into(), false),
            Confirmed::NotSent(error) => {
                (about_permissions(error, &engine.queue()).to_string(), false)
            }
            Confirmed::Undecided(why) | Confirmed::Crowded(why) => (why, true),
        })
    }

    /// The copy is safe. From here on there is never a reason to publish again: without an ack the
    /// job will be seen again.
    fn confirmed(self, destination: Destination) {
        let Self { engine, job, tag, to, teller, _counted: counted, .. } = self;
        let by = Arc::clone(&engine);
        engine.ack_and_tell(tag, move |acked| {
            if !acked {
                by.emit(&Event::Duplicated { job: job.clone() });
            }
            let (event, settled) = to.said(job, destination.due);
            by.emit(&event);
            by.reached(&destination.queue);
            teller.tell(settled);
            drop(counted);
        });
    }

    /// The original is not acked, so nothing is lost: the broker delivers it again.
    fn gives_up(self) {
        if self.owed && !self.tag.usable() {
            self.engine.still_owed(&self.job, self.to);
        }
        self.teller.tell(self.engine.given_up(&self.job));
    }
}

impl Engine {
    pub(crate) fn leaving(self: &Arc<Self>, job: Job, tag: Arc<dyn Tag>, to: Box<Move>) -> Leaving {
        let (engine, counted) = (Arc::clone(self), self.tasks.token());
        Leaving { engine, job, tag, to, owed: false, teller: Teller::nobody(), _counted: counted }
    }

    /// The copy for one try.
    pub(super) fn copy(&self, job: &Job, to: &mut Move) -> (Box<Outgoing>, Destination) {
        let limits = self.link.limits();
        let queue = self.queue.as_str();
        let copier = Copier { work_queue: queue, user: &limits.user, frame_max: limits.frame_max };
        let (message, id, now) = (job.message(), job.id(), self.now());
        let (reason, story) = match to.onward(now) {
            Ok((lane, due)) => {
                let delay_ms = lane.as_ref().map(|lane| lane.delay_ms);
                let queue = lane.as_ref().map_or(queue, |lane| &lane.queue.name);
                match copier.onward(message, id, &mut to.story, queue, delay_ms) {
                    Ok(copy) => {
                        let queue = Arc::clone(&copy.queue);
                        return (Box::new(copy), Destination { queue, due: Ok(due) });
                    }
                    Err(TooLarge) => {
                        // Of this try only: over another connection the next one may fit.
                        let mut story = to.story.clone();
                        story.stay_on_level_of(job.story());
                        (BuriedReason::TooLarge, story)
                    }
                }
            }
            Err(reason) => (reason, to.story.clone()),
        };
        let queue = &self.rules().topology.buried().name.clone();
        let what = (reason, now, self.worker());
        let (copy, reason) = copier.burial(message, id, story, queue, what);
        let queue = Arc::clone(&copy.queue);
        (Box::new(copy), Destination { queue, due: Err(reason) })
    }
}
