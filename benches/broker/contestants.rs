//! What each contestant does, in a process of its own.

use std::{env, process::Stdio, sync::Arc, time::Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use futures_util::StreamExt;
use lapin_retry::{
    Job, Jobs, QueueType, Retry, RetryConsumer, Settings,
    lapin::{Connection, ConnectionProperties},
};
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;

use crate::{
    TASK,
    by_hand::{self, Channels, Headers, a_count, a_story},
    fill::{self, Publisher},
    meter::{Mark, Meter, Reading},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Contestant {
    /// lapin, each ack awaited in the loop.
    AckEach,
    /// lapin, a task for each message.
    TaskEach,
    /// lapin, acks with `multiple`.
    Multiple,
    /// lapin: consume, publish, confirm, ack; all copies on one channel.
    ConfirmEach,
    /// The same; a channel for each copy in flight, on another connection.
    ChannelEach,
    /// As the first of these, but on another connection, with headers that tell as much as ours, and
    /// to as many queues as we have lanes.
    TellEach,
    /// `Retry`: the user's own loop.
    OwnLoop,
    /// `RetryConsumer`: the handler.
    Handler,
}

impl Contestant {
    pub(crate) fn is_ours(self) -> bool {
        matches!(self, Self::OwnLoop | Self::Handler)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AckEach => "lapin, awaits each ack",
            Self::TaskEach => "lapin, a task each",
            Self::Multiple => "lapin, multiple acks",
            Self::ConfirmEach => "lapin, confirm and ack",
            Self::ChannelEach => "lapin, 64 channels",
            Self::TellEach => "lapin, as much told",
            Self::OwnLoop => "own loop",
            Self::Handler => "handler",
        }
    }
}

/// What is asked of a contestant.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) contestant: Contestant,
    pub(crate) queue: String,
    pub(crate) classic: bool,
    pub(crate) lanes: u32,
    pub(crate) prefetch: u16,
    /// Every job fails.
    pub(crate) fail: bool,
    /// The jobs are not in the queue, but published one at a time.
    pub(crate) one_at_a_time: bool,
    pub(crate) warm_up: usize,
    pub(crate) jobs: usize,
}

impl Task {
    /// How many jobs the queue must hold, so that the last one that counts is as any other.
    pub(crate) fn filling(&self) -> usize {
        if self.one_at_a_time {
            0
        } else {
            self.warm_up + self.jobs + 2 * usize::from(self.prefetch)
        }
    }

    pub(crate) fn queue_type(&self) -> QueueType {
        if self.classic { QueueType::Classic } else { QueueType::Quorum }
    }

    /// Has it done by another process.
    pub(crate) async fn in_a_process(&self) -> Result<Reading> {
        let output = tokio::process::Command::new(env::current_exe()?)
            // With it every error would carry a trace of the stack, ours as well as theirs.
            .env_remove("RUST_BACKTRACE")
            .env(TASK, serde_json::to_string(self)?)
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?
            .wait_with_output()
            .await?;
        ensure!(output.status.success(), "{}: {}", self.contestant.name(), output.status);
        serde_json::from_slice(&output.stdout).context("a contestant's answer")
    }

    /// Does it.
    pub(crate) async fn run(self, url: &str) -> Result<Reading> {
        if self.one_at_a_time {
            return self.latency(url).await;
        }
        let meter = Arc::new(Meter::new(self.warm_up, self.jobs));
        let consuming = self.consume(url, Arc::clone(&meter)).await?;
        tokio::select! {
            reading = meter.reading() => Ok(reading),
            ended = consuming => bail!("the consumer ended: {:?}", ended?),
        }
    }

    async fn latency(self, url: &str) -> Result<Reading> {
        let (meter, mut called) = Meter::telling();
        let _consuming = self.consume(url, Arc::new(meter)).await?;
        let publisher = Publisher::connect(url).await?;
        let mut waits = Vec::with_capacity(self.jobs);
        let mut begun = Mark::now();
        for number in 0..self.warm_up + self.jobs {
            if number == self.warm_up {
                begun = Mark::now();
            }
            let published = Instant::now();
            let confirm = publisher.publish(&self.queue).await?;
            let called = called.recv().await.context("the consumer ended")?;
            if number >= self.warm_up {
                waits.push(called - published);
            }
            confirm.await?;
        }
        let reading = Mark::now().since(&begun, self.jobs);
        waits.sort_unstable();
        let us = |place: usize| Some(1e6 * waits[place].as_secs_f64());
        let (p50_us, p99_us) = (us(waits.len() / 2), us(waits.len() * 99 / 100));
        Ok(Reading { p50_us, p99_us, ..reading })
    }

    async fn consume(&self, url: &str, meter: Arc<Meter>) -> Result<JoinHandle<Result<()>>> {
        if self.contestant == Contestant::Handler {
            return self.consume_by_handler(url, meter).await;
        }
        let connection = Connection::connect(url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        let retry = match self.contestant {
            // Its queues are there before the first job comes.
            Contestant::OwnLoop => Some(Retry::attach(url, &self.queue, self.settings()).await?),
            _ => None,
        };
        let consumer = by_hand::consume(&channel, &self.queue, self.prefetch).await?;
        let Self { contestant, queue, lanes, prefetch, fail, .. } = self.clone();
        let url = url.to_owned();
        Ok(tokio::spawn(async move {
            let _open = channel;
            let another = Connection::connect(&url, ConnectionProperties::default());
            match (contestant, retry) {
                (_, Some(retry)) => own_loop(retry.jobs(consumer), meter, fail).await,
                (Contestant::TaskEach, _) => by_hand::task_each(consumer, meter).await,
                (Contestant::Multiple, _) => by_hand::multiple(consumer, meter, prefetch).await,
                (Contestant::ConfirmEach, _) => {
                    let channels = Channels::one(connection).await?;
                    let how = (1, a_count as Headers);
                    by_hand::confirm_each(&queue, consumer, meter, channels, how).await
                }
                (Contestant::ChannelEach, _) => {
                    let channels = Channels::many(another.await?).await?;
                    let how = (1, a_count as Headers);
                    by_hand::confirm_each(&queue, consumer, meter, channels, how).await
                }
                (Contestant::TellEach, _) => {
                    let channels = Channels::one(another.await?).await?;
                    let how = (lanes, a_story as Headers);
                    by_hand::confirm_each(&queue, consumer, meter, channels, how).await
                }
                _ => by_hand::ack_each(consumer, meter).await,
            }
        }))
    }

    async fn consume_by_handler(
        &self,
        url: &str,
        meter: Arc<Meter>,
    ) -> Result<JoinHandle<Result<()>>> {
        let fail = self.fail;
        let handle = RetryConsumer::builder(url, self.queue.as_str())
            .settings(self.settings())
            .prefetch(self.prefetch)
            .handler(move |job: Job| {
                let meter = Arc::clone(&meter);
                async move {
                    meter.handle(job.body());
                    outcome(fail)
                }
            })
            .start()
            .await?;
        Ok(tokio::spawn(async move { Ok(handle.stopped().await?) }))
    }

    fn settings(&self) -> Settings {
        Settings::new(fill::policy(self.lanes)).queue_type(self.queue_type())
    }
}

async fn own_loop(mut jobs: Jobs, meter: Arc<Meter>, fail: bool) -> Result<()> {
    while let Some(job) = jobs.next().await {
        let job = job?;
        meter.handle(job.body());
        job.settle(outcome(fail)).await?;
    }
    Ok(())
}

fn outcome(fail: bool) -> Result<()> {
    if fail { Err(anyhow!("no carrier")) } else { Ok(()) }
}
