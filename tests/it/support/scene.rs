//! A vhost of the test's own, with a queue to work on.

use super::{
    Journal, PATIENCE, Vhost, confirm_channel, connect, consume, count, declare_work_queue,
    eventually, next, table,
};
use futures_util::StreamExt;
use lapin::{
    BasicProperties, Channel, Confirmation, Connection, Consumer,
    message::BasicGetMessage,
    options::{BasicGetOptions, BasicPublishOptions},
    types::{AMQPValue, FieldTable},
};
use lapin_retry::{Jitter, Job, QueueType, Retry, RetryPolicy, Settings, UnsettledJob};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};
use tokio::task::JoinHandle;

pub(crate) const WORK: &str = "work";
pub(crate) const BURIED: &str = "work.buried";
/// The lane of [`Scene::settings`].
pub(crate) const LANE: &str = "work.retry.00600s";

/// Two levels of 20 ms in one lane: three attempts, and few queues to make.
pub(crate) fn quick() -> RetryPolicy {
    RetryPolicy::new(["20ms", "20ms"]).jitter(Jitter::None)
}

/// A vhost with a work queue, seen through a connection that no fault touches.
#[derive(Debug)]
pub(crate) struct Scene {
    /// For the worker, if there is but one.
    pub(crate) journal: Journal,
    pub(crate) connection: Connection,
    /// In confirm mode.
    pub(crate) channel: Channel,
    // Last, so that the connection is gone before its vhost.
    pub(crate) vhost: Vhost,
}

impl Scene {
    /// With the quorum queue [`WORK`].
    pub(crate) async fn new() -> Self {
        Self::of(QueueType::Quorum).await
    }

    /// With the queue [`WORK`] of this type.
    pub(crate) async fn of(kind: QueueType) -> Self {
        Self::with(WORK, kind).await
    }

    /// With a queue of another name.
    pub(crate) async fn with(queue: &str, kind: QueueType) -> Self {
        let scene = Self::bare().await;
        declare_work_queue(&scene.channel, queue, kind).await;
        scene
    }

    /// Without a queue.
    pub(crate) async fn bare() -> Self {
        let vhost = Vhost::new().await;
        let connection = connect(&vhost.url()).await;
        let channel = confirm_channel(&connection).await;
        Self { journal: Journal::default(), connection, channel, vhost }
    }

    pub(crate) fn url(&self) -> String {
        self.vhost.url()
    }

    /// One lane, [`LANE`], which nothing leaves while the test runs, and a confirm timeout that a
    /// test can wait for. Every event goes to the scene's journal.
    pub(crate) fn settings(&self) -> Settings {
        Settings::new(RetryPolicy::new([600]).jitter(Jitter::None))
            .confirm_timeout(Duration::from_secs(1))
            .on_event(self.journal.hook())
    }

    /// Publishes a job straight into the work queue.
    pub(crate) async fn publish(&self, properties: BasicProperties, body: impl AsRef<[u8]>) {
        super::publish(&self.channel, "", WORK, properties, body.as_ref()).await;
    }

    /// Publishes a job with this id, which is what the journal is searched by.
    pub(crate) async fn job(&self, id: &str, headers: FieldTable, body: &[u8]) {
        let properties = BasicProperties::default().with_message_id(id.into());
        self.publish(properties.with_headers(headers), body).await;
    }

    /// Publishes jobs `0000`, `0001` and so on, and returns their ids.
    pub(crate) async fn fill(&self, jobs: usize) -> BTreeSet<String> {
        let ids: BTreeSet<String> = (0..jobs).map(|job| format!("{job:04}")).collect();
        let mut confirms = Vec::new();
        for id in &ids {
            let options = BasicPublishOptions { mandatory: true, ..Default::default() };
            let properties = BasicProperties::default()
                .with_message_id(id.as_str().into())
                .with_delivery_mode(2);
            let publish =
                self.channel.basic_publish("".into(), WORK.into(), options, b"job", properties);
            confirms.push(publish.await.expect("published"));
        }
        for confirm in confirms {
            assert!(matches!(confirm.await, Ok(Confirmation::Ack(None))), "a job was refused");
        }
        ids
    }

