//! Before the handler: what must not run is dropped or buried here.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use crate::{
    BuriedReason, Event, Job, UnsettledJob,
    link::Incoming,
    message::Story,
    settle::{Engine, Move},
};

impl Engine {
    /// The job, if it is to be run.
    pub(crate) fn admit(self: &Arc<Self>, incoming: Incoming) -> Option<UnsettledJob> {
        let Incoming { message, tag } = incoming;
        let mut story = Story::read(&message, self.queue());
        story.forgive(self.now());
        let job = Job::new(message, story);
        // lapin hands out what it had buffered when the channel died. Such a job is delivered
        // again, so running it now would run it twice.
        if !tag.usable() {
            self.emit(&Event::Stale { job });
            return None;
        }
        if let Some(reason) = self.refuse(&job) {
            let mut story = job.story().clone();
            story.remember(job.message(), self.now());
            let burial = Move::bury(story, reason, String::new());
            let engine = Arc::clone(self);
            self.spawn(async move { engine.hand_off(None, &job, &*tag, burial).await });
            return None;
        }
        Some(UnsettledJob::new(Arc::clone(self), job, tag))
    }

    /// Why a job is buried without a run. A deadline that makes no sense is judged like any other
    /// header, when the job fails: one that would have succeeded is not buried for it.
    fn refuse(&self, job: &Job) -> Option<BuriedReason> {
        let now = self.now();
        let late = deadline(job, now).is_some_and(|deadline| deadline < now);
        late.then_some(BuriedReason::Expired)
    }
}

/// What is known of it on arrival: without a timestamp it counts from the first failure only.
fn deadline(job: &Job, now: SystemTime) -> Option<SystemTime> {
    let properties = &job.message().properties;
    if job.story().deadline.is_some() || properties.timestamp().is_none() {
        return job.story().deadline;
    }
    let mut story = job.story().clone();
    story.remember(job.message(), now);
    // A timestamp counts whole seconds, so the job may be nearly one younger than it says.
    story.deadline?.checked_add(Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Message;
    use lapin::BasicProperties;

    #[test]
    fn a_deadline_by_timestamp_is_no_earlier_than_the_jobs_true_age_allows() {
        let second = |s: f64| SystemTime::UNIX_EPOCH + Duration::from_secs_f64(s);
        let arrives = |timestamp: Option<u64>, expiration: Option<&str>, now: f64| {
            let mut properties = BasicProperties::default();
            if let Some(timestamp) = timestamp {
                properties = properties.with_timestamp(timestamp);
            }
            if let Some(expiration) = expiration {
                properties = properties.with_expiration(expiration.into());
            }
            let (exchange, routing_key) = ("".into(), "orders".into());
            let (redelivered, body) = (false, Vec::new());
            let message = Message { exchange, routing_key, redelivered, properties, body };
            let story = Story::read(&message, "orders");
            deadline(&Job::new(message, story), second(now))
        };
        // Published at 100.9, it has until 101.0, and a publisher could not say it better.
        assert_eq!(arrives(Some(100), Some("100"), 100.95), Some(second(101.1)));
        assert_eq!(arrives(Some(100), Some("5000"), 300.0), Some(second(106.0)));
        assert_eq!(arrives(None, Some("5000"), 300.0), None);
        assert_eq!(arrives(Some(100), None, 300.0), None);
        // A timestamp of the future tells nothing.
        assert!(arrives(Some(500), Some("0"), 300.0) >= Some(second(300.0)));
        assert!(arrives(Some(u64::MAX), Some("0"), 300.0) >= Some(second(300.0)));
        assert_eq!(arrives(Some(100), Some("soon"), 300.0), None);
    }
}
