//! The faults: which, in which order, and how each is done.

use crate::{
    fleet::{Fleet, WORKERS},
    journal::{Journal, Verb, now_ms},
    nodes::Nodes,
    plan::{BURIED, WORK, policy},
    publisher::Published,
    support::{Management, Proxy},
    worker::lane_type,
};
use lapin::options::QueuePurgeOptions;
use lapin_retry::Topology;
use rand::{RngExt, SeedableRng, rngs::SmallRng, seq::SliceRandom};
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{
    sync::Mutex,
    time::{Instant, sleep},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    KillWorker,
    KillBroker,
    PauseBroker,
    CloseConnections,
    Stall,
    Cut,
    CutAfterBytes,
    SwallowConfirms,
    MemoryAlarm,
    /// All workers get another policy; the old one's lanes are deleted when they are empty.
    DeleteOldLanes,
    MoveLeader,
    /// Handlers outlast the consumer timeout.
    Overstay,
    /// Handlers block all threads of a worker for longer than its heartbeat.
    BlockRuntime,
    /// Little bandwidth, and large jobs.
    SlowWire,
    /// Somebody looks at the buried queue and at lanes in the management UI, again and again.
    Look,
    /// No fault of the broker's or of ours: it shows that a loss is found.
    PurgeLane,
}

impl Fault {
    /// Without control over the nodes.
    pub(crate) const FROM_OUTSIDE: &'static [Self] = &[
        Self::KillWorker,
        Self::CloseConnections,
        Self::Stall,
        Self::Cut,
        Self::CutAfterBytes,
        Self::SwallowConfirms,
        Self::DeleteOldLanes,
        Self::BlockRuntime,
        Self::SlowWire,
        Self::Look,
    ];
    /// A short consumer timeout takes a setting of the node, or one that it looks at often.
    const TO_NODES: &'static [Self] =
        &[Self::KillBroker, Self::PauseBroker, Self::MemoryAlarm, Self::Overstay];

    pub(crate) fn all(nodes: &Nodes) -> Vec<Self> {
        let mut all = Self::FROM_OUTSIDE.to_vec();
        // The most dangerous comes twice.
        all.extend_from_slice(Self::TO_NODES);
        all.extend([Self::KillBroker, Self::KillWorker]);
        if nodes.is_cluster() {
            all.extend([Self::MoveLeader, Self::MoveLeader]);
        }
        all
    }
}

/// How dense the faults are, and how long things are waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Between two faults, at most.
    pub(crate) quiet_ms: u64,
    /// How long the broker is paused.
    pub(crate) pause: Duration,
    /// Of the broker's statistics.
    pub(crate) lag: Duration,
    /// At-least-once dead-lettering that had no answer is tried again within.
    pub(crate) dead_lettering: Duration,
}

impl Pace {
    /// The broker's own.
    pub(crate) const USUAL: Self = Self {
        quiet_ms: 3_000,
        pause: Duration::from_secs(20),
        lag: Duration::from_secs(5),
        dead_lettering: Duration::from_secs(180),
    };
    /// Of nodes that `scripts/fault-run --quick` starts.
    pub(crate) const QUICK: Self = Self {
        quiet_ms: 1_000,
        pause: Duration::from_secs(5),
        lag: Duration::from_secs(1),
        dead_lettering: Duration::from_secs(15),
    };
}

/// What faults are done to.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) nodes: Nodes,
    pub(crate) vhost: String,
    pub(crate) api: Management,
    pub(crate) proxies: Vec<Proxy>,
    pub(crate) fleet: Arc<Mutex<Fleet>>,
    pub(crate) published: Arc<Published>,
    pub(crate) journal: Journal,
    pub(crate) classic_lanes: bool,
    pub(crate) pace: Pace,
    pub(crate) burst: u32,
    /// Of the workers' policy.
    pub(crate) variant: AtomicU32,
}

/// Draws from a shuffled deck: each kind comes before any comes again.
pub(crate) struct Schedule {
    kinds: Vec<Fault>,
    deck: Vec<Fault>,
    seed: u64,
    drawn: u64,
}

impl Schedule {
    pub(crate) fn new(kinds: Vec<Fault>, seed: u64) -> Self {
        Self { kinds, deck: Vec::new(), seed, drawn: 0 }
    }

    /// The next, and the chance that is its own: no other draws more or less for what it finds.
    pub(crate) fn next(&mut self) -> (Fault, SmallRng) {
        self.drawn += 1;
        let mut rng = SmallRng::seed_from_u64(self.seed.wrapping_mul(1_000_003) + self.drawn);
        if self.deck.is_empty() {
            self.deck.clone_from(&self.kinds);
            self.deck.shuffle(&mut rng);
        }
        (self.deck.pop().expect("some kind"), rng)
    }
}

/// How often each was done.
pub(crate) type Tally = BTreeMap<Fault, usize>;

