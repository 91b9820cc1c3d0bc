//! The fault run: jobs, workers that are killed, a broker that is killed, a network that fails, and
//! in the end an account of every job.
//!
//! `scripts/fault-run` starts it with the argument `run` and nodes that it may kill; itself it
//! starts its workers with the argument `worker`. As a test, without any, it does what needs no
//! control over the broker, and shows that it would find a loss.

mod account;
mod faults;
mod fleet;
mod journal;
mod nodes;
mod plan;
mod publisher;
mod run;
#[path = "../it/support/mod.rs"]
#[allow(dead_code, unused_imports, reason = "it has what the other tests need, too")]
mod support;
mod worker;

use faults::{Fault, Pace};
use run::{Options, Report, run};
use std::{env, process, time::Duration};
use tracing_subscriber::{filter::LevelFilter, prelude::*};

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let status = match arguments.first().map(String::as_str) {
        Some("worker") => worker(&arguments[1]),
        Some("run") => long(&arguments[1..]),
        _ => tests(&arguments),
    };
    // Whatever still runs is of no interest.
    process::exit(status);
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let threads = worker::THREADS as usize;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build();
    runtime.expect("a runtime").block_on(future)
}

fn worker(orders: &str) -> i32 {
    let orders: worker::Orders = serde_json::from_str(orders).expect("orders");
    let log = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(std::io::stderr);
    tracing_subscriber::registry()
        .with(LevelFilter::WARN)
        .with(log)
        .with(worker::ClosedChannels::new(&orders))
        .init();
    let name = orders.name.clone();
    match block_on(worker::work(orders)) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("{name}: {error:#}");
            fleet::NOT_STARTED
        }
    }
}

fn long(arguments: &[String]) -> i32 {
    let number = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        Some(arguments[at + 1].parse::<u64>().expect("a number"))
    };
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    let (quick, classic_lanes) = (has("--quick"), has("--classic-lanes"));
    let faults_for = match number("--minutes") {
        Some(minutes) => Duration::from_secs(60 * minutes),
        None => Duration::from_secs(if quick { 40 } else { 600 }),
    };
    let jobs = 100 * faults_for.as_secs();
    let options = Options {
        seed: number("--seed").unwrap_or_else(|| rand::random_range(0..1_000_000)),
        jobs: u32::try_from(number("--jobs").unwrap_or(jobs)).expect("a number of jobs"),
        faults_for,
        pace: if quick { Pace::QUICK } else { Pace::USUAL },
        burst: if quick { 300 } else { 1_000 },
        classic_lanes,
        faults: classic_lanes.then(|| vec![Fault::KillBroker]),
    };
    println!("{options:?}");
    let report = block_on(run(options));
    report.print();
    report.status()
}

/// As the test harness would run them.
fn tests(arguments: &[String]) -> i32 {
    const TESTS: [(&str, fn()); 2] = [
        ("a_short_run_loses_nothing", a_short_run_loses_nothing),
        ("a_run_finds_what_was_lost", a_run_finds_what_was_lost),
    ];
    let filters: Vec<&String> = arguments.iter().filter(|text| !text.starts_with('-')).collect();
    let wanted = |name: &str| filters.is_empty() || filters.iter().any(|text| name.contains(*text));
    let mut passed = 0;
    for (name, test) in TESTS.into_iter().filter(|(name, _)| wanted(name)) {
        if arguments.iter().any(|argument| argument == "--list") {
            println!("{name}: test");
            continue;
        }
        // A failure is a panic, and ends the process.
        test();
        println!("test {name} ... ok");
        passed += 1;
    }
    println!("\ntest result: ok. {passed} passed; 0 failed");
    0
}

fn short(jobs: u32, faults: Vec<Fault>) -> Report {
    let options = Options {
        seed: rand::random_range(0..1_000_000),
        jobs,
        faults_for: Duration::from_secs(if faults.len() > 1 { 20 } else { 1 }),
        pace: Pace::USUAL,
        burst: 200,
        classic_lanes: false,
        faults: Some(faults),
    };
    let report = block_on(run(options));
    report.print();
    report
}

fn a_short_run_loses_nothing() {
    let report = short(3_000, Fault::FROM_OUTSIDE.to_vec());
    assert_eq!(report.account.lost, [""; 0]);
    assert_eq!(report.left, [""; 0]);
    assert_eq!(report.misbehaved(), [""; 0]);
    assert_eq!(report.account.jobs, report.account.done + report.account.buried);
}

/// An operator throws away what is in a lane.
fn a_run_finds_what_was_lost() {
    let report = short(0, vec![Fault::PurgeLane]);
    assert!(!report.account.lost.is_empty(), "a lane was purged, and nobody missed its jobs");
    assert_eq!(report.left, [""; 0]);
}
