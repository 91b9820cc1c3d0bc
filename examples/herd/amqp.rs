//! The steps that a herd needs from the broker and that are not the library's.

use anyhow::{Context, Result, bail};
use lapin_retry::lapin::{
    BasicProperties, Channel, Connection, ConnectionProperties, PublisherConfirm,
    options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions},
    types::{AMQPValue, FieldTable},
};

/// A connection, and a channel of it in confirm mode.
pub(crate) async fn connect(url: &str) -> Result<(Connection, Channel)> {
    let connecting = async {
        let connection = Connection::connect(url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok::<_, lapin_retry::lapin::Error>((connection, channel))
    };
    // The URL may hold a password, so it is not repeated.
    connecting.await.context("connecting to the broker that AMQP_URL names")
}

/// A work queue's name that no other run uses.
pub(crate) fn unique_name() -> String {
    format!("herd-{:08x}", rand::random::<u32>())
}

pub(crate) async fn declare_quorum(
    channel: &Channel,
    queue: &str,
    mut arguments: FieldTable,
) -> Result<()> {
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    let options = QueueDeclareOptions { durable: true, ..Default::default() };
    channel.queue_declare(queue.into(), options, arguments).await?;
    Ok(())
}

/// Sends job `number` on its way. Its confirm is awaited later, so that many are in flight.
pub(crate) async fn publish(
    channel: &Channel,
    queue: &str,
    number: u16,
    properties: BasicProperties,
) -> Result<PublisherConfirm> {
    let properties = properties.with_message_id(number.to_string().into()).with_delivery_mode(2);
    let options = BasicPublishOptions::default();
    Ok(channel.basic_publish("".into(), queue.into(), options, &[b'.'; 256], properties).await?)
}

pub(crate) async fn all_confirmed(confirms: Vec<PublisherConfirm>) -> Result<()> {
    for confirm in confirms {
        if !confirm.await?.is_ack() {
            bail!("the broker refused a message");
        }
    }
    Ok(())
}

/// Runs a herd, and deletes its queues however it ends; by Ctrl-C, too.
pub(crate) async fn with_queues<T>(
    connection: &Connection,
    queues: &[String],
    herd: impl Future<Output = Result<T>>,
) -> Result<T> {
    let outcome = tokio::select! {
        outcome = herd => outcome,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
    };
    for queue in queues {
        let deleting = async {
            let channel = connection.create_channel().await?;
            channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await
        };
        if let Err(error) = deleting.await {
            eprintln!("the queue {queue} is left behind: {error}");
        }
    }
    outcome
}
