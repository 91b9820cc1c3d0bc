//! Hand-offs that fail for long. The consumer pauses, for whatever failed now would have nowhere to
//! go; and no job is held until the broker takes it away.

use std::{collections::VecDeque, sync::PoisonError, time::Duration};

use tokio::time::Instant;

use super::{Engine, Settled, key::Key, plan::Move};
use crate::{
    ErrorKind, Event, Job, PauseKind,
    clock::{Backoff, later},
    handoff::HandOff,
    link::{Confirmed, Tag},
    pause::{Epoch, Pacing},
};

/// How many jobs are remembered at most that were given back with their hand-off still to do. One
/// that is forgotten is run again.
const REMEMBERED: usize = 1000;
/// How long such a job keeps others waiting at most: by then another worker has it.
const BLOCKS: Duration = Duration::from_secs(60 * 60);

/// The failing of one job's hand-off.
pub(super) struct Trouble<'a> {
    engine: &'a Engine,
    /// From then on the consumer pauses.
    stuck_from: Instant,
    /// From then on the job is not held.
    held_until: Instant,
    backoff: Backoff,
    stuck: Option<Stuck<'a>>,
    /// When the try began that is under way.
    tried_in: Epoch,
}

/// When a hand-off began.
#[derive(Clone, Copy, Debug)]
pub(super) struct Begun {
    at: Instant,
    epoch: Epoch,
}

impl Begun {
    pub(super) fn now(engine: &Engine) -> Self {
        Self { at: Instant::now(), epoch: engine.epoch() }
    }
}

pub(super) enum Next {
    Try,
    GiveBack,
    GiveUp,
}

impl<'a> Trouble<'a> {
    /// One that is `owed` failed for long before.
    pub(super) fn new(engine: &'a Engine, job: &Job, owed: bool, begun: Begun) -> Self {
        let settings = &engine.settings;
        let bound = if owed { Duration::ZERO } else { settings.hand_off_bound };
        Self {
            engine,
            stuck_from: begun.at + bound,
            held_until: later(job.received(), settings.hold),
            backoff: HandOff::backoff(),
            stuck: None,
            tried_in: begun.epoch,
        }
    }

    pub(super) fn is_stuck(&self) -> bool {
        self.stuck_from <= Instant::now()
    }

    /// After a failure: waits for the next try.
    pub(super) async fn next(&mut self, queue: &str, why: &str) -> Next {
        let next = self.wait(queue, why).await;
        self.tried_in = self.engine.epoch();
        next
    }

    async fn wait(&mut self, queue: &str, why: &str) -> Next {
        let engine = self.engine;
        let now = Instant::now();
        let until = if self.is_stuck() {
            self.stuck.get_or_insert_with(|| Stuck::new(engine));
            if self.held_until <= now {
                return Next::GiveBack;
            }
            if self.tried_in != engine.epoch() && engine.is_open() {
                // Resumed since the try began: its failure is old news.
                return Next::Try;
            }
            engine.still_stuck(queue, why).min(self.held_until)
        } else {
            let wait = engine.with_rng(|rng| self.backoff.next(rng));
            (now + wait).min(self.stuck_from)
        };
        tokio::select! {
            biased;
            () = engine.giving_up.cancelled() => Next::GiveUp,
            () = engine.told_otherwise(), if self.stuck.is_some() => Next::Try,
            () = tokio::time::sleep_until(until) => Next::Try,
        }
    }
}

/// Counts a hand-off as stuck for as long as it lives.
struct Stuck<'a>(&'a Engine);

impl<'a> Stuck<'a> {
    fn new(engine: &'a Engine) -> Self {
        engine.pacing(|pacing| pacing.get_stuck());
        Self(engine)
    }
}

impl Drop for Stuck<'_> {
    fn drop(&mut self) {
        self.0.pacing(|pacing| pacing.get_unstuck(Instant::now()));
    }
}

/// The jobs that were given back with their hand-off still to do.
#[derive(Debug, Default)]
pub(super) struct Owed(VecDeque<Debt>);

#[derive(Debug)]
struct Debt {
    message: Key,
    /// A copy went back, which is not marked as redelivered.
    copied: bool,
    to: Box<Move>,
    /// That the copy did not reach, and since when. None once it keeps nobody waiting: its queue
    /// took a copy or is there again, or the consumer was resumed or has other rules.
    queue: Option<(String, Instant)>,
}

impl Owed {
    fn add(&mut self, debt: Debt) {
        self.0.push_back(debt);
        while self.0.len() > REMEMBERED {
            self.0.pop_front();
        }
    }

