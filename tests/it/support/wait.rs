//! Waiting with a deadline: a test that hangs tells nobody what it waited for.

use futures_util::StreamExt;
use lapin::{Consumer, message::Delivery};
use std::{future::Future, panic::Location, time::Duration};
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// Long enough for a busy two-core machine, short enough to fail while someone still watches.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

const POLL: Duration = Duration::from_millis(50);

/// What a check of [`eventually`] may answer: a `bool`, or an `Option` of what it was looking for.
pub(crate) trait Answer {
    type Found;
    fn found(self) -> Option<Self::Found>;
}

impl Answer for bool {
    type Found = ();
    fn found(self) -> Option<()> {
        self.then_some(())
    }
}

impl<T> Answer for Option<T> {
    type Found = T;
    fn found(self) -> Option<T> {
        self
    }
}

/// Asks `check` every 50 ms until it says yes and returns what it found.
///
/// Panics with `what` and the caller's line at the deadline, also when `check` itself hangs.
#[track_caller]
pub(crate) fn eventually<A: Answer>(
    what: &str,
    deadline: Duration,
    mut check: impl AsyncFnMut() -> A,
) -> impl Future<Output = A::Found> {
    let caller = Location::caller();
    let end = Instant::now() + deadline;
    async move {
        while let Ok(answer) = timeout_at(end, check()).await {
            if let Some(found) = answer.found() {
                return found;
            }
            if Instant::now() >= end {
                break;
            }
            sleep(POLL).await;
        }
        panic!("{caller}: not within {deadline:?}: {what}")
    }
}

/// Awaits `future`, but panics with `what` and the caller's line when it takes longer than [`PATIENCE`].
#[track_caller]
pub(crate) fn within<F: Future>(what: &str, future: F) -> impl Future<Output = F::Output> {
    let caller = Location::caller();
    async move {
        match timeout(PATIENCE, future).await {
            Ok(output) => output,
            Err(_) => panic!("{caller}: not within {PATIENCE:?}: {what}"),
        }
    }
}

/// The consumer's next delivery; panics when the stream ends or fails instead.
#[track_caller]
pub(crate) fn next(consumer: &mut Consumer) -> impl Future<Output = Delivery> {
    let caller = Location::caller();
    async move {
        match timeout(PATIENCE, consumer.next()).await {
            Ok(Some(Ok(delivery))) => delivery,
            Ok(Some(Err(error))) => panic!("{caller}: the consumer failed: {error}"),
            Ok(None) => panic!("{caller}: the consumer was cancelled"),
            Err(_) => panic!("{caller}: no delivery within {PATIENCE:?}"),
        }
    }
}
