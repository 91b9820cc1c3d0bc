//! How often a job is tried again, and after how long. Pure: no channel, no clock.

mod busy;
mod crash;
mod jitter;
mod level;
mod outcome;
mod panicked;
mod select;
mod text;

use std::{fmt, time::Duration};

use serde::Deserialize;

pub(crate) use self::{
    busy::{busy_delays, busy_window_ms},
    crash::{Interrupted, Suspects, Suspicion},
    jitter::{Window, lane_delays},
    level::{MAX_DELAY_MS, duration, label},
    outcome::{Classifier, Verdict},
    panicked::caught,
};
pub use self::{
    jitter::Jitter,
    level::IntoLevel,
    outcome::{
        FailureKind, Marked, Outcome, OutcomeExt, TimedOut, busy, outage, reject, retry_after,
        undecodable,
    },
    panicked::Panicked,
    select::{Policies, Select},
};
use crate::Error;

/// The most queues that one work queue may get: lanes and the buried queue together.
pub(crate) const MAX_QUEUES: usize = 200;

/// The levels a failed job goes through, and how far each is spread.
///
/// | setting | default |
/// |---|---|
/// | levels | `[15, 30, 60, 120, 240, 480, 960]` seconds |
/// | [`jitter`](Self::jitter) | [`Jitter::Equal`]: a level `d` means `d/2..d` |
/// | [`lanes`](Self::lanes) | 8 queues a level |
///
/// The first failure of a job sends it to level 1, the second to level 2; the failure after the
/// last level buries it. Nothing is checked while a policy is made: an impossible one is refused,
/// with the field's name, before anything is consumed, or earlier by [`validate`](Self::validate).
///
/// ```
/// use std::time::Duration;
/// use lapin_retry::{Jitter, RetryPolicy};
///
/// let seconds = RetryPolicy::new([15, 30, 60]);
/// let text = RetryPolicy::new(["15s", "30s", "1m"]);
/// let durations = RetryPolicy::new([Duration::from_secs(15), Duration::from_secs(30)]);
/// assert_eq!(seconds, text);
///
/// let growing = RetryPolicy::exponential(Duration::from_secs(2), 2.0, Duration::from_secs(120), 8)
///     .jitter(Jitter::Proportional(0.2))
///     .lanes(6);
/// assert_eq!(growing.retries(), 8);
/// assert_eq!(growing.level(3), Some(Duration::from_secs(8)));
/// assert_eq!(growing.level(8), Some(Duration::from_secs(120)));
/// # growing.validate().unwrap();
/// ```
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "level::PolicyFields")]
pub struct RetryPolicy {
    /// Neighbouring levels of equal length are one run, so that any number of attempts is small.
    runs: Vec<Run>,
    jitter: Jitter,
    lanes: u32,
    max_age: Option<Duration>,
    /// The first thing that could not be understood; [`Self::validate`] reports it.
    invalid: Option<String>,
}

/// `times` levels of `ms` milliseconds in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    ms: u64,
    times: u32,
}

/// What is to be done with a job, as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    Done,
    /// Charge it, and try it again at this level, counted from 1.
    Retry(u32),
    /// Charge it, and try it again no sooner than this; it is on this level now.
    RetryAfter(u32, Duration),
    /// Charge nothing, and try it again at a random time.
    Busy,
    /// Charge nothing: back to the tail of its queue, and the consumer pauses.
    Return,
    Bury(BuriedReason),
}

/// Why a job was buried; the header `buried-reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BuriedReason {
    /// It failed once more after the last level.
    Exhausted,
    /// The handler said that trying again is of no use.
    Rejected,
    /// Its body could not be decoded.
    Undecodable,
    /// Its next delay would have ended after its deadline or age limit, or it arrived past it; or its
    /// handler asked for a wait of more than 10 years or 10,000 hops.
    Expired,
    /// Its worker's process died again and again while this job ran, and nothing else did.
    CrashLoop,
    /// One of our headers on it makes no sense. `buried-detail` names it, and the odd value is kept.
    InvalidHeaders,
    /// Its headers leave no room for ours in one AMQP frame.
    TooLarge,
}

