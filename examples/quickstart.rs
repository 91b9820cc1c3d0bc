//! Three dozen jobs, some of which fail: each attempt as it happens, and what became of each job.
//!
//! ```sh
//! scripts/with-broker cargo run --example quickstart
//! ```
//!
//! A job that fails comes back after at most 1 s, then 2 s, then 4 s. If it fails once more it is
//! buried: moved to the queue `quickstart.buried`, with its story in its headers.

use std::{
    collections::{BTreeMap, HashMap},
    env,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use lapin_retry::{
    Event, Job, QueueType, RetryConsumer, RetryPolicy, Topology,
    lapin::{BasicProperties, Connection, ConnectionProperties, options::*, types::*},
};
use serde::{Deserialize, Serialize};
use tokio::{sync::mpsc, time};

const QUEUE: &str = "quickstart";
const BURIED: &str = "quickstart.buried";

/// So many mails, each refused so many times before it is sent. One more job is no mail at all.
const MAILS: [(usize, u32); 4] = [(24, 0), (6, 1), (4, 3), (1, u32::MAX)];

#[derive(Clone, Serialize, Deserialize)]
struct Mail {
    refusals: u32,
}

/// The handler. `Ok` is done, an error is tried again; a body that is no `Mail` is buried at once.
async fn send(job: &Job) -> anyhow::Result<()> {
    let mail: Mail = job.decode()?;
    ensure!(job.retry_count() >= mail.refusals, "mail server busy");
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = env::var("AMQP_URL").unwrap_or_else(|_| "amqp://localhost".to_owned());
    let policy = RetryPolicy::new([1, 2, 4]); // seconds
    let jobs = publish_jobs(&url, &policy).await?;
    let ui = management_ui();
    println!("{jobs} jobs are in the queue {QUEUE}. Watch those that fail wait in their lanes:");
    println!("  {ui}/#/queues (filter: {QUEUE}.retry)\n");

    let (tell, events) = mpsc::unbounded_channel();
    let times = Times::default();
    let clock = Arc::clone(&times);
    let consumer = RetryConsumer::builder(url.as_str(), QUEUE)
        .policy(policy)
        .on_event(move |event| drop(tell.send(event.clone())))
        .handler(move |job: Job| {
            let clock = Arc::clone(&clock);
            async move {
                let start = Instant::now();
                let result = send(&job).await;
                clock.lock().unwrap().insert(job.id().to_owned(), (start, Instant::now()));
                result
            }
        })
        .start()
        .await?;
    let ends = report(jobs, events, &times).await?;
    consumer.shutdown(Duration::from_secs(1)).await;
    let open = jobs - ends.len();
    let mut alike = BTreeMap::<_, u32>::new();
    for (outcome, attempts) in ends.into_values() {
        *alike.entry((outcome != "done", attempts, outcome)).or_default() += 1;
    }
    println!("\njobs  attempts  what became of them");
    for ((_, attempts, outcome), jobs) in alike {
        println!("{jobs:>4}  {attempts:>8}  {outcome}");
    }
    ensure!(open == 0, "{open} jobs did not come to their end in time");
    let told = time::timeout(Duration::from_secs(10), tell_story(&url)).await;
    told.context("reading the buried jobs")??;
    println!("\nIf the broker is still there, so are the buried jobs (\"Get messages\"):");
    println!("  {ui}/#/queues (filter: {BURIED})");
    Ok(())
}

/// Prints the headers of the job that failed at every level, and leaves it where it is.
async fn tell_story(url: &str) -> anyhow::Result<()> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    let exhausted = AMQPValue::LongString("exhausted".into());
    while let Some(job) = channel.basic_get(BURIED.into(), BasicGetOptions::default()).await? {
        let headers = job.properties.headers().clone().unwrap_or_default();
        if headers.inner().get("buried-reason") == Some(&exhausted) {
            println!("\nThe story of the exhausted one, as its headers in {BURIED} tell it:");
            for (name, value) in &headers {
                println!("  {:<27}  {}", name.as_str(), words(value));
            }
        }
    }
    // None was acked, so the broker puts them back.
    Ok(connection.close(200, "read".into()).await?)
}

