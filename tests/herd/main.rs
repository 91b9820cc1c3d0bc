//! The herd: that jitter is real, measured on a real broker.
//!
//! A test binary of its own, because cargo runs test binaries one after the other: nothing else of
//! the suite loads the machine meanwhile.

#[path = "../../examples/herd/amqp.rs"]
mod amqp;
#[path = "../../examples/herd/lanes.rs"]
mod lanes;
#[path = "../../examples/herd/measure.rs"]
mod measure;

use std::time::Duration;

use measure::{Figures, Plan};

const JOBS: u16 = 2_000;
const LANES: u32 = 16;

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_fail_at_once_come_back_spread_over_the_window_on_time_and_never_early() {
    let plan = Plan { url: broker(), jobs: JOBS, level: Duration::from_secs(10) };
    let samples = lanes::run(&plan, LANES).await.unwrap();
    let figures = Figures::of(&samples);
    println!("{figures:?}");
    let early = samples.iter().filter(|sample| sample.late_ms() < 0.0).count();
    assert_eq!(early, 0, "jobs came early");
    assert!(figures.correlation.is_some_and(|c| c >= 0.99), "correlation: {figures:?}");
    assert!(figures.late_p99_ms <= 250.0, "lateness: {figures:?}");
    // Half as many again as one lane holds.
    let most = 3 * usize::from(JOBS) / (2 * LANES as usize) + 1;
    assert!(figures.peak_100ms <= most, "more than {most} in 100 ms: {figures:?}");
}

fn broker() -> String {
    let variable = |name| {
        std::env::var(name).unwrap_or_else(|_| {
            panic!("{name} is not set: run it through scripts/with-broker cargo test")
        })
    };
    variable("RABBITMQ_MANAGEMENT_URL");
    variable("AMQP_URL")
}
