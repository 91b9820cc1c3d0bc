//! A message may leave the broker with more headers than it came with: dead-lettering adds `x-death`
//! and its kin, a quorum queue counts deliveries. Properties travel in one frame and cannot be split,
//! and RabbitMQ sends that frame even when it is larger than the negotiated `frame_max`. lapin takes
//! that as a protocol violation, so such a message makes its queue unreadable to every lapin consumer:
//! the message goes back to the head, and the next connection dies of it too.
//!
//! Nothing on the client's side helps: `frame_max` in the URL can only lower what the broker offers.
//! The only cures are to leave room in the headers before a message goes into a delay queue, or a
//! larger `frame_max` in the broker's configuration.

use crate::support::{
    PATIENCE, Proxy, Scene, Vhost, broker_addr, confirm_channel, connect, consume, count,
    declare_work_queue, eventually, next, publish, table, type_name, within,
};
use futures_util::{FutureExt, StreamExt};
use lapin::{
    BasicProperties, Channel, Connection, ConnectionProperties, Consumer, Error, ExchangeKind,
    options::{
        BasicGetOptions, BasicRejectOptions, ExchangeDeclareOptions, QueueBindOptions,
        QueueDeclareOptions,
    },
    types::{AMQPValue, FieldTable},
};
use lapin_retry::QueueType;
use std::time::Duration;

/// Passes through the broker on its way in (131 064 bytes are allowed), but leaves no room for x-death.
const NEARLY_A_FRAME: usize = 130_950;

/// A vhost whose queue `work` holds a message that came through a delay queue with this much header.
async fn delayed(kind: QueueType, header: usize) -> (Vhost, Connection) {
    let scene = Scene::of(kind).await;
    declare_delay_queue(&scene.channel, "delay", kind, "work").await;
    publish(&scene.channel, "", "delay", with_header(header), b"job").await;
    arrives(&scene.channel).await;
    (scene.vhost, scene.connection)
}

async fn declare_delay_queue(channel: &Channel, name: &str, kind: QueueType, target: &str) {
    let text = |text: &str| AMQPValue::LongString(text.into());
    let arguments = table([
        ("x-queue-type", text(type_name(kind))),
        ("x-message-ttl", AMQPValue::LongInt(1)),
        ("x-dead-letter-exchange", text("")),
        ("x-dead-letter-routing-key", text(target)),
    ]);
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(name.into(), durable, arguments).await.unwrap();
}

fn with_header(bytes: usize) -> BasicProperties {
    let trace = AMQPValue::LongString("x".repeat(bytes).into());
    BasicProperties::default().with_headers(table([("trace", trace)]))
}

async fn arrives(channel: &Channel) {
    eventually("the job is in the work queue", PATIENCE, async || {
        count(channel, "work").await == 1
    })
    .await;
}

async fn failure(consumer: &mut Consumer) -> Error {
    match within("the consumer fails", consumer.next()).await {
        Some(Err(error)) => error,
        other => panic!("{other:?}"),
    }
}

