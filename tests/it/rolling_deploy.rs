//! Old and new workers with other levels, jitter and lanes run side by side on one queue, and what
//! an old one left in its lanes comes back without it.

use std::{collections::HashMap, time::Duration};

use crate::support::{
    End, Journal, PATIENCE, Scene, Vhost, as_the_body_says, count, eventually, publish,
};
use lapin::{BasicProperties, Channel};
use lapin_retry::{
    BuriedReason, Handle, Jitter, QueueType, RetryConsumer, RetryPolicy, Settings, Topology,
};

const QUEUE: &str = "orders";
const GRACE: Duration = Duration::from_secs(5);

async fn worker(vhost: &Vhost, name: &str, policy: &RetryPolicy, journal: &Journal) -> Handle {
    RetryConsumer::builder(vhost.url(), QUEUE)
        .settings(Settings::new(policy.clone()).worker(name))
        // So that neither takes all the jobs.
        .prefetch(5)
        .on_event(journal.hook())
        .handler(journal.handler(as_the_body_says))
        .start()
        .await
        .unwrap()
}

fn failures_of(job: u32) -> u32 {
    job % 8
}

async fn publish_jobs(channel: &Channel, jobs: u32, failures: impl Fn(u32) -> u32) {
    let each = (0..jobs).map(|job| {
        let properties = BasicProperties::default().with_message_id(job.to_string().into());
        let body = failures(job).to_string();
        async move { publish(channel, "", QUEUE, properties, body.as_bytes()).await }
    });
    futures_util::future::join_all(each).await;
}

/// The queues that the policy makes beside the work queue, but for the buried queue.
fn lanes(policy: &RetryPolicy) -> Vec<String> {
    let topology = Topology::new(QUEUE, policy, QueueType::Quorum).unwrap();
    topology.queues().skip(1).map(|queue| queue.name.clone()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn old_and_new_workers_side_by_side_lose_nothing_and_end_every_job_once() {
    const JOBS: u32 = 320;
    let scene = Scene::with(QUEUE, QueueType::Quorum).await;
    let (vhost, channel) = (&scene.vhost, &scene.channel);
    // Some lanes belong to both.
    let old = RetryPolicy::new(["100ms", "200ms", "300ms"]).lanes(4);
    let levels = ["100ms", "250ms", "300ms", "350ms", "400ms"];
    let new = RetryPolicy::new(levels).jitter(Jitter::Full).lanes(8);
    let journals = [Journal::default(), Journal::default()];
    let workers = [
        worker(vhost, "old", &old, &journals[0]).await,
        worker(vhost, "new", &new, &journals[1]).await,
    ];

    publish_jobs(channel, JOBS, failures_of).await;
    let ends = || journals.iter().flat_map(Journal::ends).collect::<Vec<_>>();
    let patience = 3 * PATIENCE;
    eventually("all jobs end", patience, async || ends().len() >= JOBS as usize).await;
    for worker in workers {
        worker.shutdown(GRACE).await;
    }
    for journal in &journals {
        journal.assert_no_trouble();
        assert!(!journal.retries().is_empty(), "both workers took part");
    }

    let mut attempts: HashMap<String, Vec<(u32, &str)>> = HashMap::new();
    for (name, journal) in ["old", "new"].into_iter().zip(&journals) {
        for attempt in journal.attempts() {
            let job = attempt.job;
            attempts.entry(job.id().to_owned()).or_default().push((job.retry_count(), name));
        }
    }
    let ends: Vec<_> = ends();
    assert_eq!(ends.len(), JOBS as usize);
    let by_id: HashMap<_, _> = ends.into_iter().collect();
    let mut buried = 0;
    for job in 0..JOBS {
        let (id, failures) = (job.to_string(), failures_of(job));
        let attempts = attempts.get_mut(&id).unwrap_or_else(|| panic!("job {id} was lost"));
        attempts.sort_unstable();
        let counts: Vec<u32> = attempts.iter().map(|(count, _)| *count).collect();
        assert_eq!(counts, (0..counts.len() as u32).collect::<Vec<_>>(), "job {id}");
        let (last, by) = attempts[attempts.len() - 1];
        match by_id[&id] {
            End::Done => assert_eq!(last, failures, "job {id}"),
            End::Buried(reason) => {
                buried += 1;
                assert_eq!(reason, BuriedReason::Exhausted);
                // Whoever buries does it by their own levels.
                let levels = if by == "old" { 3 } else { 5 };
                assert!(last >= levels && last < failures, "job {id} by {by} at {last}");
            }
        }
        assert!(by_id[&id] == End::Done || failures > 3, "job {id} had levels left");
        assert!(by_id[&id] != End::Done || failures <= 5, "job {id} had no levels left");
    }
    assert_eq!(count(channel, "orders.buried").await, buried);
    for queue in lanes(&old).iter().chain(&lanes(&new)).map(String::as_str).chain([QUEUE]) {
        assert_eq!(count(channel, queue).await, 0, "{queue}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lanes_of_an_old_policy_drain_after_its_worker_is_gone() {
    const JOBS: u32 = 40;
    let scene = Scene::with(QUEUE, QueueType::Quorum).await;
    let (vhost, channel) = (&scene.vhost, &scene.channel);

    let old = RetryPolicy::new(["4s"]).lanes(4);
    let journal = Journal::default();
    let worker_of_old = worker(vhost, "old", &old, &journal).await;
    publish_jobs(channel, JOBS, |job| [1, 2, 99][job as usize % 3]).await;
    let all = JOBS as usize;
    eventually("all are in lanes", PATIENCE, async || journal.retries().len() == all).await;
    worker_of_old.shutdown(GRACE).await;
    journal.assert_no_trouble();
    assert_eq!(journal.attempts().len(), all);

    eventually("they come back by themselves", PATIENCE, async || {
        count(channel, QUEUE).await == JOBS
    })
    .await;
    for lane in lanes(&old) {
        assert_eq!(count(channel, &lane).await, 0, "{lane}");
    }

    // The new worker goes on where the old one stopped: one failure is charged.
    let new = RetryPolicy::new(["100ms", "200ms"]).jitter(Jitter::Full).lanes(2);
    let journal = Journal::default();
    let worker_of_new = worker(vhost, "new", &new, &journal).await;
    eventually("all jobs end", PATIENCE, async || journal.ends().len() >= all).await;
    worker_of_new.shutdown(GRACE).await;
    journal.assert_no_trouble();
    assert_eq!(journal.ends().len(), all);
    for job in 0..JOBS {
        let counts = journal.attempts_of(&job.to_string());
        let counts: Vec<u32> = counts.iter().map(|attempt| attempt.job.retry_count()).collect();
        let expected: &[u32] = [&[1][..], &[1, 2], &[1, 2]][job as usize % 3];
        assert_eq!(counts, expected, "job {job}");
    }
    let exhausted = (0..JOBS).filter(|job| job % 3 == 2).count() as u32;
    assert_eq!(count(channel, "orders.buried").await, exhausted);
}
