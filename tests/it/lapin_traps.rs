//! What lapin and the broker do where one might guess otherwise. The design rests on these: a lapin
//! upgrade that changes one of them should be noticed here, not in production.

use crate::support::{
    PATIENCE, Proxy, Scene, Vhost, broker_addr, confirm_channel, connect, consume, count,
    eventually, next, publish, table, try_publish, within,
};
use futures_util::{FutureExt, StreamExt};
use lapin::{
    BasicProperties, Channel, Confirmation, Connection, ConnectionProperties,
    options::{
        BasicAckOptions, BasicCancelOptions, BasicPublishOptions, QueueDeclareOptions,
        QueueDeleteOptions,
    },
    types::{AMQPValue, FieldTable},
};
use lapin_retry::QueueType;

/// A vhost with a queue `work`, and a channel in confirm mode.
async fn work_queue() -> (Vhost, Connection, Channel) {
    let scene = Scene::of(QueueType::Classic).await;
    (scene.vhost, scene.connection, scene.channel)
}

async fn publish_jobs(channel: &Channel, jobs: u32) {
    for job in 0..jobs {
        let body = job.to_string();
        publish(channel, "", "work", BasicProperties::default(), body.as_bytes()).await;
    }
}

/// Makes the broker close the channel, and returns when lapin knows.
async fn kill(channel: &Channel) {
    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    within(
        "the 404 that closes the channel",
        channel.queue_declare("missing".into(), passive, FieldTable::default()),
    )
    .await
    .expect_err("the queue does not exist");
}

async fn ack(delivery: &lapin::message::Delivery) -> bool {
    within("an ack", delivery.ack(BasicAckOptions::default()))
        .await
        .expect("an ack that is false at worst")
}

