//! A vhost with a work queue `work`.

use super::{PATIENCE, QueueType, Vhost, confirm_channel, connect, count, declare_work_queue};
use super::{eventually, publish};
use lapin::{
    BasicProperties, Channel, Connection,
    message::BasicGetMessage,
    options::BasicGetOptions,
    types::{AMQPValue, FieldTable},
};
use lapin_retry::{Jitter, RetryPolicy};
use std::collections::BTreeMap;

pub(crate) const WORK: &str = "work";
pub(crate) const BURIED: &str = "work.buried";

/// Two levels of 20 ms in one lane: three attempts, and few queues to make.
pub(crate) fn quick() -> RetryPolicy {
    RetryPolicy::new(["20ms", "20ms"]).jitter(Jitter::None)
}

#[derive(Debug)]
pub(crate) struct Scene {
    pub(crate) connection: Connection,
    pub(crate) channel: Channel,
    // Last, so that the connection is gone before its vhost.
    pub(crate) vhost: Vhost,
}

impl Scene {
    pub(crate) async fn new(kind: QueueType) -> Self {
        let vhost = Vhost::new().await;
        let connection = connect(&vhost.url()).await;
        let channel = confirm_channel(&connection).await;
        declare_work_queue(&channel, WORK, kind).await;
        Self { connection, channel, vhost }
    }

    pub(crate) fn url(&self) -> String {
        self.vhost.url()
    }

    /// Publishes a job to the work queue. Its id is what the events are searched by.
    pub(crate) async fn job(&self, id: &str, headers: FieldTable, body: &[u8]) {
        let properties = BasicProperties::default().with_message_id(id.into());
        self.message(properties.with_headers(headers), body).await;
    }

    pub(crate) async fn message(&self, properties: BasicProperties, body: &[u8]) {
        publish(&self.channel, "", WORK, properties, body).await;
    }

    /// The buried jobs by their ids, once there are this many. They leave the queue.
    pub(crate) async fn buried(&self, jobs: u32) -> BTreeMap<String, BasicGetMessage> {
        eventually(&format!("{jobs} jobs are buried"), PATIENCE, async || {
            count(&self.channel, BURIED).await == jobs
        })
        .await;
        let mut buried = BTreeMap::new();
        let automatic = BasicGetOptions { no_ack: true };
        while let Some(message) =
            self.channel.basic_get(BURIED.into(), automatic).await.expect("the buried queue")
        {
            let id = message.properties.message_id().as_ref().expect("an id").to_string();
            buried.insert(id, message);
        }
        buried
    }
}

/// A header of a message.
pub(crate) fn header<'a>(properties: &'a BasicProperties, name: &str) -> Option<&'a AMQPValue> {
    properties.headers().as_ref()?.inner().get(name)
}

/// A header of a message that is a string.
pub(crate) fn text(properties: &BasicProperties, name: &str) -> Option<String> {
    match header(properties, name)? {
        AMQPValue::LongString(text) => {
            Some(std::str::from_utf8(text.as_bytes()).expect("UTF-8").to_owned())
        }
        other => panic!("{name} is no string: {other:?}"),
    }
}
