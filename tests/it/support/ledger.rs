//! What the events told, for tests that count.

use lapin_retry::Event;
use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

/// Keeps every event of an engine. Clones share what was kept.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger(Arc<Mutex<Vec<Event>>>);

impl Ledger {
    /// For `on_event`.
    pub(crate) fn hook(&self) -> impl Fn(&Event) + Send + Sync + 'static {
        let ledger = self.clone();
        move |event| ledger.0.lock().expect("no panic inside").push(event.clone())
    }

    pub(crate) fn count(&self, which: impl Fn(&Event) -> bool) -> usize {
        self.0.lock().expect("no panic inside").iter().filter(|event| which(event)).count()
    }

    /// The jobs that are in a lane or in the buried queue, confirmed.
    pub(crate) fn handed_off(&self) -> BTreeSet<String> {
        self.jobs(|event| match event {
            Event::Retried { job, .. } | Event::Buried { job, .. } => Some(job.id().to_owned()),
            _ => None,
        })
    }

    /// The jobs that succeeded and were acked.
    pub(crate) fn done(&self) -> BTreeSet<String> {
        self.jobs(|event| match event {
            Event::Done { job, .. } => Some(job.id().to_owned()),
            _ => None,
        })
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

    fn jobs(&self, which: impl Fn(&Event) -> Option<String>) -> BTreeSet<String> {
        self.0.lock().expect("no panic inside").iter().filter_map(which).collect()
    }
}
