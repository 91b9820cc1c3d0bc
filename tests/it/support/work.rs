//! A work queue to fill, and what a worker tells of its jobs.

use super::{
    PATIENCE, QueueType, Vhost, WORK, confirm_channel, connect, declare_work_queue, eventually,
};
use lapin::{
    BasicProperties, Channel, Connection,
    types::{AMQPValue, FieldTable},
};
use lapin_retry::{BuriedReason, Event};
use serde_json::Value;
use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

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

/// All events of one worker, each with the instant at which it was told.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told(Arc<Mutex<Vec<(Instant, Event)>>>);

impl Told {
    /// For `on_event`.
    pub(crate) fn hook(&self) -> impl Fn(&Event) + Send + Sync + 'static {
        let told = self.clone();
        move |event| told.lock().push((Instant::now(), event.clone()))
    }

    /// What `pick` makes of the events so far.
    pub(crate) fn all<T>(&self, pick: impl Fn(&Event) -> Option<T>) -> Vec<T> {
        self.lock().iter().filter_map(|(_, event)| pick(event)).collect()
    }

    /// Waits for the first event of which `pick` makes something.
    #[track_caller]
    pub(crate) fn first<T>(
        &self,
        what: &str,
        pick: impl Fn(&Event) -> Option<T>,
    ) -> impl Future<Output = T> {
        let told = self.clone();
        eventually(what, PATIENCE, async move || told.all(&pick).into_iter().next())
    }

    /// Waits until so many jobs are done.
    #[track_caller]
    pub(crate) fn done(&self, jobs: usize) -> impl Future<Output = ()> {
        let told = self.clone();
        let what = format!("{jobs} jobs done");
        async move {
            eventually(&what, PATIENCE, async || {
                told.all(|event| matches!(event, Event::Done { .. }).then_some(())).len() >= jobs
            })
            .await;
        }
    }

    /// The lanes' delays of those that failed and were retried so far.
    pub(crate) fn retried(&self) -> Vec<Duration> {
        self.all(|event| match event {
            Event::Retried { delay, .. } => Some(*delay),
            _ => None,
        })
    }

    /// How many jobs waited so far without being charged.
    pub(crate) fn postponed(&self) -> usize {
        self.all(|event| matches!(event, Event::Postponed { .. }).then_some(())).len()
    }

    /// Waits until so many jobs are buried, and tells why.
    #[track_caller]
    pub(crate) fn buried(&self, jobs: usize) -> impl Future<Output = Vec<BuriedReason>> {
        let told = self.clone();
        eventually("the burials", PATIENCE, async move || {
            let buried = told.all(|event| match event {
                Event::Buried { reason, .. } => Some(*reason),
                _ => None,
            });
            (buried.len() >= jobs).then_some(buried)
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(Instant, Event)>> {
        self.0.lock().expect("no panic inside")
    }
}
