//! Judges what was seen. Pure.

use std::time::Duration;

use lapin::types::{AMQPValue, FieldTable};
use serde_json::{Map, Value, json};

use super::{
    Finding, Severity,
    seen::{By, Policy, Queue, Seen, Version},
};
use crate::{
    QueueSpec, Topology,
    topology::{DELIVERY_LIMIT, Kind, Name, delete_queue, literally, set_policy, shell},
};

/// A 4.x broker's delivery limit where a quorum queue has none of its own.
const BROKERS_LIMIT: i64 = 20;

pub(super) struct Asked<'a> {
    pub(super) vhost: &'a str,
    pub(super) topology: &'a Topology,
    /// The queues were declared or verified just now.
    pub(super) verified: bool,
    /// How long a job may stay unacked.
    pub(super) held: Duration,
}

pub(super) fn findings(asked: &Asked<'_>, seen: &Seen) -> Vec<Finding> {
    let mut found = Vec::from_iter(asked.broker(seen.version));
    match seen.queues.get(asked.topology.work_queue()) {
        Some(queue) => found.extend(asked.work_queue(queue, seen.version)),
        None => found.push(asked.finding(
            Severity::Unchecked,
            asked.topology.work_queue(),
            "not looked at: the management API does not list it".to_owned(),
            "let its user see the vhost".to_owned(),
        )),
    }
    let ours = |name: &str| {
        let name = Name::parse(name)?;
        (name.work_queue == asked.topology.work_queue()).then_some(name.kind)
    };
    for (name, queue) in &seen.queues {
        if let Some(kind) = ours(name) {
            found.extend(asked.policies_on_ours(name, kind, queue));
        }
    }
    for spec in asked.topology.queues().chain(asked.topology.queues_on_first_use()) {
        match seen.queues.get(&spec.name) {
            Some(queue) => found.extend(asked.arguments(spec, queue)),
            None if asked.verified || asked.topology.is_on_first_use(&spec.name) => {}
            None => found.push(asked.missing(spec)),
        }
    }
    merged(found)
}

/// What is wrong with many queues in the same way is one finding.
fn merged(found: Vec<Finding>) -> Vec<Finding> {
    let mut merged: Vec<(Finding, usize)> = Vec::new();
    for finding in found {
        match merged.iter_mut().find(|(first, _)| first.problem == finding.problem) {
            Some((first, more)) => {
                first.severity = first.severity.max(finding.severity);
                *more += 1;
            }
            None => merged.push((finding, 0)),
        }
    }
    let told = |(mut finding, more): (Finding, usize)| {
        if more > 0 {
            finding.problem += &format!(" (the same on {more} more of its queues)");
            finding.remedy += "; and likewise for the others, where this is for one queue";
        }
        finding
    };
    merged.into_iter().map(told).collect()
}

