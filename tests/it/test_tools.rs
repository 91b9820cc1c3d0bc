//! The tests' own tools: a proxy that does not misbehave as told would make other tests pass for nothing.

use crate::support::{
    PATIENCE, Proxy, Vhost, broker_addr, confirm_channel, connect, consume, count,
    declare_work_queue, eventually, next, publish, within,
};
use futures_util::FutureExt;
use lapin::{
    BasicProperties, Channel, Connection, ConnectionProperties, Consumer, PublisherConfirm,
    options::{BasicAckOptions, BasicGetOptions, BasicNackOptions, BasicPublishOptions},
};
use lapin_retry::QueueType;
use serde_json::json;
use std::time::{Duration, Instant};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// A vhost with a queue `work`, and a channel that reaches it through a proxy.
struct Line {
    proxy: Proxy,
    connection: Connection,
    channel: Channel,
    // Last, so that the connection is gone before its vhost.
    vhost: Vhost,
}

async fn line() -> Line {
    let vhost = Vhost::new().await;
    let proxy = Proxy::start(broker_addr()).await;
    let connection = connect(&proxy.url(&vhost.url())).await;
    let channel = confirm_channel(&connection).await;
    declare_work_queue(&channel, "work", QueueType::Classic).await;
    Line { proxy, connection, channel, vhost }
}

/// Sends without waiting for the confirm.
async fn send(channel: &Channel) -> PublisherConfirm {
    let options = BasicPublishOptions::default();
    let properties = BasicProperties::default();
    channel.basic_publish("".into(), "work".into(), options, b"job", properties).await.unwrap()
}

async fn take_one(channel: &Channel) -> Consumer {
    let mut consumer = consume(channel, "work", 1).await;
    let delivery = next(&mut consumer).await;
    assert!(delivery.ack(BasicAckOptions::default()).await.unwrap());
    consumer
}