impl BuriedReason {
    /// The text in the header `buried-reason`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Exhausted => "exhausted",
            Self::Rejected => "rejected",
            Self::Undecodable => "undecodable",
            Self::Expired => "expired",
            Self::CrashLoop => "crash-loop",
            Self::InvalidHeaders => "invalid-headers",
            Self::TooLarge => "too-large",
        }
    }
}

impl fmt::Display for BuriedReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self::new([15, 30, 60, 120, 240, 480, 960])
    }
}

impl RetryPolicy {
    /// A policy of these levels: whole seconds, text such as `"1m 30s"`, or `Duration`s.
    /// Delays are kept in whole milliseconds; a fraction of one is cut off.
    pub fn new<L: IntoLevel>(levels: impl IntoIterator<Item = L>) -> Self {
        let mut policy = Self::empty();
        for (index, level) in levels.into_iter().enumerate() {
            match level.into_level() {
                Ok(delay) => policy.push(level::to_ms(delay), 1),
                Err(why) => policy.refuse(format!("levels[{index}]: {why}")),
            }
        }
        policy
    }

    /// `attempts` levels, the first of `initial`, each `multiplier` times the one before, none
    /// longer than `max`: level n is `min(max, initial * multiplier^(n - 1))`.
    ///
    /// Multiplier and attempts may be of any size, the levels end at `max`; a multiplier below 1
    /// is refused.
    pub fn exponential(initial: Duration, multiplier: f64, max: Duration, attempts: u32) -> Self {
        let mut policy = Self::empty();
        if multiplier.is_nan() || multiplier < 1.0 {
            policy.refuse(format!("multiplier: {multiplier} makes delays shrink; use 1 or more"));
            return policy;
        }
        level::exponential_runs(&mut policy, initial, multiplier, max, attempts);
        policy
    }

    /// How a level's delay is spread. Default: [`Jitter::Equal`].
    #[must_use]
    pub fn jitter(mut self, jitter: Jitter) -> Self {
        self.jitter = jitter;
        self
    }

    /// Into how many lanes (delay queues) a level's window is cut. Default: 8.
    ///
    /// A herd of jobs that fail together comes back in that many groups. A level without jitter
    /// has one lane whatever this says; more than 200 queues for one work queue are refused.
    #[must_use]
    pub fn lanes(mut self, lanes: u32) -> Self {
        self.lanes = lanes;
        self
    }

    /// How old a job may get before it is given up. Default: no limit.
    ///
    /// The age counts from the message's `timestamp` property if it has one that is neither in the
    /// future nor 0, else from its first failure. A job whose next delay would end after this age is
    /// buried as `expired` at once; one that arrives past it is buried without a run.
    #[must_use]
    pub fn max_age(mut self, age: Duration) -> Self {
        self.max_age = Some(age);
        self
    }

    /// How many times a job is tried again before it is buried: the number of levels.
    pub fn retries(&self) -> u32 {
        self.runs.iter().fold(0, |sum, run| sum.saturating_add(run.times))
    }

    /// The nominal delay of level `number`, counted from 1.
    pub fn level(&self, number: u32) -> Option<Duration> {
        self.level_ms(number).map(Duration::from_millis)
    }

    /// Checks what can be checked without a queue's name.
    ///
    /// # Errors
    /// [`ErrorKind::Configuration`](crate::ErrorKind::Configuration), naming the field: an empty
    /// level array, a level of zero or over 10 years, text that is no duration, no lanes, a jitter
    /// factor outside `0..=1`, a multiplier below 1, a maximum age of zero.
    pub fn validate(&self) -> Result<(), Error> {
        if let Some(invalid) = &self.invalid {
            return Err(Error::configuration(invalid));
        }
        if self.runs.is_empty() {
            return Err(Error::configuration(
                "levels: the array is empty, so a failed job could not be retried; \
                 name at least one delay, such as [15, 30, 60]",
            ));
        }
        let mut index: u32 = 0;
        for run in &self.runs {
            if run.ms == 0 {
                return Err(Error::configuration(format!(
                    "levels[{index}]: a delay of zero; use 1 ms or more"
                )));
            }
            if run.ms > MAX_DELAY_MS {
                return Err(Error::configuration(format!(
                    "levels[{index}]: {} is longer than 10 years, which is the most that \
                     RabbitMQ takes",
                    label(run.ms)
                )));
            }
            index = index.saturating_add(run.times);
        }
        if self.lanes == 0 {
            return Err(Error::configuration(
                "lanes: 0; a level needs at least one lane (the default is 8)",
            ));
        }
        if self.max_age == Some(Duration::ZERO) {
            return Err(Error::configuration("max_age: zero; every job would be too old"));
        }
        self.jitter.validate()
    }

