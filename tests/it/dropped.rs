//! Jobs of a user's own loop that are dropped unsettled: nothing spins, and nothing is lost.

use crate::support::{
    PATIENCE, Scene, WORK, connect, consume, count, eventually, quick, table, type_name, within,
};
use futures_util::{FutureExt, StreamExt, stream::FuturesUnordered};
use lapin::{Connection, options::QueueDeclareOptions, types::AMQPValue};
use lapin_retry::{
    BuriedReason, Event, FailureKind, Jobs, Postponed, QueueType, Retry, Settings, UnsettledJob,
};
use std::{future::pending, panic::AssertUnwindSafe, time::Duration};
use tokio::task::JoinSet;

/// A loop of its own for each, with connections of its own.
struct Worker {
    retry: Retry,
    jobs: Jobs,
    connection: Connection,
}

async fn worker(scene: &Scene, prefetch: u16) -> Worker {
    let settings = Settings::new(quick()).on_event(scene.journal.hook());
    let retry = Retry::attach(scene.url(), WORK, settings).await.unwrap();
    let connection = connect(&scene.url()).await;
    let channel = connection.create_channel().await.unwrap();
    let jobs = retry.jobs(consume(&channel, WORK, prefetch).await);
    Worker { retry, jobs, connection }
}

impl Worker {
    async fn job(&mut self) -> UnsettledJob {
        within("a job", self.jobs.next()).await.expect("no end").expect("no error")
    }

    async fn take(&mut self, jobs: usize) -> Vec<UnsettledJob> {
        let mut taken = Vec::new();
        for _ in 0..jobs {
            taken.push(self.job().await);
        }
        taken
    }

    /// All that it had is acked or nacked.
    async fn ends(self, scene: &Scene) {
        drop(self.jobs);
        within("the close", self.retry.close()).await.unwrap();
        self.connection.close(200, "done".into()).await.unwrap();
        scene.holds(WORK, 0).await;
    }
}

/// Jobs that wait without being charged, because they were dropped.
fn postponed(scene: &Scene) -> usize {
    let dropped = |why: &Postponed| *why == Postponed::Dropped;
    scene.journal.count(|event| matches!(event, Event::Postponed { why, .. } if dropped(why)))
}

fn given_back(scene: &Scene) -> usize {
    scene.journal.count(|event| matches!(event, Event::GivenBack { .. }))
}

fn retried(scene: &Scene) -> Vec<FailureKind> {
    scene.journal.all(|event| match event {
        Event::Retried { kind, .. } => Some(*kind),
        _ => None,
    })
}

