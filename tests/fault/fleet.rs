//! The workers' processes. One that ends is started again.

use crate::{
    journal::{Journal, Verb},
    plan::HEARTBEAT,
    support::{Proxy, parse_uri},
    worker::{BLOCKS, Kind, OVERSTAYS, Orders, STOP},
};
use std::{
    env,
    fs::OpenOptions,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};
use tokio::{
    io::AsyncWriteExt,
    process::{Child, Command},
    time::timeout,
};

/// What each worker is.
const KINDS: [Kind; WORKERS] = [Kind::Built, Kind::Patient, Kind::Built, Kind::OwnLoop];
pub(crate) const WORKERS: usize = 4;
/// Whose handlers can outlast the consumer timeout.
const PATIENT: [usize; 2] = [1, 3];
/// Whose heartbeats a blocked runtime misses.
const SHORT_HEARTBEAT: [usize; 2] = [2, 3];
/// The status of a worker that found no broker at its start.
pub(crate) const NOT_STARTED: i32 = 3;

#[derive(Debug)]
pub(crate) struct Fleet {
    /// Each worker reaches the broker through a proxy of its own.
    urls: Vec<String>,
    /// All but what differs from worker to worker.
    orders: Orders,
    workers: Vec<Option<Child>>,
    names: Vec<String>,
    started: usize,
    /// How many found no broker at their start.
    pub(crate) not_started: usize,
    /// Those that ended otherwise, or did not end when they were told to, and how.
    pub(crate) died: Vec<String>,
    log: PathBuf,
}

impl Fleet {
    pub(crate) fn new(url: &str, proxies: &[Proxy], orders: Orders, log: &Path) -> Self {
        Self {
            urls: proxies.iter().enumerate().map(|(slot, proxy)| via(proxy, url, slot)).collect(),
            workers: proxies.iter().map(|_| None).collect(),
            names: proxies.iter().map(|_| String::new()).collect(),
            orders,
            started: 0,
            not_started: 0,
            died: Vec::new(),
            log: log.to_owned(),
        }
    }

    /// Starts those that are missing.
    pub(crate) fn tend(&mut self) {
        for slot in 0..self.workers.len() {
            if let Some(worker) = &mut self.workers[slot] {
                let Some(status) = worker.try_wait().expect("a status") else { continue };
                self.note_end(slot, status);
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
            kind: KINDS[slot],
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

    /// Three handlers at most of a worker outlast the consumer timeout.
    pub(crate) async fn overstay(&mut self, some: usize) {
        self.write(PATIENT[some % PATIENT.len()], &[OVERSTAYS].repeat(1 + some % 3)).await;
    }

    /// Handlers block all threads of a worker's runtime.
    pub(crate) async fn block(&mut self, some: usize) {
        self.write(SHORT_HEARTBEAT[some % SHORT_HEARTBEAT.len()], &[BLOCKS]).await;
    }

    async fn write(&mut self, slot: usize, orders: &[u8]) {
        let input = self.workers[slot].as_mut().and_then(|worker| worker.stdin.as_mut());
        if let Some(input) = input {
            // It may have ended.
            let _ = input.write_all(orders).await;
        }
    }

    fn note_end(&mut self, slot: usize, status: ExitStatus) {
        match status.code() {
            Some(NOT_STARTED) => self.not_started += 1,
            _ => self.died.push(format!("{}: {status}", self.names[slot])),
        }
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
        match timeout(Duration::from_secs(45), worker.wait()).await {
            Ok(status) => {
                let status = status.expect("a status");
                if !status.success() {
                    self.note_end(slot, status);
                }
            }
            Err(_) => {
                self.died.push(format!("{}: did not stop", self.names[slot]));
                journal.note_of(&self.names[slot], Verb::Killed);
                let _ = worker.kill().await;
            }
        }
    }
}

fn via(proxy: &Proxy, url: &str, slot: usize) -> String {
    let mut uri = parse_uri(&proxy.url(url));
    if SHORT_HEARTBEAT.contains(&slot) {
        uri.query.heartbeat = Some(HEARTBEAT.as_secs() as u16);
    }
    uri.to_string()
}
