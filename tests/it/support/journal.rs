//! What workers did: every attempt and every event, for tests that count and measure.

use super::{PATIENCE, eventually};
use anyhow::{Context, anyhow};
use lapin::types::{AMQPValue, FieldTable};
use lapin_retry::{BuriedReason, Event, Job, PauseKind, Resumed, Severity};
use std::{
    collections::BTreeSet,
    future::{Future, Ready, ready},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

/// Cheap to clone; all clones are one journal, so several workers may share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Journal(Arc<Mutex<Pages>>);

#[derive(Debug, Default)]
struct Pages {
    attempts: Vec<Attempt>,
    succeeded: BTreeSet<String>,
    events: Vec<Event>,
}

/// One call of a handler.
#[derive(Clone, Debug)]
pub(crate) struct Attempt {
    pub(crate) job: Job,
    pub(crate) started: Instant,
    /// Just before [`Journal::handler`] returned, and so before anything was published. Other
    /// handlers do not tell.
    pub(crate) ended: Option<Instant>,
}

impl Attempt {
    /// Steps of this message towards the delivery limit of its queue.
    pub(crate) fn steps(&self) -> i64 {
        steps(self.job.properties().headers().as_ref())
    }

    /// The kind of the failure before this attempt.
    pub(crate) fn error_kind(&self) -> Option<String> {
        let headers = self.job.properties().headers().as_ref()?;
        Some(headers.inner().get("retry-error-kind")?.as_long_string()?.to_string())
    }
}

/// What became of a job in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Done,
    Buried(BuriedReason),
}

