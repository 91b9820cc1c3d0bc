//! Every decision and change of state, as a value.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, SystemTime},
};

use crate::{BuriedReason, Error, FailureKind, Job};

/// Something happened to a job, or to a consumer. See [`Settings::on_event`](crate::Settings::on_event).
///
/// What is said of a job is said after the fact: after the broker's confirm and the ack.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The queues are there, and consuming may begin.
    #[non_exhaustive]
    Ready {
        /// The work queue.
        queue: String,
        /// How many queues there are beside it.
        queues: usize,
    },
    /// The handler succeeded, and the job was acked.
    #[non_exhaustive]
    Done {
        /// The job.
        job: Job,
    },
    /// The handler failed; the job is in a lane and comes back.
    #[non_exhaustive]
    Retried {
        /// The job, as it was at the attempt that failed.
        job: Job,
        /// The level it is on now, from 1.
        level: u32,
        /// The lane's delay.
        delay: Duration,
        /// When the broker gives it back.
        due: SystemTime,
        /// How the attempt failed.
        kind: FailureKind,
        /// The error and its sources.
        error: String,
    },
    /// The job is in the buried queue.
    #[non_exhaustive]
    Buried {
        /// The job, as it was when it arrived.
        job: Job,
        /// Why.
        reason: BuriedReason,
        /// The last error and its sources; empty if no attempt was made.
        error: String,
    },
    /// The job went back to the work queue without a verdict. Jobs that a shutdown gives back
    /// without having looked at them are not told of.
    #[non_exhaustive]
    GivenBack {
        /// The job.
        job: Job,
        /// Why.
        why: &'static str,
    },
    /// The job's channel died before the job was settled: the broker delivers it again.
    #[non_exhaustive]
    Stale {
        /// The job.
        job: Job,
    },
    /// The copy was confirmed, but the broker did not take the ack: the job is delivered again
    /// although its copy is on its way.
    #[non_exhaustive]
    Duplicated {
        /// The job.
        job: Job,
    },
    /// A hand-off did not succeed yet. The job stays unacked, and the hand-off is tried again.
    #[non_exhaustive]
    HandOffFailed {
        /// The job.
        job: Job,
        /// The lane, or the buried queue.
        queue: String,
        /// What the broker said, or did not say.
        why: String,
        /// Whether the broker may have the copy all the same, so that trying again may duplicate it.
        undecided: bool,
        /// How many tries failed so far.
        tries: u32,
    },
    /// The consumer lost the broker, or could not start; it tries again after the wait: at most
    /// 30 s, or 5 min if it met a message that cannot be read
    /// ([`ErrorKind::Unreadable`](crate::ErrorKind::Unreadable)), for each try counts as a delivery.
    #[non_exhaustive]
    Disconnected {
        /// The work queue.
        queue: String,
        /// Why.
        error: Error,
        /// How long it waits.
        wait: Duration,
    },
}

pub(crate) type Observer = Arc<dyn Fn(&Event) + Send + Sync>;

/// Tells the log and the hooks. A hook that panics harms nothing.
pub(crate) fn emit(queue: &str, observers: &[Observer], event: &Event) {
    log(queue, event);
    for observer in observers {
        if catch_unwind(AssertUnwindSafe(|| observer(event))).is_err() {
            tracing::error!(queue, "an event hook panicked; the job is not affected");
        }
    }
}

fn log(queue: &str, event: &Event) {
    match event {
        Event::Ready { queues, .. } => {
            tracing::info!(queue, queues, "lanes and buried queue are ready");
        }
        Event::Done { job } => {
            tracing::debug!(
                queue,
                job_id = job.id(),
                job_type = job.kind(),
                retry_count = job.retry_count(),
                "done"
            );
        }
        Event::Retried { job, level, delay, due, kind, error } => {
            tracing::info!(
                queue,
                job_id = job.id(),
                job_type = job.kind(),
                retry_count = job.retry_count() + 1,
                retry_level = level,
                delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX),
                due_at = %humantime::format_rfc3339_millis(*due),
                kind = kind.as_str(),
                error,
                "failed, comes back later"
            );
        }
        Event::Buried { job, reason, error } => {
            tracing::warn!(
                queue,
                job_id = job.id(),
                job_type = job.kind(),
                reason = reason.as_str(),
                error,
                "buried"
            );
        }
        Event::GivenBack { job, why } => {
            tracing::warn!(queue, job_id = job.id(), why, "given back");
        }
        Event::Stale { job } => {
            tracing::info!(queue, job_id = job.id(), "channel lost; the job is delivered again");
        }
        Event::Duplicated { job } => {
            tracing::warn!(
                queue,
                job_id = job.id(),
                "copy confirmed but not acked; the job is delivered again beside its copy"
            );
        }
        // The first tries and then ever fewer: while a queue is full every job tries every 5 s.
        Event::HandOffFailed { tries, .. } if !tries.is_power_of_two() => {}
        Event::HandOffFailed { job, queue: to, why, undecided, tries } => {
            tracing::warn!(
                queue,
                job_id = job.id(),
                to,
                why,
                undecided,
                tries,
                "hand-off failed; the job stays unacked and it is tried again"
            );
        }
        Event::Disconnected { error, wait, .. } => {
            let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
            tracing::warn!(queue, %error, wait_ms, "not consuming; trying again after the wait");
        }
    }
}