impl Site {
    /// Does faults, with some quiet between them, until the time is over.
    pub(crate) async fn disturb(&self, mut schedule: Schedule, until: Instant) -> Tally {
        let mut tally = Tally::new();
        if self.nodes.are_ours() {
            self.until_settled().await;
        }
        while tally.is_empty() || Instant::now() < until {
            let (fault, mut rng) = schedule.next();
            sleep(millis(&mut rng, self.pace.quiet_ms / 10, self.pace.quiet_ms)).await;
            println!("{}  {fault:?}", stamp());
            self.fault(fault, &mut rng).await;
            *tally.entry(fault).or_default() += 1;
        }
        for proxy in &self.proxies {
            proxy.stall(false);
            proxy.swallow_confirms(false);
            proxy.throttle(None);
        }
        tally
    }

    async fn fault(&self, fault: Fault, rng: &mut SmallRng) {
        let node = rng.random_range(0..self.nodes.addresses.len());
        match fault {
            Fault::KillWorker => {
                let slot = rng.random_range(0..WORKERS);
                self.fleet.lock().await.kill(slot, &self.journal).await;
            }
            Fault::KillBroker => self.kill_broker(node, rng).await,
            Fault::PauseBroker => {
                self.felt(async {
                    self.nodes.order(node, "pause").await;
                    sleep(self.pace.pause).await;
                    self.nodes.order(node, "resume").await;
                })
                .await;
            }
            Fault::CloseConnections => {
                for connection in self.api.connections() {
                    let name = connection["user_provided_name"].as_str().unwrap_or_default();
                    let ours = name.starts_with("lapin-retry") || name == "own loop";
                    if let Some(id) = connection["name"].as_str()
                        && ours
                        && rng.random_bool(0.7)
                    {
                        self.api.close_connection(id);
                    }
                }
            }
            Fault::Stall => {
                let some = self.some_proxies(rng);
                some.iter().for_each(|proxy| proxy.stall(true));
                sleep(millis(rng, 500, 5_000)).await;
                some.iter().for_each(|proxy| proxy.stall(false));
            }
            Fault::Cut => {
                for proxy in self.some_proxies(rng) {
                    proxy.cut().await;
                }
            }
            Fault::CutAfterBytes => {
                for proxy in self.some_proxies(rng) {
                    proxy.cut_after(rng.random_range(1..100_000));
                }
                sleep(millis(rng, 500, 2_000)).await;
            }
            Fault::SwallowConfirms => {
                let some = self.some_proxies(rng);
                some.iter().for_each(|proxy| proxy.swallow_confirms(true));
                sleep(millis(rng, 500, 4_000)).await;
                some.iter().for_each(|proxy| proxy.swallow_confirms(false));
            }
            Fault::MemoryAlarm => {
                self.felt(async {
                    let set = "rabbitmqctl set_vm_memory_high_watermark";
                    self.nodes.order(node, &format!("{set} absolute 1MB")).await;
                    sleep(millis(rng, 2_000, 8_000)).await;
                    self.nodes.order(node, &format!("{set} 0.8")).await;
                })
                .await;
            }
            Fault::DeleteOldLanes => self.delete_old_lanes().await,
            Fault::MoveLeader => self.felt(self.move_leader(node)).await,
            Fault::Overstay => self.fleet.lock().await.overstay(rng.random_range(0..12)).await,
            Fault::BlockRuntime => self.fleet.lock().await.block(rng.random_range(0..12)).await,
            Fault::SlowWire => {
                self.published.large(40);
                let some = self.some_proxies(rng);
                let rate = rng.random_range(100_000..400_000);
                some.iter().for_each(|proxy| proxy.throttle(Some(rate)));
                sleep(millis(rng, 3_000, 8_000)).await;
                some.iter().for_each(|proxy| proxy.throttle(None));
            }
            Fault::Look => self.look(rng),
            Fault::PurgeLane => self.purge_a_lane().await,
        }
    }

    /// In the middle of expiry: a lane has just begun to give back a burst of jobs.
    async fn kill_broker(&self, node: usize, rng: &mut SmallRng) {
        self.until_settled().await;
        self.published.burst(self.burst);
        sleep(millis(rng, 700, 2_000)).await;
        self.felt(async {
            self.nodes.order(node, "kill").await;
            if self.nodes.is_cluster() {
                // How the others do without it.
                sleep(millis(rng, 500, 4_000)).await;
            }
            self.nodes.order(node, "start").await;
        })
        .await;
        self.nodes.until_up(node).await;
    }

    /// RabbitMQ, killed within a second or so of the declaration of a quorum queue, comes back with one
    /// that takes no messages until it is deleted: that is not what is tried here. The lanes for busy
    /// jobs are declared at the first of them, all at once.
    async fn until_settled(&self) {
        for _ in 0..40 {
            let queues = self.api.queues();
            let known = |name: &String| {
                self.api.queue(name).is_some_and(|queue| queue["messages"].is_number())
            };
            if queues.iter().any(|name| name.contains(".busy.")) && queues.iter().all(known) {
                return sleep(self.pace.lag).await;
            }
            sleep(Duration::from_millis(500)).await;
        }
        println!("{}  not all queues have statistics", stamp());
    }

