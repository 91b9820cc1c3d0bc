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
    handoff::Slot,
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
    begun: Begun,
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

/// One that waits for its slot. Whoever gives up the wait leaves no job behind that nobody settles.
pub(crate) struct Accepting(Option<Leaving>);

impl Accepting {
    /// Until it has a slot, and its first try is on its way.
    pub(super) async fn accepted(mut self) {
        let Some(engine) = self.0.as_ref().map(|leaving| Arc::clone(&leaving.engine)) else {
            return;
        };
        let slot = match engine.handoff.free_slot() {
            Some(slot) => Some(slot),
            None => engine.handoff.slot().await,
        };
        if let Some(leaving) = self.0.take() {
            leaving.start(slot);
        }
    }
}

impl Drop for Accepting {
    fn drop(&mut self) {
        if let Some(leaving) = self.0.take() {
            leaving.go();
        }
    }
}

impl Leaving {
    /// As soon as it has a slot. The receipt hears of its end.
    pub(super) fn accepting(self, teller: Teller) -> Accepting {
        Accepting(Some(Self { teller, ..self }))
    }

    /// Without anybody waiting for it.
    pub(crate) fn go(self) {
        match self.engine.handoff.free_slot() {
            Some(slot) => self.start(Some(slot)),
            None => self.by_itself(None, None),
        }
    }

    pub(crate) fn go_as_owed(self) {
        Self { owed: true, ..self }.go();
    }

    /// Its first try. Of most jobs it is the only one, so it needs no task of its own.
    fn start(mut self, slot: Option<Slot>) {
        let Some(slot) = slot else { return self.gives_up() };
        let is_back = matches!(self.to.to, To::WorkQueue | To::Alone);
        if is_back || !self.tag.usable() {
            return self.by_itself(Some(slot), None);
        }
        let (copy, said) = self.engine.copy(&self.job, &mut self.to);
        if !self.engine.is_made(&said.queue) {
            return self.by_itself(Some(slot), None);
        }
        let engine = Arc::clone(&self.engine);
        engine.handoff.publish_at_once(copy, slot, move |answer| match answer {
            Ok(Confirmed::Yes) => self.confirmed(said),
            Ok(answer) => self.by_itself(None, Some((answer, said))),
            Err(slot) => self.by_itself(Some(slot), None),
        });
    }

    fn by_itself(self, slot: Option<Slot>, tried: Option<(Confirmed, Said)>) {
        let engine = Arc::clone(&self.engine);
        engine.spawn(self.hand_off(slot, tried));
    }

    /// Try after try, beginning with one that was made before.
    async fn hand_off(mut self, mut slot: Option<Slot>, mut tried: Option<(Confirmed, Said)>) {
        let engine = Arc::clone(&self.engine);
        if let To::WorkQueue | To::Alone = self.to.to {
            drop(slot.take());
            engine.until_quiet().await;
        }
        let mut trouble = Trouble::new(&engine, &self.job, self.owed, self.begun);
        let (mut tries, mut alone) = (0, false);
        loop {
            let (answer, said) = match tried.take() {
                Some(tried) => tried,
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
        let (engine, begun, counted) = (Arc::clone(self), Begun::now(self), self.tasks.token());
        Leaving {
            engine,
            job,
            tag,
            to,
            begun,
            owed: false,
            teller: Teller::nobody(),
            _counted: counted,
        }
    }

    /// The copy for one try.
    pub(super) fn copy(&self, job: &Job, to: &mut Move) -> (Box<Outgoing>, Said) {
        let limits = self.link.limits();
        let queue = self.queue.as_str();
        let copier = Copier { work_queue: queue, user: &limits.user, frame_max: limits.frame_max };
        let (message, id, now) = (job.message(), job.id(), self.now());
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
                        to.story.stay_on_level_of(job.story());
                        BuriedReason::TooLarge
                    }
                }
            }
            Err(reason) => reason,
        };
        let queue = &self.rules().topology.buried().name.clone();
        let what = (reason, now, self.worker());
        let (copy, reason) = copier.burial(message, id, to.story.clone(), queue, what);
        let said = Said { queue: Arc::clone(&copy.queue), went: Err(reason) };
        (Box::new(copy), said)
    }
}
