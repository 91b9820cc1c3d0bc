//! Way in 2: give us the handler. The builder, and the handle of what it started.

mod health;
mod intake;
mod one_by_one;
mod prefetch;
mod reconnect;
mod run;
#[cfg(test)]
mod tests;

use std::{
    error::Error as StdError,
    fmt,
    future::Future,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::{FutureExt, Stream, StreamExt, future::BoxFuture};
use lapin::types::{AMQPValue, FieldTable};
use tokio::sync::{Semaphore, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use self::{health::Health, reconnect::Reconnect};
use self::{
    health::{Signs, Vitals},
    reconnect::Tags,
    run::{Run, Stop},
};
use crate::{
    Broker, Error, ErrorKind, Event, Job, Outcome, Policies, RetryPolicy, Settings,
    link::{Subscribe, watch_over},
    settle::Engine,
};

/// What runs a job. Implemented for closures `Fn(Job) -> impl Future<Output = anyhow::Result<()>>`.
///
/// A closure shares what it needs like this:
/// `move |job| { let db = db.clone(); async move { .. } }`.
pub trait Handler: Send + Sync + 'static {
    /// Runs the job. `Ok` is done; an error retries or buries it, as its
    /// [`Outcome`](crate::Outcome) says. A panic and a timeout are failures of this job.
    fn call(&self, job: Job) -> impl Future<Output = anyhow::Result<()>> + Send;
}

impl<F, Fut> Handler for F
where
    F: Fn(Job) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    fn call(&self, job: Job) -> impl Future<Output = anyhow::Result<()>> + Send {
        self(job)
    }
}

type BoxHandler = Arc<dyn Fn(Job) -> BoxFuture<'static, anyhow::Result<()>> + Send + Sync>;

/// A consumer that runs a handler for every job, retries those that fail, and goes on until it is
/// told to stop.
///
/// ```no_run
/// use lapin_retry::{Job, RetryConsumer, RetryPolicy};
///
/// # #[derive(serde::Deserialize)] struct Order;
/// # async fn ship(_: Order) -> anyhow::Result<()> { Ok(()) }
/// # async fn example() -> anyhow::Result<()> {
/// let handle = RetryConsumer::builder("amqp://localhost", "orders")
///     .policy(RetryPolicy::new([15, 30, 60]))
///     .handler(|job: Job| async move { ship(job.decode()?).await })
///     .start()
///     .await?;
/// handle.stopped().await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a consumer takes no jobs until it is started"]
pub struct RetryConsumer {
    builder: Builder,
    handler: BoxHandler,
}

/// Configures a [`RetryConsumer`].
///
/// | setting | default |
/// |---|---|
/// | [`settings`](Self::settings), [`policy`](Self::policy) | see [`Settings`] |
/// | [`prefetch`](Self::prefetch) | 100 |
/// | [`concurrency`](Self::concurrency) | as the prefetch |
/// | [`handler_timeout`](Self::handler_timeout) | 25 min, under the broker's consumer timeout of 30 min |
/// | [`consumer_timeout`](Self::consumer_timeout) | 30 min, the broker's default |
/// | [`reconnect`](Self::reconnect) | 100 ms to 30 s, full jitter, for ever |
/// | [`consumer_tag`](Self::consumer_tag) | the worker's name |
/// | [`priority`](Self::priority), [`argument`](Self::argument) | none |
#[derive(Debug)]
#[must_use = "a builder does nothing until its consumer is started"]
pub struct Builder {
    broker: Broker,
    queue: String,
    settings: Settings,
    /// Classifiers and hooks that were set here, beside those of the settings.
    own: Settings,
    prefetch: u16,
    concurrency: Option<usize>,
    handler_timeout: Duration,
    consumer_timeout: Duration,
    reconnect: Reconnect,
    consumer_tag: Option<String>,
    arguments: Vec<(String, AMQPValue)>,
}

impl RetryConsumer {
    /// A consumer of `queue`. Any number of consumers may share one [`Broker`].
    pub fn builder(broker: impl Into<Broker>, queue: impl Into<String>) -> Builder {
        Builder {
            broker: broker.into(),
            queue: queue.into(),
            settings: Settings::default(),
            own: Settings::default(),
            prefetch: 100,
            concurrency: None,
            handler_timeout: Duration::from_secs(25 * 60),
            consumer_timeout: Duration::from_secs(30 * 60),
            reconnect: Reconnect::default(),
            consumer_tag: None,
            arguments: Vec::new(),
        }
    }

