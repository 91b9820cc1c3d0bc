//! What a handler says about a job, and how it is read out of an error.

use std::{error::Error as StdError, fmt, sync::Arc, time::Duration};

/// What an error says about its job. An error without a marker is [`Outcome::Failed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// Charged to the job, and tried again at the next level.
    Failed,
    /// Charged to the job, and tried again no sooner than after this long. See [`retry_after`].
    RetryAfter(Duration),
    /// To try again is of no use: buried now, as `rejected`. See [`reject`].
    Reject,
    /// The body cannot be read: buried now, as `undecodable`. See
    /// [`Job::decode`](crate::Job::decode).
    Undecodable,
    /// Lost a lock, found no slot: comes back at a random time, and is charged to nobody. See
    /// [`busy`].
    Busy,
    /// Nothing to do with this job: it is returned unharmed, and the consumer pauses. See
    /// [`outage`].
    Outage,
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

/// Says that this job is to be tried again, but no sooner than after `delay`: a server's
/// `Retry-After`, say. It is a failure of the job and charged to it; after the last level it
/// buries.
///
/// The job waits in a lane that is not shorter, drawn among those of up to a quarter more, so that
/// a herd that was sent away together does not return together. A delay longer than the longest
/// lane is waited out hop by hop, without the handler being called in between. It is never early,
/// whatever the clocks say; time spent in the work queue between two hops is not counted, so behind a
/// backlog it ends later. More than 10 years or 10,000 hops bury the job as `expired`.
///
/// ```
/// # use std::time::Duration;
/// # use lapin_retry::retry_after;
/// fn answered(status: u16, after: Duration) -> anyhow::Result<()> {
///     if status == 429 {
///         return Err(retry_after(anyhow::anyhow!("too many requests"), after).into());
///     }
///     Ok(())
/// }
/// # assert!(answered(429, Duration::from_secs(9)).is_err());
/// ```
pub fn retry_after(error: impl Into<anyhow::Error>, delay: Duration) -> Marked {
    Marked::new(Outcome::RetryAfter(delay), error)
}

/// Says that something scarce was taken: a lock, a slot. The job comes back at a random time: in
/// 2 s to 4 s at first, in 2 s to 60 s when it was busy six times in a row. Nothing is charged, until
/// it was busy 100 times in a row: then one failure is, and the count starts again.
pub fn busy(error: impl Into<anyhow::Error>) -> Marked {
    Marked::new(Outcome::Busy, error)
}

/// Says that the failure has nothing to do with this job: the database is down, a provider is
/// misconfigured. The job goes back to its queue, uncharged, and the whole consumer pauses.
pub fn outage(error: impl Into<anyhow::Error>) -> Marked {
    Marked::new(Outcome::Outage, error)
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

    /// See [`busy`].
    ///
    /// # Errors
    /// The error of `self`, marked.
    fn or_busy(self) -> Result<T, Marked>;

    /// See [`outage`].
    ///
    /// # Errors
    /// The error of `self`, marked.
    fn or_outage(self) -> Result<T, Marked>;

    /// See [`retry_after`].
    ///
    /// # Errors
    /// The error of `self`, marked.
    fn or_retry_after(self, delay: Duration) -> Result<T, Marked>;
}

impl<T, E: Into<anyhow::Error>> OutcomeExt<T> for Result<T, E> {
    fn or_reject(self) -> Result<T, Marked> {
        self.map_err(reject)
    }

    fn or_undecodable(self) -> Result<T, Marked> {
        self.map_err(undecodable)
    }

    fn or_busy(self) -> Result<T, Marked> {
        self.map_err(busy)
    }

    fn or_outage(self) -> Result<T, Marked> {
        self.map_err(outage)
    }

    fn or_retry_after(self, delay: Duration) -> Result<T, Marked> {
        self.map_err(|error| retry_after(error, delay))
    }
}

/// The handler took longer than its timeout and was cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
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
    /// Something scarce was taken. Not charged.
    Busy,
    /// The failure had nothing to do with the job. Not charged.
    Outage,
    /// The process died while it ran the job alone. Not charged.
    Crash,
}

impl FailureKind {
    /// The text in the header `retry-error-kind`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Timeout => "timeout",
            Self::Panic => "panic",
            Self::Undecodable => "undecodable",
            Self::Busy => "busy",
            Self::Outage => "outage",
            Self::Crash => "crash",
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

/// Reads an outcome out of an error type that is not ours. See
/// [`Settings::classify`](crate::Settings::classify).
#[derive(Clone)]
pub(crate) struct Classifier(Arc<Classify>);

type Classify = dyn Fn(&anyhow::Error) -> Option<Outcome> + Send + Sync;

impl fmt::Debug for Classifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Classifier")
    }
}

impl Classifier {
    pub(crate) fn new<E: StdError + Send + Sync + 'static>(
        classify: impl Fn(&E) -> Option<Outcome> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(move |error| find::<E>(error).and_then(&classify)))
    }
}

