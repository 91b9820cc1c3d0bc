//! All that a handler can say about a job, and what becomes of the job.
//!
//! ```sh
//! scripts/with-broker cargo run --example outcomes
//! ```
//!
//! The levels are 1 s and 2 s. First ten jobs with troubles of their own, then two that meet a
//! database which is down for two seconds: that is no fault of theirs, so the consumer pauses.

use std::{
    collections::{BTreeMap, HashMap},
    env,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow, bail, ensure};
use lapin_retry::{
    Event, Job, OutcomeExt, Pauses, QueueType, RetryConsumer, RetryPolicy, Settings, Topology,
    busy,
    lapin::{BasicProperties, Channel, Connection, ConnectionProperties, options::*, types::*},
    outage, retry_after,
};
use tokio::{
    sync::{Mutex as Lock, mpsc},
    time::{sleep, timeout_at},
};

const QUEUE: &str = "outcomes";

/// The first jobs; the body of each is its name.
const JOBS: [&str; 10] = [
    "done",
    "failed",
    "hopeless",
    "timeout",
    "panic",
    "rejected",
    "no-json",
    "rate-limited",
    "printed-1",
    "printed-2",
];
/// The jobs for the database.
const SAVES: [&str; 2] = ["saved-1", "saved-2"];

/// What the handler works with.
#[derive(Default)]
struct World {
    /// Calls of each job.
    calls: Mutex<BTreeMap<String, u32>>,
    printer: Lock<()>,
    /// When the first job asked for the database, which is up two seconds later.
    asked: Mutex<Option<Instant>>,
    /// Calls while the database was down.
    in_vain: AtomicU32,
}

/// The handler. `Ok` is done; a plain error is tried again; one that is marked says what becomes of
/// the job.
async fn handle(job: Job, world: &World) -> anyhow::Result<()> {
    let first = job.retry_count() == 0;
    *world.calls.lock().unwrap().entry(job.id().to_owned()).or_default() += 1;
    match job.id() {
        "failed" if first => bail!("no route to host"),
        "hopeless" => bail!("still no route to host"),
        // Longer than the handler may take.
        "timeout" if first => sleep(Duration::from_secs(60)).await,
        "panic" if first => panic!("index out of bounds"),
        "rejected" => Err(anyhow!("the amount is negative")).or_reject()?,
        "no-json" => job.decode::<()>()?,
        "rate-limited" if first => {
            // As the server says, and longer than any lane.
            return Err(retry_after(anyhow!("429"), Duration::from_secs(4)).into());
        }
        printed if printed.starts_with("printed") => {
            let Ok(_printer) = world.printer.try_lock() else {
                return Err(busy(anyhow!("the printer is taken")).into());
            };
            sleep(Duration::from_millis(300)).await;
        }
        saved if saved.starts_with("saved") => {
            let asked = *world.asked.lock().unwrap().get_or_insert_with(Instant::now);
            if asked.elapsed() < Duration::from_secs(2) {
                world.in_vain.fetch_add(1, Relaxed);
                return Err(outage(anyhow!("the database is down")).into());
            }
        }
        _ => {}
    }
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // The table tells of the panic.
    std::panic::set_hook(Box::new(|_| ()));
    let url = env::var("AMQP_URL").unwrap_or_else(|_| "amqp://localhost".to_owned());
    let policy = RetryPolicy::new([1, 2]).lanes(4);
    let channel = prepare(&url, &policy).await?;
    let (tell, mut events) = mpsc::unbounded_channel();
    let settings = Settings::new(policy)
        .pauses(Pauses::default().first(Duration::from_secs(1)))
        .on_event(move |event| drop(tell.send(event.clone())));
    let world = Arc::new(World::default());
    let shared = Arc::clone(&world);
    let consumer = RetryConsumer::builder(url, QUEUE)
        .settings(settings)
        .handler_timeout(Duration::from_secs(1))
        .handler(move |job: Job| {
            let world = Arc::clone(&shared);
            async move { handle(job, &world).await }
        })
        .start()
        .await?;

    let start = Instant::now();
    let mut ends = HashMap::new();
    for (jobs, limit) in [(JOBS.as_slice(), 25), (&SAVES, 12)] {
        publish(&channel, jobs).await?;
        let limit = Instant::now() + Duration::from_secs(limit);
        while !jobs.iter().all(|job| ends.contains_key(*job)) {
            let Ok(event) = timeout_at(limit.into(), events.recv()).await else { break };
            report(start, event.context("the consumer is gone")?, &mut ends);
        }
    }
    consumer.shutdown(Duration::from_secs(1)).await;

    println!("\njob           calls  charged  what became of it");
    let calls = world.calls.lock().unwrap().clone();
    let mut open = 0;
    for job in JOBS.iter().chain(&SAVES) {
        let calls = calls.get(*job).copied().unwrap_or_default();
        let (charged, end) = ends.remove(*job).unwrap_or_else(|| {
            open += 1;
            (0, "still on its way".to_owned())
        });
        println!("{job:<12}  {calls:>5}  {charged:>7}  {end}");
    }
    let in_vain = world.in_vain.load(Relaxed);
    println!("\n{in_vain} calls met the database while it was down; no job paid for them.");
    ensure!(open == 0, "{open} jobs did not come to their end in time");
    Ok(())
}

