//! Every decision and change of state, as a value.

mod log;

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, SystemTime},
};

use futures_util::Stream;
use tokio::sync::mpsc;

use crate::{BuriedReason, Error, FailureKind, Finding, Job, PauseKind, policy::caught};

/// Something happened to a job, or to a consumer. See [`Settings::on_event`](crate::Settings::on_event).
///
/// What is said of a job is said after the fact: after the broker's confirm and the ack.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The queues are there, and consuming may begin.
    #[non_exhaustive]
    Ready {
        /// The work queue.
        queue: String,
        /// How many queues there are beside it.
        queues: usize,
    },
    /// The doctor found something wrong with the broker, a queue or a policy, or could not look.
    /// Before [`Ready`](Self::Ready). See [`Settings::doctor`](crate::Settings::doctor).
    #[non_exhaustive]
    Found {
        /// The work queue.
        queue: String,
        /// What is wrong, and what mends it.
        finding: Finding,
    },
    /// The handler succeeded, and the job was acked.
    #[non_exhaustive]
    Done {
        /// The job.
        job: Job,
    },
    /// The job was delivered again although its handler had succeeded, and was acked without being
    /// run: see [`Settings::remember_done`](crate::Settings::remember_done).
    #[non_exhaustive]
    AlreadyDone {
        /// The job.
        job: Job,
    },
    /// The handler failed; the job is in a lane and comes back.
    #[non_exhaustive]
    Retried {
        /// The job, as it was at the attempt that failed.
        job: Job,
        /// The level it is on now, from 1.
        level: u32,
        /// The lane's delay. It counts from the hand-off's publish, not from the failure.
        delay: Duration,
        /// When it is run again: the publish and the delay. Where one lane is not enough for a
        /// [`retry_after`](crate::retry_after), the end of the whole wait.
        due: SystemTime,
        /// How the attempt failed.
        kind: FailureKind,
        /// The error and its sources.
        error: String,
    },
    /// The job waits in a lane without being charged.
    #[non_exhaustive]
    Postponed {
        /// The job, as it was when it arrived.
        job: Job,
        /// The lane's delay.
        delay: Duration,
        /// When it is run, after all lanes that it still has to go through.
        due: SystemTime,
        /// Why.
        why: Postponed,
    },
    /// The job is back at the tail of its work queue, unharmed: the failure was not its own.
    #[non_exhaustive]
    Returned {
        /// The job, as it was when it arrived.
        job: Job,
        /// The error and its sources; empty if it was not run: it has been given back before, or was
        /// delivered often in another queue.
        error: String,
    },
    /// The job is back at the tail of its work queue, and will be run alone: a process died while it
    /// had this job, most often among others. Not charged.
    #[non_exhaustive]
    Suspected {
        /// The job, as it was when it arrived.
        job: Job,
        /// How often in a row a process died while it ran this job alone: 0 if it never did so far.
        crashes: u32,
    },
    /// The job is in the buried queue.
    #[non_exhaustive]
    Buried {
        /// The job, as it was when it arrived.
        job: Job,
        /// Why.
        reason: BuriedReason,
        /// Which limit it passed, and by how much; or which header makes no sense. The header
        /// `buried-detail`.
        detail: String,
        /// The error of its last attempt and its sources; if it was not run now, the detail.
        error: String,
    },
    /// The job went back to the work queue without a verdict. Jobs that a pause or a shutdown gives
    /// back before their handler was called are not told of.
    #[non_exhaustive]
    GivenBack {
        /// The job.
        job: Job,
        /// Why.
        why: &'static str,
    },
    /// The job's channel died before the job was settled, or the work ended before its hand-off had
    /// succeeded: the broker delivers it again. Its copy may be there all the same.
    #[non_exhaustive]
    Stale {
        /// The job.
        job: Job,
    },
    /// The copy was confirmed, but the broker did not take the ack: the job is delivered again
    /// although its copy is on its way.
    #[non_exhaustive]
    Duplicated {
        /// The job.
        job: Job,
    },
    /// A hand-off did not succeed yet. The job stays unacked, and the hand-off is tried again.
    #[non_exhaustive]
    HandOffFailed {
        /// The job.
        job: Job,
        /// The lane, or the buried queue.
        queue: String,
        /// What the broker said, or did not say.
        why: String,
        /// Whether the broker may have the copy all the same, so that trying again may duplicate it.
        undecided: bool,
        /// How many tries failed so far.
        tries: u32,
        /// Whether it fails for so long that the consumer pauses: it is tried again after the wait.
        stuck: bool,
    },
    /// The consumer takes no jobs for a while.
    #[non_exhaustive]
    Paused {
        /// The work queue.
        queue: String,
        /// Why.
        kind: PauseKind,
        /// The error that said so, and its sources; empty if it was done by hand.
        error: String,
        /// How long, before one job is tried; until it is resumed if there is no end.
        wait: Option<Duration>,
    },
    /// The consumer has met a suspect, see [`Suspected`](Self::Suspected). What it had not started is
    /// given back, and once what runs has ended it takes one job at a time.
    #[non_exhaustive]
    OneByOne {
        /// The work queue.
        queue: String,
    },
    /// The consumer is at full speed again.
    #[non_exhaustive]
    Resumed {
        /// The work queue.
        queue: String,
        /// Why.
        why: Resumed,
    },
    /// The consumer lost the broker, or could not start; it tries again after the wait, or sooner if
    /// the broker is seen to be back: see [`Reconnect`](crate::Reconnect). After a message that
    /// cannot be read ([`ErrorKind::Unreadable`](crate::ErrorKind::Unreadable)) the wait is 5 min,
    /// for each try counts as a delivery.
    #[non_exhaustive]
    Disconnected {
        /// The work queue.
        queue: String,
        /// Why.
        error: Error,
        /// How long it waits at most.
        wait: Duration,
    },
    /// The consumer stops, for too many tries in a row failed: see
    /// [`Reconnect::limit`](crate::Reconnect::limit).
    #[non_exhaustive]
    GaveUp {
        /// The work queue.
        queue: String,
        /// Why, with the last try's error.
        error: Error,
    },
}

