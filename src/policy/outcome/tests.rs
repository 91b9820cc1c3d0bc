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
    let panic = Panicked::new("boom");
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

/// What of it panics, by its number.
#[derive(Debug)]
struct Unstable(u8);
impl fmt::Display for Unstable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        assert_ne!(self.0, 1, "when it is written");
        f.write_str("unstable")
    }
}
impl StdError for Unstable {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        assert_ne!(self.0, 2, "when its source is asked for");
        None
    }
}
impl Drop for Unstable {
    fn drop(&mut self) {
        // A second panic would abort the process.
        assert!(self.0 != 3 || std::thread::panicking(), "when it is dropped");
    }
}

#[test]
fn users_code_that_panics_while_an_outcome_is_read_is_a_panic_of_the_job() {
    let classifier = Classifier::new(|error: &Unstable| {
        assert_ne!(error.0, 4, "when it is classified");
        Some(Outcome::Reject)
    });
    for (which, why) in [(1, "written"), (2, "source"), (3, "dropped"), (4, "classified")] {
        let classifiers = std::slice::from_ref(&classifier);
        match Verdict::from_result(Err(Unstable(which).into()), classifiers) {
            Verdict::Failed { outcome, kind, error } => {
                assert_eq!((outcome, kind), (Outcome::Failed, FailureKind::Panic), "{which}");
                assert!(error.contains(why), "{error}");
            }
            Verdict::Done => panic!("not done"),
        }
    }
}

#[test]
fn or_reject_takes_any_result() {
    let error = "x".parse::<i32>().or_reject().context("reading the number").unwrap_err();
    assert_eq!(marked(&error), Some(Outcome::Reject));
}
