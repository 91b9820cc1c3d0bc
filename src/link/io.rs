//! The thread that does the I/O of all connections of the process.
//!
//! lapin runs its I/O events, heartbeats and acks on the runtime that it is given. On the user's, a
//! connection would die while handlers block all threads, and with the runtime that opened it.

use std::{
    convert::Infallible,
    future::Future,
    io,
    sync::{Mutex, PoisonError},
    thread,
    time::Duration,
};

use tokio::{
    runtime::{Builder, Handle},
    sync::{
        mpsc::{Receiver, Sender, WeakSender, channel},
        watch,
    },
    task::JoinHandle,
    time::timeout,
};

/// How often a task of the user's runtime shows that it runs.
pub(crate) const BEAT: Duration = Duration::from_secs(1);
/// For how many beats it may be silent.
pub(crate) const SILENT: u32 = 5;

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

    /// Runs a task on the thread. It must not block, and calls no code of the user's.
    pub(super) fn spawn<F>(&self, task: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send,
    {
        self.runtime.spawn(task)
    }
}

/// Logs when a task on the user's runtime falls silent, until that task ends.
pub(crate) fn watch_over<T: Send + Sync + 'static>(queue: String, beats: watch::Receiver<T>) {
    // There are connections, so the thread runs.
    if let Ok(io) = Io::get() {
        let keep = io.clone();
        io.spawn(async move {
            until_ended(&queue, beats).await;
            drop(keep);
        });
    }
}

async fn until_ended<T>(queue: &str, mut beats: watch::Receiver<T>) {
    // Counted and not measured: a process that was stopped, or got no processor, misses one.
    let mut missed = 0;
    loop {
        match timeout(BEAT, beats.changed()).await {
            Ok(Ok(())) => {
                if missed >= SILENT {
                    tracing::warn!(queue, "the tokio runtime runs again, after {missed} s");
                }
                missed = 0;
            }
            Ok(Err(_)) => return,
            Err(_) => {
                missed += 1;
                if missed % SILENT == 0 && (missed / SILENT).is_power_of_two() {
                    tracing::warn!(
                        queue,
                        "the tokio runtime has not run for {missed} s, so no job is taken, acked or \
                         handed off: code that blocks keeps its threads; call such code with \
                         tokio::task::spawn_blocking"
                    );
                }
            }
        }
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
    use std::{sync::Arc, time::Instant};
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

    #[tokio::test(start_paused = true)]
    async fn a_runtime_that_is_silent_is_logged_less_and_less_often_and_when_it_runs_again() {
        #[derive(Clone, Default)]
        struct Log(Arc<Mutex<Vec<u8>>>);
        impl io::Write for Log {
            fn write(&mut self, text: &[u8]) -> io::Result<usize> {
                self.0.lock().unwrap().write(text)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let log = Log::default();
        let writer = log.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone());
        let _listening = tracing::subscriber::set_default(subscriber.finish());

        let (beat, beats) = watch::channel(());
        let watching = tokio::spawn(until_ended("work", beats));
        for silent in [BEAT / 2, BEAT * 4, BEAT * 50] {
            sleep(silent).await;
            beat.send_replace(());
        }
        sleep(BEAT / 2).await;
        drop(beat);
        watching.await.unwrap();
        let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        let logged: Vec<_> = text.lines().filter(|line| line.contains(" WARN ")).collect();
        assert_eq!(logged.len(), 5, "{logged:#?}");
        for (line, seconds) in logged.iter().zip(["for 5 s", "for 10 s", "for 20 s", "for 40 s"]) {
            assert!(line.contains(seconds) && line.contains("work"), "{line}");
            assert!(line.contains("spawn_blocking"), "{line}");
        }
        assert!(logged[4].contains("runs again, after"), "{logged:#?}");
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
