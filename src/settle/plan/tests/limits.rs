//! Waits, deadlines and what a burial says of them.

use rand::{RngExt, SeedableRng};

use super::*;

/// How long the job really waits, and through how many lanes, when each worker that it meets has a
/// clock of its own: `off` from the real time, at each arrival another.
fn waited(
    rules: &Rules,
    wait: Duration,
    mut off: impl FnMut() -> SystemTime,
) -> (Duration, u32, Job) {
    let fresh = job(BasicProperties::default());
    let now = off();
    let mut told = told_to_wait(rules, &fresh, wait, now);
    let (mut job, mut real) = given_back(&fresh, &mut told, now);
    for lanes in 1..20_000 {
        assert_eq!(job.retry_count(), 1);
        let now = off() + real;
        match rules.on_arrival(&job, now) {
            Arrival::Run => return (real, lanes, job),
            Arrival::RunAfter(left) => {
                assert!(left < SHORT);
                return (real + left, lanes, job);
            }
            Arrival::Move(mut to) => {
                assert!(matches!(to.to, To::Wait { why: Postponed::NotDue, .. }), "{to:?}");
                let (next, delay) = given_back(&job, &mut to, now);
                (job, real) = (next, real + delay);
            }
        }
    }
    panic!("it hops for ever")
}

#[test]
fn no_clock_makes_a_wait_in_hops_early_or_late() {
    let rules = rules(RetryPolicy::new([4]).jitter(Jitter::None));
    // Which of two workers takes the job each time it arrives: one's clock is an hour ahead.
    for turns in 0..1u32 << 4 {
        let mut turn = 0;
        let (real, lanes, job) = waited(&rules, seconds(10.0), || {
            turn += 1;
            at(seconds(if turns >> turn & 1 == 1 { 3600.0 } else { 0.0 }))
        });
        assert_eq!((real, lanes), (seconds(12.0), 3), "{turns:b}: 4 s are the longest lane");
        assert_eq!(headers(&job).inner()["retry-wait-left"], AMQPValue::LongLongInt(0));
        assert!(headers(&job).contains_key("retry-not-before"), "for people");
        let failed = Verdict::from_result(Err(anyhow::anyhow!("no")), &[]);
        let to = rules.after_attempt(&job, failed, at(real), "host:1").unwrap();
        assert_eq!((to.story.wait_left, to.story.not_before), (None, None), "it was reached");
    }
}

proptest! {
    #[test]
    fn a_wait_in_hops_is_never_early_and_takes_no_more_hops_than_allowed(
        wait_ms in 1u64..400 * 86_400_000,
        levels in proptest::collection::vec(1u64..100_000_000, 1..4),
        seed: u64,
    ) {
        let rules = rules(RetryPolicy::new(levels.iter().map(|ms| Duration::from_millis(*ms))));
        prop_assume!(rules.topology.in_reach(0, wait_ms));
        let mut clock = SmallRng::seed_from_u64(seed);
        let (real, lanes, _) = waited(&rules, Duration::from_millis(wait_ms), || {
            at(Duration::from_secs(clock.random_range(0..1_000_000_000)))
        });
        let wait = Duration::from_millis(wait_ms);
        let first = Duration::from_millis(rules.topology.place(0, 1, &mut clock).delay_ms);
        prop_assert!(real >= wait, "early: {real:?}");
        let longest = levels.iter().max().copied().map(Duration::from_millis).unwrap_or_default();
        prop_assert!(real <= wait + wait / 4 + longest + first, "late: {real:?} of {wait:?}");
        prop_assert!(lanes <= 10_001);
    }
}

#[test]
fn a_wait_in_hops_is_due_at_its_end_and_not_at_that_of_its_first_lane() {
    let rules = rules(RetryPolicy::new([4]).jitter(Jitter::None));
    let fresh = job(BasicProperties::default());
    let mut told = told_to_wait(&rules, &fresh, seconds(10.0), at(Duration::ZERO));
    // Its hand-off takes a second.
    let (_, due) = told.onward(at(seconds(1.0))).unwrap();
    assert_eq!(due, at(seconds(11.0)));
    let (back, _) = given_back(&fresh, &mut told, at(seconds(1.0)));
    let text = |name| match &headers(&back).inner()[name] {
        AMQPValue::LongString(text) => text.to_string(),
        other => panic!("{other:?}"),
    };
    assert_eq!(text("retry-due-at"), "2026-01-01T00:00:11.000Z");
    assert_eq!(headers(&back).inner()["retry-wait-left"], AMQPValue::LongLongInt(6_000));
    let Arrival::Move(mut to) = rules.on_arrival(&back, at(seconds(5.0))) else { panic!("a hop") };
    assert_eq!(to.onward(at(seconds(5.0))).unwrap().1, at(seconds(11.0)));
}

