//! The broker takes back what is unacked for longer than its consumer timeout. A handler that takes
//! longer is a failure of its job; a job that merely waited is sent to the tail before.

use crate::support::{
    BURIED, LANE, PATIENCE, Proxy, Scene, WORK, broker_addr, count, eventually, table, text, within,
};
use lapin::{options::QueueDeclareOptions, types::AMQPValue};
use lapin_retry::{
    Builder, BuriedReason, Event, FailureKind, Handle, Jitter, Job, RetryConsumer, RetryPolicy,
    Settings,
};
use std::time::Duration;
use tokio::sync::watch;

const GRACE: Duration = Duration::from_secs(10);

/// What RabbitMQ says, with a timeout that nothing in these tests reaches.
const NAMED: &str = "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out. Timeout \
                     value used: 600000 ms. This timeout value can be configured, see consumers doc \
                     guide to learn more";

/// A worker whose first job runs until its consumer is lost, and fails then; a second job waits. All
/// later runs succeed.
struct Worker {
    scene: Scene,
    proxy: Proxy,
    handle: Handle,
    lost: watch::Sender<usize>,
}

impl Worker {
    async fn start() -> Self {
        let (scene, proxy) = (Scene::new().await, Proxy::start(broker_addr()).await);
        let lost = watch::Sender::new(0);
        let (journal, losses) = (scene.journal.clone(), lost.subscribe());
        let handler = move |job: Job| {
            let (journal, mut losses) = (journal.clone(), losses.clone());
            async move {
                let run = journal.begin(&job);
                if job.id() == "0000" && job.retry_count() == 0 {
                    losses.wait_for(|losses| *losses >= run).await?;
                    anyhow::bail!("too late");
                }
                Ok(())
            }
        };
        let handle = RetryConsumer::builder(proxy.url(&scene.url()), WORK)
            .settings(scene.settings())
            .prefetch(2)
            .concurrency(1)
            .handler(handler)
            .start()
            .await
            .unwrap();
        scene.fill(2).await;
        Self { scene, proxy, handle, lost }
    }

    /// In this run the consumer is lost.
    async fn lose(&self, run: usize, how: impl Fn(&Proxy)) {
        let journal = &self.scene.journal;
        eventually("it runs", PATIENCE, async || journal.attempts_of("0000").len() == run).await;
        // It has run for most of the time that it was held.
        tokio::time::sleep(Duration::from_secs(1)).await;
        how(&self.proxy);
        eventually("it is lost", PATIENCE, async || journal.disconnected() == run).await;
        self.lost.send_replace(run);
    }