async fn one_that_panics_in_its_task_is_a_panic(kind: QueueType) {
    let scene = Scene::of(kind).await;
    let ids = scene.fill(5).await;
    let mut worker = worker(&scene, 5).await;
    let mut runs = 0;
    while scene.journal.handed_off().len() < 5
        || scene.journal.count(|event| matches!(event, Event::Buried { .. })) < 5
    {
        let Ok(job) = tokio::time::timeout(Duration::from_millis(200), worker.job()).await else {
            continue;
        };
        runs += 1;
        assert!(runs <= 15, "three runs each");
        tokio::spawn(async move {
            let job: UnsettledJob = job;
            assert!(job.body().is_empty(), "the handler panics");
            job.settle(anyhow::Ok(())).await
        });
    }
    assert_eq!(runs, 15);
    assert_eq!(scene.journal.until_buried(5).await, [BuriedReason::Exhausted; 5]);
    assert_eq!(retried(&scene), [FailureKind::Panic; 10]);
    worker.ends(&scene).await;
    assert_eq!(scene.buried(5).await.into_keys().collect::<Vec<_>>(), Vec::from_iter(ids));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_task_panics_is_charged_a_panic_at_each_run_from_a_quorum_queue() {
    one_that_panics_in_its_task_is_a_panic(QueueType::Quorum).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_task_panics_is_charged_a_panic_at_each_run_from_a_classic_queue() {
    one_that_panics_in_its_task_is_a_panic(QueueType::Classic).await;
}

/// As `?` before the settle does.
async fn one_that_is_dropped_quietly_does_not_spin(kind: QueueType) {
    let scene = Scene::of(kind).await;
    scene.fill(1).await;
    let mut worker = worker(&scene, 1).await;
    // The first time it is requeued, the second time it leaves as a copy.
    for run in 1..=4 {
        let job = worker.job().await;
        assert_eq!(job.redelivered(), run % 2 == 0, "run {run}");
        drop(job);
    }
    eventually("the second copy", PATIENCE, async || postponed(&scene) == 2).await;
    eventually("both are reported", PATIENCE, async || given_back(&scene) == 2).await;
    let job = worker.job().await;
    assert_eq!((job.id(), job.retry_count()), ("0000", 0));
    job.settle(anyhow::Ok(())).await.unwrap();
    worker.ends(&scene).await;
    assert_eq!(scene.journal.done(), ["0000"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_is_dropped_again_and_again_is_postponed_each_second_time_in_a_quorum_queue() {
    one_that_is_dropped_quietly_does_not_spin(QueueType::Quorum).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_is_dropped_again_and_again_is_postponed_each_second_time_in_a_classic_queue() {
    one_that_is_dropped_quietly_does_not_spin(QueueType::Classic).await;
}

/// RabbitMQ 4.0 drops a job after the third return, 3.10 as well; of 4.3 a nack does not count.
#[tokio::test(flavor = "multi_thread")]
async fn three_workers_that_drop_a_job_do_not_use_up_a_delivery_limit_of_two() {
    let scene = Scene::bare().await;
    let arguments = table([
        ("x-queue-type", AMQPValue::LongString(type_name(QueueType::Quorum).into())),
        ("x-delivery-limit", AMQPValue::LongInt(2)),
    ]);
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    scene.channel.queue_declare(WORK.into(), durable, arguments).await.unwrap();
    scene.fill(1).await;
    let mut tasks = JoinSet::new();
    let mut ends = Vec::new();
    for _ in 0..3 {
        let Worker { retry, mut jobs, connection } = worker(&scene, 1).await;
        ends.push((retry, connection));
        let journal = scene.journal.clone();
        tasks.spawn(async move {
            while let Some(Ok(job)) = jobs.next().await {
                let dropped = |event: &Event| matches!(event, Event::GivenBack { .. });
                if journal.count(dropped) < 3 {
                    drop(job);
                } else {
                    job.settle(anyhow::Ok(())).await.unwrap();
                }
            }
        });
    }
    scene.journal.until_done(1).await;
    assert_eq!(postponed(&scene), 2, "after the third return it was done");
    tasks.shutdown().await;
    for (retry, connection) in ends {
        retry.close().await.unwrap();
        connection.close(200, "done".into()).await.unwrap();
    }
    scene.holds(WORK, 0).await;
    assert_eq!(scene.journal.done(), ["0000"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_one_panic_drops_together_are_postponed_and_charged_to_none() {
    let scene = Scene::new().await;
    scene.fill(9).await;
    let mut worker = worker(&scene, 9).await;
    // All in one task, as with `buffer_unordered`: one handler panics while the others wait.
    let batch = worker.take(4).await;
    let together = tokio::spawn(async move {
        let mut handlers: FuturesUnordered<_> = batch
            .into_iter()
            .enumerate()
            .map(|(n, job)| async move {
                assert_ne!(n, 2, "the handler panics");
                pending::<()>().await;
                drop(job);
            })
            .collect();
        handlers.next().await;
    });
    assert!(together.await.unwrap_err().is_panic());
    // A batch that is worked off as one.
    let batch = worker.take(4).await;
    let caught = AssertUnwindSafe(async move {
        let batch = batch;
        assert!(batch.is_empty(), "the batch panics");
    });
    assert!(caught.catch_unwind().await.is_err());
    // Right after it, in the same task: a panic of its own.
    let job = worker.job().await;
    let caught = AssertUnwindSafe(async move {
        let job = job;
        assert!(job.body().is_empty(), "the handler panics");
    });
    assert!(caught.catch_unwind().await.is_err());
    eventually("all have left", PATIENCE, async || {
        postponed(&scene) == 8 && retried(&scene) == [FailureKind::Panic]
    })
    .await;
    assert_eq!(given_back(&scene), 0);
    for job in worker.take(9).await {
        job.settle(anyhow::Ok(())).await.unwrap();
    }
    worker.ends(&scene).await;
    assert_eq!(scene.journal.finished().len(), 9);
}

/// Their tasks are told to end, and drop them in peace.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_whose_tasks_are_cancelled_are_requeued_once() {
    let scene = Scene::new().await;
    scene.fill(4).await;
    let mut worker = worker(&scene, 4).await;
    let mut tasks = JoinSet::new();
    for job in worker.take(2).await {
        tasks.spawn(async move {
            pending::<()>().await;
            drop(job);
        });
    }
    let soon = Duration::from_millis(10);
    let job = worker.job().await;
    let slow = async move {
        pending::<()>().await;
        drop(job);
    };
    assert!(tokio::time::timeout(soon, slow).await.is_err());
    // A task that panics drops its `JoinSet`, which only aborts what is in there.
    let last = worker.job().await;
    let parent = tokio::spawn(async move {
        tasks.spawn(async move {
            pending::<()>().await;
            drop(last);
        });
        panic!("not their fault");
    });
    assert!(parent.await.unwrap_err().is_panic());
    for job in worker.take(4).await {
        assert!(job.redelivered() && job.retry_count() == 0);
        job.settle(anyhow::Ok(())).await.unwrap();
    }
    eventually("all are reported", PATIENCE, async || given_back(&scene) == 4).await;
    assert_eq!(postponed(&scene), 0);
    worker.ends(&scene).await;
    assert_eq!(scene.journal.finished().len(), 4);
    assert_eq!(count(&scene.channel, WORK).await, 0);
}
