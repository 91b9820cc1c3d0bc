//! A herd that goes through the library: every handler fails, and the jobs come back out of the
//! lanes.

use std::{sync::Arc, time::Duration};

use anyhow::{Result, bail};
use lapin_retry::{
    Event, Handle, Job, QueueType, RetryConsumer, RetryPolicy, Settings, Topology,
    lapin::{BasicProperties, types::FieldTable},
};

use crate::{
    amqp,
    measure::{Herd, Plan, Sample},
};

/// Hand-offs in flight, and handlers at a time. Few, so that a job that failed does not stand in a
/// line before it reaches its lane: on two cores 16 in flight move nearly as many jobs a second as
/// 64 do, and each is through in a third of the time. What is measured are the lanes.
const HAND_OFFS: usize = 16;
const CONCURRENCY: usize = 8;

/// Sends a herd through `lanes` lanes, and leaves no queue behind.
pub(crate) async fn run(plan: &Plan, lanes: u32) -> Result<Vec<Sample>> {
    let policy = RetryPolicy::new([plan.level]).lanes(lanes);
    let work = amqp::unique_name();
    let topology = Topology::new(&work, &policy, QueueType::Quorum)?;
    let ours = topology.queues().map(|queue| queue.name.clone());
    let queues: Vec<String> = std::iter::once(work.clone()).chain(ours).collect();

    let (connection, channel) = amqp::connect(&plan.url).await?;
    amqp::with_queues(&connection, &queues, async {
        amqp::declare_quorum(&channel, &work, FieldTable::default()).await?;
        // The whole herd is there before the first handler runs.
        let mut confirms = Vec::new();
        for number in 0..plan.jobs {
            let properties = BasicProperties::default();
            confirms.push(amqp::publish(&channel, &work, number, properties).await?);
        }
        amqp::all_confirmed(confirms).await?;

        let herd = Arc::new(Herd::of(plan.jobs));
        let consumer = start(plan, policy, &work, &herd).await?;
        let samples = herd.return_after(plan.level).await;
        consumer.shutdown(Duration::from_secs(5)).await;
        samples
    })
    .await
}

async fn start(plan: &Plan, policy: RetryPolicy, work: &str, herd: &Arc<Herd>) -> Result<Handle> {
    let (observed, handled) = (Arc::clone(herd), Arc::clone(herd));
    let handler = move |job: Job| {
        let herd = Arc::clone(&handled);
        async move {
            let number = job.id().parse()?;
            if job.retry_count() > 0 {
                herd.back(number);
                return Ok(());
            }
            herd.failed(number);
            bail!("the database is down")
        }
    };
    let consumer = RetryConsumer::builder(plan.url.as_str(), work)
        .settings(Settings::new(policy).hand_offs(HAND_OFFS))
        .prefetch(plan.jobs)
        .concurrency(CONCURRENCY)
        .on_event(move |event| {
            if let Event::Retried { job, delay, .. } = event
                && let Ok(number) = job.id().parse()
            {
                observed.wanted(number, *delay);
            }
        })
        .handler(handler);
    Ok(consumer.start().await?)
}
