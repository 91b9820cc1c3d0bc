//! Several workers on one job, as values: each with a clock of its own, and no broker.

mod limits;

use amq_protocol::{
    frame::WriteContext,
    types::{generation::gen_field_table, parsing::parse_field_table},
};
use lapin::{
    BasicProperties,
    types::{AMQPValue, FieldTable},
};
use proptest::prelude::*;

use super::*;
use crate::{
    Jitter, Outcome, RetryPolicy, Settings,
    fuzz::fuzz,
    message::{
        Copier, Message, Outgoing,
        tests::{bulky_headers, has_short_string, header_frame_len, headers as any_headers},
    },
    retry_after,
};

const COPIER: Copier<'static> = Copier { work_queue: "orders", user: "worker", frame_max: 131_072 };

fn rules(policy: RetryPolicy) -> Rules {
    Rules::new("orders", Settings::new(policy), QueueType::Quorum).unwrap()
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
fn given_back(job: &Job, going: &mut Move, now: SystemTime) -> (Job, Duration) {
    let (lane, _) = going.onward(now).expect("a lane");
    let Lane { delay_ms: delay, queue } = lane.expect("a lane");
    let copy = COPIER.onward(job.message(), job.id(), &mut going.story, &queue.name, Some(delay));
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
    assert!(arrives(&lives("60000"), 61.0).is_none(), "the last moment at which it may be in time");
    assert!(arrives(&lives("60000"), 61.001).is_some());
    // Once it has failed its deadline is a header, which has milliseconds.
    let fresh = lives("60000");
    let mut told = told_to_wait(&rules, &fresh, seconds(1.0), at(Duration::ZERO));
    let (again, _) = given_back(&fresh, &mut told, at(Duration::ZERO));
    assert!(arrives(&again, 60.0).is_none());
    assert!(arrives(&again, 60.001).is_some());
}

#[test]
fn the_expiration_of_a_lane_is_no_deadline() {
    let rules = rules(RetryPolicy::new([4, 4]).jitter(Jitter::None));
    let fresh = job(BasicProperties::default());
    let mut told = told_to_wait(&rules, &fresh, seconds(1.0), at(Duration::ZERO));
    // As an operator finds it who moves it out of its lane.
    let (back, delay) = given_back(&fresh, &mut told, at(Duration::ZERO));
    assert_eq!(back.properties().expiration().as_ref().unwrap().as_str(), "4000");
    assert!(matches!(rules.on_arrival(&back, at(2 * delay)), Arrival::Run));
    let failed = Verdict::from_result(Err(anyhow::anyhow!("no")), &[]);
    let to = rules.after_attempt(&back, failed, at(2 * delay), "host:1").unwrap();
    assert!(matches!(to.to, To::Level { level: 2, .. }), "{to:?}");
}

/// Headers as they come off the wire: any, large ones, and such with a few bytes that are others.
fn wire_headers() -> impl Strategy<Value = FieldTable> {
    let bytes = proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    let table = prop_oneof![8 => any_headers(), 1 => bulky_headers()];
    (table, bytes).prop_map(|(table, bytes)| {
        let written = gen_field_table(&table)(WriteContext::from(Vec::new())).unwrap();
        let mut wire = written.into_inner().0;
        for (at, byte) in bytes {
            // Another length of the whole is only another frame.
            if let Some(content) = wire.get_mut(4..).filter(|content| !content.is_empty()) {
                *at.get_mut(content) = byte;
            }
        }
        parse_field_table(&wire[..]).map_or(table, |(_, table)| table)
    })
}

fn any_message() -> impl Strategy<Value = Message> {
    let lives = prop_oneof!["[0-9]{1,22}", ".{0,9}"];
    let short = || proptest::option::of(".{0,60}");
    let properties = (
        wire_headers(),
        proptest::option::of(lives),
        proptest::option::of(prop_oneof![Just(1_767_225_600), any::<u64>()]),
        (short(), short(), short(), short()),
    );
    (properties, ".{0,60}", ".{0,60}", any::<bool>()).prop_map(
        |((headers, lives, stamp, (id, user, kind, encoding)), exchange, key, redelivered)| {
            let mut properties = BasicProperties::default().with_headers(headers);
            let mut with = |text: Option<String>, set: fn(BasicProperties, _) -> _| {
                if let Some(text) = text {
                    properties = set(properties.clone(), text.as_str().into());
                }
            };
            with(lives, BasicProperties::with_expiration);
            with(id, BasicProperties::with_message_id);
            with(user, BasicProperties::with_user_id);
            with(kind, BasicProperties::with_type);
            with(encoding, BasicProperties::with_content_type);
            if let Some(stamp) = stamp {
                properties = properties.with_timestamp(stamp);
            }
            let (exchange, routing_key) = (exchange.as_str().into(), key.as_str().into());
            Message { exchange, routing_key, redelivered, properties, body: Vec::new() }
        },
    )
}

/// Where it goes, as what is published there.
fn sent(to: &mut Move, job: &Job, now: SystemTime) -> Outgoing {
    let reason = match to.onward(now) {
        Ok((lane, _)) => {
            let (message, delay_ms) = (job.message(), lane.as_ref().map(|lane| lane.delay_ms));
            let queue = lane.as_ref().map_or("orders", |lane| &lane.queue.name);
            match COPIER.onward(message, job.id(), &mut to.story, queue, delay_ms) {
                Ok(copy) => return copy,
                Err(_) => BuriedReason::TooLarge,
            }
        }
        Err(reason) => reason,
    };
    let (story, what) = (to.story.clone(), (reason, now, "host:1"));
    COPIER.burial(job.message(), job.id(), story, "orders.buried", what).0
}

#[test]
fn whatever_is_in_the_headers_the_job_is_read_and_sent_on_and_read_again() {
    let rules = rules(RetryPolicy::new([1, 60]).max_age(seconds(1e6)));
    let outcome = prop_oneof![
        Just(Outcome::Failed),
        any::<u64>().prop_map(|ms| Outcome::RetryAfter(Duration::from_millis(ms))),
        Just(Outcome::RetryAfter(Duration::MAX)),
        Just(Outcome::Reject),
        Just(Outcome::Busy),
        Just(Outcome::Outage),
    ];
    let now = (0..4_000_000_000u64).prop_map(|s| SystemTime::UNIX_EPOCH + Duration::from_secs(s));
    fuzz((any_message(), outcome, ".{0,2000}", now), |(message, outcome, error, now)| {
        let mut story = Story::read(&message, "orders");
        story.forgive(now);
        let mut job = Job::new(message, story);
        // On its first arrival, and once more as what became of it then.
        for _ in 0..2 {
            let _ = (format!("{job:?}"), job.message().delivery_count());
            let failed =
                Verdict::Failed { outcome, kind: FailureKind::Failed, error: error.clone() };
            let after = rules.after_attempt(&job, failed, now, "host:1");
            let mut ways =
                vec![after.expect("no failure is the end"), Move::return_unrun(&job, now)];
            if let Arrival::Move(to) = rules.on_arrival(&job, now) {
                ways.push(*to);
            }
            let copies: Vec<_> = ways.iter_mut().map(|to| sent(to, &job, now)).collect();
            for Outgoing { properties, queue, .. } in &copies {
                prop_assert!(header_frame_len(properties) <= 131_072, "{queue}");
                prop_assert!(!has_short_string(properties.headers().as_ref().unwrap()));
                prop_assert_eq!(properties.message_id().as_ref().unwrap().as_str(), job.id());
            }
            job = self::job(copies[0].properties.clone());
        }
        Ok(())
    });
}

/// The copy of it that comes back.
fn copied(job: &Job, to: &mut Move) -> Job {
    let (lane, _) = to.onward(at(Duration::ZERO)).expect("back to its queue");
    assert!(lane.is_none(), "{lane:?}");
    let copy = COPIER.onward(job.message(), job.id(), &mut to.story, "orders", None);
    self::job(copy.unwrap().properties)
}

fn crash_count(job: &Job) -> Option<AMQPValue> {
    headers(job).inner().get("retry-crash-count").cloned()
}

#[test]
fn a_suspect_is_run_alone_as_often_as_the_limit_says_and_then_buried_with_its_story() {
    let settings = Settings::new(RetryPolicy::new([1])).crash_limit(2);
    let rules = Rules::new("orders", settings, QueueType::Quorum).unwrap();
    let count = |job: &Job| rules.count_crash(job, at(Duration::ZERO), "host:1");
    let once =
        copied(&job(BasicProperties::default()), &mut count(&job(BasicProperties::default())));
    assert_eq!(crash_count(&once), Some(AMQPValue::LongLongInt(1)));
    assert!(!headers(&once).contains_key("retry-history"), "it was merely in hand");
    let twice = copied(&once, &mut count(&once));
    assert_eq!(crash_count(&twice), Some(AMQPValue::LongLongInt(2)));
    assert_eq!(twice.retry_count(), 0, "nothing is charged");
    let last = count(&twice);
    assert!(matches!(last.to, To::Buried(BuriedReason::CrashLoop)), "{last:?}");
    assert_eq!((last.kind, last.story.crash_count), (FailureKind::Crash, 2));
    let AMQPValue::FieldArray(history) = headers(&twice).inner()["retry-history"].clone() else {
        panic!("{twice:?}")
    };
    assert_eq!(history.as_slice().len(), 1, "the first lone crash; the last is on the burial");
}

#[test]
fn any_outcome_of_its_handler_ends_a_series_of_crashes() {
    let rules = rules(RetryPolicy::new([1, 1]));
    let fresh = job(BasicProperties::default());
    let marked = copied(&fresh, &mut rules.count_crash(&fresh, at(Duration::ZERO), "host:1"));
    for error in [anyhow::anyhow!("no"), crate::outage(anyhow::anyhow!("down")).into()] {
        let verdict = Verdict::from_result(Err(error), &[]);
        let to = rules.after_attempt(&marked, verdict, at(Duration::ZERO), "host:1").unwrap();
        assert_eq!(to.story.crash_count, 0);
    }
    let back = copied(&marked, &mut Move::return_unrun(&marked, at(Duration::ZERO)));
    assert_eq!(crash_count(&back), Some(AMQPValue::LongLongInt(1)), "it has not run");
}

#[test]
fn a_crash_count_that_makes_no_sense_counts_from_here() {
    let mut table = FieldTable::default();
    table.insert("retry-queue".into(), AMQPValue::LongString("orders".into()));
    table.insert("retry-crash-count".into(), AMQPValue::LongLongInt(-1));
    let odd = job(BasicProperties::default().with_headers(table));
    let rules = rules(RetryPolicy::new([1]));
    let copy = copied(&odd, &mut rules.count_crash(&odd, at(Duration::ZERO), "host:1"));
    assert_eq!(crash_count(&copy), Some(AMQPValue::LongLongInt(1)));
}