/// Why a job waits without being charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Postponed {
    /// Something scarce was taken.
    #[non_exhaustive]
    Busy {
        /// For the how-manieth time in a row.
        in_a_row: u32,
    },
    /// A wait longer than the longest lane is not over.
    NotDue,
    /// Its [`UnsettledJob`](crate::UnsettledJob) was dropped unsettled, for no fault of the job's that
    /// is known.
    Dropped,
}

/// Why a pause ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Resumed {
    /// The job that was tried got through.
    GotThrough,
    /// Somebody said so.
    ByHand,
    /// There is a new configuration.
    Reconfigured,
    /// The suspects that were at the head of the queue are through, see [`Event::OneByOne`].
    NoSuspects,
}

/// Events for whoever cannot handle them at once: a stream with a bound. What does not fit is
/// dropped and counted, so that nobody who reads slowly slows down the jobs.
#[derive(Debug)]
pub struct Events {
    receiver: mpsc::Receiver<Event>,
    dropped: Arc<AtomicU64>,
}

impl Events {
    /// At most `capacity` events wait. Also the hook that feeds them.
    pub(crate) fn bounded(capacity: usize) -> (Self, impl Fn(&Event) + Send + Sync + 'static) {
        let (sender, receiver) = mpsc::channel(capacity.max(1));
        let dropped = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&dropped);
        let feed = move |event: &Event| {
            if sender.try_send(event.clone()).is_err() {
                count.fetch_add(1, Ordering::Relaxed);
            }
        };
        (Self { receiver, dropped }, feed)
    }

    /// How many events were dropped so far because nobody had read those before.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

impl Stream for Events {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        self.receiver.poll_recv(cx)
    }
}

pub(crate) type Observer = Arc<dyn Fn(&Event) + Send + Sync>;

/// Tells the log and the hooks. One that panics harms nothing.
pub(crate) fn emit(queue: &str, observers: &[Observer], event: &Event) {
    let _ = caught(|| log::log(queue, event));
    for observer in observers {
        if caught(|| observer(event)).is_err() {
            let log = || tracing::error!(queue, "an event hook panicked; the job is not affected");
            let _ = caught(log);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::{FutureExt, StreamExt};

    fn ready(queues: usize) -> Event {
        Event::Ready { queue: "orders".to_owned(), queues }
    }

    /// Whoever listens to the log.
    struct Listener;

    impl tracing::Subscriber for Listener {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, _: &tracing::Event<'_>) {
            panic!("listener")
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }

    #[test]
    fn a_hook_or_a_log_that_panics_harms_no_other() {
        let (mut events, feed) = Events::bounded(2);
        let observers: [Observer; 2] = [Arc::new(|_: &Event| panic!("hook")), Arc::new(feed)];
        tracing::subscriber::with_default(Listener, || emit("orders", &observers, &ready(1)));
        assert!(matches!(events.next().now_or_never(), Some(Some(Event::Ready { queues: 1, .. }))));
    }

    #[test]
    fn events_that_nobody_reads_are_dropped_and_counted() {
        let (mut events, feed) = Events::bounded(2);
        (1..=5).for_each(|n| feed(&ready(n)));
        assert_eq!(events.dropped(), 3);
        drop(feed);
        let mut read = Vec::new();
        while let Some(Some(Event::Ready { queues, .. })) = events.next().now_or_never() {
            read.push(queues);
        }
        assert_eq!(read, [1, 2], "the oldest are kept, and the stream ends with its consumer");
    }
}
