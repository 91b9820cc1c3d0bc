//! Several workers on one job, as values: each with a clock of its own, and no broker.

use lapin::{BasicProperties, types::FieldTable};

use super::*;
use crate::{
    Jitter, RetryPolicy, Settings,
    message::{Copier, Message},
    retry_after,
};

const COPIER: Copier<'static> = Copier { work_queue: "orders", user: "worker", frame_max: 131_072 };

fn rules(policy: RetryPolicy) -> Rules {
    Rules::new("orders", &Settings::new(policy), QueueType::Quorum).unwrap()
}

/// 2026-01-01T00:00:00Z and so long.
fn at(after: Duration) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_225_600) + after
}

fn seconds(s: f64) -> Duration {
    Duration::from_secs_f64(s)
}

fn job(properties: BasicProperties) -> Job {
    let message = Message {
        exchange: "shop".into(),
        routing_key: "order.new".into(),
        redelivered: false,
        properties,
        body: Vec::new(),
    };
    let story = Story::read(&message, "orders");
    Job::new(message, story)
}

/// The job as the broker gives it back, and after how long.
fn given_back(job: &Job, going: &Move, now: SystemTime) -> (Job, Duration) {
    let onward = going.onward(job, "orders", now).expect("a lane");
    let delay = onward.delay_ms.expect("a lane");
    let copy = COPIER.onward(job.message(), job.id(), onward.story, &onward.queue, Some(delay));
    (self::job(copy.unwrap().properties), Duration::from_millis(delay))
}

fn headers(job: &Job) -> FieldTable {
    job.properties().headers().clone().unwrap_or_default()
}

fn told_to_wait(rules: &Rules, job: &Job, wait: Duration, now: SystemTime) -> Move {
    let error = retry_after(anyhow::anyhow!("too many requests"), wait).into();
    rules.after_attempt(job, Verdict::from_result(Err(error), &[]), now, "host:1").unwrap()
}

#[test]
fn workers_whose_clocks_differ_by_two_seconds_differ_by_two_seconds_and_do_not_loop() {
    let rules = rules(RetryPolicy::new([4]).jitter(Jitter::None));
    // Which of the two takes the job each time it arrives.
    for turns in 0..1u32 << 12 {
        let clock = |turn: u32| seconds(if turns >> turn & 1 == 1 { 2.0 } else { 0.0 });
        let mut real = Duration::ZERO;
        let told =
            told_to_wait(&rules, &job(BasicProperties::default()), seconds(10.0), at(clock(0)));
        let (mut job, delay) = given_back(&job(BasicProperties::default()), &told, at(clock(0)));
        real += delay;
        let mut hops = 0;
        loop {
            assert!(headers(&job).contains_key("retry-not-before"), "after {hops} hops");
            assert_eq!(job.retry_count(), 1);
            let now = at(real + clock(hops + 1));
            match rules.on_arrival(&job, now) {
                Arrival::Run => break,
                Arrival::RunAfter(left) => {
                    assert!(left < SHORT);
                    real += left;
                    break;
                }
                Arrival::Move(to) => {
                    let (next, delay) = given_back(&job, &to, now);
                    (job, hops, real) = (next, hops + 1, real + delay);
                    assert!(hops < 5, "{turns:b}");
                }
            }
        }
        // 4 s are the longest lane.
        let skewed = (seconds(8.0)..seconds(10.0 + 2.0 + 4.0)).contains(&real);
        assert!(skewed, "{turns:b}: {real:?}");
        let failed = Verdict::from_result(Err(anyhow::anyhow!("no")), &[]);
        let to = rules.after_attempt(&job, failed, at(real), "host:1").unwrap();
        assert!(to.story.not_before.is_none(), "it was reached");
    }
}

#[test]
fn a_wait_in_hops_is_not_early_by_the_fraction_of_a_millisecond_that_a_header_cuts_off() {
    let rules = rules(RetryPolicy::new([1]));
    let now = at(Duration::from_nanos(999_999));
    let fresh = job(BasicProperties::default());
    let told = told_to_wait(&rules, &fresh, seconds(100.0), now);
    let (back, _) = given_back(&fresh, &told, now);
    let end = now + seconds(100.0);
    let Arrival::RunAfter(left) = rules.on_arrival(&back, end - seconds(0.5)) else {
        panic!("it is to be waited out")
    };
    assert!((seconds(0.5)..seconds(0.502)).contains(&left), "{left:?}");
}

#[test]
fn a_job_that_arrives_past_its_lifetime_is_buried_with_where_it_came_from() {
    let rules = rules(RetryPolicy::new([1]));
    let lives = |expiration: &str| {
        job(BasicProperties::default()
            .with_timestamp(1_767_225_600)
            .with_expiration(expiration.into()))
    };
    let arrives = |job: &Job, after: f64| match rules.on_arrival(job, at(seconds(after))) {
        Arrival::Move(to) => match to.to {
            To::Buried(reason) => Some((reason, to.story)),
            other => panic!("{other:?}"),
        },
        _ => None,
    };
    let (reason, story) = arrives(&lives("60000"), 62.0).expect("too late");
    assert_eq!(reason, BuriedReason::Expired);
    assert_eq!(story.original_exchange(), Some("shop"));
    assert_eq!(story.original_routing_key(), Some("order.new"));
    assert!(arrives(&lives("60000"), 59.0).is_none());
    // Published at 0.9 s and here at 1.0 s: it has 0.4 s left.
    assert!(arrives(&lives("500"), 1.0).is_none(), "a timestamp has whole seconds");
    assert!(arrives(&lives("never"), 1e6).is_none());
}

#[test]
fn the_expiration_of_a_lane_is_no_deadline() {
    let rules = rules(RetryPolicy::new([4, 4]).jitter(Jitter::None));
    let fresh = job(BasicProperties::default());
    let told = told_to_wait(&rules, &fresh, seconds(1.0), at(Duration::ZERO));
    // As an operator finds it who moves it out of its lane.
    let (back, delay) = given_back(&fresh, &told, at(Duration::ZERO));
    assert_eq!(back.properties().expiration().as_ref().unwrap().as_str(), "4000");
    assert!(matches!(rules.on_arrival(&back, at(2 * delay)), Arrival::Run));
    let failed = Verdict::from_result(Err(anyhow::anyhow!("no")), &[]);
    let to = rules.after_attempt(&back, failed, at(2 * delay), "host:1").unwrap();
    assert!(matches!(to.to, To::Level { level: 2, .. }), "{to:?}");
}
