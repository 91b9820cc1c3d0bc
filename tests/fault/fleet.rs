//! The workers' processes. One that ends is started again.

use crate::{
    journal::{Journal, Verb},
    support::Proxy,
    worker::{Orders, STOP},
};
use std::{
    env,
    fs::OpenOptions,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};
use tokio::{
    io::AsyncWriteExt,
    process::{Child, Command},
    time::timeout,
};

pub(crate) const WORKERS: usize = 4;

#[derive(Debug)]
pub(crate) struct Fleet {
    /// Each worker reaches the broker through a proxy of its own.
    urls: Vec<String>,
    /// All but what differs from worker to worker.
    orders: Orders,
    workers: Vec<Option<Child>>,
    names: Vec<String>,
    started: usize,
    /// How many ended by themselves.
    pub(crate) ended: usize,
    log: PathBuf,
}

impl Fleet {
    pub(crate) fn new(url: &str, proxies: &[Proxy], orders: Orders, log: &Path) -> Self {
        Self {
            urls: proxies.iter().map(|proxy| proxy.url(url)).collect(),
            workers: proxies.iter().map(|_| None).collect(),
            names: proxies.iter().map(|_| String::new()).collect(),
            orders,
            started: 0,
            ended: 0,
            log: log.to_owned(),
        }
    }

    /// Starts those that are missing.
    pub(crate) fn tend(&mut self) {
        for slot in 0..self.workers.len() {
            if let Some(worker) = &mut self.workers[slot] {
                if let Ok(None) = worker.try_wait() {
                    continue;
                }
                self.ended += 1;
            }
            self.start(slot);
        }
    }

    fn start(&mut self, slot: usize) {
        self.started += 1;
        self.names[slot] = format!("w{slot}.{}", self.started);
        let orders = Orders {
            name: self.names[slot].clone(),
            url: self.urls[slot].clone(),
            own_loop: slot == WORKERS - 1,
            ..self.orders.clone()
        };
        let log = OpenOptions::new().create(true).append(true).open(&self.log).expect("a log");
        let worker = Command::new(env::current_exe().expect("this program"))
            .arg("worker")
            .arg(serde_json::to_string(&orders).expect("JSON"))
            // Some panic as planned.
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn();
        self.workers[slot] = Some(worker.expect("a worker"));
    }

    /// Kills a worker at once, and starts another in its place.
    pub(crate) async fn kill(&mut self, slot: usize, journal: &Journal) {
        if let Some(mut worker) = self.workers[slot].take() {
            journal.note_of(&self.names[slot], Verb::Killed);
            let _ = worker.kill().await;
        }
        self.start(slot);
    }

    /// Replaces all workers, one after the other, by some with another policy. Each may finish
    /// what it has begun.
    pub(crate) async fn replace(&mut self, variant: u32, journal: &Journal) {
        self.orders.variant = variant;
        for slot in 0..self.workers.len() {
            self.stop(slot, journal).await;
            self.start(slot);
        }
    }

    pub(crate) async fn stop(&mut self, slot: usize, journal: &Journal) {
        let Some(mut worker) = self.workers[slot].take() else { return };
        let mut input = worker.stdin.take().expect("a pipe");
        journal.note_of(&self.names[slot], Verb::Stopped);
        // It may have ended already.
        let _ = input.write_all(&[STOP]).await;
        if timeout(Duration::from_secs(45), worker.wait()).await.is_err() {
            journal.note_of(&self.names[slot], Verb::Killed);
            let _ = worker.kill().await;
        }
    }
}
