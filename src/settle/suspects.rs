//! What is in hand, what of it goes back unrun, and which job may have ended another process.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::future::BoxFuture;
use tokio::sync::Notify;

use super::{Acks, Engine, Move, key::Key};
use crate::{
    Job,
    link::{Incoming, LapinTag, Tag},
    message::{Message, Story},
    pause::Pace,
    policy::{Interrupted, Suspects, Suspicion},
};

/// How often who waits for the last unacked delivery looks whether the broker took it back.
const STALE_CHECK: Duration = Duration::from_millis(200);

/// A delivery that has been looked at.
#[derive(Debug)]
pub(crate) struct Arrived {
    pub(crate) job: Job,
    pub(crate) tag: Arc<dyn Tag>,
    pub(crate) suspicion: Suspicion,
}

/// The deliveries of all channels.
#[derive(Debug, Default)]
pub(super) struct Custody {
    in_hand: Arc<Hand>,
    suspects: Mutex<Suspects<Key>>,
    /// What is given back to the work queue is marked as what a crash leaves: it is a classic one.
    marks: AtomicBool,
}

/// Those that are without an answer so far.
#[derive(Debug, Default)]
struct Hand {
    deliveries: Mutex<Deliveries>,
    fewer: Notify,
}

#[derive(Debug, Default)]
struct Deliveries {
    last: u64,
    by_number: HashMap<u64, Weak<InHand>>,
}

impl Hand {
    async fn at_most(&self, most: usize) {
        loop {
            // Made before the look, it hears of each that goes after it.
            let fewer = self.fewer.notified();
            if self.lock().by_number.len() <= most {
                return;
            }
            fewer.await;
        }
    }

    /// How many of them the broker has not taken back.
    fn ours(&self) -> usize {
        let all: Vec<_> = self.lock().by_number.values().filter_map(Weak::upgrade).collect();
        all.iter().filter(|delivery| delivery.usable()).count()
    }

    fn lock(&self) -> MutexGuard<'_, Deliveries> {
        self.deliveries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a delivery as long as it lives.
#[derive(Debug)]
pub(super) struct InHand {
    number: u64,
    tag: LapinTag,
    hand: Arc<Hand>,
}

impl InHand {
    fn new(tag: LapinTag, hand: &Arc<Hand>) -> Arc<Self> {
        let mut deliveries = hand.lock();
        deliveries.last += 1;
        let number = deliveries.last;
        let this = Arc::new(Self { number, tag, hand: Arc::clone(hand) });
        deliveries.by_number.insert(number, Arc::downgrade(&this));
        this
    }
}

impl Drop for InHand {
    fn drop(&mut self) {
        self.hand.lock().by_number.remove(&self.number);
        self.hand.fewer.notify_waiters();
    }
}

impl Tag for InHand {
    fn number(&self) -> u64 {
        self.tag.number()
    }

    fn usable(&self) -> bool {
        self.tag.usable()
    }

    fn ack(&self, multiple: bool) -> BoxFuture<'_, bool> {
        self.tag.ack(multiple)
    }

    fn give_back(&self) -> BoxFuture<'_, bool> {
        self.tag.give_back()
    }
}

impl Engine {
    /// Looks at a delivery, once: at each of a consumer, as they come.
    pub(crate) fn arrive(&self, incoming: Incoming, acks: &Arc<Acks>) -> Arrived {
        let arrived = self.take(incoming, Some(acks));
        let suspicion = self.suspect(&arrived);
        Arrived { suspicion, ..arrived }
    }

    /// The same in a loop that cannot give back what it has prefetched. A crash there says nothing
    /// of any single job, so none is a suspect. Without `acks` it is acked alone.
    pub(crate) fn take(
        &self,
        Incoming { message, tag }: Incoming,
        acks: Option<&Arc<Acks>>,
    ) -> Arrived {
        let in_hand = InHand::new(tag, &self.custody.in_hand);
        let job = self.read(message);
        let tag: Arc<dyn Tag> = match acks {
            Some(acks) => acks.enter(in_hand, job.clone()),
            None => in_hand,
        };
        Arrived { job, tag, suspicion: Suspicion::Clear }
    }

    fn read(&self, message: Message) -> Job {
        let mut story = Story::if_any(&message, &self.queue);
        if let Some(story) = &mut story {
            story.forgive(self.now());
        }
        Job::new(message, story)
    }

