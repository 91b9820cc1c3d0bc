//! What the tests of pauses have in common: a quorum work queue, jobs with numbers, providers that
//! can be down, and a record of every handler call and event.

use crate::support::{
    PATIENCE, QueueType, Vhost, confirm_channel, connect, count, declare_work_queue, eventually,
    publish,
};
use lapin::{
    BasicProperties, Channel, Connection,
    options::BasicGetOptions,
    types::{AMQPValue, FieldTable},
};
use lapin_retry::{
    Builder, Event, Jitter, Job, PauseKind, Pauses, Resumed, RetryConsumer, RetryPolicy, Settings,
    outage,
};
use std::{
    collections::HashSet,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{sync::watch, time::Instant};

pub(crate) const WORK: &str = "work";

pub(crate) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// One handler call.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) id: String,
    pub(crate) at: Instant,
    /// Steps of this message towards the delivery limit of its queue.
    pub(crate) steps: i64,
    pub(crate) retry_count: u32,
    pub(crate) error_kind: Option<String>,
}

/// Shared by the handlers and the test.
#[derive(Debug, Default)]
pub(crate) struct Record {
    calls: Mutex<Vec<Call>>,
    done: Mutex<HashSet<String>>,
    events: Mutex<Vec<Event>>,
}

impl Record {
    pub(crate) fn call(&self, job: &Job) -> usize {
        let headers = job.properties().headers().as_ref();
        let kind = headers.and_then(|headers| headers.inner().get("retry-error-kind"));
        let call = Call {
            id: job.id().to_owned(),
            at: Instant::now(),
            steps: steps(headers),
            retry_count: job.retry_count(),
            error_kind: kind.and_then(|kind| kind.as_long_string()).map(ToString::to_string),
        };
        let mut calls = self.calls.lock().unwrap();
        calls.push(call);
        calls.len()
    }

    pub(crate) fn done(&self, job: &Job) {
        self.done.lock().unwrap().insert(job.id().to_owned());
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }

    /// How many different jobs succeeded.
    pub(crate) fn jobs_done(&self) -> usize {
        self.done.lock().unwrap().len()
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.events.lock().unwrap().clone()
    }

    /// The waits that were told, in their order.
    pub(crate) fn waits(&self) -> Vec<Duration> {
        let wait = |event: &Event| match event {
            Event::Paused { kind: PauseKind::Outage, wait, .. } => *wait,
            _ => None,
        };
        self.events.lock().unwrap().iter().filter_map(wait).collect()
    }

    pub(crate) fn resumed(&self) -> Vec<Resumed> {
        let why = |event: &Event| match event {
            Event::Resumed { why, .. } => Some(*why),
            _ => None,
        };
        self.events.lock().unwrap().iter().filter_map(why).collect()
    }
}

/// What the jobs need, and may be down. A handler that meets a closed gate waits in it.
#[derive(Debug)]
pub(crate) struct Provider {
    pub(crate) down: watch::Sender<bool>,
    pub(crate) gate: watch::Sender<bool>,
}

impl Provider {
    pub(crate) fn new(down: bool) -> Arc<Self> {
        Arc::new(Self { down: watch::Sender::new(down), gate: watch::Sender::new(true) })
    }

    pub(crate) fn set_down(&self, down: bool) {
        self.down.send_replace(down);
    }

    /// Opens or closes the gate.
    pub(crate) fn open(&self, open: bool) {
        self.gate.send_replace(open);
    }

    pub(crate) async fn ask(&self) -> anyhow::Result<()> {
        self.gate.subscribe().wait_for(|open| *open).await?;
        if *self.down.borrow() {
            return Err(outage(anyhow::anyhow!("the provider is down")).into());
        }
        Ok(())
    }
}

pub(crate) struct Workshop {
    pub(crate) channel: Channel,
    pub(crate) record: Arc<Record>,
    pub(crate) provider: Arc<Provider>,
    _connection: Connection,
    // Last, so that the connection is gone before its vhost.
    pub(crate) vhost: Vhost,
}

