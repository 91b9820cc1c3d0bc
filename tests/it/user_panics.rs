//! The user's code that panics outside of its handler fails its job, and harms nothing else.

use crate::support::{PATIENCE, Scene, WORK, count, eventually, quick, within};
use lapin_retry::{BuriedReason, Event, FailureKind, Job, RetryConsumer, Settings};
use std::{fmt, panic::panic_any, time::Duration};

const JOBS: usize = 6;

/// Its `Drop` panics: as an error, or as what a panic carries.
#[derive(Debug)]
struct Bomb;

impl fmt::Display for Bomb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a bomb")
    }
}

impl std::error::Error for Bomb {}

impl Drop for Bomb {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "dropped");
    }
}

/// The first of six jobs fails like that, each time; one job at a time.
async fn all_jobs_end(
    fail: fn() -> anyhow::Error,
    classify: impl Fn(&std::num::ParseIntError) + Send + Sync + 'static,
) -> Vec<(FailureKind, String)> {
    let scene = Scene::new().await;
    scene.fill(JOBS).await;
    let settings = Settings::new(quick())
        .classify(move |error| {
            classify(error);
            None
        })
        .on_event(scene.journal.hook());
    let journal = scene.journal.clone();
    let handle = RetryConsumer::builder(scene.url(), WORK)
        .settings(settings)
        .prefetch(1)
        .handler(move |job: Job| {
            journal.begin(&job);
            async move { if job.id() == "0000" { Err(fail()) } else { Ok(()) } }
        })
        .start()
        .await
        .unwrap();
    scene.journal.until_done(JOBS - 1).await;
    assert_eq!(scene.journal.until_buried(1).await, [BuriedReason::Exhausted]);
    assert_eq!(scene.journal.attempted(), JOBS + 2, "three runs of the first");
    within("the end", handle.shutdown(Duration::from_secs(5))).await;
    handle.stopped().await.unwrap();
    assert_eq!(count(&scene.channel, WORK).await, 0);
    scene.journal.nothing_broke();
    scene.journal.all(|event| match event {
        Event::Retried { kind, error, .. } => Some((*kind, error.clone())),
        _ => None,
    })
}

#[track_caller]
fn are_panics(failures: &[(FailureKind, String)], why: &str) {
    assert_eq!(failures.len(), 2);
    for (kind, error) in failures {
        assert_eq!(*kind, FailureKind::Panic);
        assert!(error.contains(why), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_classifier_that_panics_is_a_panic_of_the_job() {
    let no_number = || "x".parse::<u8>().unwrap_err().into();
    let failures =
        all_jobs_end(no_number, |error| assert!(error.to_string().is_empty(), "too short")).await;
    are_panics(&failures, "too short");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_that_panics_when_it_is_dropped_is_a_panic_of_the_job() {
    are_panics(&all_jobs_end(|| Bomb.into(), |_| {}).await, "dropped");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_whose_payload_panics_when_it_is_dropped_is_one_panic_of_the_job() {
    are_panics(&all_jobs_end(|| panic_any(Bomb), |_| {}).await, "?");
}

/// A future that panics when it is dropped after its end.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_panics_when_it_is_cut_short_does_not_leave_its_job_behind() {
    let scene = Scene::new().await;
    scene.fill(1).await;
    let journal = scene.journal.clone();
    let handle = RetryConsumer::builder(scene.url(), WORK)
        .settings(scene.settings())
        .handler(move |job: Job| {
            journal.begin(&job);
            async move {
                let _bomb = Bomb;
                std::future::pending().await
            }
        })
        .start()
        .await
        .unwrap();
    eventually("it runs", PATIENCE, async || scene.journal.attempted() == 1).await;
    within("the end", handle.shutdown(Duration::ZERO)).await;
    handle.stopped().await.unwrap();
    let kinds = scene.journal.all(|event| match event {
        Event::Retried { kind, .. } => Some(*kind),
        _ => None,
    });
    assert_eq!(kinds, [FailureKind::Panic]);
    assert_eq!(count(&scene.channel, WORK).await, 0);
}