    fn suspect(&self, Arrived { job, tag, .. }: &Arrived) -> Suspicion {
        // One that is stale comes again, and one that is owed its hand-off is not run.
        if !tag.usable() || self.is_owed(job) {
            return Suspicion::Clear;
        }
        let interrupted = job.message().interrupted();
        if interrupted == Interrupted::Before {
            self.custody.marks.store(true, Relaxed);
        }
        let lone_runs = job.story().crash_count;
        let dead_lettered = job.message().was_dead_lettered();
        self.suspects().look(interrupted, lone_runs, dead_lettered, || Key::as_delivered(job))
    }

    pub(crate) fn suspects(&self) -> MutexGuard<'_, Suspects<Key>> {
        self.custody.suspects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many deliveries are unacked, and still ours.
    pub(super) fn unacked(&self) -> usize {
        self.custody.in_hand.ours()
    }

    pub(super) async fn until_none_is_unacked(&self) {
        loop {
            let fewer = self.custody.in_hand.fewer.notified();
            if self.unacked() == 0 {
                return;
            }
            // Nobody reports that one became stale.
            let _ = tokio::time::timeout(STALE_CHECK, fewer).await;
        }
    }

    /// Waits until so few deliveries are without an answer.
    pub(crate) async fn until_in_hand(&self, most: usize) {
        self.custody.in_hand.at_most(most).await;
    }

    /// Waits until all but one have an answer that the broker has worked off.
    pub(crate) async fn until_nothing_else_is_in_hand(&self) {
        self.until_in_hand(1).await;
        self.until_answers_are_read().await;
    }

    /// Waits until all have one that the broker has worked off.
    pub(crate) async fn until_nothing_is_in_hand(&self) {
        self.until_in_hand(0).await;
        self.until_answers_are_read().await;
    }

    /// Gives back a job that got no outcome, for the consumer pauses, stops, or is to run suspects
    /// alone. False if the broker was not told.
    pub(crate) async fn set_aside(self: &Arc<Self>, arrived: Arrived) -> bool {
        let unharmed = arrived.job.message().delivery_count() == 0
            && !self.custody.marks.load(Relaxed)
            && arrived.suspicion == Suspicion::Clear;
        if unharmed {
            return self.give_back(&arrived.job, &*arrived.tag).await;
        }
        self.send_to_tail(arrived).await
    }

    /// The same as a copy. One that has come nearer to the delivery limit of its queue goes to the
    /// tail, where its count starts afresh: else many pauses in a row would use the limit up, and 4.0
    /// drops what is over. And one that would look as if its process had died of it.
    pub(crate) async fn send_to_tail(self: &Arc<Self>, arrived: Arrived) -> bool {
        let Arrived { job, tag, suspicion } = arrived;
        match self.to_tail(&job, suspicion) {
            Some(to) => {
                self.leaving(job, tag, to).go();
                true
            }
            None => self.give_back(&job, &*tag).await,
        }
    }

    /// None while copies do not get through.
    fn to_tail(&self, job: &Job, suspicion: Suspicion) -> Option<Box<Move>> {
        if let Pace::Stuck { .. } = self.pace() {
            return None;
        }
        if suspicion == Suspicion::Count {
            return Some(self.count_crash(job));
        }
        let mut to = Box::new(Move::return_unrun(job, self.now()));
        // Not if it would not fit, for it has done nothing to be buried.
        self.copy(job, &mut to).1.due.is_ok().then_some(to)
    }

    /// Where a suspect goes before it is run.
    pub(crate) fn count_crash(&self, job: &Job) -> Box<Move> {
        Box::new(self.rules().count_crash(job, self.now(), self.worker()))
    }

    /// The same for one that is no suspect.
    pub(crate) fn start_afresh(&self, job: &Job) -> Box<Move> {
        Box::new(Move::start_afresh(job, self.now()))
    }

    pub(crate) async fn give_back(&self, job: &Job, tag: &dyn Tag) -> bool {
        let key = Key::as_delivered(job);
        // Before, for it may come at once.
        self.suspects().give_back(key.clone());
        let told = tag.give_back().await;
        if !told {
            self.suspects().did_not_give_back(key);
        }
        self.note_answer();
        told
    }
}

impl Arrived {
    /// A job that has been admitted, and goes back after all.
    pub(super) fn again(job: Job, tag: Arc<dyn Tag>) -> Self {
        let marked = job.story().crash_count > 0;
        let suspicion = if marked { Suspicion::Alone } else { Suspicion::Clear };
        Self { job, tag, suspicion }
    }
}
