//! One run: publish, disturb, wait until all is done or buried, account.

use crate::{
    account::{Account, Corpse, Ledger, Resumed},
    faults::{Fault, Pace, Schedule, Site, Tally},
    fleet::{Fleet, WORKERS},
    journal::{Journal, Reader},
    nodes::Nodes,
    plan::{BURIED, CONSUMER_TIMEOUT, WORK},
    publisher::Published,
    support::{Proxy, Vhost, count, table},
    worker::{Kind, Orders},
};
use futures_util::StreamExt;
use lapin::{
    message::Delivery,
    options::{BasicAckOptions, BasicQosOptions, QueueDeclareOptions},
    types::AMQPValue,
};
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
    pub(crate) pace: Pace,
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
    /// Workers that found no broker at their start.
    not_started: usize,
    died: Vec<String>,
    folder: PathBuf,
}

/// What takes a while, even without any fault: levels, handlers that hang, pauses.
const UNHURRIED: Duration = Duration::from_secs(45);

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
        let mut arguments = table([("x-queue-type", AMQPValue::LongString("quorum".into()))]);
        if nodes.are_ours() {
            // RabbitMQ 3.10 has it for the node only.
            let timeout = CONSUMER_TIMEOUT.as_millis() as i64;
            arguments.insert("x-consumer-timeout".into(), AMQPValue::LongLongInt(timeout));
        }
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        channel.queue_declare(WORK.into(), durable, arguments).await.expect("a work queue");
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
        kind: Kind::Built,
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
        pace: options.pace,
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
    let mut left = drain(&site, &ledger, &published).await;
    let drained = calm.elapsed();
    tending.abort();
    for slot in 0..WORKERS {
        fleet.lock().await.stop(slot, &site.journal).await;
    }
    if left.is_empty() {
        left = ready(&site).await;
    }
    let corpses = exhume(&site).await;
    // All is written by now.
    reading.abort();
    let mut whole = Ledger::default();
    Reader::open(&book).read().into_iter().for_each(|line| whole.add(line));
    let fleet = fleet.lock().await;
    Report {
        seed: options.seed,
        account: whole.account(options.seed, &published.ids(), &corpses),
        tally,
        resumed: whole.resumed(),
        drained,
        left,
        attempts: whole.attempts(),
        not_started: fleet.not_started,
        died: fleet.died.clone(),
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
        let open = {
            let ledger = ledger.lock().expect("no panic inside");
            published.count().saturating_sub(ledger.done() + ledger.buried())
        };
        let mut left = Vec::new();
        for name in site.api.queues().into_iter().filter(|name| name != BURIED) {
            let queue = site.api.queue(&name);
            match queue.as_ref().and_then(|queue| queue["messages"].as_u64()) {
                Some(0) => {}
                Some(messages) => {
                    let unacked = queue.and_then(|queue| queue["messages_unacknowledged"].as_u64());
                    left.push(format!("{name}: {messages}, {} unacked", unacked.unwrap_or(0)));
                }
                // One that was declared just before a kill may never have any, nor take a message.
                None if open == 0 => {}
                None => left.push(format!("{name}: no statistics")),
            }
        }
        if !left.is_empty() {
            empty_since = Instant::now();
        }
        // On a busy machine the statistics lag by more: before a job counts as lost it is looked for.
        let quiet = Duration::from_secs(if open > 0 && site.nodes.are_ours() { 15 } else { 3 });
        if empty_since.elapsed() >= site.pace.lag + quiet {
            return Vec::new();
        }
        if started.elapsed() >= site.pace.dead_lettering + UNHURRIED {
            left.push(format!("{open} jobs open"));
            return left;
        }
    }
}

/// What is in queues although the statistics said that they are empty.
async fn ready(site: &Site) -> Vec<String> {
    let (_connection, channel) = site.nodes.channel().await.expect("a broker");
    let mut left = Vec::new();
    for name in site.api.queues().into_iter().filter(|name| name != BURIED) {
        // A queue that is dead since a kill gives no answer.
        if site.api.queue(&name).is_none_or(|queue| queue["messages"].is_null()) {
            continue;
        }
        let messages = count(&channel, &name).await;
        if messages > 0 {
            left.push(format!("{name}: {messages} after the end"));
        }
    }
    left
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
    /// What the exit status says.
    pub(crate) fn status(&self) -> i32 {
        match (&self.account.lost[..], &self.left[..], &self.misbehaved()[..]) {
            ([], [], []) => 0,
            ([_, ..], [], _) => 1,
            (_, [_, ..], _) => 2,
            _ => 3,
        }
    }

    /// What must not be, although no job is lost.
    pub(crate) fn misbehaved(&self) -> Vec<String> {
        let unattributed = self.account.unattributed();
        let unattributed =
            (unattributed > 0).then(|| format!("{unattributed} duplicates are unattributed"));
        let died = self.died.iter().map(|who| format!("a worker died: {who}"));
        let stuck = self.resumed.stuck.iter();
        let stuck = stuck.map(|who| format!("stuck after the broker's return: {who}"));
        unattributed.into_iter().chain(died).chain(stuck).collect()
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
        if account.kept_back > 0 {
            println!("{} jobs came out of their lanes a minute late or more", account.kept_back);
        }
        println!(
            "{} attempts; {} s from the last fault to the end; {} workers found no broker at first",
            self.attempts,
            self.drained.as_secs(),
            self.not_started
        );
        for what in self.misbehaved() {
            println!("wrong: {what}");
        }
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
        if self.status() == 0 && self.account.oddities.is_empty() {
            let _ = fs::remove_dir_all(&self.folder);
        } else {
            println!("the journal: {}", self.folder.join("journal").display());
        }
        println!(
            "jobs={} done={} buried={} lost={} duplicates={} unattributed={} seed={}",
            account.jobs,
            account.done,
            account.buried,
            account.lost.len(),
            account.duplicates(),
            account.unattributed(),
            self.seed
        );
    }
}
