//! The queues that are measured with, and what is in them.

use anyhow::{Result, bail};
use futures_util::future::try_join_all;
use lapin_retry::{
    Jitter, QueueSpec, QueueType, RetryPolicy, Topology,
    lapin::{
        BasicProperties, Channel, Connection, ConnectionProperties, PublisherConfirm,
        options::{
            BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions,
            QueuePurgeOptions,
        },
        types::{AMQPValue, FieldTable},
    },
};

use crate::contestants::Task;

const IN_FLIGHT: usize = 500;
const BODY: [u8; 256] = [b'.'; 256];

/// One level, long enough for no job to come back while it is measured.
pub(crate) fn policy(lanes: u32) -> RetryPolicy {
    let policy = RetryPolicy::new([3600]);
    if lanes == 1 { policy.jitter(Jitter::None) } else { policy.lanes(lanes) }
}

/// Those of who does it by hand. They are as our lanes.
pub(crate) fn delay_queues(work_queue: &str, lanes: u32) -> Vec<String> {
    (0..lanes).map(|lane| format!("{work_queue}.delay.{lane}")).collect()
}

/// Fills queues, on a connection of its own.
pub(crate) struct Publisher {
    _connection: Connection,
    channel: Channel,
}

impl Publisher {
    pub(crate) async fn connect(url: &str) -> Result<Self> {
        let connection = Connection::connect(url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(Self { _connection: connection, channel })
    }

    pub(crate) async fn publish(&self, queue: &str) -> Result<PublisherConfirm> {
        let properties = BasicProperties::default().with_delivery_mode(2);
        let options = BasicPublishOptions::default();
        Ok(self.channel.basic_publish("".into(), queue.into(), options, &BODY, properties).await?)
    }

    /// Puts so many jobs into these queues, as many into each.
    pub(crate) async fn fill(&self, queues: &[String], jobs: usize) -> Result<()> {
        let mut sent = 0;
        while sent < jobs {
            let upto = jobs.min(sent + IN_FLIGHT);
            let publish = |number: usize| async move {
                if self.publish(&queues[number % queues.len()]).await?.await?.is_ack() {
                    Ok(())
                } else {
                    bail!("the broker refused a job")
                }
            };
            try_join_all((sent..upto).map(publish)).await?;
            sent = upto;
        }
        Ok(())
    }

    /// Makes the work queue of a task and what belongs to it, and fills it.
    pub(crate) async fn set_up(&self, task: &Task) -> Result<Queues> {
        let topology = Topology::new(&task.queue, policy(task.lanes), task.queue_type())?;
        let queue_type = match task.queue_type() {
            QueueType::Classic => "classic",
            _ => "quorum",
        };
        let mut arguments = FieldTable::default();
        arguments.insert("x-queue-type".into(), AMQPValue::LongString(queue_type.into()));
        self.declare(&task.queue, arguments).await?;
        let mut all = vec![task.queue.clone()];
        for QueueSpec { name, arguments, .. } in topology.queues() {
            self.declare(name, arguments.clone()).await?;
            all.push(name.clone());
        }
        let lanes: Vec<_> = topology.queues().filter(|queue| *queue != topology.buried()).collect();
        for by_hand in delay_queues(&task.queue, task.lanes) {
            self.declare(&by_hand, lanes[0].arguments.clone()).await?;
            all.push(by_hand);
        }
        self.fill(&all[..1], task.filling()).await?;
        Ok(Queues { all, lanes: lanes.iter().map(|lane| lane.name.clone()).collect() })
    }

    async fn declare(&self, queue: &str, arguments: FieldTable) -> Result<()> {
        self.channel.queue_declare(queue.into(), QueueDeclareOptions::durable(), arguments).await?;
        Ok(())
    }

    pub(crate) async fn purge(&self, queue: &str) -> Result<()> {
        self.channel.queue_purge(queue.into(), QueuePurgeOptions::default()).await?;
        Ok(())
    }

    pub(crate) async fn delete(&self, queues: &Queues) -> Result<()> {
        for queue in &queues.all {
            let options = QueueDeleteOptions::default();
            self.channel.queue_delete(queue.as_str().into(), options).await?;
        }
        Ok(())
    }
}

/// What is to be deleted in the end.
pub(crate) struct Queues {
    all: Vec<String>,
    pub(crate) lanes: Vec<String>,
}
