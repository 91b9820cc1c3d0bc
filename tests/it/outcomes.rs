//! What a handler's error says, on its whole way from the handler to the buried queue.

use std::{collections::HashMap, error::Error as StdError, fmt, io, time::Duration};

use anyhow::{Context, anyhow};
use futures_util::StreamExt;
use lapin::BasicProperties;
use lapin_retry::{
    BuriedReason, Doctor, Event, Jitter, Job, Marked, Outcome, OutcomeExt, Panicked, RetryConsumer,
    RetryPolicy, Settings, TimedOut, reject, undecodable,
};
use serde_json::Value;

use crate::support::{Journal, PATIENCE, Scene, WORK, eventually, within};

const SECOND: Duration = Duration::from_secs(1);

fn one_level() -> RetryPolicy {
    RetryPolicy::new([1]).jitter(Jitter::None)
}

/// The buried jobs by their bodies.
async fn buried(scene: &Scene, journal: &Journal, jobs: u32) -> HashMap<String, Value> {
    journal.until_buried(jobs as usize).await;
    let jobs = scene.take_buried(jobs).await;
    jobs.into_iter().map(|job| (job["payload"].as_str().unwrap().to_owned(), job)).collect()
}

/// What `#[derive(Error)]` makes of a `#[source]`.
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

/// What it makes of `#[error(transparent)]`.
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

/// Every way for a marker to reach us, and what the buried job tells as its error.
const PATHS: [(&str, &str); 9] = [
    ("root", "no use"),
    ("under context", "outer: no use"),
    ("as context", "no use: inner"),
    ("source", "sourced: no use"),
    ("transparent", "no use"),
    ("io error", "no use"),
    ("box", "sourced: no use"),
    ("or_reject", "outer: no use"),
    ("outermost of two", "no use"),
];

