use super::*;
use proptest::prelude::*;

const SECOND: Duration = Duration::from_secs(1);

fn pacing(settings: Pauses) -> (Pacing, Instant) {
    let now = Instant::now();
    (Pacing::new(settings, now), now)
}

/// Ends the wait, and tries one job.
fn probe(pacing: &mut Pacing) -> Instant {
    let Pace::Paused { until: Some(until) } = pacing.pace() else { panic!("not paused") };
    let soon = until - Duration::from_nanos(1);
    assert_eq!(pacing.probe(soon), None, "not before the wait is over");
    assert_eq!(pacing.probe(until), Some(pacing.epoch));
    until
}

#[test]
fn waits_double_from_5_s_to_5_min_while_each_probe_fails() {
    let (mut pacing, mut now) = pacing(Pauses::default());
    let mut waits = Vec::new();
    for _ in 0..9 {
        waits.push(pacing.outage(pacing.epoch(), now).unwrap().as_secs());
        now = probe(&mut pacing);
    }
    assert_eq!(waits, [5, 10, 20, 40, 80, 160, 300, 300, 300]);
}

#[test]
fn ten_minutes_of_outage_cost_at_most_ten_probes() {
    let (mut pacing, start) = pacing(Pauses::default());
    let (mut now, mut probes) = (start, 0);
    while now < start + 600 * SECOND {
        pacing.outage(pacing.epoch(), now).unwrap();
        now = probe(&mut pacing);
        probes += 1;
    }
    assert!(probes <= 10, "{probes}");
}

#[test]
fn those_who_were_running_when_a_pause_began_lengthen_nothing() {
    let (mut pacing, now) = pacing(Pauses::default());
    let started = pacing.epoch();
    assert_eq!(pacing.outage(started, now), Some(5 * SECOND));
    for _ in 0..100 {
        assert_eq!(pacing.outage(started, now), None);
        assert!(!pacing.through(started, now), "an old success is no news");
    }
    probe(&mut pacing);
    assert!(!pacing.through(started, now));
    assert!(pacing.through(pacing.epoch(), now));
    assert_eq!(pacing.outage(started, now + SECOND), None);
}

#[test]
fn the_wait_returns_to_the_first_after_one_first_wait_without_outage_and_not_sooner() {
    let (mut pacing, now) = pacing(Pauses::default());
    pacing.outage(pacing.epoch(), now);
    let now = probe(&mut pacing);
    pacing.through(pacing.epoch(), now);
    let soon = now + 5 * SECOND - Duration::from_millis(1);
    assert_eq!(pacing.outage(pacing.epoch(), soon), Some(10 * SECOND));
    let now = probe(&mut pacing);
    pacing.through(pacing.epoch(), now);
    assert_eq!(pacing.outage(pacing.epoch(), now + 5 * SECOND), Some(5 * SECOND));
    probe(&mut pacing);
}

#[test]
fn with_one_of_five_providers_down_the_waits_grow() {
    // Four of five probes get through, and the next bad job is never far.
    let (mut pacing, mut now) = pacing(Pauses::default());
    let mut waits = Vec::new();
    for _ in 0..8 {
        waits.push(pacing.outage(pacing.epoch(), now).unwrap().as_secs());
        now = probe(&mut pacing);
        pacing.through(pacing.epoch(), now);
        now += SECOND;
    }
    assert_eq!(waits, [5, 10, 20, 40, 80, 160, 300, 300]);
}

#[test]
fn resume_clears_at_once_and_the_next_wait_is_the_first() {
    let (mut pacing, now) = pacing(Pauses::default());
    pacing.outage(pacing.epoch(), now);
    let now = probe(&mut pacing);
    pacing.outage(pacing.epoch(), now);
    assert!(pacing.resume(now));
    assert!(matches!(pacing.pace(), Pace::Open { .. }));
    assert_eq!(pacing.outage(pacing.epoch(), now), Some(5 * SECOND));
    assert_eq!(pacing.probe(now), None);
}

#[test]
fn a_new_configuration_clears_and_its_first_wait_is_the_next_not_a_stale_one() {
    let (mut pacing, now) = pacing(Pauses::default());
    pacing.outage(pacing.epoch(), now);
    let now = probe(&mut pacing);
    pacing.outage(pacing.epoch(), now);
    assert!(pacing.reconfigure(Pauses::default().first(2 * SECOND), now));
    assert_eq!(pacing.outage(pacing.epoch(), now), Some(2 * SECOND));
    let now = probe(&mut pacing);
    assert_eq!(pacing.outage(pacing.epoch(), now), Some(4 * SECOND));
}

#[test]
fn hand_offs_that_are_stuck_are_tried_at_the_same_steps_and_then_one_job_is() {
    let (mut pacing, now) = pacing(Pauses::default());
    pacing.get_stuck();
    let (first, told) = pacing.still_stuck(now);
    assert_eq!((first, told), (now + 5 * SECOND, Some(5 * SECOND)));
    pacing.get_stuck();
    assert_eq!(pacing.still_stuck(now + SECOND), (first, None));
    assert_eq!(pacing.start(None), None);
    assert_eq!(pacing.probe(first), None, "no job is taken while one is stuck");
    assert_eq!(pacing.still_stuck(first), (first + 10 * SECOND, Some(10 * SECOND)));
    assert_eq!(pacing.still_stuck(first), (first + 10 * SECOND, None));
    let now = first + 10 * SECOND;
    pacing.get_unstuck(now);
    assert_eq!(pacing.probe(now), None);
    pacing.get_unstuck(now);
    let probe = pacing.probe(now).unwrap();
    assert!(pacing.through(probe, now));
}

