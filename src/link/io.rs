//! The thread that does the I/O of all connections of the process.
//!
//! lapin runs its I/O events, heartbeats and acks on the runtime that it is given. On the user's, a
//! connection would die while handlers block all threads, and with the runtime that opened it.

use std::{
    convert::Infallible,
    io,
    sync::{Mutex, PoisonError},
    thread,
};

use tokio::{
    runtime::{Builder, Handle},
    sync::mpsc::{Receiver, Sender, WeakSender, channel},
};

/// The thread that was started last. It may have ended.
type Last = Mutex<Option<(Handle, WeakSender<Infallible>)>>;

static LAST: Last = Mutex::new(None);

/// The thread runs as long as one of these exists.
#[derive(Clone, Debug)]
pub(super) struct Io {
    runtime: Handle,
    /// Nothing is sent. The thread waits until the last sender is dropped, and drops its runtime
    /// itself: dropped by a task, a runtime would panic.
    running: Sender<Infallible>,
}

impl Io {
    /// The thread; it is started if it does not run.
    ///
    /// # Errors
    /// The system has no thread or no file handle left.
    pub(super) fn get() -> io::Result<Self> {
        Self::of(&LAST)
    }

    fn of(last: &Last) -> io::Result<Self> {
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((runtime, running)) = &*last
            && let Some(running) = running.upgrade().filter(|running| !running.is_closed())
        {
            return Ok(Self { runtime: runtime.clone(), running });
        }
        let (running, ended) = channel(1);
        let io = Self { runtime: start(ended)?, running };
        *last = Some((io.runtime.clone(), io.running.downgrade()));
        Ok(io)
    }

    /// Calls `f` with the thread's runtime as the current one.
    pub(super) fn enter<T>(&self, f: impl FnOnce() -> T) -> T {
        let _entered = self.runtime.enter();
        f()
    }
}

fn start(mut ended: Receiver<Infallible>) -> io::Result<Handle> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    let run = move || runtime.block_on(ended.recv());
    thread::Builder::new().name("lapin-retry-io".to_owned()).spawn(run)?;
    Ok(handle)
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Broker, connection::Purpose, dial::open},
        *,
    };
    use std::time::{Duration, Instant};
    use tokio::{
        net::TcpListener,
        time::{sleep, timeout},
    };

    async fn eventually(what: &str, mut is: impl AsyncFnMut() -> bool) {
        let begun = Instant::now();
        while !is().await {
            assert!(begun.elapsed() < Duration::from_secs(10), "not within 10 s: {what}");
            sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn the_thread_is_shared_and_ends_with_its_last_user() {
        static LOCAL: Last = Mutex::new(None);
        let (one, other) = (Io::of(&LOCAL).unwrap(), Io::of(&LOCAL).unwrap());
        assert!(one.running.same_channel(&other.running));
        let thread = one.runtime.clone();
        let name = || async { thread::current().name().map(str::to_owned) };
        assert_eq!(thread.spawn(name()).await.unwrap().as_deref(), Some("lapin-retry-io"));
        drop(other);
        assert!(thread.spawn(name()).await.is_ok(), "it has another user");
        // The last one may be dropped by a task of its own.
        drop(thread.spawn(async { drop(one) }));
        eventually("it has ended", async || thread.spawn(name()).await.is_err()).await;
        assert!(Io::of(&LOCAL).unwrap().runtime.spawn(name()).await.is_ok(), "a new one");
    }

    /// lapin keeps a task for every connection that it could not open itself.
    #[tokio::test]
    async fn connections_that_cannot_be_opened_leave_nothing_behind() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let broker = Broker::from(format!("amqp://{}", listener.local_addr().unwrap()));
        let io = Io::get().unwrap();
        for _ in 0..5 {
            let closed = async { drop(listener.accept().await) };
            let (opened, ()) = tokio::join!(open(&broker, Purpose::Consuming), closed);
            assert!(opened.is_err());
        }
        // The caller does not wait until it is too late for an answer.
        let opening = timeout(Duration::from_millis(200), open(&broker, Purpose::Consuming));
        let (opened, silent) = tokio::join!(opening, listener.accept());
        assert!(opened.is_err());
        let tasks = || io.runtime.metrics().num_alive_tasks();
        eventually("no task is left", async || tasks() == 0).await;
        drop(silent);
    }
}