    fn take(&mut self, job: &Job) -> Option<Box<Move>> {
        let found = self.position(job)?;
        self.0.remove(found).map(|debt| debt.to)
    }

    fn position(&self, job: &Job) -> Option<usize> {
        if self.0.is_empty() {
            return None;
        }
        let key = Key::as_delivered(job);
        let is_it = |debt: &Debt| debt.message == key && (job.redelivered() || debt.copied);
        self.0.iter().position(is_it)
    }

    fn confirmed(&mut self, queue: &str) {
        for debt in &mut self.0 {
            if debt.queue.as_ref().is_some_and(|(owed, _)| owed == queue) {
                debt.queue = None;
            }
        }
    }

    /// What is to be done is still known, but nobody waits for it.
    fn unblock(&mut self) {
        self.0.iter_mut().for_each(|debt| debt.queue = None);
    }

    /// A queue that has yet to take a copy.
    fn queue(&self, now: Instant) -> Option<&str> {
        let mut owed = self.0.iter().filter_map(|debt| debt.queue.as_ref());
        owed.find(|(_, since)| now < *since + BLOCKS).map(|(queue, _)| queue.as_str())
    }
}

impl Engine {
    /// The hand-off that was decided when the job was here before.
    pub(crate) fn owed(&self, job: &Job) -> Option<Box<Move>> {
        self.debts().take(job)
    }

    pub(super) fn is_owed(&self, job: &Job) -> bool {
        self.debts().position(job).is_some()
    }

    /// A copy reached this queue: it takes them again.
    pub(super) fn reached(&self, queue: &str) {
        if !self.pacing(|pacing| pacing.is_owing()) {
            return;
        }
        self.change_debts(|debts| debts.confirmed(queue));
    }

    /// Whether jobs are taken one at a time follows from the debts, whatever changes them.
    fn change_debts(&self, change: impl FnOnce(&mut Owed)) {
        let (mut debts, now) = (self.debts(), Instant::now());
        change(&mut debts);
        let owing = debts.queue(now).is_some();
        self.pacing(|pacing| pacing.owe(owing, now));
    }

    /// The consumer is resumed or has other rules, which `resume` does: no debt keeps it waiting.
    pub(super) fn resuming(&self, resume: impl FnOnce(&mut Pacing) -> bool) -> bool {
        let mut debts = self.debts();
        debts.unblock();
        self.pacing(resume)
    }

    /// The channel of a job that is owed its hand-off died: when it comes again, it still is.
    pub(super) fn still_owed(&self, job: &Job, mut to: Box<Move>) {
        let queue = Some((self.copy(job, &mut to).1.queue.to_string(), Instant::now()));
        let message = Key::as_delivered(job);
        self.change_debts(|debts| debts.add(Debt { message, copied: false, to, queue }));
    }

    /// Gives back a job that cannot be held any longer, and remembers where it was to go.
    pub(super) async fn give_back_owed(
        &self,
        job: &Job,
        tag: &dyn Tag,
        (to, queue, why): (Box<Move>, String, &str),
    ) -> Settled {
        self.pacing(|pacing| pacing.owe(true, Instant::now()));
        self.still_stuck(&queue, why);
        // Before, it would come to this very worker again.
        self.until_quiet().await;
        // Given back once. If it comes here a second time its count starts afresh, if that much
        // can be published.
        let copied = job.message().delivery_count() > 0 && self.copy_back(job).await;
        let message =
            if copied { Key::of(job, Some(job.id().to_owned())) } else { Key::as_delivered(job) };
        // Before it can be delivered again.
        let queue = Some((queue, Instant::now()));
        self.change_debts(|debts| debts.add(Debt { message, copied, to, queue }));
        let told =
            if copied { self.ack_by(tag, false).await } else { self.give_back(job, tag).await };
        let (job, why) = (job.clone(), "its hand-off did not succeed in time");
        self.emit(&if told { Event::GivenBack { job, why } } else { Event::Stale { job } });
        Settled::Stale
    }

    /// Alone, so that no other copy leaves it undecided.
    async fn copy_back(&self, job: &Job) -> bool {
        let (copy, destination) = self.copy(job, &mut Move::return_unrun(job, self.now()));
        let Some(slot) = self.handoff.slot().await else { return false };
        destination.due.is_ok()
            && matches!(self.handoff.publish(copy, slot, true).await, Confirmed::Yes)
    }

