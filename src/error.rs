//! What can go wrong before a job is taken, and around it.

use std::{error::Error as StdError, fmt, sync::Arc};

/// What is wrong with a configuration, a broker or a queue.
///
/// The message names the queue, the argument or the field, and the remedy. A failed *job* is never
/// an `Error`: it is retried or buried, and an [`Event`](crate::Event) says so.
#[derive(Clone, Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

/// The kinds of [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A setting that cannot work. The message names the field.
    Configuration,
    /// The broker cannot be reached, refused the login, or closed the connection.
    Connection,
    /// A queue that must be there is not.
    MissingQueue,
    /// The broker's user lacks a right. The message names it and the queue; while queues are made
    /// or verified, also the patterns that grant all that a worker needs. A refused login is
    /// [`Connection`](Self::Connection).
    Permission,
    /// A queue of this name exists with other arguments.
    Inequivalent,
    /// lapin cannot read a message of the queue, and its connection dies at each delivery of it.
    /// The message says why, and how to take it out.
    Unreadable,
    /// The broker's limit on queues is reached.
    QueueLimit,
    /// The doctor found what does not do, and was told to refuse it:
    /// [`Doctor::Refuse`](crate::Doctor::Refuse). The message lists the findings.
    Unfit,
    /// The broker refused an operation for another reason, which the message repeats.
    Refused,
    /// The consumer or the retry was closed while work was still going on.
    Closed,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    pub(crate) fn configuration(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Configuration, message)
    }

    pub(crate) fn because(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.source = Some(Arc::new(source));
        self
    }

    /// What kind of trouble this is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|source| &**source as &(dyn StdError + 'static))
    }
}