impl Asked<'_> {
    fn finding(&self, severity: Severity, queue: &str, problem: String, remedy: String) -> Finding {
        Finding { severity, queue: queue.to_owned(), problem, remedy }
    }

    fn broker(&self, version: Version) -> Option<Finding> {
        let (problem, upgrade) = if version < Version(3, 10, 0) {
            ("has no at-least-once dead-lettering: jobs that expire in a lane can be lost", "3.10")
        } else if (Version(3, 13, 0)..Version(3, 13, 3)).contains(&version) {
            (
                "takes some dead-lettered messages for a cycle and drops them \
                 (rabbitmq-server issue 11159)",
                "3.13.3",
            )
        } else {
            return None;
        };
        let problem = format!("RabbitMQ {version} {problem}");
        let remedy = format!("upgrade the broker to {upgrade} or later");
        Some(self.finding(Severity::Loss, self.topology.work_queue(), problem, remedy))
    }

    fn work_queue(&self, queue: &Queue, version: Version) -> Vec<Finding> {
        let name = self.topology.work_queue();
        let mut found = Vec::new();
        let mut tell = |severity, problem: String, remedy| {
            found.push(self.finding(severity, name, problem, remedy));
        };
        let anew = |how: &str| {
            let delete = delete_queue(self.vhost, name);
            format!("once it is empty: {delete}; then declare it {how}")
        };
        let by = |by: By<'_>, how: &str| match by {
            By::Argument => anew(how),
            By::Policy(_) => self.mended_policy(queue),
            By::OperatorPolicy(policy) => self.clear(policy),
        };
        if !queue.durable {
            let problem = "it is not durable: a restart of the broker loses it with its jobs";
            tell(Severity::Loss, problem.to_owned(), anew("durable"));
        }
        if queue.auto_delete {
            let problem = "it is auto-delete: when its last consumer goes, as in a pause, it is \
                           deleted with its jobs";
            tell(Severity::Loss, problem.to_owned(), anew("without auto-delete"));
        }
        for (who, value) in queue.set("expires") {
            let problem = format!(
                "{who} sets expires to {value} ms: unused for so long, as in a pause, it is deleted \
                 with its jobs"
            );
            tell(Severity::Loss, problem, by(who, "without x-expires"));
        }
        for key in ["max-length", "max-length-bytes"] {
            let Some((who, limit)) = queue.smallest(key) else { continue };
            let (severity, what) = if queue.refuses_when_full() {
                let what = "when it is full, the lanes try again every three minutes only, and \
                            bring back a handful of jobs each time";
                (Severity::Trouble, what)
            } else if queue.has_dead_letter_exchange() {
                (Severity::Trouble, "when it is full, its oldest jobs leave it without a run")
            } else {
                (Severity::Loss, "when it is full, it drops its oldest jobs")
            };
            let problem = format!("{who} sets {key} to {limit}: {what}");
            tell(severity, problem, by(who, &format!("without x-{key}")));
        }
        if let Some(problem) = drops_jobs(queue, version) {
            tell(Severity::Loss, problem, self.mended_policy(queue));
        }
        if let Some((who, limit)) = consumer_timeout(queue, version)
            && self.held >= limit
        {
            let problem = format!(
                "{who} sets the consumer timeout to {}, and a job may be held for {}: the broker \
                 takes it away and delivers it again while it still runs",
                humantime::format_duration(limit),
                humantime::format_duration(self.held)
            );
            let remedy = match who {
                By::Policy(_) => self.mended_policy(queue),
                _ => by(who, "with a longer x-consumer-timeout"),
            };
            let here = "or set the consumer's handler_timeout and consumer_timeout to less";
            tell(Severity::Trouble, problem, format!("{remedy}; {here}"));
        }
        found
    }

    /// The policy that the work queue has, but without what harms, for this queue alone.
    fn mended_policy(&self, queue: &Queue) -> String {
        let name = self.topology.work_queue();
        let (mut definition, priority) = match &queue.policy {
            Some(policy) => (policy.definition.clone(), policy.priority.saturating_add(1)),
            None => (Map::new(), 0),
        };
        for key in ["expires", "max-length", "max-length-bytes"] {
            definition.remove(key);
        }
        if definition.contains_key("consumer-timeout") {
            let long = u64::try_from(self.held.as_millis()).unwrap_or(u64::MAX);
            definition.insert("consumer-timeout".to_owned(), json!(long.saturating_mul(2)));
        }
        if !queue.has_dead_letter_exchange() {
            let buried = self.topology.buried().name.as_str();
            definition.insert("dead-letter-exchange".to_owned(), json!(""));
            definition.insert("dead-letter-routing-key".to_owned(), json!(buried));
        }
        if definition.is_empty() {
            // An empty policy is refused. Ten years change nothing.
            definition.insert("message-ttl".to_owned(), json!(315_360_000_000_u64));
        }
        let pattern = format!("^{}$", literally(name));
        let definition = Value::Object(definition).to_string();
        let own = format!("lapin-retry-{name}-work-queue");
        set_policy(self.vhost, priority, &own, &pattern, &definition)
    }

    fn clear(&self, operator: &Policy) -> String {
        let (vhost, name) = (shell(self.vhost), shell(&operator.name));
        format!(
            "no policy keeps an operator policy off; set it anew with a pattern that does not match \
             this queue, or: rabbitmqctl clear_operator_policy -p {vhost} {name}"
        )
    }

    fn policies_on_ours(&self, name: &str, kind: Kind, queue: &Queue) -> Vec<Finding> {
        let buried = kind == Kind::Buried;
        let mut found = Vec::new();
        for (by, policy) in queue.policies() {
            for (key, value) in &policy.definition {
                let text = value.as_str().unwrap_or_default();
                let (loses, what) = match key.as_str() {
                    "overflow" if text != "reject-publish" => (
                        true,
                        "a full queue drops jobs, and at-least-once dead-lettering is off in quorum lanes",
                    ),
                    "message-ttl" => {
                        (buried, "jobs come back too early, and leave the buried queue unseen")
                    }
                    "expires" => (true, "an unused queue is deleted with its jobs"),
                    // How the buried queue is to be limited, if at all.
                    "max-length" | "max-length-bytes" if buried && queue.refuses_when_full() => {
                        continue;
                    }
                    "max-length" | "max-length-bytes" => (
                        buried,
                        "a full lane refuses jobs, which stay unacked with their workers, and a full \
                         buried queue drops its oldest",
                    ),
                    "delivery-limit" if queue.quorum && lowers_the_limit(value) => (
                        buried,
                        "jobs that are delivered more often, as when somebody looks at them, are \
                         dropped from the buried queue, and leave a lane too early",
                    ),
                    _ => continue,
                };
                let severity = if loses { Severity::Loss } else { Severity::Trouble };
                let remedy = match by {
                    By::OperatorPolicy(policy) => self.clear(policy),
                    _ => {
                        let mut shield = self.topology.shield();
                        if shield.name != policy.name {
                            let above = policy.priority.saturating_add(1);
                            shield.priority = shield.priority.max(above);
                        }
                        shield.command(self.vhost)
                    }
                };
                let problem = format!("{by} sets {key} to {value}: {what}");
                found.push(self.finding(severity, name, problem, remedy));
            }
        }
        found
    }

    fn arguments(&self, spec: &QueueSpec, queue: &Queue) -> Vec<Finding> {
        let mut differ = Vec::new();
        if !queue.durable {
            differ.push("it is not durable".to_owned());
        }
        if queue.auto_delete {
            differ.push("it is auto-delete".to_owned());
        }
        let wanted = object(&spec.arguments);
        let mut there = queue.arguments.clone();
        // A classic queue need not have been declared with its type.
        let kind = if queue.quorum { "quorum" } else { "classic" };
        there.insert("x-queue-type".to_owned(), json!(kind));
        for (key, value) in &wanted {
            match there.get(key) {
                Some(is) if is == value => {}
                Some(is) => differ.push(format!("its argument {key} is {is} and not {value}")),
                None => differ.push(format!("its argument {key} is not {value} but missing")),
            }
        }
        let more = there.iter().filter(|(key, _)| !wanted.contains_key(*key));
        differ.extend(more.map(|(key, value)| format!("it has the argument {key} = {value}")));
        let delete = delete_queue(self.vhost, &spec.name);
        let remedy = format!(
            "take out what is in it, or let it run empty; then: {delete}; a worker with declare = \
             \"create\" makes it anew"
        );
        let tell = |problem| self.finding(Severity::Loss, &spec.name, problem, remedy.clone());
        differ.into_iter().map(tell).collect()
    }

    fn missing(&self, spec: &QueueSpec) -> Finding {
        self.finding(
            Severity::Trouble,
            &spec.name,
            "it does not exist: jobs that are to go there stay unacked with their workers"
                .to_owned(),
            "start a worker with declare = \"create\" once, or import the definitions".to_owned(),
        )
    }
}

