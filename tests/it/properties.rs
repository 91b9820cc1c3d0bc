//! A job is the same at every attempt and in the buried queue: its payload, its properties, its
//! headers. What is not the same is named here.

use std::time::{Duration, SystemTime};

use crate::support::{
    Attempt, PATIENCE, Scene, amqp_uri, count, declare_work_queue, eventually, publish, table,
};
use lapin::{
    BasicProperties,
    message::Delivery,
    options::{BasicGetOptions, QueueBindOptions},
    types::{AMQPValue, DecimalValue, FieldArray, FieldTable},
};
use lapin_retry::{Handle, Jitter, QueueType, RetryConsumer, RetryPolicy, Settings};

const EXCHANGE: &str = "amq.topic";
const KEY: &str = "order.created";
/// The first, and one after each of the three levels.
const ATTEMPTS: usize = 4;
/// The broker's own, beside ours.
const BROKERS: [&str; 9] = [
    "x-death",
    "x-first-death-exchange",
    "x-first-death-queue",
    "x-first-death-reason",
    "x-last-death-exchange",
    "x-last-death-queue",
    "x-last-death-reason",
    "x-delivery-count",
    "x-acquired-count",
];

/// A worker of `orders`, a queue of a topic exchange, whose jobs fail at every level.
struct Road {
    _worker: Handle,
    scene: Scene,
}

/// Where a job was seen: at each attempt, and in the buried queue.
struct Trip {
    attempts: Vec<Attempt>,
    buried: Delivery,
}

impl Road {
    async fn new(kind: QueueType) -> Self {
        let scene = Scene::with("orders", kind).await;
        let (queue, exchange, key) = ("orders".into(), EXCHANGE.into(), "order.*".into());
        let (options, arguments) = (QueueBindOptions::default(), FieldTable::default());
        scene.channel.queue_bind(queue, exchange, key, options, arguments).await.unwrap();
        let policy = RetryPolicy::new(["100ms", "200ms", "300ms"]).jitter(Jitter::None);
        let worker = RetryConsumer::builder(scene.url(), "orders")
            .settings(Settings::new(policy).queue_type(kind))
            .on_event(scene.journal.hook())
            .handler(scene.journal.handler(|_| u32::MAX))
            .start()
            .await
            .unwrap();
        Self { _worker: worker, scene }
    }

    /// Publishes the only job under way, and returns when it is buried.
    async fn travel(&self, properties: BasicProperties, body: &[u8]) -> Trip {
        let (ended, attempted) =
            (self.scene.journal.ends().len(), self.scene.journal.attempts().len());
        publish(&self.scene.channel, EXCHANGE, KEY, properties, body).await;
        eventually("it is buried", PATIENCE, async || self.scene.journal.ends().len() > ended)
            .await;
        self.scene.journal.assert_no_trouble();
        let attempts = self.scene.journal.attempts()[attempted..].to_vec();
        assert_eq!(attempts.len(), ATTEMPTS);
        let options = BasicGetOptions { no_ack: true };
        let buried = self.scene.channel.basic_get("orders.buried".into(), options).await.unwrap();
        Trip { attempts, buried: buried.expect("the buried job").delivery }
    }
}

impl Trip {
    /// The properties at each attempt, and those of the buried job.
    fn properties(&self) -> Vec<&BasicProperties> {
        let attempts = self.attempts.iter().map(|attempt| attempt.job.properties());
        attempts.chain([&self.buried.properties]).collect()
    }

    fn headers(&self) -> Vec<FieldTable> {
        let headers = |properties: &&BasicProperties| properties.headers().clone();
        self.properties().iter().map(headers).map(Option::unwrap_or_default).collect()
    }
}

