//! A pause in the user's own loop: the stream waits, and after the wait it gives out one job.

use crate::{
    support::{PATIENCE, WORK, connect, consume, eventually, next, table, within},
    workshop::{Workshop, ms},
};
use futures_util::{FutureExt, StreamExt};
use lapin::{BasicProperties, Connection, Consumer, types::AMQPValue};
use lapin_retry::{Event, Jobs, Receipt, Resumed, Retry, Settled, UnsettledJob, outage};
use std::time::{Duration, SystemTime};

/// A wait that no test lives to see the end of.
const LONG: Duration = Duration::from_secs(3600);

async fn attach(shop: &Workshop, first: Duration) -> (Retry, Connection) {
    let url = shop.url();
    let retry = Retry::attach(url.as_str(), WORK, shop.settings(first, first)).await.unwrap();
    (retry, connect(&url).await)
}

async fn consumer(connection: &Connection, prefetch: u16) -> Consumer {
    consume(&connection.create_channel().await.unwrap(), WORK, prefetch).await
}

async fn job(jobs: &mut Jobs) -> UnsettledJob {
    within("a job", jobs.next()).await.expect("no end").expect("no error")
}

async fn down(job: UnsettledJob) -> Receipt {
    job.settle(Err(outage(anyhow::anyhow!("down")))).await.unwrap()
}

async fn done(job: UnsettledJob) {
    assert_eq!(job.settle(anyhow::Ok(())).await.unwrap().await, Settled::Acked);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stream_waits_then_gives_out_one_job_and_goes_on_when_it_got_through() {
    let shop = Workshop::in_an_outage().await;
    shop.jobs(10).await;
    let (retry, connection) = attach(&shop, ms(300)).await;
    let mut jobs = retry.jobs(consumer(&connection, 10).await);
    assert_eq!(retry.paused(), None);
    let (first, second) = (job(&mut jobs).await, job(&mut jobs).await);
    let returned = down(first).await;
    let until = retry.paused().expect("a pause");
    assert_eq!(within("the return", returned.into_future()).await, Settled::Returned);
    // It was started before: neither its outage nor its success says anything.
    down(second).await;
    assert_eq!(shop.journal.waits(), [ms(300)]);

    let probe = job(&mut jobs).await;
    assert!(std::time::Instant::now() >= until);
    assert!(tokio::time::timeout(ms(500), jobs.next()).await.is_err(), "one job is tried");
    down(probe).await;
    assert_eq!(shop.journal.waits().len(), 2);
    let probe = job(&mut jobs).await;
    assert!(jobs.next().now_or_never().is_none());
    done(probe).await;
    for _ in 0..9 {
        done(job(&mut jobs).await).await;
    }
    assert_eq!(shop.journal.resumed(), [Resumed::GotThrough]);
    retry.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_lets_the_stream_go_on_at_once() {
    let shop = Workshop::in_an_outage().await;
    shop.jobs(3).await;
    let (retry, connection) = attach(&shop, LONG).await;
    let mut jobs = retry.jobs(consumer(&connection, 10).await);
    let first = job(&mut jobs).await;
    down(first).await;
    assert!(jobs.next().now_or_never().is_none());
    retry.resume();
    assert_eq!(retry.paused(), None);
    let all = [job(&mut jobs).await, job(&mut jobs).await, job(&mut jobs).await];
    for job in all {
        done(job).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_several_streams_and_accepts_one_gets_the_probe() {
    let shop = Workshop::in_an_outage().await;
    shop.jobs(40).await;
    let (retry, connection) = attach(&shop, ms(200)).await;
    let mut one = retry.jobs(consumer(&connection, 5).await);
    let mut other = retry.jobs(consumer(&connection, 5).await);
    let mut raw = consumer(&connection, 5).await;
    down(job(&mut one).await).await;
    let (delivery, second) = (next(&mut raw).await, next(&mut raw).await);
    for _ in 0..5 {
        let probes = [
            job(&mut one).map(Some).boxed(),
            job(&mut other).map(Some).boxed(),
            async { retry.clone().accept(next(&mut raw).await).await.unwrap() }.boxed(),
        ];
        let (probe, _, rest) = futures_util::future::select_all(probes).await;
        let both = futures_util::future::select_all(rest);
        assert!(tokio::time::timeout(ms(500), both).await.is_err(), "one job is tried");
        down(probe.expect("a job to run")).await;
    }
    assert_eq!(shop.journal.waits().len(), 6);
    let probe = within("a probe", retry.accept(delivery)).await.unwrap().unwrap();
    done(probe).await;
    let through = within("a job", retry.accept(second)).await.unwrap().unwrap();
    done(through).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_goes_away_with_the_right_to_try_a_job_does_not_take_it_along() {
    let shop = Workshop::in_an_outage().await;
    shop.jobs(1).await;
    let (retry, connection) = attach(&shop, ms(50)).await;
    let mut jobs = retry.jobs(consumer(&connection, 1).await);
    // Dropped before it is answered, the consumer's channel would bring the job back.
    let returned = down(job(&mut jobs).await).await;
    assert_eq!(within("the return", returned.into_future()).await, Settled::Returned);
    drop(jobs);
    eventually("the job is taken", PATIENCE, async || !shop.take_all().await.is_empty()).await;

    // A stream that waits for a job to try, and is dropped.
    let mut idle = retry.jobs(consumer(&connection, 1).await);
    assert!(tokio::time::timeout(ms(300), idle.next()).await.is_err());
    drop(idle);
    // A job that is tried, and is dropped.
    shop.jobs(2).await;
    let mut jobs = retry.jobs(consumer(&connection, 1).await);
    drop(job(&mut jobs).await);
    // Given back, it is tried again.
    let probe = job(&mut jobs).await;
    done(probe).await;
    done(job(&mut jobs).await).await;
    assert_eq!(shop.journal.resumed(), [Resumed::GotThrough]);
    let given_back = |event: &Event| matches!(event, Event::GivenBack { .. });
    assert_eq!(shop.journal.count(given_back), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_the_stream_kept_through_the_pause_is_a_probe_like_any_other() {
    let shop = Workshop::in_an_outage().await;
    shop.jobs(1).await;
    let (retry, connection) = attach(&shop, ms(2000)).await;
    let mut jobs = retry.jobs(consumer(&connection, 10).await);
    let first = job(&mut jobs).await;
    let soon = humantime::format_rfc3339_millis(SystemTime::now() + ms(990)).to_string();
    let headers = table([
        ("retry-queue", AMQPValue::LongString(WORK.into())),
        ("retry-not-before", AMQPValue::LongString(soon.into())),
    ]);
    shop.publish_job("soon", BasicProperties::default().with_headers(headers)).await;
    shop.holds(WORK, 0).await;
    assert!(tokio::time::timeout(ms(50), jobs.next()).await.is_err(), "not due");
    down(first).await;
    let kept = job(&mut jobs).await;
    assert_eq!(kept.id(), "soon");
    done(kept).await;
    assert_eq!(shop.journal.resumed(), [Resumed::GotThrough]);
    done(job(&mut jobs).await).await;
}
