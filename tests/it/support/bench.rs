//! A work queue of numbered jobs, and a view of every queue that is not the engine's own.

use super::{
    Journal, PATIENCE, QueueType, Vhost, confirm_channel, connect, consume, count,
    declare_work_queue, eventually, next,
};
use futures_util::StreamExt;
use lapin::{
    BasicProperties, Channel, Confirmation, Connection, Consumer, options::BasicPublishOptions,
};
use lapin_retry::{Jitter, Job, Retry, RetryPolicy, Settings};
use std::{collections::BTreeSet, time::Duration};
use tokio::task::JoinHandle;

/// A vhost with the quorum queue `work`, seen through a connection that no fault touches.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) journal: Journal,
    pub(crate) connection: Connection,
    /// In confirm mode.
    pub(crate) channel: Channel,
    // Last, so that the connection is gone before its vhost.
    pub(crate) vhost: Vhost,
}

impl Bench {
    pub(crate) const LANE: &'static str = "work.retry.00600s";
    pub(crate) const BURIED: &'static str = "work.buried";

    pub(crate) async fn new() -> Self {
        let vhost = Vhost::new().await;
        let connection = connect(&vhost.url()).await;
        let channel = confirm_channel(&connection).await;
        declare_work_queue(&channel, "work", QueueType::Quorum).await;
        Self { journal: Journal::default(), connection, channel, vhost }
    }

    /// One lane, [`Self::LANE`], which nothing leaves while the test runs, and a confirm timeout
    /// that a test can wait for.
    pub(crate) fn settings(&self) -> Settings {
        Settings::new(RetryPolicy::new([600]).jitter(Jitter::None))
            .confirm_timeout(Duration::from_secs(1))
            .on_event(self.journal.hook())
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
                self.channel.basic_publish("".into(), "work".into(), options, b"job", properties);
            confirms.push(publish.await.expect("published"));
        }
        for confirm in confirms {
            assert!(matches!(confirm.await, Ok(Confirmation::Ack(None))), "a job was refused");
        }
        ids
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
            let queue = self.vhost.api().queue("work").expect("the work queue");
            queue["messages_unacknowledged"] == messages && queue["messages"] == messages
        })
        .await;
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
