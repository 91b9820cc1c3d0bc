//! lapin reads nested tables by recursion, on a thread with the stack that Rust gives to every thread.
//! A message of a few kilobytes of tables in tables therefore ends the process of whoever consumes it,
//! and of the next one. The only cure is more stack, by `RUST_MIN_STACK`.

use crate::support::{
    HEADERS, Journal, RawPublisher, Scene, WORK, header, quick, raw_table, short, text,
};
use lapin_retry::{Job, RetryConsumer};
use std::{process::Output, time::Duration};

/// 24 KB of headers. The deeper they are, the slower is the broker, too.
const LEVELS: usize = 4_000;
const CHILD: &str = "LAPIN_RETRY_TEST_CHILD";

/// Runs the calling test once more in a process of its own.
fn in_a_child(stack: &str) -> Output {
    let this = std::thread::current().name().expect("the test's name").to_owned();
    std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &this, "--nocapture"])
        .env(CHILD, "1")
        .env("RUST_MIN_STACK", stack)
        .output()
        .unwrap()
}

fn nested(levels: usize) -> Vec<u8> {
    // Written backwards, for the inner tables are not to be copied each time.
    let mut backwards = vec![0; 4];
    for _ in 1..levels {
        let length = u32::try_from(backwards.len() + 2).unwrap();
        backwards.extend_from_slice(&[b'F', 0]);
        backwards.extend(length.to_be_bytes().iter().rev());
    }
    backwards.reverse();
    raw_table(&[&short(b"deep"), &b"F"[..], &backwards].concat())
}

/// A failed job with deeply nested headers makes every trip and is buried.
async fn retried_and_buried() {
    let scene = Scene::new().await;
    RawPublisher::connect(&scene.url()).publish(WORK, HEADERS, &nested(LEVELS), b"bad");
    let journal = Journal::default();
    let handle = RetryConsumer::builder(scene.url(), WORK)
        .policy(quick())
        .on_event(journal.hook())
        .handler(|_: Job| async { anyhow::bail!("no use") })
        .start()
        .await
        .unwrap();
    let message = scene.buried(1).await.into_values().next().unwrap();
    assert!(header(&message.properties, "deep").is_some());
    assert!(text(&message.properties, "buried-reason").is_some());
    journal.nothing_broke();
    handle.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deeply_nested_headers_end_the_process_of_a_lapin_consumer() {
    if std::env::var_os(CHILD).is_some() {
        return retried_and_buried().await;
    }
    let output = in_a_child("2097152");
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("lapin-io-loop") && said.contains("overflowed its stack"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_larger_stack_deeply_nested_headers_are_retried_and_buried() {
    if std::env::var_os(CHILD).is_some() {
        return retried_and_buried().await;
    }
    let output = in_a_child("536870912");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
