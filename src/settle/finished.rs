//! Jobs whose work is done. An ack is never confirmed: it may be lost with its connection, and then
//! the broker delivers the job again.

use std::{
    collections::HashMap,
    fmt,
    hash::{BuildHasher, RandomState},
    sync::{MutexGuard, PoisonError},
};

use super::Engine;
use crate::Job;

/// The jobs that succeeded last, by their message ids: for each id the message that had it last.
///
/// The ids are kept in two generations. When the younger one is full the older one is forgotten as
/// a whole, so that there is no order to keep and no more than twice the number is ever held.
pub(super) struct Finished {
    /// As many are remembered at least.
    jobs: usize,
    /// Of the process alone, so that nobody can publish two jobs that it takes for one.
    hasher: RandomState,
    younger: HashMap<u64, u64>,
    older: HashMap<u64, u64>,
}

impl Finished {
    pub(super) fn new(jobs: usize) -> Self {
        let (younger, older) = (HashMap::new(), HashMap::new());
        Self { jobs, hasher: RandomState::new(), younger, older }
    }

    /// The handler succeeded. What the broker makes of the ack is not known then, and what it will
    /// not get is what this is for.
    fn add(&mut self, job: &Job) {
        let Some(id) = self.id(job) else { return };
        if self.younger.len() >= self.jobs {
            self.older = std::mem::take(&mut self.younger);
        }
        self.older.remove(&id);
        self.younger.insert(id, self.content(job));
    }

    /// Whether a delivery is one of these again.
    fn knows(&mut self, job: &Job) -> bool {
        let Some(id) = self.id(job) else { return false };
        if !job.redelivered() {
            // Another message has the id now: a retry, or a job of a publisher who uses ids again.
            // If it is delivered again itself it must be run, so the one before is forgotten.
            self.younger.remove(&id);
            self.older.remove(&id);
            return false;
        }
        let known = self.younger.get(&id).or_else(|| self.older.get(&id));
        known.is_some_and(|content| *content == self.content(job))
    }

    /// None for a job that came without an id: it would be no other one the next time.
    fn id(&self, job: &Job) -> Option<u64> {
        let id = job.properties().message_id().as_ref().filter(|_| self.jobs > 0)?;
        (!id.as_str().is_empty()).then(|| self.hasher.hash_one(id.as_str()))
    }

    /// What tells a message from others of its id: from other jobs, and from retries.
    fn content(&self, job: &Job) -> u64 {
        let (story, timestamp) = (job.story(), job.properties().timestamp());
        let round = (story.retry_count, story.busy_count, story.exhumed_count);
        self.hasher.hash_one((job.body(), job.exchange(), job.routing_key(), timestamp, round))
    }
}

/// Not the hashes, which tell nobody anything.
impl fmt::Debug for Finished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let remembered = self.younger.len() + self.older.len();
        f.debug_struct("Finished").field("remembered", &remembered).finish_non_exhaustive()
    }
}

impl Engine {
    /// Before its ack is tried: where handlers take turns, the job may be waiting for this one's
    /// turn already as it is delivered again.
    pub(super) fn finished(&self, job: &Job) {
        self.finished_jobs().add(job);
    }

    /// Whether the work of a delivery is done.
    pub(crate) fn is_finished(&self, job: &Job) -> bool {
        self.finished_jobs().knows(job)
    }

    fn finished_jobs(&self) -> MutexGuard<'_, Finished> {
        self.finished.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Message, Story};
    use lapin::BasicProperties;

    fn job(id: &str, body: &str, redelivered: bool, story: Story) -> Job {
        let properties = BasicProperties::default().with_message_id(id.into());
        let (exchange, routing_key) = ("shop".into(), "order.new".into());
        let body = body.into();
        Job::new(Message { exchange, routing_key, redelivered, properties, body }, story)
    }

    fn first(id: &str) -> Job {
        job(id, "tea", false, Story::default())
    }

    fn again(id: &str) -> Job {
        job(id, "tea", true, Story::default())
    }

    #[test]
    fn only_what_succeeded_and_is_delivered_again_is_known() {
        let mut finished = Finished::new(10);
        assert!(!finished.knows(&again("1")), "given back before it was run");
        finished.add(&first("1"));
        assert!(finished.knows(&again("1")));
        assert!(finished.knows(&again("1")), "the ack that followed may be lost as well");
        assert!(!finished.knows(&again("2")));
    }

    #[test]
    fn a_retry_an_exhumed_job_and_another_content_are_run() {
        let mut finished = Finished::new(10);
        finished.add(&first("1"));
        assert!(!finished.knows(&job("1", "milk", true, Story::default())));
        let counts: [fn(&mut Story) -> &mut u32; 3] = [
            |story| &mut story.retry_count,
            |story| &mut story.busy_count,
            |story| &mut story.exhumed_count,
        ];
        for count in counts {
            let mut story = Story::default();
            *count(&mut story) = 1;
            assert!(!finished.knows(&job("1", "tea", true, story.clone())), "{story:?}");
        }
        assert!(finished.knows(&again("1")));
    }

    #[test]
    fn a_new_message_takes_the_id_from_the_one_before() {
        let mut finished = Finished::new(10);
        finished.add(&first("1"));
        assert!(!finished.knows(&first("1")));
        assert!(!finished.knows(&again("1")), "the new one, given back before it was run");
    }

    #[test]
    fn a_job_that_came_without_an_id_is_run_again() {
        let mut finished = Finished::new(10);
        finished.add(&first(""));
        assert!(!finished.knows(&again("")));
    }

    #[test]
    fn as_many_are_remembered_as_was_said_and_never_more_than_twice_as_many() {
        let mut finished = Finished::new(100);
        for id in 0..1000 {
            finished.add(&first(&id.to_string()));
            assert!(finished.younger.len() + finished.older.len() <= 200);
            let oldest = (id + 1 - 100).max(0);
            assert!(finished.knows(&again(&oldest.to_string())), "{oldest} of {id}");
        }
        assert!(!finished.knows(&again("0")));
        let mut off = Finished::new(0);
        off.add(&first("1"));
        assert!(!off.knows(&again("1")));
    }
}
