//! One run: publish, disturb, wait until all is done or buried, account.

use crate::{
    account::{Account, Corpse, Ledger, Resumed},
    faults::{Fault, Schedule, Site, Tally},
    fleet::{Fleet, WORKERS},
    journal::{Journal, Reader},
    nodes::Nodes,
    plan::{BURIED, WORK},
    publisher::Published,
    support::{Proxy, Vhost, count, declare_work_queue},
    worker::Orders,
};
use futures_util::StreamExt;
use lapin::{
    message::Delivery,
    options::{BasicAckOptions, BasicQosOptions},
    types::AMQPValue,
};
use lapin_retry::QueueType;
use std::{
    env, fs,
    path::PathBuf,
    process,
    sync::{Arc, Mutex, atomic::AtomicU32},
    time::Duration,
};
use tokio::time::{Instant, sleep};

#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) seed: u64,
    pub(crate) jobs: u32,
    pub(crate) faults_for: Duration,
    /// How long the broker is paused.
    pub(crate) pause: Duration,
    /// How many jobs fail at once, for a fault to meet them.
    pub(crate) burst: u32,
    pub(crate) classic_lanes: bool,
    /// None for all that can be done here.
    pub(crate) faults: Option<Vec<Fault>>,
}

#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) seed: u64,
    pub(crate) account: Account,
    tally: Tally,
    resumed: Resumed,
    /// How long it took after the last fault.
    drained: Duration,
    /// What was still in queues when the run gave up waiting.
    pub(crate) left: Vec<String>,
    attempts: usize,
    ended: usize,
    folder: PathBuf,
}

/// At-least-once dead-lettering that had no answer is tried again after three minutes.
const PATIENCE: Duration = Duration::from_secs(210);
/// The broker's statistics lag by 5 s.
const SETTLED: Duration = Duration::from_secs(8);

pub(crate) async fn run(options: Options) -> Report {
    let vhost = Vhost::new().await;
    let nodes = Nodes::new(vhost.url());
    let folder = env::temp_dir().join(format!("fault-run-{}-{}", options.seed, process::id()));
    fs::create_dir_all(&folder).expect("a folder for the journal");
    let book = folder.join("journal");
    let journal = Journal::open(&book, "driver");
    {
        let connection = crate::support::connect(&vhost.url()).await;
        let channel = connection.create_channel().await.expect("a channel");
        declare_work_queue(&channel, WORK, QueueType::Quorum).await;
    }
    let mut proxies = Vec::new();
    for _ in 0..WORKERS {
        proxies.push(Proxy::start(nodes.addresses.join(",")).await);
    }
    let orders = Orders {
        name: String::new(),
        url: String::new(),
        journal: book.clone(),
        seed: options.seed,
        variant: 0,
        classic_lanes: options.classic_lanes,
        own_loop: false,
    };
    let fleet = Fleet::new(&vhost.url(), &proxies, orders, &folder.join("workers.log"));
    let fleet = Arc::new(tokio::sync::Mutex::new(fleet));
    let published = Arc::new(Published::default());
    let ledger = Arc::new(Mutex::new(Ledger::default()));
    let tending = tokio::spawn({
        let fleet = Arc::clone(&fleet);
        async move {
            loop {
                fleet.lock().await.tend();
                sleep(Duration::from_millis(500)).await;
            }
        }
    });
    let reading = tokio::spawn(read(book.clone(), Arc::clone(&ledger), Arc::clone(&published)));
    let site = Site {
        api: vhost.api().clone(),
        vhost: vhost.name().to_owned(),
        nodes: nodes.clone(),
        proxies,
        fleet: Arc::clone(&fleet),
        published: Arc::clone(&published),
        journal,
        classic_lanes: options.classic_lanes,
        pause: options.pause,
        burst: options.burst,
        variant: AtomicU32::new(0),
    };
    let kinds = options.faults.clone().unwrap_or_else(|| match nodes.are_ours() {
        true => Fault::all(&nodes),
        false => Fault::FROM_OUTSIDE.to_vec(),
    });
    let schedule = Schedule::new(kinds, options.seed);
    let end = Instant::now() + options.faults_for;
    let disturbing = async {
        let tally = site.disturb(schedule, end).await;
        published.enough();
        tally
    };
    let (tally, ()) = tokio::join!(
        disturbing,
        published.publish(&nodes, &book, options.jobs, options.faults_for)
    );
    println!("         no more faults");
    let calm = Instant::now();
    let left = drain(&site, &ledger, &published).await;
    let drained = calm.elapsed();
    tending.abort();
    for slot in 0..WORKERS {
        fleet.lock().await.stop(slot, &site.journal).await;
    }
    let corpses = exhume(&site).await;
    // All is written by now.
    reading.abort();
    let mut whole = Ledger::default();
    Reader::open(&book).read().into_iter().for_each(|line| whole.add(line));
    let ended = fleet.lock().await.ended;
    Report {
        seed: options.seed,
        account: whole.account(options.seed, &published.ids(), &corpses),
        tally,
        resumed: whole.resumed(),
        drained,
        left,
        attempts: whole.attempts(),
        ended,
        folder,
    }
}

