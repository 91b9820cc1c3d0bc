//! Acks the finished deliveries of one consumer, as many at a time as have finished.

use std::{
    collections::BTreeMap,
    fmt, mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use futures_util::{FutureExt, future::BoxFuture, future::join_all};
use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};

use super::{
    Engine,
    ack_book::{AckBook, Entry, STRAGGLE},
    overdue::Running,
    suspects::InHand,
};
use crate::{
    Job,
    link::{Tag, Told},
};

/// How long finished deliveries wait for more of them, which one ack then covers: the timer's
/// resolution. Each ack costs lapin a wake-up of its thread and a write.
const GATHER: Duration = Duration::from_millis(1);

/// The deliveries of one consumer, which are acked together where they can be.
#[derive(Debug)]
pub(crate) struct Acks {
    engine: Arc<Engine>,
    state: Mutex<State>,
    /// All that is not acked, by its number on the channel.
    held: Mutex<BTreeMap<u64, Weak<Entered>>>,
    /// There is enough for an ack.
    enough: Notify,
}

#[derive(Debug)]
struct State {
    book: AckBook<Finished>,
    /// A task is at it. It ends when there is nothing to ack.
    acking: bool,
}

struct Finished {
    tag: Arc<InHand>,
    told: Told,
}

impl Acks {
    pub(crate) fn new(engine: &Arc<Engine>) -> Arc<Self> {
        let state = Mutex::new(State { book: AckBook::new(), acking: false });
        Arc::new(Self {
            engine: Arc::clone(engine),
            state,
            held: Mutex::default(),
            enough: Notify::new(),
        })
    }

    /// To be asked for each delivery of the consumer, in their order, before it is answered.
    pub(super) fn enter(self: &Arc<Self>, tag: Arc<InHand>, job: Job) -> Arc<dyn Tag> {
        let (number, acks) = (tag.number(), Arc::clone(self));
        let entry = self.state().book.enter(number);
        let entered = Arc::new(Entered { tag, entry, job, running: Running::default(), acks });
        self.held().insert(number, Arc::downgrade(&entered));
        entered
    }

    /// The job that was held longest on the channel, and for how long its handler has run. None if it
    /// does not run, or if deliveries on the channel are not in this book.
    pub(super) fn held_longest(&self) -> Option<(Job, Duration)> {
        if self.state().book.has_gap() {
            return None;
        }
        let first = self.held().first_key_value()?.1.upgrade()?;
        Some((first.job.clone(), first.running.for_how_long()?))
    }

    /// The consumer is to be cancelled: no more of them come for an ack to cover.
    pub(crate) fn hurry(&self) {
        self.state().book.hurry();
        self.enough.notify_one();
    }

    fn finish(self: &Arc<Self>, entry: Entry, finished: Finished) {
        let (acking, enough) = {
            let mut state = self.state();
            state.book.finish(entry, finished, Instant::now());
            (mem::replace(&mut state.acking, true), state.book.is_enough())
        };
        if !acking {
            let (acks, acking) = (Arc::clone(self), Acking(Some(Arc::clone(self))));
            self.engine.spawn(async move {
                acks.ack_all().await;
                acking.done();
            });
        } else if enough {
            self.enough.notify_one();
        }
    }

    async fn ack_all(&self) {
        loop {
            if !self.state().book.is_enough() {
                let _ = tokio::time::timeout(GATHER, self.enough.notified()).await;
            }
            let (rows, next) = {
                let mut state = self.state();
                (state.book.take(Instant::now()), state.book.next())
            };
            if let (true, Some(next)) = (rows.is_empty(), next) {
                tokio::select! {
                    () = self.enough.notified() => {}
                    () = tokio::time::sleep_until(next) => {}
                }
            }
            join_all(rows.into_iter().map(|row| self.ack(row))).await;
            let mut state = self.state();
            if state.book.is_idle() {
                // At once, so that none that finishes now takes it for being at work.
                state.acking = false;
                return;
            }
        }
    }

    /// By one ack of the last.
    async fn ack(&self, row: Vec<Finished>) {
        let Some(last) = row.last() else { return };
        let acked = self.engine.ack_by(&*last.tag, row.len() > 1).await;
        for finished in row {
            (finished.told)(acked);
        }
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<u64, Weak<Entered>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends early by a panic (of whoever listens to our logs): the next to finish starts another. Or with
/// its runtime: nothing more is acked, and whoever waits for an ack hears so.
struct Acking(Option<Arc<Acks>>);

impl Acking {
    fn done(mut self) {
        self.0 = None;
    }
}

impl Drop for Acking {
    fn drop(&mut self) {
        let Some(acks) = self.0.take() else { return };
        let mut state = acks.state();
        state.acking = false;
        if !std::thread::panicking() {
            let unacked = state.book.take(Instant::now() + 2 * STRAGGLE);
            drop(state);
            drop(unacked);
        }
    }
}

/// A delivery that is acked with others.
#[derive(Debug)]
struct Entered {
    tag: Arc<InHand>,
    entry: Entry,
    job: Job,
    running: Running,
    acks: Arc<Acks>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let (mut held, number) = (self.acks.held(), self.tag.number());
        // On a channel that lapin recovered the number may be another delivery's by now.
        if held.get(&number).is_some_and(|entered| std::ptr::eq(entered.as_ptr(), self)) {
            held.remove(&number);
        }
    }
}

impl Tag for Entered {
    fn number(&self) -> u64 {
        self.tag.number()
    }

    fn usable(&self) -> bool {
        self.tag.usable()
    }

    fn ack(&self, _multiple: bool) -> BoxFuture<'_, bool> {
        let (tell, told) = oneshot::channel();
        let finished = Box::new(move |acked| {
            // Whoever waits for it may have gone away.
            let _ = tell.send(acked);
        });
        self.acks.finish(self.entry, Finished { tag: Arc::clone(&self.tag), told: finished });
        // Without an answer the runtime has gone.
        told.map(|acked| acked.unwrap_or(false)).boxed()
    }

    fn ack_with_others(&self, told: Told) -> Result<(), Told> {
        self.acks.finish(self.entry, Finished { tag: Arc::clone(&self.tag), told });
        Ok(())
    }

    fn runs(&self, running: bool) {
        self.running.set(running);
    }

    fn give_back(&self) -> BoxFuture<'_, bool> {
        async {
            let told = self.tag.give_back().await;
            // Only now: an ack of those after it would cover it.
            self.acks.state().book.answered(self.entry);
            told
        }
        .boxed()
    }
}

impl fmt::Debug for Finished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Finished").field("tag", &self.tag).finish_non_exhaustive()
    }
}
