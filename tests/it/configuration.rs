//! What cannot work is refused before a job is consumed, by both ways in, with the name of the field,
//! queue or right and the remedy.

use crate::support::{BURIED, Journal, PATIENCE, Scene, WORK, count, eventually, quick, table};
use lapin::{
    options::{BasicConsumeOptions, QueueDeclareOptions},
    types::AMQPValue,
};
use lapin_retry::{
    Broker, Declare, Error, ErrorKind, Event, Jitter, Job, QueueType, Retry, RetryConsumer,
    RetryPolicy, Settings,
};
use std::time::Duration;

/// Both ways in must refuse these settings with an error that says this.
async fn refused(
    broker: &Broker,
    queue: &str,
    settings: &Settings,
    kind: ErrorKind,
    parts: &[&str],
) -> Error {
    let attached = Retry::attach(broker, queue, settings.clone()).await.unwrap_err();
    says(&attached, kind, parts);
    let started = RetryConsumer::builder(broker, queue)
        .settings(settings.clone())
        .handler(|_| async { panic!("a job was consumed") })
        .start()
        .await
        .unwrap_err();
    says(&started, kind, parts);
    started
}

#[track_caller]
fn says(error: &Error, kind: ErrorKind, parts: &[&str]) {
    assert_eq!(error.kind(), kind, "{error}");
    for part in parts {
        assert!(error.to_string().contains(part), "{error} should contain {part}");
    }
}

/// The job that waits in the work queue has not been delivered, and there are no queues but these.
async fn untouched(scene: &Scene, queues: &[&str]) {
    assert_eq!(scene.vhost.api().queues(), queues);
    let job = &scene.vhost.api().take(WORK, 10)[..];
    assert_eq!(job.len(), 1);
    assert_eq!(job[0]["redelivered"], false);
}

async fn scene() -> Scene {
    let scene = Scene::new().await;
    scene.job("waiting", table([]), b"job").await;
    scene
}

