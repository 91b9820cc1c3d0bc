//! Publishes the jobs, all the while, and does not rest before each is confirmed.

use crate::{
    journal::Journal,
    nodes::Nodes,
    plan::{BURST, LARGE, WORK, body},
};
use lapin::{
    BasicProperties, Channel, Confirmation, Connection,
    options::{BasicPublishOptions, ConfirmSelectOptions},
};
use std::{
    collections::{BTreeSet, VecDeque},
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout};

const BATCH: usize = 300;
const PATIENCE: Duration = Duration::from_secs(15);

/// What has been published and what is to be.
#[derive(Debug, Default)]
pub(crate) struct Published {
    confirmed: Mutex<BTreeSet<String>>,
    bursts: AtomicU32,
    large: AtomicU32,
    enough: AtomicBool,
}

impl Published {
    pub(crate) fn count(&self) -> usize {
        self.confirmed.lock().expect("no panic inside").len()
    }

    pub(crate) fn ids(&self) -> BTreeSet<String> {
        self.confirmed.lock().expect("no panic inside").clone()
    }

    /// So many jobs more, as fast as can be, that fail once.
    pub(crate) fn burst(&self, jobs: u32) {
        self.bursts.fetch_add(jobs, SeqCst);
    }

    /// So many large jobs more, that fail once.
    pub(crate) fn large(&self, jobs: u32) {
        self.large.fetch_add(jobs, SeqCst);
    }

    /// There will be no more bursts.
    pub(crate) fn enough(&self) {
        self.enough.store(true, SeqCst);
    }

    /// Publishes `jobs` evenly `over` this time, and the bursts; returns when there will be no more
    /// and all are confirmed.
    pub(crate) async fn publish(&self, nodes: &Nodes, journal: &Path, jobs: u32, over: Duration) {
        let journal = Journal::open(journal, "publisher");
        let started = Instant::now();
        let (mut due, mut next, mut extra) = (VecDeque::new(), 0, 0);
        let mut line: Option<(Connection, Channel)> = None;
        loop {
            let enough = self.enough.load(SeqCst);
            let part = (started.elapsed().as_secs_f64() / over.as_secs_f64()).min(1.0);
            let wanted = (f64::from(jobs) * part) as u32;
            due.extend((next..wanted).map(|n| format!("j{n:06}")));
            next = wanted;
            for (begins, jobs) in [(BURST, &self.bursts), (LARGE, &self.large)] {
                for _ in 0..jobs.swap(0, SeqCst) {
                    due.push_back(format!("{begins}{extra:06}"));
                    extra += 1;
                }
            }
            if due.is_empty() {
                if enough && part >= 1.0 {
                    return;
                }
                sleep(Duration::from_millis(50)).await;
                continue;
            }
            let Some((_, channel)) = &line else {
                line = confirming(nodes).await;
                continue;
            };
            let batch: Vec<String> = due.drain(..due.len().min(BATCH)).collect();
            let missing = self.send(channel, batch).await;
            if !missing.is_empty() {
                line = None;
                for id in missing.into_iter().rev() {
                    journal.published_again(&id);
                    due.push_front(id);
                }
            }
        }
    }

    /// Those that are not confirmed.
    async fn send(&self, channel: &Channel, batch: Vec<String>) -> Vec<String> {
        let end = Instant::now() + PATIENCE;
        let mut sent = Vec::new();
        for id in batch {
            let options = BasicPublishOptions { mandatory: true, ..Default::default() };
            let properties = BasicProperties::default()
                .with_message_id(id.as_str().into())
                .with_delivery_mode(2);
            let body = body(&id);
            let publish = channel.basic_publish("".into(), WORK.into(), options, &body, properties);
            let confirm = match timeout(end - Instant::now(), publish).await {
                Ok(Ok(confirm)) => Some(confirm),
                _ => None,
            };
            sent.push((id, confirm));
        }
        let mut missing = Vec::new();
        for (id, confirm) in sent {
            let answer = match confirm {
                Some(confirm) => timeout(end - Instant::now(), confirm).await.ok(),
                None => None,
            };
            match answer {
                Some(Ok(Confirmation::Ack(None))) => {
                    self.confirmed.lock().expect("no panic inside").insert(id);
                }
                _ => missing.push(id),
            }
        }
        missing
    }
}

async fn confirming(nodes: &Nodes) -> Option<(Connection, Channel)> {
    let Some((connection, channel)) = nodes.channel().await else {
        sleep(Duration::from_millis(200)).await;
        return None;
    };
    let selecting = channel.confirm_select(ConfirmSelectOptions::default());
    match timeout(Duration::from_secs(3), selecting).await {
        Ok(Ok(())) => Some((connection, channel)),
        _ => None,
    }
}
