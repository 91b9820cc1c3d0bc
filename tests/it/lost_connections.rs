//! Connections that die with jobs on them: they are opened again, and nothing is lost.

use crate::support::{
    LANE, PATIENCE, Proxy, Scene, broker_addr, connect, consume, count, declare_work_queue,
    eventually, settle_all, within,
};
use anyhow::anyhow;
use lapin::{BasicProperties, options::QueueDeleteOptions};
use lapin_retry::{Event, Job, QueueType, Retry, RetryConsumer};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::sync::Semaphore;

const IN_FLIGHT: usize = 200;

/// Breaks the publishing connection with 200 hand-offs in flight, all of them on the broker, and
/// none confirmed.
async fn break_the_publishing_connection(with: impl AsyncFnOnce(&Scene, &Proxy)) {
    let scene = Scene::new().await;
    let ids = scene.fill(600).await;
    let (publishing, users) =
        (Proxy::start(broker_addr()).await, Proxy::start(broker_addr()).await);
    // Nothing times out by itself.
    let settings = scene.settings().hand_offs(IN_FLIGHT).confirm_timeout(Duration::from_secs(60));
    let retry = Retry::attach(publishing.url(&scene.url()), "work", settings).await.unwrap();
    let connection = connect(&users.url(&scene.url())).await;
    let channel = connection.create_channel().await.unwrap();
    publishing.swallow_confirms(true);
    let running = settle_all(&retry, consume(&channel, "work", 600).await, |_| Err(anyhow!("no")));
    eventually("200 are in flight", PATIENCE, async || {
        publishing.confirms_swallowed() == IN_FLIGHT as u64
    })
    .await;
    assert_eq!(publishing.opened(), 1);

    publishing.swallow_confirms(false);
    with(&scene, &publishing).await;
    eventually("all are acked", PATIENCE, async || users.acks() == 600).await;
    eventually("all are handed off", PATIENCE, async || scene.journal.handed_off() == ids).await;
    assert_eq!(publishing.opened(), 2, "it is opened again, once");
    assert_eq!(scene.journal.undecided(), IN_FLIGHT);
    let copies = scene.look(LANE).await;
    assert_eq!(copies.len(), 600 + IN_FLIGHT);
    assert_eq!(copies.into_iter().collect::<BTreeSet<_>>(), ids);
    within("close", retry.close()).await.unwrap();
    channel.close(200, "done".into()).await.unwrap();
    within("the loop ends", running).await.unwrap();
    assert_eq!(count(&scene.channel, "work").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn hand_offs_go_on_after_the_network_cut_the_publishing_connection() {
    break_the_publishing_connection(async |_, publishing| publishing.cut().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hand_offs_go_on_after_an_operator_closed_the_publishing_connection() {
    break_the_publishing_connection(async |scene, _| {
        let name = scene.connection_called("lapin-retry publishing").await;
        scene.vhost.api().close_connection(&name);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_while_the_publishing_connection_is_cut_again_and_again() {
    let scene = Scene::new().await;
    let ids = scene.fill(2_000).await;
    let (publishing, users) =
        (Proxy::start(broker_addr()).await, Proxy::start(broker_addr()).await);
    // Long, so that only the cuts leave anything undecided, however slow the broker is.
    let settings = scene.settings().confirm_timeout(Duration::from_secs(10));
    let retry = Retry::attach(publishing.url(&scene.url()), "work", settings).await.unwrap();
    let connection = connect(&users.url(&scene.url())).await;
    let channel = connection.create_channel().await.unwrap();
    let _running = settle_all(&retry, consume(&channel, "work", 500).await, |_| Err(anyhow!("no")));
    for cut in 1..=5 {
        eventually("hand-offs go on", PATIENCE, async || users.acks() >= 250 * cut).await;
        publishing.cut().await;
    }
    eventually("all are acked", 2 * PATIENCE, async || users.acks() == 2_000).await;
    within("close", retry.close()).await.unwrap();
    let copies = scene.look(LANE).await;
    let duplicates = copies.len() - ids.len();
    assert!(duplicates <= scene.journal.undecided(), "{duplicates} duplicates");
    assert!(scene.journal.undecided() <= 5 * 64, "no more than were in flight");
    assert_eq!(copies.into_iter().collect::<BTreeSet<_>>(), ids);
}

/// Every try to connect costs the broker, and lapin keeps some memory for each that failed.
#[tokio::test(flavor = "multi_thread")]
async fn many_waiting_hand_offs_do_not_mean_many_tries_to_connect() {
    let scene = Scene::new().await;
    let ids = scene.fill(300).await;
    let publishing = Proxy::start(broker_addr()).await;
    let retry =
        Retry::attach(publishing.url(&scene.url()), "work", scene.settings()).await.unwrap();
    publishing.refuse(true);
    publishing.cut().await;
    let channel = scene.connection.create_channel().await.unwrap();
    let _running = settle_all(&retry, consume(&channel, "work", 300).await, |_| Err(anyhow!("no")));
    eventually("hundreds failed", 2 * PATIENCE, async || scene.journal.refused() >= 400).await;
    let opened = publishing.opened();
    assert!(opened < 40, "{opened} connections for 400 tries");

    publishing.refuse(false);
    eventually("all are handed off", PATIENCE, async || scene.journal.handed_off() == ids).await;
    within("close", retry.close()).await.unwrap();
}

/// How often each job was run, and a gate that the handlers wait at.
#[derive(Clone)]
struct Runs {
    begun: Arc<Mutex<BTreeMap<String, u32>>>,
    gate: Arc<Semaphore>,
}

impl Runs {
    fn new() -> Self {
        Self { begun: Arc::default(), gate: Arc::new(Semaphore::new(0)) }
    }

    fn total(&self) -> u32 {
        self.begun.lock().unwrap().values().sum()
    }

    /// Even jobs fail, odd ones succeed.
    async fn handle(self, job: Job) -> anyhow::Result<()> {
        *self.begun.lock().unwrap().entry(job.id().to_owned()).or_default() += 1;
        let _through = self.gate.acquire().await?;
        if job.id().parse::<u32>()? % 2 == 0 { Err(anyhow!("no")) } else { Ok(()) }
    }
}

/// Breaks the consuming connection under 100 running handlers.
async fn break_the_consuming_connection(with: impl AsyncFnOnce(&Scene, &Proxy)) {
    let scene = Scene::new().await;
    let ids = scene.fill(300).await;
    let proxy = Proxy::start(broker_addr()).await;
    let runs = Runs::new();
    let handle = RetryConsumer::builder(proxy.url(&scene.url()), "work")
        .settings(scene.settings())
        .prefetch(100)
        .handler({
            let runs = runs.clone();
            move |job| runs.clone().handle(job)
        })
        .start()
        .await
        .unwrap();
    eventually("100 are running", PATIENCE, async || runs.total() == 100).await;
    with(&scene, &proxy).await;
    eventually("the loss is told", PATIENCE, async || scene.journal.disconnected() > 0).await;
    runs.gate.add_permits(1_000);

    eventually("all are settled", 2 * PATIENCE, async || {
        scene.journal.finished().len() == 150 && scene.journal.handed_off().len() == 150
    })
    .await;
    within("shutdown", handle.shutdown(Duration::from_secs(10))).await;
    assert_eq!(count(&scene.channel, "work").await, 0);
    let in_the_lane = scene.look(LANE).await;
    assert!(in_the_lane.len() <= 150 + scene.journal.possible_duplicates());
    let mut there: BTreeSet<String> = in_the_lane.into_iter().collect();
    there.extend(scene.journal.finished());
    assert_eq!(there, ids);
    // Those that ran when it happened ran again, and no other.
    let begun = runs.begun.lock().unwrap();
    assert_eq!(begun.values().filter(|&&runs| runs == 2).count(), 100);
    assert_eq!(begun.values().filter(|&&runs| runs == 1).count(), 200);
    assert_eq!(scene.journal.count(|event| matches!(event, Event::Stale { .. })), 100);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_comes_back_after_the_network_cut_its_connection() {
    break_the_consuming_connection(async |_, proxy| proxy.cut().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_comes_back_after_an_operator_closed_its_connection() {
    break_the_consuming_connection(async |scene, _| {
        let name = scene.connection_called("lapin-retry consuming").await;
        scene.vhost.api().close_connection(&name);
    })
    .await;
}

/// An answer that lapin never gives must leave nothing waiting, else a shutdown would wait with it.
#[tokio::test(flavor = "multi_thread")]
async fn no_job_of_a_consumer_is_lost_or_stuck_while_both_connections_are_cut_again_and_again() {
    let scene = Scene::new().await;
    let ids = scene.fill(3_000).await;
    let proxy = Proxy::start(broker_addr()).await;
    let handle = RetryConsumer::builder(proxy.url(&scene.url()), "work")
        .settings(scene.settings())
        .handler(|job: Job| async move {
            if job.id().parse::<u32>()? % 2 == 0 { Err(anyhow!("no")) } else { Ok(()) }
        })
        .start()
        .await
        .unwrap();
    for cut in 1..=8 {
        eventually("jobs go on", PATIENCE, async || proxy.acks() >= 200 * cut).await;
        proxy.cut().await;
    }
    eventually("all are settled", 3 * PATIENCE, async || {
        &scene.journal.finished() | &scene.journal.handed_off() == ids
    })
    .await;
    // Stale acks may still bring some back.
    scene.holds("work", 0).await;
    within("shutdown", handle.shutdown(Duration::from_secs(120))).await;
    scene.holds("work", 0).await;
    let there: BTreeSet<String> = scene.look(LANE).await.into_iter().collect();
    assert_eq!(&there | &scene.journal.finished(), ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_comes_back_when_its_deleted_queue_is_declared_again() {
    let scene = Scene::new().await;
    scene.fill(1).await;
    let handle = RetryConsumer::builder(scene.url(), "work")
        .settings(scene.settings())
        .handler(|_: Job| async { Ok(()) })
        .start()
        .await
        .unwrap();
    eventually("the first is done", PATIENCE, async || scene.journal.finished().len() == 1).await;
    let work = scene.channel.queue_delete("work".into(), QueueDeleteOptions::default()).await;
    work.expect("deleted");
    // Once cancelled, and more than once not there.
    eventually("it is missed", PATIENCE, async || scene.journal.disconnected() >= 3).await;
    declare_work_queue(&scene.channel, "work", QueueType::Quorum).await;
    let ids = scene.fill(20).await;
    eventually("all are done", PATIENCE, async || scene.journal.finished() == ids).await;
    within("shutdown", handle.shutdown(Duration::from_secs(5))).await;
}

/// Those that it had prefetched are gone with their queue, or back in it.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_was_cancelled_runs_nothing_more_and_waits_for_no_handler() {
    let scene = Scene::new().await;
    scene.fill(10).await;
    let (journal, gate) = (scene.journal.clone(), Arc::new(Semaphore::new(0)));
    let closed = Arc::clone(&gate);
    let handle = RetryConsumer::builder(scene.url(), "work")
        .settings(scene.settings())
        .concurrency(1)
        .handler(move |job: Job| {
            let (journal, gate) = (journal.clone(), Arc::clone(&closed));
            async move {
                journal.begin(&job);
                let _open = gate.acquire().await?;
                Ok(())
            }
        })
        .start()
        .await
        .unwrap();
    eventually("one runs", PATIENCE, async || scene.journal.attempted() == 1).await;
    scene.holds("work", 0).await;
    let work = scene.channel.queue_delete("work".into(), QueueDeleteOptions::default()).await;
    work.expect("deleted");
    eventually("it is missed", PATIENCE, async || scene.journal.disconnected() >= 1).await;
    declare_work_queue(&scene.channel, "work", QueueType::Quorum).await;
    let job = BasicProperties::default().with_message_id("new".into());
    scene.publish(job, b"job").await;
    gate.add_permits(1);
    scene.journal.is_done("new").await;
    assert_eq!(scene.journal.attempted(), 2, "the one at work, and the new one");
    within("shutdown", handle.shutdown(Duration::from_secs(5))).await;
}
