//! A retry reaches the queue that failed, and no other consumer of a shared exchange.

use std::time::Duration;

use crate::support::{
    End, Journal, PATIENCE, Scene, Vhost, as_the_body_says, count, declare_work_queue, eventually,
    publish,
};
use lapin::{
    BasicProperties, Channel, ExchangeKind,
    options::{ExchangeDeclareOptions, QueueBindOptions},
    types::FieldTable,
};
use lapin_retry::{BuriedReason, Handle, QueueType, RetryConsumer, RetryPolicy};

const EXCHANGE: &str = "events";
const JOBS: u32 = 15;

/// A queue that gets every message of the exchange, which is made if it is not there.
async fn bound(channel: &Channel, exchange: ExchangeKind, queue: &str) {
    let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
    let none = FieldTable::default;
    channel.exchange_declare(EXCHANGE.into(), exchange, durable, none()).await.unwrap();
    declare_work_queue(channel, queue, QueueType::Quorum).await;
    let (queue, exchange, key) = (queue.into(), EXCHANGE.into(), "order.#".into());
    channel.queue_bind(queue, exchange, key, QueueBindOptions::default(), none()).await.unwrap();
}

/// Two levels, so that a job fails at most 3 times.
async fn worker(vhost: &Vhost, queue: &str, journal: &Journal) -> Handle {
    RetryConsumer::builder(vhost.url(), queue)
        .policy(RetryPolicy::new(["150ms", "300ms"]).lanes(2))
        .on_event(journal.hook())
        .handler(journal.handler(as_the_body_says))
        .start()
        .await
        .unwrap()
}

/// A third each are done at once, done after two retries, and buried.
async fn publish_jobs(channel: &Channel) {
    for job in 0..JOBS {
        let failures = [0, 2, 99][job as usize % 3].to_string();
        let properties = BasicProperties::default().with_message_id(job.to_string().into());
        publish(channel, EXCHANGE, "order.created", properties, failures.as_bytes()).await;
    }
}

/// Waits until the jobs have come to their ends in this queue, each to its own and only once.
async fn finish(worker: Handle, journal: &Journal) {
    let jobs = JOBS as usize;
    eventually("all jobs end", PATIENCE, async || journal.ends().len() >= jobs).await;
    worker.shutdown(Duration::from_secs(5)).await;
    journal.assert_no_trouble();
    let mut ends = journal.ends();
    ends.sort_by_key(|(id, _)| id.parse::<u32>().unwrap());
    for (job, (id, end)) in ends.iter().enumerate() {
        assert_eq!(*id, job.to_string());
        let buried = End::Buried(BuriedReason::Exhausted);
        let (expected, attempts) = [(End::Done, 1), (End::Done, 3), (buried, 3)][job % 3];
        assert_eq!(*end, expected, "job {id}");
        assert_eq!(journal.attempts_of(id).len(), attempts, "job {id}");
    }
    assert_eq!(ends.len(), jobs);
}

async fn retries_stay_in_their_queue(exchange: ExchangeKind) {
    let scene = Scene::bare().await;
    let (vhost, channel) = (&scene.vhost, &scene.channel);
    bound(channel, exchange.clone(), "orders").await;
    bound(channel, exchange, "audit").await;
    let journal = Journal::default();
    let orders = worker(vhost, "orders", &journal).await;
    publish_jobs(channel).await;
    finish(orders, &journal).await;

    assert_eq!(count(channel, "orders").await, 0);
    assert_eq!(count(channel, "orders.buried").await, JOBS / 3);
    let mut audited: Vec<u32> = Vec::new();
    for message in vhost.api().take("audit", 10 * JOBS) {
        let properties = &message["properties"];
        audited.push(properties["message_id"].as_str().unwrap().parse().unwrap());
        assert!(message["headers"].get("retry-count").is_none(), "{message}");
    }
    assert_eq!(audited, (0..JOBS).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn retries_of_a_queue_of_a_topic_exchange_reach_that_queue_only() {
    retries_stay_in_their_queue(ExchangeKind::Topic).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn retries_of_a_queue_of_a_fanout_exchange_reach_that_queue_only() {
    retries_stay_in_their_queue(ExchangeKind::Fanout).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_work_queues_of_one_exchange_retry_the_same_message_each_for_itself() {
    let scene = Scene::bare().await;
    let (vhost, channel) = (&scene.vhost, &scene.channel);
    let (orders, invoices) = (Journal::default(), Journal::default());
    bound(channel, ExchangeKind::Fanout, "orders").await;
    bound(channel, ExchangeKind::Fanout, "invoices").await;
    let orders_worker = worker(vhost, "orders", &orders).await;
    let invoices_worker = worker(vhost, "invoices", &invoices).await;
    publish_jobs(channel).await;
    finish(orders_worker, &orders).await;
    finish(invoices_worker, &invoices).await;
    for queue in ["orders", "invoices"] {
        assert_eq!(count(channel, queue).await, 0);
        assert_eq!(count(channel, &format!("{queue}.buried")).await, JOBS / 3);
    }
}
