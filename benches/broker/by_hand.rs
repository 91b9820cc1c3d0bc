//! lapin without this crate, as it is written by hand.

use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
use futures_util::{StreamExt, future::try_join_all};
use lapin_retry::lapin::{
    BasicProperties, Channel, Confirmation, Connection, Consumer,
    message::Delivery,
    options::{
        BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions,
        ConfirmSelectOptions,
    },
    types::{AMQPValue, FieldTable},
};
use tokio::sync::Semaphore;

use crate::{fill::delay_queues, meter::Meter};

/// As many as this crate has in flight unless told otherwise.
const HAND_OFFS: usize = 64;

pub(crate) async fn consume(channel: &Channel, queue: &str, prefetch: u16) -> Result<Consumer> {
    channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
    let (options, arguments) = (BasicConsumeOptions::default(), FieldTable::default());
    Ok(channel.basic_consume(queue.into(), "bench".into(), options, arguments).await?)
}

pub(crate) async fn ack_each(mut consumer: Consumer, meter: Arc<Meter>) -> Result<()> {
    while let Some(delivery) = consumer.next().await {
        let delivery = delivery?;
        meter.handle(&delivery.data);
        delivery.ack(BasicAckOptions::default()).await?;
    }
    Ok(())
}

pub(crate) async fn task_each(mut consumer: Consumer, meter: Arc<Meter>) -> Result<()> {
    while let Some(delivery) = consumer.next().await {
        let (delivery, meter) = (delivery?, Arc::clone(&meter));
        tokio::spawn(async move {
            meter.handle(&delivery.data);
            delivery.ack(BasicAckOptions::default()).await
        });
    }
    Ok(())
}

/// Every hundredth ack covers those before it; with a prefetch of 100 every fiftieth, for else the
/// broker would have nothing to send until it comes.
pub(crate) async fn multiple(
    mut consumer: Consumer,
    meter: Arc<Meter>,
    prefetch: u16,
) -> Result<()> {
    let every = u64::from(prefetch / 2).clamp(1, 100);
    while let Some(delivery) = consumer.next().await {
        let delivery = delivery?;
        meter.handle(&delivery.data);
        if delivery.delivery_tag % every == 0 {
            delivery.ack(BasicAckOptions { multiple: true }).await?;
        }
    }
    Ok(())
}

/// The channels that copies are published on, one for each that is in flight.
pub(crate) struct Channels {
    /// Kept open.
    _connection: Connection,
    idle: Mutex<Vec<Channel>>,
}

impl Channels {
    /// All of them the same: many publishes in flight on one channel.
    pub(crate) async fn one(connection: Connection) -> Result<Self> {
        let channel = confirming(&connection).await?;
        Ok(Self { _connection: connection, idle: Mutex::new(vec![channel; HAND_OFFS]) })
    }

    /// One publish in flight on each, so that it is plain whose a return is.
    pub(crate) async fn many(connection: Connection) -> Result<Self> {
        let idle = try_join_all((0..HAND_OFFS).map(|_| confirming(&connection))).await?;
        Ok(Self { _connection: connection, idle: Mutex::new(idle) })
    }
}

async fn confirming(connection: &Connection) -> Result<Channel> {
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok(channel)
}

/// The headers of a copy.
pub(crate) type Headers = fn(queue: &str) -> FieldTable;

pub(crate) fn a_count(_queue: &str) -> FieldTable {
    let mut headers = FieldTable::default();
    headers.insert("retry-count".into(), AMQPValue::LongLongInt(1));
    headers
}

/// As many and as long as those of this crate after one failure.
pub(crate) fn a_story(queue: &str) -> FieldTable {
    const AT: &str = "2026-01-01T00:01:01.000Z";
    let text = |text: &str| AMQPValue::LongString(text.into());
    let mut entry = FieldTable::default();
    for (key, value) in [
        ("at", AT),
        ("kind", "failed"),
        ("error", "no carrier"),
        ("level", "0/1"),
        ("worker", "worker:123456"),
    ] {
        entry.insert(key.into(), text(value));
    }
    let mut headers = a_count(queue);
    for (key, value) in [
        ("retry-queue", queue),
        ("retry-first-failed-at", AT),
        ("retry-last-failed-at", AT),
        ("retry-level", "1/1 3600s"),
        ("retry-due-at", AT),
        ("retry-error", "no carrier"),
        ("retry-error-kind", "failed"),
        ("retry-original-exchange", ""),
        ("retry-original-routing-key", queue),
    ] {
        headers.insert(key.into(), text(value));
    }
    let history = vec![AMQPValue::FieldTable(entry)];
    headers.insert("retry-history".into(), AMQPValue::FieldArray(history.into()));
    headers
}

/// Every job fails: a copy is published to one of so many delay queues, in turn, and confirmed, and then
/// the original is acked.
pub(crate) async fn confirm_each(
    queue: &str,
    mut consumer: Consumer,
    meter: Arc<Meter>,
    channels: Channels,
    (lanes, headers): (u32, Headers),
) -> Result<()> {
    let mut delay_queues = delay_queues(queue, lanes).into_iter().cycle();
    let (channels, slots) = (Arc::new(channels), Arc::new(Semaphore::new(HAND_OFFS)));
    while let Some(delivery) = consumer.next().await {
        let delivery = delivery?;
        meter.handle(&delivery.data);
        let slot = Arc::clone(&slots).acquire_owned().await?;
        let (channels, headers) = (Arc::clone(&channels), headers(queue));
        let delay_queue = delay_queues.next().context("at least one")?;
        tokio::spawn(async move {
            let channel = channels.idle.lock().unwrap().pop().expect("one for each slot");
            hand_off(&channel, &delay_queue, headers, &delivery)
                .await
                .expect("a copy that is confirmed");
            channels.idle.lock().unwrap().push(channel);
            drop(slot);
            delivery.ack(BasicAckOptions::default()).await
        });
    }
    Ok(())
}

async fn hand_off(
    channel: &Channel,
    delay_queue: &str,
    headers: FieldTable,
    delivery: &Delivery,
) -> Result<()> {
    let properties = BasicProperties::default().with_delivery_mode(2).with_headers(headers);
    let options = BasicPublishOptions { mandatory: true, ..Default::default() };
    let published = channel
        .basic_publish("".into(), delay_queue.into(), options, &delivery.data, properties)
        .await?;
    let confirmation = published.await?;
    ensure!(matches!(confirmation, Confirmation::Ack(None)), "{confirmation:?}");
    Ok(())
}
