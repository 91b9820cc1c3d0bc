//! How a delivery is known again.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::Job;

/// What tells a message from others. Two that it does not tell apart are as good as each other.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    id: Option<String>,
    retry_count: u32,
    crash_count: u32,
    content: u64,
}

impl Key {
    pub(super) fn of(job: &Job, id: Option<String>) -> Self {
        let mut content = DefaultHasher::new();
        (job.body(), job.exchange(), job.routing_key()).hash(&mut content);
        let (retry_count, crash_count) = (job.retry_count(), job.story().crash_count);
        Self { id, retry_count, crash_count, content: content.finish() }
    }

    pub(super) fn as_delivered(job: &Job) -> Self {
        let id = job.properties().message_id().as_ref();
        Self::of(job, id.map(ToString::to_string))
    }

    /// Whether it is the same job, at whichever attempt.
    pub(super) fn is_same_job(&self, other: &Self) -> bool {
        (&self.id, self.content) == (&other.id, other.content)
    }
}