/// As a copy of a version that counts on the clock.
fn not_before(end: SystemTime) -> Job {
    let text = |text: String| AMQPValue::LongString(text.into());
    let mut table = FieldTable::default();
    table.insert("retry-queue".into(), text("orders".to_owned()));
    table.insert("retry-count".into(), AMQPValue::LongLongInt(1));
    let end = humantime::format_rfc3339_millis(end).to_string();
    table.insert("retry-not-before".into(), text(end));
    job(BasicProperties::default().with_headers(table))
}

#[test]
fn a_copy_that_tells_only_the_end_of_its_wait_waits_by_the_clock_until_its_next_lane() {
    let rules = rules(RetryPolicy::new([4]).jitter(Jitter::None));
    let old = not_before(at(seconds(10.0)));
    assert!(matches!(rules.on_arrival(&old, at(seconds(10.0))), Arrival::Run));
    let Arrival::RunAfter(left) = rules.on_arrival(&old, at(seconds(9.5))) else {
        panic!("it is to be waited out")
    };
    assert_eq!(left, seconds(0.5));
    let Arrival::Move(mut to) = rules.on_arrival(&old, at(Duration::ZERO)) else { panic!("a hop") };
    let (next, _) = given_back(&old, &mut to, at(Duration::ZERO));
    assert_eq!(next.story().wait_left, Some(6_000));
    assert_eq!(next.story().not_before, old.story().not_before);
    // From here on its clock is not looked at.
    assert!(matches!(rules.on_arrival(&next, at(seconds(1e6))), Arrival::Move(_)));
}

#[test]
fn an_end_is_not_early_by_the_fraction_of_a_millisecond_that_a_header_cuts_off() {
    let rules = rules(RetryPolicy::new([1]));
    let now = at(Duration::from_nanos(999_999));
    let fresh = job(BasicProperties::default());
    let mut told = told_to_wait(&rules, &fresh, seconds(100.0), now);
    let (back, _) = given_back(&fresh, &mut told, now);
    let end = back.story().not_before.expect("several hops");
    assert!(end >= now + seconds(100.0), "{end:?}");
}

/// Why it is buried, with what detail and which error.
fn buried(mut to: Move, now: SystemTime) -> (BuriedReason, String, String) {
    let reason = to.onward(now).expect_err("to be buried");
    let written = sent(&mut to, &job(BasicProperties::default()), now).properties;
    let (event, _) = to.said(job(BasicProperties::default()), Err(reason));
    let crate::Event::Buried { detail, error, .. } = event else { panic!("{event:?}") };
    let header = written.headers().clone().unwrap().inner()["buried-detail"].clone();
    assert_eq!(header, AMQPValue::LongString(detail.as_str().into()));
    assert!(!error.is_empty());
    (reason, detail, error)
}