/// Reads along, and shows how it goes.
async fn read(book: PathBuf, ledger: Arc<Mutex<Ledger>>, published: Arc<Published>) {
    let mut reader = Reader::open(&book);
    for round in 1.. {
        sleep(Duration::from_secs(1)).await;
        let lines = reader.read();
        let mut ledger = ledger.lock().expect("no panic inside");
        lines.into_iter().for_each(|line| ledger.add(line));
        if round % 5 == 0 {
            let (jobs, done, buried) = (published.count(), ledger.done(), ledger.buried());
            let open = jobs.saturating_sub(done + buried);
            println!("{round:>5} s  published {jobs}, done {done}, buried {buried}, open {open}");
        }
    }
}

/// Waits until no queue but the buried one has any job, and no worker holds one. What is left if
/// that takes too long.
async fn drain(site: &Site, ledger: &Mutex<Ledger>, published: &Published) -> Vec<String> {
    let started = Instant::now();
    let mut empty_since = started;
    loop {
        sleep(Duration::from_millis(500)).await;
        let mut left = Vec::new();
        for name in site.api.queues().into_iter().filter(|name| name != BURIED) {
            let queue = site.api.queue(&name);
            let Some(messages) = queue.as_ref().and_then(|queue| queue["messages"].as_u64()) else {
                // No statistics yet.
                left.push(format!("{name}: {}", queue.unwrap_or_default()));
                continue;
            };
            if messages > 0 {
                let unacked = queue.and_then(|queue| queue["messages_unacknowledged"].as_u64());
                left.push(format!("{name}: {messages}, {} unacked", unacked.unwrap_or(0)));
            }
        }
        if !left.is_empty() {
            empty_since = Instant::now();
        }
        if empty_since.elapsed() >= SETTLED {
            return Vec::new();
        }
        if started.elapsed() >= PATIENCE {
            let ledger = ledger.lock().expect("no panic inside");
            let open = published.count().saturating_sub(ledger.done() + ledger.buried());
            left.push(format!("{open} jobs open"));
            return left;
        }
    }
}

/// Takes all out of the buried queue.
async fn exhume(site: &Site) -> Vec<Corpse> {
    let (_connection, channel) = site.nodes.channel().await.expect("a broker");
    if site.api.queue(BURIED).is_none() {
        return Vec::new();
    }
    let messages = count(&channel, BURIED).await as usize;
    channel.basic_qos(500, BasicQosOptions::default()).await.expect("a prefetch");
    let consuming =
        channel.basic_consume(BURIED.into(), "".into(), Default::default(), Default::default());
    let mut consumer = consuming.await.expect("a consumer");
    let mut corpses = Vec::new();
    while corpses.len() < messages {
        let next = tokio::time::timeout(Duration::from_secs(20), consumer.next());
        let delivery = next.await.expect("in time").expect("no end").expect("no error");
        corpses.push(corpse(&delivery));
        delivery.ack(BasicAckOptions::default()).await.expect("acked");
    }
    corpses
}

fn corpse(delivery: &Delivery) -> Corpse {
    let headers = delivery.properties.headers().as_ref();
    let text = |name: &str| match headers.and_then(|headers| headers.inner().get(name)) {
        Some(AMQPValue::LongString(text)) => text.to_string(),
        other => format!("{other:?}"),
    };
    let id = delivery.properties.message_id().as_ref().map_or("?", |id| id.as_str()).to_owned();
    Corpse { id, reason: text("buried-reason") }
}

impl Report {
    pub(crate) fn is_clean(&self) -> bool {
        self.account.lost.is_empty() && self.left.is_empty()
    }

    /// What the exit status says.
    pub(crate) fn status(&self) -> i32 {
        match (self.account.lost.is_empty(), self.left.is_empty()) {
            (true, true) => 0,
            (false, true) => 1,
            (_, false) => 2,
        }
    }

    pub(crate) fn print(&self) {
        let account = &self.account;
        println!("\nfaults");
        for (fault, times) in &self.tally {
            println!("  {times:>5}  {fault:?}");
        }
        println!("duplicates, and what followed from them");
        for (source, (first, later)) in &account.duplicates {
            println!("  {first:>5} {later:>5}  {source}");
        }
        for (who, times) in
            [("some worker", &self.resumed.any), ("each worker", &self.resumed.each)]
        {
            let Some(most) = times.last() else { continue };
            let median = times[times.len() / 2];
            let late = times.iter().filter(|&&ms| ms > 10_000).count();
            println!(
                "{who} runs jobs again after the broker's return: median {median} ms, most {most} \
                 ms, {late} of {} over 10 s",
                times.len()
            );
        }
        for who in &self.resumed.stuck {
            println!("stuck after the broker's return: {who}");
        }
        if account.kept_back > 0 {
            println!("{} jobs came out of their lanes a minute late or more", account.kept_back);
        }
        println!(
            "{} attempts; {} s from the last fault to the end; {} workers ended by themselves",
            self.attempts,
            self.drained.as_secs(),
            self.ended
        );
        for what in self.account.oddities.iter().take(20) {
            println!("odd: {what}");
        }
        if self.account.oddities.len() > 20 {
            println!("odd: and {} more", self.account.oddities.len() - 20);
        }
        for id in account.lost.iter().take(20) {
            println!("lost: {id}");
        }
        for left in &self.left {
            println!("still there: {left}");
        }
        if self.is_clean() && self.account.oddities.is_empty() {
            let _ = fs::remove_dir_all(&self.folder);
        } else {
            println!("the journal: {}", self.folder.join("journal").display());
        }
        println!(
            "jobs={} done={} buried={} lost={} duplicates={} seed={}",
            account.jobs,
            account.done,
            account.buried,
            account.lost.len(),
            account.duplicates(),
            self.seed
        );
    }
}
