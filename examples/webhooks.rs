//! Webhooks, delivered to an endpoint that is busy, refuses some, or does not answer.
//!
//! ```sh
//! scripts/with-broker cargo run --example webhooks
//! ```
//!
//! What may pass is tried again, after at most 1 s, 2 s and 4 s: a 503, a timeout. What will not
//! pass is buried at once: a 400 as `rejected`, a body that is no webhook as `undecodable`.
//! The endpoint is in this file, on a port of 127.0.0.1.

use std::{
    collections::{BTreeMap, HashMap},
    env,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow, bail, ensure};
use lapin_retry::{
    Event, Job, OutcomeExt, QueueType, RetryConsumer, RetryPolicy, Topology,
    lapin::{BasicProperties, Connection, ConnectionProperties, options::*, types::*},
    reject,
};
use serde::Deserialize;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    sync::watch,
    time::timeout,
};

const QUEUE: &str = "webhooks";

/// The jobs' names and bodies. `HOST` becomes the endpoint's address.
const WEBHOOKS: [(&str, &str); 8] = [
    ("paid", r#"{"url": "http://HOST/ok", "event": "order.paid"}"#),
    ("sent", r#"{"url": "http://HOST/ok", "event": "order.sent"}"#),
    ("busy", r#"{"url": "http://HOST/busy-twice", "event": "order.paid"}"#),
    ("slow", r#"{"url": "http://HOST/silent-once", "event": "order.paid"}"#),
    ("silent", r#"{"url": "http://HOST/silent", "event": "order.paid"}"#),
    ("refused", r#"{"url": "http://HOST/bad", "event": "order.lost"}"#),
    ("no-http", r#"{"url": "gopher://HOST/ok", "event": "order.paid"}"#),
    ("no-json", r#"url = http://HOST/ok"#),
];

#[derive(Deserialize)]
struct Webhook {
    url: String,
}

/// The handler. A plain error is tried again; one that is marked says what becomes of the job.
async fn deliver(job: Job) -> anyhow::Result<()> {
    let webhook: Webhook = job.decode()?; // else buried as undecodable
    let address = webhook.url.strip_prefix("http://").and_then(|rest| rest.split_once('/'));
    let (host, path) = address.context("not an http:// URL").or_reject()?;
    match post(host, path, job.body()).await? {
        200..=299 => Ok(()),
        status @ (408 | 429 | 500..) => bail!("the endpoint answered {status}"),
        status => Err(reject(anyhow!("the endpoint answered {status}")).into()),
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = env::var("AMQP_URL").unwrap_or_else(|_| "amqp://localhost".to_owned());
    let policy = RetryPolicy::new([1, 2, 4]); // seconds
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    publish_webhooks(&url, &policy, &listener.local_addr()?.to_string()).await?;
    tokio::spawn(endpoint(listener));

    println!("{} webhooks are in the queue {QUEUE}\n", WEBHOOKS.len());
    println!("   time  webhook  attempt  outcome");
    let start = Instant::now();
    let (ended, mut ends) = watch::channel(BTreeMap::new());
    let consumer = RetryConsumer::builder(url, QUEUE)
        .policy(policy)
        .handler_timeout(Duration::from_secs(1)) // a handler that takes longer has failed
        .on_event(move |event| {
            let (job, outcome, is_end) = match event {
                Event::Done { job, .. } => (job, "delivered".to_owned(), true),
                Event::Retried { job, delay, error, .. } => {
                    (job, format!("{error}; again in {:.3} s", delay.as_secs_f64()), false)
                }
                Event::Buried { job, reason, error, .. } => {
                    (job, format!("buried as {}: {error}", reason.as_str()), true)
                }
                _ => return,
            };
            let (time, attempt) = (start.elapsed().as_secs_f64(), job.retry_count() + 1);
            println!("{time:>5.2} s  {:<7}  {attempt:>7}  {outcome}", job.id());
            if is_end {
                let id = job.id().to_owned();
                ended.send_modify(|ends| drop(ends.insert(id, (attempt, outcome))));
            }
        })
        .handler(deliver)
        .start()
        .await?;
    let all = ends.wait_for(|ends| ends.len() == WEBHOOKS.len());
    let _ = timeout(Duration::from_secs(25), all).await;
    consumer.shutdown(Duration::from_secs(1)).await;

    println!("\nwebhook  attempts  what became of it");
    let ends = ends.borrow();
    for (name, _) in WEBHOOKS {
        if let Some((attempts, outcome)) = ends.get(name) {
            println!("{name:<7}  {attempts:>8}  {outcome}");
        }
    }
    println!("\nIf the broker is still there, the buried ones are in its queue {QUEUE}.buried.");
    ensure!(ends.len() == WEBHOOKS.len(), "{} are still open", WEBHOOKS.len() - ends.len());
    Ok(())
}

/// Sends a POST, and returns the status of the answer. Yours is the client that you use anyway.
async fn post(host: &str, path: &str, body: &[u8]) -> anyhow::Result<u16> {
    let mut stream = TcpStream::connect(host).await.context("connecting to the endpoint")?;
    let head = format!(
        "POST /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(&[head.as_bytes(), body].concat()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let status = answer.split(' ').nth(1).context("not an HTTP answer")?;
    Ok(status.parse()?)
}

/// The endpoint.
async fn endpoint(listener: TcpListener) -> anyhow::Result<()> {
    let requests = Arc::new(Mutex::new(HashMap::new()));
    loop {
        let (stream, _) = listener.accept().await?;
        tokio::spawn(answer(stream, Arc::clone(&requests)));
    }
}

async fn answer(
    stream: TcpStream,
    requests: Arc<Mutex<HashMap<String, u32>>>,
) -> anyhow::Result<()> {
    let mut stream = BufReader::new(stream);
    let (mut request, mut length) = (String::new(), 0);
    stream.read_line(&mut request).await?;
    loop {
        let mut header = String::new();
        stream.read_line(&mut header).await?;
        match header.split_once(": ") {
            Some(("Content-Length", value)) => length = value.trim().parse()?,
            Some(_) => {}
            None => break,
        }
    }
    stream.read_exact(&mut vec![0; length]).await?;

    let path = request.split(' ').nth(1).context("no path")?;
    let count = {
        let mut requests = requests.lock().unwrap();
        let count = requests.entry(path.to_owned()).or_default();
        *count += 1;
        *count
    };
    let status = match (path, count) {
        ("/busy-twice", ..=2) => "503 Service Unavailable",
        ("/silent-once", 1) | ("/silent", _) => std::future::pending().await,
        ("/bad", _) => "400 Bad Request",
        _ => "200 OK",
    };
    let answer = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
    Ok(stream.write_all(answer.as_bytes()).await?)
}

/// Deletes what an earlier run left, makes the work queue, and fills it.
async fn publish_webhooks(url: &str, policy: &RetryPolicy, host: &str) -> anyhow::Result<()> {
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
    for (name, body) in WEBHOOKS {
        let properties = BasicProperties::default()
            .with_message_id(name.into())
            .with_content_type("application/json".into())
            .with_delivery_mode(2);
        let (options, body) = (BasicPublishOptions::default(), body.replace("HOST", host));
        let body = body.as_bytes();
        channel.basic_publish("".into(), QUEUE.into(), options, body, properties).await?.await?;
    }
    Ok(connection.close(200, "published".into()).await?)
}
