//! Before the handler: what must not run is dropped, sent on or buried here.

use std::sync::Arc;

use tokio::time::Instant;

use crate::{
    Event, UnsettledJob,
    policy::Suspicion,
    settle::{Arrival, Arrived, Engine, Teller},
};

impl Engine {
    /// The job, if it is to be run; where suspects may be, whoever asks sees that they run alone. What
    /// is left of its wait, less than a second, is for the caller to wait out: see
    /// [`UnsettledJob::until_due`].
    pub(crate) fn admit(self: &Arc<Self>, arrived: Arrived) -> Option<UnsettledJob> {
        let Arrived { job, tag, suspicion } = arrived;
        let (rules, now) = (self.rules(), self.now());
        // lapin hands out what it had buffered when the channel died. Such a job is delivered
        // again, so running it now would run it twice.
        if !tag.usable() {
            self.emit(&Event::Stale { job });
            return None;
        }
        if self.is_finished(&job) {
            self.ack(job, tag, |job| Event::AlreadyDone { job }, Teller::nobody());
            return None;
        }
        // Its handler has run: all that is left to do is what was decided then.
        if let Some(to) = self.owed(&job) {
            self.leaving(job, tag, to).owed().go();
            return None;
        }
        if let Some(to) = self.outlasted(&job) {
            self.leaving(job, tag, to).go();
            return None;
        }
        let unrun = match suspicion {
            Suspicion::Count => Some(self.count_crash(&job)),
            Suspicion::Afresh => Some(self.start_afresh(&job)),
            Suspicion::Clear | Suspicion::Alone => None,
        };
        if let Some(to) = unrun {
            self.leaving(job, tag, to).go();
            return None;
        }
        let due = match rules.on_arrival(&job, now) {
            Arrival::Run => None,
            Arrival::RunAfter(left) => Some(Instant::now() + left),
            Arrival::Move(to) => {
                self.leaving(job, tag, to).go();
                return None;
            }
        };
        Some(UnsettledJob::new(Arc::clone(self), rules, job, tag, due))
    }
}
