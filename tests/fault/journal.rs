//! What happened, outside the broker: one file that all processes append to, a line each.
//!
//! A line is written by a single call, so that it is whole although others write as well, and it is
//! in the kernel's hands when that returns, so that a killed worker has told all that it did.

use crate::plan::{Step, copy_id};
use lapin_retry::Job;
use std::{
    fs::{File, OpenOptions},
    io::{Read, Write},
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

macro_rules! verbs {
    ($($(#[$doc:meta])* $verb:ident)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Verb { $($(#[$doc])* $verb),* }

        impl Verb {
            fn parse(text: &str) -> Option<Self> {
                match text { $(stringify!($verb) => Some(Self::$verb),)* _ => None }
            }
        }
    };
}

verbs! {
    /// A handler began.
    Attempt
    /// A handler is about to succeed: the job is done.
    Success
    /// A handler is about to fail.
    Failure
    Acked
    /// A copy is confirmed, in a lane or in the work queue.
    HandedOff
    Buried
    /// Given back, or a copy of it, although no handler said so.
    SetAside
    /// A hand-off may have succeeded, and is done again.
    Undecided
    Duplicated
    Stale
    /// The worker lost its connection.
    Disconnected
    /// A handler begins to outlast the consumer timeout.
    Overstays
    /// A handler begins to block a thread of the worker's runtime.
    Blocks
    /// The broker closed a channel of the worker's.
    ChannelClosed
    /// The driver is about to kill the worker.
    Killed
    /// The driver is about to tell the worker to stop.
    Stopped
    /// The publisher has no answer, and publishes the job again.
    Republished
    /// The driver begins a fault that the broker feels.
    Fault
    /// The broker answers again.
    Back
}

#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    who: String,
}

impl Journal {
    pub(crate) fn open(path: &Path, who: &str) -> Self {
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { file, who: who.to_owned() }
    }

    pub(crate) fn job(&self, verb: Verb, job: &Job) {
        let (step, copy) = (Step::of(job), copy_id(job));
        let again = u8::from(job.redelivered());
        self.write(&self.who, verb, &format!("{} {step} {copy} {again}", job.id()));
    }

    /// Of the worker, or of the driver.
    pub(crate) fn note(&self, verb: Verb) {
        self.note_of(&self.who, verb);
    }

    pub(crate) fn note_of(&self, who: &str, verb: Verb) {
        self.write(who, verb, "- 0.0.0 - 0");
    }

    pub(crate) fn published_again(&self, id: &str) {
        self.write(&self.who, Verb::Republished, &format!("{id} 0.0.0 - 0"));
    }

    fn write(&self, who: &str, verb: Verb, rest: &str) {
        let line = format!("{} {who} {verb:?} {rest}\n", now_ms());
        (&self.file).write_all(line.as_bytes()).expect("a disk to write on");
    }
}

pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock");
    u64::try_from(since.as_millis()).expect("not yet")
}

#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) at: u64,
    pub(crate) who: String,
    pub(crate) verb: Verb,
    /// `-` if it is of no job.
    pub(crate) id: String,
    pub(crate) step: Step,
    pub(crate) copy: String,
    pub(crate) redelivered: bool,
}

impl Line {
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let mut word = || words.next();
        let (at, who, verb) = (word()?.parse().ok()?, word()?.to_owned(), Verb::parse(word()?)?);
        let id = word()?.to_owned();
        let mut counts = word()?.split('.').map(|n| n.parse().ok());
        let mut count = || counts.next()?;
        let step = Step { failures: count()?, busy: count()?, outage: count()? == 1 };
        Some(Self {
            at,
            who,
            verb,
            id,
            step,
            copy: word()?.to_owned(),
            redelivered: word()? == "1",
        })
    }
}

/// Reads what has been appended since it last did.
#[derive(Debug)]
pub(crate) struct Reader {
    file: File,
    rest: Vec<u8>,
}

impl Reader {
    pub(crate) fn open(path: &Path) -> Self {
        let file = File::open(path);
        let file = file.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { file, rest: Vec::new() }
    }

    pub(crate) fn read(&mut self) -> Vec<Line> {
        self.file.read_to_end(&mut self.rest).expect("a readable journal");
        let whole = self.rest.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        let text: Vec<u8> = self.rest.drain(..whole).collect();
        let text = String::from_utf8(text).expect("UTF-8");
        let line = |line| Line::parse(line).unwrap_or_else(|| panic!("the journal says {line:?}"));
        text.lines().map(line).collect()
    }
}