#[test]
fn every_burial_says_which_limit_was_passed_and_by_how_much() {
    let policy = || RetryPolicy::new([120]).jitter(Jitter::None);
    let (of, aged) = (rules(policy()), rules(policy().max_age(seconds(60.0))));
    let published = |expiration: Option<&str>| {
        let properties = BasicProperties::default().with_timestamp(1_767_225_600);
        job(match expiration {
            Some(text) => properties.with_expiration(text.into()),
            None => properties,
        })
    };
    let arrives = |rules: &Rules, job: Job, after: f64| {
        let Arrival::Move(to) = rules.on_arrival(&job, at(seconds(after))) else { panic!("runs") };
        buried(*to, at(seconds(after)))
    };
    let fails = |rules: &Rules, job: Job, error: anyhow::Error, after: f64| {
        let verdict = Verdict::from_result(Err(error), &[]);
        let to = rules.after_attempt(&job, verdict, at(seconds(after)), "host:1").unwrap();
        buried(to, at(seconds(after)))
    };
    let no = || anyhow::anyhow!("no");

    let (reason, detail, error) = arrives(&of, published(Some("60000")), 160.0);
    assert_eq!(reason, BuriedReason::Expired);
    let deadline = "its deadline of 2026-01-01T00:01:00.000Z, which its expiration set";
    assert_eq!(detail, format!("it arrived 1m 40s after {deadline}"));
    assert_eq!(error, detail, "it was not run");
    let limit = "its age limit of 1m (max_age), reached at 2026-01-01T00:01:00.000Z";
    let (_, detail, _) = arrives(&aged, published(None), 62.5);
    assert_eq!(detail, format!("it arrived 2s 500ms after {limit}"));
    let (reason, detail, error) = fails(&aged, published(None), no(), 10.0);
    assert_eq!((reason, error.as_str()), (BuriedReason::Expired, "no"));
    assert_eq!(detail, format!("its next delay of 2m would end 1m 10s after {limit}"));
    let (_, detail, _) = fails(&of, published(Some("60000")), no(), 10.0);
    assert_eq!(detail, format!("its next delay of 2m would end 1m 10s after {deadline}"));

    let (reason, detail, _) = fails(
        &of,
        published(None),
        retry_after(no(), Duration::from_secs(100 * 365 * 86_400)).into(),
        0.0,
    );
    assert_eq!(reason, BuriedReason::Expired, "nothing is wrong with its headers");
    assert!(detail.contains("99years") && detail.contains("10 years"), "{detail}");
    let (reason, detail, _) = arrives(&of, not_before(at(seconds(1e9))), 0.0);
    assert_eq!(reason, BuriedReason::InvalidHeaders);
    let says = "the header retry-not-before is 2057-09-09T01:46:40.000Z: a wait of 31years";
    assert!(detail.starts_with(says), "{detail}");

    let (reason, detail, _) = fails(&of, not_before(at(seconds(0.0))), no(), 0.0);
    assert_eq!(reason, BuriedReason::Exhausted);
    assert_eq!(detail, "it failed 2 times, and its policy has 1 level");
    let (reason, detail, _) = fails(&of, published(None), crate::reject(no()).into(), 0.0);
    assert_eq!(reason, BuriedReason::Rejected);
    assert_eq!(detail, "its handler said that trying again is of no use");
    let (reason, detail, _) = fails(&of, published(None), crate::undecodable(no()).into(), 0.0);
    assert_eq!(reason, BuriedReason::Undecodable);
    assert_eq!(detail, "its body cannot be read");
}

#[test]
fn a_burial_for_its_headers_names_each_and_its_value() {
    let rules = rules(RetryPolicy::new([1]));
    let text = |text: &str| AMQPValue::LongString(text.into());
    for (name, value, says) in [
        ("retry-count", text("abc"), "the header retry-count is \"abc\", not a whole number from"),
        ("retry-busy-count", AMQPValue::LongLongInt(-1), "the header retry-busy-count is -1, not"),
        ("retry-deadline", text("soon"), "the header retry-deadline is \"soon\", not an instant"),
        ("retry-not-before", AMQPValue::Boolean(true), "the header retry-not-before is true, not"),
        ("retry-wait-left", AMQPValue::Double(0.5), "the header retry-wait-left is 0.5, not a num"),
        (
            "retry-original-exchange",
            AMQPValue::FieldTable(FieldTable::default()),
            "the header retry-original-exchange is a table of 0, not a name",
        ),
    ] {
        let mut table = FieldTable::default();
        table.insert("retry-queue".into(), text("orders"));
        table.insert(name.into(), value);
        let odd = job(BasicProperties::default().with_headers(table));
        assert!(matches!(rules.on_arrival(&odd, at(Duration::ZERO)), Arrival::Run), "{name}");
        let failed = Verdict::from_result(Err(anyhow::anyhow!("no")), &[]);
        let to = rules.after_attempt(&odd, failed, at(Duration::ZERO), "host:1").unwrap();
        let (reason, detail, error) = buried(to, at(Duration::ZERO));
        assert_eq!(reason, BuriedReason::InvalidHeaders);
        assert!(detail.starts_with(says), "{detail}");
        assert_eq!(error, "no");
    }
}

#[test]
fn a_timestamp_of_0_is_none() {
    let rules = rules(RetryPolicy::new([1]).max_age(seconds(60.0)));
    let lives = BasicProperties::default().with_timestamp(0).with_expiration("60000".into());
    let fresh = job(lives);
    assert!(matches!(rules.on_arrival(&fresh, at(Duration::ZERO)), Arrival::Run));
    let failed = Verdict::from_result(Err(anyhow::anyhow!("no")), &[]);
    let to = rules.after_attempt(&fresh, failed, at(Duration::ZERO), "host:1").unwrap();
    assert!(matches!(to.to, To::Level { .. }), "{to:?}");
    assert_eq!(to.story.deadline, Some(at(seconds(60.0))), "from its first failure");
}
