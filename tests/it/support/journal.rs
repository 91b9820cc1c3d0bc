//! What a worker did: every attempt and every event, for tests that count and measure.

use std::{
    future::{Ready, ready},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow};
use lapin_retry::{BuriedReason, Event, Job};

/// Cheap to clone; all clones are one journal, so several workers may share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Journal(Arc<Mutex<Pages>>);

#[derive(Debug, Default)]
struct Pages {
    attempts: Vec<Attempt>,
    events: Vec<Event>,
}

/// One call of the handler.
#[derive(Clone, Debug)]
pub(crate) struct Attempt {
    pub(crate) job: Job,
    pub(crate) started: Instant,
    /// Just before the handler returned, and so before anything was published.
    pub(crate) ended: Instant,
}

/// What became of a job in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Done,
    Buried(BuriedReason),
}

impl Journal {
    /// Writes down every event.
    pub(crate) fn hook(&self) -> impl Fn(&Event) + Send + Sync + 'static {
        let journal = self.clone();
        move |event| journal.0.lock().unwrap().events.push(event.clone())
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
            let attempt = Attempt { job, started, ended: Instant::now() };
            journal.0.lock().unwrap().attempts.push(attempt);
            ready(result)
        }
    }

    /// In the order of their ends.
    pub(crate) fn attempts(&self) -> Vec<Attempt> {
        self.0.lock().unwrap().attempts.clone()
    }

    pub(crate) fn attempts_of(&self, id: &str) -> Vec<Attempt> {
        let mut attempts = self.attempts();
        attempts.retain(|attempt| attempt.job.id() == id);
        attempts
    }

    /// Level and delay after the failure of the attempt with this retry count.
    pub(crate) fn retried(&self, id: &str, retry_count: u32) -> Option<(u32, Duration)> {
        let pages = self.0.lock().unwrap();
        let mut found = pages.events.iter().filter_map(|event| match event {
            Event::Retried { job, level, delay, .. }
                if job.id() == id && job.retry_count() == retry_count =>
            {
                Some((*level, *delay))
            }
            _ => None,
        });
        let first = found.next();
        assert!(found.next().is_none(), "job {id} was retried twice after attempt {retry_count}");
        first
    }

    /// Level and delay of every retry.
    pub(crate) fn retries(&self) -> Vec<(u32, Duration)> {
        let pages = self.0.lock().unwrap();
        let retries = pages.events.iter().filter_map(|event| match event {
            Event::Retried { level, delay, .. } => Some((*level, *delay)),
            _ => None,
        });
        retries.collect()
    }

    /// The ids of the jobs that came to an end, and which.
    pub(crate) fn ends(&self) -> Vec<(String, End)> {
        let pages = self.0.lock().unwrap();
        let ends = pages.events.iter().filter_map(|event| match event {
            Event::Done { job, .. } => Some((job.id().to_owned(), End::Done)),
            Event::Buried { job, reason, .. } => Some((job.id().to_owned(), End::Buried(*reason))),
            _ => None,
        });
        ends.collect()
    }

    /// Panics at any event that tells of something else than the plain life of a job.
    #[track_caller]
    pub(crate) fn assert_no_trouble(&self) {
        for event in &self.0.lock().unwrap().events {
            match event {
                Event::Ready { .. }
                | Event::Done { .. }
                | Event::Retried { .. }
                | Event::Buried { .. } => {}
                trouble => panic!("{trouble:?}"),
            }
        }
    }
}

/// Reads how often a job is to fail from its body.
pub(crate) fn as_the_body_says(job: &Job) -> u32 {
    std::str::from_utf8(job.body()).unwrap().parse().expect("a number of failures")
}
