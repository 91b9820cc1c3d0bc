//! The few AMQP steps with which nearly every test begins. They panic rather than return errors: a
//! test whose set-up failed has nothing to say.

use lapin::{
    BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, Consumer,
    options::{
        BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
        QueueDeclareOptions,
    },
    types::{AMQPValue, FieldTable},
};
use lapin_retry::QueueType;

/// A connection without lapin's own recovery, as a careful user would open it.
pub(crate) async fn connect(url: &str) -> Connection {
    Connection::connect(url, ConnectionProperties::default())
        .await
        .unwrap_or_else(|error| panic!("cannot connect to {url}: {error}"))
}

/// A new channel in confirm mode.
pub(crate) async fn confirm_channel(connection: &Connection) -> Channel {
    let channel = connection.create_channel().await.expect("a channel");
    channel.confirm_select(ConfirmSelectOptions::default()).await.expect("confirm mode");
    channel
}

/// Publishes and insists that the broker routed the message and took responsibility for it.
///
/// The channel must be in confirm mode.
pub(crate) async fn publish(
    channel: &Channel,
    exchange: &str,
    key: &str,
    properties: BasicProperties,
    body: &[u8],
) {
    match try_publish(channel, exchange, key, properties, body).await {
        Ok(Confirmation::Ack(None)) => {}
        other => panic!("publishing to '{exchange}' with key '{key}': {other:?}"),
    }
}

/// Publishes with the mandatory flag and returns the broker's answer, whatever it is.
pub(crate) async fn try_publish(
    channel: &Channel,
    exchange: &str,
    key: &str,
    properties: BasicProperties,
    body: &[u8],
) -> lapin::Result<Confirmation> {
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    channel.basic_publish(exchange.into(), key.into(), options, body, properties).await?.await
}

/// What the broker calls it.
pub(crate) fn type_name(kind: QueueType) -> &'static str {
    if kind == QueueType::Classic { "classic" } else { "quorum" }
}

/// A durable queue of the given type without further arguments.
pub(crate) async fn declare_work_queue(channel: &Channel, name: &str, kind: QueueType) {
    let arguments = table([("x-queue-type", AMQPValue::LongString(type_name(kind).into()))]);
    channel
        .queue_declare(name.into(), durable(), arguments)
        .await
        .unwrap_or_else(|error| panic!("declaring '{name}': {error}"));
}

/// Messages ready in `queue`, exact at this moment, unlike the management statistics.
///
/// Uses a passive declare, which does not count unacked messages nor those a quorum queue has yet to
/// dead-letter (`messages_dlx`), and which closes the channel if there is no such queue.
pub(crate) async fn count(channel: &Channel, queue: &str) -> u32 {
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    channel
        .queue_declare(queue.into(), options, FieldTable::default())
        .await
        .unwrap_or_else(|error| panic!("counting '{queue}': {error}"))
        .message_count()
}

/// Consumes with manual acknowledgement and the given prefetch.
pub(crate) async fn consume(channel: &Channel, queue: &str, prefetch: u16) -> Consumer {
    channel.basic_qos(prefetch, BasicQosOptions::default()).await.expect("a prefetch");
    channel
        .basic_consume(
            queue.into(),
            "".into(),
            BasicConsumeOptions::default(),
            FieldTable::default(),
        )
        .await
        .unwrap_or_else(|error| panic!("consuming '{queue}': {error}"))
}

/// A field table, for headers and arguments.
pub(crate) fn table<const N: usize>(fields: [(&str, AMQPValue); N]) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in fields {
        table.insert(name.into(), value);
    }
    table
}

fn durable() -> QueueDeclareOptions {
    QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() }
}