#[tokio::test(flavor = "multi_thread")]
async fn the_proxy_passes_everything_and_counts() {
    let line = line().await;
    publish(&line.channel, "", "work", BasicProperties::default(), &vec![7; 300_000]).await;
    assert_eq!(line.proxy.publishes(), 1);
    let mut consumer = consume(&line.channel, "work", 1).await;
    let delivery = next(&mut consumer).await;
    assert_eq!(delivery.data, vec![7; 300_000]);
    assert_eq!(line.proxy.acks(), 0);
    assert!(delivery.ack(BasicAckOptions::default()).await.unwrap());
    eventually("the ack passes", PATIENCE, async || line.proxy.acks() == 1).await;
    assert_eq!(line.proxy.confirms_swallowed(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_proxy_counts_each_delivery_that_an_ack_answers() {
    let line = line().await;
    for _ in 0..9 {
        publish(&line.channel, "", "work", BasicProperties::default(), b"job").await;
    }
    let mut consumer = consume(&line.channel, "work", 8).await;
    let mut jobs = Vec::new();
    for _ in 0..8 {
        jobs.push(next(&mut consumer).await);
    }
    let other = line.connection.create_channel().await.unwrap();
    let got = other.basic_get("work".into(), BasicGetOptions::default()).await.unwrap();
    let multiple = BasicAckOptions { multiple: true };
    jobs[1].nack(BasicNackOptions::default()).await.unwrap();
    jobs[2].ack(BasicAckOptions::default()).await.unwrap();
    eventually("one alone", PATIENCE, async || line.proxy.acks() == 1).await;
    jobs[4].ack(multiple).await.unwrap();
    eventually("three at a time", PATIENCE, async || line.proxy.acks() == 4).await;
    got.expect("the ninth").ack(multiple).await.unwrap();
    eventually("that of another channel", PATIENCE, async || line.proxy.acks() == 5).await;
    jobs[7].ack(multiple).await.unwrap();
    eventually("the last three", PATIENCE, async || line.proxy.acks() == 8).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_swallowed_confirm_never_comes_but_everything_else_does() {
    let line = line().await;
    line.proxy.swallow_confirms(true);
    let mut confirm = send(&line.channel).await;
    eventually("it is swallowed", PATIENCE, async || line.proxy.confirms_swallowed() == 1).await;
    // Both an answer to a call and a delivery pass; with them, the confirm would have come.
    take_one(&line.channel).await;
    assert_eq!(count(&line.channel, "work").await, 0);
    assert!((&mut confirm).now_or_never().is_none());

    line.proxy.swallow_confirms(false);
    publish(&line.channel, "", "work", BasicProperties::default(), b"job").await;
    assert_eq!(line.proxy.confirms_swallowed(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_is_cut_after_some_bytes_passes_no_half_frame_on_and_the_next_one_is_whole() {
    let line = line().await;
    // In the middle of the body.
    line.proxy.cut_after(1_000);
    let options = BasicPublishOptions::default();
    let properties = BasicProperties::default();
    let body = vec![7; 100_000];
    let sent = line.channel.basic_publish("".into(), "work".into(), options, &body, properties);
    assert!(within("the cut", async { sent.await?.await }).await.is_err());

    let connection = connect(&line.proxy.url(&line.vhost.url())).await;
    let channel = confirm_channel(&connection).await;
    assert_eq!(count(&channel, "work").await, 0);
    publish(&channel, "", "work", BasicProperties::default(), &body).await;
    assert_eq!(line.proxy.opened(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_line_passes_nothing_until_it_flows_again() {
    let line = line().await;
    let direct = connect(&line.vhost.url()).await;
    let observer = direct.create_channel().await.unwrap();
    line.proxy.stall(true);
    let mut confirm = send(&line.channel).await;
    // The client has sent it; were it to pass, it would be there before this channel's own message.
    publish(&confirm_channel(&direct).await, "", "work", BasicProperties::default(), b"x").await;
    assert_eq!(count(&observer, "work").await, 1);
    assert_eq!(line.proxy.publishes(), 0);
    assert!((&mut confirm).now_or_never().is_none());

    line.proxy.stall(false);
    within("the confirm", confirm).await.unwrap();
    assert_eq!(count(&observer, "work").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_throttled_line_takes_as_long_as_its_bytes_need() {
    let line = line().await;
    line.proxy.throttle(Some(400_000));
    let started = Instant::now();
    publish(&line.channel, "", "work", BasicProperties::default(), &vec![7; 200_000]).await;
    assert!(started.elapsed() >= Duration::from_millis(500), "{:?}", started.elapsed());
    let (started, mut consumer) = (Instant::now(), consume(&line.channel, "work", 1).await);
    assert_eq!(next(&mut consumer).await.data.len(), 200_000);
    assert!(started.elapsed() >= Duration::from_millis(500), "{:?}", started.elapsed());
    // Half a minute on the slow wire.
    line.proxy.throttle(None);
    let started = Instant::now();
    publish(&line.channel, "", "work", BasicProperties::default(), &vec![7; 12_000_000]).await;
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn cut_closes_both_sides_and_refuse_keeps_them_closed() {
    let line = line().await;
    let url = line.proxy.url(&line.vhost.url());
    line.proxy.refuse(true);
    line.proxy.cut().await;
    eventually("the client knows", PATIENCE, async || !line.connection.status().connected()).await;
    within("a refusal", Connection::connect(&url, ConnectionProperties::default()))
        .await
        .expect_err("the proxy refuses");
    eventually("the broker knows", PATIENCE, async || line.vhost.api().connections().is_empty())
        .await;

    line.proxy.refuse(false);
    connect(&url).await;
}

/// TCP may split a frame anywhere, and may carry many at once.
#[tokio::test(flavor = "multi_thread")]
async fn the_proxy_finds_the_frames_however_they_are_cut() {
    let broker = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = Proxy::start(broker.local_addr().unwrap().to_string()).await;
    proxy.swallow_confirms(true);
    let address = proxy.url("amqp://x/");
    let address = address.split(['@', '/']).nth(3).unwrap();
    let mut client = TcpStream::connect(address).await.unwrap();
    let (mut broker, _) = broker.accept().await.unwrap();

    let method = |class: u8, method: u8| vec![1, 0, 1, 0, 0, 0, 5, 0, class, 0, method, 0xFF, 0xCE];
    let heartbeat = vec![8, 0, 0, 0, 0, 0, 0, 0xCE];
    let sent =
        [b"AMQP\0\0\x09\x01".to_vec(), method(60, 40), heartbeat.clone(), method(60, 80)].concat();
    for byte in &sent {
        client.write_all(&[*byte]).await.unwrap();
    }
    let mut received = vec![0; sent.len()];
    within("all frames", broker.read_exact(&mut received)).await.unwrap();
    assert_eq!(received, sent);
    assert_eq!((proxy.publishes(), proxy.acks()), (1, 1));

    let answer = [method(60, 80), method(60, 120), heartbeat.clone()].concat();
    broker.write_all(&answer).await.unwrap();
    drop(broker);
    let mut received = Vec::new();
    within("the end", client.read_to_end(&mut received)).await.unwrap();
    assert_eq!(received, heartbeat);
    assert_eq!(proxy.confirms_swallowed(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_management_client_sees_what_is_there() {
    let line = line().await;
    let api = line.vhost.api();
    declare_work_queue(&line.channel, "a/b ü", QueueType::Quorum).await;
    assert_eq!(api.queues(), ["a/b ü", "work"]);
    assert_eq!(api.queue("a/b ü").unwrap()["type"], "quorum");
    assert!(api.queue("missing").is_none());

    let properties = BasicProperties::default().with_message_id("1".into());
    publish(&line.channel, "", "work", properties, b"job").await;
    for _ in 0..2 {
        let messages = api.peek("work", 5);
        assert_eq!(messages.len(), 1);
        assert_eq!(messages[0]["payload"], "job");
        assert_eq!(messages[0]["properties"]["message_id"], "1");
    }
    assert_eq!(api.take("work", 5).len(), 1);
    assert!(api.peek("work", 5).is_empty());

    let _consumer = consume(&line.channel, "work", 1).await;
    eventually("the consumer is listed", PATIENCE, async || api.consumers().len() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn looks_of_both_modes_leave_the_messages_and_mark_them() {
    let line = line().await;
    for _ in 0..3 {
        publish(&line.channel, "", "work", BasicProperties::default(), b"job").await;
    }
    let api = line.vhost.api();
    for mode in ["ack_requeue_true", "reject_requeue_true"] {
        assert_eq!(api.look("work", 2, mode), Some(2));
    }
    assert_eq!(api.look("none", 1, "ack_requeue_true"), None);
    assert_eq!(count(&line.channel, "work").await, 3);
    let mut consumer = consume(&line.channel, "work", 1).await;
    assert!(next(&mut consumer).await.redelivered);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_can_close_a_connection() {
    let line = line().await;
    let api = line.vhost.api();
    let name = eventually("the connection is listed", PATIENCE, async || {
        api.connections().first()?["name"].as_str().map(str::to_owned)
    })
    .await;
    api.close_connection(&name);
    eventually("the client knows", PATIENCE, async || !line.connection.status().connected()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_and_policies_and_permissions_take_effect() {
    let line = line().await;
    let api = line.vhost.api();
    let user = line.vhost.user("^mine$", "", "");
    let connection = connect(&user.url()).await;
    declare_work_queue(&connection.create_channel().await.unwrap(), "mine", QueueType::Classic)
        .await;
    refused(&connection, "theirs", "ACCESS-REFUSED").await;
    user.allow(".*", "", "");
    declare_work_queue(&connection.create_channel().await.unwrap(), "theirs", QueueType::Classic)
        .await;

    api.set_vhost_limit_max_queues(3);
    refused(&connection, "a-fourth", "PRECONDITION-FAILED").await;

    api.set_policy("cap", "^work$", 1, &json!({ "max-length": 1 }));
    eventually("the policy is applied", PATIENCE, async || {
        api.queue("work").unwrap()["policy"] == "cap"
    })
    .await;
    api.delete_policy("cap");
}

async fn refused(connection: &Connection, queue: &str, text: &str) {
    let channel = connection.create_channel().await.unwrap();
    let error = channel
        .queue_declare(queue.into(), Default::default(), Default::default())
        .await
        .expect_err("not allowed");
    assert!(error.to_string().contains(text), "{error}");
}
