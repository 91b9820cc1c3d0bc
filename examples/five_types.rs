//! Five types of jobs in one work queue, each with a schedule of its own, all from a file.
//!
//! ```sh
//! scripts/with-broker cargo run --example five_types
//! ```
//!
//! The schedules are in `five_types.toml`; most run for minutes. Here each job fails only a few
//! times, so that all are done within seconds. The type is the AMQP property of that name.

use std::{
    collections::HashMap,
    env,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use lapin_retry::{
    Config, Event, Job, Policies, QueueType, Topology,
    lapin::{BasicProperties, Connection, ConnectionProperties, options::*, types::*},
};
use tokio::{sync::mpsc, time::timeout_at};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/five_types.toml");
/// The consumer in the file, and its work queue.
const NAME: &str = "five_types";

/// The types, and how often a job of each fails before it is done.
const TYPES: [(&str, u32); 5] =
    [("observation", 3), ("embedding", 2), ("sync", 1), ("summarize", 2), ("documents", 2)];
const JOBS_OF_EACH: usize = 3;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let config = Config::from_file(FILE)?;
    let policies = config.policies(NAME)?;
    let topology = Topology::new(NAME, policies, QueueType::Quorum)?;
    show(policies, &topology);
    fill(&topology).await?;

    let (tell, mut events) = mpsc::unbounded_channel();
    let consumer = config
        .builder(config.broker()?, NAME)?
        .on_event(move |event| drop(tell.send((Instant::now(), event.clone()))))
        .handler(|job: Job| async move {
            let kind = job.properties().kind().as_ref().context("no type")?;
            let failures = TYPES.iter().find(|(name, _)| *name == kind.as_str());
            let (_, failures) = failures.context("not one of the five")?;
            if job.retry_count() < *failures {
                bail!("not yet");
            }
            Ok(())
        })
        .start()
        .await?;

    println!("   time  job            outcome");
    let start = Instant::now();
    let limit = start + Duration::from_secs(25);
    let mut open = TYPES.len() * JOBS_OF_EACH;
    let mut waiting = HashMap::new();
    while open > 0 {
        let Ok(event) = timeout_at(limit.into(), events.recv()).await else { break };
        let (at, event) = event.context("the consumer is gone")?;
        let (job, outcome) = match event {
            Event::Retried { job, level, delay, .. } => {
                let kind = job.properties().kind().as_ref().map_or("", |kind| kind.as_str());
                let nominal = policies.get(kind).level(level).unwrap_or_default();
                let real = back(&mut waiting, &job, at);
                waiting.insert(job.id().to_owned(), at);
                (job, format!("{real}level {level}, {nominal:?}: waits {delay:.2?}"))
            }
            Event::Done { job, .. } => {
                open -= 1;
                let real = back(&mut waiting, &job, at);
                (job, format!("{real}done"))
            }
            Event::Buried { job, reason, .. } => bail!("{} is buried: {reason}", job.id()),
            Event::Disconnected { error, .. } => {
                println!("not consuming: {error}");
                continue;
            }
            _ => continue,
        };
        println!("{:>5.2} s  {:<13}  {outcome}", (at - start).as_secs_f64(), job.id());
    }
    consumer.shutdown(Duration::from_secs(1)).await;
    ensure!(open == 0, "{open} jobs did not come to their end in time");
    println!(
        "\nAll are done. If the broker is still there, so are the lanes: filter for {NAME}.retry"
    );
    Ok(())
}

/// After how long a job is back, if it was away.
fn back(waiting: &mut HashMap<String, Instant>, job: &Job, now: Instant) -> String {
    let since = waiting.remove(job.id());
    since.map_or(String::new(), |since| format!("back after {:.2?}; ", now - since))
}

fn show(policies: &Policies, topology: &Topology) {
    println!("type         levels");
    for (name, _) in TYPES {
        let policy = policies.get(name);
        let levels = (1..=policy.retries()).filter_map(|level| policy.level(level));
        let levels: Vec<_> = levels.map(|level| format!("{level:?}")).collect();
        println!("{name:<11}  {}", levels.join(", "));
    }
    println!("\nThat makes {} queues beside the work queue.\n", topology.queues().len());
}

/// Deletes what an earlier run left, makes the work queue, and fills it.
async fn fill(topology: &Topology) -> anyhow::Result<()> {
    let url = env::var("AMQP_URL").unwrap_or_else(|_| "amqp://localhost".to_owned());
    let connection = Connection::connect(&url, ConnectionProperties::default())
        .await
        .context("connecting to the RabbitMQ at AMQP_URL")?;
    let channel = connection.create_channel().await?;
    for queue in topology.queues().map(|queue| queue.name.as_str()).chain([NAME]) {
        channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
    }
    let text = |text: &str| AMQPValue::LongString(text.into());
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), text("quorum"));
    // RabbitMQ 4 drops what it delivered 21 times, unless the queue says where it is to go.
    arguments.insert("x-dead-letter-exchange".into(), text(""));
    arguments.insert("x-dead-letter-routing-key".into(), text(topology.buried().name.as_str()));
    channel.queue_declare(NAME.into(), QueueDeclareOptions::durable(), arguments).await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    for number in 1..=JOBS_OF_EACH {
        for (name, _) in TYPES {
            let properties = BasicProperties::default()
                .with_message_id(format!("{name}-{number}").into())
                .with_type(name.into())
                .with_delivery_mode(2);
            let options = BasicPublishOptions::default();
            channel.basic_publish("".into(), NAME.into(), options, b"", properties).await?.await?;
        }
    }
    connection.close(200, "published".into()).await?;
    Ok(())
}
