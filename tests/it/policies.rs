//! More than one policy for a work queue, other policies while it runs, and jobs that grow too old.

use std::{
    io,
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::anyhow;
use lapin::{
    BasicProperties, ExchangeKind,
    options::{ExchangeDeclareOptions, QueueBindOptions},
    types::{AMQPValue, FieldTable},
};
use lapin_retry::{
    BuriedReason, ErrorKind, Handle, Jitter, Job, Outcome, Pauses, Policies, QueueType,
    RetryConsumer, RetryPolicy, Select, Settings, outage,
};
use tokio::sync::Semaphore;

use crate::support::{Journal, PATIENCE, Scene, WORK, eventually, ours, publish, table};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

fn plain<const N: usize>(seconds: [u64; N]) -> RetryPolicy {
    RetryPolicy::new(seconds).jitter(Jitter::None)
}

/// A worker whose every call fails.
async fn failing(scene: &Scene, policies: impl Into<Policies>) -> (Handle, Journal) {
    let journal = Journal::default();
    let calls = journal.clone();
    let handle = RetryConsumer::builder(scene.url(), WORK)
        .policies(policies.into())
        .on_event(journal.hook())
        .handler(move |job: Job| {
            calls.begin(&job);
            async { Err(anyhow!("no")) }
        })
        .start()
        .await
        .unwrap();
    (handle, journal)
}

/// Publishes a job, and tells which lane it is sent to after its failure.
async fn lane_of(scene: &Scene, journal: &Journal, properties: BasicProperties) -> Duration {
    let before = journal.delays().len();
    scene.publish(properties, "").await;
    eventually("it is retried", PATIENCE, async || journal.delays().get(before).copied()).await
}

fn kind(name: &str) -> BasicProperties {
    BasicProperties::default().with_type(name.into())
}

fn unix(at: SystemTime) -> u64 {
    at.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_gets_the_policy_of_its_type_and_another_the_default() {
    let scene = Scene::new().await;
    let policies =
        Policies::new(plain([30])).with("sync", plain([40, 50])).with("mail", plain([60, 40]));
    let (_worker, journal) = failing(&scene, policies).await;
    assert_eq!(lane_of(&scene, &journal, kind("sync")).await, 40 * SECOND);
    assert_eq!(lane_of(&scene, &journal, kind("mail")).await, 60 * SECOND);
    assert_eq!(lane_of(&scene, &journal, kind("unheard-of")).await, 30 * SECOND);
    assert_eq!(lane_of(&scene, &journal, BasicProperties::default()).await, 30 * SECOND);
    // The level of 40 s is one lane for both.
    let shared = ["buried", "retry.00030s", "retry.00040s", "retry.00050s", "retry.00060s"];
    assert_eq!(scene.queues(), shared);
    // The second level is the own policy's, too; the default has none.
    let second = |name| {
        let count = ("retry-count", AMQPValue::LongLongInt(1));
        ours([count]).with_type(name)
    };
    assert_eq!(lane_of(&scene, &journal, second("sync".into())).await, 50 * SECOND);
    assert_eq!(lane_of(&scene, &journal, second("mail".into())).await, 40 * SECOND);
    scene.publish(second("unheard-of".into()), "").await;
    assert_eq!(journal.until_buried(1).await, [BuriedReason::Exhausted]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_by_routing_key_is_chosen_by_the_original_one_also_on_a_retry() {
    let scene = Scene::new().await;
    let exchange = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    let none = FieldTable::default;
    let topic = ExchangeKind::Topic;
    scene.channel.exchange_declare("shop".into(), topic, exchange, none()).await.unwrap();
    let bind = QueueBindOptions::default();
    scene
        .channel
        .queue_bind(WORK.into(), "shop".into(), "order.*".into(), bind, none())
        .await
        .unwrap();
    let policies = Policies::new(plain([30]))
        .select(Select::RoutingKey)
        .with("order.new", plain([1, 2, 40]))
        // What the raw delivery of a retry shows.
        .with(WORK, plain([60, 60, 60]));
    let (_worker, journal) = failing(&scene, policies).await;
    publish(&scene.channel, "shop", "order.new", BasicProperties::default(), b"").await;
    eventually("the third failure", PATIENCE, async || journal.delays().len() == 3).await;
    assert_eq!(journal.delays(), [SECOND, 2 * SECOND, 40 * SECOND]);
    publish(&scene.channel, "shop", "order.old", BasicProperties::default(), b"").await;
    eventually("the default", PATIENCE, async || journal.delays().len() == 4).await;
    assert_eq!(journal.delays()[3], 30 * SECOND);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_can_be_chosen_by_a_header() {
    let scene = Scene::new().await;
    let policies = Policies::new(plain([30]))
        .select(Select::Header("tenant".to_owned()))
        .with("blue", plain([40]));
    let (_worker, journal) = failing(&scene, policies).await;
    let tenant = |value| {
        let headers = table([("tenant", value)]);
        kind("blue").with_headers(headers)
    };
    let text = |text: &str| AMQPValue::LongString(text.into());
    assert_eq!(lane_of(&scene, &journal, tenant(text("blue"))).await, 40 * SECOND);
    assert_eq!(lane_of(&scene, &journal, tenant(text("red"))).await, 30 * SECOND);
    assert_eq!(lane_of(&scene, &journal, tenant(AMQPValue::LongLongInt(1))).await, 30 * SECOND);
    assert_eq!(lane_of(&scene, &journal, kind("blue")).await, 30 * SECOND);
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_of_more_than_200_queues_are_refused_and_make_none() {
    let scene = Scene::new().await;
    let many = (1..=4).fold(Policies::new(RetryPolicy::default()), |policies, n| {
        let own = RetryPolicy::new((1..=5).map(|level| n * 1000 + level)).lanes(8);
        policies.with(format!("type-{n}"), own)
    });
    let consumer =
        RetryConsumer::builder(scene.url(), WORK).policies(many).handler(|_: Job| async { Ok(()) });
    let refused = consumer.start().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Configuration);
    assert!(refused.to_string().contains("217 queues for \"work\""), "{refused}");
    assert!(refused.to_string().contains("at most 200"), "{refused}");
    assert!(scene.queues().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_makes_the_lanes_first_and_leaves_the_jobs_at_work_under_the_old_rules() {
    let scene = Scene::new().await;
    let (journal, started) = (Journal::default(), Arc::new(Semaphore::new(0)));
    let fail = Arc::new(Semaphore::new(0));
    let (start, may_fail) = (Arc::clone(&started), Arc::clone(&fail));
    let worker = RetryConsumer::builder(scene.url(), WORK)
        .policy(plain([30]))
        .on_event(journal.hook())
        .handler(move |job: Job| {
            let (start, may_fail) = (Arc::clone(&start), Arc::clone(&may_fail));
            async move {
                if job.body() == b"slow" {
                    start.add_permits(1);
                    may_fail.acquire().await?.forget();
                }
                Err(anyhow!("no"))
            }
        })
        .start()
        .await
        .unwrap();
    scene.publish(BasicProperties::default(), "slow").await;
    started.acquire().await.unwrap().forget();

    worker.reload(plain([40])).await.unwrap();
    assert_eq!(scene.queues(), ["buried", "retry.00030s", "retry.00040s"], "made beforehand");
    assert_eq!(lane_of(&scene, &journal, BasicProperties::default()).await, 40 * SECOND);
    fail.add_permits(1);
    eventually("the slow one fails", PATIENCE, async || journal.delays().len() == 2).await;
    assert_eq!(journal.delays()[1], 30 * SECOND, "it came in under the old rules");

    // What cannot be is refused, and the rules stay.
    let impossible = [
        Policies::new(RetryPolicy::new([0u64; 0])),
        Policies::new(RetryPolicy::new([15]).lanes(0)),
        Policies::new(plain([15])).with("many", RetryPolicy::new(1..=200u64)),
    ];
    for policies in impossible {
        let refused = worker.reload(policies).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Configuration, "{refused}");
        assert_eq!(lane_of(&scene, &journal, BasicProperties::default()).await, 40 * SECOND);
    }
    // So is what the broker does not give.
    scene.vhost.api().set_vhost_limit_max_queues(4);
    let refused = worker.reload(RetryPolicy::new([50]).lanes(4)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::QueueLimit, "{refused}");
    assert_eq!(lane_of(&scene, &journal, BasicProperties::default()).await, 40 * SECOND);
    worker.shutdown(SECOND).await;
}

/// Says what becomes of jobs whose handler fails with an `io::Error`.
fn io_errors(outcome: Outcome) -> Settings {
    Settings::default().classify(move |_: &io::Error| Some(outcome))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_keeps_what_it_is_not_given() {
    let scene = Scene::new().await;
    let journal = Journal::default();
    let worker = RetryConsumer::builder(scene.url(), WORK)
        .settings(io_errors(Outcome::Reject).pauses(Pauses::default().first(HOUR).max(HOUR)))
        .policy(plain([30]))
        .on_event(journal.hook())
        .handler(async |job: Job| match job.body() {
            b"down" => Err(outage(anyhow!("down")).into()),
            _ => Err(io::Error::other("no").into()),
        })
        .start()
        .await
        .unwrap();
    let buried = async |jobs: usize| {
        scene.publish(BasicProperties::default(), "").await;
        assert_eq!(journal.until_buried(jobs).await, vec![BuriedReason::Rejected; jobs]);
    };
    buried(1).await;
    worker.reload(plain([40])).await.unwrap();
    buried(2).await;
    // Another classifier takes the place of that one, and the policy stays.
    worker.reload(io_errors(Outcome::Failed)).await.unwrap();
    assert_eq!(lane_of(&scene, &journal, BasicProperties::default()).await, 40 * SECOND);
    assert_eq!(scene.queues(), ["buried", "retry.00030s", "retry.00040s"]);
    worker.reload(Settings::default()).await.unwrap();
    assert_eq!(lane_of(&scene, &journal, BasicProperties::default()).await, 40 * SECOND);
    scene.publish(BasicProperties::default(), "down").await;
    eventually("it pauses", PATIENCE, async || journal.waits() == [HOUR]).await;
    worker.shutdown(SECOND).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_are_given_to_a_builder_last_discard_nothing_that_they_do_not_set() {
    let scene = Scene::new().await;
    let (first, second) = (Journal::default(), Journal::default());
    let worker = RetryConsumer::builder(scene.url(), WORK)
        .policy(plain([30]))
        .on_event(first.hook())
        .classify(|_: &io::Error| Some(Outcome::Reject))
        .settings(Settings::default().queue_type(QueueType::Classic).on_event(second.hook()))
        .handler(async |_: Job| Err(io::Error::other("no").into()))
        .start()
        .await
        .unwrap();
    scene.publish(BasicProperties::default(), "").await;
    for journal in [first, second] {
        assert_eq!(journal.until_buried(1).await, [BuriedReason::Rejected]);
    }
    assert_eq!(scene.queues(), ["buried", "retry.00030s"]);
    let lane = scene.vhost.api().queue("work.retry.00030s").unwrap();
    assert_eq!(lane["type"], "classic");
    worker.shutdown(SECOND).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_of_the_old_rules_that_went_missing_is_made_again_for_a_job_at_work() {
    let scene = Scene::new().await;
    let (journal, fail) = (Journal::default(), Arc::new(Semaphore::new(0)));
    let (may_fail, started) = (Arc::clone(&fail), Arc::new(Semaphore::new(0)));
    let start = Arc::clone(&started);
    let worker = RetryConsumer::builder(scene.url(), WORK)
        .policy(plain([30]))
        .on_event(journal.hook())
        .handler(move |_: Job| {
            let (may_fail, start) = (Arc::clone(&may_fail), Arc::clone(&start));
            async move {
                start.add_permits(1);
                may_fail.acquire().await?.forget();
                Err(anyhow!("no"))
            }
        })
        .start()
        .await
        .unwrap();
    scene.publish(BasicProperties::default(), "").await;
    started.acquire().await.unwrap().forget();
    worker.reload(plain([40])).await.unwrap();
    scene.channel.queue_delete("work.retry.00030s".into(), Default::default()).await.unwrap();
    fail.add_permits(1);
    eventually("it is retried", PATIENCE, async || journal.delays() == [30 * SECOND]).await;
    worker.shutdown(SECOND).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_next_delay_would_pass_its_policys_age_is_buried_now() {
    let scene = Scene::new().await;
    let policies = Policies::new(plain([30]).max_age(29 * SECOND))
        .with("young", plain([1, 30]).max_age(29 * SECOND))
        .with("old", plain([30]).max_age(3600 * SECOND));
    let (_worker, journal) = failing(&scene, policies).await;
    scene.publish(BasicProperties::default(), "").await;
    assert_eq!(journal.until_buried(1).await, [BuriedReason::Expired]);
    assert_eq!(journal.attempted(), 1);
    let buried = scene.take_buried(1).await.remove(0);
    assert_eq!(buried["headers"]["buried-reason"], "expired");
    assert_eq!(buried["headers"]["retry-count"], 1);
    assert_eq!(buried["headers"]["retry-error"], "no");
    // One level fits into the age, the next does not.
    scene.publish(kind("young"), "").await;
    assert_eq!(journal.until_buried(2).await[1], BuriedReason::Expired);
    assert_eq!((journal.delays(), journal.attempted()), (vec![SECOND], 3));
    assert_eq!(lane_of(&scene, &journal, kind("old")).await, 30 * SECOND);
    // Half an hour old, and an hour.
    let now = SystemTime::now();
    let aged = |minutes: u32| kind("old").with_timestamp(unix(now - minutes * 60 * SECOND));
    assert_eq!(lane_of(&scene, &journal, aged(30)).await, 30 * SECOND);
    let before = journal.attempted();
    scene.publish(aged(61), "").await;
    assert_eq!(journal.until_buried(3).await[2], BuriedReason::Expired);
    assert_eq!(journal.attempted(), before, "it arrived past its age, and was run");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_expires_is_buried_when_its_next_delay_would_pass_that() {
    let scene = Scene::new().await;
    let (_worker, journal) = failing(&scene, plain([1, 30])).await;
    let lives = |ms: &str| BasicProperties::default().with_expiration(ms.into());
    // It fits once; the retry has the deadline in place of the expiration.
    scene.publish(lives("29000"), "").await;
    assert_eq!(journal.until_buried(1).await, [BuriedReason::Expired]);
    assert_eq!((journal.delays(), journal.attempted()), (vec![SECOND], 2));
    let buried = scene.take_buried(1).await.remove(0);
    assert!(buried["headers"]["retry-deadline"].is_string(), "{buried}");
    assert_eq!(buried["headers"]["retry-count"], 2);
    assert!(buried["properties"].get("expiration").is_none(), "{buried}");
    // Its life began before it was published here.
    let a_minute_ago = unix(SystemTime::now() - 60 * SECOND);
    scene.publish(lives("60500").with_timestamp(a_minute_ago), "").await;
    assert_eq!(journal.until_buried(2).await[1], BuriedReason::Expired);
    let after_a_run = journal.attempted();
    scene.publish(lives("30000").with_timestamp(a_minute_ago), "").await;
    let past = humantime::format_rfc3339_millis(SystemTime::now() - SECOND).to_string();
    scene.publish(ours([("retry-deadline", AMQPValue::LongString(past.into()))]), "").await;
    assert_eq!(journal.until_buried(4).await[2..], [BuriedReason::Expired; 2]);
    assert_eq!(journal.attempted(), after_a_run, "they arrived too late, and were run");
    for buried in scene.take_buried(3).await {
        assert_eq!(buried["headers"]["buried-reason"], "expired");
        assert_eq!(buried["headers"]["retry-original-routing-key"], WORK);
    }
}
