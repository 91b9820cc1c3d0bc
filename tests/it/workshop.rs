//! What the tests of pauses have in common: a quorum work queue, jobs with numbers, and providers that
//! can be down.

use crate::support::{PATIENCE, Scene, WORK, eventually, steps};
use lapin::{BasicProperties, options::BasicGetOptions};
use lapin_retry::{
    Builder, Event, Jitter, Job, Pauses, RetryConsumer, RetryPolicy, Settings, outage,
};
use std::{ops::Deref, sync::Arc, time::Duration};
use tokio::sync::watch;

pub(crate) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
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

/// A scene whose jobs need a provider.
pub(crate) struct Workshop {
    scene: Scene,
    pub(crate) provider: Arc<Provider>,
}

impl Deref for Workshop {
    type Target = Scene;

    fn deref(&self) -> &Scene {
        &self.scene
    }
}

impl Workshop {
    /// A quorum work queue with the broker's own delivery limit, and a provider that is down.
    pub(crate) async fn in_an_outage() -> Self {
        Self { scene: Scene::new().await, provider: Provider::new(true) }
    }

    /// Numbered jobs, from 0.
    pub(crate) async fn jobs(&self, jobs: usize) {
        for id in 0..jobs {
            self.publish_job(&id.to_string(), BasicProperties::default()).await;
        }
    }

    pub(crate) async fn publish_job(&self, id: &str, properties: BasicProperties) {
        let properties = properties.with_message_id(id.into()).with_delivery_mode(2);
        self.publish(properties, b"job").await;
    }

    /// One level, and pauses with this first and longest wait; every event is written down.
    pub(crate) fn settings(&self, first: Duration, max: Duration) -> Settings {
        Settings::new(RetryPolicy::new([1]).jitter(Jitter::None))
            .pauses(Pauses::default().first(first).max(max))
            .on_event(self.journal.hook())
    }

    pub(crate) fn consumer(&self, first: Duration, max: Duration) -> Builder {
        RetryConsumer::builder(self.url(), WORK).settings(self.settings(first, max))
    }

    /// Writes down the call and asks the provider.
    pub(crate) fn handler(
        &self,
    ) -> impl Fn(Job) -> futures_util::future::BoxFuture<'static, anyhow::Result<()>>
    + Send
    + Sync
    + 'static {
        let (journal, provider) = (self.journal.clone(), Arc::clone(&self.provider));
        move |job| {
            let (journal, provider) = (journal.clone(), Arc::clone(&provider));
            Box::pin(async move {
                journal.begin(&job);
                provider.ask().await?;
                journal.succeed(&job);
                Ok(())
            })
        }
    }

    pub(crate) async fn until_calls(&self, calls: usize) {
        eventually(&format!("{calls} handler calls"), PATIENCE, async || {
            self.journal.attempted() >= calls
        })
        .await;
    }

    pub(crate) async fn until_paused(&self, times: usize) {
        eventually(&format!("{times} pauses"), PATIENCE, async || {
            let paused = |event: &Event| matches!(event, Event::Paused { .. });
            self.journal.count(paused) >= times
        })
        .await;
    }

    pub(crate) async fn until_done(&self, jobs: usize) {
        eventually(&format!("{jobs} jobs done"), 3 * PATIENCE, async || {
            self.journal.succeeded() == jobs
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