async fn kills_every_consumer(kind: QueueType) {
    let (vhost, observing) = delayed(kind, NEARLY_A_FRAME).await;
    let observer = observing.create_channel().await.unwrap();
    // Asking for more is no way out: the lower of the two wishes counts.
    for query in ["", "?frame_max=1048576", "?frame_max=0"] {
        arrives(&observer).await;
        let connection = connect(&format!("{}{query}", vhost.url())).await;
        assert_eq!(connection.configuration().frame_max(), 131_072);
        let bystander = connection.create_channel().await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        let mut consumer = consume(&channel, "work", 1).await;

        let error = failure(&mut consumer).await;

        assert!(error.is_amqp_hard_error());
        assert!(error.to_string().contains("frame too large"), "{error}");
        assert!(within("the end", consumer.next()).await.is_none());
        assert!(connection.status().errored());
        assert!(!bystander.status().connected());
    }
    // The management API is not bound to frames: an operator gets the message out with it.
    arrives(&observer).await;
    assert_eq!(vhost.api().take("work", 1).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_whose_headers_outgrew_the_frame_kills_every_consumer_of_a_classic_queue() {
    kills_every_consumer(QueueType::Classic).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_whose_headers_outgrew_the_frame_kills_every_consumer_of_a_quorum_queue() {
    kills_every_consumer(QueueType::Quorum).await;
}

/// The frame limit is the connection's: a consumer that asked for small frames is hit much earlier.
#[tokio::test(flavor = "multi_thread")]
async fn a_small_frame_max_in_the_url_makes_ordinary_headers_deadly() {
    let (vhost, _connection) = delayed(QueueType::Classic, 9_000).await;
    let connection = connect(&format!("{}?frame_max=8192", vhost.url())).await;
    let channel = connection.create_channel().await.unwrap();
    let mut consumer = consume(&channel, "work", 1).await;
    let error = failure(&mut consumer).await;
    assert!(error.to_string().contains("frame too large"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_basic_get_of_such_a_message_is_never_answered() {
    let (vhost, _connection) = delayed(QueueType::Classic, NEARLY_A_FRAME).await;
    let connection = connect(&vhost.url()).await;
    let channel = connection.create_channel().await.unwrap();
    let mut get = std::pin::pin!(channel.basic_get("work".into(), BasicGetOptions::default()));
    eventually("the connection dies", PATIENCE, async || {
        tokio::time::timeout(Duration::from_millis(1), get.as_mut())
            .await
            .expect_err("no answer, though the connection is dead");
        connection.status().errored()
    })
    .await;
}

/// With lapin's recovery on, the consumer learns nothing: lapin does not drop the frame, but parses it
/// over and over (and keeps a whole core busy with that) until the broker misses its heartbeats. Then
/// it connects anew and is sent the same message again.
#[tokio::test(flavor = "multi_thread")]
async fn with_recovery_on_such_a_delivery_is_never_reported() {
    let (vhost, _observing) = delayed(QueueType::Classic, NEARLY_A_FRAME).await;
    let proxy = Proxy::start(broker_addr()).await;
    let recovering = ConnectionProperties::default()
        .enable_auto_recover()
        .configure_backoff(|backoff| backoff.with_max_times(1));
    let url = proxy.url(&vhost.url());
    let connection = Connection::connect(&url, recovering).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let mut consumer = consume(&channel, "work", 1).await;
    eventually("lapin finds the fault", PATIENCE, async || connection.status().reconnecting())
        .await;

    assert!(consumer.next().now_or_never().is_none());

    // Dropping the connection would not end the spinning, a closed socket does. What lapin does then
    // is not ours to promise: mostly it gives up, but now and then its thread sleeps for good.
    proxy.refuse(true);
    proxy.cut().await;
}

/// What a trip adds depends on the lengths of the names, at most 255 bytes each, and not on the number
/// of trips, if the client drops what earlier trips added.
#[tokio::test(flavor = "multi_thread")]
async fn four_kilobytes_of_room_are_enough_for_a_trip_with_the_longest_names() {
    let vhost = Vhost::new().await;
    let connection = connect(&vhost.url()).await;
    let channel = confirm_channel(&connection).await;
    let name = |letter: &str| letter.repeat(255);
    let (delay, exchange, key, work) = (name("d"), name("e"), name("k"), name("w"));
    declare_work_queue(&channel, &work, QueueType::Quorum).await;
    declare_delay_queue(&channel, &delay, QueueType::Quorum, &work).await;
    channel
        .exchange_declare(
            exchange.as_str().into(),
            ExchangeKind::Direct,
            ExchangeDeclareOptions::default(),
            FieldTable::default(),
        )
        .await
        .unwrap();
    channel
        .queue_bind(
            delay.as_str().into(),
            exchange.as_str().into(),
            key.as_str().into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        )
        .await
        .unwrap();

    let frame_max = connection.configuration().frame_max() as usize;
    let properties = with_header(frame_max - 4_096);
    publish(&channel, &exchange, &key, properties, b"job").await;
    let mut consumer = consume(&channel, &work, 1).await;
    // A quorum queue adds its counters only from the second delivery on.
    for _ in 0..2 {
        let delivery = next(&mut consumer).await;
        let requeue = BasicRejectOptions { requeue: true };
        assert!(delivery.reject(requeue).await.unwrap());
    }
    next(&mut consumer).await;
}
