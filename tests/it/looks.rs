//! An operator who looks at jobs destroys none and moves none.

use std::time::Duration;

use anyhow::anyhow;
use lapin_retry::{Event, Jitter, Job, QueueType, RetryConsumer, RetryPolicy, Settings, reject};
use serde_json::json;
use tokio::sync::watch;

use crate::support::{BURIED, LANE, PATIENCE, Scene, WORK, count, eventually, table, type_name};

/// How "Get messages" in the management UI puts back what it shows.
const MODES: [&str; 2] = ["ack_requeue_true", "reject_requeue_true"];
/// The broker's default delivery limit is 20.
const LOOKS: usize = 50;
const JOBS: usize = 3;

/// Looks at all jobs of a queue, so often.
fn look(scene: &Scene, queue: &str, mode: &str, looks: usize) {
    for look in 1..=looks {
        let jobs = scene.vhost.api().messages(queue, 10, mode);
        assert_eq!(jobs.len(), JOBS, "{queue}: look {look} with {mode}");
    }
}

/// The same in each mode.
fn look_often(scene: &Scene, queue: &str, looks: usize) {
    MODES.iter().for_each(|mode| look(scene, queue, mode, looks));
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_are_looked_at_fifty_times_in_each_mode_stay_where_they_are() {
    for kind in [QueueType::Quorum, QueueType::Classic] {
        let scene = Scene::new().await;
        scene.fill(2 * JOBS).await;
        let consumer = RetryConsumer::builder(scene.url(), WORK)
            .settings(scene.settings().queue_type(kind))
            .handler(|job: Job| async move {
                match job.id() {
                    id if id < "0003" => Err(anyhow!("not now")),
                    _ => Err(reject(anyhow!("never")).into()),
                }
            })
            .start()
            .await
            .unwrap();
        for queue in [LANE, BURIED] {
            scene.holds(queue, JOBS).await;
            let before = scene.look(queue).await;
            look_often(&scene, queue, LOOKS);
            scene.holds(queue, JOBS).await;
            assert_eq!(scene.look(queue).await, before, "{}", type_name(kind));
        }
        assert_eq!(count(&scene.channel, WORK).await, 0, "a waiting job came back early");
        assert_eq!(scene.journal.handed_off().len(), 2 * JOBS);
        consumer.shutdown(Duration::from_secs(5)).await;
    }
}

/// A look with "reject requeue" marks a job as delivered, and RabbitMQ 4.3 keeps that mark when the job
/// leaves the lane. It is no crash of a worker.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_lane_was_looked_at_runs_normally_after() {
    for kind in [QueueType::Quorum, QueueType::Classic] {
        let scene = Scene::of(kind).await;
        let journal = scene.journal.clone();
        let lane = "work.retry.00005s";
        let consumer = RetryConsumer::builder(scene.url(), WORK)
            .settings(
                Settings::new(RetryPolicy::new([5]).jitter(Jitter::None))
                    .on_event(scene.journal.hook()),
            )
            .handler(journal.handler(|_| 1))
            .start()
            .await
            .unwrap();
        let ids = scene.fill(JOBS).await;
        scene.holds(lane, JOBS).await;
        consumer.pause();
        look_often(&scene, lane, 4);
        // A classic queue passes a job on without the mark if a consumer waits for it.
        scene.holds(WORK, JOBS).await;
        consumer.resume();
        scene.journal.until_done(JOBS).await;
        assert_eq!(scene.journal.finished(), ids);
        assert_eq!(scene.journal.attempted(), 2 * JOBS, "{}", type_name(kind));
        let crashes = |event: &Event| {
            matches!(event, Event::Suspected { .. } | Event::OneByOne { .. } | Event::Buried { .. })
        };
        assert_eq!(scene.journal.count(crashes), 0, "{}", type_name(kind));
        // It started afresh, as a copy without the counts.
        let expected = if scene.vhost.api().version() >= (4, 3) { JOBS } else { 0 };
        eventually("the copies are reported", PATIENCE, async || {
            scene.journal.count(|event| matches!(event, Event::Returned { .. })) == expected
        })
        .await;
        scene.unacked(0).await;
        consumer.shutdown(Duration::from_secs(5)).await;
    }
}

/// RabbitMQ 4.3 counts the looks towards the limit of the work queue, which then drops a job at the
/// next nack. Another job keeps the worker busy meanwhile, so that these are given back unrun.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_whose_lane_was_looked_at_too_often_for_the_work_queue_survive_a_pause() {
    let scene = Scene::new().await;
    let (journal, open) = (scene.journal.clone(), watch::Sender::new(false));
    let (lane, gate) = ("work.retry.00005s", open.clone());
    let consumer = RetryConsumer::builder(scene.url(), WORK)
        .settings(
            Settings::new(RetryPolicy::new([5]).jitter(Jitter::None))
                .on_event(scene.journal.hook()),
        )
        .concurrency(1)
        .handler(move |job: Job| {
            journal.begin(&job);
            let mut gate = gate.subscribe();
            async move {
                if job.id() == "long" {
                    gate.wait_for(|open| *open).await?;
                } else if job.retry_count() == 0 {
                    return Err(anyhow!("not now"));
                }
                Ok(())
            }
        })
        .start()
        .await
        .unwrap();
    scene.fill(JOBS).await;
    scene.holds(lane, JOBS).await;
    // More than the broker's default limit.
    look(&scene, lane, "reject_requeue_true", 25);
    scene.job("long", table([]), b"job").await;
    scene.holds(lane, 0).await;
    scene.unacked(JOBS as u64 + 1).await;
    consumer.pause();
    scene.holds(WORK, JOBS).await;
    open.send_replace(true);
    consumer.resume();
    scene.journal.until_done(JOBS + 1).await;
    assert_eq!(scene.journal.finished().len(), JOBS + 1);
    assert_eq!(scene.journal.attempted(), 2 * JOBS + 1);
    scene.unacked(0).await;
    consumer.shutdown(Duration::from_secs(5)).await;
}

/// A policy limits the lane, and is lifted. A channel of RabbitMQ 3.10 that was nacked because of it
/// is nacked for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_lane_takes_jobs_again_once_the_limit_of_a_policy_is_lifted() {
    let scene = Scene::new().await;
    let consumer = RetryConsumer::builder(scene.url(), WORK)
        .settings(scene.settings())
        .handler(scene.journal.handler(|_| 1))
        .start()
        .await
        .unwrap();
    // The channel that publishes to the lane is open before.
    let before = scene.fill(1).await;
    eventually("it is in the lane", PATIENCE, async || scene.journal.handed_off() == before).await;
    let full = json!({ "max-length": 1, "overflow": "reject-publish" });
    scene.vhost.api().set_policy("full", r"^work\.retry\.", 10, &full);
    eventually("it applies", PATIENCE, async || {
        scene.vhost.api().queue(LANE).unwrap()["policy"] == "full"
    })
    .await;
    // A quorum queue takes a few more than the limit says.
    let mut ids = before;
    eventually("jobs are refused", PATIENCE, async || {
        let id = format!("{:04}", ids.len());
        scene.job(&id, table([]), b"job").await;
        ids.insert(id);
        scene.journal.refused() >= 10
    })
    .await;
    assert_eq!(scene.journal.undecided(), 0);
    scene.vhost.api().delete_policy("full");
    eventually("all are in the lane", PATIENCE, async || scene.journal.handed_off() == ids).await;
    scene.holds(LANE, ids.len()).await;
    scene.unacked(0).await;
    consumer.shutdown(Duration::from_secs(5)).await;
}