impl Workshop {
    /// A quorum work queue with the broker's own delivery limit, and a provider that is down.
    pub(crate) async fn in_an_outage() -> Self {
        let vhost = Vhost::new().await;
        let connection = connect(&vhost.url()).await;
        let channel = confirm_channel(&connection).await;
        declare_work_queue(&channel, WORK, QueueType::Quorum).await;
        let (record, provider) = (Arc::default(), Provider::new(true));
        Self { channel, record, provider, _connection: connection, vhost }
    }

    /// Numbered jobs, from 0.
    pub(crate) async fn publish(&self, jobs: usize) {
        for id in 0..jobs {
            self.publish_job(&id.to_string(), BasicProperties::default()).await;
        }
    }

    pub(crate) async fn publish_job(&self, id: &str, properties: BasicProperties) {
        let properties = properties.with_message_id(id.into()).with_delivery_mode(2);
        publish(&self.channel, "", WORK, properties, b"job").await;
    }

    /// One level, and pauses with this first and longest wait; every event is recorded.
    pub(crate) fn settings(&self, first: Duration, max: Duration) -> Settings {
        let record = Arc::clone(&self.record);
        Settings::new(RetryPolicy::new([1]).jitter(Jitter::None))
            .pauses(Pauses::default().first(first).max(max))
            .on_event(move |event| record.events.lock().unwrap().push(event.clone()))
    }

    pub(crate) fn consumer(&self, first: Duration, max: Duration) -> Builder {
        RetryConsumer::builder(self.vhost.url(), WORK).settings(self.settings(first, max))
    }

    /// Records the call and asks the provider.
    pub(crate) fn handler(
        &self,
    ) -> impl Fn(Job) -> futures_util::future::BoxFuture<'static, anyhow::Result<()>>
    + Send
    + Sync
    + 'static {
        let (record, provider) = (Arc::clone(&self.record), Arc::clone(&self.provider));
        move |job| {
            let (record, provider) = (Arc::clone(&record), Arc::clone(&provider));
            Box::pin(async move {
                record.call(&job);
                provider.ask().await?;
                record.done(&job);
                Ok(())
            })
        }
    }

    pub(crate) async fn until_calls(&self, calls: usize) {
        eventually(&format!("{calls} handler calls"), PATIENCE, async || {
            self.record.calls().len() >= calls
        })
        .await;
    }

    pub(crate) async fn until_paused(&self, times: usize) {
        eventually(&format!("{times} pauses"), PATIENCE, async || {
            let paused = |event: &Event| matches!(event, Event::Paused { .. });
            self.record.events().into_iter().filter(paused).count() >= times
        })
        .await;
    }

    pub(crate) async fn until_done(&self, jobs: usize) {
        eventually(&format!("{jobs} jobs done"), 3 * PATIENCE, async || {
            self.record.jobs_done() == jobs
        })
        .await;
    }

    pub(crate) async fn until_ready(&self, jobs: u32) {
        eventually(&format!("{jobs} jobs ready"), PATIENCE, async || {
            count(&self.channel, WORK).await == jobs
        })
        .await;
    }

    /// Nothing is left, ready or unacked. Deleting the consumer's channel would bring back the
    /// unacked ones, so this comes after a shutdown.
    pub(crate) async fn is_empty(&self) {
        assert!(self.take_all().await.is_empty(), "all jobs are done, so none is left");
    }

    /// Id and steps towards the delivery limit of every job that is ready; they leave the queue.
    pub(crate) async fn take_all(&self) -> Vec<(String, i64)> {
        let mut jobs = Vec::new();
        let options = BasicGetOptions { no_ack: true };
        while let Some(got) = self.channel.basic_get(WORK.into(), options).await.unwrap() {
            let properties = &got.delivery.properties;
            let id = properties.message_id().as_ref().map(ToString::to_string);
            jobs.push((id.unwrap_or_default(), steps(properties.headers().as_ref())));
        }
        jobs
    }
}

/// Steps towards the delivery limit: absent on a first delivery, or 0.
pub(crate) fn steps(headers: Option<&FieldTable>) -> i64 {
    match headers.and_then(|headers| headers.inner().get("x-delivery-count")) {
        None => 0,
        Some(AMQPValue::LongLongInt(n)) => *n,
        Some(other) => other.as_long_int().map_or_else(
            || other.as_short_short_uint().map_or_else(|| panic!("a count: {other:?}"), i64::from),
            i64::from,
        ),
    }
}
