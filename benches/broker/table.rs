//! What was measured, for people and for programs.

use serde::Serialize;

use crate::{contestants::Contestant, meter::Reading};

/// What each contestant read, round by round.
pub(crate) type Measured = Vec<(Contestant, Vec<Reading>)>;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) measure: &'static str,
    pub(crate) queue_type: &'static str,
    pub(crate) prefetch: u16,
}

#[derive(Debug, Serialize)]
struct Row {
    measure: &'static str,
    contestant: String,
    queue_type: &'static str,
    prefetch: u16,
    /// Jobs a second.
    rate: f64,
    /// The contestant's rate by the baseline's; in a latency, its p50 by the baseline's.
    ratio: Option<f64>,
    baseline: Option<String>,
    cpu_us_per_job: f64,
    /// Its CPU time by the baseline's.
    cpu_ratio: Option<f64>,
    p50_us: Option<f64>,
    p99_us: Option<f64>,
    peak_kib: Option<u64>,
}

/// Prints each row as soon as it is known.
pub(crate) struct Table {
    json: bool,
}

impl Table {
    pub(crate) fn new(json: bool) -> Self {
        if !json {
            println!(
                "{:<20} {:<8} {:>8}  {:<22} {:>8} {:>7} {:>8} {:>8} {:>8}  ratio (CPU) against",
                "measure",
                "queue",
                "prefetch",
                "contestant",
                "jobs/s",
                "CPU us",
                "p50 us",
                "p99 us",
                "peak MiB",
            );
        }
        Self { json }
    }

    /// A row for each baseline that ours are compared with; the others have the first alone.
    pub(crate) fn rates(&self, case: Case, measured: &Measured, baselines: &[Contestant]) {
        let rate = |reading: &Reading| reading.rate;
        for (contestant, readings) in measured {
            let row = Row::new(case, contestant.name().to_owned(), readings);
            let baselines = if contestant.is_ours() { baselines } else { &baselines[..1] };
            if baselines.contains(contestant) {
                self.print(&row);
                continue;
            }
            for (baseline, theirs) in measured.iter().filter(|(it, _)| baselines.contains(it)) {
                self.print(&row.against(baseline.name(), readings, theirs, rate));
            }
        }
    }

    pub(crate) fn latencies(&self, case: Case, measured: &Measured, baseline: Contestant) {
        let p50 = |reading: &Reading| reading.p50_us.unwrap_or(f64::NAN);
        let theirs = measured.iter().find(|(it, _)| *it == baseline).map(|(_, theirs)| theirs);
        for (contestant, readings) in measured {
            let row = Row::new(case, contestant.name().to_owned(), readings);
            match theirs.filter(|_| *contestant != baseline) {
                Some(theirs) => self.print(&row.against(baseline.name(), readings, theirs, p50)),
                None => self.print(&row),
            }
        }
    }

    pub(crate) fn waiting(&self, case: Case, (empty, full): (&[Reading], &[Reading]), jobs: usize) {
        let none = "handler, none waiting";
        self.print(&Row::new(case, none.to_owned(), empty));
        let row = Row::new(case, format!("handler, {jobs}"), full);
        self.print(&row.against(none, full, empty, |reading| reading.rate));
    }

    fn print(&self, row: &Row) {
        if self.json {
            println!("{}", serde_json::to_string(row).expect("a row is JSON"));
            return;
        }
        let us = |us: Option<f64>| us.map_or_else(String::new, |us| format!("{us:.0}"));
        let peak =
            row.peak_kib.map_or_else(String::new, |kib| format!("{:.1}", kib as f64 / 1024.0));
        let compared = match (row.ratio, row.cpu_ratio, &row.baseline) {
            (Some(ratio), Some(cpu), Some(baseline)) => format!("{ratio:.2} ({cpu:.2}) {baseline}"),
            _ => String::new(),
        };
        println!(
            "{:<20} {:<8} {:>8}  {:<22} {:>8.0} {:>7.1} {:>8} {:>8} {peak:>8}  {compared}",
            row.measure,
            row.queue_type,
            row.prefetch,
            row.contestant,
            row.rate,
            row.cpu_us_per_job,
            us(row.p50_us),
            us(row.p99_us),
        );
    }
}

impl Row {
    /// Medians of all rounds.
    fn new(case: Case, contestant: String, readings: &[Reading]) -> Self {
        let Case { measure, queue_type, prefetch } = case;
        Self {
            measure,
            contestant,
            queue_type,
            prefetch,
            rate: median(readings.iter().map(|reading| reading.rate)).unwrap_or(f64::NAN),
            ratio: None,
            baseline: None,
            cpu_us_per_job: median(readings.iter().map(|it| it.cpu_us)).unwrap_or(f64::NAN),
            cpu_ratio: None,
            p50_us: median(readings.iter().filter_map(|reading| reading.p50_us)),
            p99_us: median(readings.iter().filter_map(|reading| reading.p99_us)),
            peak_kib: readings.iter().filter_map(|reading| reading.peak_kib).max(),
        }
    }

    /// The median of the ratios of each round, so that a machine that was slower for some rounds
    /// was so for both.
    fn against(
        &self,
        baseline: &str,
        ours: &[Reading],
        theirs: &[Reading],
        value: impl Fn(&Reading) -> f64,
    ) -> Self {
        let ratio = |value: &dyn Fn(&Reading) -> f64| {
            median(ours.iter().zip(theirs).map(|(ours, theirs)| value(ours) / value(theirs)))
        };
        Self {
            contestant: self.contestant.clone(),
            ratio: ratio(&value),
            baseline: Some(baseline.to_owned()),
            cpu_ratio: ratio(&|reading| reading.cpu_us),
            ..*self
        }
    }
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        _ if values.is_empty() => None,
        0 => Some(f64::midpoint(values[middle - 1], values[middle])),
        _ => Some(values[middle]),
    }
}
