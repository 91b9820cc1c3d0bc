//! A work queue to fill.

use super::{
    PATIENCE, QueueType, Vhost, WORK, confirm_channel, connect, declare_work_queue, eventually,
};
use lapin::{
    BasicProperties, Channel, Connection,
    types::{AMQPValue, FieldTable},
};
use serde_json::Value;

/// A vhost with an empty quorum queue [`WORK`].
pub(crate) struct Work {
    pub(crate) channel: Channel,
    _connection: Connection,
    // Last, so that the connection is gone before its vhost.
    pub(crate) vhost: Vhost,
}

impl Work {
    pub(crate) async fn new() -> Self {
        let vhost = Vhost::new().await;
        let connection = connect(&vhost.url()).await;
        let channel = confirm_channel(&connection).await;
        declare_work_queue(&channel, WORK, QueueType::Quorum).await;
        Self { channel, _connection: connection, vhost }
    }

    pub(crate) fn url(&self) -> String {
        self.vhost.url()
    }

    /// Publishes a job straight into the work queue.
    pub(crate) async fn publish(&self, properties: BasicProperties, body: &str) {
        super::publish(&self.channel, "", WORK, properties, body.as_bytes()).await;
    }

    /// The queues that were made beside the work queue, without its name: `buried`,
    /// `retry.00001s`.
    pub(crate) fn queues(&self) -> Vec<String> {
        let all = self.vhost.api().queues();
        let prefix = format!("{WORK}.");
        all.iter().filter_map(|name| name.strip_prefix(&prefix)).map(str::to_owned).collect()
    }

    /// The one job in a queue of ours, without the work queue's name; it stays there.
    pub(crate) async fn only_job_in(&self, queue: &str) -> Value {
        let name = format!("{WORK}.{queue}");
        let mut jobs = eventually(&format!("a job in {name}"), PATIENCE, async || {
            // It may be a queue that is made on first use.
            self.vhost.api().queue(&name)?;
            let jobs = self.vhost.api().peek(&name, 10);
            (!jobs.is_empty()).then_some(jobs)
        })
        .await;
        assert_eq!(jobs.len(), 1, "{jobs:?}");
        jobs.remove(0)
    }

    /// Takes so many jobs out of the buried queue, when they are all there.
    pub(crate) async fn take_buried(&self, jobs: u32) -> Vec<Value> {
        let queue = format!("{WORK}.buried");
        eventually(&format!("{jobs} buried jobs"), PATIENCE, async || {
            super::count(&self.channel, &queue).await == jobs
        })
        .await;
        self.vhost.api().take(&queue, jobs)
    }
}

/// Headers as they are on a copy of ours, beside these.
pub(crate) fn ours<const N: usize>(fields: [(&str, AMQPValue); N]) -> BasicProperties {
    let mut headers: FieldTable = super::table(fields);
    headers.insert("retry-queue".into(), AMQPValue::LongString(WORK.into()));
    headers.insert("retry-original-exchange".into(), AMQPValue::LongString("".into()));
    headers.insert("retry-original-routing-key".into(), AMQPValue::LongString(WORK.into()));
    BasicProperties::default().with_headers(headers)
}
