//! What a contestant reads of itself.

use std::{
    fs,
    hint::black_box,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, mpsc};

/// Counts the calls of a handler. Measured is from the end of the warm-up on, and with more jobs to
/// come at its end, so that all that is in flight is in flight at both ends.
#[derive(Debug)]
pub(crate) struct Meter {
    calls: AtomicUsize,
    first: usize,
    last: usize,
    begun: Mutex<Option<Mark>>,
    reading: Mutex<Option<Reading>>,
    over: Notify,
    /// Hears of each call, if it is asked for.
    told: Option<mpsc::UnboundedSender<Instant>>,
}

/// What a contestant answers.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Reading {
    /// Jobs a second.
    pub(crate) rate: f64,
    /// User and system time of the process for each job, in microseconds.
    pub(crate) cpu_us: f64,
    /// The most memory that the process has had, in KiB, where the system tells.
    pub(crate) peak_kib: Option<u64>,
    /// From publish to handler, in microseconds, with one job at a time.
    pub(crate) p50_us: Option<f64>,
    pub(crate) p99_us: Option<f64>,
}

#[derive(Debug)]
pub(crate) struct Mark {
    at: Instant,
    cpu: Duration,
}

impl Meter {
    pub(crate) fn new(warm_up: usize, jobs: usize) -> Self {
        Self {
            calls: AtomicUsize::new(0),
            first: warm_up.max(1),
            last: warm_up.max(1) + jobs,
            begun: Mutex::default(),
            reading: Mutex::default(),
            over: Notify::new(),
            told: None,
        }
    }

    /// Measures nothing, and tells when the handler was called.
    pub(crate) fn telling() -> (Self, mpsc::UnboundedReceiver<Instant>) {
        let (told, calls) = mpsc::unbounded_channel();
        (Self { told: Some(told), ..Self::new(0, usize::MAX - 1) }, calls)
    }

    /// The handler of every contestant.
    pub(crate) fn handle(&self, body: &[u8]) {
        black_box(body);
        if let Some(told) = &self.told {
            told.send(Instant::now()).expect("somebody waits for it");
        }
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        if call == self.first {
            *self.begun.lock().unwrap() = Some(Mark::now());
        } else if call == self.last {
            let (begun, now) =
                (self.begun.lock().unwrap().take().expect("it was begun"), Mark::now());
            *self.reading.lock().unwrap() = Some(now.since(&begun, self.last - self.first));
            self.over.notify_one();
        }
    }

    pub(crate) async fn reading(&self) -> Reading {
        self.over.notified().await;
        self.reading.lock().unwrap().take().expect("it is over")
    }
}

impl Mark {
    pub(crate) fn now() -> Self {
        let cpu = clock_gettime(ClockId::ProcessCPUTime);
        let nanoseconds = u32::try_from(cpu.tv_nsec).expect("less than a second");
        let seconds = u64::try_from(cpu.tv_sec).expect("not negative");
        Self { at: Instant::now(), cpu: Duration::new(seconds, nanoseconds) }
    }

    pub(crate) fn since(&self, begun: &Self, jobs: usize) -> Reading {
        let per_job = |time: Duration| time.as_secs_f64() / jobs as f64;
        Reading {
            rate: 1.0 / per_job(self.at - begun.at),
            cpu_us: 1e6 * per_job(self.cpu - begun.cpu),
            peak_kib: peak_kib(),
            ..Reading::default()
        }
    }
}

fn peak_kib() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}
