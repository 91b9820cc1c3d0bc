//! What is noted of each job of a herd, and the figures made of it.
//!
//! A job's real delay is measured with the monotonic clock, from its failure to the moment when its
//! handler has it again. Its failure is, through the library, the failing return of its handler:
//! what the hand-off takes counts as lateness. In a delay queue without the library, it is the line
//! before the publish.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

/// What a herd is made of.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) url: String,
    pub(crate) jobs: u16,
    pub(crate) level: Duration,
}

/// The herd while it is away.
#[derive(Debug)]
pub(crate) struct Herd(Mutex<Vec<Times>>);

#[derive(Clone, Copy, Debug, Default)]
struct Times {
    failed: Option<Instant>,
    wanted: Option<Duration>,
    back: Option<Instant>,
}

/// One job that failed and came back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) failed: Instant,
    pub(crate) wanted: Duration,
    pub(crate) back: Instant,
}

impl Herd {
    pub(crate) fn of(jobs: u16) -> Self {
        Self(Mutex::new(vec![Times::default(); jobs.into()]))
    }

    pub(crate) fn failed(&self, job: usize) {
        self.times()[job].failed = Some(Instant::now());
    }

    pub(crate) fn wanted(&self, job: usize, delay: Duration) {
        self.times()[job].wanted = Some(delay);
    }

    /// A second arrival of the same job, which at-least-once allows, changes nothing.
    pub(crate) fn back(&self, job: usize) {
        self.times()[job].back.get_or_insert_with(Instant::now);
    }

    /// Waits until every job is back, and tells of the progress on stderr.
    pub(crate) async fn return_after(&self, level: Duration) -> Result<Vec<Sample>> {
        const TELL: Duration = Duration::from_secs(2);
        // Far beyond what a loaded machine needs, so that only a job that is lost ends it.
        let deadline = Instant::now() + level + Duration::from_secs(60);
        let mut told = Instant::now();
        loop {
            tokio::time::sleep(Duration::from_millis(50)).await;
            let (jobs, samples) = {
                let times = self.times();
                (times.len(), times.iter().filter_map(Times::sample).collect::<Vec<_>>())
            };
            let back = samples.len();
            if back == jobs {
                return Ok(samples);
            }
            if Instant::now() > deadline {
                bail!("only {back} of {jobs} jobs came back in time");
            }
            if told.elapsed() >= TELL {
                told = Instant::now();
                eprintln!("  {back} of {jobs} jobs are back");
            }
        }
    }

    fn times(&self) -> MutexGuard<'_, Vec<Times>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Times {
    fn sample(&self) -> Option<Sample> {
        Some(Sample { failed: self.failed?, wanted: self.wanted?, back: self.back? })
    }
}

impl Sample {
    /// Negative for a job that came early.
    pub(crate) fn late_ms(&self) -> f64 {
        ms(self.back - self.failed) - ms(self.wanted)
    }
}

/// What a herd's return looks like in numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figures {
    /// Pearson's, of wanted and real delay. None where all wanted delays are the same.
    pub(crate) correlation: Option<f64>,
    /// 99 % of the jobs were at most this late (real delay less wanted delay).
    pub(crate) late_p99_ms: f64,
    /// The most arrivals in any 100 ms.
    pub(crate) peak_100ms: usize,
}

impl Figures {
    /// Of at least one sample.
    pub(crate) fn of(samples: &[Sample]) -> Self {
        let mut late: Vec<f64> = samples.iter().map(Sample::late_ms).collect();
        late.sort_by(f64::total_cmp);
        let pairs: Vec<(f64, f64)> =
            samples.iter().map(|s| (ms(s.wanted), ms(s.back - s.failed))).collect();
        Self {
            correlation: correlation(&pairs),
            late_p99_ms: late[(late.len() * 99).div_ceil(100) - 1],
            peak_100ms: peak(samples.iter().map(|s| s.back).collect()),
        }
    }
}

fn correlation(pairs: &[(f64, f64)]) -> Option<f64> {
    let n = pairs.len() as f64;
    let sum = |f: &dyn Fn(&(f64, f64)) -> f64| pairs.iter().map(f).sum::<f64>();
    let (x, y) = (sum(&|p| p.0) / n, sum(&|p| p.1) / n);
    let xx = sum(&|p| (p.0 - x).powi(2));
    let yy = sum(&|p| (p.1 - y).powi(2));
    let xy = sum(&|p| (p.0 - x) * (p.1 - y));
    (xx > 0.0 && yy > 0.0).then(|| xy / (xx * yy).sqrt())
}

/// The most arrivals in a window of 100 ms that begins with any of them.
fn peak(mut arrivals: Vec<Instant>) -> usize {
    arrivals.sort_unstable();
    let mut end = 0;
    let mut peak = 0;
    for (begin, &first) in arrivals.iter().enumerate() {
        while arrivals.get(end).is_some_and(|&t| t - first < Duration::from_millis(100)) {
            end += 1;
        }
        peak = peak.max(end - begin);
    }
    peak
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}