    /// The levels' distinct delays, in the order of their first use.
    pub(crate) fn distinct_levels_ms(&self) -> Vec<u64> {
        let mut distinct = Vec::new();
        for run in &self.runs {
            if !distinct.contains(&run.ms) {
                distinct.push(run.ms);
            }
        }
        distinct
    }

    pub(crate) fn level_ms(&self, number: u32) -> Option<u64> {
        let mut left = number.checked_sub(1)?;
        for run in &self.runs {
            match left.checked_sub(run.times) {
                None => return Some(run.ms),
                Some(rest) => left = rest,
            }
        }
        None
    }

    pub(crate) fn age_limit(&self) -> Option<Duration> {
        self.max_age
    }

    pub(crate) fn lane_count(&self) -> u32 {
        self.lanes
    }

    pub(crate) fn window(&self, level_ms: u64) -> Window {
        self.jitter.window(level_ms)
    }

    /// `2/7 30s`: the level's number, how many there are, and its delay. `0/7` is the first attempt.
    pub(crate) fn level_label(&self, number: u32) -> String {
        let of = self.retries();
        match self.level_ms(number) {
            Some(ms) => format!("{number}/{of} {}", label(ms)),
            None => format!("{number}/{of}"),
        }
    }

    /// What becomes of a job with `charged` failures before this one, and `busy` times busy in a
    /// row.
    pub(crate) fn decide(&self, charged: u32, busy: u32, verdict: &Verdict) -> Decision {
        let Verdict::Failed { outcome, .. } = verdict else { return Decision::Done };
        let number = charged.saturating_add(1);
        // A policy may have been shortened since this job failed last.
        let levels_are_left = charged < self.retries();
        match outcome {
            Outcome::Reject => Decision::Bury(BuriedReason::Rejected),
            Outcome::Undecodable => Decision::Bury(BuriedReason::Undecodable),
            Outcome::Outage => Decision::Return,
            Outcome::Busy if busy < busy::CEILING => Decision::Busy,
            Outcome::RetryAfter(delay) if levels_are_left => Decision::RetryAfter(number, *delay),
            _ if levels_are_left => Decision::Retry(number),
            _ => Decision::Bury(BuriedReason::Exhausted),
        }
    }

    fn empty() -> Self {
        Self { runs: Vec::new(), jitter: Jitter::default(), lanes: 8, max_age: None, invalid: None }
    }

    fn push(&mut self, ms: u64, times: u32) {
        match self.runs.last_mut() {
            Some(last) if last.ms == ms => last.times = last.times.saturating_add(times),
            _ => self.runs.push(Run { ms, times }),
        }
    }

