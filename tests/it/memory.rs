//! What waits in lanes waits on the broker: the worker keeps nothing of it.
#![cfg(target_os = "linux")]

use crate::support::{PATIENCE, Scene, WORK, eventually};
use anyhow::anyhow;
use lapin::{BasicProperties, options::BasicPublishOptions};
use lapin_retry::{Jitter, Job, RetryConsumer, RetryPolicy};
use std::{
    process::{Child, Command},
    time::Duration,
};

const WORKER: &str = "LAPIN_RETRY_TEST_WORKER";
/// How many jobs wait in the end, if it is not 20,000.
const JOBS: &str = "LAPIN_RETRY_TEST_JOBS";
/// They make the buffers and channels that later ones use again.
const WARM_UP: usize = 2_000;
const MIB: u64 = 1 << 20;

/// A process of its own, whose memory is nobody else's.
struct Worker(Child);

impl Worker {
    fn start(url: &str) -> Self {
        let this = std::thread::current().name().expect("the test's name").to_owned();
        let command = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &this])
            .env(WORKER, url)
            .spawn();
        Self(command.unwrap())
    }

    /// Bytes that are resident.
    fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
        kib * 1024
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn fail_every_job(url: &str) {
    let consumer = RetryConsumer::builder(url, WORK)
        .policy(RetryPolicy::new([36_000]).jitter(Jitter::Equal))
        .handler(|_: Job| async { Err(anyhow!("no")) });
    consumer.start().await.unwrap().stopped().await.unwrap();
}

/// Publishes jobs of 100 bytes, and waits until all of them are in lanes.
async fn jobs(scene: &Scene, jobs: usize, waiting: usize) {
    let mut confirms = std::collections::VecDeque::new();
    for _ in 0..jobs {
        let (options, body) = (BasicPublishOptions::default(), [b'x'; 100]);
        let properties = BasicProperties::default().with_delivery_mode(2);
        let publish =
            scene.channel.basic_publish("".into(), WORK.into(), options, &body, properties);
        confirms.push_back(publish.await.unwrap());
        if confirms.len() > 1_000 {
            confirms.pop_front().unwrap().await.unwrap();
        }
    }
    for confirm in confirms {
        confirm.await.unwrap();
    }
    let patience = PATIENCE + Duration::from_millis(2 * jobs as u64);
    eventually("all wait in lanes", patience, async || {
        let mut there = 0;
        for queue in scene.vhost.api().queues() {
            if queue.starts_with("work.retry.") {
                there += crate::support::count(&scene.channel, &queue).await as usize;
            }
        }
        there == waiting
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_wait_in_lanes_cost_the_worker_no_memory() {
    if let Ok(url) = std::env::var(WORKER) {
        return fail_every_job(&url).await;
    }
    let scene = Scene::new().await;
    let more = std::env::var(JOBS).map_or(20_000, |jobs| jobs.parse().unwrap());
    let worker = Worker::start(&scene.url());
    jobs(&scene, WARM_UP, WARM_UP).await;
    let before = worker.memory();
    jobs(&scene, more, WARM_UP + more).await;
    let after = worker.memory();
    println!("{more} jobs: {before} bytes before, {after} after");
    let grown = after.saturating_sub(before);
    assert!(grown < 2 * MIB, "{before} bytes before, {after} after {more} jobs");
}
