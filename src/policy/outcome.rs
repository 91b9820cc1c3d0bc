//! What a handler says about a job, and how it is read out of an error.

#[cfg(test)]
mod tests;

use std::{error::Error as StdError, fmt, sync::Arc, time::Duration};

use super::{
    panicked::{Panicked, caught},
    text::chain,
};

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

/// The outcome of one attempt, read: nothing of the user's is left in it.
#[derive(Clone, Debug)]
pub(crate) enum Verdict {
    Done,
    Failed {
        outcome: Outcome,
        kind: FailureKind,
        /// The error and its sources, as text.
        error: String,
    },
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
    ///
    /// Classifiers, the error's text and its `Drop` are the user's code: one that panics is a panic
    /// of this job.
    pub(crate) fn from_result(
        result: Result<(), anyhow::Error>,
        classifiers: &[Classifier],
    ) -> Self {
        let Err(error) = result else { return Self::Done };
        let read = caught(|| Self::read(&error, classifiers));
        let dropped = caught(|| drop(error));
        read.and_then(|read| dropped.map(|()| read)).unwrap_or_else(|panicked| Self::Failed {
            outcome: Outcome::Failed,
            kind: FailureKind::Panic,
            error: format!(
                "the handler's error, or a classifier, panicked: {}",
                panicked.message()
            ),
        })
    }

    fn read(error: &anyhow::Error, classifiers: &[Classifier]) -> Self {
        let outcome = marked(error)
            .or_else(|| classifiers.iter().find_map(|classifier| (classifier.0)(error)))
            .unwrap_or(Outcome::Failed);
        let kind = match outcome {
            Outcome::Undecodable => FailureKind::Undecodable,
            Outcome::Busy => FailureKind::Busy,
            Outcome::Outage => FailureKind::Outage,
            _ if find::<TimedOut>(error).is_some() => FailureKind::Timeout,
            _ if find::<Panicked>(error).is_some() => FailureKind::Panic,
            _ => FailureKind::Failed,
        };
        Self::Failed { outcome, kind, error: chain(error) }
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
