//! The safety rule: a failed job is acked only after the broker has confirmed its copy.

use crate::support::{
    BURIED, LANE, PATIENCE, Proxy, Scene, broker_addr, connect, consume, count, eventually, next,
    next_job, settle_all, try_publish, within,
};
use anyhow::anyhow;
use futures_util::FutureExt;
use lapin::{
    BasicProperties, Confirmation,
    options::{QueueDeclareOptions, QueueDeleteOptions},
};
use lapin_retry::{Broker, Declare, Event, Job, Retry, RetryConsumer, UnsettledJob, reject};
use serde_json::json;
use std::{collections::BTreeSet, time::Duration};

/// The id of what fills a queue up; no job of the work queue.
const FILLING: &str = "filling";

/// Even jobs are to be retried, odd ones to be buried.
fn odd_are_rejected(job: &Job) -> anyhow::Result<()> {
    match job.id().parse::<u32>()? % 2 {
        0 => Err(anyhow!("not now")),
        _ => Err(reject(anyhow!("never")).into()),
    }
}

async fn odd_are_rejected_later(job: Job) -> anyhow::Result<()> {
    odd_are_rejected(&job)
}

/// Waits until each job was left undecided three times, and checks what must hold meanwhile.
async fn three_rounds_without_a_confirm(scene: &Scene, publishing: &Proxy, jobs: usize) {
    eventually("three rounds without a confirm", PATIENCE, async || {
        scene.journal.undecided() >= 3 * jobs
    })
    .await;
    assert_eq!(scene.journal.handed_off(), BTreeSet::new());
    scene.unacked(jobs as u64).await;
    assert!(publishing.confirms_swallowed() >= 3 * jobs as u64);
}

