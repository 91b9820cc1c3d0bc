//! What a handler says about a job, and how it is read out of an error.

use std::{error::Error as StdError, fmt, time::Duration};

/// What an error says about its job. An error without a marker is [`Outcome::Failed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// Charged to the job, and tried again at the next level.
    Failed,
    /// To try again is of no use: buried now, as `rejected`. See [`reject`].
    Reject,
    /// The body cannot be read: buried now, as `undecodable`. See
    /// [`Job::decode`](crate::Job::decode).
    Undecodable,
}

/// An error with an [`Outcome`] on it: what [`reject`] and [`OutcomeExt`] make.
///
/// It wraps the error and may itself be wrapped, by `anyhow`'s `context`, `#[source]`,
/// `#[error(transparent)]`, `io::Error::other` or a box: the outcome is still found.
/// The outermost marker wins.
pub struct Marked(Marker);

/// The second of the two layers. `io::Error::other` and `#[error(transparent)]` hand out the
/// *source* of what they wrap instead of the thing itself, and would hide a marker of one layer.
struct Marker {
    outcome: Outcome,
    error: anyhow::Error,
}

impl Marked {
    fn new(outcome: Outcome, error: impl Into<anyhow::Error>) -> Self {
        Self(Marker { outcome, error: error.into() })
    }

    /// What the error says about its job.
    pub fn outcome(&self) -> Outcome {
        self.0.outcome
    }
}

impl fmt::Display for Marked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0.error, f)
    }
}

impl fmt::Debug for Marked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Marked").field(&self.0.outcome).field(&self.0.error).finish()
    }
}

impl StdError for Marked {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&self.0)
    }
}

impl fmt::Display for Marker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl fmt::Debug for Marker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.error, f)
    }
}

impl StdError for Marker {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(self.error.as_ref())
    }
}

/// Says that trying this job again is of no use: it is buried at once, as `rejected`.
///
/// ```
/// # use lapin_retry::reject;
/// fn charge(amount: i64) -> anyhow::Result<()> {
///     if amount < 0 {
///         return Err(reject(anyhow::anyhow!("negative amount {amount}")).into());
///     }
///     Ok(())
/// }
/// # assert!(charge(-1).is_err());
/// ```
pub fn reject(error: impl Into<anyhow::Error>) -> Marked {
    Marked::new(Outcome::Reject, error)
}

/// Says that this job's body cannot be read: it is buried at once, as `undecodable`.
/// [`Job::decode`](crate::Job::decode) says it by itself.
pub fn undecodable(error: impl Into<anyhow::Error>) -> Marked {
    Marked::new(Outcome::Undecodable, error)
}

/// Puts an [`Outcome`] on the error of any `Result`.
///
/// ```
/// # use lapin_retry::OutcomeExt;
/// fn parse(text: &str) -> anyhow::Result<i64> {
///     Ok(text.parse::<i64>().or_reject()?)
/// }
/// # assert!(parse("x").is_err());
/// ```
pub trait OutcomeExt<T> {
    /// See [`reject`].
    ///
    /// # Errors
    /// The error of `self`, marked.
    fn or_reject(self) -> Result<T, Marked>;

    /// See [`undecodable`].
    ///
    /// # Errors
    /// The error of `self`, marked.
    fn or_undecodable(self) -> Result<T, Marked>;
}

impl<T, E: Into<anyhow::Error>> OutcomeExt<T> for Result<T, E> {
    fn or_reject(self) -> Result<T, Marked> {
        self.map_err(reject)
    }

    fn or_undecodable(self) -> Result<T, Marked> {
        self.map_err(undecodable)
    }
}

/// The handler took longer than its timeout and was cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOut {
    /// The handler timeout that ran out.
    pub after: Duration,
}

impl fmt::Display for TimedOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the handler was cancelled after {}", humantime::format_duration(self.after))
    }
}

impl StdError for TimedOut {}

/// The handler panicked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Panicked {
    message: String,
}

impl Panicked {
    pub(crate) fn new(payload: &(dyn std::any::Any + Send)) -> Self {
        let message = match payload.downcast_ref::<&str>() {
            Some(text) => (*text).to_owned(),
            None => payload.downcast_ref::<String>().cloned().unwrap_or_else(|| "?".to_owned()),
        };
        Self { message }
    }
}

impl fmt::Display for Panicked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the handler panicked: {}", self.message)
    }
}

impl StdError for Panicked {}

/// The header `retry-error-kind`: how an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// The handler returned an error.
    Failed,
    /// The handler was cancelled at its timeout.
    Timeout,
    /// The handler panicked.
    Panic,
    /// The body could not be decoded.
    Undecodable,
}

