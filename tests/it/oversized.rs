//! A message that lapin cannot read: its headers outgrew the frame in a lane, or its properties are
//! not UTF-8. Its connection dies of it and it goes back to its queue's head, so whoever just connects
//! again dies of it again; `lapin_oversized_headers` pins that. Here: what the two ways in do about it.

use crate::support::{
    CORRELATION_ID, Journal, PATIENCE, RawPublisher, Scene, WORK, connect, consume, count,
    declare_work_queue, eventually, publish, quick, short, table, within,
};
use futures_util::StreamExt;
use lapin::{BasicProperties, types::AMQPValue};
use lapin_retry::{Broker, Error, ErrorKind, Event, QueueType, Retry, RetryConsumer};
use std::time::Duration;

/// Passes through the broker on its way in, but leaves no room for what a lane adds.
const NEARLY_A_FRAME: usize = 130_950;
/// A wait no backoff reaches.
const LONG: Duration = Duration::from_secs(120);

/// Puts a message at the end of the work queue whose headers outgrew the frame in one of our lanes.
async fn oversized(scene: &Scene) {
    let retry = Retry::attach(scene.url(), WORK, quick()).await.unwrap();
    let lane = retry.topology().queues().nth(1).unwrap().name.clone();
    let trace = AMQPValue::LongString("x".repeat(NEARLY_A_FRAME).into());
    let properties = BasicProperties::default().with_headers(table([("trace", trace)]));
    let before = count(&scene.channel, WORK).await;
    publish(&scene.channel, "", &lane, properties.with_expiration("1".into()), b"job").await;
    eventually("the message is in the work queue", PATIENCE, async || {
        count(&scene.channel, WORK).await == before + 1
    })
    .await;
    retry.close().await.unwrap();
}

async fn consumer(broker: &Broker, queue: &str, journal: &Journal) -> lapin_retry::Handle {
    RetryConsumer::builder(broker, queue)
        .policy(quick())
        .on_event(journal.hook())
        .handler(|_| async { Ok(()) })
        .start()
        .await
        .unwrap()
}

fn disconnected(event: &Event) -> Option<(Error, Duration)> {
    match event {
        Event::Disconnected { error, wait, .. } => Some((error.clone(), *wait)),
        _ => None,
    }
}

async fn kept_away(journal: &Journal) -> Error {
    journal
        .first("the consumer keeps away", |event| {
            disconnected(event).filter(|(_, wait)| *wait > LONG).map(|(error, _)| error)
        })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_keeps_away_from_an_oversized_head_and_says_how_to_take_it_out() {
    let scene = Scene::new().await;
    oversized(&scene).await;
    let journal = Journal::default();
    let handle = consumer(&Broker::from(scene.url()), WORK, &journal).await;

    let error = kept_away(&journal).await;

    assert_eq!(error.kind(), ErrorKind::Unreadable);
    let text = error.to_string();
    for part in
        ["queue \"work\"", "at its head", "larger than a frame", "management UI", "frame_max"]
    {
        assert!(text.contains(part), "{text} should contain {part}");
    }
    // Once with the others on the shared connection, once to be sure.
    assert_eq!(journal.all(disconnected).len(), 2);
    // The message is still there, and an operator gets it out.
    eventually("the message is back", PATIENCE, async || count(&scene.channel, WORK).await == 1)
        .await;
    assert_eq!(scene.vhost.api().take(WORK, 1).len(), 1);
    within("shutdown, in spite of the wait", handle.shutdown(Duration::from_secs(5))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_with_a_property_that_is_not_utf8_is_kept_away_from_as_well() {
    let scene = Scene::new().await;
    let mut publisher = RawPublisher::connect(&scene.url());
    publisher.publish(WORK, CORRELATION_ID, &short(&[0xFF; 16]), b"job");
    let journal = Journal::default();
    let handle = consumer(&Broker::from(scene.url()), WORK, &journal).await;
    let error = kept_away(&journal).await;
    assert_eq!(error.kind(), ErrorKind::Unreadable);
    assert!(error.to_string().contains("not UTF-8"), "{error}");
    handle.shutdown(Duration::from_secs(5)).await;
}

/// Everybody on the connection is told the same error, so those whose queue is fine must find out.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_of_another_queue_on_the_same_broker_is_disturbed_once_and_works_on() {
    let scene = Scene::new().await;
    oversized(&scene).await;
    declare_work_queue(&scene.channel, "fine", QueueType::Quorum).await;
    let broker = Broker::from(scene.url());
    let (journal, fine) = (Journal::default(), Journal::default());
    let bystander = consumer(&broker, "fine", &fine).await;
    let handle = consumer(&broker, WORK, &journal).await;
    kept_away(&journal).await;

    let properties = BasicProperties::default().with_message_id("good".into());
    publish(&scene.channel, "", "fine", properties, b"").await;
    fine.is_done("good").await;

    let disturbed = fine.all(disconnected);
    assert_eq!(disturbed.len(), 1, "{disturbed:?}");
    let (error, wait) = &disturbed[0];
    assert!(*wait < LONG);
    assert!(error.to_string().contains("or in another queue"), "{error}");
    bystander.shutdown(Duration::from_secs(5)).await;
    handle.shutdown(Duration::from_secs(5)).await;
}

/// Were they prefetched together with it, its death would count as a delivery of theirs, too.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_before_an_unreadable_one_are_done_and_those_behind_it_are_left_alone() {
    let scene = Scene::new().await;
    for id in ["a", "b", "c"] {
        scene.job(id, table([]), b"").await;
    }
    oversized(&scene).await;
    scene.job("behind", table([]), b"").await;
    let journal = Journal::default();
    let handle = consumer(&Broker::from(scene.url()), WORK, &journal).await;

    kept_away(&journal).await;

    for id in ["a", "b", "c"] {
        journal.is_done(id).await;
    }
    let waiting = async || count(&scene.channel, WORK).await == 2;
    eventually("two messages wait", PATIENCE, waiting).await;
    let left = scene.vhost.api().take(WORK, 2);
    let behind = left.iter().find(|message| message["properties"]["message_id"] == "behind");
    let behind = behind.expect("it waits for its turn");
    // Delivered once, on the first, shared connection.
    let deliveries = behind["headers"]["x-delivery-count"].as_u64().unwrap_or(0);
    assert!(deliveries <= 1, "{behind}");
    handle.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_users_own_loop_is_told_of_an_unreadable_head_as_its_last_item() {
    let scene = Scene::new().await;
    oversized(&scene).await;
    let retry = Retry::attach(scene.url(), WORK, quick()).await.unwrap();
    let own = connect(&scene.url()).await;
    let channel = own.create_channel().await.unwrap();
    let mut jobs = retry.jobs(consume(&channel, WORK, 10).await);

    let error = within("the stream fails", jobs.next()).await.unwrap().unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Unreadable);
    let text = error.to_string();
    for part in ["queue \"work\"", "larger than a frame", "management UI", "frame_max", "21"] {
        assert!(text.contains(part), "{text} should contain {part}");
    }
    assert!(within("the end", jobs.next()).await.is_none());
    retry.close().await.unwrap();
}