#[test]
fn while_a_job_is_owed_its_hand_off_jobs_are_taken_one_at_a_time() {
    let (mut pacing, now) = pacing(Pauses::default());
    pacing.get_stuck();
    let (until, _) = pacing.still_stuck(now);
    pacing.owe(true, now);
    pacing.get_unstuck(now);
    assert_eq!(pacing.probe(now), None, "not before the step");
    for _ in 0..3 {
        let probe = pacing.probe(until).unwrap();
        assert!(!pacing.through(probe, until), "another job proves nothing");
    }
    pacing.owe(false, until);
    let probe = pacing.probe(until).unwrap();
    assert!(pacing.through(probe, until));
}

#[test]
fn a_pause_by_hand_outranks_hand_offs_that_are_stuck() {
    let (mut pacing, now) = pacing(Pauses::default());
    pacing.get_stuck();
    pacing.still_stuck(now);
    pacing.hold();
    assert_eq!(pacing.still_stuck(now), (now + 5 * SECOND, None));
    assert_eq!(pacing.pace(), Pace::Paused { until: None });
    pacing.resume(now);
    assert_eq!(pacing.still_stuck(now).1, Some(5 * SECOND), "and a resume does not help");
}

#[test]
fn a_minimum_above_the_first_wait_floors_it() {
    let settings = Pauses::default().first(SECOND).minimum(3 * SECOND);
    let (mut pacing, mut now) = pacing(settings);
    let mut waits = Vec::new();
    for _ in 0..5 {
        waits.push(pacing.outage(pacing.epoch(), now).unwrap().as_secs());
        now = probe(&mut pacing);
    }
    assert_eq!(waits, [3, 3, 4, 8, 16]);
}

#[test]
fn a_lost_probe_is_followed_by_another_at_once() {
    let (mut pacing, now) = pacing(Pauses::default());
    pacing.outage(pacing.epoch(), now);
    let now = probe(&mut pacing);
    let first = pacing.epoch();
    assert!(pacing.probe_lost(first, now));
    let second = pacing.probe(now).unwrap();
    assert!(!pacing.probe_lost(first, now), "it has lost its say");
    assert_eq!(pacing.outage(first, now), None);
    assert!(pacing.through(second, now));
}

#[test]
fn in_a_pause_no_handler_starts_but_that_of_the_probe() {
    let (mut pacing, now) = pacing(Pauses::default());
    let open = pacing.start(None).unwrap();
    pacing.outage(open, now);
    assert_eq!(pacing.start(None), None);
    assert_eq!(pacing.start(Some(open)), None);
    probe(&mut pacing);
    let right = pacing.epoch();
    assert_eq!(pacing.start(None), None);
    assert_eq!(pacing.start(Some(open)), None);
    assert_eq!(pacing.start(Some(right)), Some(right));
    pacing.hold();
    assert_eq!(pacing.start(Some(right)), None);
    pacing.resume(now);
    assert!(pacing.start(None).is_some() && pacing.start(Some(right)).is_some());
}

#[test]
fn who_was_tried_before_a_resume_pauses_nothing_after() {
    let (mut pacing, now) = pacing(Pauses::default());
    pacing.outage(pacing.epoch(), now);
    probe(&mut pacing);
    let tried = pacing.epoch();
    pacing.resume(now);
    assert_eq!(pacing.outage(tried, now), None);
    assert!(pacing.outage(pacing.epoch(), now).is_some());
}

#[test]
fn the_time_until_jobs_come_in_again_is_not_time_without_outage() {
    let (mut pacing, now) = pacing(Pauses::default());
    pacing.outage(pacing.epoch(), now);
    let now = probe(&mut pacing);
    pacing.through(pacing.epoch(), now);
    // The broker took a minute to take the consumer back.
    let now = now + 60 * SECOND;
    pacing.consuming(now);
    assert_eq!(pacing.outage(pacing.epoch(), now + SECOND), Some(10 * SECOND));
}

#[test]
fn a_pause_by_hand_lasts_until_it_is_resumed() {
    let (mut pacing, now) = pacing(Pauses::default());
    assert!(pacing.hold());
    assert!(!pacing.hold(), "no news");
    assert_eq!(pacing.probe(now + 1_000_000 * SECOND), None);
    assert!(pacing.resume(now));
}

#[test]
fn impossible_pauses_are_refused_with_the_name_of_the_field() {
    for (settings, field) in [
        (Pauses::default().first(Duration::ZERO), "pause.first"),
        (Pauses::default().max(SECOND), "pause.max"),
        (Pauses::default().minimum(600 * SECOND), "pause.max"),
    ] {
        let error = settings.validate().unwrap_err().to_string();
        assert!(error.starts_with(field), "{error}");
    }
}

proptest! {
    #[test]
    fn no_wait_is_longer_than_the_maximum_or_shorter_than_the_minimum(
        first in 1u64..1 << 40, max in 1u64..1 << 40, minimum in 0u64..1 << 40,
        steps in 0usize..200,
    ) {
        let ms = Duration::from_millis;
        let settings = Pauses::default().first(ms(first)).max(ms(max)).minimum(ms(minimum));
        prop_assume!(settings.validate().is_ok());
        let mut pacing = Pacing::new(settings, Instant::now());
        for _ in 0..steps {
            let wait = pacing.outage(pacing.epoch(), Instant::now()).unwrap();
            prop_assert!(wait >= ms(minimum) && wait <= ms(max));
            pacing.pace = Pace::Probing;
        }
    }
}