    /// Checks the settings, makes or verifies the queues, and starts to consume.
    ///
    /// From then on a lost connection is opened again: see [`Reconnect`].
    ///
    /// # Errors
    /// As [`Retry::attach`](crate::Retry::attach), and a prefetch, concurrency or handler timeout
    /// of 0. Nothing has been consumed then.
    pub async fn start(self) -> Result<Handle, Error> {
        let Self { builder, handler } = self;
        builder.validate()?;
        let Builder { broker, queue, mut settings, prefetch, concurrency, .. } = builder;
        settings.hold = builder.consumer_timeout / 2;
        settings.held = builder.handler_timeout.saturating_add(settings.hand_off_bound);
        settings.classifiers.extend(builder.own.classifiers);
        settings.observers.extend(builder.own.observers);
        let engine = Engine::start(broker, &queue, settings).await?;
        let tag = builder.consumer_tag.unwrap_or_else(|| engine.worker().to_owned());
        let mut tags = Tags::new(tag);
        let how =
            Subscribe { prefetch, tag: tags.next(), arguments: table(builder.arguments), queue };
        engine.suspects().doubt_at_most(prefetch);
        // The first time, a refusal is the caller's to see.
        let subscription = engine.consume(&how, false).await?;
        engine.consuming();
        let (stop, stopping) = watch::channel(None);
        let (end, ended) = watch::channel(None);
        let (lost, loss) = watch::channel(None);
        let (signs, sign) = Signs::new(&engine, loss, stopping.clone());
        let vitals = Vitals { sign: sign.subscribe(), ended };
        watch_over(engine.queue(), sign.subscribe());
        let run = Run {
            engine: Arc::clone(&engine),
            how,
            tags: Mutex::new(tags),
            handler,
            // More than are prefetched can never run.
            permits: Arc::new(Semaphore::new(
                concurrency.unwrap_or(usize::MAX).min(prefetch.into()),
            )),
            handler_timeout: builder.handler_timeout,
            stopping,
            handlers: TaskTracker::new(),
            cut: CancellationToken::new(),
            reconnect: builder.reconnect,
            lost,
        };
        tokio::spawn(async move {
            let how = tokio::select! {
                biased;
                how = run.until_stopped(subscription) => how,
                never = signs.give(sign) => match never {},
            };
            end.send(Some(how))
        });
        Ok(Handle { engine, stop: Arc::new(stop), vitals })
    }
}

impl Builder {
    /// All that is common to both ways in. Only what was set on these settings is changed: a policy
    /// that was set here before, say, stays unless they have one. [`classify`](Self::classify) and
    /// [`on_event`](Self::on_event) add to what they have, in whatever order all of these are called.
    pub fn settings(mut self, settings: impl Into<Settings>) -> Self {
        self.settings = self.settings.then(&settings.into());
        self
    }

    /// The levels and their jitter; the other settings stay.
    pub fn policy(mut self, policy: RetryPolicy) -> Self {
        self.settings.policies = self.settings.policies.with_default(policy);
        self
    }

    /// Policies for several kinds of jobs; the other settings stay.
    pub fn policies(mut self, policies: Policies) -> Self {
        self.settings.policies = policies;
        self
    }

