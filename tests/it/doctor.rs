//! What is wrong with the broker, a queue or a policy is told at the start, or refused.

use crate::support::{
    BURIED, Journal, PATIENCE, Scene, WORK, consume, count, eventually, next, table, within,
};
use lapin::{
    options::{BasicRejectOptions, QueueDeclareOptions},
    types::{AMQPValue, FieldTable},
};
use lapin_retry::{
    Declare, Doctor, Error, ErrorKind, Event, Finding, Jitter, Retry, RetryConsumer, RetryPolicy,
    Settings, Severity,
};
use serde_json::{Value, json};
use std::time::Duration;

const LANE: &str = "work.retry.00600s";

/// Looks through the management API of the broker under test.
fn settings(journal: &Journal) -> Settings {
    let api = std::env::var("RABBITMQ_MANAGEMENT_URL").expect("set by scripts/with-broker");
    Settings::new(RetryPolicy::new([600]).jitter(Jitter::None))
        .management(api)
        .on_event(journal.hook())
}

fn found(journal: &Journal) -> Vec<Finding> {
    journal.all(|event| match event {
        Event::Found { queue, finding, .. } => {
            assert_eq!(queue, WORK);
            Some(finding.clone())
        }
        _ => None,
    })
}

/// Starts both ways in: told of, and all the same ready.
async fn findings(scene: &Scene) -> Vec<Finding> {
    findings_with(scene, |settings| settings).await
}

async fn findings_with(scene: &Scene, change: fn(Settings) -> Settings) -> Vec<Finding> {
    let (attached, started) = (Journal::default(), Journal::default());
    let retry = Retry::attach(scene.url(), WORK, change(settings(&attached))).await.unwrap();
    retry.close().await.unwrap();
    let consumer = RetryConsumer::builder(scene.url(), WORK)
        .settings(change(settings(&started)))
        .handler(|_| async { Ok(()) })
        .start()
        .await
        .unwrap();
    consumer.shutdown(Duration::ZERO).await;
    assert_eq!(found(&attached), found(&started));
    found(&started)
}

async fn declare(scene: &Scene, options: QueueDeclareOptions, arguments: FieldTable) {
    scene.channel.queue_declare(WORK.into(), options, arguments).await.expect("a work queue");
}

fn durable() -> QueueDeclareOptions {
    QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() }
}

/// A quorum queue with a dead-letter target, in which nothing is to be found, and these arguments.
fn sound<const N: usize>(more: [(&str, AMQPValue); N]) -> FieldTable {
    let mut arguments = table(more);
    for (key, value) in [
        ("x-queue-type", "quorum"),
        ("x-dead-letter-exchange", ""),
        ("x-dead-letter-routing-key", BURIED),
    ] {
        arguments.insert(key.into(), AMQPValue::LongString(value.into()));
    }
    arguments
}

async fn sound_scene() -> Scene {
    let scene = Scene::bare().await;
    declare(&scene, durable(), sound([])).await;
    scene
}

#[track_caller]
fn one(mut found: Vec<Finding>, severity: Severity, queue: &str, parts: &[&str]) -> Finding {
    assert_eq!(found.len(), 1, "{found:#?}");
    let finding = found.remove(0);
    assert_eq!((finding.severity, finding.queue.as_str()), (severity, queue), "{finding}");
    for part in parts {
        assert!(finding.to_string().contains(part), "{finding} should say {part}");
    }
    finding
}

/// Does what `rabbitmqctl set_policy` in a remedy does, through the management API.
fn obey(scene: &Scene, finding: &Finding) {
    let command =
        &finding.remedy[finding.remedy.find("rabbitmqctl set_policy").expect("a command")..];
    let (plain, quoted) = command.split_once('\'').unwrap();
    let words: Vec<_> = plain.split(' ').collect();
    assert_eq!(words[3], scene.vhost.name());
    let (pattern, rest) = quoted.split_once('\'').unwrap();
    let definition = rest.trim_start_matches(" '").split('\'').next().unwrap();
    let definition: Value = serde_json::from_str(definition).unwrap();
    scene.vhost.api().set_policy(words[8], pattern, words[5].parse().unwrap(), &definition);
}

