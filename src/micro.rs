//! What the parts cost that need no broker. A benchmark cannot reach them, for they are private:
//!
//! ```sh
//! MICRO_CALLS=20000 cargo test --release --lib micro -- --nocapture
//! ```
//!
//! An ordinary run calls each a few times, and its figures mean nothing.

use std::{
    env,
    hint::black_box,
    io,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::Context;
use lapin::BasicProperties;

use crate::{
    FailureKind, Job, Outcome, QueueType, RetryPolicy, Settings, busy,
    message::{Copier, Failure, Message, Story},
    policy::Verdict,
    settle::Rules,
};

const COPIER: Copier<'static> = Copier { work_queue: "orders", user: "worker", frame_max: 131_072 };
const ROUNDS: usize = 9;

/// Prints the median of some rounds.
fn measure<T>(what: &str, mut call: impl FnMut() -> T) {
    let calls =
        env::var("MICRO_CALLS").map_or(10, |calls| calls.parse().expect("a number of calls"));
    let mut rounds: Vec<Duration> = (0..ROUNDS)
        .map(|_| {
            let begun = Instant::now();
            (0..calls).for_each(|_| drop(black_box(call())));
            begun.elapsed() / calls
        })
        .collect();
    rounds.sort_unstable();
    println!("{what:<44} {:>7} ns", rounds[ROUNDS / 2].as_nanos());
}

fn message(properties: BasicProperties) -> Message {
    let (exchange, routing_key) = ("shop".into(), "order.new".into());
    Message { exchange, routing_key, redelivered: false, properties, body: vec![b'.'; 256] }
}

fn failed(mut story: Story, message: &Message) -> Story {
    let (kind, error, level) = (FailureKind::Failed, "no route to host", "1/8 15s".to_owned());
    let at = SystemTime::now();
    story.charge(Failure { kind, error, at, level, worker: "host:1" });
    story.remember(message, at);
    story.go_to(at + Duration::from_secs(15));
    story
}

/// As it comes after so many failures.
fn after(failures: usize) -> Arc<Message> {
    (0..failures).fold(Arc::new(message(BasicProperties::default())), |before, _| {
        let mut story = failed(Story::read(&before, "orders"), &before);
        let copy = COPIER.onward(&before, "id", &mut story, "lane", Some(15_000)).unwrap();
        Arc::new(message(copy.properties))
    })
}

#[test]
fn headers() {
    for failures in [0, 1, 8] {
        let message = after(failures);
        let story = Story::read(&message, "orders");
        measure(&format!("headers read, after {failures} failures"), || {
            Story::read(&message, "orders")
        });
        measure(&format!("copy written, after {failures} failures and one more"), || {
            let mut story = failed(story.clone(), &message);
            COPIER.onward(&message, "id", &mut story, "lane", Some(15_000))
        });
    }
}

#[test]
fn placing() {
    let settings = Settings::new(RetryPolicy::new([15, 30, 60, 120, 240, 480, 960]));
    let rules = Rules::new("orders", settings.clone(), QueueType::Quorum).unwrap();
    let (job, now) =
        (Job::new(message(BasicProperties::default()), Story::default()), SystemTime::now());
    let after = |result: anyhow::Result<()>| {
        rules.after_attempt(&job, Verdict::from_result(result, &[]), now, "host:1")
    };
    measure("arrival", || rules.on_arrival(&job, now));
    measure("a success decided", || after(Ok(())));
    measure("a failure decided and placed in a lane", || after(Err(anyhow::anyhow!("no carrier"))));
    measure("a retry after 20 s decided and placed", || {
        after(Err(crate::retry_after(anyhow::anyhow!("429"), Duration::from_secs(20)).into()))
    });
}

#[test]
fn classify() {
    let settings = Settings::new(RetryPolicy::default())
        .classify(|_: &std::fmt::Error| Some(Outcome::Reject))
        .classify(|error: &io::Error| {
            (error.kind() == io::ErrorKind::TimedOut).then_some(Outcome::Outage)
        });
    let timed_out = || anyhow::Error::from(io::Error::from(io::ErrorKind::TimedOut));
    let verdict = |error| Verdict::from_result(Err(error), &settings.classifiers);
    measure("error made", || anyhow::anyhow!("no carrier"));
    measure("error made and classified: plain", || verdict(anyhow::anyhow!("no carrier")));
    measure("error made and classified: by a classifier", || {
        verdict(Err::<(), _>(timed_out()).context("shipping").unwrap_err())
    });
    measure("error made and classified: marked", || {
        verdict(Err::<(), _>(busy(timed_out())).context("shipping").unwrap_err())
    });
}
