//! The level array: what can be written in it, and the one that a formula makes.

use std::time::Duration;

use serde::Deserialize;

use super::{Jitter, RetryPolicy};

/// 10 years of 365 days: the longest expiration and queue TTL that RabbitMQ takes.
pub(crate) const MAX_DELAY_MS: u64 = 315_360_000_000;

/// More steps than this before the maximum is reached could never get queues of their own.
const MAX_STEPS: u32 = 10_000;

/// Anything that names a level's delay: whole seconds, a `Duration`, or text such as `"1m 30s"`.
#[diagnostic::on_unimplemented(
    message = "a level is whole seconds as u64, a Duration, or text such as \"500ms\""
)]
pub trait IntoLevel {
    /// The delay, or why the value names none.
    ///
    /// # Errors
    /// A text that is no duration.
    fn into_level(self) -> Result<Duration, String>;
}

impl IntoLevel for u64 {
    fn into_level(self) -> Result<Duration, String> {
        Ok(Duration::from_secs(self))
    }
}

impl IntoLevel for Duration {
    fn into_level(self) -> Result<Duration, String> {
        Ok(self)
    }
}

impl IntoLevel for &str {
    fn into_level(self) -> Result<Duration, String> {
        humantime::parse_duration(self)
            .map_err(|e| format!("{self:?} is no duration ({e}); write it like \"15s\" or \"2m\""))
    }
}

impl IntoLevel for String {
    fn into_level(self) -> Result<Duration, String> {
        self.as_str().into_level()
    }
}

impl<L: IntoLevel + Copy> IntoLevel for &L {
    fn into_level(self) -> Result<Duration, String> {
        (*self).into_level()
    }
}

/// Whole milliseconds, saturating.
pub(super) fn to_ms(delay: Duration) -> u64 {
    u64::try_from(delay.as_millis()).unwrap_or(u64::MAX)
}

/// A delay as people write it: `30s`, `16m`, `1m 30s`, `1s 500ms`.
pub(crate) fn label(ms: u64) -> humantime::FormattedDuration {
    humantime::format_duration(Duration::from_millis(ms))
}

pub(super) fn exponential_runs(
    policy: &mut RetryPolicy,
    initial: Duration,
    multiplier: f64,
    max: Duration,
    attempts: u32,
) {
    let max = to_ms(max);
    let mut exact = to_ms(initial) as f64;
    for done in 0..attempts {
        // `as` saturates, so an infinite product is the maximum.
        let ms = (exact as u64).min(max);
        if ms == max || ms == 0 || multiplier == 1.0 {
            // It stays here, however many attempts are left.
            policy.push(ms, attempts - done);
            return;
        }
        if done == MAX_STEPS {
            policy.refuse(format!(
                "multiplier: {multiplier} is so near to 1 that {MAX_STEPS} levels do not reach \
                 the maximum; use a larger multiplier or fewer attempts"
            ));
            return;
        }
        policy.push(ms, 1);
        exact *= multiplier;
    }
}

/// A duration as a configuration file writes it: whole seconds, or text.
pub(crate) fn duration<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    LevelField::deserialize(from)?.into_level().map_err(serde::de::Error::custom)
}

/// A policy as a configuration file writes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PolicyFields {
    levels: Option<Vec<LevelField>>,
    /// In place of the levels.
    exponential: Option<Exponential>,
    #[serde(default)]
    jitter: Jitter,
    lanes: Option<u32>,
    max_age: Option<LevelField>,
}

/// The arguments of [`RetryPolicy::exponential`].
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Exponential {
    initial: LevelField,
    multiplier: f64,
    max: LevelField,
    attempts: u32,
}

impl TryFrom<Exponential> for RetryPolicy {
    type Error = crate::Error;

    fn try_from(fields: Exponential) -> Result<Self, Self::Error> {
        let delay = |field: LevelField, name| {
            let delay = field.into_level();
            delay.map_err(|why| crate::Error::configuration(format!("exponential.{name}: {why}")))
        };
        Ok(RetryPolicy::exponential(
            delay(fields.initial, "initial")?,
            fields.multiplier,
            delay(fields.max, "max")?,
            fields.attempts,
        ))
    }
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "whole seconds such as 15, or text such as \"1m 30s\"")]
enum LevelField {
    Seconds(u64),
    Text(String),
}

impl IntoLevel for LevelField {
    fn into_level(self) -> Result<Duration, String> {
        match self {
            Self::Seconds(seconds) => seconds.into_level(),
            Self::Text(text) => text.into_level(),
        }
    }
}

impl TryFrom<PolicyFields> for RetryPolicy {
    type Error = crate::Error;