    async fn expect_charged(self, runs: usize) {
        let retried = self.scene.journal.first("it is charged", |event| match event {
            Event::Retried { job, level, kind, error, .. } => {
                Some((job.id().to_owned(), *level, *kind, error.clone()))
            }
            _ => None,
        });
        let (id, level, kind, error) = retried.await;
        assert_eq!((id.as_str(), level, kind), ("0000", 1, FailureKind::Timeout));
        assert!(error.contains("consumer timeout"), "{error}");
        self.scene.journal.is_done("0001").await;
        within("the end", self.handle.shutdown(GRACE)).await;
        // Two messages before, and two after: one is done.
        self.scene.holds(LANE, 1).await;
        self.scene.unacked(0).await;
        assert_eq!(self.scene.journal.attempts_of("0000").len(), runs);
        assert_eq!(self.scene.journal.attempts_of("0001").len(), 1, "it merely waited");
        assert_eq!(self.scene.journal.done(), ["0001"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timeout_that_the_broker_names_is_charged_at_once() {
    let worker = Worker::start().await;
    worker.lose(1, |proxy| proxy.close_channels(406, NAMED)).await;
    worker.expect_charged(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_is_charged_when_the_same_job_was_held_longest_twice() {
    let worker = Worker::start().await;
    worker.lose(1, Proxy::cancel_consumers).await;
    worker.lose(2, Proxy::cancel_consumers).await;
    worker.expect_charged(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_channel_that_is_closed_for_another_reason_is_charged_to_nobody() {
    let worker = Worker::start().await;
    for run in 1..=2 {
        let why = "PRECONDITION_FAILED - unknown delivery tag 7";
        worker.lose(run, |proxy| proxy.close_channels(406, why)).await;
    }
    eventually("it runs", PATIENCE, async || worker.scene.journal.attempts_of("0000").len() == 3)
        .await;
    worker.lost.send_replace(3);
    // It is a failure of its own now.
    let kind = worker.scene.journal.first("its failure", |event| match event {
        Event::Retried { kind, .. } => Some(*kind),
        _ => None,
    });
    assert_eq!(kind.await, FailureKind::Failed);
    within("the end", worker.handle.shutdown(GRACE)).await;
}

/// The work queue with arguments; those that the version does not know are ignored.
async fn queue_with(scene: &Scene, arguments: [(&str, AMQPValue); 2]) {
    let mut arguments = table(arguments);
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    let options = QueueDeclareOptions { durable: true, ..Default::default() };
    scene.channel.queue_declare(WORK.into(), options, arguments).await.unwrap();
}

fn builder(scene: &Scene, settings: Settings) -> Builder {
    RetryConsumer::builder(scene.url(), WORK).settings(settings.on_event(scene.journal.hook()))
}

/// 4.3 cancels the consumer after these 3 s. 4.0 looks once a minute, and names the timeout. 3.10 does
/// not know the argument: its handlers fail by themselves.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_outlasts_the_consumer_timeout_ends_buried() {
    let scene = Scene::bare().await;
    let timeout = ("x-consumer-timeout", AMQPValue::LongInt(3000));
    queue_with(&scene, [timeout, ("x-delivery-limit", AMQPValue::LongInt(20))]).await;
    let settings = Settings::new(RetryPolicy::new(["1s"]).jitter(Jitter::None));
    let (journal, real) = (scene.journal.clone(), scene.vhost.api().version() >= (4, 0));
    let sleeps = Duration::from_secs(if scene.vhost.api().version() == (4, 0) { 150 } else { 6 });
    let handler = move |job: Job| {
        journal.begin(&job);
        async move {
            tokio::time::sleep(sleeps).await;
            anyhow::bail!("too late")
        }
    };
    let handle = builder(&scene, settings).handler(handler).start().await.unwrap();
    scene.fill(1).await;
    let long = Duration::from_secs(300);
    eventually("it is buried", long, async || count(&scene.channel, BURIED).await == 1).await;
    within("the end", handle.shutdown(GRACE)).await;
    scene.unacked(0).await;
    // One message before, and one after.
    assert_eq!(scene.journal.retries().len(), 1);
    assert_eq!(scene.journal.possible_duplicates(), 0);
    assert_eq!(scene.journal.done(), Vec::<String>::new());
    let (id, buried) = scene.buried(1).await.pop_first().unwrap();
    assert_eq!(id, "0000");
    let kind = text(&buried.properties, "retry-error-kind").unwrap();
    assert_eq!(kind == "timeout", real, "{kind}");
    assert_eq!(scene.journal.until_buried(1).await, [BuriedReason::Exhausted]);
    assert!(scene.journal.attempted() <= 5, "{}", scene.journal.attempted());
}

/// 40 jobs of 200 ms, all of which are prefetched by one handler: 8 s of work, and after 4 s 4.3 would
/// take back what waits, and drop what it delivered a third time.
#[tokio::test(flavor = "multi_thread")]
async fn no_job_waits_until_the_broker_takes_it_back() {
    let scene = Scene::bare().await;
    let timeout = ("x-consumer-timeout", AMQPValue::LongInt(4000));
    queue_with(&scene, [timeout, ("x-delivery-limit", AMQPValue::LongInt(2))]).await;
    let ids = scene.fill(40).await;
    let journal = scene.journal.clone();
    let handler = move |job: Job| {
        journal.begin(&job);
        async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            Ok(())
        }
    };
    let settings = Settings::new(RetryPolicy::new([600]).jitter(Jitter::None));
    let handle = builder(&scene, settings.hand_off_bound(Duration::from_secs(1)))
        .prefetch(100)
        .concurrency(1)
        .handler_timeout(Duration::from_secs(2))
        .consumer_timeout(Duration::from_secs(4))
        .handler(handler)
        .start()
        .await
        .unwrap();
    let long = 3 * PATIENCE;
    eventually("all are done", long, async || scene.journal.finished() == ids).await;
    within("the end", handle.shutdown(GRACE)).await;
    scene.unacked(0).await;
    assert_eq!(scene.journal.attempted(), 40, "each of them once");
    assert_eq!(scene.journal.done().len(), 40);
    assert!(scene.journal.attempts().iter().all(|attempt| attempt.steps() == 0));
    let returned = scene.journal.count(|event| matches!(event, Event::Returned { .. }));
    assert!(returned > 0, "what waited was sent to the tail");
    scene.journal.nothing_broke();
}