fn words(value: &AMQPValue) -> String {
    match value {
        AMQPValue::LongString(text) => text.to_string(),
        AMQPValue::LongLongInt(number) => number.to_string(),
        AMQPValue::FieldTable(entry) => entry.inner().values().map(|v| words(v) + "  ").collect(),
        AMQPValue::FieldArray(entries) => {
            let lines = entries.as_slice().iter().map(|entry| words(entry).trim_end().to_owned());
            lines.collect::<Vec<_>>().join(&format!("\n{:31}", ""))
        }
        other => format!("{other:?}"),
    }
}

/// When the last attempt of each job began, and when it ended.
type Times = Arc<Mutex<HashMap<String, (Instant, Instant)>>>;

/// Prints each attempt until every job is done or buried. How each ended, after how many attempts.
async fn report(
    jobs: usize,
    mut events: mpsc::UnboundedReceiver<Event>,
    times: &Times,
) -> anyhow::Result<HashMap<String, (String, u32)>> {
    println!("   time  job      attempt   wanted     real  outcome");
    let start = Instant::now();
    let limit = start + Duration::from_secs(25);
    let (mut waiting, mut ends) = (HashMap::new(), HashMap::new());
    while ends.len() < jobs {
        let Ok(event) = time::timeout_at(limit.into(), events.recv()).await else { break };
        let (job, outcome, delay) = match event.context("the consumer is gone")? {
            Event::Done { job, .. } => (job, "done".to_owned(), None),
            Event::Buried { job, reason, .. } => (job, format!("buried: {reason}"), None),
            Event::Retried { job, delay, error, .. } => {
                (job, format!("{error}; again in {}", seconds(delay)), Some(delay))
            }
            Event::Disconnected { error, .. } => bail!("not consuming: {error}"),
            _ => continue,
        };
        let (id, attempt) = (job.id().to_owned(), job.retry_count() + 1);
        let (began, ended) = times.lock().unwrap()[&id];
        let (wanted, real) = match waiting.remove(&id) {
            Some((since, wanted)) => (seconds(wanted), seconds(began - since)),
            None => Default::default(),
        };
        let time = start.elapsed().as_secs_f64();
        println!("{time:>5.2} s  {id:<7}  {attempt:>7}  {wanted:>7}  {real:>7}  {outcome}");
        if let Some(delay) = delay {
            waiting.insert(id, (ended, delay));
        } else {
            ends.insert(id, (outcome, attempt));
        }
    }
    Ok(ends)
}

fn seconds(duration: Duration) -> String {
    format!("{:.3} s", duration.as_secs_f64())
}

/// Deletes what an earlier run left, makes the work queue, and fills it. How many jobs there are.
async fn publish_jobs(url: &str, policy: &RetryPolicy) -> anyhow::Result<usize> {
    let connection = Connection::connect(url, ConnectionProperties::default())
        .await
        .context("connecting to the RabbitMQ at AMQP_URL")?;
    let channel = connection.create_channel().await?;
    let topology = Topology::new(QUEUE, policy, QueueType::Quorum)?;
    for queue in topology.queues().map(|queue| queue.name.as_str()).chain([QUEUE]) {
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
    let mails = MAILS.into_iter().flat_map(|(mails, refusals)| vec![Mail { refusals }; mails]);
    let mut bodies = mails.map(|mail| serde_json::to_vec(&mail)).collect::<Result<Vec<_>, _>>()?;
    bodies.push(b"no mail".to_vec());
    for (number, body) in bodies.iter().enumerate() {
        let properties = BasicProperties::default()
            .with_message_id(format!("mail-{:02}", number + 1).into())
            .with_content_type("application/json".into())
            .with_delivery_mode(2);
        let options = BasicPublishOptions::default();
        channel.basic_publish("".into(), QUEUE.into(), options, body, properties).await?.await?;
    }
    connection.close(200, "published".into()).await?;
    Ok(bodies.len())
}

/// The address of the management UI, without a password.
fn management_ui() -> String {
    let url = env::var("RABBITMQ_MANAGEMENT_URL").unwrap_or("http://localhost:15672".to_owned());
    let (scheme, rest) = url.split_once("://").unwrap_or(("http", &url));
    let host = rest.rsplit('@').next().unwrap_or(rest).trim_end_matches('/');
    format!("{scheme}://{host}")
}