    /// Whether a job that is owed its hand-off may be fetched: not while it is plain that the
    /// hand-off would fail again.
    pub(crate) async fn is_way_clear(&self) -> bool {
        let owed = self.debts().queue(Instant::now()).map(ToOwned::to_owned);
        let Some(queue) = owed else {
            self.change_debts(|_| ());
            return true;
        };
        let checking = async {
            match self.link.check(&queue).await {
                Err(error) if error.kind() == ErrorKind::MissingQueue => {
                    let why = self.declare_again(None, &queue, &error.to_string()).await;
                    self.link.check(&queue).await.map_err(|_| why)
                }
                checked => checked.map_err(|error| error.to_string()),
            }
        };
        let why = match tokio::time::timeout(self.settings.confirm_timeout, checking).await {
            Ok(Ok(())) => return true,
            Ok(Err(why)) => why,
            Err(_) => "the broker does not answer".to_owned(),
        };
        self.still_stuck(&queue, &why);
        false
    }

    /// When to try again. The first to ask after a step tells of the next.
    fn still_stuck(&self, queue: &str, why: &str) -> Instant {
        let (until, wait) = self.pacing(|pacing| pacing.still_stuck(Instant::now()));
        if wait.is_some() {
            let (kind, error) = (PauseKind::HandOff, format!("hand-off to {queue:?}: {why}"));
            self.emit(&Event::Paused { queue: self.queue(), kind, error, wait });
        }
        until
    }

    fn debts(&self) -> std::sync::MutexGuard<'_, Owed> {
        self.owed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Message, Story};
    use lapin::BasicProperties;

    fn job(id: Option<&str>, body: &str, redelivered: bool) -> Job {
        let properties = BasicProperties::default();
        let message = Message {
            exchange: "shop".into(),
            routing_key: "order.new".into(),
            redelivered,
            properties: match id {
                Some(id) => properties.with_message_id(id.into()),
                None => properties,
            },
            body: body.into(),
        };
        Job::new(message, Story::default())
    }

    fn debt(job: &Job, queue: &str) -> Debt {
        Debt {
            message: Key::as_delivered(job),
            copied: false,
            to: Box::new(Move::return_unrun(job, std::time::SystemTime::now())),
            queue: Some((queue.to_owned(), Instant::now())),
        }
    }

    #[test]
    fn a_job_is_known_again_once_and_only_when_it_is_delivered_again() {
        for id in [Some("7"), None] {
            let mut owed = Owed::default();
            owed.add(debt(&job(id, "tea", false), "lane"));
            assert!(owed.take(&job(id, "tea", false)).is_none(), "another one that looks the same");
            assert!(owed.take(&job(id, "milk", true)).is_none());
            assert!(owed.take(&job(Some("8"), "tea", true)).is_none());
            assert!(owed.take(&job(id, "tea", true)).is_some());
            assert!(owed.take(&job(id, "tea", true)).is_none());
        }
    }

    #[test]
    fn a_copy_that_went_back_is_known_by_the_id_that_was_made_for_it() {
        let (mut owed, first) = (Owed::default(), job(None, "tea", true));
        let message = Key::of(&first, Some(first.id().to_owned()));
        owed.add(Debt { message, copied: true, ..debt(&first, "lane") });
        assert!(owed.take(&job(Some(first.id()), "tea", false)).is_some());
    }

    #[test]
    fn each_queue_is_waited_for_until_it_took_a_copy() {
        let mut owed = Owed::default();
        owed.add(debt(&job(Some("1"), "", false), "lane"));
        owed.add(debt(&job(Some("2"), "", false), "buried"));
        owed.confirmed("another");
        owed.confirmed("lane");
        let now = Instant::now();
        assert_eq!(owed.queue(now), Some("buried"));
        assert_eq!(owed.queue(now + BLOCKS), None, "another worker has it by then");
        owed.confirmed("buried");
        assert_eq!(owed.queue(now), None);
        owed.add(debt(&job(Some("3"), "", false), "lane"));
        owed.unblock();
        assert_eq!(owed.queue(now), None);
        assert!(
            owed.take(&job(Some("1"), "", true)).is_some(),
            "what is to be done is still known"
        );
    }

    #[test]
    fn no_more_than_a_thousand_are_remembered() {
        let mut owed = Owed::default();
        for id in 0..=REMEMBERED {
            owed.add(debt(&job(Some(&id.to_string()), "", false), "lane"));
        }
        assert!(owed.take(&job(Some("0"), "", true)).is_none());
        assert!(owed.take(&job(Some("1"), "", true)).is_some());
    }
}
