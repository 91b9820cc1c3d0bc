//! The engine's side of a pause: who heeds it, and who waits for it.

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use tokio::{sync::watch, time::Instant};

use super::Engine;
use crate::{
    Event, Outcome, Pauses,
    event::Resumed,
    pause::{Epoch, Pace, Pacing, PauseKind},
    policy::Verdict,
};

/// How long what goes back to the queue in a pause waits for the consumer to be cancelled, so that it
/// is not delivered to the very worker that pauses.
const QUIET: Duration = Duration::from_secs(5);

/// What whoever waited for its turn may take.
#[derive(Debug)]
pub(crate) enum Turn {
    /// As many jobs as it likes.
    Open,
    /// One job, and then it waits for its turn again.
    Probe(Probe),
}

/// The right to try one job. Let go of without an outcome, another may be tried at once.
#[derive(Debug)]
pub(crate) struct Probe {
    engine: Arc<Engine>,
    epoch: Epoch,
}

impl Probe {
    /// Whether the job may still be tried, for nothing else has come in between.
    pub(crate) fn is_valid(&self) -> bool {
        self.engine.may_start(Some(self)).is_some()
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.engine.pacing(|pacing| pacing.probe_lost(self.epoch, Instant::now()));
    }
}

impl Engine {
    /// What an attempt says about the consumer: an outage pauses it, anything else ends a pause.
    pub(super) fn heed(&self, verdict: &Verdict, started: Epoch) {
        match verdict {
            Verdict::Failed { outcome: Outcome::Outage, error, .. } => {
                let wait = self.pacing(|pacing| pacing.outage(started, Instant::now()));
                if let Some(wait) = wait {
                    let (queue, error) = (self.queue(), error.clone());
                    let kind = PauseKind::Outage;
                    self.emit(&Event::Paused { queue, kind, error, wait: Some(wait) });
                }
            }
            _ => {
                if self.pacing(|pacing| pacing.through(started, Instant::now())) {
                    self.resumed(Resumed::GotThrough);
                }
            }
        }
    }

    /// Asked at the last moment before a handler is called: in which epoch it is, if it may be.
    pub(super) fn may_start(&self, probe: Option<&Probe>) -> Option<Epoch> {
        self.pacing(|pacing| pacing.start(probe.map(|probe| probe.epoch)))
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.pacing(|pacing| pacing.epoch())
    }

    pub(crate) fn pace(&self) -> Pace {
        *self.pace.borrow()
    }

    pub(crate) fn is_open(&self) -> bool {
        matches!(self.pace(), Pace::Open { .. })
    }

    pub(crate) fn pause_by_hand(&self) {
        if self.pacing(Pacing::hold) {
            let (queue, kind) = (self.queue(), PauseKind::Manual);
            self.emit(&Event::Paused { queue, kind, error: String::new(), wait: None });
        }
    }

    pub(crate) fn resume_by_hand(&self) {
        if self.resuming(|pacing| pacing.resume(Instant::now())) {
            self.resumed(Resumed::ByHand);
        }
    }

    pub(super) fn reconfigure_pauses(&self, pauses: Pauses) {
        if self.resuming(|pacing| pacing.reconfigure(pauses, Instant::now())) {
            self.resumed(Resumed::Reconfigured);
        }
    }

    /// Waits while the consumer pauses. After the wait one caller gets a probe.
    pub(crate) async fn turn(self: &Arc<Self>) -> Turn {
        let mut pace = self.pace.subscribe();
        loop {
            let now = *pace.borrow_and_update();
            match now {
                Pace::Open { .. } => return Turn::Open,
                Pace::Paused { until: Some(until) } | Pace::Stuck { until, .. } => {
                    tokio::select! {
                        () = tokio::time::sleep_until(until) => {}
                        _ = pace.changed() => continue,
                    }
                    if let Some(epoch) = self.pacing(|pacing| pacing.probe(Instant::now())) {
                        return Turn::Probe(Probe { engine: Arc::clone(self), epoch });
                    }
                    // Not yet: what becomes of the hand-offs that are tried now changes the pace.
                    let _ = pace.changed().await;
                }
                Pace::Paused { until: None } | Pace::Probing => {
                    // The sender is the engine's own.
                    let _ = pace.changed().await;
                }
            }
        }
    }

    /// Waits until somebody resumes or holds, not merely the next step of the same pause.
    pub(super) async fn told_otherwise(&self) {
        let mut pace = self.pace.subscribe();
        let before = *pace.borrow_and_update();
        let otherwise = |now: &Pace| *now != before && !matches!(now, Pace::Stuck { .. });
        let _ = pace.wait_for(otherwise).await;
    }

    pub(crate) fn pace_changes(&self) -> watch::Receiver<Pace> {
        self.pace.subscribe()
    }

    /// Waits until the pace is another than this.
    pub(crate) async fn pace_other_than(&self, pace: Pace) {
        let _ = self.pace.subscribe().wait_for(|now| *now != pace).await;
    }

    pub(crate) async fn until_not_open(&self) {
        let _ = self.pace.subscribe().wait_for(|now| !matches!(now, Pace::Open { .. })).await;
    }

    /// A consumer of ours takes jobs at full speed.
    pub(crate) fn consuming(&self) {
        self.pacing(|pacing| pacing.consuming(Instant::now()));
        self.quiet.send_replace(false);
    }

    /// No consumer of ours does, and none will be given what goes back to the queue.
    pub(crate) fn quiet(&self) {
        self.quiet.send_replace(true);
    }

    /// Waits until that is so, for a bounded time.
    pub(super) async fn until_quiet(&self) {
        let mut quiet = self.quiet.subscribe();
        let _ = tokio::time::timeout(QUIET, quiet.wait_for(|quiet| *quiet)).await;
    }

    fn resumed(&self, why: Resumed) {
        self.emit(&Event::Resumed { queue: self.queue(), why });
    }

    pub(super) fn pacing<T>(&self, f: impl FnOnce(&mut Pacing) -> T) -> T {
        let mut pacing = self.pacing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = pacing.pace();
        let answer = f(&mut pacing);
        // Still locked, so that those who wait hear of one pace after the other.
        if pacing.pace() != before {
            self.pace.send_replace(pacing.pace());
        }
        answer
    }
}