impl Verdict {
    /// The outermost marker decides; without one the first classifier that has an answer; without
    /// one it is a plain failure.
    pub(crate) fn from_result(
        result: Result<(), anyhow::Error>,
        classifiers: &[Classifier],
    ) -> Self {
        let Err(error) = result else { return Self::Done };
        let outcome = marked(&error)
            .or_else(|| classifiers.iter().find_map(|classifier| (classifier.0)(&error)))
            .unwrap_or(Outcome::Failed);
        let kind = match outcome {
            Outcome::Undecodable => FailureKind::Undecodable,
            Outcome::Busy => FailureKind::Busy,
            Outcome::Outage => FailureKind::Outage,
            _ if find::<TimedOut>(&error).is_some() => FailureKind::Timeout,
            _ if find::<Panicked>(&error).is_some() => FailureKind::Panic,
            _ => FailureKind::Failed,
        };
        Self::Failed { outcome, kind, error }
    }
}

/// The outermost marker's outcome.
fn marked(error: &anyhow::Error) -> Option<Outcome> {
    // `.context(marked)` puts the marker where only anyhow itself can see it.
    if let Some(marked) = error.downcast_ref::<Marked>() {
        return Some(marked.outcome());
    }
    error.chain().find_map(|layer| {
        let marker = layer.downcast_ref::<Marked>().map(|marked| &marked.0);
        marker.or_else(|| layer.downcast_ref::<Marker>()).map(|marker| marker.outcome)
    })
}

/// An error of this type among those that the error was made from.
fn find<E: StdError + Send + Sync + 'static>(error: &anyhow::Error) -> Option<&E> {
    // The first sees `.context(e)`; the second what only sources show.
    error.downcast_ref::<E>().or_else(|| error.chain().find_map(|layer| layer.downcast_ref::<E>()))
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
        let mark = || reject(anyhow!("no use"));
        for (name, error) in [
            ("root", anyhow::Error::new(mark())),
            ("under context", anyhow::Error::new(mark()).context("outer")),
            ("as context", anyhow!("inner").context(mark())),
            ("through #[source]", anyhow::Error::new(Sourced(mark()))),
            ("through transparent", anyhow::Error::new(Transparent(mark()))),
            ("through io::Error", std::io::Error::other(mark()).into()),
            ("in a box", anyhow::Error::from_boxed(Box::new(Sourced(mark())))),
            ("in nested anyhow", anyhow!(anyhow::Error::new(mark()).context("a"))),
        ] {
            assert_eq!(marked(&error), Some(Outcome::Reject), "{name}");
        }
        assert_eq!(marked(&anyhow!("plain")), None);
    }

    #[test]
    fn the_outermost_marker_wins_and_the_users_type_is_still_there() {
        let io = std::io::Error::new(std::io::ErrorKind::NotFound, "gone");
        let error = anyhow::Error::new(undecodable(reject(io)));
        assert_eq!(marked(&error), Some(Outcome::Undecodable));
        assert_eq!(find::<std::io::Error>(&error).unwrap().kind(), std::io::ErrorKind::NotFound);
    }

    #[test]
    fn timeouts_and_panics_are_told_apart_and_can_be_marked() {
        let kind = |error: anyhow::Error| match Verdict::from_result(Err(error), &[]) {
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
    fn the_first_classifier_with_an_answer_decides_unless_a_marker_does() {
        let by_kind = Classifier::new(|e: &std::io::Error| {
            (e.kind() == std::io::ErrorKind::ConnectionRefused).then_some(Outcome::Outage)
        });
        let all_io = Classifier::new(|_: &std::io::Error| Some(Outcome::Reject));
        let timeouts = Classifier::new(|_: &TimedOut| Some(Outcome::Busy));
        let stack = [by_kind, all_io, timeouts];
        let outcome = |error: anyhow::Error| match Verdict::from_result(Err(error), &stack) {
            Verdict::Failed { outcome, .. } => outcome,
            Verdict::Done => panic!("not done"),
        };
        let io = |kind: std::io::ErrorKind| std::io::Error::from(kind);
        let (refused, gone) = (std::io::ErrorKind::ConnectionRefused, std::io::ErrorKind::NotFound);
        assert_eq!(outcome(io(refused).into()), Outcome::Outage);
        assert_eq!(outcome(anyhow::Error::new(io(refused)).context("calling")), Outcome::Outage);
        assert_eq!(outcome(anyhow!("calling").context(io(refused))), Outcome::Outage);
        assert_eq!(outcome(io(gone).into()), Outcome::Reject);
        assert_eq!(outcome(busy(io(gone)).into()), Outcome::Busy);
        assert_eq!(outcome(TimedOut { after: Duration::from_secs(1) }.into()), Outcome::Busy);
        assert_eq!(outcome(anyhow!("plain")), Outcome::Failed);
    }

    #[test]
    fn or_reject_takes_any_result() {
        let error = "x".parse::<i32>().or_reject().context("reading the number").unwrap_err();
        assert_eq!(marked(&error), Some(Outcome::Reject));
    }
}
