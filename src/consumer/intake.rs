//! What a consumer was given, and has not started yet.

use std::{collections::VecDeque, sync::Arc};

use futures_util::{StreamExt, stream};

use super::run::{FAREWELL, Run};
use crate::{
    link::Subscription,
    settle::{Acks, Arrived, Engine},
};

/// What a subscription delivers, and what of it waits to be started. It is looked at as it comes,
/// however few handlers may run: a suspect does not wait beside jobs at work.
pub(super) struct Intake {
    pub(super) subscription: Subscription,
    pub(super) arrived: VecDeque<Arrived>,
    pub(super) acks: Arc<Acks>,
}

/// How jobs that were not started leave.
#[derive(Clone, Copy, Debug)]
pub(super) enum Back {
    /// Requeued, where that is harmless.
    Queue,
    /// As copies at the tail.
    Tail,
}

impl Intake {
    pub(super) fn new(engine: &Arc<Engine>, subscription: Subscription) -> Self {
        Self { subscription, arrived: VecDeque::new(), acks: Acks::new(engine) }
    }

    /// Cancels the consumer, and gives back what has not been started.
    async fn give_back(&mut self, engine: &Arc<Engine>, how: Back) {
        self.acks.hurry();
        let taken = stream::iter(self.subscription.take_in().await.into_iter().map(Ok));
        self.subscription.control.cancel().await;
        let send_back = async |arrived| match how {
            Back::Queue => engine.set_aside(arrived).await,
            Back::Tail => engine.send_to_tail(arrived).await,
        };
        for arrived in self.arrived.drain(..) {
            send_back(arrived).await;
        }
        let mut unstarted = taken.chain(&mut self.subscription.incoming);
        while let Some(Ok(incoming)) = unstarted.next().await {
            send_back(engine.arrive(incoming, &self.acks)).await;
        }
    }
}

impl Run {
    /// Cancels the consumer, and gives back what has not been started: it is Ready again, free for
    /// healthy workers.
    pub(super) async fn give_up(&self, intake: Intake) {
        self.give_up_as(intake, Back::Queue).await;
    }

    pub(super) async fn give_up_as(&self, mut intake: Intake, how: Back) {
        let engine = Arc::clone(&self.engine);
        let cancelling = self.engine.spawn(async move { intake.give_back(&engine, how).await });
        // If the broker is slow to answer, this goes on by itself: else what is buffered would stay
        // unacked for as long as a handler keeps the channel open.
        let _ = tokio::time::timeout(FAREWELL, cancelling).await;
        self.engine.quiet();
    }
}