fn marked(path: &str) -> anyhow::Result<()> {
    let mark = || reject(anyhow!("no use"));
    Err(match path {
        "root" => mark().into(),
        "under context" => anyhow::Error::new(mark()).context("outer"),
        "as context" => anyhow!("inner").context(mark()),
        "source" => Sourced(mark()).into(),
        "transparent" => Transparent(mark()).into(),
        "io error" => io::Error::other(mark()).into(),
        "box" => anyhow::Error::from_boxed(Box::new(Sourced(mark()))),
        "or_reject" => return Err::<(), _>(anyhow!("no use")).or_reject().context("outer"),
        "outermost of two" => reject(undecodable(anyhow!("no use"))).into(),
        other => anyhow!("not a path: {other}"),
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_marker_is_found_on_every_path_and_the_error_is_told() {
    let scene = Scene::new().await;
    let journal = Journal::default();
    let _worker = RetryConsumer::builder(scene.url(), WORK)
        .policy(one_level())
        .on_event(journal.hook())
        .handler(|job: Job| async move { marked(std::str::from_utf8(job.body())?) })
        .start()
        .await
        .unwrap();
    for (path, _) in PATHS {
        scene.publish(BasicProperties::default(), path).await;
    }
    let buried = buried(&scene, &journal, PATHS.len() as u32).await;
    for (path, error) in PATHS {
        let headers = &buried[path]["headers"];
        assert_eq!(headers["buried-reason"], "rejected", "{path}");
        assert_eq!(headers["retry-error"], error, "{path}");
        assert_eq!(headers["retry-count"], 0, "{path}: nothing is charged");
    }
    assert!(journal.delays().is_empty());
}

/// An error of the user's own, as `handler_with_error` takes it.
#[derive(Debug)]
enum Failure {
    Plain,
    NoUse(Marked),
    Io(io::Error),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("failure")
    }
}

impl StdError for Failure {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Plain => None,
            Self::NoUse(marked) => Some(marked),
            Self::Io(error) => Some(error),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_may_have_an_error_of_its_own_type() {
    let scene = Scene::new().await;
    let journal = Journal::default();
    let worker = RetryConsumer::builder(scene.url(), WORK)
        .policy(one_level())
        .on_event(journal.hook())
        .classify(|failure: &Failure| match failure {
            Failure::Io(error) if error.kind() == io::ErrorKind::InvalidData => {
                Some(Outcome::Undecodable)
            }
            _ => None,
        })
        .handler_with_error(|job: Job| async move {
            match job.body() {
                b"marked" => Err(Failure::NoUse(reject(anyhow!("no use")))),
                b"classified" => Err(Failure::Io(io::ErrorKind::InvalidData.into())),
                b"plain" => Err(Failure::Plain),
                _ => Ok(()),
            }
        })
        .start()
        .await
        .unwrap();
    for body in ["marked", "classified", "plain", "good"] {
        scene.publish(BasicProperties::default(), body).await;
    }
    let buried = buried(&scene, &journal, 3).await;
    let reason = |body: &str| buried[body]["headers"]["buried-reason"].clone();
    assert_eq!(reason("marked"), "rejected");
    assert_eq!(reason("classified"), "undecodable");
    assert_eq!(reason("plain"), "exhausted");
    assert_eq!(buried["marked"]["headers"]["retry-error"], "failure: no use");
    journal.until_done(1).await;
    worker.shutdown(SECOND).await;

    // And one with anyhow's.
    let journal = Journal::default();
    let _worker = RetryConsumer::builder(scene.url(), WORK)
        .policy(one_level())
        .on_event(journal.hook())
        .handler_with_error(|_: Job| async move { marked("as context") })
        .start()
        .await
        .unwrap();
    scene.publish(BasicProperties::default(), "").await;
    assert_eq!(journal.until_buried(1).await, [BuriedReason::Rejected]);
}

#[tokio::test(flavor = "multi_thread")]
async fn classifiers_are_asked_in_their_order_about_timeouts_and_panics_too() {
    let scene = Scene::new().await;
    let journal = Journal::default();
    let _worker = RetryConsumer::builder(scene.url(), WORK)
        .policy(one_level())
        .on_event(journal.hook())
        .handler_timeout(SECOND)
        .classify(|error: &io::Error| {
            (error.kind() == io::ErrorKind::NotFound).then_some(Outcome::Reject)
        })
        .classify(|_: &io::Error| Some(Outcome::Undecodable))
        .classify(|error: &TimedOut| {
            assert_eq!(error.after, SECOND);
            Some(Outcome::Reject)
        })
        .classify(|panicked: &Panicked| {
            panicked.to_string().contains("on purpose").then_some(Outcome::Reject)
        })
        .handler(|job: Job| async move {
            let io = |kind: io::ErrorKind| io::Error::from(kind);
            match job.body() {
                b"first" => Err(io(io::ErrorKind::NotFound)).context("reading")?,
                b"second" => Err(anyhow!("reading").context(io(io::ErrorKind::Other)))?,
                b"marker wins" => Err(undecodable(io(io::ErrorKind::NotFound)))?,
                b"timeout" => std::future::pending().await,
                b"panic" => panic!("on purpose"),
                b"other panic" => panic!("by mistake"),
                _ => Err(anyhow!("nobody's"))?,
            }
            Ok(())
        })
        .start()
        .await
        .unwrap();
    let expected = [
        ("first", "rejected", "failed", 0),
        ("second", "undecodable", "undecodable", 0),
        ("marker wins", "undecodable", "undecodable", 0),
        ("timeout", "rejected", "timeout", 0),
        ("panic", "rejected", "panic", 0),
        ("other panic", "exhausted", "panic", 2),
        ("no answer", "exhausted", "failed", 2),
    ];
    for (body, ..) in expected {
        scene.publish(BasicProperties::default(), body).await;
    }
    let buried = buried(&scene, &journal, expected.len() as u32).await;
    for (body, reason, kind, count) in expected {
        let headers = &buried[body]["headers"];
        assert_eq!(headers["buried-reason"], reason, "{body}");
        assert_eq!(headers["retry-error-kind"], kind, "{body}");
        assert_eq!(headers["retry-count"], count, "{body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_classifier_timeouts_panics_and_bodies_tell_their_kind() {
    let scene = Scene::new().await;
    let journal = Journal::default();
    let _worker = RetryConsumer::builder(scene.url(), WORK)
        .policy(one_level())
        .on_event(journal.hook())
        .handler_timeout(SECOND)
        .handler(|job: Job| async move {
            match job.body() {
                b"timeout" => std::future::pending().await,
                b"panic" => panic!("on purpose"),
                _ => Ok(job.decode()?),
            }
        })
        .start()
        .await
        .unwrap();
    for body in ["timeout", "panic", "{"] {
        let json = BasicProperties::default().with_content_type("application/json".into());
        scene.publish(json, body).await;
    }
    let buried = buried(&scene, &journal, 3).await;
    for (body, kind, reason, error) in [
        ("timeout", "timeout", "exhausted", "the handler was cancelled after 1s"),
        ("panic", "panic", "exhausted", "the handler panicked: on purpose"),
        ("{", "undecodable", "undecodable", "the body as JSON"),
    ] {
        let headers = &buried[body]["headers"];
        assert_eq!(headers["retry-error-kind"], kind, "{body}");
        assert_eq!(headers["buried-reason"], reason, "{body}");
        assert!(headers["retry-error"].as_str().unwrap().starts_with(error), "{headers}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hook_that_panics_harms_neither_jobs_nor_other_hooks() {
    let scene = Scene::new().await;
    let journal = Journal::default();
    let settings = Settings::new(one_level())
        .on_event(|event| panic!("a hook's own fault: {event:?}"))
        .on_event(journal.hook());
    let worker = RetryConsumer::builder(scene.url(), WORK)
        .settings(settings)
        .handler(|job: Job| async move {
            match job.body() {
                b"good" => Ok(()),
                _ => Err(anyhow!("no")),
            }
        })
        .start()
        .await
        .unwrap();
    for body in ["good", "bad", "good"] {
        scene.publish(BasicProperties::default(), body).await;
    }
    assert_eq!(journal.until_buried(1).await, [BuriedReason::Exhausted]);
    journal.until_done(2).await;
    assert_eq!(journal.delays(), [SECOND]);
    worker.shutdown(SECOND).await;
    let left = crate::support::count(&scene.channel, WORK).await;
    assert_eq!(left, 0, "what was told is settled");
}

#[tokio::test(flavor = "multi_thread")]
async fn events_that_nobody_reads_are_dropped_and_counted_and_hold_up_no_job() {
    let scene = Scene::new().await;
    let journal = Journal::default();
    let (settings, mut events) =
        Settings::new(one_level()).doctor(Doctor::Off).on_event(journal.hook()).events(5);
    let worker = RetryConsumer::builder(scene.url(), WORK)
        .settings(settings)
        .handler(|_: Job| async { Ok(()) })
        .start()
        .await
        .unwrap();
    for _ in 0..20 {
        scene.publish(BasicProperties::default(), "").await;
    }
    journal.until_done(20).await;
    // It is told to one hook after the other.
    let all = || journal.all(|_| Some(())).len() as u64;
    eventually("the rest is dropped", PATIENCE, async || events.dropped() == all() - 5).await;
    let first = within("an event", events.next()).await;
    assert!(matches!(first, Some(Event::Ready { queues: 2, .. })), "the oldest are kept");
    worker.shutdown(SECOND).await;
    drop(worker);
    let kept = within("the stream's end", events.count()).await;
    assert_eq!(kept, 4);
}
