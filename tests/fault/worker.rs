//! A worker: a process of its own, which can be killed at any instant.

use crate::{
    journal::{Journal, Verb},
    plan::{
        BLOCK, CONSUMER_TIMEOUT, Course, HANDLER_TIMEOUT, OVERSTAY, Say, Step, WORK, effort, policy,
    },
};
use anyhow::{Context, anyhow};
use futures_util::{FutureExt, StreamExt};
use lapin::{Connection, ConnectionProperties};
use lapin_retry::{
    Event, Job, Pauses, QueueType, Retry, RetryConsumer, Settings, UnsettledJob, busy, outage,
    reject, retry_after, undecodable,
};
use serde::{Deserialize, Serialize};
use std::{
    panic::AssertUnwindSafe,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};
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
    pub(crate) kind: Kind,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub(crate) enum Kind {
    /// By the builder, which knows the consumer timeout.
    Built,
    /// By the builder, which takes the consumer timeout for the default: handlers may outlast it.
    Patient,
    /// The user's own loop. Handlers may outlast the consumer timeout.
    OwnLoop,
}

/// What the driver writes to a worker that is to shut down. At the end of its input it just ends.
pub(crate) const STOP: u8 = b's';
/// One more handler is to outlast the consumer timeout.
pub(crate) const OVERSTAYS: u8 = b'o';
/// Handlers are to block all threads of the runtime.
pub(crate) const BLOCKS: u8 = b'b';

/// Threads of a worker's runtime.
pub(crate) const THREADS: u32 = 2;

/// What all handlers of a worker share.
#[derive(Debug)]
struct Shift {
    journal: Journal,
    seed: u64,
    /// How many handlers are yet to outlast the consumer timeout.
    overstay: AtomicU32,
    /// How many are yet to block their thread.
    block: AtomicU32,
}

const PREFETCH: u16 = 50;

/// The type of the queues that are made for a worker.
pub(crate) fn lane_type(classic: bool) -> QueueType {
    if classic { QueueType::Classic } else { QueueType::Quorum }
}

/// Notes the channels that the broker closes. The library need not hear of one that is no longer in
/// use, but the acks that were on their way on it are lost.
#[derive(Debug)]
pub(crate) struct ClosedChannels(Journal);

impl ClosedChannels {
    pub(crate) fn new(orders: &Orders) -> Self {
        Self(Journal::open(&orders.journal, &orders.name))
    }
}

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for ClosedChannels {
    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        if event.metadata().target() == "lapin::channel"
            && *event.metadata().level() == tracing::Level::ERROR
        {
            self.0.note(Verb::ChannelClosed);
        }
    }
}

pub(crate) async fn work(orders: Orders) -> anyhow::Result<()> {
    let shift = Arc::new(Shift {
        journal: Journal::open(&orders.journal, &orders.name),
        seed: orders.seed,
        overstay: AtomicU32::new(0),
        block: AtomicU32::new(0),
    });
    let settings = Settings::new(policy(orders.variant))
        .queue_type(lane_type(orders.classic_lanes))
        .confirm_timeout(Duration::from_secs(2))
        .hand_off_bound(Duration::from_secs(5))
        .pauses(Pauses::default().first(Duration::from_millis(500)).max(Duration::from_secs(2)))
        .worker(&orders.name)
        .on_event({
            let shift = Arc::clone(&shift);
            move |event| note(&shift.journal, event)
        });
    if orders.kind == Kind::OwnLoop {
        return own_loop(&orders, settings, shift).await;
    }
    let builder = RetryConsumer::builder(&orders.url, WORK).settings(settings).prefetch(PREFETCH);
    let handlers = Arc::clone(&shift);
    let consumer = if orders.kind == Kind::Patient {
        builder
            .handler_timeout(OVERSTAY + HANDLER_TIMEOUT)
            .handler(move |job| run_patiently(Arc::clone(&handlers), job))
    } else {
        builder
            .handler_timeout(HANDLER_TIMEOUT)
            .consumer_timeout(CONSUMER_TIMEOUT)
            .handler(move |job| run(Arc::clone(&handlers), job))
    };
    let handle = consumer.start().await?;
    shift.until_told_to_stop().await;
    handle.shutdown(Duration::from_secs(5)).await;
    Ok(())
}

/// The loop as a careful user writes it: it starts over when its connection is gone.
async fn own_loop(orders: &Orders, settings: Settings, shift: Arc<Shift>) -> anyhow::Result<()> {
    let retry = Retry::attach(&orders.url, WORK, settings).await?;
    let stop = CancellationToken::new();
    tokio::spawn({
        let (stop, shift) = (stop.clone(), Arc::clone(&shift));
        async move {
            shift.until_told_to_stop().await;
            stop.cancel();
        }
    });
    while let Err(error) = consume(&retry, orders, &shift, &stop).await {
        shift.journal.note(Verb::Disconnected);
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
    shift: &Arc<Shift>,
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
        running.spawn(settle(job, Arc::clone(shift)));
        while running.try_join_next().is_some() {}
    }
    // What was prefetched and not begun is requeued.
    jobs.cancel().await;
    while running.join_next().await.is_some() {}
    // Before the channel is closed, or what is not acked yet would come again.
    retry.clone().close().await?;
    Ok(())
}

async fn settle(job: UnsettledJob, shift: Arc<Shift>) {
    let running = AssertUnwindSafe(run_patiently(shift, job.job().clone()));
    let result = running.catch_unwind().await.unwrap_or_else(|_| Err(anyhow!("panicked")));
    // It fails for no reason of its own.
    let _ = job.settle(result).await;
}

async fn run(shift: Arc<Shift>, job: Job) -> anyhow::Result<()> {
    shift.journal.job(Verb::Attempt, &job);
    shift.block();
    act(&shift, &job).await
}

/// Where nobody else cuts a handler that takes too long.
async fn run_patiently(shift: Arc<Shift>, job: Job) -> anyhow::Result<()> {
    shift.journal.job(Verb::Attempt, &job);
    shift.block();
    shift.overstay(&job).await;
    tokio::time::timeout(HANDLER_TIMEOUT, act(&shift, &job)).await.context("took too long")?
}

impl Shift {
    fn block(&self) {
        if one_of(&self.block) {
            self.journal.note(Verb::Blocks);
            std::thread::sleep(BLOCK);
        }
    }

    /// Only jobs that succeed at once, for who is charged with the timeout has to succeed later.
    async fn overstay(&self, job: &Job) {
        let plain = Course::of(self.seed, job.id()).is_plain() && Step::of(job) == Step::default();
        if plain && one_of(&self.overstay) {
            self.journal.job(Verb::Overstays, job);
            tokio::time::sleep(OVERSTAY).await;
        }
    }

    async fn until_told_to_stop(&self) {
        let mut orders = tokio::io::stdin();
        loop {
            match orders.read_u8().await {
                Ok(STOP) => return,
                Ok(OVERSTAYS) => drop(self.overstay.fetch_add(1, SeqCst)),
                Ok(BLOCKS) => drop(self.block.fetch_add(THREADS, SeqCst)),
                // The driver is gone: so is its broker.
                _ => std::process::exit(1),
            }
        }
    }
}

/// Takes one, if there is one.
fn one_of(some: &AtomicU32) -> bool {
    some.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok()
}

async fn act(shift: &Shift, job: &Job) -> anyhow::Result<()> {
    let seed = shift.seed;
    tokio::time::sleep(effort(seed, job.id())).await;
    let said = Course::of(seed, job.id()).say(Step::of(job));
    let verb = if said == Say::Done { Verb::Success } else { Verb::Failure };
    shift.journal.job(verb, job);
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