impl FailureKind {
    /// The text in the header `retry-error-kind`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Timeout => "timeout",
            Self::Panic => "panic",
            Self::Undecodable => "undecodable",
        }
    }
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The outcome of one attempt, read.
#[derive(Debug)]
pub(crate) enum Verdict {
    Done,
    Failed { outcome: Outcome, kind: FailureKind, error: anyhow::Error },
}

impl Verdict {
    pub(crate) fn from_result(result: Result<(), anyhow::Error>) -> Self {
        let Err(error) = result else { return Self::Done };
        let outcome = outcome_of(&error);
        let kind = match outcome {
            Outcome::Undecodable => FailureKind::Undecodable,
            _ if find::<TimedOut>(&error).is_some() => FailureKind::Timeout,
            _ if find::<Panicked>(&error).is_some() => FailureKind::Panic,
            _ => FailureKind::Failed,
        };
        Self::Failed { outcome, kind, error }
    }
}

/// The outermost marker's outcome.
fn outcome_of(error: &anyhow::Error) -> Outcome {
    // `.context(marked)` puts the marker where only anyhow itself can see it.
    if let Some(marked) = error.downcast_ref::<Marked>() {
        return marked.outcome();
    }
    error
        .chain()
        .find_map(|layer| {
            layer
                .downcast_ref::<Marked>()
                .map(|marked| &marked.0)
                .or_else(|| layer.downcast_ref::<Marker>())
        })
        .map_or(Outcome::Failed, |marker| marker.outcome)
}

fn find<E: StdError + 'static>(error: &anyhow::Error) -> Option<&E> {
    error.chain().find_map(|layer| layer.downcast_ref::<E>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};

    #[derive(Debug)]
    struct Sourced(Marked);
    impl fmt::Display for Sourced {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("sourced")
        }
    }
    impl StdError for Sourced {
        fn source(&self) -> Option<&(dyn StdError + 'static)> {
            Some(&self.0)
        }
    }

    /// What `#[error(transparent)]` makes.
    #[derive(Debug)]
    struct Transparent(Marked);
    impl fmt::Display for Transparent {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            fmt::Display::fmt(&self.0, f)
        }
    }
    impl StdError for Transparent {
        fn source(&self) -> Option<&(dyn StdError + 'static)> {
            self.0.source()
        }
    }

    #[test]
    fn a_marker_is_found_however_it_is_wrapped() {
        let marked = || reject(anyhow!("no use"));
        for (name, error) in [
            ("root", anyhow::Error::new(marked())),
            ("under context", anyhow::Error::new(marked()).context("outer")),
            ("as context", anyhow!("inner").context(marked())),
            ("through #[source]", anyhow::Error::new(Sourced(marked()))),
            ("through transparent", anyhow::Error::new(Transparent(marked()))),
            ("through io::Error", std::io::Error::other(marked()).into()),
            ("in a box", anyhow::Error::from_boxed(Box::new(Sourced(marked())))),
            ("in nested anyhow", anyhow!(anyhow::Error::new(marked()).context("a"))),
        ] {
            assert_eq!(outcome_of(&error), Outcome::Reject, "{name}");
        }
        assert_eq!(outcome_of(&anyhow!("plain")), Outcome::Failed);
    }

    #[test]
    fn the_outermost_marker_wins_and_the_users_type_is_still_there() {
        let io = std::io::Error::new(std::io::ErrorKind::NotFound, "gone");
        let error = anyhow::Error::new(undecodable(reject(io)));
        assert_eq!(outcome_of(&error), Outcome::Undecodable);
        assert_eq!(find::<std::io::Error>(&error).unwrap().kind(), std::io::ErrorKind::NotFound);
    }

    #[test]
    fn timeouts_and_panics_are_told_apart_and_can_be_marked() {
        let kind = |error: anyhow::Error| match Verdict::from_result(Err(error)) {
            Verdict::Failed { outcome, kind, .. } => (outcome, kind),
            Verdict::Done => panic!("not done"),
        };
        let timeout = TimedOut { after: Duration::from_secs(3) };
        assert_eq!(kind(timeout.into()), (Outcome::Failed, FailureKind::Timeout));
        assert_eq!(kind(reject(timeout).into()), (Outcome::Reject, FailureKind::Timeout));
        let panic = Panicked::new(&"boom".to_owned() as &(dyn std::any::Any + Send));
        assert_eq!(panic.to_string(), "the handler panicked: boom");
        assert_eq!(kind(panic.into()), (Outcome::Failed, FailureKind::Panic));
    }

    #[test]
    fn or_reject_takes_any_result() {
        let error = "x".parse::<i32>().or_reject().context("reading the number").unwrap_err();
        assert_eq!(outcome_of(&error), Outcome::Reject);
    }
}
