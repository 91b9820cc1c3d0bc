//! Messages that are too large, too many or too strange to fit: bodies, error texts, headers near the
//! frame's limit. None is lost, and none is in the way of the job behind it.

use crate::support::{Journal, Scene, WORK, header, quick, table, text};
use lapin::{
    BasicProperties,
    types::{AMQPValue, FieldTable},
};
use lapin_retry::{Event, Handle, Job, QueueType, RetryConsumer};
use std::{
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

/// The most that the headers may be together so that the broker takes the message.
const FRAME: usize = 131_000;

fn long_string(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

/// `number` headers that together have about `bytes` on the wire.
fn many(number: usize, bytes: usize) -> FieldTable {
    let mut headers = FieldTable::default();
    for n in 0..number {
        let name = format!("user-{n:05}");
        let value = "x".repeat(bytes / number - name.len() - 6);
        headers.insert(name.into(), long_string(&value));
    }
    headers
}

/// Fails each job but those with the body `good`.
async fn consumer(scene: &Scene, journal: &Journal) -> Handle {
    failing_with(scene, journal, || anyhow::anyhow!("no use")).await
}

async fn failing_with(
    scene: &Scene,
    journal: &Journal,
    error: impl Fn() -> anyhow::Error + Send + Sync + 'static,
) -> Handle {
    let error = Arc::new(error);
    RetryConsumer::builder(scene.url(), WORK)
        .policy(quick())
        .on_event(journal.hook())
        .handler(move |job: Job| {
            let error = Arc::clone(&error);
            async move { if job.body() == b"good" { Ok(()) } else { Err(error()) } }
        })
        .start()
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_of_any_size_comes_back_as_it_was() {
    let scene = Scene::new().await;
    let large: Vec<u8> = (0..10_000_000u32).map(|n| (n % 251) as u8).collect();
    let bodies = [vec![], vec![0], large];
    for (index, body) in bodies.iter().enumerate() {
        scene.job(&format!("{index}"), table([]), body).await;
    }
    let second = Arc::new(Mutex::new(Vec::new()));
    let journal = Journal::default();
    let handle = RetryConsumer::builder(scene.url(), WORK)
        .policy(quick())
        .on_event(journal.hook())
        .handler({
            let second = Arc::clone(&second);
            move |job: Job| {
                let second = Arc::clone(&second);
                async move {
                    anyhow::ensure!(job.retry_count() > 0, "the first attempt");
                    second.lock().unwrap().push((job.id().to_owned(), job.body().to_vec()));
                    Ok(())
                }
            }
        })
        .start()
        .await
        .unwrap();
    for id in ["0", "1", "2"] {
        journal.is_done(id).await;
    }
    let mut second = std::mem::take(&mut *second.lock().unwrap());
    second.sort();
    for (index, (id, body)) in second.into_iter().enumerate() {
        assert_eq!(id, format!("{index}"));
        assert!(body == bodies[index], "body {index} has changed");
    }
    journal.nothing_broke();
    handle.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_does_not_decode_is_buried_as_undecodable() {
    let scene = Scene::new().await;
    let bodies: [(&str, &[u8]); 7] = [
        ("application/json", b""),
        ("application/json", b"{\"id\": 1"),
        ("application/json", b"\xFF\xFE\x00"),
        ("application/msgpack", b""),
        ("application/msgpack", b"\xC1"),
        ("application/msgpack", b"{\"id\": 1}"),
        ("text/plain", b"1"),
    ];
    for (index, (content_type, body)) in bodies.iter().enumerate() {
        let properties = BasicProperties::default()
            .with_message_id(format!("{index}").into())
            .with_content_type((*content_type).into());
        scene.publish(properties, body).await;
    }
    // A reader that recursed without limit would overflow the stack.
    let deep = vec![b'['; 100_000];
    let json = BasicProperties::default().with_content_type("application/json".into());
    scene.publish(json.with_message_id("deep".into()), &deep).await;
    let pack = BasicProperties::default().with_content_type("application/msgpack".into());
    let deep = vec![0x91; 100_000];
    scene.publish(pack.with_message_id("deep pack".into()), &deep).await;
    let journal = Journal::default();
    let handle = RetryConsumer::builder(scene.url(), WORK)
        .policy(quick())
        .on_event(journal.hook())
        .handler(|job: Job| async move {
            let _: serde_json::Value = job.decode()?;
            Ok(())
        })
        .start()
        .await
        .unwrap();
    for (id, message) in scene.buried(bodies.len() + 2).await {
        let properties = &message.properties;
        assert_eq!(text(properties, "buried-reason").as_deref(), Some("undecodable"), "{id}");
        assert_eq!(text(properties, "retry-error-kind").as_deref(), Some("undecodable"), "{id}");
    }
    journal.nothing_broke();
    handle.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_text_of_a_megabyte_is_cut_to_a_kilobyte_between_characters() {
    for offset in 0..4 {
        let scene = Scene::of(QueueType::Classic).await;
        scene.job("1", table([]), b"bad").await;
        let journal = Journal::default();
        let long = "a".repeat(offset) + &"𝄞".repeat(1 << 18);
        let handle = failing_with(&scene, &journal, move || anyhow::anyhow!(long.clone())).await;
        let properties = &scene.buried(1).await["1"].properties;
        let error = text(properties, "retry-error").unwrap();
        assert!(error.len() <= 1024 && error.len() > 1000, "{} bytes", error.len());
        assert!(error.trim_start_matches('a').starts_with('𝄞') && error.ends_with('…'));
        journal.nothing_broke();
        handle.shutdown(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_text_with_control_characters_travels() {
    let scene = Scene::new().await;
    scene.job("1", table([]), b"bad").await;
    let journal = Journal::default();
    let error = "nul \0, escape \u{1b}[31m, newline \r\n, \u{7f}, \u{202e}, \u{fffd}";
    let handle = failing_with(&scene, &journal, move || anyhow::anyhow!(error)).await;
    let properties = &scene.buried(1).await["1"].properties;
    assert_eq!(text(properties, "retry-error").as_deref(), Some(error));
    journal.nothing_broke();
    handle.shutdown(Duration::from_secs(5)).await;
}

/// Its text is asked for when the job is settled, outside of the handler.
#[derive(Debug)]
struct Unspeakable;

impl fmt::Display for Unspeakable {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        panic!("this error's text cannot be written")
    }
}

impl std::error::Error for Unspeakable {}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_that_panics_when_it_is_written_fails_its_job_like_any_other() {
    let scene = Scene::new().await;
    scene.job("1", table([]), b"bad").await;
    let journal = Journal::default();
    let handle = failing_with(&scene, &journal, || Unspeakable.into()).await;
    let properties = &scene.buried(1).await["1"].properties;
    assert_eq!(text(properties, "buried-reason").as_deref(), Some("exhausted"));
    assert!(text(properties, "retry-error").unwrap().contains("panicked"));
    handle.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_headers_come_back_as_they_were() {
    let scene = Scene::new().await;
    let headers = many(4_000, 100_000);
    scene.job("many", headers.clone(), b"bad").await;
    scene.job("behind", table([]), b"good").await;
    let journal = Journal::default();
    let handle = consumer(&scene, &journal).await;
    journal.is_done("behind").await;
    let properties = &scene.buried(1).await["many"].properties;
    assert_eq!(text(properties, "buried-reason").as_deref(), Some("exhausted"));
    for (name, value) in headers.inner() {
        assert_eq!(header(properties, name.as_str()), Some(value));
    }
    journal.nothing_broke();
    handle.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_that_leave_no_room_are_dropped_largest_first_and_listed() {
    let scene = Scene::new().await;
    let mut few = many(10, 60_000);
    few.insert("largest".into(), long_string(&"x".repeat(FRAME - 60_000 - 40)));
    scene.job("few", few, b"bad").await;
    // Of equal size, so that hundreds have to go.
    scene.job("many", many(5_000, FRAME - 10), b"bad").await;
    scene.job("behind", table([]), b"good").await;
    let journal = Journal::default();
    let handle = consumer(&scene, &journal).await;
    journal.is_done("behind").await;

    let buried = scene.buried(2).await;

    for (id, message) in &buried {
        let properties = &message.properties;
        assert_eq!(text(properties, "buried-reason").as_deref(), Some("too-large"), "{id}");
        assert_eq!(message.data, b"bad");
    }
    let few = &buried["few"].properties;
    let dropped = text(few, "buried-dropped-headers").unwrap();
    assert!(dropped.starts_with("largest (70"), "{dropped}");
    assert_eq!(header(few, "largest"), None);
    assert!((0..10).all(|n| header(few, &format!("user-{n:05}")).is_some()));
    let many = &buried["many"].properties;
    let dropped = text(many, "buried-dropped-headers").unwrap();
    assert!(dropped.starts_with("user-04999 (") && dropped.len() <= 1024, "{dropped}");
    assert!(header(many, "user-00000").is_some());
    let left = many.headers().as_ref().unwrap().inner().len();
    assert!(left > 4_000, "{left} of 5,000 are left");
    journal.nothing_broke();
    handle.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_odd_value_of_ours_outlives_larger_foreign_headers() {
    let scene = Scene::new().await;
    let mut headers = many(2, FRAME - 200);
    headers.insert("retry-queue".into(), long_string(WORK));
    headers.insert("retry-count".into(), long_string("abc"));
    scene.job("1", headers, b"bad").await;
    let journal = Journal::default();
    let handle = consumer(&scene, &journal).await;
    let properties = &scene.buried(1).await["1"].properties;
    assert_eq!(text(properties, "buried-reason").as_deref(), Some("too-large"));
    assert_eq!(text(properties, "retry-count").as_deref(), Some("abc"));
    assert!(text(properties, "buried-dropped-headers").unwrap().starts_with("user-00001 ("));
    journal.nothing_broke();
    handle.shutdown(Duration::from_secs(5)).await;
}

/// The largest that leaves room for ours and for what a lane adds is retried as it is.
#[tokio::test(flavor = "multi_thread")]
async fn headers_just_under_the_limit_make_every_trip_and_those_that_succeed_are_left_alone() {
    let scene = Scene::new().await;
    scene.job("bad", many(1, FRAME - 4_096 - 1_500), b"bad").await;
    scene.job("good", many(1, FRAME - 10), b"good").await;
    let journal = Journal::default();
    let handle = consumer(&scene, &journal).await;
    journal.is_done("good").await;
    let properties = &scene.buried(1).await["bad"].properties;
    assert_eq!(text(properties, "buried-reason").as_deref(), Some("exhausted"));
    assert!(header(properties, "user-00000").is_some());
    let trips = journal.all(|event| matches!(event, Event::Retried { .. }).then_some(()));
    assert_eq!(trips.len(), 2);
    journal.nothing_broke();
    handle.shutdown(Duration::from_secs(5)).await;
}