    fn refuse(&mut self, why: String) {
        self.invalid.get_or_insert(why);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed() -> Verdict {
        verdict(anyhow::anyhow!("no"))
    }

    fn verdict(error: impl Into<anyhow::Error>) -> Verdict {
        Verdict::from_result(Err(error.into()), &[])
    }

    #[test]
    fn levels_from_seconds_text_and_durations_are_equal() {
        let seconds = RetryPolicy::new([15, 120]);
        assert_eq!(seconds, RetryPolicy::new(["15s", "2m"]));
        assert_eq!(
            seconds,
            RetryPolicy::new([Duration::from_secs(15), Duration::from_secs(120)].as_slice())
        );
    }

    #[test]
    fn level_one_follows_the_first_failure_and_the_last_is_followed_by_burial() {
        let policy = RetryPolicy::new([1, 2]);
        assert_eq!(policy.decide(0, 0, &failed()), Decision::Retry(1));
        assert_eq!(policy.decide(1, 0, &failed()), Decision::Retry(2));
        assert_eq!(policy.decide(2, 0, &failed()), Decision::Bury(BuriedReason::Exhausted));
        assert_eq!(policy.decide(u32::MAX, 0, &failed()), Decision::Bury(BuriedReason::Exhausted));
    }

    #[test]
    fn each_outcome_has_its_decision() {
        let policy = RetryPolicy::new([1, 2]);
        let nine = Duration::from_secs(9);
        let no = || anyhow::anyhow!("no");
        for (error, first, last) in [
            (reject(no()), Decision::Bury(BuriedReason::Rejected), None),
            (undecodable(no()), Decision::Bury(BuriedReason::Undecodable), None),
            (outage(no()), Decision::Return, None),
            (busy(no()), Decision::Busy, None),
            (
                retry_after(no(), nine),
                Decision::RetryAfter(1, nine),
                Some(Decision::Bury(BuriedReason::Exhausted)),
            ),
        ] {
            let verdict = verdict(error);
            assert_eq!(policy.decide(0, 0, &verdict), first);
            assert_eq!(policy.decide(2, 0, &verdict), last.unwrap_or(first));
        }
    }

    #[test]
    fn a_job_that_is_busy_for_ever_is_charged_one_failure_each_hundred() {
        let policy = RetryPolicy::new([1, 2]);
        let busy = verdict(busy(anyhow::anyhow!("taken")));
        assert_eq!(policy.decide(0, 99, &busy), Decision::Busy);
        assert_eq!(policy.decide(0, 100, &busy), Decision::Retry(1));
        assert_eq!(policy.decide(0, u32::MAX, &busy), Decision::Retry(1));
        assert_eq!(policy.decide(2, 100, &busy), Decision::Bury(BuriedReason::Exhausted));
    }

    #[test]
    fn impossible_policies_are_refused_with_the_name_of_the_field() {
        let ten_years = Duration::from_millis(MAX_DELAY_MS);
        for (policy, field) in [
            (RetryPolicy::new([0u64; 0]), "levels: the array is empty"),
            (RetryPolicy::new([1, 0]), "levels[1]: a delay of zero; use 1 ms or more"),
            (RetryPolicy::new([Duration::from_micros(999)]), "levels[0]"),
            (RetryPolicy::new([ten_years + Duration::from_millis(1)]), "levels[0]"),
            (RetryPolicy::new([Duration::MAX]), "levels[0]"),
            (RetryPolicy::new(["1s", "soon"]), "levels[1]"),
            (RetryPolicy::new([1]).lanes(0), "lanes: 0; a level needs at least one"),
            (RetryPolicy::new([1]).max_age(Duration::ZERO), "max_age: zero; every job would be"),
            (RetryPolicy::new([1]).jitter(Jitter::Proportional(1.5)), "jitter"),
            (RetryPolicy::new([1]).jitter(Jitter::Proportional(-0.1)), "jitter"),
            (RetryPolicy::new([1]).jitter(Jitter::Proportional(f64::NAN)), "jitter"),
            (RetryPolicy::exponential(Duration::from_secs(1), 0.5, ten_years, 3), "multiplier"),
            (
                RetryPolicy::exponential(Duration::from_secs(1), f64::NAN, ten_years, 3),
                "multiplier",
            ),
            (RetryPolicy::exponential(Duration::ZERO, 2.0, ten_years, 3), "levels[0]"),
        ] {
            let error = policy.validate().expect_err(field);
            assert_eq!(error.kind(), crate::ErrorKind::Configuration);
            assert!(error.to_string().starts_with(field), "{error} should name {field}");
        }
        RetryPolicy::new([ten_years]).validate().unwrap();
    }

    #[test]
    fn labels_read_like_the_schedule() {
        let policy = RetryPolicy::default();
        assert_eq!(policy.level_label(0), "0/7");
        assert_eq!(policy.level_label(2), "2/7 30s");
        assert_eq!(policy.level_label(7), "7/7 16m");
    }
}