#[tokio::test(flavor = "multi_thread")]
async fn an_impossible_setting_is_refused_with_its_name_before_anything_is_made() {
    let scene = scene().await;
    let broker = Broker::from(scene.url());
    let over_10_years = Duration::from_millis(315_360_000_001);
    let of = |policy: RetryPolicy| Settings::new(policy);
    let long_name = "q".repeat(240);
    let cases: Vec<(&str, Settings, &[&str])> = vec![
        (WORK, of(RetryPolicy::new([0u64; 0])), &["levels", "empty", "at least one"]),
        (WORK, of(RetryPolicy::new([15, 0])), &["levels[1]", "zero", "1 ms"]),
        (WORK, of(RetryPolicy::new([over_10_years])), &["levels[0]", "10 years"]),
        (WORK, of(RetryPolicy::new(["soon"])), &["levels[0]", "soon", "15s"]),
        (WORK, of(quick().lanes(0)), &["lanes", "at least one"]),
        (WORK, of(quick().jitter(Jitter::Proportional(1.5))), &["jitter", "1.5"]),
        (WORK, of(quick().jitter(Jitter::Proportional(-0.1))), &["jitter", "-0.1"]),
        (WORK, of(quick().jitter(Jitter::Proportional(f64::NAN))), &["jitter", "NaN"]),
        (&long_name, of(quick()), &["queue", "255 bytes", "shorten"]),
        ("", of(quick()), &["queue", "empty"]),
        (WORK, of(RetryPolicy::default().lanes(29)), &["204 queues", "200", "at most 28 lanes"]),
        (WORK, of(quick()).hand_offs(0), &["hand_offs"]),
        (WORK, of(quick()).hand_offs(5_000), &["hand_offs", "1000"]),
        (WORK, of(quick()).confirm_timeout(Duration::ZERO), &["confirm_timeout"]),
    ];
    for (queue, settings, parts) in cases {
        refused(&broker, queue, &settings, ErrorKind::Configuration, parts).await;
    }
    untouched(&scene, &[WORK]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_impossible_consumer_is_refused_before_anything_is_made() {
    let scene = scene().await;
    let builder = || RetryConsumer::builder(scene.url(), WORK).policy(quick());
    for (builder, field) in [
        (builder().prefetch(0), "prefetch"),
        (builder().concurrency(0), "concurrency"),
        (builder().handler_timeout(Duration::ZERO), "handler_timeout"),
        (builder().consumer_tag("t".repeat(256)), "consumer_tag"),
    ] {
        let error = builder.handler(|_| async { panic!("consumed") }).start().await.unwrap_err();
        says(&error, ErrorKind::Configuration, &[field]);
    }
    untouched(&scene, &[WORK]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_work_queue_is_named_and_nothing_is_made() {
    let scene = scene().await;
    for declare in [Declare::Create, Declare::Check, Declare::Off] {
        let settings = Settings::new(quick()).declare(declare);
        let broker = Broker::from(scene.url());
        let parts = ["\"nowhere\"", "declare it"];
        refused(&broker, "nowhere", &settings, ErrorKind::MissingQueue, &parts).await;
    }
    untouched(&scene, &[WORK]).await;
}

const CONFIGURE: &str = r"^work\.(retry\..*|buried)$";
const WRITE: &str = r"^amq\.default$";
const READ: &str = r"^work($|\.(retry\..*|buried)$)";

#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_configure_the_refusal_names_it_and_the_patterns() {
    let scene = scene().await;
    let user = scene.vhost.user("^$", WRITE, READ);
    refused(
        &Broker::from(user.url()),
        WORK,
        &Settings::new(quick()),
        ErrorKind::Permission,
        &["configure", CONFIGURE, "declare = \"check\""],
    )
    .await;
    untouched(&scene, &[WORK]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_write_on_the_default_exchange_the_refusal_names_it() {
    let scene = scene().await;
    let user = scene.vhost.user(CONFIGURE, "^$", READ);
    refused(
        &Broker::from(user.url()),
        WORK,
        &Settings::new(quick()),
        ErrorKind::Permission,
        &["write", "amq.default", WRITE],
    )
    .await;
    assert_eq!(count(&scene.channel, WORK).await, 1);
}

/// No lane is declared, which would need the right as well.
#[tokio::test(flavor = "multi_thread")]
async fn without_write_on_the_default_exchange_a_start_that_declares_nothing_is_refused_too() {
    let scene = scene().await;
    Retry::attach(scene.url(), WORK, quick()).await.unwrap().close().await.unwrap();
    let user = scene.vhost.user("^$", "^$", READ);
    for declare in [Declare::Check, Declare::Off] {
        let settings = Settings::new(quick()).declare(declare);
        let parts = ["amq.default", WRITE];
        refused(&Broker::from(user.url()), WORK, &settings, ErrorKind::Permission, &parts).await;
    }
    assert_eq!(count(&scene.channel, WORK).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_refused_before_anything_is_declared_also_without_the_right_to_configure() {
    let scene = Scene::bare().await;
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    let stream = table([("x-queue-type", AMQPValue::LongString("stream".into()))]);
    scene.channel.queue_declare(WORK.into(), durable, stream).await.unwrap();
    let user = scene.vhost.user("^$", WRITE, READ);
    for url in [scene.url(), user.url()] {
        for declare in [Declare::Create, Declare::Off] {
            let settings = Settings::new(quick()).declare(declare);
            let parts = ["\"work\" is a stream", "quorum"];
            refused(&Broker::from(&url), WORK, &settings, ErrorKind::Refused, &parts).await;
        }
    }
    assert_eq!(scene.vhost.api().queues(), [WORK]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_is_its_own_connections_is_called_exclusive() {
    let scene = Scene::bare().await;
    let exclusive = QueueDeclareOptions { exclusive: true, ..Default::default() };
    scene.channel.queue_declare(WORK.into(), exclusive, table([])).await.unwrap();
    let parts = ["\"work\" is exclusive", "not exclusive"];
    let (broker, settings) = (Broker::from(scene.url()), Settings::new(quick()));
    refused(&broker, WORK, &settings, ErrorKind::Refused, &parts).await;

    let parts = ["\"amq.gen-1\"", "with a name"];
    refused(&broker, "amq.gen-1", &settings, ErrorKind::Configuration, &parts).await;
    assert_eq!(scene.vhost.api().queues(), [WORK]);
}

/// Of quorum queues the broker gives to others all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_another_consumer_has_to_itself_is_not_called_a_lack_of_rights() {
    let scene = Scene::of(QueueType::Classic).await;
    let exclusive = BasicConsumeOptions { exclusive: true, ..Default::default() };
    let consuming = scene.channel.basic_consume(WORK.into(), "".into(), exclusive, table([]));
    let _consumer = consuming.await.unwrap();
    let consumer = RetryConsumer::builder(scene.url(), WORK)
        .policy(quick())
        .handler(|_| async { panic!("a job was consumed") });
    let error = consumer.start().await.unwrap_err();
    says(&error, ErrorKind::Refused, &["in exclusive use", "x-single-active-consumer"]);
    assert!(!error.to_string().contains("configure"), "{error}");
    // It may be the user's own.
    Retry::attach(scene.url(), WORK, quick()).await.unwrap().close().await.unwrap();
}

/// Declaring a lane needs read on it, so a worker that may not read finds out before it consumes.
#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_read_the_refusal_names_it() {
    let scene = scene().await;
    let user = scene.vhost.user(CONFIGURE, WRITE, "^$");
    refused(
        &Broker::from(user.url()),
        WORK,
        &Settings::new(quick()),
        ErrorKind::Permission,
        &["read", READ],
    )
    .await;
    assert_eq!(count(&scene.channel, WORK).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_permissions_of_the_readme_are_enough_to_retry_bury_and_declare_again() {
    let scene = Scene::new().await;
    let user = scene.vhost.user(CONFIGURE, WRITE, READ);
    let journal = Journal::default();
    let handle = RetryConsumer::builder(user.url(), WORK)
        .policy(quick())
        .on_event(journal.hook())
        .handler(|job: Job| async move {
            anyhow::ensure!(job.retry_count() > 0 && job.body() == b"good", "no");
            Ok(())
        })
        .start()
        .await
        .unwrap();
    scene.job("1", table([]), b"good").await;
    scene.job("2", table([]), b"bad").await;
    journal.is_done("1").await;
    assert_eq!(scene.buried(1).await.len(), 1);
    journal.nothing_broke();

    // Under a running consumer, so that the hand-offs find their queues missing.
    for queue in [BURIED, "work.retry.00000020ms"] {
        scene
            .channel
            .queue_delete(queue.into(), lapin::options::QueueDeleteOptions::default())
            .await
            .unwrap();
    }
    scene.job("3", table([]), b"good").await;
    scene.job("4", table([]), b"bad").await;
    journal.is_done("3").await;
    eventually("job 4 is buried", PATIENCE, async || {
        journal
            .all(|event| {
                matches!(event, Event::Buried { job, .. } if job.id() == "4").then_some(())
            })
            .len()
            == 1
    })
    .await;
    handle.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn check_works_without_configure_once_the_queues_are_there_and_names_what_is_not() {
    let scene = scene().await;
    let user = scene.vhost.user("^$", WRITE, READ);
    let check = Settings::new(quick()).declare(Declare::Check);
    refused(
        &Broker::from(user.url()),
        WORK,
        &check,
        ErrorKind::MissingQueue,
        &["\"work.", "declare = \"check\"", "create"],
    )
    .await;
    assert_eq!(scene.vhost.api().queues(), [WORK]);

    Retry::attach(scene.url(), WORK, quick()).await.unwrap().close().await.unwrap();
    Retry::attach(user.url(), WORK, check.clone()).await.unwrap().close().await.unwrap();
    let journal = Journal::default();
    let handle = RetryConsumer::builder(user.url(), WORK)
        .settings(check)
        .on_event(journal.hook())
        .handler(|job: Job| async move {
            anyhow::ensure!(job.retry_count() > 0, "no");
            Ok(())
        })
        .start()
        .await
        .unwrap();
    journal.is_done("waiting").await;
    journal.nothing_broke();
    handle.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_with_other_arguments_is_never_changed_and_the_argument_is_named() {
    let scene = scene().await;
    let lane = "work.retry.00000020ms";
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    let quorum = ("x-queue-type", AMQPValue::LongString("quorum".into()));
    let other = table([quorum, ("x-dead-letter-exchange", AMQPValue::LongString("mine".into()))]);
    scene.channel.queue_declare(lane.into(), durable, other).await.unwrap();
    refused(
        &Broker::from(scene.url()),
        WORK,
        &Settings::new(quick()),
        ErrorKind::Inequivalent,
        &[lane, "inequivalent arg 'x-dead-letter-exchange'", "delete it"],
    )
    .await;
    assert_eq!(count(&scene.channel, WORK).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_of_the_other_type_is_never_changed_and_the_type_is_named() {
    let scene = scene().await;
    let classic = Settings::new(quick()).queue_type(QueueType::Classic);
    Retry::attach(scene.url(), WORK, classic).await.unwrap().close().await.unwrap();
    refused(
        &Broker::from(scene.url()),
        WORK,
        &Settings::new(quick()),
        ErrorKind::Inequivalent,
        &[BURIED, "inequivalent arg 'x-queue-type'", "use the queue type"],
    )
    .await;
    untouched(&scene, &[WORK, BURIED, "work.retry.00000020ms"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_limit_hit_half_way_says_how_many_were_needed_made_and_missing() {
    let scene = scene().await;
    scene.vhost.api().set_vhost_limit_max_queues(5);
    let settings = Settings::new(RetryPolicy::new([15]).lanes(9));
    let broker = Broker::from(scene.url());
    let needed = ["needs 10 queues"];
    let error = refused(&broker, WORK, &settings, ErrorKind::QueueLimit, &needed).await;
    // Declared side by side, a few get past the limit.
    let made = scene.vhost.api().queues().len() - 1;
    assert!((4..10).contains(&made), "{made}");
    let there = format!("{made} are there and {} are missing", 10 - made);
    says(&error, ErrorKind::QueueLimit, &[&there, "raise the limit", "fewer levels"]);
    assert_eq!(count(&scene.channel, WORK).await, 1);
}