impl Journal {
    /// For `on_event`: writes down every event.
    pub(crate) fn hook(&self) -> impl Fn(&Event) + Send + Sync + 'static {
        let journal = self.clone();
        move |event| journal.lock().events.push(event.clone())
    }

    /// A handler that writes itself down, and fails as long as the job's count is below
    /// `failures`: with the error `attempt <retry count>: out of luck`.
    pub(crate) fn handler(
        &self,
        failures: impl Fn(&Job) -> u32 + Send + Sync + 'static,
    ) -> impl Fn(Job) -> Ready<anyhow::Result<()>> + Send + Sync + 'static {
        let journal = self.clone();
        move |job| {
            let started = Instant::now();
            let count = job.retry_count();
            let result = if count < failures(&job) {
                Err(anyhow!("out of luck")).with_context(|| format!("attempt {count}"))
            } else {
                Ok(())
            };
            let attempt = Attempt { job, started, ended: Some(Instant::now()) };
            journal.lock().attempts.push(attempt);
            ready(result)
        }
    }

    /// For a handler of the test's own: writes down that it was called, and answers how many calls
    /// there were with this one.
    pub(crate) fn begin(&self, job: &Job) -> usize {
        let attempt = Attempt { job: job.clone(), started: Instant::now(), ended: None };
        let mut pages = self.lock();
        pages.attempts.push(attempt);
        pages.attempts.len()
    }

    /// For a handler of the test's own: writes down that it is about to succeed.
    pub(crate) fn succeed(&self, job: &Job) {
        self.lock().succeeded.insert(job.id().to_owned());
    }

    /// What `pick` makes of the events so far.
    pub(crate) fn all<T>(&self, pick: impl Fn(&Event) -> Option<T>) -> Vec<T> {
        self.lock().events.iter().filter_map(pick).collect()
    }

    pub(crate) fn count(&self, which: impl Fn(&Event) -> bool) -> usize {
        self.lock().events.iter().filter(|event| which(event)).count()
    }

    /// Waits for the first event of which `pick` makes something.
    #[track_caller]
    pub(crate) fn first<T>(
        &self,
        what: &str,
        pick: impl Fn(&Event) -> Option<T>,
    ) -> impl Future<Output = T> {
        eventually(what, PATIENCE, async move || self.lock().events.iter().find_map(&pick))
    }

    /// In the order in which they were written down.
    pub(crate) fn attempts(&self) -> Vec<Attempt> {
        self.lock().attempts.clone()
    }

    pub(crate) fn attempts_of(&self, id: &str) -> Vec<Attempt> {
        let mut attempts = self.attempts();
        attempts.retain(|attempt| attempt.job.id() == id);
        attempts
    }

    /// How many attempts there were so far.
    pub(crate) fn attempted(&self) -> usize {
        self.lock().attempts.len()
    }

    /// For how many different jobs a handler said that it succeeds.
    pub(crate) fn succeeded(&self) -> usize {
        self.lock().succeeded.len()
    }

    /// The jobs that succeeded and were acked, as often as that was told.
    pub(crate) fn done(&self) -> Vec<String> {
        self.all(|event| match event {
            Event::Done { job, .. } => Some(job.id().to_owned()),
            _ => None,
        })
    }

    /// The different jobs that succeeded and were acked.
    pub(crate) fn finished(&self) -> BTreeSet<String> {
        self.done().into_iter().collect()
    }

    /// Waits until so many jobs are done.
    pub(crate) async fn until_done(&self, jobs: usize) {
        let what = format!("{jobs} jobs done");
        eventually(&what, PATIENCE, async || self.done().len() >= jobs).await;
    }

    /// Waits until this job is done.
    pub(crate) async fn is_done(&self, id: &str) {
        let what = format!("job {id} is done");
        eventually(&what, PATIENCE, async || self.done().iter().any(|done| done == id)).await;
    }

    /// Waits until so many jobs are buried, and tells why.
    #[track_caller]
    pub(crate) fn until_buried(&self, jobs: usize) -> impl Future<Output = Vec<BuriedReason>> {
        eventually("the burials", PATIENCE, async move || {
            let buried = self.all(|event| match event {
                Event::Buried { reason, .. } => Some(*reason),
                _ => None,
            });
            (buried.len() >= jobs).then_some(buried)
        })
    }

    /// The ids of the jobs that came to an end, and which.
    pub(crate) fn ends(&self) -> Vec<(String, End)> {
        self.all(|event| match event {
            Event::Done { job, .. } => Some((job.id().to_owned(), End::Done)),
            Event::Buried { job, reason, .. } => Some((job.id().to_owned(), End::Buried(*reason))),
            _ => None,
        })
    }

    /// The different jobs that are in a lane or in the buried queue, confirmed.
    pub(crate) fn handed_off(&self) -> BTreeSet<String> {
        let jobs = self.all(|event| match event {
            Event::Retried { job, .. } | Event::Buried { job, .. } => Some(job.id().to_owned()),
            _ => None,
        });
        jobs.into_iter().collect()
    }

    /// Level and delay of every retry.
    pub(crate) fn retries(&self) -> Vec<(u32, Duration)> {
        self.all(|event| match event {
            Event::Retried { level, delay, .. } => Some((*level, *delay)),
            _ => None,
        })
    }

    /// The delay of every retry.
    pub(crate) fn delays(&self) -> Vec<Duration> {
        self.retries().into_iter().map(|(_, delay)| delay).collect()
    }

    /// Level and delay after the failure of the attempt with this retry count.
    pub(crate) fn retried(&self, id: &str, retry_count: u32) -> Option<(u32, Duration)> {
        let found = self.all(|event| match event {
            Event::Retried { job, level, delay, .. }
                if job.id() == id && job.retry_count() == retry_count =>
            {
                Some((*level, *delay))
            }
            _ => None,
        });
        assert!(found.len() <= 1, "job {id} was retried twice after attempt {retry_count}");
        found.first().copied()
    }

    /// How often a job waited without being charged.
    pub(crate) fn postponed(&self) -> usize {
        self.count(|event| matches!(event, Event::Postponed { .. }))
    }

    /// Tries after which the broker may or may not have had the copy.
    pub(crate) fn undecided(&self) -> usize {
        self.count(|event| matches!(event, Event::HandOffFailed { undecided: true, .. }))
    }

    /// Tries after which the broker did not have the copy.
    pub(crate) fn refused(&self) -> usize {
        self.count(|event| matches!(event, Event::HandOffFailed { undecided: false, .. }))
    }

    /// All that may have put a second copy of a job on the broker.
    pub(crate) fn possible_duplicates(&self) -> usize {
        self.undecided() + self.count(|event| matches!(event, Event::Duplicated { .. }))
    }

    pub(crate) fn disconnected(&self) -> usize {
        self.count(|event| matches!(event, Event::Disconnected { .. }))
    }

    /// The waits of the outages, in their order.
    pub(crate) fn waits(&self) -> Vec<Duration> {
        self.all(|event| match event {
            Event::Paused { kind: PauseKind::Outage, wait, .. } => *wait,
            _ => None,
        })
    }

    pub(crate) fn resumed(&self) -> Vec<Resumed> {
        self.all(|event| match event {
            Event::Resumed { why, .. } => Some(*why),
            _ => None,
        })
    }

    /// No connection died, no hand-off failed, no job was seen twice.
    #[track_caller]
    pub(crate) fn nothing_broke(&self) {
        let broke = self.all(|event| match event {
            Event::Disconnected { .. }
            | Event::HandOffFailed { .. }
            | Event::Stale { .. }
            | Event::Duplicated { .. } => Some(event.clone()),
            _ => None,
        });
        assert!(broke.is_empty(), "{broke:?}");
    }

    /// Panics at any event that tells of something else than the plain life of a job.
    #[track_caller]
    pub(crate) fn assert_no_trouble(&self) {
        let trouble = self.all(|event| match event {
            Event::Ready { .. }
            | Event::Done { .. }
            | Event::Retried { .. }
            | Event::Buried { .. } => None,
            Event::Found { finding, .. } if finding.severity == Severity::Unchecked => None,
            trouble => Some(trouble.clone()),
        });
        assert!(trouble.is_empty(), "{trouble:?}");
    }

    fn lock(&self) -> MutexGuard<'_, Pages> {
        self.0.lock().expect("no panic inside")
    }
}

/// Reads how often a job is to fail from its body.
pub(crate) fn as_the_body_says(job: &Job) -> u32 {
    std::str::from_utf8(job.body()).unwrap().parse().expect("a number of failures")
}

/// Steps towards the delivery limit: absent on a first delivery, or 0.
pub(crate) fn steps(headers: Option<&FieldTable>) -> i64 {
    match headers.and_then(|headers| headers.inner().get("x-delivery-count")) {
        None => 0,
        Some(AMQPValue::LongLongInt(n)) => *n,
        Some(other) => other.as_long_int().map_or_else(
            || other.as_short_short_uint().map_or_else(|| panic!("a count: {other:?}"), i64::from),
            i64::from,
        ),
    }
}
