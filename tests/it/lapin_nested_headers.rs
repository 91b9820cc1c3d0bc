//! lapin reads nested tables by recursion, on a thread with the stack that Rust gives to every thread.
//! A message of a few kilobytes of tables in tables therefore ends the process of whoever consumes it,
//! and of the next one. The only cure is more stack, by `RUST_MIN_STACK`.

use crate::support::{
    BURIED, HEADERS, Journal, RawPublisher, Scene, WORK, connect, header, quick, raw_table, short,
    text,
};
use lapin::options::BasicGetOptions;
use lapin_retry::{Job, RetryConsumer};
use std::{process::Output, time::Duration};

/// 24 KB of headers. The deeper they are, the slower is the broker, too.
const LEVELS: usize = 4_000;
const CHILD: &str = "LAPIN_RETRY_TEST_CHILD";

/// Runs the calling test once more in a process of its own, in the vhost at `url`.
fn in_a_child(url: &str, stack: &str) -> Output {
    let this = std::thread::current().name().expect("the test's name").to_owned();
    std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &this, "--nocapture"])
        .env(CHILD, url)
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

/// A failed job with deeply nested headers makes every trip and is buried. The vhost is the parent's,
/// for this process may not live to delete it.
async fn retried_and_buried(url: &str) {
    let journal = Journal::default();
    let handle = RetryConsumer::builder(url, WORK)
        .policy(quick())
        .on_event(journal.hook())
        .handler(|_: Job| async { anyhow::bail!("no use") })
        .start()
        .await
        .unwrap();
    journal.until_buried(1).await;
    let channel = connect(url).await.create_channel().await.unwrap();
    let buried = channel.basic_get(BURIED.into(), BasicGetOptions { no_ack: true }).await.unwrap();
    let properties = buried.expect("a buried job").delivery.properties;
    assert!(header(&properties, "deep").is_some());
    assert!(text(&properties, "buried-reason").is_some());
    journal.nothing_broke();
    handle.shutdown(Duration::from_secs(5)).await;
}

async fn with_a_nested_job() -> Scene {
    let scene = Scene::new().await;
    RawPublisher::connect(&scene.url()).publish(WORK, HEADERS, &nested(LEVELS), b"bad");
    scene
}

#[tokio::test(flavor = "multi_thread")]
async fn deeply_nested_headers_end_the_process_of_a_lapin_consumer() {
    if let Ok(url) = std::env::var(CHILD) {
        return retried_and_buried(&url).await;
    }
    let scene = with_a_nested_job().await;
    let output = in_a_child(&scene.url(), "2097152");
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("lapin-io-loop") && said.contains("overflowed its stack"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_larger_stack_deeply_nested_headers_are_retried_and_buried() {
    if let Ok(url) = std::env::var(CHILD) {
        return retried_and_buried(&url).await;
    }
    let scene = with_a_nested_job().await;
    let output = in_a_child(&scene.url(), "536870912");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
