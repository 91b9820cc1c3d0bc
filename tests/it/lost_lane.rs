//! A lane that is deleted under jobs on their way into it. What was in it is gone, as with any
//! queue; nothing else may be.

use crate::support::{
    LANE, Proxy, Scene, broker_addr, connect, consume, count, eventually, settle_all,
};
use anyhow::anyhow;
use lapin::options::{BasicCancelOptions, QueueDeleteOptions};
use lapin_retry::{Broker, Retry};
use std::{collections::BTreeSet, time::Duration};

const JOBS: usize = 5_000;
/// Hand-offs in flight, the default.
const IN_FLIGHT: usize = 64;
/// A broker that shares its disk with other tests confirms a few hundred jobs a second.
const LONG: Duration = Duration::from_secs(120);

#[tokio::test(flavor = "multi_thread")]
async fn of_5000_jobs_only_those_that_a_deleted_lane_had_confirmed_are_lost() {
    let scene = Scene::new().await;
    let ids = scene.fill(JOBS).await;
    let users = Proxy::start(broker_addr()).await;
    let broker = Broker::from(scene.url());
    let settings = scene.settings().confirm_timeout(Duration::from_secs(10));
    let retry = Retry::attach(&broker, "work", settings).await.unwrap();
    let connection = connect(&users.url(&scene.url())).await;
    let channel = connection.create_channel().await.unwrap();
    let consumer = consume(&channel, "work", 300).await;
    let tag = consumer.tag();
    let running = settle_all(&retry, consumer, |_| Err(anyhow!("no")));

    let moment = rand::random_range(JOBS / 10..JOBS * 8 / 10);
    // Counted by acks, for the sake of a moment that is exact.
    while users.acks() < moment as u64 {
        tokio::task::yield_now().await;
    }
    let waiting_to_return = scene.vhost.api().queue(LANE).unwrap()["messages_dlx"].as_u64();
    let asked = scene.journal.handed_off().len();
    let lane = LANE.into();
    let deleted = scene.channel.queue_delete(lane, QueueDeleteOptions::default()).await.unwrap();
    let before = scene.journal.handed_off();
    let meanwhile = before.len() - asked;

    eventually("all are settled", LONG, async || users.acks() >= JOBS as u64).await;
    eventually("all are handed off", LONG, async || scene.journal.handed_off() == ids).await;
    channel.basic_cancel(tag, BasicCancelOptions::default()).await.unwrap();
    running.await.unwrap();
    retry.close().await.unwrap();
    channel.close(200, "done".into()).await.unwrap();
    assert_eq!(count(&scene.channel, "work").await, 0);

    let copies = scene.look(LANE).await;
    let there: BTreeSet<String> = copies.iter().cloned().collect();
    let missing: BTreeSet<String> = ids.difference(&there).cloned().collect();
    let late = missing.difference(&before).count();
    let duplicates = copies.len() - there.len();
    let told = format!(
        "deleted after {moment} with {deleted} in it, {meanwhile} handed off meanwhile: {} missing, \
         {late} of them not told of before; {duplicates} duplicates, {} undecided",
        missing.len(),
        scene.journal.undecided()
    );
    println!("{told}");
    // What delete-ok counts is counted when the deletion begins, without what is on its way back;
    // until it ends the lane goes on confirming, and it confirms what is in flight at its end.
    let gone = deleted as usize + waiting_to_return.unwrap_or(0) as usize;
    assert!(missing.len() <= gone + meanwhile + IN_FLIGHT, "{told}");
    // The event follows the ack, and a hand-off that waits for neither has left its slot.
    assert!(late <= 2 * IN_FLIGHT, "{told}");
    assert!(duplicates <= scene.journal.possible_duplicates(), "{told}");
    assert!(scene.journal.undecided() <= IN_FLIGHT, "{told}");
}
