//! Jobs that may end the process are run alone: what else was in hand when it dies would look as if
//! it had done it.

use std::{pin::pin, time::Duration};

use futures_util::StreamExt;
use tokio::time::Instant;

use super::{
    intake::Intake,
    run::{Ended, Run},
};
use crate::{
    Event, Resumed,
    policy::Suspicion,
    settle::{Arrived, Turn},
};

/// Suspects come in a bunch, with others between. To go on at full speed and meet the next one costs
/// about as much.
const NO_MORE: Duration = Duration::from_secs(1);

impl Run {
    /// A suspect was met. From here on a crash tells which job it was.
    pub(super) async fn meet_suspect(&self, mut intake: Intake, suspect: Arrived) -> Ended {
        self.engine.emit(&Event::OneByOne { queue: self.engine.queue() });
        self.engine.suspects().cancel(self.how.prefetch);
        if suspect.suspicion == Suspicion::Count {
            intake.arrived.push_back(suspect);
            self.give_up(intake).await;
            return Ended::Suspect;
        }
        // It is run now: sent to the tail of a queue that never runs empty, it would be met at full
        // speed again and again.
        self.give_up(intake).await;
        let (mut stop, mut pause) = (pin!(self.stop()), pin!(self.engine.until_not_open()));
        tokio::select! {
            biased;
            () = &mut stop => drop(self.engine.set_aside(suspect).await),
            () = &mut pause => drop(self.engine.set_aside(suspect).await),
            () = self.engine.until_nothing_else_is_in_hand() => {
                if let Some(job) = self.engine.admit(suspect) {
                    let permit = self.permit().await;
                    self.handlers.spawn(self.attempt(job, Turn::Open, permit));
                }
            }
        }
        Ended::Suspect
    }

    /// Takes one job after the other, and none while anything else is in hand, until for a second
    /// those that come are no suspects. A backlog is not crawled through.
    pub(super) async fn one_by_one(&self, alone: bool) -> Ended {
        let (mut stop, mut pause) = (pin!(self.stop()), pin!(self.engine.until_not_open()));
        tokio::select! {
            biased;
            () = &mut stop => return Ended::Stopped(None),
            () = &mut pause => return Ended::Paused,
            () = self.engine.until_nothing_is_in_hand() => {}
        }
        // With a prefetch of 1 the next one comes when this one is answered.
        let mut intake = match self.subscribe(1, alone).await {
            Ok(subscription) => Intake::new(&self.engine, subscription),
            Err(error) => return Ended::Lost(error),
        };
        let mut innocent_since = None;
        loop {
            let incoming = tokio::select! {
                biased;
                () = &mut stop => return Ended::Stopped(Some(intake)),
                () = &mut pause => {
                    self.give_up(intake).await;
                    return Ended::Paused;
                }
                incoming = intake.subscription.incoming.next() => incoming,
            };
            let arrived = match incoming {
                Some(Ok(incoming)) => self.engine.arrive(incoming, &intake.acks),
                Some(Err(error)) => return self.lost(intake, Some(error)),
                None => return self.lost(intake, None),
            };
            let innocent = !arrived.suspicion.is_suspect();
            if !innocent {
                innocent_since = None;
            }
            let Some(job) = self.engine.admit(arrived) else { continue };
            // At once, for nothing is running.
            let permit = self.permit().await;
            if innocent && innocent_since.get_or_insert_with(Instant::now).elapsed() >= NO_MORE {
                self.give_up(intake).await;
                self.engine.suspects().are_through();
                self.handlers.spawn(self.attempt(job, Turn::Open, permit));
                if self.engine.is_open() {
                    let (queue, why) = (self.engine.queue(), Resumed::NoSuspects);
                    self.engine.emit(&Event::Resumed { queue, why });
                }
                return Ended::NoSuspects;
            }
            self.handlers.spawn(self.attempt(job, Turn::Open, permit));
        }
    }
}
