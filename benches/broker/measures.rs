//! What is measured, and against what.

use std::slice;

use anyhow::Result;

use crate::{
    contestants::{
        Contestant::{
            self, AckEach, ChannelEach, ConfirmEach, Handler, Multiple, OwnLoop, TaskEach, TellEach,
        },
        Task,
    },
    fill::Publisher,
    meter::Reading,
    table::{Case, Measured, Table},
};

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    rounds: usize,
    successes: usize,
    failures: usize,
    one_at_a_time: usize,
    /// How many jobs wait in lanes.
    waiting: usize,
}

impl Extent {
    pub(crate) const FULL: Self = Self {
        rounds: 5,
        successes: 30_000,
        failures: 15_000,
        one_at_a_time: 500,
        waiting: 1_000_000,
    };
    pub(crate) const QUICK: Self =
        Self { rounds: 1, successes: 6_000, failures: 3_000, one_at_a_time: 100, waiting: 20_000 };
}

const SUCCESS: [Contestant; 5] = [AckEach, TaskEach, Multiple, OwnLoop, Handler];
const FAILURE: [Contestant; 5] = [ConfirmEach, ChannelEach, TellEach, OwnLoop, Handler];
const LATENCY: [Contestant; 3] = [AckEach, OwnLoop, Handler];

/// All measures whose name begins so.
pub(crate) async fn all(url: &str, extent: &Extent, name: &str, table: &Table) -> Result<()> {
    let bench = Bench { publisher: Publisher::connect(url).await?, rounds: extent.rounds };
    let is_wanted = |measure: &str| measure.starts_with(name);
    for queue_type in ["classic", "quorum"] {
        for prefetch in [100, 1000] {
            let case = |measure| Case { measure, queue_type, prefetch };
            let success = case("success");
            if is_wanted(success.measure) {
                let measured = bench.in_turn(&SUCCESS, &task(success, extent.successes)).await?;
                table.rates(success, &measured, &[AckEach, TaskEach, Multiple]);
            }
            for (measure, lanes) in [("fails once, 1 lane", 1), ("fails once, 8 lanes", 8)] {
                let failure = case(measure);
                if is_wanted(measure) {
                    let task = Task { fail: true, lanes, ..task(failure, extent.failures) };
                    let measured = bench.in_turn(&FAILURE, &task).await?;
                    table.rates(failure, &measured, &[ConfirmEach, TellEach]);
                }
            }
        }
        let latency = Case { measure: "latency", queue_type, prefetch: 100 };
        if is_wanted(latency.measure) {
            let task = Task { one_at_a_time: true, ..task(latency, extent.one_at_a_time) };
            table.latencies(latency, &bench.in_turn(&LATENCY, &task).await?, AckEach);
        }
    }
    let waiting = Case { measure: "waiting", queue_type: "quorum", prefetch: 1000 };
    if is_wanted(waiting.measure) {
        let task = Task { lanes: 8, ..task(waiting, extent.successes) };
        let (empty, full) = bench.waiting(&task, extent.waiting).await?;
        table.waiting(waiting, (&empty, &full), extent.waiting);
    }
    Ok(())
}

fn task(case: Case, jobs: usize) -> Task {
    Task {
        contestant: Handler,
        queue: format!("bench-{:08x}", rand::random::<u32>()),
        classic: case.queue_type == "classic",
        lanes: 1,
        prefetch: case.prefetch,
        fail: false,
        one_at_a_time: false,
        warm_up: jobs / 5 + usize::from(case.prefetch),
        jobs,
    }
}

struct Bench {
    publisher: Publisher,
    rounds: usize,
}

impl Bench {
    /// Lets them take turns, each with queues of its own that are filled alike. Each goes first as
    /// often as the others.
    async fn in_turn(&self, contestants: &[Contestant], task: &Task) -> Result<Measured> {
        let mut measured: Measured = contestants.iter().map(|it| (*it, Vec::new())).collect();
        for round in 0..self.rounds {
            for place in 0..contestants.len() {
                let (contestant, readings) = &mut measured[(place + round) % contestants.len()];
                let task = Task { contestant: *contestant, ..task.clone() };
                let queues = self.publisher.set_up(&task).await?;
                let reading = task.in_a_process().await;
                self.publisher.delete(&queues).await?;
                readings.push(reading?);
            }
        }
        Ok(measured)
    }

    /// With nothing in the lanes, and then with many jobs in them.
    async fn waiting(&self, task: &Task, jobs: usize) -> Result<(Vec<Reading>, Vec<Reading>)> {
        let queues = self.publisher.set_up(task).await?;
        let measured = async {
            let empty = self.refilled(task).await?;
            self.publisher.fill(&queues.lanes, jobs).await?;
            Ok((empty, self.refilled(task).await?))
        };
        let measured = measured.await;
        self.publisher.delete(&queues).await?;
        measured
    }

    /// Round after round on the same queues.
    async fn refilled(&self, task: &Task) -> Result<Vec<Reading>> {
        let mut readings = Vec::new();
        for _ in 0..self.rounds {
            self.publisher.purge(&task.queue).await?;
            self.publisher.fill(slice::from_ref(&task.queue), task.filling()).await?;
            readings.push(task.in_a_process().await?);
        }
        Ok(readings)
    }
}
