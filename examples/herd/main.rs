//! The herd, measured: many jobs fail at once, and this shows when they come back.
//!
//! ```text
//! AMQP_URL=amqp://localhost cargo run --release --example herd -- --svg herd.svg
//! ```

mod amqp;
mod chart;
mod lanes;
mod measure;
mod one_queue;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
use serde::Serialize;

use self::measure::{Figures, Plan, Sample};

const HELP: &str = "\
The herd, measured: many jobs fail at once with the same level, and come back.

Usage: herd [options]

  --jobs N          how many fail, 1 to 65535 (2000)
  --level DURATION  the level, such as 10s or 1500ms (10s); jitter makes it a
                    delay between its half and all of it
  --lanes A,B,...   how many lanes to try, one run each (1,8,16)
  --json            print one JSON object a row instead of the table
  --svg FILE        draw the arrivals
  --help            print this

Each run takes a little longer than the level. The broker is named by AMQP_URL
(amqp://localhost). Every queue that is made has a name of its own, and is
deleted in the end.";

#[derive(Debug)]
struct Arguments {
    plan: Plan,
    lanes: Vec<u32>,
    json: bool,
    svg: Option<PathBuf>,
}

/// A line of the table.
#[derive(Debug, Serialize)]
struct Row {
    layout: &'static str,
    lanes: u32,
    jobs: u16,
    correlation: Option<f64>,
    late_p99_ms: f64,
    peak_100ms: usize,
}

#[tokio::main]
async fn main() -> ExitCode {
    let outcome = match arguments(std::env::args().skip(1)) {
        Ok(Some(arguments)) => run(&arguments).await,
        Ok(None) => {
            println!("{HELP}");
            Ok(())
        }
        Err(error) => Err(anyhow!("{error:#} (see --help)")),
    };
    if let Err(error) = outcome {
        eprintln!("herd: {error:#}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

async fn run(arguments: &Arguments) -> Result<()> {
    let Arguments { plan, lanes, json, svg } = arguments;
    let (mut rows, mut panels) = (Vec::new(), Vec::new());
    for layout in std::iter::once(None).chain(lanes.iter().copied().map(Some)) {
        eprintln!("{}, {} jobs:", name(layout), plan.jobs);
        let samples = match layout {
            None => one_queue::run(plan).await,
            Some(lanes) => lanes::run(plan, lanes).await,
        }
        .with_context(|| name(layout))?;
        let row = Row::of(layout, &samples);
        panels.push(chart::Panel::new(name(layout), &row, &samples));
        rows.push(row);
    }
    // Only now, so that the progress on stderr does not tear the table.
    if *json {
        for row in &rows {
            println!("{}", serde_json::to_string(row)?);
        }
    } else {
        print_table(plan, &rows);
    }
    if let Some(file) = svg {
        std::fs::write(file, chart::draw(plan, &panels))
            .with_context(|| format!("writing {}", file.display()))?;
        eprintln!("drawn: {}", file.display());
    }
    Ok(())
}

fn name(layout: Option<u32>) -> String {
    match layout {
        None => "one queue, a random expiration on each message".to_owned(),
        Some(1) => "1 lane".to_owned(),
        Some(lanes) => format!("{lanes} lanes"),
    }
}

fn print_table(plan: &Plan, rows: &[Row]) {
    let (lo, hi) = plan.window_ms();
    println!("\n{} jobs fail at once; each is to come back after {lo}..{hi} ms.\n", plan.jobs);
    println!(
        "{:<9} {:>6} {:>6} {:>12} {:>12} {:>12}",
        "layout", "lanes", "jobs", "correlation", "late p99 ms", "peak 100 ms"
    );
    for row in rows {
        println!("{row}");
    }
    println!(
        "\ncorrelation of wanted and real delay: 1 is real jitter, 0 is none (- where all want the \
         same); 99 % came at most \"late p99\" after the wanted time; \"peak\" is the most arrivals \
         in any 100 ms, a sliding window ({:.0} would be even).",
        chart::even(plan)
    );
}

impl Row {
    fn of(layout: Option<u32>, samples: &[Sample]) -> Self {
        let figures = Figures::of(samples);
        Self {
            layout: if layout.is_some() { "lanes" } else { "one-queue" },
            lanes: layout.unwrap_or(1),
            jobs: samples.len().try_into().unwrap_or(u16::MAX),
            correlation: figures.correlation.map(|c| (c * 1e4).round() / 1e4),
            late_p99_ms: (figures.late_p99_ms * 10.0).round() / 10.0,
            peak_100ms: figures.peak_100ms,
        }
    }
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { layout, lanes, jobs, late_p99_ms, peak_100ms, .. } = self;
        let correlation = self.correlation.map_or("-".to_owned(), |c| format!("{c:.3}"));
        write!(
            f,
            "{layout:<9} {lanes:>6} {jobs:>6} {correlation:>12} {late_p99_ms:>12.0} {peak_100ms:>12}"
        )
    }
}

/// None if only help is wanted.
fn arguments(mut given: impl Iterator<Item = String>) -> Result<Option<Arguments>> {
    let url = std::env::var("AMQP_URL").unwrap_or_else(|_| "amqp://localhost".to_owned());
    let mut arguments = Arguments {
        plan: Plan { url, jobs: 2_000, level: Duration::from_secs(10) },
        lanes: vec![1, 8, 16],
        json: false,
        svg: None,
    };
    while let Some(option) = given.next() {
        let mut value = || given.next().with_context(|| format!("{option} needs a value"));
        match option.as_str() {
            "--jobs" => arguments.plan.jobs = value()?.parse().context("--jobs")?,
            "--level" => {
                arguments.plan.level = humantime::parse_duration(&value()?).context("--level")?;
            }
            "--lanes" => {
                let list = value()?;
                let lanes = list.split(',').map(|lanes| lanes.trim().parse());
                arguments.lanes = lanes.collect::<Result<_, _>>().context("--lanes")?;
            }
            "--json" => arguments.json = true,
            "--svg" => arguments.svg = Some(value()?.into()),
            "--help" | "-h" => return Ok(None),
            other => bail!("{other}: no such option"),
        }
    }
    if arguments.plan.jobs == 0 {
        bail!("--jobs: 0; at least one must fail");
    }
    Ok(Some(arguments))
}
