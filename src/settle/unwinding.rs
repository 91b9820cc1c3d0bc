//! Which jobs one panic dropped. A job that is dropped alone by the unwinding of its task failed; of
//! several nobody can say whose handler it was.

use std::{
    cell::RefCell,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::{task, time::Instant};

/// How long what is dropped between two jobs may take.
const WINDOW: Duration = Duration::from_millis(50);

thread_local! {
    static LATEST: RefCell<Option<Unwinding>> = const { RefCell::new(None) };
}

/// One panic on its way through the stack of its thread.
#[derive(Clone, Debug)]
pub(super) struct Unwinding {
    /// A task that panics is polled no more, so each has its own.
    task: Option<task::Id>,
    began: Instant,
    /// How many jobs it has dropped.
    jobs: Arc<AtomicUsize>,
}

impl Unwinding {
    /// Counts a job that this thread drops now. None if the thread does not unwind.
    pub(super) fn count() -> Option<Self> {
        if !std::thread::panicking() {
            return None;
        }
        let (task, began) = (task::try_id(), Instant::now());
        let new = Self { task, began, jobs: Arc::new(AtomicUsize::new(0)) };
        let join = |latest: &RefCell<Option<Self>>| {
            let mut latest = latest.borrow_mut();
            let same = latest.take().filter(|it| it.task == task && began < it.began + WINDOW);
            latest.insert(same.unwrap_or_else(|| new.clone())).clone()
        };
        // A thread that ends has no thread-locals any more.
        let unwinding = LATEST.try_with(join).unwrap_or(new);
        unwinding.jobs.fetch_add(1, Relaxed);
        Some(unwinding)
    }

    /// A job is given out on this thread: what was dropped before belongs to another panic than what
    /// is dropped from now on.
    pub(super) fn is_over() {
        let _ = LATEST.try_with(|latest| latest.take());
    }

    /// Whether it dropped one job only. Known when the rest of the stack is unwound.
    pub(super) async fn dropped_one(&self) -> bool {
        tokio::time::sleep_until(self.began + 2 * WINDOW).await;
        self.jobs.load(Relaxed) == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{panic::AssertUnwindSafe, sync::Mutex};

    type Seen = Mutex<Vec<Option<Unwinding>>>;

    struct Dropped<'a>(&'a Seen);

    impl Drop for Dropped<'_> {
        fn drop(&mut self) {
            self.0.lock().unwrap().push(Unwinding::count());
        }
    }

    fn panic_with(jobs: usize, seen: &Seen) {
        let panics = AssertUnwindSafe(|| {
            let _jobs: Vec<_> = (0..jobs).map(|_| Dropped(seen)).collect();
            panic!("the handler panics");
        });
        assert!(std::panic::catch_unwind(panics).is_err());
    }

    async fn alone(seen: &Seen) -> Vec<bool> {
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        let mut alone = Vec::new();
        for unwinding in seen {
            alone.push(unwinding.expect("it unwinds").dropped_one().await);
        }
        alone
    }

    #[tokio::test]
    async fn jobs_of_one_panic_are_known_together() {
        let seen = Seen::default();
        panic_with(1, &seen);
        Unwinding::is_over();
        panic_with(3, &seen);
        assert_eq!(alone(&seen).await, [true, false, false, false]);
        drop(Dropped(&seen));
        assert!(seen.lock().unwrap()[0].is_none(), "nothing unwinds");
    }

    #[tokio::test]
    async fn panics_of_two_tasks_on_one_thread_are_two() {
        let seen = Arc::new(Seen::default());
        for _ in 0..2 {
            let seen = Arc::clone(&seen);
            tokio::spawn(async move { panic_with(1, &seen) }).await.unwrap();
        }
        assert_eq!(alone(&seen).await, [true, true]);
    }
}
