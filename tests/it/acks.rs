//! Acks that cover several jobs cover none but those that are settled.

use crate::support::{
    Journal, PATIENCE, Scene, WORK, connect, consume, eventually, next, quick, within,
};
use futures_util::StreamExt;
use lapin::{
    BasicProperties,
    options::{BasicAckOptions, BasicGetOptions},
};
use lapin_retry::{Job, Jobs, Retry, RetryConsumer, Settled, UnsettledJob};
use std::{collections::BTreeSet, sync::Arc, time::Duration};
use tokio::sync::Semaphore;

const GRACE: Duration = Duration::from_secs(10);

async fn publish(scene: &Scene, jobs: std::ops::Range<usize>) {
    for id in jobs {
        let properties = BasicProperties::default().with_message_id(id.to_string().into());
        scene.publish(properties, b"job").await;
    }
}

async fn job(jobs: &mut Jobs) -> UnsettledJob {
    within("a job", jobs.next()).await.expect("no end").expect("no error")
}

async fn done(job: UnsettledJob) {
    let receipt = job.settle(anyhow::Ok(())).await.unwrap();
    assert_eq!(within("the ack", receipt.into_future()).await, Settled::Acked);
}

/// Ids of what comes back once all channels of the test are closed.
async fn left(scene: &Scene, jobs: usize) -> BTreeSet<String> {
    scene.holds(WORK, jobs).await;
    let mut left = BTreeSet::new();
    while let Some(got) =
        scene.channel.basic_get(WORK.into(), BasicGetOptions { no_ack: true }).await.unwrap()
    {
        left.insert(got.properties.message_id().as_ref().unwrap().to_string());
    }
    left
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_done_behind_a_slow_job_is_acked_without_more_traffic() {
    let scene = Scene::new().await;
    publish(&scene, 0..50).await;
    let gate = Arc::new(Semaphore::new(0));
    let opening = Arc::clone(&gate);
    let journal = Journal::default();
    let written = journal.clone();
    let handle = RetryConsumer::builder(scene.url(), WORK)
        .policy(quick())
        .on_event(journal.hook())
        .handler(move |job: Job| {
            let (gate, journal) = (Arc::clone(&gate), written.clone());
            async move {
                if job.id() == "0" {
                    let _open = gate.acquire().await?;
                }
                journal.succeed(&job);
                Ok(())
            }
        })
        .start()
        .await
        .unwrap();
    journal.until_done(49).await;
    eventually("one is unacked", PATIENCE, async || {
        scene.vhost.api().queue(WORK).is_some_and(|queue| queue["messages_unacknowledged"] == 1)
    })
    .await;
    opening.add_permits(1);
    journal.until_done(50).await;
    handle.shutdown(GRACE).await;
    assert!(left(&scene, 0).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_two_streams_on_one_channel_are_acked_only_by_their_own() {
    let scene = Scene::new().await;
    publish(&scene, 0..20).await;
    let retry = Retry::attach(scene.url(), WORK, quick()).await.unwrap();
    let connection = connect(&scene.url()).await;
    let channel = connection.create_channel().await.unwrap();
    let mut one = retry.jobs(consume(&channel, WORK, 10).await);
    let mut other = retry.jobs(consume(&channel, WORK, 10).await);
    let mut open = Vec::new();
    for _ in 0..10 {
        open.push(job(&mut one).await);
        done(job(&mut other).await).await;
    }
    let ids: BTreeSet<_> = open.iter().map(|job| job.id().to_owned()).collect();
    let last = open.pop().unwrap();
    let acked = last.id().to_owned();
    done(last).await;
    scene.unacked(9).await;
    // Not dropped, which would give them back one by one: the broker tells what it still has.
    open.into_iter().for_each(std::mem::forget);
    connection.close(200, "done".into()).await.unwrap();
    let left = left(&scene, 9).await;
    assert_eq!(left, ids.into_iter().filter(|id| *id != acked).collect());
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_two_channels_of_one_retry_are_acked_on_their_own() {
    let scene = Scene::new().await;
    publish(&scene, 0..40).await;
    let retry = Retry::attach(scene.url(), WORK, quick()).await.unwrap();
    let connection = connect(&scene.url()).await;
    let channels =
        [connection.create_channel().await.unwrap(), connection.create_channel().await.unwrap()];
    let mut one = retry.jobs(consume(&channels[0], WORK, 20).await);
    let mut other = retry.jobs(consume(&channels[1], WORK, 20).await);
    let mut open = BTreeSet::new();
    for _ in 0..20 {
        let kept = job(&mut one).await;
        open.insert(kept.id().to_owned());
        std::mem::forget(kept);
        done(job(&mut other).await).await;
    }
    scene.unacked(20).await;
    connection.close(200, "done".into()).await.unwrap();
    assert_eq!(left(&scene, 20).await, open);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_the_user_settles_himself_is_never_covered() {
    let scene = Scene::new().await;
    publish(&scene, 0..12).await;
    let retry = Retry::attach(scene.url(), WORK, quick()).await.unwrap();
    let connection = connect(&scene.url()).await;
    let channel = connection.create_channel().await.unwrap();
    let mut raw = consume(&channel, WORK, 1).await;
    let mut own = vec![next(&mut raw).await];
    let mut jobs = retry.jobs(consume(&channel, WORK, 5).await);
    for _ in 0..5 {
        done(job(&mut jobs).await).await;
    }
    own[0].acker.ack(BasicAckOptions::default()).await.unwrap();
    own.push(next(&mut raw).await);
    for _ in 0..5 {
        done(job(&mut jobs).await).await;
    }
    retry.close().await.unwrap();
    connection.close(200, "done".into()).await.unwrap();
    let kept = own[1].properties.message_id().as_ref().unwrap().to_string();
    assert_eq!(left(&scene, 1).await, BTreeSet::from([kept]));
}

#[tokio::test(flavor = "multi_thread")]
async fn close_leaves_no_ack_behind() {
    let scene = Scene::new().await;
    publish(&scene, 0..200).await;
    let retry = Retry::attach(scene.url(), WORK, quick()).await.unwrap();
    let connection = connect(&scene.url()).await;
    let channel = connection.create_channel().await.unwrap();
    let mut jobs = retry.jobs(consume(&channel, WORK, 200).await);
    let first = job(&mut jobs).await;
    for _ in 1..200 {
        job(&mut jobs).await.settle(anyhow::Ok(())).await.unwrap();
    }
    // The last is the first of its channel, which the others waited for.
    done(first).await;
    retry.close().await.unwrap();
    connection.close(200, "done".into()).await.unwrap();
    assert!(left(&scene, 0).await.is_empty());
}
