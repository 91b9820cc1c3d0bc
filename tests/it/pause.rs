//! A consumer in a pause: what it holds, what ends the pause, and what may happen meanwhile.

use crate::{
    support::{PATIENCE, Proxy, WORK, broker_addr, count, eventually, table, within},
    workshop::{Provider, Workshop, ms},
};
use lapin::{BasicProperties, types::AMQPValue};
use lapin_retry::{Broker, Event, Handle, Job, PauseKind, Resumed, RetryConsumer, outage};
use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};
use tokio::time::Instant;

const GRACE: Duration = Duration::from_secs(10);
/// A wait that no test lives to see the end of.
const LONG: Duration = Duration::from_secs(3600);

async fn no_consumer_is_listed(shop: &Workshop) {
    let api = shop.vhost.api();
    eventually("no consumer is listed", PATIENCE, async || api.consumers().is_empty()).await;
}

/// One job reported an outage, and the next wait is long.
async fn in_a_long_pause(shop: &Workshop, jobs: usize, concurrency: usize) -> Handle {
    shop.jobs(jobs).await;
    let consumer = shop.consumer(LONG, LONG).concurrency(concurrency).handler(shop.handler());
    let handle = consumer.start().await.unwrap();
    shop.until_paused(1).await;
    handle
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_consumer_is_not_listed_and_its_jobs_are_ready_while_running_handlers_finish() {
    let shop = Workshop::in_an_outage().await;
    shop.provider.open(false);
    shop.jobs(20).await;
    let (journal, provider) = (shop.journal.clone(), Arc::clone(&shop.provider));
    let consumer = shop.consumer(LONG, LONG).concurrency(3).handler(move |job: Job| {
        let (journal, provider) = (journal.clone(), Arc::clone(&provider));
        async move {
            let call = journal.begin(&job);
            // The first reports the outage, the second and the third finish later.
            if call == 1 {
                provider.down.subscribe().wait_for(|down| !down).await?;
                return Err(outage(anyhow::anyhow!("down")).into());
            }
            provider.gate.subscribe().wait_for(|open| *open).await?;
            anyhow::ensure!(call == 2, "a failure of its own");
            Ok(())
        }
    });
    let handle = consumer.start().await.unwrap();
    shop.until_calls(3).await;
    shop.provider.set_down(false);
    shop.holds(WORK, 18).await;
    no_consumer_is_listed(&shop).await;
    shop.provider.open(true);
    let ended = async || {
        !shop.journal.done().is_empty()
            && shop.journal.retries().iter().any(|(level, _)| *level == 1)
    };
    eventually("the success is acked and the failure retried", PATIENCE, ended).await;
    // The one that was retried comes back after its level, and waits as the others do.
    shop.holds(WORK, 19).await;
    assert_eq!(shop.journal.attempted(), 3);
    handle.shutdown(GRACE).await;
    assert_eq!(count(&shop.channel, WORK).await, 19);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_by_hand_lasts_until_it_is_resumed_by_hand() {
    let shop = Workshop::in_an_outage().await;
    shop.provider.set_down(false);
    let consumer = shop.consumer(ms(1), ms(1)).handler(shop.handler());
    let handle = consumer.start().await.unwrap();
    handle.pause();
    handle.pause();
    no_consumer_is_listed(&shop).await;
    shop.jobs(10).await;
    shop.holds(WORK, 10).await;
    handle.resume();
    shop.until_done(10).await;
    handle.shutdown(GRACE).await;
    let paused = |event: &Event| match event {
        Event::Paused { kind, wait, .. } => Some((*kind, *wait)),
        _ => None,
    };
    let told: Vec<_> = shop.journal.all(paused);
    assert_eq!(told, [(PauseKind::Manual, None)]);
    assert_eq!(shop.journal.resumed(), [Resumed::ByHand]);
}

/// All jobs run side by side, so no single one was tried before.
async fn runs_at_full_speed(shop: &Workshop, jobs: usize) {
    let before = shop.journal.attempted();
    shop.provider.set_down(false);
    shop.provider.open(false);
    shop.until_calls(before + jobs).await;
    shop.provider.open(true);
    shop.until_done(jobs).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_and_reload_end_a_pause_before_any_other_job_is_tried() {
    for why in [Resumed::ByHand, Resumed::Reconfigured] {
        let shop = Workshop::in_an_outage().await;
        let handle = in_a_long_pause(&shop, 1, 10).await;
        shop.provider.open(false);
        for id in 1..10 {
            shop.publish_job(&id.to_string(), BasicProperties::default()).await;
        }
        match why {
            Resumed::ByHand => handle.resume(),
            _ => handle.reload(shop.settings(LONG, LONG)).await.unwrap(),
        }
        runs_at_full_speed(&shop, 10).await;
        assert_eq!(shop.journal.resumed(), [why]);
        handle.shutdown(GRACE).await;
        shop.is_empty().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_during_a_probe_needs_not_wait_for_it_and_its_outage_pauses_nothing() {
    let shop = Workshop::in_an_outage().await;
    shop.jobs(10).await;
    let (journal, provider) = (shop.journal.clone(), Arc::clone(&shop.provider));
    let consumer = shop.consumer(ms(50), ms(50)).concurrency(10).prefetch(10);
    let tried = Provider::new(true);
    let probe = Arc::clone(&tried);
    let consumer = consumer.handler(move |job: Job| {
        let (journal, provider) = (journal.clone(), Arc::clone(&provider));
        let probe = Arc::clone(&probe);
        async move {
            match journal.begin(&job) {
                ..=10 => provider.ask().await?,
                11 => probe.ask().await?,
                _ => {}
            }
            journal.succeed(&job);
            Ok(())
        }
    });
    tried.open(false);
    // All ten are at work when the outage begins, so that the next call is the probe's.
    shop.provider.open(false);
    let handle = consumer.start().await.unwrap();
    shop.until_calls(10).await;
    shop.provider.open(true);
    shop.until_calls(11).await;
    handle.resume();
    shop.until_done(9).await;
    tried.open(true);
    shop.until_done(10).await;
    handle.shutdown(GRACE).await;
    assert_eq!(shop.journal.waits().len(), 1);
    assert_eq!(shop.journal.resumed(), [Resumed::ByHand]);
    shop.is_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_works_in_a_pause_and_while_a_probe_waits_for_a_job_or_runs() {
    let shop = Workshop::in_an_outage().await;
    let handle = in_a_long_pause(&shop, 5, 1).await;
    within("the end of a pause", handle.shutdown(GRACE)).await;
    assert_eq!(count(&shop.channel, WORK).await, 5);
    drop(shop);

    let shop = Workshop::in_an_outage().await;
    shop.jobs(1).await;
    let consumer = shop.consumer(ms(50), ms(50)).handler(shop.handler());
    let handle = consumer.start().await.unwrap();
    shop.until_paused(1).await;
    eventually("the job is taken", PATIENCE, async || !shop.take_all().await.is_empty()).await;
    let listed = async || shop.vhost.api().consumers().len() == 1;
    eventually("the probe waits for a job", PATIENCE, listed).await;
    within("the end of an idle probe", handle.shutdown(GRACE)).await;
    drop(shop);

    let shop = Workshop::in_an_outage().await;
    shop.jobs(5).await;
    let consumer = shop.consumer(ms(200), ms(200)).concurrency(1).handler(shop.handler());
    let handle = consumer.start().await.unwrap();
    shop.until_paused(1).await;
    shop.provider.open(false);
    shop.until_calls(2).await;
    let stopping = tokio::spawn({
        let handle = handle.clone();
        async move { handle.shutdown(GRACE).await }
    });
    // The probe runs to its end within the grace, and succeeds.
    shop.provider.set_down(false);
    shop.provider.open(true);
    within("the end of a running probe", stopping).await.unwrap();
    assert_eq!(shop.journal.succeeded(), 1);
    assert_eq!(count(&shop.channel, WORK).await, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_while_a_resumed_consumer_subscribes_leaves_none_behind() {
    let shop = Workshop::in_an_outage().await;
    shop.provider.set_down(false);
    // Kept to the end, and its connections with it.
    let broker = Broker::new(&shop.vhost.url()).unwrap();
    for round in 0..30 {
        let consumer = RetryConsumer::builder(&broker, WORK).settings(shop.settings(LONG, LONG));
        let handle = consumer.handler(shop.handler()).start().await.unwrap();
        handle.pause();
        shop.until_paused(round + 1).await;
        handle.resume();
        // Somewhere between the first frame of subscribing and the last.
        tokio::time::sleep(Duration::from_micros(100 * round as u64)).await;
        within("the end", handle.shutdown(GRACE)).await;
    }
    no_consumer_is_listed(&shop).await;
    shop.jobs(5).await;
    shop.holds(WORK, 5).await;
    drop(broker);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_that_outlasts_the_grace_is_cut_short_and_given_back() {
    let shop = Workshop::in_an_outage().await;
    shop.jobs(1).await;
    let consumer = shop.consumer(ms(50), ms(50)).handler(shop.handler());
    let handle = consumer.start().await.unwrap();
    shop.until_paused(1).await;
    shop.provider.open(false);
    eventually("the probe runs", PATIENCE, async || {
        shop.journal.attempts().last().is_some_and(|call| call.started.elapsed() > ms(300))
    })
    .await;
    within("the end", handle.shutdown(ms(100))).await;
    assert_eq!(count(&shop.channel, WORK).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_that_fails_in_any_other_way_ends_the_pause() {
    for how in ["fails", "panics", "times out"] {
        let shop = Workshop::in_an_outage().await;
        shop.jobs(10).await;
        let journal = shop.journal.clone();
        let consumer = shop.consumer(ms(50), ms(50)).concurrency(1).handler_timeout(ms(100));
        let consumer = consumer.handler(move |job: Job| {
            let journal = journal.clone();
            async move {
                match (journal.begin(&job), how) {
                    (1, _) => return Err(outage(anyhow::anyhow!("down")).into()),
                    (2, "fails") => anyhow::bail!("a failure of its own"),
                    (2, "panics") => panic!("as it is meant to"),
                    (2, _) => std::future::pending().await,
                    _ => {}
                }
                journal.succeed(&job);
                Ok(())
            }
        });
        let handle = consumer.start().await.unwrap();
        shop.until_done(10).await;
        assert_eq!((shop.journal.waits().len(), shop.journal.resumed().len()), (1, 1), "{how}");
        handle.shutdown(GRACE).await;
        shop.is_empty().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_is_no_job_to_run_is_no_probe() {
    let shop = Workshop::in_an_outage().await;
    shop.jobs(1).await;
    let consumer = shop.consumer(ms(1500), ms(1500)).handler(shop.handler());
    let handle = consumer.start().await.unwrap();
    shop.until_paused(1).await;
    eventually("the job is taken", PATIENCE, async || !shop.take_all().await.is_empty()).await;
    let ours = |key: &str, value: &str| {
        let value = AMQPValue::LongString(value.into());
        let queue = AMQPValue::LongString(WORK.into());
        BasicProperties::default().with_headers(table([("retry-queue", queue), (key, value)]))
    };
    shop.publish_job("expired", ours("retry-deadline", "2020-01-01T00:00:00Z")).await;
    shop.publish_job("odd", ours("retry-not-before", "9999-12-31T23:59:59Z")).await;
    let later = rfc3339(SystemTime::now() + LONG);
    shop.publish_job("later", ours("retry-not-before", &later)).await;
    shop.jobs(3).await;
    shop.provider.set_down(false);
    shop.until_done(3).await;
    assert_eq!(shop.journal.resumed(), [Resumed::GotThrough]);
    handle.shutdown(GRACE).await;
    let buried = |event: &Event| matches!(event, Event::Buried { .. });
    assert_eq!(shop.journal.count(buried), 2);
    shop.is_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_needs_no_permit_of_a_handler_that_hangs() {
    let shop = Workshop::in_an_outage().await;
    let hang = BasicProperties::default().with_type("hang".into());
    shop.publish_job("hangs", hang).await;
    let (journal, provider) = (shop.journal.clone(), Arc::clone(&shop.provider));
    let consumer = shop.consumer(ms(50), ms(200)).concurrency(2).handler(move |job: Job| {
        let (journal, provider) = (journal.clone(), Arc::clone(&provider));
        async move {
            journal.begin(&job);
            if job.properties().kind().is_some() {
                provider.gate.subscribe().wait_for(|open| *open).await?;
            } else if *provider.down.borrow() {
                return Err(outage(anyhow::anyhow!("down")).into());
            }
            journal.succeed(&job);
            Ok(())
        }
    });
    shop.provider.open(false);
    let handle = consumer.start().await.unwrap();
    shop.until_calls(1).await;
    shop.jobs(3).await;
    shop.until_paused(4).await;
    shop.provider.set_down(false);
    shop.until_done(3).await;
    shop.provider.open(true);
    shop.until_done(4).await;
    handle.shutdown(GRACE).await;
    shop.is_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_cut_in_the_pauses_and_probes_of_an_outage_loses_nothing() {
    let shop = Workshop::in_an_outage().await;
    let proxy = Proxy::start(broker_addr()).await;
    shop.jobs(100).await;
    let consumer = RetryConsumer::builder(proxy.url(&shop.url()), WORK)
        .settings(shop.settings(ms(100), ms(300)))
        .concurrency(5)
        .handler(shop.handler());
    let handle = consumer.start().await.unwrap();
    for pauses in 1..=4 {
        shop.until_paused(pauses).await;
        proxy.cut().await;
    }
    // And while a probe runs.
    let calls = shop.journal.attempted();
    shop.provider.open(false);
    shop.until_calls(calls + 1).await;
    proxy.cut().await;
    shop.provider.open(true);
    shop.until_paused(6).await;
    shop.provider.set_down(false);
    shop.until_done(100).await;
    handle.shutdown(GRACE).await;
    shop.is_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_wait_ends_in_the_pause_is_not_run_in_it() {
    let shop = Workshop::in_an_outage().await;
    shop.provider.open(false);
    shop.jobs(1).await;
    let handle = shop.consumer(LONG, LONG).handler(shop.handler()).start().await.unwrap();
    shop.until_calls(1).await;
    let soon = rfc3339(SystemTime::now() + ms(990));
    let headers = table([
        ("retry-queue", AMQPValue::LongString(WORK.into())),
        ("retry-not-before", AMQPValue::LongString(soon.into())),
    ]);
    shop.publish_job("soon", BasicProperties::default().with_headers(headers)).await;
    shop.holds(WORK, 0).await;
    shop.provider.open(true);
    shop.until_paused(1).await;
    let calls = shop.journal.attempted();
    shop.holds(WORK, 2).await;
    let began = Instant::now();
    eventually("its time has come", PATIENCE, async || began.elapsed() > ms(1200)).await;
    assert_eq!(shop.journal.attempted(), calls);
    shop.provider.set_down(false);
    handle.resume();
    shop.until_done(2).await;
    handle.shutdown(GRACE).await;
    shop.is_empty().await;
}

fn rfc3339(at: SystemTime) -> String {
    humantime::format_rfc3339_millis(at).to_string()
}