fn long_string(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

#[tokio::test(flavor = "multi_thread")]
async fn any_payload_is_the_same_at_every_attempt() {
    let road = Road::new(QueueType::Quorum).await;
    let every_byte: Vec<u8> = (0..=255).collect();
    let of_several_frames = every_byte.repeat(2_000);
    for body in [Vec::new(), vec![0], every_byte, of_several_frames] {
        let trip = road.travel(BasicProperties::default(), &body).await;
        for attempt in &trip.attempts {
            assert!(attempt.job.body() == body, "{} bytes: {attempt:?}", body.len());
        }
        assert!(trip.buried.data == body, "{} bytes in the buried queue", body.len());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_properties_but_delivery_mode_and_expiration_are_the_same_at_every_attempt() {
    for kind in [QueueType::Quorum, QueueType::Classic] {
        let road = Road::new(kind).await;
        let user = amqp_uri().authority.userinfo.username;
        let published = BasicProperties::default()
            .with_content_type("application/json; charset=utf-8".into())
            .with_content_encoding("gzip".into())
            .with_headers(table([("tenant", long_string("acme"))]))
            .with_delivery_mode(1)
            .with_priority(7)
            .with_correlation_id("correlation".into())
            .with_reply_to("answers".into())
            .with_expiration("600000".into())
            .with_message_id("an id of the publisher's".into())
            .with_timestamp(seconds_now())
            .with_type("order.v1".into())
            .with_user_id(user.into())
            .with_app_id("shop".into())
            .with_cluster_id("cluster".into());
        let trip = road.travel(published.clone(), b"job").await;

        let comparable = |properties: &BasicProperties| {
            let mut comparable = properties.clone().with_headers(FieldTable::default());
            comparable = comparable.with_delivery_mode(2).with_expiration("".into());
            comparable
        };
        for (place, properties) in trip.properties().into_iter().enumerate() {
            assert_eq!(comparable(properties), comparable(&published), "{kind:?}, place {place}");
            let headers = properties.headers().as_ref().unwrap().inner();
            assert_eq!(headers["tenant"], long_string("acme"), "{kind:?}, place {place}");
            // The first is what the publisher sent, the others are ours.
            let mode = if place == 0 { 1 } else { 2 };
            assert_eq!(*properties.delivery_mode(), Some(mode), "{kind:?}, place {place}");
            let expiration = (place == 0).then(|| "600000".into());
            assert_eq!(*properties.expiration(), expiration, "{kind:?}, place {place}");
        }
        assert!(trip.attempts.iter().all(|a| a.job.id() == "an id of the publisher's"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_without_properties_gets_an_id_and_a_delivery_mode_only() {
    let road = Road::new(QueueType::Quorum).await;
    let trip = road.travel(BasicProperties::default(), b"job").await;
    let id = trip.attempts[0].job.id().to_owned();
    assert!(!id.is_empty());
    for attempt in &trip.attempts {
        assert_eq!(attempt.job.id(), id);
    }
    for properties in &trip.properties()[1..] {
        let expected = BasicProperties::default()
            .with_message_id(id.clone().into())
            .with_delivery_mode(2)
            .with_headers(properties.headers().clone().unwrap());
        assert_eq!(**properties, expected);
    }
    let other = road.travel(BasicProperties::default(), b"job").await;
    assert_ne!(other.attempts[0].job.id(), id);
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_of_every_type_are_the_same_at_every_attempt() {
    // All of AMQPValue but ShortString, at which the broker closes the connection.
    let values = vec![
        AMQPValue::Boolean(true),
        AMQPValue::Boolean(false),
        AMQPValue::ShortShortInt(i8::MIN),
        AMQPValue::ShortShortUInt(u8::MAX),
        AMQPValue::ShortInt(i16::MIN),
        AMQPValue::ShortUInt(u16::MAX),
        AMQPValue::LongInt(i32::MIN),
        AMQPValue::LongUInt(u32::MAX),
        AMQPValue::LongLongInt(i64::MIN),
        AMQPValue::LongLongInt(i64::MAX),
        AMQPValue::Float(-1.5e-30),
        AMQPValue::Double(1.5e300),
        AMQPValue::DecimalValue(DecimalValue { scale: 2, value: 31_415 }),
        AMQPValue::LongString("Grüße".into()),
        AMQPValue::LongString("".into()),
        AMQPValue::LongString(vec![0, 159, 146, 150, 255].into()),
        AMQPValue::Timestamp(1_700_000_000),
        AMQPValue::ByteArray((0..=255).collect::<Vec<u8>>().into()),
        AMQPValue::Void,
        AMQPValue::FieldArray(FieldArray::default()),
        AMQPValue::FieldTable(FieldTable::default()),
    ];
    let mut published = FieldTable::default();
    for (index, value) in values.iter().enumerate() {
        published.insert(format!("value-{index}").into(), value.clone());
    }
    let array = AMQPValue::FieldArray(FieldArray::from(values));
    let nested = table([("array", array.clone()), ("table", table_of(published.clone()))]);
    published.insert("array".into(), array);
    published.insert("nested".into(), table_of(nested.clone()));
    let deep = FieldArray::from(vec![table_of(nested)]);
    published.insert("x-custom".into(), AMQPValue::FieldArray(deep));
    published.insert("".into(), long_string("a name of no length"));

    for kind in [QueueType::Quorum, QueueType::Classic] {
        let road = Road::new(kind).await;
        let properties = BasicProperties::default().with_headers(published.clone());
        let trip = road.travel(properties, b"job").await;
        for (place, headers) in trip.headers().into_iter().enumerate() {
            for (key, value) in published.inner() {
                assert_eq!(headers.inner().get(key), Some(value), "{kind:?}, place {place}: {key}");
            }
            let added = headers.inner().keys().filter(|key| !published.inner().contains_key(*key));
            for key in added.map(|key| key.as_str()) {
                let ours = key.starts_with("retry-") || key.starts_with("buried-");
                assert!(ours || BROKERS.contains(&key), "{kind:?}, place {place}: {key}");
            }
        }
    }
}

fn table_of(table: FieldTable) -> AMQPValue {
    AMQPValue::FieldTable(table)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_broker_notes_about_a_trip_is_not_taken_on_the_next_one() {
    let road = Road::new(QueueType::Classic).await;
    let claimed = table([
        ("x-delivery-count", AMQPValue::LongLongInt(7)),
        ("x-acquired-count", AMQPValue::LongLongInt(7)),
        ("x-opt-anything", long_string("anything")),
    ]);
    let trip = road.travel(BasicProperties::default().with_headers(claimed), b"job").await;
    let headers = trip.headers();
    for (place, lane) in [(1, "00000100ms"), (2, "00000200ms"), (3, "00000300ms")] {
        let headers = headers[place].inner();
        let AMQPValue::FieldArray(deaths) = &headers["x-death"] else { panic!("{headers:?}") };
        let [AMQPValue::FieldTable(death)] = deaths.as_slice() else { panic!("{deaths:?}") };
        let queue = long_string(&format!("orders.retry.{lane}"));
        assert_eq!(death.inner()["queue"], queue);
        assert_eq!(death.inner()["count"], AMQPValue::LongLongInt(1));
        assert_eq!(headers["x-first-death-queue"], queue);
        let claimed = ["x-delivery-count", "x-acquired-count", "x-opt-anything"];
        assert!(claimed.iter().all(|key| !headers.contains_key(*key)), "{headers:?}");
    }
    let buried = headers[ATTEMPTS].inner();
    assert!(buried.keys().all(|key| !key.as_str().starts_with("x-")), "{buried:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_sends_no_copy_to_the_cc_and_bcc_queues_again() {
    let road = Road::new(QueueType::Quorum).await;
    for queue in ["copies", "blind"] {
        declare_work_queue(&road.scene.channel, queue, QueueType::Classic).await;
        let (options, arguments) = (QueueBindOptions::default(), FieldTable::default());
        let (name, exchange, key) = (queue.into(), EXCHANGE.into(), queue.into());
        road.scene.channel.queue_bind(name, exchange, key, options, arguments).await.unwrap();
    }
    let list = |queue: &str| AMQPValue::FieldArray(vec![long_string(queue)].into());
    let headers = table([("CC", list("copies")), ("BCC", list("blind"))]);
    let trip = road.travel(BasicProperties::default().with_headers(headers), b"job").await;

    assert_eq!(count(&road.scene.channel, "copies").await, 1);
    assert_eq!(count(&road.scene.channel, "blind").await, 1);
    let headers = trip.headers();
    assert_eq!(headers[0].inner()["CC"], list("copies"));
    for headers in &headers[1..] {
        assert_eq!(headers.inner()["retry-original-cc"], list("copies"));
        assert!(!headers.contains_key("CC") && !headers.contains_key("BCC"), "{headers:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_handler_sees_the_original_exchange_and_routing_key_at_every_attempt() {
    let road = Road::new(QueueType::Quorum).await;
    let trip = road.travel(BasicProperties::default(), b"job").await;
    for (count, attempt) in trip.attempts.iter().enumerate() {
        assert_eq!((attempt.job.exchange(), attempt.job.routing_key()), (EXCHANGE, KEY));
        assert_eq!(attempt.job.retry_count() as usize, count);
        assert!(!attempt.job.redelivered());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn timestamp_and_expiration_become_the_deadline_and_stay_it() {
    let road = Road::new(QueueType::Quorum).await;
    let stamp = seconds_now() - 100;
    let properties =
        BasicProperties::default().with_timestamp(stamp).with_expiration("600500".into());
    let trip = road.travel(properties, b"job").await;
    let deadline = SystemTime::UNIX_EPOCH + Duration::from_millis(stamp * 1000 + 600_500);
    let deadline = humantime::format_rfc3339_millis(deadline).to_string();
    for headers in &trip.headers()[1..] {
        assert_eq!(headers.inner()["retry-deadline"], long_string(&deadline));
    }
}

fn seconds_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()
}