    /// See [`Settings::classify`]. Classifiers of the [`settings`](Self::settings) are asked first.
    pub fn classify<E: StdError + Send + Sync + 'static>(
        mut self,
        classify: impl Fn(&E) -> Option<Outcome> + Send + Sync + 'static,
    ) -> Self {
        self.own = self.own.classify(classify);
        self
    }

    /// See [`Settings::on_event`].
    pub fn on_event(mut self, hook: impl Fn(&Event) + Send + Sync + 'static) -> Self {
        self.own = self.own.on_event(hook);
        self
    }

    /// How many unacked jobs the broker sends ahead. Default: 100. 0 would mean without limit, and
    /// is refused.
    pub fn prefetch(mut self, jobs: u16) -> Self {
        self.prefetch = jobs;
        self
    }

    /// How many handlers run at a time. Default: as many as are prefetched.
    ///
    /// More than the prefetch makes no sense: the broker sends no more jobs than that. A handler
    /// that failed keeps its place until its job's turn for a hand-off has come, see
    /// [`Settings::hand_offs`]; not after an outage.
    pub fn concurrency(mut self, handlers: usize) -> Self {
        self.concurrency = Some(handlers);
        self
    }

    /// How long a handler may run before it is cancelled, which is a failure of its job. Default:
    /// 25 minutes. It must stay under the broker's consumer timeout, 30 minutes by default.
    ///
    /// A handler is cancelled where it awaits; one that blocks its thread cannot be.
    pub fn handler_timeout(mut self, timeout: Duration) -> Self {
        self.handler_timeout = timeout;
        self
    }

    /// The broker's consumer timeout, if it is not the default of 30 minutes. It is not set by
    /// this, only respected: no job is held longer.
    pub fn consumer_timeout(mut self, timeout: Duration) -> Self {
        self.consumer_timeout = timeout;
        self
    }

    /// How it starts over when it lost the broker. Default: after 100 ms to 30 s, for ever.
    pub fn reconnect(mut self, reconnect: Reconnect) -> Self {
        self.reconnect = reconnect;
        self
    }

    /// The consumer's tag, as the management UI shows it. Default: the worker's name. Whenever it
    /// consumes anew the tag gets another number: `tag`, `tag.2`, `tag.3`.
    pub fn consumer_tag(mut self, tag: impl Into<String>) -> Self {
        self.consumer_tag = Some(tag.into());
        self
    }

    /// The consumer's priority: the broker serves those with a higher one first. Default: 0.
    pub fn priority(self, priority: i32) -> Self {
        self.argument("x-priority", AMQPValue::LongInt(priority))
    }

    /// An argument of `basic.consume`.
    pub fn argument(mut self, name: &str, value: AMQPValue) -> Self {
        self.arguments.push((name.to_owned(), value));
        self
    }

    /// The handler.
    pub fn handler(self, handler: impl Handler) -> RetryConsumer {
        let handler = Arc::new(handler);
        let handler: BoxHandler = Arc::new(move |job| {
            let handler = Arc::clone(&handler);
            async move { handler.call(job).await }.boxed()
        });
        RetryConsumer { builder: self, handler }
    }

    /// A handler whose error is of any type: `anyhow`'s, or any that is a `std::error::Error`.
    pub fn handler_with_error<F, Fut, E>(self, handler: F) -> RetryConsumer
    where
        F: Fn(Job) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<anyhow::Error>,
    {
        self.handler(move |job| {
            let called = handler(job);
            async move { called.await.map_err(Into::into) }
        })
    }

    /// All that can be checked without a broker.
    #[cfg(feature = "config")]
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.validate()?;
        self.settings.validate()?;
        let Settings { policies, queue_type, .. } = &self.settings;
        crate::Topology::new(&self.queue, policies, *queue_type).map(drop)
    }

    fn validate(&self) -> Result<(), Error> {
        if self.prefetch == 0 {
            return Err(Error::configuration(
                "prefetch: 0 means without limit, and a backlog would fill the memory; use 1 or \
                 more (the default is 100)",
            ));
        }
        if self.concurrency == Some(0) {
            return Err(Error::configuration("concurrency: 0; no handler would ever run"));
        }
        if self.handler_timeout.is_zero() {
            return Err(Error::configuration("handler_timeout: zero; every job would time out"));
        }
        let bound = self.settings.hand_off_bound;
        if self.handler_timeout.saturating_add(bound) >= self.consumer_timeout {
            return Err(Error::configuration(format!(
                "handler_timeout: {:?} and {bound:?} for the hand-off reach the broker's \
                 consumer timeout of {:?}, after which it delivers the job again; shorten it, or \
                 raise both consumer_timeout here and in rabbitmq.conf",
                self.handler_timeout, self.consumer_timeout
            )));
        }
        self.reconnect.validate()?;
        if self.consumer_tag.as_ref().is_some_and(|tag| tag.len() > 255) {
            return Err(Error::configuration("consumer_tag: longer than 255 bytes"));
        }
        if let Some((name, _)) = self.arguments.iter().find(|(name, _)| name.len() > 255) {
            return Err(Error::configuration(format!(
                "argument: the name {name:?} is longer than 255 bytes"
            )));
        }
        Ok(())
    }
}

