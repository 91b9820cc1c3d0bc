//! The one place that makes queue names, and its inverse beside it.
//!
//! A name holds everything that the queue's arguments depend on (but its type), so that another
//! policy makes other queues instead of meeting these with other arguments. Names sort in the
//! management UI in the order of delay, and are read from the right, since a work queue may be
//! called anything.

use std::fmt;

use crate::Error;

const RETRY: &str = ".retry.";
const BURIED: &str = ".buried";
const BUSY: &str = "busy";
const HOLD: &str = "hold";
const LONGEST: usize = 255;

/// A queue of ours, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Name<'a> {
    pub(crate) work_queue: &'a str,
    pub(crate) kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `orders.retry.00015s.00008437ms`; without jitter `orders.retry.00015s`.
    Lane { level_ms: u64, jittered_ms: Option<u64> },
    /// `orders.retry.busy.00002250ms`, one of the ladder for busy jobs.
    Busy { delay_ms: u64 },
    /// `orders.retry.hold.00600000ms`, for waits longer than the longest lane.
    Hold { delay_ms: u64 },
    /// `orders.buried`
    Buried,
}

impl<'a> Name<'a> {
    /// `jittered_ms` is the lane's delay, or none where the level has no jitter.
    pub(crate) fn lane(work_queue: &'a str, level_ms: u64, jittered_ms: Option<u64>) -> Self {
        Self { work_queue, kind: Kind::Lane { level_ms, jittered_ms } }
    }

    pub(crate) fn busy(work_queue: &'a str, delay_ms: u64) -> Self {
        Self { work_queue, kind: Kind::Busy { delay_ms } }
    }

    pub(crate) fn hold(work_queue: &'a str, delay_ms: u64) -> Self {
        Self { work_queue, kind: Kind::Hold { delay_ms } }
    }

    /// How long a message stays in it; for ever in the buried queue.
    pub(crate) fn delay_ms(&self) -> Option<u64> {
        match self.kind {
            Kind::Lane { level_ms, jittered_ms } => Some(jittered_ms.unwrap_or(level_ms)),
            Kind::Busy { delay_ms } | Kind::Hold { delay_ms } => Some(delay_ms),
            Kind::Buried => None,
        }
    }

    pub(crate) fn buried(work_queue: &'a str) -> Self {
        Self { work_queue, kind: Kind::Buried }
    }

    /// The inverse of `to_string`: a name that it could not have made is no name of ours.
    #[cfg_attr(
        not(any(test, feature = "doctor")),
        expect(dead_code, reason = "the operator's tool reads names")
    )]
    pub(crate) fn parse(name: &'a str) -> Option<Self> {
        if let Some(work_queue) = name.strip_suffix(BURIED) {
            return (!work_queue.is_empty()).then_some(Self::buried(work_queue));
        }
        let (rest, last) = name.rsplit_once('.')?;
        let retry = RETRY.trim_end_matches('.');
        let named = if let Some(work_queue) = rest.strip_suffix(retry) {
            Self::lane(work_queue, parse_level(last)?, None)
        } else {
            let (rest, middle) = rest.rsplit_once('.')?;
            let work_queue = rest.strip_suffix(retry)?;
            let delay_ms = parse_ms(last)?;
            match middle {
                BUSY => Self::busy(work_queue, delay_ms),
                HOLD => Self::hold(work_queue, delay_ms),
                level => Self::lane(work_queue, parse_level(level)?, Some(delay_ms)),
            }
        };
        (!named.work_queue.is_empty()).then_some(named)
    }

    /// The name, if AMQP can carry it.
    pub(crate) fn checked(&self, work_queue: &str) -> Result<String, Error> {
        let name = self.to_string();
        if name.len() <= LONGEST {
            return Ok(name);
        }
        Err(Error::configuration(format!(
            "queue: {name:?} has {} bytes, and a queue's name has at most {LONGEST} bytes; shorten \
             {work_queue:?} by {}",
            name.len(),
            name.len() - LONGEST
        )))
    }
}

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.work_queue)?;
        match self.kind {
            Kind::Buried => f.write_str(BURIED),
            Kind::Busy { delay_ms } => write!(f, "{RETRY}{BUSY}.{delay_ms:08}ms"),
            Kind::Hold { delay_ms } => write!(f, "{RETRY}{HOLD}.{delay_ms:08}ms"),
            Kind::Lane { level_ms, jittered_ms } => {
                f.write_str(RETRY)?;
                if level_ms % 1000 == 0 {
                    write!(f, "{:05}s", level_ms / 1000)?;
                } else {
                    write!(f, "{level_ms:08}ms")?;
                }
                match jittered_ms {
                    Some(delay_ms) => write!(f, ".{delay_ms:08}ms"),
                    None => Ok(()),
                }
            }
        }
    }
}

/// `00015s`, or `00001500ms` where it is not whole seconds.
fn parse_level(text: &str) -> Option<u64> {
    match text.strip_suffix("ms") {
        Some(_) => parse_ms(text).filter(|ms| ms % 1000 != 0),
        None => digits(text.strip_suffix('s')?, 5)?.checked_mul(1000),
    }
}

fn parse_ms(text: &str) -> Option<u64> {
    digits(text.strip_suffix("ms")?, 8)
}