#[tokio::test(flavor = "multi_thread")]
async fn ack_on_a_dead_channel_answers_ok_false() {
    let (_vhost, connection, publisher) = work_queue().await;
    publish_jobs(&publisher, 1).await;
    let channel = connection.create_channel().await.unwrap();
    let mut consumer = consume(&channel, "work", 1).await;
    let delivery = next(&mut consumer).await;
    assert!(delivery.usable());

    kill(&channel).await;

    assert!(!ack(&delivery).await);
    assert!(delivery.poisoned());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_hands_out_deliveries_whose_channel_is_dead() {
    let (_vhost, connection, publisher) = work_queue().await;
    publish_jobs(&publisher, 3).await;
    let channel = connection.create_channel().await.unwrap();
    let mut consumer = consume(&channel, "work", 10).await;
    eventually("all jobs are on their way", PATIENCE, async || {
        count(&publisher, "work").await == 0
    })
    .await;
    // The answer comes after the deliveries on the same channel, so they are in the buffer by then.
    count(&channel, "work").await;

    kill(&channel).await;

    for job in 0..3 {
        let delivery = next(&mut consumer).await;
        assert!(!delivery.usable(), "job {job}");
    }
    let end = within("the error", consumer.next()).await;
    assert!(matches!(end, Some(Err(ref error)) if error.is_amqp_soft_error()));
    assert!(within("the end", consumer.next()).await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn after_none_a_consumer_stream_must_not_be_polled_again() {
    let (_vhost, connection, channel) = work_queue().await;
    let consuming = connection.create_channel().await.unwrap();
    let mut consumer = consume(&consuming, "work", 1).await;
    channel.queue_delete("work".into(), QueueDeleteOptions::default()).await.unwrap();
    assert!(within("the end", consumer.next()).await.is_none());

    // The stream is over, the channel is not; and the next poll promises an item that never comes.
    assert!(consuming.status().connected());
    assert!(consumer.next().now_or_never().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_channel_error_a_consumer_with_recovery_on_waits_for_ever() {
    let (vhost, _connection, _channel) = work_queue().await;
    let recovering = ConnectionProperties::default().enable_auto_recover();
    let connection = Connection::connect(&vhost.url(), recovering).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let mut consumer = consume(&channel, "work", 1).await;

    kill(&channel).await;

    let error = match within("the error", consumer.next()).await {
        Some(Err(error)) => error,
        other => panic!("{other:?}"),
    };
    within("no recovery", channel.wait_for_recovery(error))
        .await
        .expect_err("channel errors are not recovered from");
    assert!(!channel.status().connected());
    assert!(connection.status().connected());
    assert!(consumer.next().now_or_never().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_consumer_drains_its_buffer_and_those_acks_count() {
    let (_vhost, connection, publisher) = work_queue().await;
    publish_jobs(&publisher, 3).await;
    let channel = connection.create_channel().await.unwrap();
    let mut consumer = consume(&channel, "work", 10).await;
    let first = next(&mut consumer).await;
    count(&channel, "work").await;

    channel.basic_cancel(consumer.tag(), BasicCancelOptions::default()).await.unwrap();

    assert!(ack(&first).await);
    while let Some(delivery) = within("the buffer", consumer.next()).await {
        assert!(ack(&delivery.unwrap()).await);
    }
    channel.close(200, "".into()).await.unwrap();
    assert_eq!(count(&publisher, "work").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_dropped_without_an_ack_stays_with_its_channel() {
    let (_vhost, connection, publisher) = work_queue().await;
    publish_jobs(&publisher, 1).await;
    let channel = connection.create_channel().await.unwrap();
    let mut consumer = consume(&channel, "work", 1).await;
    drop(next(&mut consumer).await);
    // A nack sent by the drop would be worked off before this channel answers.
    count(&channel, "work").await;
    assert_eq!(count(&publisher, "work").await, 0);

    channel.close(200, "".into()).await.unwrap();
    eventually("the job is back", PATIENCE, async || count(&publisher, "work").await == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_double_ack_is_caught_by_the_client() {
    let (_vhost, _connection, channel) = work_queue().await;
    publish_jobs(&channel, 1).await;
    let mut consumer = consume(&channel, "work", 1).await;
    let delivery = next(&mut consumer).await;
    let copy = delivery.acker.clone();

    assert!(ack(&delivery).await);
    assert!(!ack(&delivery).await);
    assert!(!copy.ack(BasicAckOptions::default()).await.unwrap());

    // Had the broker seen two acks, it would have closed the channel with a 406.
    assert_eq!(count(&channel, "work").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_confirm_select_a_confirm_is_not_requested() {
    let (_vhost, connection, _channel) = work_queue().await;
    let channel = connection.create_channel().await.unwrap();
    let answer = try_publish(&channel, "", "missing", BasicProperties::default(), b"job").await;
    assert!(matches!(answer, Ok(Confirmation::NotRequested)), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mandatory_publish_to_a_missing_queue_is_acked_with_the_returned_message() {
    let (_vhost, _connection, channel) = work_queue().await;
    let answer = try_publish(&channel, "", "missing", BasicProperties::default(), b"job").await;
    match answer {
        Ok(Confirmation::Ack(Some(returned))) => {
            assert_eq!(returned.reply_code, 312);
            assert_eq!(returned.delivery.data, b"job");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_mandatory_a_publish_to_a_missing_queue_is_acked() {
    let (_vhost, _connection, channel) = work_queue().await;
    let confirm = channel
        .basic_publish(
            "".into(),
            "missing".into(),
            BasicPublishOptions::default(),
            b"job",
            BasicProperties::default(),
        )
        .await
        .unwrap();
    let answer = within("a confirm", confirm).await;
    assert!(matches!(answer, Ok(Confirmation::Ack(None))), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_nack_from_a_full_queue_is_a_nack() {
    let (_vhost, _connection, channel) = work_queue().await;
    let arguments = table([
        ("x-max-length", AMQPValue::LongInt(1)),
        ("x-overflow", AMQPValue::LongString("reject-publish".into())),
    ]);
    channel.queue_declare("full".into(), QueueDeclareOptions::default(), arguments).await.unwrap();
    publish(&channel, "", "full", BasicProperties::default(), b"first").await;
    let answer = try_publish(&channel, "", "full", BasicProperties::default(), b"second").await;
    assert!(matches!(answer, Ok(Confirmation::Nack(None))), "{answer:?}");
    assert!(channel.status().connected());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_channel_error_fails_every_confirm_in_flight() {
    let (vhost, _connection, _channel) = work_queue().await;
    let proxy = Proxy::start(broker_addr()).await;
    let connection = connect(&proxy.url(&vhost.url())).await;
    let channel = confirm_channel(&connection).await;
    // Else the good one might be confirmed before the bad one is refused.
    proxy.swallow_confirms(true);
    let mut confirms = Vec::new();
    for (exchange, key) in [("", "work"), ("missing", "work")] {
        let options = BasicPublishOptions::default();
        let properties = BasicProperties::default();
        let confirm = channel.basic_publish(exchange.into(), key.into(), options, b"", properties);
        confirms.push(confirm.await.unwrap());
    }
    for confirm in confirms {
        let error = within("a failed confirm", confirm).await.unwrap_err();
        assert!(error.is_amqp_soft_error(), "{error}");
    }
    assert!(connection.status().connected());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_header_block_over_the_frame_kills_the_connection() {
    let (_vhost, connection, publisher) = work_queue().await;
    let frame_max = connection.configuration().frame_max() as usize;
    let headers = AMQPValue::LongString("x".repeat(frame_max).into());
    kills_the_connection(&connection, &publisher, headers, "FRAME-ERROR").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_short_string_header_kills_the_connection() {
    let (_vhost, connection, publisher) = work_queue().await;
    let header = AMQPValue::ShortString("short".into());
    kills_the_connection(&connection, &publisher, header, "INTERNAL-ERROR").await;
}

async fn kills_the_connection(
    connection: &Connection,
    publisher: &Channel,
    header: AMQPValue,
    text: &str,
) {
    let bystander = connection.create_channel().await.unwrap();
    let properties = BasicProperties::default().with_headers(table([("header", header)]));
    let publish = try_publish(publisher, "", "work", properties, b"job");
    let error = within("an answer to the publish", publish).await.unwrap_err();
    assert!(error.to_string().contains(text), "{error}");
    assert!(!connection.status().connected());
    assert!(!bystander.status().connected());
}