/// All that must hold once every job has been handed off: an ack each, no loss, and no copy that
/// was not accounted for.
async fn all_are_handed_off_and_acked(scene: &Scene, ids: &BTreeSet<String>, acking: &Proxy) {
    eventually("all are handed off", PATIENCE, async || scene.journal.handed_off() == *ids).await;
    eventually("all are acked", PATIENCE, async || acking.acks() == ids.len() as u64).await;
    let mut copies = scene.look(LANE).await;
    copies.extend(scene.look(BURIED).await);
    copies.retain(|id| id != FILLING);
    assert!(copies.len() <= ids.len() + scene.journal.undecided(), "{} copies", copies.len());
    assert_eq!(copies.into_iter().collect::<BTreeSet<_>>(), *ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_of_the_users_own_loop_is_never_acked_without_a_confirm() {
    let scene = Scene::new().await;
    let ids = scene.fill(10).await;
    let (publishing, users) =
        (Proxy::start(broker_addr()).await, Proxy::start(broker_addr()).await);
    let broker = Broker::from(publishing.url(&scene.url()));
    let retry = Retry::attach(&broker, "work", scene.settings()).await.unwrap();
    let connection = connect(&users.url(&scene.url())).await;
    let channel = connection.create_channel().await.unwrap();

    publishing.swallow_confirms(true);
    let running = settle_all(&retry, consume(&channel, "work", 10).await, odd_are_rejected);
    three_rounds_without_a_confirm(&scene, &publishing, 10).await;
    assert_eq!(users.acks(), 0);
    assert!(publishing.publishes() <= 10 * publishing.opened());

    publishing.swallow_confirms(false);
    all_are_handed_off_and_acked(&scene, &ids, &users).await;
    assert!(publishing.publishes() <= 10 * publishing.opened());
    within("close", retry.close()).await.unwrap();
    channel.close(200, "done".into()).await.unwrap();
    within("the loop ends", running).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_of_a_retry_consumer_is_never_acked_without_a_confirm() {
    let scene = Scene::new().await;
    let ids = scene.fill(10).await;
    let proxy = Proxy::start(broker_addr()).await;
    proxy.swallow_confirms(true);
    let handle = RetryConsumer::builder(proxy.url(&scene.url()), "work")
        .settings(scene.settings())
        .handler(odd_are_rejected_later)
        .start()
        .await
        .unwrap();
    three_rounds_without_a_confirm(&scene, &proxy, 10).await;
    assert_eq!(proxy.acks(), 0);
    // One of them is the consuming one.
    assert!(proxy.publishes() <= 10 * (proxy.opened() - 1));

    proxy.swallow_confirms(false);
    all_are_handed_off_and_acked(&scene, &ids, &proxy).await;
    assert!(proxy.publishes() <= 10 * (proxy.opened() - 1));
    within("shutdown", handle.shutdown(Duration::from_secs(5))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_lane_refuses_the_copy_stays_unacked_until_the_lane_takes_it() {
    let scene = Scene::new().await;
    let users = Proxy::start(broker_addr()).await;
    let retry = Retry::attach(scene.url(), "work", scene.settings()).await.unwrap();
    let full = json!({ "max-length": 1, "overflow": "reject-publish" });
    scene.vhost.api().set_policy("full", r"^work\.retry\.", 10, &full);
    fill_up(&scene, LANE).await;

    let ids = scene.fill(1).await;
    let connection = connect(&users.url(&scene.url())).await;
    let channel = connection.create_channel().await.unwrap();
    let _running = settle_all(&retry, consume(&channel, "work", 10).await, odd_are_rejected);
    eventually("it is refused", PATIENCE, async || scene.journal.refused() >= 3).await;
    assert_eq!(scene.journal.undecided(), 0);
    assert_eq!(users.acks(), 0);
    scene.unacked(1).await;

    scene.vhost.api().delete_policy("full");
    all_are_handed_off_and_acked(&scene, &ids, &users).await;
    within("close", retry.close()).await.unwrap();
}

/// Fills the queue up to the limit of a policy, until it refuses all that comes. A quorum queue
/// takes a few messages more than the limit says.
async fn fill_up(scene: &Scene, queue: &str) {
    eventually(&format!("{queue} refuses"), PATIENCE, async || {
        let properties = BasicProperties::default().with_message_id(FILLING.into());
        let answer = try_publish(&scene.channel, "", queue, properties, b"").await;
        matches!(answer, Ok(Confirmation::Nack(_)))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_lane_is_missing_under_declare_off_waits_until_somebody_makes_the_lane() {
    let scene = Scene::new().await;
    let ids = scene.fill(1).await;
    let users = Proxy::start(broker_addr()).await;
    let settings = scene.settings().declare(Declare::Off);
    let retry = Retry::attach(scene.url(), "work", settings).await.unwrap();
    assert_eq!(scene.vhost.api().queues(), ["work"]);
    let connection = connect(&users.url(&scene.url())).await;
    let channel = connection.create_channel().await.unwrap();
    let _running = settle_all(&retry, consume(&channel, "work", 10).await, odd_are_rejected);
    let says_why = |event: &Event| {
        matches!(event, Event::HandOffFailed { queue, why, undecided: false, .. }
            if queue == LANE && why.contains("missing"))
    };
    eventually("it is returned", PATIENCE, async || scene.journal.count(says_why) >= 3).await;
    assert_eq!(users.acks(), 0);
    scene.unacked(1).await;

    for queue in retry.topology().queues() {
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        let (name, arguments) = (queue.name.as_str().into(), queue.arguments.clone());
        scene.channel.queue_declare(name, options, arguments).await.unwrap();
    }
    all_are_handed_off_and_acked(&scene, &ids, &users).await;
    within("close", retry.close()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_buried_queue_that_went_missing_is_made_again() {
    let scene = Scene::new().await;
    let retry = Retry::attach(scene.url(), "work", scene.settings()).await.unwrap();
    let buried = BURIED.into();
    scene.channel.queue_delete(buried, QueueDeleteOptions::default()).await.unwrap();
    scene.fill(2).await;
    let channel = scene.connection.create_channel().await.unwrap();
    let _running = settle_all(&retry, consume(&channel, "work", 10).await, odd_are_rejected);
    eventually("both are handed off", PATIENCE, async || scene.journal.handed_off().len() == 2)
        .await;
    assert_eq!(scene.look(BURIED).await, ["0001"]);
    assert_eq!(scene.vhost.api().queue(BURIED).unwrap()["type"], "quorum");
    assert_eq!(scene.journal.undecided(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_hand_offs_are_in_flight_at_a_time() {
    let scene = Scene::new().await;
    let ids = scene.fill(300).await;
    let (publishing, users) =
        (Proxy::start(broker_addr()).await, Proxy::start(broker_addr()).await);
    // Nothing times out while the confirms are held back.
    let settings = scene.settings().confirm_timeout(Duration::from_secs(60));
    let retry = Retry::attach(publishing.url(&scene.url()), "work", settings).await.unwrap();
    let connection = connect(&users.url(&scene.url())).await;
    let channel = connection.create_channel().await.unwrap();
    publishing.swallow_confirms(true);
    let _running = settle_all(&retry, consume(&channel, "work", 300).await, odd_are_rejected);
    eventually("64 are in flight", PATIENCE, async || publishing.confirms_swallowed() == 64).await;
    assert_eq!(publishing.publishes(), 64, "the default is 64, and no more");
    assert_eq!(users.acks(), 0);

    publishing.swallow_confirms(false);
    publishing.cut().await;
    all_are_handed_off_and_acked(&scene, &ids, &users).await;
    assert_eq!(scene.journal.undecided(), 64);
    within("close", retry.close()).await.unwrap();
}

/// However many consumers share a broker, and however many hand-offs each has in flight.
#[tokio::test(flavor = "multi_thread")]
async fn all_consumers_of_a_broker_together_publish_on_a_few_channels() {
    let scene = Scene::new().await;
    let ids = scene.fill(200).await;
    let (publishing, users) =
        (Proxy::start(broker_addr()).await, Proxy::start(broker_addr()).await);
    // One for each of two queues, and those that declared them.
    let broker = Broker::from(publishing.url(&scene.url()) + "?channel_max=8");
    let settings = scene.settings().confirm_timeout(Duration::from_secs(60));
    let connection = connect(&users.url(&scene.url())).await;
    let mut consumers = Vec::new();
    let mut retries = Vec::new();
    for _ in 0..2 {
        retries.push(Retry::attach(&broker, "work", settings.clone()).await.unwrap());
    }
    // Each start publishes one message, to see that it may.
    let probes = publishing.publishes();
    publishing.swallow_confirms(true);
    for retry in retries {
        let channel = connection.create_channel().await.unwrap();
        let running = settle_all(&retry, consume(&channel, "work", 100).await, odd_are_rejected);
        consumers.push((retry, channel, running));
    }
    eventually("64 of each are in flight", PATIENCE, async || {
        publishing.confirms_swallowed() == 128
    })
    .await;
    scene.unacked(200).await;
    assert_eq!(publishing.publishes() - probes, 128);
    assert_eq!(scene.journal.refused(), 0, "the others wait");

    publishing.swallow_confirms(false);
    publishing.cut().await;
    all_are_handed_off_and_acked(&scene, &ids, &users).await;
    assert_eq!(scene.journal.undecided(), 128);
    for (retry, ..) in consumers {
        within("close", retry.close()).await.unwrap();
    }
}

/// As the broker's quorum queue does that has lost its majority: it stops the channel.
#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_does_not_answer_delays_no_copy_for_another() {
    let scene = Scene::new().await;
    let ids = scene.fill(200).await;
    let proxy = Proxy::start(broker_addr()).await;
    let settings = scene.settings().confirm_timeout(Duration::from_secs(60));
    let retry = Retry::attach(proxy.url(&scene.url()), "work", settings).await.unwrap();
    let channel = scene.connection.create_channel().await.unwrap();
    proxy.freeze(Some(BURIED));
    let rejects_ten = |job: &Job| match job.id() {
        id if id < "0010" => Err(reject(anyhow!("never")).into()),
        _ => Err(anyhow!("not now")),
    };
    let _running = settle_all(&retry, consume(&channel, "work", 200).await, rejects_ten);
    let retried: BTreeSet<String> =
        ids.iter().filter(|id| id.as_str() >= "0010").cloned().collect();
    eventually("the others are retried", PATIENCE, async || scene.journal.handed_off() == retried)
        .await;
    assert_eq!(scene.journal.undecided(), 0);

    proxy.freeze(None);
    proxy.cut().await;
    eventually("all are handed off", PATIENCE, async || scene.journal.handed_off() == ids).await;
    within("close", retry.close()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hand_off_that_does_not_succeed_delays_no_other() {
    let scene = Scene::new().await;
    let ids = scene.fill(300).await;
    let users = Proxy::start(broker_addr()).await;
    // With two slots, one that were kept by each stuck hand-off would block all others.
    let settings = scene.settings().hand_offs(2);
    let retry = Retry::attach(scene.url(), "work", settings).await.unwrap();
    let full = json!({ "max-length": 1, "overflow": "reject-publish" });
    scene.vhost.api().set_policy("full", r"^work\.buried$", 10, &full);
    fill_up(&scene, BURIED).await;

    let connection = connect(&users.url(&scene.url())).await;
    let channel = connection.create_channel().await.unwrap();
    let rejects_ten = |job: &Job| match job.id() {
        id if id < "0010" => Err(reject(anyhow!("never")).into()),
        _ => Err(anyhow!("not now")),
    };
    let _running = settle_all(&retry, consume(&channel, "work", 300).await, rejects_ten);
    // Two at a time, and those that are refused come between: it takes some time.
    eventually("the lane holds the others", 3 * PATIENCE, async || {
        count(&scene.channel, LANE).await == 290
    })
    .await;
    eventually("290 are acked", PATIENCE, async || users.acks() == 290).await;
    assert_eq!(scene.look(BURIED).await.iter().filter(|id| *id != FILLING).count(), 0);

    scene.vhost.api().delete_policy("full");
    all_are_handed_off_and_acked(&scene, &ids, &users).await;
    within("close", retry.close()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn settle_returns_before_the_confirm_and_its_receipt_after() {
    let scene = Scene::new().await;
    scene.fill(1).await;
    let publishing = Proxy::start(broker_addr()).await;
    let settings = scene.settings().confirm_timeout(Duration::from_secs(60));
    let retry = Retry::attach(publishing.url(&scene.url()), "work", settings).await.unwrap();
    publishing.swallow_confirms(true);
    let channel = scene.connection.create_channel().await.unwrap();
    let delivery = next(&mut consume(&channel, "work", 1).await).await;
    let job = retry.accept(delivery).await.unwrap().expect("a job to run");
    let mut receipt = within("settle", job.settle(Err(anyhow!("no")))).await.unwrap().into_future();
    scene.holds(LANE, 1).await;
    assert!((&mut receipt).now_or_never().is_none(), "the broker has it, but did not say so");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_confirm_timeout_beyond_what_the_clock_can_hold_is_none() {
    let scene = Scene::new().await;
    let ids = scene.fill(3).await;
    let settings = scene.settings().confirm_timeout(Duration::MAX);
    let retry = Retry::attach(scene.url(), "work", settings).await.unwrap();
    let channel = scene.connection.create_channel().await.unwrap();
    let mut consumer = consume(&channel, "work", 3).await;
    for _ in 0..3 {
        let job = next_job(&retry, &mut consumer).await;
        let receipt = within("settle", job.settle(Err(anyhow!("no")))).await.unwrap();
        within("its receipt", receipt.into_future()).await;
    }
    assert_eq!(scene.journal.handed_off(), ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_copy_follows_on_a_connection_that_left_one_undecided() {
    const SLOTS: usize = 4;
    let scene = Scene::new().await;
    let ids = scene.fill(40).await;
    let publishing = Proxy::start(broker_addr()).await;
    let settings = scene.settings().hand_offs(SLOTS).confirm_timeout(Duration::from_secs(2));
    let retry = Retry::attach(publishing.url(&scene.url()), "work", settings).await.unwrap();
    let channel = scene.connection.create_channel().await.unwrap();
    let mut consumer = consume(&channel, "work", 40).await;
    let mut jobs = Vec::new();
    for _ in 0..40 {
        jobs.push(next_job(&retry, &mut consumer).await);
    }
    let first = within("settle", jobs.pop().unwrap().settle(Err(anyhow!("no")))).await.unwrap();
    within("its receipt", first.into_future()).await;
    publishing.freeze(Some(LANE));
    let settle = |job: UnsettledJob| tokio::spawn(job.settle(Err(anyhow!("no"))));
    let settling: Vec<_> = jobs.into_iter().map(settle).collect();
    let sent = async || publishing.publishes() == 1 + SLOTS as u64;
    eventually("the slots are taken", PATIENCE, sent).await;
    // The channel that met it stays frozen, and another works.
    publishing.freeze(None);
    for settle in settling {
        within("settle", settle).await.unwrap().unwrap();
    }
    eventually("all are handed off", PATIENCE, async || scene.journal.handed_off() == ids).await;
    assert_eq!(scene.journal.undecided(), SLOTS);
}

/// As in a loop that runs many settles at a time, and waits for a receipt meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_settle_that_is_not_polled_keeps_no_slot_from_others() {
    let scene = Scene::new().await;
    let ids = scene.fill(4).await;
    let publishing = Proxy::start(broker_addr()).await;
    let settings = scene.settings().hand_offs(1).confirm_timeout(Duration::from_secs(60));
    let retry = Retry::attach(publishing.url(&scene.url()), "work", settings).await.unwrap();
    let channel = scene.connection.create_channel().await.unwrap();
    let mut consumer = consume(&channel, "work", 4).await;
    let mut jobs = Vec::new();
    for _ in 0..4 {
        let job = next_job(&retry, &mut consumer).await;
        jobs.push(job);
    }
    let mut settling = jobs.into_iter().map(|job| Box::pin(job.settle(Err(anyhow!("no")))));
    // From then on the way is open.
    let first = within("settle", settling.next().unwrap()).await.unwrap();
    within("its receipt", first.into_future()).await;

    publishing.swallow_confirms(true);
    let in_flight = within("settle", settling.next().unwrap()).await.unwrap();
    let mut waiting: Vec<_> = settling.collect();
    for settle in &mut waiting {
        assert!(settle.now_or_never().is_none(), "the only slot is taken");
    }
    eventually("one is in flight", PATIENCE, async || publishing.confirms_swallowed() == 1).await;
    publishing.swallow_confirms(false);
    publishing.cut().await;
    within("its receipt", in_flight.into_future()).await;
    eventually("all are handed off", PATIENCE, async || scene.journal.handed_off() == ids).await;
    within("close", retry.close()).await.unwrap();
    for settle in waiting {
        assert!(settle.now_or_never().is_some(), "accepted meanwhile");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_handed_off_although_its_settle_was_dropped_while_it_waited_for_a_slot() {
    let scene = Scene::new().await;
    let ids = scene.fill(3).await;
    let publishing = Proxy::start(broker_addr()).await;
    let settings = scene.settings().hand_offs(1).confirm_timeout(Duration::from_secs(60));
    let retry = Retry::attach(publishing.url(&scene.url()), "work", settings).await.unwrap();
    publishing.swallow_confirms(true);
    let channel = scene.connection.create_channel().await.unwrap();
    let mut consumer = consume(&channel, "work", 3).await;
    for first in [true, false, false] {
        let job = next_job(&retry, &mut consumer).await;
        let accepted = job.settle(Err(anyhow!("no"))).now_or_never();
        assert!(accepted.is_none() || first, "the only slot is taken");
    }
    eventually("one is in flight", PATIENCE, async || publishing.confirms_swallowed() == 1).await;
    publishing.swallow_confirms(false);
    publishing.cut().await;
    eventually("all are handed off", PATIENCE, async || scene.journal.handed_off() == ids).await;
    within("close", retry.close()).await.unwrap();
}