/// Prints what happened, and keeps how a job ended, with the failures charged to it.
fn report(start: Instant, event: Event, ends: &mut HashMap<String, (u32, String)>) {
    let (who, what) = match event {
        Event::Done { job, .. } => {
            ends.insert(job.id().to_owned(), (job.retry_count(), "done".to_owned()));
            (job.id().to_owned(), "done".to_owned())
        }
        Event::Buried { job, reason, error, .. } => {
            // The last failure of an exhausted job is charged, too.
            let charged = job.retry_count() + u32::from(reason.as_str() == "exhausted");
            ends.insert(job.id().to_owned(), (charged, format!("buried: {reason}")));
            (job.id().to_owned(), format!("buried as {reason}: {error}"))
        }
        Event::Retried { job, level, delay, kind, error, .. } => {
            let what = format!("{kind}: {error}; level {level}, in {delay:.1?}");
            (job.id().to_owned(), what)
        }
        Event::Postponed { job, delay, why, .. } => {
            (job.id().to_owned(), format!("not charged, in {delay:.1?} ({why:?})"))
        }
        Event::Returned { job, error, .. } => {
            (job.id().to_owned(), format!("returned unharmed: {error}"))
        }
        Event::Paused { wait, error, .. } => (
            "(consumer)".to_owned(),
            format!("pauses for {:.1?}: {error}", wait.unwrap_or_default()),
        ),
        Event::Resumed { why, .. } => ("(consumer)".to_owned(), format!("goes on: {why:?}")),
        Event::Disconnected { error, .. } => {
            ("(consumer)".to_owned(), format!("not consuming: {error}"))
        }
        _ => return,
    };
    println!("{:>5.2} s  {who:<12}  {what}", start.elapsed().as_secs_f64());
}

/// Deletes what an earlier run left, and makes the work queue.
async fn prepare(url: &str, policy: &RetryPolicy) -> anyhow::Result<Channel> {
    let connection = Connection::connect(url, ConnectionProperties::default())
        .await
        .context("connecting to the RabbitMQ at AMQP_URL")?;
    let channel = connection.create_channel().await?;
    let topology = Topology::new(QUEUE, policy, QueueType::Quorum)?;
    let ours = topology.queues().chain(topology.queues_on_first_use());
    for queue in ours.map(|queue| queue.name.as_str()).chain([QUEUE]) {
        channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
    }
    let text = |text: &str| AMQPValue::LongString(text.into());
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), text("quorum"));
    // RabbitMQ 4 drops what it delivered 21 times, unless the queue says where it is to go.
    arguments.insert("x-dead-letter-exchange".into(), text(""));
    arguments.insert("x-dead-letter-routing-key".into(), text(topology.buried().name.as_str()));
    channel.queue_declare(QUEUE.into(), QueueDeclareOptions::durable(), arguments).await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok(channel)
}

async fn publish(channel: &Channel, jobs: &[&str]) -> anyhow::Result<()> {
    for job in jobs {
        let properties = BasicProperties::default()
            .with_message_id((*job).into())
            .with_content_type("application/json".into())
            .with_delivery_mode(2);
        let options = BasicPublishOptions::default();
        let body = job.as_bytes();
        channel.basic_publish("".into(), QUEUE.into(), options, body, properties).await?.await?;
    }
    Ok(())
}