/// A number padded with zeros to `width`, as `{:0width$}` writes it.
fn digits(text: &str, width: usize) -> Option<u64> {
    let padded = text.len() == width || (text.len() > width && !text.starts_with('0'));
    (padded && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::fuzz;
    use proptest::prelude::*;

    #[test]
    fn names_of_the_design() {
        assert_eq!(
            Name::lane("orders", 15_000, Some(8_437)).to_string(),
            "orders.retry.00015s.00008437ms"
        );
        assert_eq!(Name::lane("orders", 1_500, None).to_string(), "orders.retry.00001500ms");
        assert_eq!(Name::buried("orders").to_string(), "orders.buried");
        assert_eq!(Name::busy("orders", 2_250).to_string(), "orders.retry.busy.00002250ms");
        assert_eq!(Name::hold("orders", 21_600_000).to_string(), "orders.retry.hold.21600000ms");
    }

    #[test]
    fn other_names_are_not_ours() {
        for name in [
            "orders",
            "",
            ".buried",
            "orders.retry",
            "orders.retry.",
            "orders.retry.15s",
            "orders.retry.00015s.8437ms",
            "orders.retry.00015s.0008437 ms",
            "orders.retry.+0015s",
            "orders.retry.000015s",
            "orders.retry.00015s.99999999999999999999999ms",
            "orders.retry.99999999999999999999s",
            "orders.retry.00015000ms",
            "orders.retry.busy",
            "orders.retry.busy.00002s",
            "orders.retry.held.00002250ms",
            ".retry.00015s",
        ] {
            assert_eq!(Name::parse(name), None, "{name}");
        }
    }

    #[test]
    fn a_work_queue_that_looks_like_a_lane_is_still_a_work_queue() {
        let work_queue = "a.retry.00015s.buried";
        let name = Name::lane(work_queue, 1_000, Some(700)).to_string();
        assert_eq!(Name::parse(&name), Some(Name::lane(work_queue, 1_000, Some(700))));
    }

    #[test]
    fn whatever_a_queue_is_called_its_name_is_written_as_it_was_read_or_is_not_ours() {
        let pieces = [
            ".retry.",
            ".retry",
            "retry",
            ".buried",
            "buried",
            "busy",
            "hold",
            ".",
            "00015s",
            "00001500ms",
            "00008437ms",
            "s",
            "ms",
            "0",
            "-1",
            "99999999999999999999",
            "ä",
            "\0",
        ];
        let piece = prop_oneof![
            4 => proptest::sample::select(pieces.to_vec()).prop_map(str::to_owned),
            1 => any::<String>(),
            1 => "[0-9]{1,21}m?s",
        ];
        let name = proptest::collection::vec(piece, 0..10).prop_map(|pieces| pieces.concat());
        fuzz((name, any::<Option<u64>>(), any::<u64>()), |(text, jittered_ms, delay_ms)| {
            if let Some(name) = Name::parse(&text) {
                prop_assert!(!name.work_queue.is_empty());
                prop_assert_eq!(name.to_string(), text.as_str());
                let _ = name.delay_ms();
            }
            if text.is_empty() {
                return Ok(());
            }
            for name in [
                Name::lane(&text, delay_ms, jittered_ms),
                Name::busy(&text, delay_ms),
                Name::hold(&text, delay_ms),
                Name::buried(&text),
            ] {
                let written = name.to_string();
                prop_assert_eq!(Name::parse(&written), Some(name.clone()));
                prop_assert!(name.checked(&text).map_or(true, |name| name.len() <= LONGEST));
            }
            Ok(())
        });
    }

    proptest! {
        #[test]
        fn every_name_is_read_back(
            work_queue in ".{1,40}|[a-z.]{1,20}(\\.retry\\.0001[0-9]s)?",
            level_ms in 1u64..400_000_000_000, delay in proptest::option::of(1u64..400_000_000_000),
        ) {
            for name in [
                Name::lane(&work_queue, level_ms, delay),
                Name::buried(&work_queue),
                Name::busy(&work_queue, level_ms),
                Name::hold(&work_queue, level_ms),
            ] {
                let text = name.to_string();
                prop_assert_eq!(Name::parse(&text), Some(name));
            }
        }

        #[test]
        fn what_is_read_is_written_the_same(text in "([a-z.]{0,9}(\\.retry\\.|\\.buried)){0,2}[0-9]{0,9}m?s?\\.?[0-9]{0,10}m?s?") {
            if let Some(name) = Name::parse(&text) {
                prop_assert_eq!(name.to_string(), text);
            }
        }

        #[test]
        fn names_sort_by_delay(a in 1u64..99_999, b in 1u64..99_999) {
            let name = |s: u64| Name::lane("orders", s * 1000, Some(s * 900)).to_string();
            prop_assert_eq!(a.cmp(&b), name(a).cmp(&name(b)));
        }

        #[test]
        fn a_checked_name_has_at_most_255_bytes(work_queue in ".{1,300}") {
            match Name::lane(&work_queue, 15_000, Some(8_437)).checked(&work_queue) {
                Ok(name) => prop_assert!(name.len() <= 255),
                Err(error) => prop_assert!(error.to_string().contains("255 bytes")),
            }
        }
    }
}