    /// The queues that were made beside the work queue, without its name: `buried`,
    /// `retry.00001s`.
    pub(crate) fn queues(&self) -> Vec<String> {
        let all = self.vhost.api().queues();
        let prefix = format!("{WORK}.");
        all.iter().filter_map(|name| name.strip_prefix(&prefix)).map(str::to_owned).collect()
    }

    /// The ids of all ready messages; they stay in the queue. Nobody else may consume it.
    pub(crate) async fn look(&self, queue: &str) -> Vec<String> {
        let channel = self.connection.create_channel().await.expect("a channel");
        let messages = count(&channel, queue).await;
        // Without a limit, a quorum queue sends 2,000 and then waits for acks.
        let mut consumer = consume(&channel, queue, u16::MAX).await;
        let mut ids = Vec::new();
        for _ in 0..messages {
            let delivery = next(&mut consumer).await;
            ids.push(delivery.properties.message_id().as_ref().expect("an id").to_string());
        }
        channel.close(200, "seen".into()).await.expect("closed");
        ids.sort();
        ids
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

    /// Waits until `queue` has this many ready messages.
    pub(crate) async fn holds(&self, queue: &str, messages: usize) {
        let what = format!("{queue} holds {messages}");
        eventually(&what, PATIENCE, async || {
            count(&self.channel, queue).await as usize == messages
        })
        .await;
    }

    /// Waits until the broker has this many unacked messages of the work queue.
    pub(crate) async fn unacked(&self, messages: u64) {
        eventually(&format!("{messages} are unacked"), PATIENCE, async || {
            let queue = self.vhost.api().queue(WORK).expect("the work queue");
            queue["messages_unacknowledged"] == messages && queue["messages"] == messages
        })
        .await;
    }

    /// The buried jobs by their ids, once there are this many. They leave the queue.
    pub(crate) async fn buried(&self, jobs: usize) -> BTreeMap<String, BasicGetMessage> {
        self.holds(BURIED, jobs).await;
        let mut buried = BTreeMap::new();
        let automatic = BasicGetOptions { no_ack: true };
        while let Some(message) =
            self.channel.basic_get(BURIED.into(), automatic).await.expect("the buried queue")
        {
            let id = message.properties.message_id().as_ref().expect("an id").to_string();
            buried.insert(id, message);
        }
        assert_eq!(buried.len(), jobs, "a job is buried twice");
        buried
    }

    /// The buried jobs as the management API shows them, once there are this many. They leave the
    /// queue.
    pub(crate) async fn take_buried(&self, jobs: u32) -> Vec<Value> {
        self.holds(BURIED, jobs as usize).await;
        self.vhost.api().take(BURIED, jobs)
    }

    /// The broker's name for the connection that its client calls `name`.
    pub(crate) async fn connection_called(&self, name: &str) -> String {
        eventually(&format!("{name:?} is listed"), PATIENCE, async || {
            let connections = self.vhost.api().connections();
            let found = connections.iter().find(|one| one["user_provided_name"] == name)?;
            found["name"].as_str().map(str::to_owned)
        })
        .await
    }
}

/// The next job of a loop that takes its deliveries one by one.
pub(crate) async fn next_job(retry: &Retry, consumer: &mut Consumer) -> UnsettledJob {
    retry.accept(next(consumer).await).await.unwrap().expect("a job to run")
}

/// A user's own loop: settles every job of the consumer with what `handler` says, one after the
/// other, until the consumer ends.
pub(crate) fn settle_all(
    retry: &Retry,
    consumer: Consumer,
    handler: impl Fn(&Job) -> anyhow::Result<()> + Send + 'static,
) -> JoinHandle<()> {
    let mut jobs = retry.jobs(consumer);
    tokio::spawn(async move {
        while let Some(Ok(job)) = jobs.next().await {
            let result = handler(job.job());
            job.settle(result).await.expect("settling fails for no reason of its own");
        }
    })
}

/// Headers as they are on a copy of ours, beside these.
pub(crate) fn ours<const N: usize>(fields: [(&str, AMQPValue); N]) -> BasicProperties {
    let mut headers = table(fields);
    headers.insert("retry-queue".into(), AMQPValue::LongString(WORK.into()));
    headers.insert("retry-original-exchange".into(), AMQPValue::LongString("".into()));
    headers.insert("retry-original-routing-key".into(), AMQPValue::LongString(WORK.into()));
    BasicProperties::default().with_headers(headers)
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