    async fn felt(&self, fault: impl Future<Output = ()>) {
        self.journal.note(Verb::Fault);
        fault.await;
        self.nodes.until_back().await;
        self.journal.note(Verb::Back);
    }

    fn some_proxies(&self, rng: &mut SmallRng) -> Vec<&Proxy> {
        let mut all: Vec<&Proxy> = self.proxies.iter().collect();
        all.shuffle(rng);
        all.truncate(rng.random_range(1..=WORKERS));
        all
    }

    fn lanes(&self, variant: u32) -> Vec<String> {
        let topology = Topology::new(WORK, policy(variant), lane_type(self.classic_lanes));
        let topology = topology.expect("a possible policy");
        let names = topology.queues().map(|queue| queue.name.clone());
        names.filter(|name| name != BURIED).collect()
    }

    async fn delete_old_lanes(&self) {
        let variant = self.variant.load(SeqCst);
        self.variant.store(variant + 1, SeqCst);
        self.fleet.lock().await.replace(variant + 1, &self.journal).await;
        let old = self.lanes(variant);
        let lag = self.pace.lag;
        let started = Instant::now();
        let mut empty_since = started;
        while empty_since.elapsed() < lag + Duration::from_secs(2) {
            sleep(Duration::from_millis(500)).await;
            let waiting = |name: &String| {
                self.api.queue(name).and_then(|queue| queue["messages"].as_u64()).unwrap_or(1)
            };
            if old.iter().map(waiting).sum::<u64>() > 0 {
                empty_since = Instant::now();
            }
            // The broker may keep some back until it tries again.
            if started.elapsed() > 3 * lag + Duration::from_secs(10) {
                return println!("{}  the old lanes are not empty yet, and stay", stamp());
            }
        }
        let Some((_connection, channel)) = self.nodes.channel().await else { return };
        for lane in old {
            let deleted = channel.queue_delete(lane.as_str().into(), Default::default()).await;
            if !matches!(deleted, Ok(0)) {
                println!("{}  the lane {lane} was not empty: {deleted:?}", stamp());
            }
        }
    }

    /// The leaders of the work queue, the buried queue and all lanes.
    async fn move_leader(&self, to: usize) {
        let (vhost, name) = (&self.vhost, &self.nodes.names[to]);
        let lanes = self.lanes(self.variant.load(SeqCst));
        let queues = [WORK, BURIED].into_iter().chain(lanes.iter().map(String::as_str));
        let queues: Vec<String> = queues.map(|queue| format!("<<\"{queue}\">>")).collect();
        // Without a space: an order is cut in words.
        let order = format!(
            "rabbitmqctl eval [rabbit_quorum_queue:transfer_leadership(Queue,'{name}')||\
             Name<-[{}],\
             {{ok,Queue}}<-[rabbit_amqqueue:lookup(rabbit_misc:r(<<\"{vhost}\">>,queue,Name))]].",
            queues.join(",")
        );
        self.nodes.order(to, &order).await;
    }

    /// More often than a quorum queue of RabbitMQ's defaults lets a message be delivered.
    fn look(&self, rng: &mut SmallRng) {
        let mut queues = self.lanes(self.variant.load(SeqCst));
        queues.shuffle(rng);
        queues.truncate(2);
        queues.push(BURIED.to_owned());
        let (mut looks, mut seen) = (0, 0);
        for _ in 0..12 {
            for mode in ["ack_requeue_true", "reject_requeue_true"] {
                for queue in &queues {
                    if let Some(messages) = self.api.look(queue, 100, mode) {
                        looks += 1;
                        seen += messages;
                    }
                }
            }
        }
        println!("{}  {looks} looks showed {seen} messages", stamp());
    }

    /// Throws away what is in a lane.
    async fn purge_a_lane(&self) {
        self.published.burst(self.burst);
        let (_connection, channel) = self.nodes.channel().await.expect("a broker");
        for _ in 0..200 {
            for lane in self.lanes(self.variant.load(SeqCst)) {
                let purged =
                    channel.queue_purge(lane.as_str().into(), QueuePurgeOptions::default()).await;
                if purged.expect("a lane") > 0 {
                    return;
                }
            }
            sleep(Duration::from_millis(50)).await;
        }
        panic!("no job came to a lane");
    }
}

fn millis(rng: &mut SmallRng, from: u64, to: u64) -> Duration {
    Duration::from_millis(rng.random_range(from..to))
}

/// Seconds of the day, as in the journal.
fn stamp() -> String {
    let ms = now_ms();
    format!("{:>5}.{}", ms / 1000 % 86_400, ms / 100 % 10)
}