    fn try_from(fields: PolicyFields) -> Result<Self, Self::Error> {
        let policy = match (fields.levels, fields.exponential) {
            (Some(levels), None) => RetryPolicy::new(levels),
            (None, Some(exponential)) => exponential.try_into()?,
            (Some(_), Some(_)) => {
                return Err(crate::Error::configuration(
                    "exponential: it makes the levels, so drop either it or `levels`",
                ));
            }
            (None, None) => {
                return Err(crate::Error::configuration(
                    "levels: missing; name the delays, such as [15, 30, 60], or give `exponential`",
                ));
            }
        };
        let mut policy = policy.jitter(fields.jitter);
        if let Some(lanes) = fields.lanes {
            policy = policy.lanes(lanes);
        }
        if let Some(age) = fields.max_age {
            let age = age.into_level();
            policy = policy.max_age(
                age.map_err(|why| crate::Error::configuration(format!("max_age: {why}")))?,
            );
        }
        policy.validate()?;
        Ok(policy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn exponential_levels_double_up_to_the_maximum() {
        let policy =
            RetryPolicy::exponential(Duration::from_secs(2), 2.0, Duration::from_secs(30), 6);
        let levels: Vec<_> = (1..=7).map(|n| policy.level(n).map(|d| d.as_secs())).collect();
        assert_eq!(levels, [Some(2), Some(4), Some(8), Some(16), Some(30), Some(30), None]);
    }

    #[test]
    fn multiplier_and_attempts_of_any_size_saturate_at_the_maximum() {
        let (second, max) = (Duration::from_secs(1), Duration::from_secs(60));
        for multiplier in [2.0, 1e300, f64::MAX, f64::INFINITY] {
            let policy = RetryPolicy::exponential(second, multiplier, max, u32::MAX);
            policy.validate().unwrap();
            assert_eq!(policy.retries(), u32::MAX);
            assert_eq!(policy.level(1), Some(second));
            assert_eq!(policy.level(u32::MAX), Some(max));
        }
        let flat = RetryPolicy::exponential(second, 1.0, max, u32::MAX);
        assert_eq!(flat.level(u32::MAX), Some(second));
        assert_eq!(flat.distinct_levels_ms(), [1000]);
    }

    #[test]
    fn a_policy_is_read_from_toml() {
        let policy: RetryPolicy = toml::from_str(
            "levels = [15, \"1m 30s\"]\njitter = { proportional = 0.25 }\nlanes = 4",
        )
        .unwrap();
        let same = RetryPolicy::new(["15s", "90s"]).jitter(Jitter::Proportional(0.25)).lanes(4);
        assert_eq!(policy, same);
        let equal: RetryPolicy = toml::from_str("levels = [15]\njitter = \"equal\"").unwrap();
        assert_eq!(equal, RetryPolicy::new([15]));
        let growing: RetryPolicy = toml::from_str(
            "exponential = { initial = \"500ms\", multiplier = 2, max = 30, attempts = 9 }",
        )
        .unwrap();
        let levels = ["500ms", "1s", "2s", "4s", "8s", "16s", "30s", "30s", "30s"];
        assert_eq!(growing, RetryPolicy::new(levels));
    }

    #[test]
    fn unknown_keys_and_impossible_values_in_toml_are_errors() {
        for (text, says) in [
            ("levels = [1]\nlane = 2", "lane"),
            ("levels = [0]", "levels[0]"),
            ("levels = []", "levels"),
            ("levels = [1.5]", "whole seconds"),
            ("levels = [\"soon\"]", "levels[0]"),
            ("levels = [1]\njitter = { proportional = 2.0 }", "jitter"),
            ("lanes = 2", "levels: missing"),
            (
                "levels = [1]\nexponential = { initial = 1, multiplier = 2, max = 9, attempts = 3 }",
                "drop either it or `levels`",
            ),
            ("exponential = { initial = 1, multiplier = 2, max = 9 }", "attempts"),
            (
                "exponential = { initial = 1, multiplier = 0.5, max = 9, attempts = 3 }",
                "multiplier",
            ),
            (
                "exponential = { initial = 1, multiplier = 2, max = \"soon\", attempts = 3 }",
                "exponential.max",
            ),
            ("exponential = { initial = 0, multiplier = 2, max = 9, attempts = 3 }", "levels[0]"),
            ("exponential = { initial = 1, multiplier = 2, max = 9, attempts = 0 }", "levels"),
        ] {
            let error = toml::from_str::<RetryPolicy>(text).expect_err(text).to_string();
            assert!(error.contains(says), "{error} should say {says}");
        }
    }

    proptest! {
        #[test]
        fn exponential_never_shrinks_and_never_passes_the_maximum(
            initial in 0u64..10_000, multiplier in 1.0f64..1e9, max in 0u64..10_000_000,
            attempts in 0u32..300,
        ) {
            let policy = RetryPolicy::exponential(
                Duration::from_millis(initial), multiplier, Duration::from_millis(max), attempts,
            );
            prop_assert_eq!(policy.retries(), attempts);
            let levels: Vec<u64> = (1..=attempts).map(|n| policy.level_ms(n).unwrap()).collect();
            prop_assert!(levels.is_sorted());
            prop_assert!(levels.iter().all(|&ms| ms <= max));
            prop_assert_eq!(policy.level_ms(attempts.saturating_add(1)), None);
        }

        #[test]
        fn any_arguments_are_survived(
            initial: u64, multiplier: f64, max: u64, attempts: u32,
        ) {
            let policy = RetryPolicy::exponential(
                Duration::from_millis(initial), multiplier, Duration::from_millis(max), attempts,
            );
            let _ = policy.validate();
            let _ = policy.level(attempts);
        }
    }
}
