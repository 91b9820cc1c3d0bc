//! A job that ends its process is buried, and none of those that were in hand with it. The workers
//! are real processes, which a supervisor starts again.

use crate::support::{
    Journal, PATIENCE, Proxy, Scene, WORK, broker_addr, count, eventually, table, text, type_name,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin_retry::{
    Builder, Event, Handle, Jitter, Job, QueueType, Resumed, RetryConsumer, RetryPolicy, Settings,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{File, OpenOptions},
    io::Write,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::sync::watch;

const CHILD: &str = "LAPIN_RETRY_TEST_CRASH_LOOP";
const JOBS: usize = 1_000;
const PREFETCH: usize = 100;
/// In place of a job that ends its process: handlers take long.
const HANGING: &str = "hanging";
const NONE: &str = "none";
/// A thousand jobs, and a dozen starts of a process.
const LONG: Duration = Duration::from_secs(60);

fn settings() -> Settings {
    Settings::new(RetryPolicy::new([600]).jitter(Jitter::None))
}

/// The worker's process: runs jobs until it is killed, or until it meets the job that aborts it.
async fn work(order: &str) {
    let (url, rest) = order.split_once('\n').expect("an address");
    let (notes, poison) = rest.split_once('\n').expect("a file");
    let notes: PathBuf = notes.into();
    let (poison, open) = (poison.to_owned(), move || append(&notes));
    let (file, events) = (open(), open());
    let file = Arc::new(file);
    let handle = RetryConsumer::builder(url, WORK)
        .settings(settings().on_event(move |event| {
            if let Event::Suspected { job, crashes, .. } = event {
                note(&events, &format!("suspected {} {crashes}", job.id()));
            }
        }))
        .handler(move |job: Job| {
            let (file, poison) = (Arc::clone(&file), poison.clone());
            async move {
                let steps = crate::support::steps(job.properties().headers().as_ref());
                note(&file, &format!("run {} {steps}", job.id()));
                // All that were prefetched have begun.
                tokio::time::sleep(Duration::from_millis(if poison == NONE { 1 } else { 20 }))
                    .await;
                if poison.split(' ').any(|id| id == job.id()) {
                    std::process::abort();
                }
                match poison.as_str() {
                    HANGING => tokio::time::sleep(Duration::from_secs(2)).await,
                    NONE => {}
                    _ => tokio::time::sleep(Duration::from_millis(20)).await,
                }
                note(&file, &format!("done {}", job.id()));
                Ok(())
            }
        })
        .start()
        .await
        .unwrap();
    handle.stopped().await.unwrap();
}

fn append(path: &PathBuf) -> File {
    OpenOptions::new().create(true).append(true).open(path).expect("the notes")
}

/// One write, so that no other writer's comes between.
fn note(mut file: &File, line: &str) {
    file.write_all(format!("{line}\n").as_bytes()).expect("noted");
}

/// Starts the calling test once more in a process of its own, as often as is asked.
struct Supervisor {
    address: String,
    notes: PathBuf,
    child: Child,
    deaths: usize,
}

impl Supervisor {
    fn start(scene: &Scene, poison: &str) -> Self {
        Self::start_by(&scene.url(), scene, poison)
    }

    /// By way of this address.
    fn start_by(url: &str, scene: &Scene, poison: &str) -> Self {
        let file = format!("{}.{:08x}.notes", scene.vhost.name(), rand::random::<u32>());
        let notes = std::env::temp_dir().join(file);
        append(&notes);
        let address = format!("{url}\n{}", notes.display());
        let child = Self::spawn(&address, poison);
        Self { address, notes, child, deaths: 0 }
    }

    fn spawn(address: &str, poison: &str) -> Child {
        let this = std::thread::current().name().expect("the test's name").to_owned();
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &this, "--nocapture"])
            .env(CHILD, format!("{address}\n{poison}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    /// Starts the worker again if it died.
    fn look(&mut self, poison: &str) {
        if self.child.try_wait().unwrap().is_some() {
            self.deaths += 1;
            self.child = Self::spawn(&self.address, poison);
        }
    }

    /// Kills the worker with SIGKILL.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn notes(&self) -> Notes {
        let mut notes = Notes::default();
        let text = std::fs::read_to_string(&self.notes).unwrap();
        // The last line may be half written.
        for line in text.rsplit_once('\n').map_or("", |(whole, _)| whole).lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let (id, number) = (words[1].to_owned(), || words[2].parse::<i64>().unwrap());
            match words[0] {
                "done" => drop(notes.done.insert(id)),
                "run" => notes.runs.entry(id).or_default().push(number()),
                "suspected" => notes.suspected.entry(id).or_default().push(number()),
                other => panic!("{other}"),
            }
        }
        notes
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.notes);
    }
}

