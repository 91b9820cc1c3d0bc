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
    handoff::{Slot, Told},
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
pub(super) struct Said {
    pub(super) queue: Arc<str>,
    pub(super) went: Result<SystemTime, BuriedReason>,
}

/// A try that was made.
struct Tried {
    answer: Confirmed,
    said: Said,
    begun: Begun,
}

impl Leaving {
    pub(super) fn telling(self, teller: Teller) -> Self {
        Self { teller, ..self }
    }

    pub(crate) fn owed(self) -> Self {
        Self { owed: true, ..self }
    }

    /// Sets it on its way, in its turn. What is held is let go of when that has come.
    pub(crate) fn go(self, held: impl Send + 'static) {
        if let To::WorkQueue | To::Alone = self.to.to {
            // It waits for something else first.
            return self.by_itself(None, None);
        }
        let engine = Arc::clone(&self.engine);
        if let Some(slot) = engine.handoff.free_slot() {
            return self.start(slot);
        }
        engine.handoff.next_slot(|slot| {
            match slot {
                Some(slot) => self.start(slot),
                None => self.gives_up(),
            }
            drop(held);
        });
    }

    /// Its first try. Of most jobs it is the only one, so it needs no task of its own.
    fn start(mut self, slot: Slot) {
        let engine = Arc::clone(&self.engine);
        if !self.tag.usable() {
            return self.by_itself(Some(slot), None);
        }
        let begun = Begun::now(&engine);
        let (copy, said) = engine.copy(&self.job, &mut self.to);
        if !engine.is_made(&said.queue) {
            return self.by_itself(Some(slot), None);
        }
        engine.handoff.publish_at_once(copy, slot, move |told| match told {
            Told::Answer(Confirmed::Yes) => self.confirmed(said),
            Told::Answer(answer) => self.by_itself(None, Some(Tried { answer, said, begun })),
            Told::NotNow(slot) => self.by_itself(Some(slot), None),
            // The original is not acked, so nothing is lost.
            Told::TooLate => self.gives_up(),
        });
    }

    fn by_itself(self, slot: Option<Slot>, tried: Option<Tried>) {
        let engine = Arc::clone(&self.engine);
        engine.spawn(self.hand_off(slot, tried));
    }

    /// Try after try, beginning with one that was made before.
    async fn hand_off(mut self, mut slot: Option<Slot>, mut tried: Option<Tried>) {
        let engine = Arc::clone(&self.engine);
        if let To::WorkQueue | To::Alone = self.to.to {
            engine.until_quiet().await;
        }
        let begun = tried.as_ref().map_or_else(|| Begun::now(&engine), |tried| tried.begun);
        let mut trouble = Trouble::new(&engine, &self.job, self.owed, begun);
        let (mut tries, mut alone) = (0, false);
        loop {
            let (answer, said) = match tried.take() {
                Some(Tried { answer, said, .. }) => (answer, said),
                None => {
                    let slot = match slot.take() {
                        Some(slot) => slot,
                        None => match engine.handoff.slot().await {
                            Some(slot) => slot,
                            None => return self.gives_up(),
                        },
                    };
                    // The broker delivers it again, so a copy would be one too many.
                    if !self.tag.usable() {
                        if self.owed {
                            engine.still_owed(&self.job, self.to);
                        }
                        return self.teller.tell(engine.given_up(&self.job));
                    }
                    let (copy, said) = engine.copy(&self.job, &mut self.to);
                    match engine.make_on_first_use(&said.queue).await {
                        Ok(()) => tokio::select! {
                            biased;
                            answer = engine.handoff.publish(copy, slot, alone) => (answer, said),
                            // The original is not acked, so nothing is lost.
                            () = engine.giving_up.cancelled() => return self.gives_up(),
                        },
                        Err(error) => {
                            drop(slot);
                            (Confirmed::NotSent(error), said)
                        }
                    }
                }
            };
            let queue = said.queue.to_string();
            let crowded = matches!(answer, Confirmed::Crowded(_));
            let (why, undecided) = match answer {
                Confirmed::Yes => return self.confirmed(said),
                Confirmed::Returned(why) => {
                    (engine.declare_again(self.to.lane(), &queue, &why).await, false)
                }
                Confirmed::Nacked => {
                    ("the queue refused it: it is full, or not there".into(), false)
                }
                Confirmed::NotSent(error) => {
                    (about_permissions(error, &engine.queue()).to_string(), false)
                }
                Confirmed::Undecided(connection, why) => {
                    // Nothing is published again through a connection that left it undecided.
                    engine.link.retire(connection);
                    (why, true)
                }
                Confirmed::Crowded(why) => (why, true),
            };
            tries += 1;
            engine.emit(&Event::HandOffFailed {
                job: self.job.clone(),
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
            match trouble.next(&queue, &why).await {
                Next::Try => {}
                Next::GiveBack => {
                    let to = (self.to, queue, why.as_str());
                    let settled = engine.give_back_owed(&self.job, &*self.tag, to).await;
                    return self.teller.tell(settled);
                }
                Next::GiveUp => return self.gives_up(),
            }
        }
    }

    /// The copy is safe. From here on there is never a reason to publish again: without an ack the
    /// job will be seen again.
    fn confirmed(self, said: Said) {
        let Self { engine, job, tag, to, teller, _counted: counted, .. } = self;
        let by = Arc::clone(&engine);
        engine.ack_and_tell(tag, move |acked| {
            if !acked {
                by.emit(&Event::Duplicated { job: job.clone() });
            }
            let (event, settled) = to.said(job, said.went);
            by.emit(&event);
            by.reached(&said.queue);
            teller.tell(settled);
            drop(counted);
        });
    }

    fn gives_up(self) {
        self.teller.tell(self.engine.given_up(&self.job));
    }
}

impl Engine {
    pub(crate) fn leaving(self: &Arc<Self>, job: Job, tag: Arc<dyn Tag>, to: Box<Move>) -> Leaving {
        let (engine, counted) = (Arc::clone(self), self.tasks.token());
        Leaving { engine, job, tag, to, owed: false, teller: Teller::nobody(), _counted: counted }
    }

    /// The copy for one try.
    pub(super) fn copy(&self, job: &Job, to: &mut Move) -> (Box<Outgoing>, Said) {
        let limits = self.link.limits();
        let queue = self.queue.as_str();
        let copier = Copier { work_queue: queue, user: &limits.user, frame_max: limits.frame_max };
        let (message, id, now) = (job.message(), job.id(), self.now());
        let mut story = None;
        let reason = match to.onward(now) {
            Ok((lane, due)) => {
                let delay_ms = lane.as_ref().map(|lane| lane.delay_ms);
                let queue = lane.as_ref().map_or(queue, |lane| &lane.queue.name);
                match copier.onward(message, id, &mut to.story, queue, delay_ms) {
                    Ok(copy) => {
                        let said = Said { queue: Arc::clone(&copy.queue), went: Ok(due) };
                        return (Box::new(copy), said);
                    }
                    Err(TooLarge) => {
                        // Of this try only: over another connection the next one may fit.
                        story.insert(to.story.clone()).stay_on_level_of(job.story());
                        BuriedReason::TooLarge
                    }
                }
            }
            Err(reason) => reason,
        };
        let queue = &self.rules().topology.buried().name.clone();
        let what = (reason, now, self.worker());
        let story = story.unwrap_or_else(|| to.story.clone());
        let (copy, reason) = copier.burial(message, id, story, queue, what);
        let said = Said { queue: Arc::clone(&copy.queue), went: Err(reason) };
        (Box::new(copy), said)
    }
}
