//! Prints RabbitMQ definitions (work queue, lanes, buried queue, shield policy) for a TOML file:
//!
//! `cargo run --example definitions -- topology/orders.toml > topology/definitions.json`

use anyhow::{Context, bail};
use lapin_retry::{
    QueueType, RetryPolicy, Topology,
    lapin::types::{AMQPValue, FieldTable},
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    queue: String,
    policy: RetryPolicy,
}

fn main() -> anyhow::Result<()> {
    let path = std::env::args().nth(1).context("usage: definitions <file.toml>")?;
    let text = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    print!("{}", definitions(&text).with_context(|| format!("reading {path}"))?);
    Ok(())
}

/// The text of a definitions file, the same for the same TOML: sorted, with a newline at its end.
///
/// It names no vhost of its own, since an import would reset that vhost's description, tags and
/// default queue type; and no users.
pub(crate) fn definitions(toml: &str) -> anyhow::Result<String> {
    let wanted: Wanted = toml::from_str(toml)?;
    let topology = Topology::new(&wanted.queue, &wanted.policy, QueueType::Quorum)?;
    // RabbitMQ 4 drops what it delivered 21 times, unless the queue says where it is to go.
    let work_queue = json!({
        "x-queue-type": "quorum",
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": topology.buried().name,
    });
    let mut queues = vec![queue(&wanted.queue, work_queue)];
    for spec in topology.queues() {
        queues.push(queue(&spec.name, arguments(&spec.arguments)?));
    }
    queues.sort_by(|a, b| a["name"].as_str().cmp(&b["name"].as_str()));
    let shield = topology.shield();
    let shield = json!({
        "name": shield.name,
        "vhost": "/",
        "pattern": shield.pattern,
        "apply-to": "queues",
        "priority": shield.priority,
        "definition": serde_json::from_str::<Value>(shield.definition)?,
    });
    let all = json!({ "policies": [shield], "queues": queues });
    Ok(format!("{all:#}\n"))
}

fn queue(name: &str, arguments: Value) -> Value {
    json!({
        "name": name,
        "vhost": "/",
        "durable": true,
        "auto_delete": false,
        "arguments": arguments,
    })
}

fn arguments(table: &FieldTable) -> anyhow::Result<Value> {
    let mut object = Map::new();
    for (name, value) in table {
        let value = match value {
            AMQPValue::LongString(text) => json!(text.to_string()),
            AMQPValue::LongLongInt(number) => json!(number),
            other => bail!("{name}: {other:?} has no place in a definitions file yet"),
        };
        object.insert(name.to_string(), value);
    }
    Ok(Value::Object(object))
}
