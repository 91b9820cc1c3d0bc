//! Keep your loop: a lapin consumer as it was (`before`) and with retries (`after`).
//!
//! ```sh
//! scripts/with-broker cargo run --example your_loop
//! ```
//!
//! Six lines are new or changed: the `use`, and five in the loop's function. They are marked with
//! `// +` and `// changed`. The acks and nacks are gone.

use std::{
    collections::BTreeMap,
    env,
    sync::{LazyLock, Mutex},
    time::Duration,
};

use anyhow::{Context, ensure};
use futures_util::StreamExt;
use lapin::{
    BasicProperties, Channel, Connection, ConnectionProperties, Consumer, options::*, types::*,
};
use lapin_retry::{Event, QueueType, RetryPolicy, Settings, Topology};
use tokio::sync::watch;

use lapin_retry::Retry; // +

const QUEUE: &str = "your_loop";
const TAG: &str = "your_loop";
const ORDERS: usize = 10;

/// The loop as it was: an order that fails comes back at once, again and again.
#[expect(dead_code, reason = "only to compare with")]
async fn before(mut consumer: Consumer) -> anyhow::Result<()> {
    while let Some(delivery) = consumer.next().await {
        let delivery = delivery?;
        match ship(&delivery.data).await {
            Ok(()) => delivery.ack(BasicAckOptions::default()).await?,
            Err(_) => delivery.nack(BasicNackOptions { requeue: true, multiple: false }).await?,
        };
    }
    Ok(())
}

/// The loop as it is: an order that fails comes back later, and in the end is buried.
async fn after(consumer: Consumer) -> anyhow::Result<()> {
    let retry = Retry::attach(amqp_url(), QUEUE, settings()).await?; // +
    let mut consumer = retry.jobs(consumer); // +
    while let Some(delivery) = consumer.next().await {
        let delivery = delivery?;
        let result = ship(delivery.body()).await; // changed
        delivery.settle(result).await?; // changed
    }
    retry.close().await?; // +
    Ok(())
}

/// The work: bytes in, a result out. It does not change. Some orders fail once, and one always.
async fn ship(order: &[u8]) -> anyhow::Result<()> {
    static TRIES: Mutex<BTreeMap<Vec<u8>, u32>> = Mutex::new(BTreeMap::new());
    let tries = {
        let mut tries = TRIES.lock().unwrap();
        let tries = tries.entry(order.to_vec()).or_default();
        *tries += 1;
        *tries
    };
    let failures = match order {
        b"order-07" | b"order-08" | b"order-09" => 1,
        b"order-10" => u32::MAX,
        _ => 0,
    };
    ensure!(tries > failures, "no carrier");
    Ok(())
}

/// `RetryPolicy::new([1, 2])` would do: two retries, after at most 1 s and 2 s. The hook is for the
/// example: it prints what happens, and notes how each order ended.
fn settings() -> Settings {
    Settings::new(RetryPolicy::new([1, 2])).on_event(|event| {
        let (job, outcome, ended) = match event {
            Event::Done { job, .. } => (job, "done".to_owned(), true),
            Event::Buried { job, reason, .. } => {
                (job, format!("buried: {}", reason.as_str()), true)
            }
            Event::Retried { job, delay, error, .. } => {
                (job, format!("{error}; again in {:.3} s", delay.as_secs_f64()), false)
            }
            _ => return,
        };
        let attempt = job.retry_count() + 1;
        println!("{}  {attempt:>7}  {outcome}", job.id());
        if ended {
            ENDS.send_modify(|ends| drop(ends.insert(job.id().to_owned(), (outcome, attempt))));
        }
    })
}

/// How each order ended, after how many attempts. Static, so that the loop needs no argument for it.
static ENDS: LazyLock<watch::Sender<BTreeMap<String, (String, u32)>>> =
    LazyLock::new(watch::Sender::default);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let connection = Connection::connect(&amqp_url(), ConnectionProperties::default())
        .await
        .context("connecting to the RabbitMQ at AMQP_URL")?;
    let channel = connection.create_channel().await?;
    publish_orders(&channel).await?;

    println!("{ORDERS} orders are in the queue {QUEUE}\n\norder     attempt  outcome");
    channel.basic_qos(5, BasicQosOptions::default()).await?;
    let (options, arguments) = (BasicConsumeOptions::default(), FieldTable::default());
    let consumer = channel.basic_consume(QUEUE.into(), TAG.into(), options, arguments).await?;
    // Your shutdown does not change either, where nothing is unsettled as here: a cancelled consumer
    // ends the loop. Otherwise use `Jobs::cancel`, which leaves you what you have begun.
    let shutdown = async {
        let mut ends = ENDS.subscribe();
        let all = ends.wait_for(|ends| ends.len() == ORDERS);
        let _ = tokio::time::timeout(Duration::from_secs(25), all).await;
        channel.basic_cancel(TAG.into(), BasicCancelOptions::default()).await?;
        Ok(())
    };
    tokio::try_join!(after(consumer), shutdown)?;
    channel.close(200, "done".into()).await?;
    connection.close(200, "done".into()).await?;

    let ends = ENDS.borrow();
    println!("\norder     attempts  what became of it");
    for (order, (outcome, attempts)) in &*ends {
        println!("{order}  {attempts:>8}  {outcome}");
    }
    println!("\nIf the broker is still there, the buried one is in its queue {QUEUE}.buried.");
    ensure!(ends.len() == ORDERS, "{} orders are still open", ORDERS - ends.len());
    Ok(())
}

fn amqp_url() -> String {
    env::var("AMQP_URL").unwrap_or_else(|_| "amqp://localhost".to_owned())
}

/// Deletes what an earlier run left, makes the work queue, and fills it.
async fn publish_orders(channel: &Channel) -> anyhow::Result<()> {
    let topology = Topology::new(QUEUE, RetryPolicy::new([1, 2]), QueueType::Quorum)?;
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
    for number in 1..=ORDERS {
        let order = format!("order-{number:02}");
        let properties =
            BasicProperties::default().with_message_id(order.as_str().into()).with_delivery_mode(2);
        let options = BasicPublishOptions::default();
        let body = order.as_bytes();
        channel.basic_publish("".into(), QUEUE.into(), options, body, properties).await?.await?;
    }
    Ok(())
}