/// Of a policy and the argument the lower one counts; below zero is without limit.
fn lowers_the_limit(value: &Value) -> bool {
    value.as_i64().is_some_and(|limit| (0..DELIVERY_LIMIT).contains(&limit))
}

/// Whether a quorum queue drops what was delivered too often.
fn drops_jobs(queue: &Queue, version: Version) -> Option<String> {
    if !queue.quorum || queue.has_dead_letter_exchange() {
        return None;
    }
    let since_4 = version >= Version(4, 0, 0);
    let limits = || {
        let set = queue.set("delivery-limit");
        set.filter_map(|(by, value)| Some((by.to_string(), value.as_i64()?)))
    };
    let (who, limit) = match limits().min_by_key(|limit| limit.1) {
        // Below zero is without limit since 4.0, and wins unless another sets one.
        Some((_, least)) if least < 0 && since_4 => limits().find(|limit| limit.1 >= 0)?,
        // On an older broker it is the first delivery.
        Some((by, limit)) => (by, limit.max(0)),
        None if since_4 => ("the broker's default".to_owned(), BROKERS_LIMIT),
        None => return None,
    };
    if limit >= DELIVERY_LIMIT {
        return None;
    }
    Some(format!(
        "{who} sets its delivery limit to {limit}, and it has no dead-letter exchange: a job that is \
         delivered more often, as when workers crash, is dropped"
    ))
}

/// Where the broker heeds it. 3.10 does not, nor does 4.3 on classic queues.
fn consumer_timeout(queue: &Queue, version: Version) -> Option<(By<'_>, Duration)> {
    if version < Version(3, 12, 0) || (!queue.quorum && version >= Version(4, 3, 0)) {
        return None;
    }
    let (by, ms) = queue.smallest("consumer-timeout")?;
    Some((by, Duration::from_millis(u64::try_from(ms).unwrap_or(0))))
}

fn object(table: &FieldTable) -> Map<String, Value> {
    let json = |value: &AMQPValue| match value {
        AMQPValue::LongLongInt(number) => json!(number),
        AMQPValue::LongString(text) => json!(text.to_string()),
        other => json!(format!("{other:?}")),
    };
    table.into_iter().map(|(key, value)| (key.to_string(), json(value))).collect()
}

#[cfg(test)]
mod tests;
