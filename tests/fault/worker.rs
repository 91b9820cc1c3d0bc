//! A worker: a process of its own, which can be killed at any instant.

use crate::{
    journal::{Journal, Verb},
    plan::{Course, HANDLER_TIMEOUT, Say, Step, WORK, effort, policy},
};
use anyhow::{Context, anyhow};
use futures_util::{FutureExt, StreamExt};
use lapin::{Connection, ConnectionProperties};
use lapin_retry::{
    Event, Job, Pauses, QueueType, Retry, RetryConsumer, Settings, UnsettledJob, busy, outage,
    reject, retry_after, undecodable,
};
use serde::{Deserialize, Serialize};
use std::{panic::AssertUnwindSafe, path::PathBuf, sync::Arc, time::Duration};
use tokio::{io::AsyncReadExt, task::JoinSet};
use tokio_util::sync::CancellationToken;

/// What a worker is told on its command line.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Orders {
    pub(crate) name: String,
    pub(crate) url: String,
    pub(crate) journal: PathBuf,
    pub(crate) seed: u64,
    pub(crate) variant: u32,
    pub(crate) classic_lanes: bool,
    /// The user's own loop, not the builder's.
    pub(crate) own_loop: bool,
}

/// What the driver writes to a worker that is to shut down. At the end of its input it just ends.
pub(crate) const STOP: u8 = b's';

const PREFETCH: u16 = 50;

/// The type of the queues that are made for a worker.
pub(crate) fn lane_type(classic: bool) -> QueueType {
    if classic { QueueType::Classic } else { QueueType::Quorum }
}

pub(crate) async fn work(orders: Orders) -> anyhow::Result<()> {
    let journal = Arc::new(Journal::open(&orders.journal, &orders.name));
    let seed = orders.seed;
    let settings = Settings::new(policy(orders.variant))
        .queue_type(lane_type(orders.classic_lanes))
        .confirm_timeout(Duration::from_secs(2))
        .hand_off_bound(Duration::from_secs(5))
        .pauses(Pauses::default().first(Duration::from_millis(500)).max(Duration::from_secs(2)))
        .worker(&orders.name)
        .on_event({
            let journal = Arc::clone(&journal);
            move |event| note(&journal, event)
        });
    if orders.own_loop {
        return own_loop(&orders, settings, journal).await;
    }
    let handle = RetryConsumer::builder(&orders.url, WORK)
        .settings(settings)
        .prefetch(PREFETCH)
        .handler_timeout(HANDLER_TIMEOUT)
        .handler(move |job| run(Arc::clone(&journal), seed, job))
        .start()
        .await?;
    told_to_stop().await;
    handle.shutdown(Duration::from_secs(5)).await;
    Ok(())
}

/// The loop as a careful user writes it: it starts over when its connection is gone.
async fn own_loop(
    orders: &Orders,
    settings: Settings,
    journal: Arc<Journal>,
) -> anyhow::Result<()> {
    let retry = Retry::attach(&orders.url, WORK, settings).await?;
    let stop = CancellationToken::new();
    tokio::spawn({
        let stop = stop.clone();
        async move {
            told_to_stop().await;
            stop.cancel();
        }
    });
    while let Err(error) = consume(&retry, orders, &journal, &stop).await {
        journal.note(Verb::Disconnected);
        tracing::warn!("own loop: {error:#}");
        if stop.is_cancelled() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    Ok(())
}

/// Until it is told to stop.
async fn consume(
    retry: &Retry,
    orders: &Orders,
    journal: &Arc<Journal>,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let properties = ConnectionProperties::default().with_connection_name("own loop".into());
    let connecting = Connection::connect(&orders.url, properties);
    let connection = tokio::time::timeout(Duration::from_secs(10), connecting).await??;
    let channel = connection.create_channel().await?;
    channel.basic_qos(PREFETCH, Default::default()).await?;
    let consumer = channel
        .basic_consume(WORK.into(), "own loop".into(), Default::default(), Default::default())
        .await?;
    let mut jobs = retry.jobs(consumer);
    let mut running = JoinSet::new();
    loop {
        let job = tokio::select! {
            () = stop.cancelled() => break,
            job = jobs.next() => job.context("the consumer has ended")??,
        };
        running.spawn(settle(job, Arc::clone(journal), orders.seed));
        while running.try_join_next().is_some() {}
    }
    let cancelling = channel.basic_cancel("own loop".into(), Default::default());
    tokio::time::timeout(Duration::from_secs(5), cancelling).await??;
    // Those that came before it was cancelled.
    while let Some(job) = jobs.next().await {
        running.spawn(settle(job?, Arc::clone(journal), orders.seed));
    }
    while running.join_next().await.is_some() {}
    // Before the channel is closed, or what is not acked yet would come again.
    retry.clone().close().await?;
    Ok(())
}

async fn settle(job: UnsettledJob, journal: Arc<Journal>, seed: u64) {
    let running = run(journal, seed, job.job().clone());
    let running = AssertUnwindSafe(tokio::time::timeout(HANDLER_TIMEOUT, running));
    let result = match running.catch_unwind().await {
        Ok(Ok(result)) => result,
        Ok(Err(_)) => Err(anyhow!("took too long")),
        Err(_) => Err(anyhow!("panicked")),
    };
    // It fails for no reason of its own.
    let _ = job.settle(result).await;
}

async fn run(journal: Arc<Journal>, seed: u64, job: Job) -> anyhow::Result<()> {
    journal.job(Verb::Attempt, &job);
    tokio::time::sleep(effort(seed, job.id())).await;
    let said = Course::of(seed, job.id()).say(Step::of(&job));
    let verb = if said == Say::Done { Verb::Success } else { Verb::Failure };
    journal.job(verb, &job);
    let planned = || anyhow!("as planned");
    match said {
        Say::Done => Ok(()),
        Say::Fail => Err(planned()),
        Say::Reject => Err(reject(planned()).into()),
        Say::Undecodable => Err(undecodable(planned()).into()),
        Say::Busy => Err(busy(planned()).into()),
        Say::Outage => Err(outage(planned()).into()),
        Say::RetryAfter => Err(retry_after(planned(), Duration::from_secs(1)).into()),
        Say::Hang => std::future::pending().await,
        Say::Panic => panic!("as planned"),
    }
}

fn note(journal: &Journal, event: &Event) {
    let (verb, job) = match event {
        Event::Done { job, .. } => (Verb::Acked, job),
        Event::Retried { job, .. } | Event::Postponed { job, .. } => (Verb::HandedOff, job),
        Event::Returned { job, error, .. } if error.is_empty() => (Verb::SetAside, job),
        Event::Returned { job, .. } => (Verb::HandedOff, job),
        Event::Buried { job, .. } => (Verb::Buried, job),
        Event::GivenBack { job, .. } => (Verb::SetAside, job),
        Event::Stale { job, .. } => (Verb::Stale, job),
        Event::Duplicated { job, .. } => (Verb::Duplicated, job),
        Event::HandOffFailed { job, undecided: true, .. } => (Verb::Undecided, job),
        Event::Disconnected { .. } => return journal.note(Verb::Disconnected),
        _ => return,
    };
    journal.job(verb, job);
}

async fn told_to_stop() {
    match tokio::io::stdin().read_u8().await {
        Ok(STOP) => {}
        // The driver is gone: so is its broker.
        _ => std::process::exit(1),
    }
}
