//! The worked topology in `topology/` is what the code declares.

use lapin::{options::QueueDeclareOptions, types::AMQPValue};
use lapin_retry::{Declare, QueueType, Retry, RetryPolicy, Settings, Topology};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::support::{PATIENCE, Scene, Vhost, eventually, table};

#[path = "../../examples/definitions.rs"]
#[expect(dead_code, reason = "the example's main")]
mod example;

const TOML: &str = include_str!("../../topology/orders.toml");
const COMMITTED: &str = include_str!("../../topology/definitions.json");

#[test]
fn the_definitions_file_is_what_the_example_prints() {
    assert_eq!(
        COMMITTED,
        example::definitions(TOML).unwrap(),
        "run: cargo run --example definitions -- topology/orders.toml > topology/definitions.json"
    );
}

#[test]
fn a_queue_name_stands_for_itself_in_the_shield_of_the_definitions() {
    let toml = "queue = \"a.b+c_d-e\"\n[policy]\nlevels = [1]";
    let definitions: Value = serde_json::from_str(&example::definitions(toml).unwrap()).unwrap();
    assert_eq!(definitions["policies"][0]["pattern"], r"^a\.b\+c_d-e\.(retry\..*|buried)$");
}

#[test]
fn the_readmes_tell_of_the_shield_that_the_topology_makes() {
    let topology = Topology::new("orders", RetryPolicy::default(), QueueType::Quorum).unwrap();
    let command = topology.shield().command("/");
    for text in [include_str!("../../README.md"), include_str!("../../topology/README.md")] {
        let words: Vec<_> = text.split_whitespace().filter(|word| *word != "\\").collect();
        assert!(words.join(" ").contains(&command), "{command}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn imported_queues_are_those_that_a_worker_declares() {
    let (imported, declared) = (Vhost::new().await, Scene::bare().await);
    let text = |text: &str| AMQPValue::LongString(text.into());
    let arguments = table([
        ("x-queue-type", text("quorum")),
        ("x-dead-letter-exchange", text("")),
        ("x-dead-letter-routing-key", text("orders.buried")),
    ]);
    let durable = QueueDeclareOptions::durable();
    declared.channel.queue_declare("orders".into(), durable, arguments).await.unwrap();
    imported.api().import(&committed());
    for mode in [Declare::Create, Declare::Check] {
        attach(&imported.url(), mode).await.close().await.unwrap();
    }

    attach(&declared.url(), Declare::Create).await.close().await.unwrap();

    let queues = queues(&imported);
    assert_eq!(queues.len(), 58);
    assert_eq!(queues, self::queues(&declared.vhost));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_shield_of_the_definitions_keeps_other_policies_off_our_queues_alone() {
    let vhost = Vhost::new().await;
    vhost.api().set_policy("theirs", "^orders", 999, &json!({ "message-ttl": 1 }));
    vhost.api().import(&committed());
    let names = vhost.api().queues();
    assert_eq!(names.len(), 58);
    for name in names {
        let (policy, definition) = match name.as_str() {
            "orders" => ("theirs", json!({ "message-ttl": 1 })),
            _ => ("lapin-retry-orders", json!({ "overflow": "reject-publish" })),
        };
        // A policy takes effect a moment later.
        eventually(&format!("{policy} on {name}"), PATIENCE, async || {
            let queue = vhost.api().queue(&name).unwrap();
            queue["policy"] == policy && queue["effective_policy_definition"] == definition
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_may_do_with_the_permissions_of_the_topology_readme_what_it_must() {
    let vhost = Vhost::new().await;
    vhost.api().import(&committed());
    let (ours, all) = (r"^orders\.(retry\..*|buried)$", r"^orders($|\.(retry\..*|buried)$)");
    for (mode, configure) in [(Declare::Create, ours), (Declare::Check, "^$")] {
        let worker = vhost.user(configure, r"^amq\.default$", all);
        attach(&worker.url(), mode).await.close().await.unwrap();
    }
}

fn committed() -> Value {
    serde_json::from_str(COMMITTED).unwrap()
}

async fn attach(url: &str, mode: Declare) -> Retry {
    #[derive(Deserialize)]
    struct File {
        queue: String,
        policy: RetryPolicy,
    }
    let file: File = toml::from_str(TOML).unwrap();
    Retry::attach(url, &file.queue, Settings::new(file.policy).declare(mode)).await.unwrap()
}

/// What was declared about each queue of the vhost.
fn queues(vhost: &Vhost) -> Vec<Value> {
    let describe = |name: String| {
        let queue = vhost.api().queue(&name).unwrap();
        let told = ["name", "arguments", "durable", "auto_delete", "exclusive", "type"];
        told.iter().map(|&key| (key.to_owned(), queue[key].clone())).collect()
    };
    vhost.api().queues().into_iter().map(describe).collect()
}
