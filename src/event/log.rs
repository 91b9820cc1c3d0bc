//! What the log says of each event.

use std::time::Duration;

use super::{Event, Postponed};
use crate::{Finding, Severity};

/// Says it once, at the level that it deserves.
pub(super) fn log(queue: &str, event: &Event) {
    match event {
        Event::Ready { queues, .. } => {
            tracing::info!(queue, queues, "lanes and buried queue are ready");
        }
        Event::Found { finding, .. } => {
            let Finding { severity, queue: on, problem, remedy } = finding;
            // Not as quoted text, so that a command can be pasted as it stands there.
            if *severity == Severity::Unchecked {
                tracing::info!(queue, on, %problem, %remedy, "the doctor did not look");
            } else {
                tracing::warn!(queue, on, ?severity, %problem, %remedy, "the doctor found");
            }
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
        Event::AlreadyDone { job } => {
            tracing::info!(
                queue,
                job_id = job.id(),
                job_type = job.kind(),
                retry_count = job.retry_count(),
                "delivered again although it is done; acked without a run"
            );
        }
        Event::Retried { job, level, delay, due, kind, error } => {
            tracing::info!(
                queue,
                job_id = job.id(),
                job_type = job.kind(),
                retry_count = job.retry_count() + 1,
                retry_level = level,
                delay_ms = millis(*delay),
                due_at = %humantime::format_rfc3339_millis(*due),
                kind = kind.as_str(),
                error,
                "failed, comes back later"
            );
        }
        Event::Postponed { job, delay, why: Postponed::Dropped, .. } => {
            let (job_id, delay_ms) = (job.id(), millis(*delay));
            tracing::warn!(
                queue,
                job_id,
                delay_ms,
                "dropped unsettled; not charged, comes back later"
            );
        }
        Event::Postponed { job, delay, due, why } => {
            tracing::debug!(
                queue,
                job_id = job.id(),
                job_type = job.kind(),
                delay_ms = millis(*delay),
                due_at = %humantime::format_rfc3339_millis(*due),
                ?why,
                "not charged, comes back later"
            );
        }
        // One line a wait, not one a job: the pause has told of the error.
        Event::Returned { job, error } => {
            tracing::debug!(
                queue,
                job_id = job.id(),
                job_type = job.kind(),
                error,
                "returned unharmed"
            );
        }
        Event::Suspected { job, crashes: 0 } => {
            tracing::info!(
                queue,
                job_id = job.id(),
                job_type = job.kind(),
                "a process died that had it among others; it will be run alone"
            );
        }
        Event::Suspected { job, crashes } => {
            tracing::warn!(
                queue,
                job_id = job.id(),
                job_type = job.kind(),
                crashes,
                "a process died while it ran this job alone; it will be run alone once more"
            );
        }
        Event::OneByOne { .. } => {
            tracing::info!(queue, "taking one job at a time: one of them may end the process");
        }
        Event::Paused { kind, error, wait, .. } => {
            let wait_ms = wait.map(millis);
            tracing::warn!(queue, ?kind, error, wait_ms, "paused: no jobs are taken");
        }
        Event::Resumed { why, .. } => {
            tracing::info!(queue, ?why, "resumed");
        }
        Event::Buried { job, reason, detail, error } => {
            tracing::warn!(
                queue,
                job_id = job.id(),
                job_type = job.kind(),
                reason = reason.as_str(),
                detail,
                error,
                "buried"
            );
        }
        Event::GivenBack { job, why } => {
            tracing::warn!(queue, job_id = job.id(), why, "given back");
        }
        Event::Stale { job } => {
            tracing::info!(queue, job_id = job.id(), "not settled; the job is delivered again");
        }
        Event::Duplicated { job } => {
            tracing::warn!(
                queue,
                job_id = job.id(),
                "copy confirmed but not acked; the job is delivered again beside its copy"
            );
        }
        // One line a wait, not one a job: the pause tells of it.
        Event::HandOffFailed { job, queue: to, why, tries, stuck: true, .. } => {
            tracing::debug!(queue, job_id = job.id(), to, why, tries, "hand-off still fails");
        }
        // The first tries and then ever fewer: each job tries again and again.
        Event::HandOffFailed { tries, .. } if !tries.is_power_of_two() => {}
        Event::HandOffFailed { job, queue: to, why, undecided, tries, .. } => {
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
            let wait_ms = millis(*wait);
            tracing::warn!(queue, %error, wait_ms, "not consuming; trying again after the wait");
        }
        Event::GaveUp { error, .. } => {
            tracing::error!(queue, %error, "not consuming; gave up");
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn a_command_can_be_pasted_from_the_log() {
        #[derive(Clone, Default)]
        struct Log(Arc<Mutex<Vec<u8>>>);
        impl std::io::Write for Log {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0.lock().unwrap().write(bytes)
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone());
        let subscriber = Arc::new(subscriber.finish());
        let remedy = r#"rabbitmqctl set_policy p '^a\.b$' '{"overflow":"reject-publish"}'"#;
        let (queue, remedy) = ("a.b".to_owned(), remedy.to_owned());
        let problem = "it is not durable".to_owned();
        for severity in [Severity::Unchecked, Severity::Loss] {
            let (problem, remedy) = (problem.clone(), remedy.clone());
            let finding = Finding { severity, queue: queue.clone(), problem, remedy };
            let found = Event::Found { queue: queue.clone(), finding };
            tracing::subscriber::with_default(Arc::clone(&subscriber), || {
                super::log(&queue, &found)
            });
        }
        let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.matches(&remedy).count(), 2, "{text}");
    }
}
