//! What most recipes do: one delay queue, and on each message a random expiration.
//!
//! It is as good as such a queue can be made: quorum with at-least-once dead-lettering, as the
//! lanes are, and publishes that are confirmed.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result};
use futures_util::StreamExt;
use lapin_retry::lapin::{
    BasicProperties, Connection,
    options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions},
    types::{AMQPValue, FieldTable},
};
use rand::RngExt;

use crate::{
    amqp,
    measure::{Herd, Plan, Sample},
};

impl Plan {
    /// The delays that the library's equal jitter allows for the level, in milliseconds.
    pub(crate) fn window_ms(&self) -> (u64, u64) {
        let level = u64::try_from(self.level.as_millis()).unwrap_or(u64::MAX);
        (level / 2, level)
    }
}

/// Sends a herd through one delay queue, and leaves no queue behind.
pub(crate) async fn run(plan: &Plan) -> Result<Vec<Sample>> {
    let work = amqp::unique_name();
    let delay = format!("{work}.delay");
    let (connection, channel) = amqp::connect(&plan.url).await?;
    amqp::with_queues(&connection, &[work.clone(), delay.clone()], async {
        amqp::declare_quorum(&channel, &work, FieldTable::default()).await?;
        amqp::declare_quorum(&channel, &delay, back_to(&work)).await?;
        let herd = Arc::new(Herd::of(plan.jobs));
        let consumer = tokio::spawn(consume(connection_of(plan).await?, work, Arc::clone(&herd)));

        let (lo, hi) = plan.window_ms();
        let mut confirms = Vec::new();
        for number in 0..plan.jobs {
            let expiration = rand::rng().random_range(lo..=hi);
            let properties =
                BasicProperties::default().with_expiration(expiration.to_string().into());
            herd.wanted(number.into(), Duration::from_millis(expiration));
            herd.failed(number.into());
            confirms.push(amqp::publish(&channel, &delay, number, properties).await?);
        }
        amqp::all_confirmed(confirms).await?;
        let samples = herd.return_after(plan.level).await;
        consumer.abort();
        samples
    })
    .await
}

/// Dead-letters to `work` as a lane does.
fn back_to(work: &str) -> FieldTable {
    let mut arguments = FieldTable::default();
    for (key, value) in [
        ("x-dead-letter-exchange", ""),
        ("x-dead-letter-routing-key", work),
        ("x-dead-letter-strategy", "at-least-once"),
        ("x-overflow", "reject-publish"),
    ] {
        arguments.insert(key.into(), AMQPValue::LongString(value.into()));
    }
    arguments
}

/// The consumer has a connection of its own, as the library's has.
async fn connection_of(plan: &Plan) -> Result<Connection> {
    Ok(amqp::connect(&plan.url).await?.0)
}

async fn consume(connection: Connection, work: String, herd: Arc<Herd>) -> Result<()> {
    let channel = connection.create_channel().await?;
    channel.basic_qos(u16::MAX, BasicQosOptions::default()).await?;
    let (options, arguments) = (BasicConsumeOptions::default(), FieldTable::default());
    let mut jobs =
        channel.basic_consume(work.as_str().into(), "".into(), options, arguments).await?;
    while let Some(delivery) = jobs.next().await {
        let delivery = delivery?;
        let number = delivery.properties.message_id().as_ref().context("no message id")?;
        herd.back(number.as_str().parse()?);
        delivery.acker.ack(BasicAckOptions::default()).await?;
    }
    Ok(())
}