/// What the workers noted, by jobs.
#[derive(Debug, Default)]
struct Notes {
    done: BTreeSet<String>,
    /// The steps towards the delivery limit at each start of its handler.
    runs: BTreeMap<String, Vec<i64>>,
    /// After how many crashes it was sent back to be run alone.
    suspected: BTreeMap<String, Vec<i64>>,
}

/// The broker misses a process that died only after `missed`.
async fn one_poisonous_job_among_many(kind: QueueType, at: usize, missed: Duration) {
    if let Ok(order) = std::env::var(CHILD) {
        return work(&order).await;
    }
    let scene = Scene::of(kind).await;
    let mut ids = scene.fill(JOBS).await;
    let poison = format!("{at:04}");
    ids.remove(&poison);
    let proxy = Proxy::start(broker_addr()).await;
    proxy.linger(missed);
    let mut supervisor = Supervisor::start_by(&proxy.url(&scene.url()), &scene, &poison);
    let began = Instant::now();
    eventually("the others are done", LONG, async || {
        supervisor.look(&poison);
        supervisor.notes().done == ids
    })
    .await;
    eventually("the poisonous one is buried", LONG, async || {
        supervisor.look(&poison);
        scene.vhost.api().queue("work.buried").is_some()
            && count(&scene.channel, "work.buried").await == 1
    })
    .await;
    let took = began.elapsed();
    scene.unacked(0).await;

    let notes = supervisor.notes();
    let buried = scene.buried(1).await;
    let properties = &buried[&poison].properties;
    let told = |name: &str| text(properties, name).unwrap_or_default();
    assert_eq!(told("buried-reason"), "crash-loop");
    assert_eq!(told("retry-error-kind"), "crash");
    assert!(told("retry-error").contains("while it ran this job alone"), "{properties:?}");
    assert_eq!(notes.suspected[&poison], [0, 1, 2]);
    // A quorum queue has to tell three times that it was in hand, a classic one once.
    let company = if kind == QueueType::Quorum { 3 } else { 1 };
    let runs = &notes.runs[&poison];
    let (ran, deaths) = (runs.len(), supervisor.deaths);
    assert_eq!((ran, deaths), (company + 3, company + 3), "with so many steps each: {runs:?}");
    let innocent = |id: &&String| **id != poison;
    let steps = notes.runs.iter().filter(|(id, _)| **id != poison).flat_map(|(_, runs)| runs).max();
    let twice = notes.suspected.iter().filter(|(id, crashes)| innocent(id) && crashes.len() > 1);
    let twice: Vec<_> = twice.collect();
    assert!(twice.is_empty(), "innocents that were taken for suspects twice: {twice:?}");
    let suspects = notes.suspected.len();
    println!(
        "{} at {at}: {} deaths, {suspects} suspects, at most {} steps, {took:?}",
        type_name(kind),
        supervisor.deaths,
        steps.unwrap()
    );
    assert!(suspects <= PREFETCH, "{suspects} suspects");
    assert!(*steps.unwrap() <= 3, "{steps:?} steps of 20");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_at_the_head_of_a_quorum_queue_that_aborts_its_process_is_buried_and_no_other() {
    one_poisonous_job_among_many(QueueType::Quorum, 0, Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_amid_the_prefetched_of_a_quorum_queue_that_aborts_its_process_is_buried_and_no_other()
 {
    one_poisonous_job_among_many(QueueType::Quorum, 50, Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_at_the_head_of_a_classic_queue_that_aborts_its_process_is_buried_and_no_other() {
    one_poisonous_job_among_many(QueueType::Classic, 0, Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_amid_the_prefetched_of_a_classic_queue_that_aborts_its_process_is_buried_and_no_other()
 {
    one_poisonous_job_among_many(QueueType::Classic, 50, Duration::ZERO).await;
}

/// What it had comes back amid what the next process gives back.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_of_a_process_that_is_missed_late_is_buried_after_as_many_deaths() {
    one_poisonous_job_among_many(QueueType::Quorum, 50, Duration::from_millis(300)).await;
}

/// Of several workers each has its neighbours, and what one dies of the next one gets.
#[tokio::test(flavor = "multi_thread")]
async fn two_poisonous_jobs_are_buried_by_three_workers_and_no_other() {
    if let Ok(order) = std::env::var(CHILD) {
        return work(&order).await;
    }
    for kind in [QueueType::Quorum, QueueType::Classic] {
        let scene = Scene::of(kind).await;
        let mut ids = scene.fill(JOBS).await;
        let poisonous: BTreeSet<String> = ["0050".to_owned(), "0500".to_owned()].into();
        ids.retain(|id| !poisonous.contains(id));
        let mut workers = [(); 3].map(|()| Supervisor::start(&scene, "0050 0500"));
        let done = |workers: &[Supervisor]| -> BTreeSet<String> {
            workers.iter().flat_map(|worker| worker.notes().done).collect()
        };
        eventually("the others are done", 2 * LONG, async || {
            workers.iter_mut().for_each(|worker| worker.look("0050 0500"));
            done(&workers) == ids
        })
        .await;
        eventually("the poisonous ones are buried", 2 * LONG, async || {
            workers.iter_mut().for_each(|worker| worker.look("0050 0500"));
            count(&scene.channel, "work.buried").await == 2
        })
        .await;
        let deaths: Vec<usize> = workers.iter().map(|worker| worker.deaths).collect();
        // Three in isolation for each job, and up to three in company for each job and worker.
        let total: usize = deaths.iter().sum();
        assert!((6..=24).contains(&total), "{}: {deaths:?} deaths", type_name(kind));
        scene.unacked(0).await;
        assert_eq!(scene.buried(2).await.into_keys().collect::<BTreeSet<_>>(), poisonous);
    }
}

/// What a worker has in hand when it is killed looks like its crash. It ran among others.
async fn ten_kills_of_workers_with_a_backlog_bury_nothing(kind: QueueType) {
    if let Ok(order) = std::env::var(CHILD) {
        return work(&order).await;
    }
    let scene = Scene::of(kind).await;
    let ids = scene.fill(JOBS + PREFETCH).await;
    let mut supervisor = Supervisor::start(&scene, HANGING);
    for restart in 1..=10 {
        let before: usize = supervisor.notes().runs.values().map(Vec::len).sum();
        eventually("it runs many", PATIENCE, async || {
            supervisor.notes().runs.values().map(Vec::len).sum::<usize>() >= before + 90
        })
        .await;
        supervisor.kill();
        supervisor.look(if restart < 10 { HANGING } else { NONE });
    }
    eventually("all are done", LONG, async || supervisor.notes().done == ids).await;
    scene.unacked(0).await;
    assert_eq!(count(&scene.channel, "work.buried").await, 0);
    let notes = supervisor.notes();
    let crashes = notes.suspected.values().flatten().max();
    let steps = notes.runs.values().flatten().max();
    let suspects = notes.suspected.len();
    assert!(suspects <= 10 * PREFETCH, "{suspects} suspects in ten kills");
    assert_eq!(crashes, Some(&0), "none was alone when its worker was killed");
    assert!(*steps.unwrap() <= 2, "{steps:?} steps of 20");
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_kills_of_workers_with_a_backlog_in_a_quorum_queue_bury_nothing() {
    ten_kills_of_workers_with_a_backlog_bury_nothing(QueueType::Quorum).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_kills_of_workers_with_a_backlog_in_a_classic_queue_bury_nothing() {
    ten_kills_of_workers_with_a_backlog_bury_nothing(QueueType::Classic).await;
}

/// Consumers whose few handlers wait at a gate; each is as good as a process of its own.
struct Shop {
    scene: Scene,
    gate: watch::Sender<bool>,
}

impl Shop {
    async fn with_a_backlog(kind: QueueType) -> (Self, BTreeSet<String>) {
        let scene = Scene::of(kind).await;
        let ids = scene.fill(JOBS).await;
        (Self { scene, gate: watch::Sender::new(false) }, ids)
    }

    async fn start(&self, journal: &Journal) -> Handle {
        let builder: Builder = RetryConsumer::builder(self.scene.url(), WORK);
        let gate = self.gate.clone();
        let consumer = builder
            .settings(settings().on_event(self.scene.journal.hook()).on_event(journal.hook()))
            .concurrency(2)
            .handler(move |_: Job| {
                let mut gate = gate.subscribe();
                async move {
                    gate.wait_for(|open| *open).await?;
                    Ok(())
                }
            });
        consumer.start().await.unwrap()
    }

    /// All is done, and nothing is buried.
    async fn ends(&self, ids: &BTreeSet<String>) {
        self.gate.send_replace(true);
        eventually("all are done", LONG, async || self.scene.journal.finished() == *ids).await;
        self.scene.holds(WORK, 0).await;
        assert_eq!(count(&self.scene.channel, "work.buried").await, 0);
    }
}

fn suspected(journal: &Journal) -> usize {
    journal.count(|event| matches!(event, Event::Suspected { .. }))
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_process_gave_back_itself_is_no_suspect() {
    for kind in [QueueType::Quorum, QueueType::Classic] {
        let (shop, ids) = Shop::with_a_backlog(kind).await;
        let handle = shop.start(&Journal::default()).await;
        // These two it keeps.
        let at_work = async || shop.gate.receiver_count() == 2;
        eventually("two are at work", PATIENCE, at_work).await;
        for _ in 0..10 {
            eventually("it has taken many", PATIENCE, async || {
                count(&shop.scene.channel, WORK).await as usize <= JOBS - PREFETCH
            })
            .await;
            handle.pause();
            shop.scene.holds(WORK, JOBS - 2).await;
            handle.resume();
        }
        shop.ends(&ids).await;
        assert_eq!(suspected(&shop.scene.journal), 0);
        assert!(!shop.scene.journal.resumed().contains(&Resumed::NoSuspects));
        handle.shutdown(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_workers_that_stop_one_after_the_other_and_give_back_a_backlog_bury_nothing() {
    for kind in [QueueType::Quorum, QueueType::Classic] {
        let (shop, ids) = Shop::with_a_backlog(kind).await;
        for _ in 0..10 {
            let handle = shop.start(&Journal::default()).await;
            eventually("they wait in its hands", PATIENCE, async || {
                count(&shop.scene.channel, WORK).await as usize <= JOBS - PREFETCH
            })
            .await;
            handle.shutdown(Duration::ZERO).await;
            shop.scene.holds(WORK, JOBS).await;
        }
        let handle = shop.start(&Journal::default()).await;
        shop.ends(&ids).await;
        // A classic queue says of each job that was given back that it is redelivered, and no more.
        let most = if kind == QueueType::Quorum { PREFETCH } else { JOBS };
        let suspects = suspected(&shop.scene.journal);
        assert!(suspects <= most, "{}: {suspects} suspects", type_name(kind));
        handle.shutdown(Duration::from_secs(5)).await;
    }
}

/// What one gives back the other takes for a suspect, for it cannot know.
#[tokio::test(flavor = "multi_thread")]
async fn workers_that_give_back_to_each_other_do_not_go_one_by_one_for_ever() {
    for kind in [QueueType::Quorum, QueueType::Classic] {
        let (shop, ids) = Shop::with_a_backlog(kind).await;
        let journals = [Journal::default(), Journal::default()];
        let handles = [shop.start(&journals[0]).await, shop.start(&journals[1]).await];
        for pause in 1..=10 {
            let paused = &handles[pause % 2];
            paused.pause();
            shop.gate.send_replace(true);
            eventually("it goes on", PATIENCE, async || {
                shop.scene.journal.done().len() >= pause * 50
            })
            .await;
            shop.gate.send_replace(false);
            paused.resume();
        }
        shop.ends(&ids).await;
        let one_by_one = shop.scene.journal.count(|e| matches!(e, Event::OneByOne { .. }));
        let suspects = suspected(&shop.scene.journal);
        // Once for each pause at most, and not for all that came back.
        assert!(one_by_one <= 10, "{}: {one_by_one} times one by one", type_name(kind));
        assert!(suspects <= 2 * PREFETCH, "{}: {suspects} suspects", type_name(kind));
        for handle in handles {
            handle.shutdown(Duration::from_secs(5)).await;
        }
    }
}

/// It would starve if it went to the tail of a queue that never runs empty.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_is_to_run_alone_runs_where_it_is_met() {
    let scene = Scene::new().await;
    let before = scene.fill(100).await;
    let headers = table([
        ("retry-queue", AMQPValue::LongString(WORK.into())),
        ("retry-crash-count", AMQPValue::LongLongInt(1)),
    ]);
    scene.job("alone", headers, b"job").await;
    for id in 0..300 {
        scene.job(&format!("behind {id}"), FieldTable::default(), b"job").await;
    }
    let (journal, running) = (scene.journal.clone(), Arc::new(AtomicUsize::new(0)));
    let beside = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&beside);
    let handle = RetryConsumer::builder(scene.url(), WORK)
        .settings(settings().on_event(scene.journal.hook()))
        .prefetch(10)
        .handler(move |job: Job| {
            let (journal, running, seen) =
                (journal.clone(), Arc::clone(&running), Arc::clone(&seen));
            async move {
                journal.begin(&job);
                let others = running.fetch_add(1, SeqCst);
                tokio::time::sleep(Duration::from_millis(5)).await;
                if job.id() == "alone" {
                    seen.fetch_add(others + running.load(SeqCst) - 1, SeqCst);
                }
                running.fetch_sub(1, SeqCst);
                Ok(())
            }
        })
        .start()
        .await
        .unwrap();
    scene.journal.is_done("alone").await;
    handle.shutdown(Duration::from_secs(5)).await;
    let attempts = scene.journal.attempts();
    let place = attempts.iter().position(|attempt| attempt.job.id() == "alone").unwrap();
    assert!(place <= before.len(), "after {place} others");
    assert_eq!(beside.load(SeqCst), 0, "others ran beside it");
}
