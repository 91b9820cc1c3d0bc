//! A job whose handler did not run is requeued by `basic.nack`. Since RabbitMQ 4.3 that is no step
//! towards the delivery limit of a quorum queue; `basic.reject` is one on each version.

use crate::{
    support::{
        PATIENCE, Proxy, WORK, broker_addr, connect, consume, eventually, next, steps, within,
    },
    workshop::{Workshop, ms},
};
use futures_util::StreamExt;
use lapin_retry::Retry;
use std::time::Duration;

const JOBS: usize = 12;

/// The steps of all jobs that are ready. They stay in the queue.
async fn steps_of_ready(shop: &Workshop, jobs: usize) -> Vec<i64> {
    let channel = shop.connection.create_channel().await.unwrap();
    let mut consumer = consume(&channel, WORK, 100).await;
    let mut all = Vec::new();
    for _ in 0..jobs {
        all.push(steps(next(&mut consumer).await.properties.headers().as_ref()));
    }
    channel.close(200, "seen".into()).await.unwrap();
    all
}

fn steps_of_a_nack(shop: &Workshop) -> i64 {
    i64::from(shop.vhost.api().version() < (4, 3))
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_pause_finds_unstarted_is_nacked_and_never_rejected() {
    let shop = Workshop::in_an_outage().await;
    let proxy = Proxy::start(broker_addr()).await;
    shop.provider.set_down(false);
    shop.provider.open(false);
    shop.jobs(JOBS).await;
    let consumer = lapin_retry::RetryConsumer::builder(proxy.url(&shop.url()), WORK)
        .settings(shop.settings(ms(50), ms(50)))
        .concurrency(1)
        .handler(shop.handler());
    let handle = consumer.start().await.unwrap();
    shop.until_calls(1).await;
    shop.unacked(JOBS as u64).await;

    handle.pause();
    shop.holds(WORK, JOBS - 1).await;
    assert_eq!((proxy.nacks(), proxy.rejects()), (JOBS as u64 - 1, 0));
    assert_eq!(steps_of_ready(&shop, JOBS - 1).await, [steps_of_a_nack(&shop); JOBS - 1]);
    shop.provider.open(true);
    within("shutdown", handle.shutdown(Duration::from_secs(5))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_a_users_own_loop_drops_is_nacked_and_never_rejected() {
    let shop = Workshop::in_an_outage().await;
    let proxy = Proxy::start(broker_addr()).await;
    shop.jobs(1).await;
    let retry = Retry::attach(shop.url(), WORK, shop.settings(ms(50), ms(50))).await.unwrap();
    let connection = connect(&proxy.url(&shop.url())).await;
    let channel = connection.create_channel().await.unwrap();
    let mut jobs = retry.jobs(consume(&channel, WORK, 1).await);
    drop(within("a job", jobs.next()).await);
    eventually("it is nacked", PATIENCE, async || proxy.nacks() == 1).await;
    let again = within("it again", jobs.next()).await.unwrap().unwrap();
    assert_eq!(steps(again.job().properties().headers().as_ref()), steps_of_a_nack(&shop));
    within("done", async { again.settle(anyhow::Ok(())).await.unwrap().await }).await;
    assert_eq!((proxy.nacks(), proxy.rejects()), (1, 0));
    within("close", retry.close()).await.unwrap();
}
