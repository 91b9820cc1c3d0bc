//! A handler reports an outage: its job is returned unharmed, and the consumer waits.

use crate::{
    support::{PATIENCE, WORK, count, eventually, within},
    workshop::{Workshop, ms},
};
use lapin::BasicProperties;
use lapin_retry::{Builder, Event, Handle, Job, Resumed, RetryConsumer, outage};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::time::Instant;

const GRACE: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_reports_an_outage_comes_back_unharmed() {
    let shop = Workshop::in_an_outage().await;
    shop.jobs(1).await;
    let consumer = shop.consumer(ms(50), ms(100)).handler(shop.handler());
    let handle = consumer.start().await.unwrap();
    shop.until_calls(4).await;
    shop.provider.set_down(false);
    shop.until_done(1).await;
    handle.shutdown(GRACE).await;

    let calls = shop.journal.attempts();
    assert_eq!(calls[0].error_kind(), None);
    for call in &calls[1..] {
        assert_eq!((call.job.retry_count(), call.steps()), (0, 0), "{call:?}");
        assert_eq!(call.error_kind().as_deref(), Some("outage"));
    }
    let returned = |event: &Event| matches!(event, Event::Returned { .. });
    let returned = shop.journal.count(returned);
    assert_eq!(returned, calls.len() - 1, "each but the last, which succeeded");
    shop.is_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_waits_double_to_the_longest_each_is_told_and_each_ends_with_one_probe() {
    let shop = Workshop::in_an_outage().await;
    shop.jobs(30).await;
    let consumer = shop.consumer(ms(100), ms(800)).concurrency(1).handler(shop.handler());
    let handle = consumer.start().await.unwrap();
    shop.until_paused(6).await;
    let (calls, waits) = (shop.journal.attempts(), shop.journal.waits());
    handle.shutdown(GRACE).await;

    let told: Vec<_> = waits.iter().map(Duration::as_millis).collect();
    assert_eq!(told[..6], [100, 200, 400, 800, 800, 800]);
    // One call for each wait: the one that began it.
    assert_eq!(calls.len(), waits.len());
    for (pair, wait) in calls.windows(2).zip(&waits) {
        assert!(pair[1].started - pair[0].started >= *wait, "{wait:?} were told");
    }
}

/// A pause of the default 5 s to 5 min and ten minutes of outage, a hundred times as fast.
#[tokio::test(flavor = "multi_thread")]
async fn ten_minutes_of_outage_cost_the_calls_that_were_running_and_ten() {
    const RUNNING: usize = 20;
    let shop = Workshop::in_an_outage().await;
    shop.jobs(1000).await;
    shop.provider.open(false);
    let consumer = shop.consumer(ms(50), ms(3000)).concurrency(RUNNING).handler(shop.handler());
    let handle = consumer.start().await.unwrap();
    shop.until_calls(RUNNING).await;
    let began = Instant::now();
    shop.provider.open(true);
    tokio::time::sleep_until(began + ms(6000)).await;
    let costs = shop.journal.attempts();
    shop.provider.set_down(false);
    shop.until_done(1000).await;
    handle.shutdown(GRACE).await;

    assert!(costs.len() <= RUNNING + 10, "{} calls", costs.len());
    assert!(costs.len() >= RUNNING + 4, "{} calls: no probes", costs.len());
    let mut seen = HashMap::new();
    for call in shop.journal.attempts() {
        assert!(call.steps() <= 1, "{call:?}");
        // Who reported the outage is delivered as if for the first time.
        if seen.insert(call.job.id().to_owned(), ()).is_some() {
            assert_eq!((call.steps(), call.job.retry_count()), (0, 0), "{call:?}");
        }
    }
    assert_eq!(seen.len(), 1000);
    shop.is_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_wait_through_an_outage_come_at_most_one_step_nearer_to_the_delivery_limit() {
    let shop = Workshop::in_an_outage().await;
    shop.jobs(200).await;
    let consumer = shop.consumer(ms(50), ms(200)).concurrency(3).handler(shop.handler());
    let handle = consumer.start().await.unwrap();
    shop.until_paused(8).await;
    handle.shutdown(GRACE).await;

    let reported: Vec<_> =
        shop.journal.attempts().into_iter().map(|call| call.job.id().to_owned()).collect();
    shop.holds(WORK, 200).await;
    let left = shop.take_all().await;
    assert_eq!(left.len(), 200);
    for (id, steps) in left {
        let most = i64::from(!reported.contains(&id));
        assert!(steps <= most, "job {id}: {steps}, of {reported:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_handler_starts_once_an_outage_is_reported() {
    let shop = Workshop::in_an_outage().await;
    shop.jobs(500).await;
    let (journal, running) = (shop.journal.clone(), Arc::new(AtomicUsize::new(0)));
    let late = Arc::new(Mutex::new(Vec::new()));
    let reported = Arc::new(AtomicUsize::new(usize::MAX));
    let hook = Arc::clone(&reported);
    let mut settings = shop.settings(ms(60_000), ms(60_000));
    let calls = journal.clone();
    settings = settings.on_event(move |event| {
        if let Event::Paused { .. } = event {
            hook.store(calls.attempted(), SeqCst);
        }
    });
    let seen = Arc::clone(&late);
    let consumer = shop.consumer(ms(1), ms(1)).settings(settings).concurrency(50).handler({
        move |job: Job| {
            let (journal, running) = (journal.clone(), Arc::clone(&running));
            let (seen, reported) = (Arc::clone(&seen), Arc::clone(&reported));
            async move {
                let call = journal.begin(&job);
                running.fetch_add(1, SeqCst);
                if reported.load(SeqCst) != usize::MAX {
                    seen.lock().unwrap().push(call);
                }
                tokio::task::yield_now().await;
                if call == 100 {
                    return Err(outage(anyhow::anyhow!("down")).into());
                }
                Ok(())
            }
        }
    });
    let handle = consumer.start().await.unwrap();
    shop.until_paused(1).await;
    eventually("the consumer is gone", PATIENCE, async || shop.vhost.api().consumers().is_empty())
        .await;
    handle.shutdown(GRACE).await;
    // But those that were being called at that very moment, on the other threads.
    let (late, threads) =
        (late.lock().unwrap(), tokio::runtime::Handle::current().metrics().num_workers());
    assert!(late.len() < threads, "{late:?} started after the pause began");
}

/// Publishes jobs for five providers in turn, of which one is down; runs the others' to the end.
async fn one_of_five_is_down(shop: &Workshop, each: usize, consumer: Builder) -> Handle {
    for id in 0..each {
        for kind in ["a", "b", "c", "d", "down"] {
            let properties = BasicProperties::default().with_type(kind.into());
            shop.publish_job(&format!("{kind}{id}"), properties).await;
        }
    }
    let (journal, provider) = (shop.journal.clone(), Arc::clone(&shop.provider));
    let consumer = consumer.handler(move |job: Job| {
        let (journal, provider) = (journal.clone(), Arc::clone(&provider));
        async move {
            journal.begin(&job);
            if job.properties().kind().as_ref().is_some_and(|kind| kind.as_str() == "down") {
                provider.ask().await?;
            }
            journal.succeed(&job);
            Ok(())
        }
    });
    let handle = consumer.start().await.unwrap();
    eventually("the jobs of the other providers are done", 5 * PATIENCE, async || {
        shop.journal.succeeded() == 4 * each
    })
    .await;
    handle
}

#[tokio::test(flavor = "multi_thread")]
async fn with_one_of_five_providers_down_the_waits_grow_and_the_others_jobs_get_done() {
    let shop = Workshop::in_an_outage().await;
    let consumer = shop.consumer(ms(600), ms(1200)).concurrency(20);
    let handle = one_of_five_is_down(&shop, 6, consumer).await;
    let waits: Vec<_> = shop.journal.waits().iter().map(Duration::as_millis).collect();
    shop.provider.set_down(false);
    handle.resume();
    shop.until_done(30).await;
    handle.shutdown(GRACE).await;
    // A probe that gets through does not let them begin anew while a bad job is never far.
    assert!(waits.len() >= 3 && waits[..3] == [600, 1200, 1200], "{waits:?}");
    shop.is_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_pauses_in_a_row_bring_no_job_to_the_delivery_limit() {
    let shop = Workshop::in_an_outage().await;
    // Each job that is prefetched waits through some forty pauses.
    let consumer = shop.consumer(ms(10), ms(10)).concurrency(1).prefetch(200);
    let handle = one_of_five_is_down(&shop, 50, consumer).await;
    shop.provider.set_down(false);
    shop.until_done(250).await;
    handle.shutdown(GRACE).await;
    let duplicated = |event: &Event| matches!(event, Event::Duplicated { .. });
    let duplicated = shop.journal.count(duplicated);
    let calls = shop.journal.attempts();
    for call in &calls {
        let same: Vec<_> = calls.iter().filter(|other| other.job.id() == call.job.id()).collect();
        assert!(call.steps() <= 1, "{duplicated} duplicated, {same:?}");
    }
    shop.is_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_of_an_empty_queue_waits_for_a_job_and_consuming_resumes() {
    let shop = Workshop::in_an_outage().await;
    shop.jobs(1).await;
    let consumer = shop.consumer(ms(50), ms(50)).handler(shop.handler());
    let handle = consumer.start().await.unwrap();
    shop.until_paused(1).await;
    // Taken by somebody else before the wait is over, or between two probes.
    eventually("the job is taken", PATIENCE, async || !shop.take_all().await.is_empty()).await;
    let consumers = async || shop.vhost.api().consumers().len() == 1;
    eventually("the probe waits for a job", PATIENCE, consumers).await;
    let calls = shop.journal.attempted();
    shop.provider.set_down(false);
    assert!(shop.journal.resumed().is_empty());
    shop.jobs(10).await;
    shop.until_done(10).await;
    assert_eq!(shop.journal.resumed(), [Resumed::GotThrough]);
    assert_eq!(shop.journal.attempted(), calls + 10);
    handle.shutdown(GRACE).await;
    shop.is_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_healthy_worker_gets_what_a_paused_one_gives_back() {
    let shop = Workshop::in_an_outage().await;
    shop.jobs(50).await;
    let sick = shop.consumer(ms(60_000), ms(60_000)).concurrency(1).handler(shop.handler());
    let sick = sick.start().await.unwrap();
    shop.until_paused(1).await;
    shop.holds(WORK, 50).await;
    let other = shop.settings(ms(50), ms(50));
    let journal = shop.journal.clone();
    let healthy = RetryConsumer::builder(shop.url(), WORK)
        .settings(other)
        .consumer_tag("healthy")
        .handler(move |job: Job| {
            let journal = journal.clone();
            async move {
                journal.succeed(&job);
                Ok(())
            }
        });
    let healthy = healthy.start().await.unwrap();
    shop.until_done(50).await;
    assert_eq!(shop.journal.attempted(), 1, "the paused worker tried one, and no other");
    within("both stop", async { tokio::join!(sick.shutdown(GRACE), healthy.shutdown(GRACE)) })
        .await;
    assert_eq!(count(&shop.channel, WORK).await, 0);
}

/// Collects what is logged on the threads of one runtime.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn an_outage_leaves_one_line_a_wait_in_the_log_not_one_a_job() {
    let log = Log::default();
    let writer = log.clone();
    let listen = move || {
        let writer = writer.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_max_level(tracing::Level::INFO)
            .with_writer(move || writer.clone());
        // For the thread's whole life: other tests have threads of their own.
        std::mem::forget(tracing::subscriber::set_default(subscriber.finish()));
    };
    listen();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .on_thread_start(listen)
        .build()
        .unwrap();
    let outage = async {
        let shop = Workshop::in_an_outage().await;
        shop.jobs(300).await;
        shop.provider.open(false);
        let consumer = shop.consumer(ms(50), ms(200)).handler(shop.handler());
        let handle = consumer.start().await.unwrap();
        shop.until_calls(100).await;
        // A hundred report the outage at once, and two hundred wait.
        shop.provider.open(true);
        shop.until_paused(5).await;
        shop.provider.set_down(false);
        shop.until_done(300).await;
        handle.shutdown(GRACE).await;
        shop.journal.waits().len()
    };
    let waits = runtime.block_on(outage);
    drop(runtime);
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let ours: Vec<_> = text.lines().filter(|line| line.contains("lapin_retry")).collect();
    let warnings = ours.iter().filter(|line| line.contains(" WARN ")).count();
    assert_eq!(warnings, waits, "{ours:#?}");
    // The doctor did not look, ready at the start, and resumed at the end.
    let told = ours.iter().filter(|line| line.contains(" INFO ")).count();
    assert_eq!(told, 3, "{ours:#?}");
}
