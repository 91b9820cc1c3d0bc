//! Before the handler: what must not run is dropped or buried here.

use std::sync::Arc;

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
        let story = Story::read(&message, self.queue());
        let job = Job::new(message, story);
        // lapin hands out what it had buffered when the channel died. Such a job is delivered
        // again, so running it now would run it twice.
        if !tag.usable() {
            self.emit(&Event::Stale { job });
            return None;
        }
        if let Some(reason) = self.refuse(&job) {
            let story = job.story().clone();
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
        let late = job.story().deadline.is_some_and(|deadline| deadline < self.now());
        late.then_some(BuriedReason::Expired)
    }
}
