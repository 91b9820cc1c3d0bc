//! Jobs whose handler outlasts the broker's consumer timeout. The broker takes them back, so their
//! failure cannot be charged while they are ours: it is when they are delivered again.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::time::Instant;

use super::{Acks, Engine, Move, key::Key};
use crate::{Job, TimedOut, policy::Verdict};

/// How many jobs are remembered at most.
const REMEMBERED: usize = 100;

/// Why a broker took back all deliveries of a consumer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Revoked {
    /// It says so, and names the consumer timeout.
    TimedOut(Duration),
    /// It cancelled the consumer, and says no more: the consumer timeout of RabbitMQ 4.3 does, and so
    /// do others.
    Cancelled,
}

/// The consumer timeout, and who outlasted it.
#[derive(Debug)]
pub(super) struct Overdue {
    /// The shortest that was named by the broker, in ms.
    named_ms: AtomicU64,
    jobs: Mutex<Suspected>,
}

impl Default for Overdue {
    fn default() -> Self {
        Self { named_ms: AtomicU64::new(u64::MAX), jobs: Mutex::default() }
    }
}

/// Each of them was held longest, with its handler running, when a consumer was revoked.
#[derive(Debug, Default)]
struct Suspected(VecDeque<Suspect>);

#[derive(Debug)]
struct Suspect {
    key: Key,
    /// How long it had been held.
    age: Duration,
    /// It is charged when it is delivered again.
    charged: bool,
}

impl Suspected {
    /// A cancel names no cause, so one proves nothing. Two of them do, where the same job was held
    /// longest, and for as long.
    fn note(&mut self, key: Key, age: Duration, named: bool) {
        let before = self.0.iter().position(|suspect| suspect.key.is_same_job(&key));
        let before = before.and_then(|found| self.0.remove(found));
        let again = before.is_some_and(|suspect| is_about(suspect.age, age));
        self.0.push_back(Suspect { key, age, charged: named || again });
        while self.0.len() > REMEMBERED {
            self.0.pop_front();
        }
    }

    /// How long it had been held, if it is to be charged for that: once.
    fn charge(&mut self, job: &Job) -> Option<Duration> {
        if self.0.is_empty() || !job.redelivered() {
            return None;
        }
        let key = Key::as_delivered(job);
        let suspect = self.0.iter_mut().find(|suspect| suspect.charged && suspect.key == key)?;
        suspect.charged = false;
        Some(suspect.age)
    }
}

fn is_about(one: Duration, other: Duration) -> bool {
    one.abs_diff(other) <= one / 10 + Duration::from_millis(500)
}

impl Engine {
    /// All deliveries of a consumer were revoked: notes which job may have been the cause. One that
    /// mostly waited was not, nor one beside which an older one was held.
    pub(crate) fn revoked(&self, acks: &Acks, why: Revoked) {
        if let Revoked::TimedOut(timeout) = why {
            let ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
            if self.overdue.named_ms.fetch_min(ms, Relaxed) > ms {
                tracing::warn!(
                    queue = self.queue(),
                    "the broker's consumer timeout is {timeout:?}: handlers are cancelled before it \
                     from now on; set consumer_timeout to it and handler_timeout below, or raise \
                     the broker's"
                );
            }
        }
        let Some((job, ran)) = acks.held_longest() else { return };
        let age = job.received().elapsed();
        if ran >= age / 2 {
            let named = matches!(why, Revoked::TimedOut(_));
            self.suspected().note(Key::as_delivered(&job), age, named);
        }
    }

    /// Where a job goes that outlasted the consumer timeout, if it is one.
    pub(crate) fn outlasted(&self, job: &Job) -> Option<Box<Move>> {
        let after = self.suspected().charge(job)?;
        let why = "the broker's consumer timeout passed, and it took the delivery back; raise that \
                   timeout, or let the handler take less time";
        let error = anyhow::Error::new(TimedOut { after }).context(why);
        let rules = self.rules();
        let verdict = Verdict::from_result(Err(error), &rules.settings.classifiers);
        rules.after_attempt(job, verdict, self.now(), self.worker()).map(Box::new)
    }

    /// As the settings say, or as the broker says if that is shorter.
    pub(crate) fn consumer_timeout(&self) -> Duration {
        let named = Duration::from_millis(self.overdue.named_ms.load(Relaxed));
        (2 * self.settings.hold).min(named)
    }

    /// How long a job may wait for its handler, so that enough of the consumer timeout is left.
    pub(crate) fn longest_wait(&self) -> Duration {
        self.consumer_timeout() / 4
    }

    /// How long a handler may run that starts now: `most`, or less where its job has waited, so that
    /// its delivery is still ours at the end, and its outcome can be handed off.
    pub(crate) fn time_to_run(&self, job: &Job, most: Duration) -> Duration {
        let timeout = self.consumer_timeout();
        let ours = timeout - self.settings.hand_off_bound.min(timeout / 6);
        most.min(ours.saturating_sub(job.received().elapsed()))
    }

    fn suspected(&self) -> MutexGuard<'_, Suspected> {
        self.overdue.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// When a handler began, for whoever asks how long it has run.
#[derive(Debug, Default)]
pub(super) struct Running(Mutex<Option<Instant>>);

impl Running {
    pub(super) fn set(&self, running: bool) {
        *self.lock() = running.then(Instant::now);
    }

    pub(super) fn for_how_long(&self) -> Option<Duration> {
        self.lock().map(|since| since.elapsed())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Message, Story};
    use lapin::BasicProperties;

    fn job(id: &str, retry_count: u32) -> Job {
        let message = Message {
            exchange: "shop".into(),
            routing_key: "order.new".into(),
            redelivered: true,
            properties: BasicProperties::default().with_message_id(id.into()),
            body: b"tea".to_vec(),
        };
        let mut story = Story::default();
        story.retry_count = retry_count;
        Job::new(message, story)
    }

    const TEN: Duration = Duration::from_secs(10);

    fn note(suspected: &mut Suspected, job: &Job, seconds: u64, named: bool) {
        suspected.note(Key::as_delivered(job), Duration::from_secs(seconds), named);
    }

    #[test]
    fn a_named_timeout_is_charged_at_once_and_only_once() {
        let mut suspected = Suspected::default();
        note(&mut suspected, &job("1", 0), 10, true);
        assert_eq!(suspected.charge(&job("2", 0)), None);
        assert_eq!(suspected.charge(&job("1", 0)), Some(TEN));
        assert_eq!(suspected.charge(&job("1", 0)), None);
    }

    #[test]
    fn a_cancel_is_charged_when_the_same_job_was_held_for_as_long_twice() {
        let mut suspected = Suspected::default();
        note(&mut suspected, &job("1", 0), 10, false);
        note(&mut suspected, &job("2", 0), 10, false);
        assert_eq!(suspected.charge(&job("1", 0)), None);
        note(&mut suspected, &job("1", 0), 3, false);
        assert_eq!(suspected.charge(&job("1", 0)), None, "other cancels have other causes");
        note(&mut suspected, &job("1", 0), 3, false);
        assert_eq!(suspected.charge(&job("1", 0)), Some(Duration::from_secs(3)));
        // Its next attempt is known.
        note(&mut suspected, &job("1", 1), 3, false);
        assert!(suspected.charge(&job("1", 1)).is_some());
        assert_eq!(suspected.charge(&job("2", 0)), None);
    }
}
