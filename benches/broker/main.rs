//! How fast jobs are done and retried, side by side with lapin used by hand.
//!
//! ```sh
//! scripts/with-broker cargo bench --bench broker
//! scripts/with-broker cargo bench --bench broker -- --quick --json success
//! ```
//!
//! Without a word all is measured; with one, the measures whose name begins with it. Each contestant
//! runs in a process of its own, so that its CPU time and memory hold neither the broker's nor those
//! of what fills the queue. The contestants of a measure take turns; a ratio is of two neighbours of
//! one round, and what is shown is the median of all rounds.

mod by_hand;
mod contestants;
mod fill;
mod measures;
mod meter;
mod table;

use std::env;

use anyhow::{Context, Result, bail};

use self::{contestants::Task, measures::Extent, table::Table};

/// How a process of this program is told which contestant it is.
const TASK: &str = "LAPIN_RETRY_BENCH_TASK";

#[tokio::main]
async fn main() -> Result<()> {
    let url = env::var("AMQP_URL").context("AMQP_URL names no broker; use scripts/with-broker")?;
    if let Ok(task) = env::var(TASK) {
        let task: Task = serde_json::from_str(&task)?;
        println!("{}", serde_json::to_string(&task.run(&url).await?)?);
        // What it was given beyond the measure goes down with its connection.
        std::process::exit(0);
    }
    let (mut extent, mut json, mut wanted) = (Extent::FULL, false, String::new());
    for argument in env::args().skip(1) {
        match argument.as_str() {
            "--quick" => extent = Extent::QUICK,
            "--json" => json = true,
            // Cargo says so to every benchmark.
            "--bench" => {}
            option if option.starts_with('-') => bail!("{option}: there are --quick and --json"),
            measure => measure.clone_into(&mut wanted),
        }
    }
    let table = Table::new(json);
    measures::all(&url, &extent, &wanted, &table).await
}