async fn until_nothing_is_found(scene: &Scene) {
    eventually("nothing is found", PATIENCE, async || findings(scene).await.is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_found_where_all_is_well_and_refuse_starts() {
    let scene = sound_scene().await;
    let found = findings_with(&scene, |settings| settings.doctor(Doctor::Refuse)).await;
    assert_eq!(found, []);
}

/// The work queue that the README declares, and the one in the definitions file.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_found_in_the_work_queues_that_the_docs_declare() {
    let readme = include_str!("../../README.md");
    let (_, body) = readme.split_once("api/queues/%2F/orders\"").expect("the command");
    let (_, body) = body.split_once("-d '").expect("a body");
    let queue: Value = serde_json::from_str(body.split('\'').next().unwrap()).unwrap();
    let definitions =
        serde_json::from_str(include_str!("../../topology/definitions.json")).unwrap();
    let (by_hand, imported) = (Scene::bare().await, Scene::bare().await);
    by_hand.vhost.api().put(&format!("queues/{}/orders", by_hand.vhost.name()), &queue);
    imported.vhost.api().import(&definitions);
    for scene in [by_hand, imported] {
        let journal = Journal::default();
        let api = std::env::var("RABBITMQ_MANAGEMENT_URL").unwrap();
        let settings = Settings::new(RetryPolicy::default())
            .management(api)
            .doctor(Doctor::Refuse)
            .on_event(journal.hook());
        let retry = Retry::attach(scene.url(), "orders", settings).await.unwrap();
        retry.close().await.unwrap();
        assert_eq!(journal.count(|event| matches!(event, Event::Found { .. })), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refuse_fails_the_start_with_all_findings_and_consumes_nothing() {
    let scene = Scene::bare().await;
    let mut arguments = sound([("x-expires", AMQPValue::LongInt(3_600_000))]);
    arguments.insert("x-max-length".into(), AMQPValue::LongInt(9));
    declare(&scene, durable(), arguments).await;
    scene.job("waiting", table([]), b"job").await;
    let refused = |error: Error| {
        assert_eq!(error.kind(), ErrorKind::Unfit, "{error}");
        for part in ["2 findings", "expires to 3600000 ms", "max-length to 9", "delete_queue"] {
            assert!(error.to_string().contains(part), "{error} should say {part}");
        }
    };
    let journal = Journal::default();
    let refuse = settings(&journal).doctor(Doctor::Refuse);
    refused(Retry::attach(scene.url(), WORK, refuse.clone()).await.unwrap_err());
    let builder = RetryConsumer::builder(scene.url(), WORK).settings(refuse);
    let consumer = builder.handler(|_| async { panic!("a job was consumed") });
    refused(consumer.start().await.unwrap_err());
    assert_eq!(found(&journal).len(), 4);
    assert_eq!(scene.vhost.api().take(WORK, 1)[0]["redelivered"], false);

    let off = findings_with(&scene, |settings| settings.doctor(Doctor::Off)).await;
    assert_eq!(off, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_work_queue_that_vanishes_is_told_of() {
    let scene = Scene::bare().await;
    let auto_delete = QueueDeclareOptions { auto_delete: true, ..durable() };
    // A quorum queue cannot be so.
    declare(&scene, auto_delete, FieldTable::default()).await;
    let journal = Journal::default();
    let retry = Retry::attach(scene.url(), WORK, settings(&journal)).await.unwrap();
    retry.close().await.unwrap();
    one(found(&journal), Severity::Loss, WORK, &["auto-delete", "delete_queue"]);

    let scene = Scene::bare().await;
    declare(&scene, durable(), sound([("x-expires", AMQPValue::LongInt(3_600_000))])).await;
    let expires = findings(&scene).await;
    one(expires, Severity::Loss, WORK, &["its own argument", "3600000 ms", "without x-expires"]);

    let scene = Scene::bare().await;
    if scene.vhost.api().version() < (4, 3) {
        declare(&scene, QueueDeclareOptions::default(), FieldTable::default()).await;
        let transient = findings(&scene).await;
        one(transient, Severity::Loss, WORK, &["not durable", "declare it durable"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_on_the_work_queue_is_mended_by_the_command_that_is_told() {
    let scene = sound_scene().await;
    for (definition, severity, says) in [
        (json!({ "expires": 3_600_000 }), Severity::Loss, "sets expires"),
        (
            json!({ "max-length": 5, "overflow": "reject-publish" }),
            Severity::Trouble,
            "every three minutes",
        ),
    ] {
        scene.vhost.api().set_policy("theirs", "^work$", 3, &definition);
        let found = eventually("it applies", PATIENCE, async || {
            Some(findings(&scene).await).filter(|found| !found.is_empty())
        })
        .await;
        let finding = one(found, severity, WORK, &["the policy \"theirs\"", says, "--priority 4 "]);
        obey(&scene, &finding);
        until_nothing_is_found(&scene).await;
        scene.vhost.api().delete_policy("lapin-retry-work-work-queue");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_limit_that_would_drop_jobs_is_told_of_and_mended_by_its_command() {
    let scene = Scene::new().await;
    let by_default = findings(&scene).await;
    if scene.vhost.api().version() < (4, 0) {
        assert_eq!(by_default, [], "no limit by default");
        scene.vhost.api().set_policy("limit", "^work$", 3, &json!({ "delivery-limit": 20 }));
    } else {
        one(by_default, Severity::Loss, WORK, &["the broker's default", "limit to 20"]);
    }
    let found = eventually("it applies", PATIENCE, async || {
        Some(findings(&scene).await).filter(|found| !found.is_empty())
    })
    .await;
    let finding = one(found, Severity::Loss, WORK, &["delivery limit to 20", BURIED]);
    deliver_too_often(&scene).await;
    assert_eq!(count(&scene.channel, BURIED).await, 0, "what was said is so");
    obey(&scene, &finding);
    until_nothing_is_found(&scene).await;
    deliver_too_often(&scene).await;
    scene.holds(BURIED, 1).await;
}

/// Takes a job as often as the limit of 20 allows, until it is gone.
async fn deliver_too_often(scene: &Scene) {
    scene.job("poison", table([]), b"job").await;
    let channel = scene.connection.create_channel().await.unwrap();
    let mut consumer = consume(&channel, WORK, 1).await;
    for _ in 0..21 {
        let requeue = BasicRejectOptions { requeue: true };
        assert!(next(&mut consumer).await.acker.reject(requeue).await.unwrap());
    }
    scene.unacked(0).await;
    channel.close(200, "done".into()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_timeout_under_the_handler_timeout_is_told_of_where_the_broker_heeds_it() {
    let scene = Scene::bare().await;
    declare(&scene, durable(), sound([("x-consumer-timeout", AMQPValue::LongInt(600_000))])).await;
    let journal = Journal::default();
    let start = async |timeout: u64| {
        let consumer = RetryConsumer::builder(scene.url(), WORK)
            .settings(settings(&journal))
            .handler_timeout(Duration::from_secs(timeout))
            .consumer_timeout(Duration::from_secs(2 * timeout))
            .handler(|_| async { Ok(()) });
        consumer.start().await.unwrap().shutdown(Duration::ZERO).await;
    };
    start(500).await;
    assert_eq!(found(&journal), []);
    start(570).await;
    if scene.vhost.api().version() < (4, 0) {
        assert_eq!(found(&journal), [], "3.10 heeds none");
        return;
    }
    let says = ["consumer timeout to 10m", "held for 10m", "x-consumer-timeout", "handler_timeout"];
    one(found(&journal), Severity::Trouble, WORK, &says);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_on_our_queues_is_told_of_at_the_first_start_and_kept_off_by_the_shield() {
    let scene = sound_scene().await;
    let theirs = json!({
        "overflow": "drop-head", "message-ttl": 1000, "expires": 3_600_000, "max-length": 9,
        "max-length-bytes": 900, "delivery-limit": 3,
    });
    scene.vhost.api().set_policy("theirs", r"^(?!amq\.).*\.(retry|buried)", 2, &theirs);
    let found = findings(&scene).await;
    assert_eq!(found.len(), 6, "{found:#?}");
    for key in theirs.as_object().unwrap().keys() {
        let told: Vec<_> = found
            .iter()
            .filter(|finding| finding.problem.contains(&format!("\"theirs\" sets {key} to")))
            .collect();
        assert_eq!(told.len(), 1, "{key}: {found:#?}");
        assert_eq!(told[0].queue, BURIED);
        assert!(told[0].problem.contains("1 more"), "{}", told[0]);
        assert!(told[0].remedy.contains("set_policy"), "{}", told[0]);
    }
    obey(&scene, &found[0]);
    until_nothing_is_found(&scene).await;
    // The queue itself takes the shield on a moment later.
    eventually("the shield applies", PATIENCE, async || {
        scene.vhost.api().queue(BURIED).unwrap()["policy"] == "lapin-retry-work"
    })
    .await;
    crate::support::publish(&scene.channel, "", BURIED, Default::default(), b"job").await;
    for _ in 0..10 {
        assert_eq!(scene.vhost.api().messages(BURIED, 1, "reject_requeue_true").len(), 1);
    }
    scene.holds(BURIED, 1).await;
}

/// The lower limit wins, so the queue's own argument does not protect it.
#[tokio::test(flavor = "multi_thread")]
async fn a_lower_delivery_limit_on_the_buried_queue_is_told_of_and_drops_what_is_looked_at() {
    let scene = sound_scene().await;
    let vhost = scene.vhost.name();
    scene.vhost.api().put(
        &format!("operator-policies/{vhost}/low"),
        &json!({ "pattern": "buried$", "apply-to": "queues", "priority": 1,
                 "definition": { "delivery-limit": 3 } }),
    );
    let says = ["operator policy \"low\" sets delivery-limit to 3", "clear_operator_policy"];
    one(findings(&scene).await, Severity::Loss, BURIED, &says);
    eventually("it applies", PATIENCE, async || {
        scene.vhost.api().queue(BURIED).unwrap()["operator_policy"] == "low"
    })
    .await;
    crate::support::publish(&scene.channel, "", BURIED, Default::default(), b"job").await;
    for _ in 0..4 {
        assert_eq!(scene.vhost.api().messages(BURIED, 1, "reject_requeue_true").len(), 1);
    }
    scene.holds(BURIED, 0).await;
    assert_eq!(scene.vhost.api().messages(BURIED, 1, "reject_requeue_true").len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_policy_on_our_queues_is_told_of_at_the_first_start() {
    let scene = sound_scene().await;
    let vhost = scene.vhost.name();
    let set = |name: &str, pattern: &str, priority: u32, definition: Value| {
        scene.vhost.api().put(
            &format!("operator-policies/{vhost}/{name}"),
            &json!({ "pattern": pattern, "apply-to": "queues", "priority": priority,
                     "definition": definition }),
        );
    };
    set("low", "^work", 1, json!({ "expires": 3_600_000 }));
    set("op", r"(retry)\.0*(6)\2?00s", 2, json!({ "max-length": 9 }));
    set("other", r"^Work|^ork", 3, json!({ "message-ttl": 9 }));
    let mut found = findings(&scene).await;
    found.sort_by_key(|finding| finding.severity);
    assert_eq!(found.len(), 3, "{found:#?}");
    let clear = format!("rabbitmqctl clear_operator_policy -p {vhost} ");
    let lane =
        one(vec![found.remove(0)], Severity::Trouble, LANE, &["\"op\" sets max-length to 9"]);
    assert!(lane.remedy.ends_with(&format!("{clear}op")), "{lane}");
    for finding in found {
        assert!(finding.problem.contains("operator policy \"low\" sets expires"), "{finding}");
        assert!([WORK, BURIED].contains(&finding.queue.as_str()), "{finding}");
        assert!(finding.remedy.ends_with(&format!("{clear}low")), "{finding}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_with_other_arguments_is_told_of_where_it_is_not_declared() {
    let scene = sound_scene().await;
    let text = |text: &str| AMQPValue::LongString(text.into());
    let arguments = table([
        ("x-queue-type", text("quorum")),
        ("x-queue-leader-locator", text("balanced")),
        ("x-delivery-limit", AMQPValue::LongLongInt(2_147_483_647)),
        ("x-dead-letter-exchange", text("")),
        ("x-dead-letter-routing-key", text("elsewhere")),
        ("x-message-ttl", AMQPValue::LongLongInt(600_000)),
        ("x-dead-letter-strategy", text("at-least-once")),
        ("x-overflow", text("reject-publish")),
    ]);
    scene.channel.queue_declare(LANE.into(), durable(), arguments).await.unwrap();
    let off = findings_with(&scene, |settings| settings.declare(Declare::Off)).await;
    assert_eq!(off.len(), 2, "{off:#?}");
    one(vec![off[0].clone()], Severity::Trouble, BURIED, &["does not exist", "create"]);
    let differs = ["x-dead-letter-routing-key is \"elsewhere\" and not \"work\"", LANE];
    let lane = one(vec![off[1].clone()], Severity::Loss, LANE, &differs);
    let delete = format!("rabbitmqctl delete_queue -p {} {LANE}", scene.vhost.name());
    assert!(lane.remedy.contains(&delete), "{lane}");

    // The broker itself refuses to declare it, with the same command.
    let error = Retry::attach(scene.url(), WORK, settings(&Journal::default())).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Inequivalent);
    assert!(error.to_string().contains(&delete), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_looked_at_is_told_and_fails_no_start() {
    let scene = sound_scene().await;
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = silent.local_addr().unwrap();
    let real = std::env::var("RABBITMQ_MANAGEMENT_URL").unwrap();
    let host = real.rsplit('@').next().unwrap();
    let shield = format!("rabbitmqctl set_policy -p {} --priority 1000", scene.vhost.name());
    for (address, says) in [
        (None, "no address of the management API"),
        (Some(format!("http://guest:hunter2@{host}")), "a user with the tag management"),
        (Some("http://guest:hunter2@127.0.0.1:1".to_owned()), "127.0.0.1:1: "),
        (Some(format!("http://guest:hunter2@{silent}")), "did not answer within 5s"),
        (Some(format!("https://guest:hunter2@{host}")), host),
        (Some(format!("http://guest:hunter2@{}", crate::support::broker_addr())), "127.0.0.1"),
    ] {
        let journal = Journal::default();
        let settings = Settings::new(RetryPolicy::new([600]).jitter(Jitter::None))
            .on_event(journal.hook())
            .doctor(Doctor::Refuse);
        let settings = match address {
            Some(address) => settings.management(address),
            None => settings,
        };
        assert!(!format!("{settings:?}").contains("hunter2"));
        let attaching = Retry::attach(scene.url(), WORK, settings);
        within("it starts", attaching).await.unwrap().close().await.unwrap();
        let found = found(&journal);
        assert!(!format!("{found:?}").contains("hunter2"), "{found:?}");
        one(found, Severity::Unchecked, WORK, &["not looked at", says, &shield]);
    }
}