fn table(arguments: Vec<(String, AMQPValue)>) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in arguments {
        table.insert(name.into(), value);
    }
    table
}

/// A running consumer. Cheap to clone; to drop it stops nothing.
#[derive(Clone, Debug)]
pub struct Handle {
    engine: Arc<Engine>,
    stop: Arc<watch::Sender<Option<Stop>>>,
    vitals: Vitals,
}

impl Handle {
    /// How it is now: for a health check, say (`examples/health.rs`). A consumer whose runtime has
    /// ended is [`Stopped`](Health::Stopped); 5 s after the last sign of life it is
    /// [`Unresponsive`](Health::Unresponsive).
    pub fn health(&self) -> Health {
        self.vitals.health()
    }

    /// How it is now, and then each change, up to [`Stopped`](Health::Stopped). Poll it on any
    /// runtime with a timer: only on another one does it report that the consumer's is blocked.
    pub fn health_changes(&self) -> impl Stream<Item = Health> + Send + Unpin + use<> {
        self.vitals.clone().changes().boxed()
    }

    /// Stops: takes no more jobs, gives back those that have not been started, lets running
    /// handlers finish for at most `grace`, and hands off their outcomes. Handlers that still run
    /// then are cancelled, and their jobs given back. Returns when it is over;
    /// [`stopped`](Self::stopped) tells how it went.
    ///
    /// What does not answer is not waited for without end: with a broker that is gone, or hand-offs
    /// that do not succeed, it takes up to 6 s more than the grace.
    pub async fn shutdown(&self, grace: Duration) {
        self.stop.send_if_modified(|stop| {
            let first = stop.is_none();
            stop.get_or_insert(Stop::within(grace));
            first
        });
        // Told by stopped() to whoever asks.
        let _ = self.stopped().await;
    }

    /// Takes no more jobs until [`resume`](Self::resume). Those that have not been started are given
    /// back; running handlers go on.
    pub fn pause(&self) {
        self.engine.pause_by_hand();
    }

    /// Ends a pause at once, whatever began it.
    pub fn resume(&self) {
        self.engine.resume_by_hand();
    }

    /// Other policies, [`pauses`](Settings::pauses), [classifiers](Settings::classify) or another
    /// [`crash_limit`](Settings::crash_limit), from the next job on: new lanes are declared before
    /// they are used, and running jobs are settled under the rules that they came in with. A pause
    /// is cleared.
    ///
    /// Each of the four that was not set on `settings` stays as it is: `reload(policies)` changes the
    /// policies and nothing else. Policies and pauses are replaced as a whole. Classifiers, if there
    /// are any, take the place of all before them, those of the builder included. All other settings
    /// stay as they were at the start, whatever `settings` say of them.
    ///
    /// # Errors
    /// As [`RetryConsumer::start`]. The old rules stay in force then. [`ErrorKind::Closed`] once it is
    /// told to stop, or has stopped.
    pub async fn reload(&self, settings: impl Into<Settings>) -> Result<(), Error> {
        if self.stop.borrow().is_some() || self.engine.is_closed() {
            let queue = self.engine.queue();
            return Err(Error::new(
                ErrorKind::Closed,
                format!(
                    "queue {queue:?}: reload: its consumer has stopped and takes no other settings; \
                     start a new one with them"
                ),
            ));
        }
        self.engine.reload(&settings.into()).await
    }

    /// Waits until the consumer has stopped, by [`shutdown`](Self::shutdown) or at the limit of
    /// [`Reconnect`].
    ///
    /// # Errors
    /// The kind of the last error: it gave up to start over. [`ErrorKind::Closed`]: some hand-offs or
    /// acks did not succeed in time, or some handlers did not end, so that the broker delivers their
    /// jobs again; or the consumer's task was ended by its runtime.
    pub async fn stopped(&self) -> Result<(), Error> {
        let mut ended = self.vitals.ended.clone();
        let how = ended.wait_for(Option::is_some).await.ok().and_then(|how| how.clone());
        how.unwrap_or_else(|| {
            Err(Error::new(
                ErrorKind::Closed,
                format!("the consumer of {:?} ended with its runtime", self.engine.queue()),
            ))
        })
    }
}

impl fmt::Debug for RetryConsumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryConsumer").field("builder", &self.builder).finish_non_exhaustive()
    }
}
