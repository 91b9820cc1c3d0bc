//! A consumer that lost its broker starts over, whatever the broker does or does not say.

use crate::support::{LANE, PATIENCE, Proxy, Scene, broker_addr, eventually, quick, table, within};
use anyhow::anyhow;
use futures_util::{Stream, StreamExt};
use lapin::{ConnectionProperties, types::AMQPValue};
use lapin_retry::{
    Broker, Builder, ErrorKind, Event, Handle, Health, Job, Reconnect, Retry, RetryConsumer,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::net::TcpListener;

/// No broker listens there.
const NOBODY: &str = "amqp://127.0.0.1:1";

/// Starts over often enough for a test.
fn builder(scene: &Scene, broker: impl Into<Broker>) -> Builder {
    RetryConsumer::builder(broker, "work")
        .settings(scene.settings())
        .reconnect(Reconnect::default().max(Duration::from_millis(500)))
}

async fn start(scene: &Scene, broker: impl Into<Broker>) -> Handle {
    let handler = builder(scene, broker).handler(|_: Job| async { Ok(()) });
    handler.start().await.expect("started")
}

/// Publishes one more job, and waits for its end.
async fn takes_jobs(scene: &Scene, id: &str) {
    scene.job(id, table([]), b"job").await;
    scene.journal.is_done(id).await;
}

/// Waits until the health is like this.
async fn until(
    what: &str,
    changes: &mut (impl Stream<Item = Health> + Unpin),
    is: impl Fn(&Health) -> bool,
) {
    let found = async { while !is(&changes.next().await.expect("not stopped")) {} };
    within(what, found).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn at_the_limit_of_failed_tries_the_consumer_stops_and_says_why() {
    let scene = Scene::new().await;
    let user = scene.vhost.user(".*", ".*", ".*");
    let proxy = Proxy::start(broker_addr()).await;
    let url = proxy.url(&user.url());
    let reconnect = Reconnect::default().max(Duration::from_millis(100)).limit(3);
    let handle = builder(&scene, url.as_str())
        .reconnect(reconnect)
        .handler(|_: Job| async { Ok(()) })
        .start()
        .await
        .unwrap();
    takes_jobs(&scene, "1").await;
    // Losing the connection is no failed try, and one that succeeds ends the row.
    for id in ["2", "3", "4", "5"] {
        proxy.cut().await;
        takes_jobs(&scene, id).await;
    }
    let lost = scene.journal.disconnected();
    proxy.refuse(true);
    proxy.cut().await;
    let error = within("it gives up", handle.stopped()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Connection, "{error}");
    assert!(error.to_string().contains("\"work\": 3 failed tries"), "{error}");
    assert_eq!(
        scene.journal.disconnected() - lost,
        3,
        "the loss, and a wait before each other try"
    );
    let told = scene.journal.all(|event| match event {
        Event::GaveUp { error, .. } => Some(error.to_string()),
        _ => None,
    });
    assert_eq!(told, [error.to_string()]);
    let password = url.split(['/', ':', '@']).nth(4).unwrap();
    assert!(password.len() == 32 && !format!("{error:?}").contains(password), "{error:?}");
    assert_eq!(handle.health(), Health::Stopped);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_several_addresses_one_that_answers_is_enough() {
    let scene = Scene::new().await;
    let (one, other) = (Proxy::start(broker_addr()).await, Proxy::start(broker_addr()).await);
    let url = scene.url();
    let nobody = format!("{NOBODY}/{}", scene.vhost.name());
    let broker = Broker::any_of([&nobody, &one.url(&url), &other.url(&url)]).unwrap();
    one.refuse(true);
    let handle = start(&scene, &broker).await;
    takes_jobs(&scene, "1").await;
    one.refuse(false);
    other.refuse(true);
    other.cut().await;
    takes_jobs(&scene, "2").await;
    within("shutdown", handle.shutdown(Duration::from_secs(5))).await;

    let broker = Broker::any_of([&nobody, &other.url(&url)]).unwrap();
    let error = Retry::attach(broker, "work", quick()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Connection);
    assert!(error.to_string().contains("127.0.0.1:1: "), "each is named: {error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_accepts_and_never_answers_is_left_after_ten_seconds() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("amqp://me:hunter2@{}", listener.local_addr().unwrap());
    let begun = Instant::now();
    let attach = Retry::attach(url, "work", quick());
    let (attached, accepted) = tokio::join!(within("an error", attach), listener.accept());
    let error = attached.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Connection);
    assert!(begun.elapsed() < Duration::from_secs(11));
    assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    drop(accepted);
}

/// It must be off, as the documentation says; somebody will have it on.
#[tokio::test(flavor = "multi_thread")]
async fn lapins_own_recovery_does_not_get_in_the_way() {
    let scene = Scene::new().await;
    let proxy = Proxy::start(broker_addr()).await;
    let recovering = ConnectionProperties::default().enable_auto_recover();
    let broker = Broker::from(proxy.url(&scene.url())).with_properties(recovering);
    let handle = start(&scene, &broker).await;
    for id in ["1", "2", "3"] {
        takes_jobs(&scene, id).await;
        let (lost, opened) = (scene.journal.disconnected(), proxy.opened());
        proxy.cut().await;
        eventually("it is missed", PATIENCE, async || scene.journal.disconnected() > lost).await;
        eventually("it is opened again", PATIENCE, async || proxy.opened() > opened).await;
    }
    takes_jobs(&scene, "4").await;
    within("shutdown", handle.shutdown(Duration::from_secs(5))).await;
}

/// It waits for hours unless something ends the wait.
async fn start_patient(scene: &Scene, url: String) -> Handle {
    let hours = Duration::from_secs(100 * 60 * 60);
    builder(scene, url)
        .reconnect(Reconnect::default().first(hours).max(hours))
        .handler(|_: Job| async { Ok(()) })
        .start()
        .await
        .unwrap()
}

/// The wait after a long outage may be long; the broker's return ends it.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_is_back_soon_after_its_broker_is() {
    let scene = Scene::new().await;
    let proxy = Proxy::start(broker_addr()).await;
    let handle = start_patient(&scene, proxy.url(&scene.url())).await;
    takes_jobs(&scene, "1").await;
    let port = proxy.port();
    drop(proxy);
    eventually("it is missed", PATIENCE, async || scene.journal.disconnected() == 1).await;
    let away = TcpListener::bind(("127.0.0.1", port));
    drop(within("the port is free", away).await.unwrap());
    // As long as it is away nothing is tried, only looked for.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(scene.journal.disconnected(), 1);
    let _proxy = Proxy::start_at(port, broker_addr()).await;
    takes_jobs(&scene, "2").await;
    assert_eq!(scene.journal.disconnected(), 1);
    within("shutdown", handle.shutdown(Duration::from_secs(5))).await;
}

/// A load balancer, and the system for a process that is stopped, take connections without a broker.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_is_back_soon_after_its_broker_is_where_connections_are_taken_without_it() {
    let scene = Scene::new().await;
    let proxy = Proxy::start(broker_addr()).await;
    let handle = start_patient(&scene, proxy.url(&scene.url())).await;
    takes_jobs(&scene, "1").await;
    proxy.refuse(true);
    proxy.cut().await;
    eventually("it is missed", PATIENCE, async || scene.journal.disconnected() == 1).await;
    let looks = async |more: u64| {
        let so_far = proxy.opened();
        eventually("it is looked for", PATIENCE, async || proxy.opened() >= so_far + more).await;
    };
    looks(2).await;
    proxy.stall(true);
    proxy.refuse(false);
    looks(2).await;
    assert_eq!(scene.journal.disconnected(), 1, "nothing is tried, only looked for");
    proxy.stall(false);
    takes_jobs(&scene, "2").await;
    assert_eq!(scene.journal.disconnected(), 1);
    within("shutdown", handle.shutdown(Duration::from_secs(5))).await;
}

/// A dead network: both sockets are open, and nothing moves.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_connection_is_lost_after_two_heartbeats_and_comes_back() {
    let scene = Scene::new().await;
    let proxy = Proxy::start(broker_addr()).await;
    let handle = start(&scene, format!("{}?heartbeat=1", proxy.url(&scene.url()))).await;
    takes_jobs(&scene, "1").await;
    proxy.stall(true);
    let stalled = Instant::now();
    eventually("it is missed", PATIENCE, async || scene.journal.disconnected() == 1).await;
    assert!(stalled.elapsed() < Duration::from_secs(5), "{:?}", stalled.elapsed());
    let mut health = handle.health_changes();
    let lost = |health: &Health| matches!(health, Health::Reconnecting { .. });
    until("told", &mut health, lost).await;
    proxy.stall(false);
    takes_jobs(&scene, "2").await;
    until("told", &mut health, Health::is_healthy).await;
    within("shutdown", handle.shutdown(Duration::from_secs(5))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tries_in_an_outage_are_told_once_each() {
    let scene = Scene::new().await;
    let proxy = Proxy::start(broker_addr()).await;
    let nobody = format!("{NOBODY}/{}", scene.vhost.name());
    let broker = Broker::any_of([proxy.url(&scene.url()), nobody]).unwrap();
    let handle = start(&scene, &broker).await;
    takes_jobs(&scene, "1").await;
    proxy.refuse(true);
    proxy.cut().await;
    let opened = proxy.opened();
    eventually("the first tries", PATIENCE, async || scene.journal.disconnected() >= 3).await;
    eventually("more tries", PATIENCE, async || scene.journal.disconnected() >= 8).await;
    // Each try opens a connection, and waits this short bring no look for the broker.
    let told = scene.journal.disconnected() as u64;
    assert!(told <= proxy.opened() - opened + 1, "the loss, and once a try");
    proxy.refuse(false);
    takes_jobs(&scene, "2").await;
    within("shutdown", handle.shutdown(Duration::from_secs(5))).await;
}

/// The publishing connection is blocked, and nothing is written on it, declares neither.
#[tokio::test(flavor = "multi_thread")]
async fn in_a_memory_alarm_acks_go_on_and_a_lost_consumer_comes_back() {
    let scene = Scene::new().await;
    let proxy = Proxy::start(broker_addr()).await;
    let handle = builder(&scene, proxy.url(&scene.url()))
        .handler(
            |job: Job| async move { if job.id() == "0000" { Err(anyhow!("no")) } else { Ok(()) } },
        )
        .start()
        .await
        .unwrap();
    let mut health = handle.health_changes();
    proxy.alarm(true);
    let mut ids = scene.fill(20).await;
    let blocked = |health: &Health| matches!(health, Health::Blocked { .. });
    until("told", &mut health, blocked).await;
    ids.remove("0000");
    eventually("19 are acked", PATIENCE, async || scene.journal.finished() == ids).await;
    scene.unacked(1).await;

    let name = scene.connection_called("lapin-retry consuming").await;
    scene.vhost.api().close_connection(&name);
    eventually("the loss is told", PATIENCE, async || scene.journal.disconnected() > 0).await;
    takes_jobs(&scene, "in the alarm").await;
    assert_eq!(scene.journal.disconnected(), 1, "at the first try");
    assert!(blocked(&handle.health()), "it is not over");
    assert!(scene.journal.handed_off().is_empty());

    proxy.alarm(false);
    eventually("it is handed off", PATIENCE, async || scene.journal.handed_off().len() == 1).await;
    until("told", &mut health, Health::is_healthy).await;
    within("shutdown", handle.shutdown(Duration::from_secs(5))).await;
    // The first copy was on its way when the job's channel was closed.
    assert!(scene.look(LANE).await.len() <= 1 + scene.journal.possible_duplicates());
}

/// RabbitMQ 4.3 cancels the consumer of a quorum queue then, and leaves its channel open.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_comes_back_after_its_consumer_timeout() {
    let scene = Scene::bare().await;
    if scene.vhost.api().version() < (4, 3) {
        return; // Older ones look once a minute, for what the whole broker is configured with.
    }
    let arguments = table([
        ("x-queue-type", AMQPValue::LongString("quorum".into())),
        ("x-consumer-timeout", AMQPValue::LongInt(2_000)),
    ]);
    let durable = lapin::options::QueueDeclareOptions::durable();
    scene.channel.queue_declare("work".into(), durable, arguments).await.unwrap();
    let runs = Arc::new(AtomicUsize::new(0));
    let handle = builder(&scene, scene.url())
        .handler({
            let runs = Arc::clone(&runs);
            move |_: Job| {
                let first = runs.fetch_add(1, SeqCst) == 0;
                async move {
                    if first {
                        tokio::time::sleep(Duration::from_secs(4)).await;
                    }
                    Ok(())
                }
            }
        })
        .start()
        .await
        .unwrap();
    scene.job("slow", table([]), b"job").await;
    let cancelled = scene.journal.first("it is told", |event| match event {
        Event::Disconnected { error, .. } => Some(error.to_string()),
        _ => None,
    });
    let why = cancelled.await;
    assert!(why.contains("consumer timeout"), "{why}");
    eventually("it is run again", PATIENCE, async || runs.load(SeqCst) == 2).await;
    takes_jobs(&scene, "next").await;
    within("shutdown", handle.shutdown(Duration::from_secs(5))).await;
    scene.holds("work", 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn health_tells_of_pauses_and_of_the_end() {
    let scene = Scene::new().await;
    let handle = RetryConsumer::builder(scene.url(), "work")
        .settings(scene.settings())
        .handler(|_: Job| async {
            tokio::time::sleep(Duration::from_secs(8)).await;
            Ok(())
        })
        .start()
        .await
        .unwrap();
    let mut health = handle.health_changes();
    assert_eq!(handle.health(), Health::Running);
    handle.pause();
    let held = |health: &Health| matches!(health, Health::Paused { until: None, .. });
    until("paused", &mut health, held).await;
    handle.resume();
    until("resumed", &mut health, Health::is_healthy).await;
    scene.job("slow", table([]), b"job").await;
    scene.unacked(1).await;
    let stopping = tokio::spawn({
        let handle = handle.clone();
        async move { handle.shutdown(Duration::from_secs(10)).await }
    });
    let draining = |health: &Health| matches!(health, Health::Draining { .. });
    until("draining", &mut health, draining).await;
    until("stopped", &mut health, |health| *health == Health::Stopped).await;
    within("shutdown", stopping).await.unwrap();
    assert_eq!(scene.journal.done(), ["slow"]);
}
