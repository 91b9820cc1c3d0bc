use serde_json::json;

use super::*;
use crate::{Jitter, QueueType, RetryPolicy};

const V4: Version = Version(4, 3, 6);
const LANE: &str = "orders.retry.00015s";

/// What there is when all is well: a quorum work queue with a dead-letter target, and our queues
/// with the arguments that a worker declares.
fn healthy(version: Version) -> Seen {
    let mut seen = Seen { version, ..Seen::default() };
    let arguments = json!({ "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead" });
    seen.queues.insert("orders".to_owned(), queue(arguments));
    for spec in topology().queues() {
        seen.queues.insert(spec.name.clone(), queue(Value::Object(object(&spec.arguments))));
    }
    seen
}

fn topology() -> Topology {
    let policy = RetryPolicy::new([15, 30]).jitter(Jitter::None);
    Topology::new("orders", policy, QueueType::Quorum).unwrap()
}

fn map(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => panic!("{other} is no object"),
    }
}

fn queue(arguments: Value) -> Queue {
    let arguments = map(arguments);
    Queue { quorum: true, durable: true, arguments, ..Queue::default() }
}

fn policy(name: &str, definition: Value) -> Option<Policy> {
    Some(Policy { name: name.to_owned(), priority: 7, definition: map(definition) })
}

fn judged(seen: &Seen) -> Vec<Finding> {
    judged_when(true, seen)
}

fn judged_when(verified: bool, seen: &Seen) -> Vec<Finding> {
    let held = Duration::from_secs(25 * 60 + 30);
    findings(&Asked { vhost: "/", topology: &topology(), verified, held }, seen)
}

/// The one finding about a work queue that was changed like this.
fn about_work_queue(version: Version, change: impl FnOnce(&mut Queue)) -> Option<Finding> {
    let mut seen = healthy(version);
    change(seen.queues.get_mut("orders").unwrap());
    let mut found = judged(&seen);
    assert!(found.len() <= 1, "{found:#?}");
    found.pop()
}

/// The findings about queues of ours that all have this policy.
fn about_policy(names: &[&str], definition: Value) -> Vec<Finding> {
    let mut seen = healthy(V4);
    for name in names {
        seen.queues.get_mut(*name).unwrap().policy = policy("theirs", definition.clone());
    }
    judged(&seen)
}

#[track_caller]
fn is(finding: Option<Finding>, severity: Severity, queue: &str, problem: &str, remedy: &str) {
    let finding = finding.expect("a finding");
    assert_eq!((finding.severity, finding.queue.as_str()), (severity, queue), "{finding}");
    assert!(finding.problem.contains(problem), "{finding} should say {problem}");
    assert!(finding.remedy.contains(remedy), "{finding} should say {remedy}");
}

const DELETE: &str = "rabbitmqctl delete_queue -p / orders; then declare it";

#[test]
fn nothing_is_found_where_all_is_well() {
    for version in [Version(3, 10, 0), Version(3, 13, 3), Version(4, 0, 0), V4] {
        assert_eq!(judged(&healthy(version)), []);
    }
    assert_eq!(judged_when(false, &healthy(V4)), []);
}

#[test]
fn a_broker_that_is_too_old_or_has_the_cycle_bug_is_to_be_upgraded() {
    for (version, says) in [
        (Version(3, 9, 29), "RabbitMQ 3.9.29 has no at-least-once"),
        (Version(3, 13, 0), "RabbitMQ 3.13.0 takes"),
        (Version(3, 13, 2), "issue 11159"),
    ] {
        is(
            judged(&healthy(version)).pop(),
            Severity::Loss,
            "orders",
            says,
            "upgrade the broker to 3.1",
        );
    }
}

#[test]
fn a_work_queue_that_vanishes_loses_jobs() {
    let not_durable = about_work_queue(V4, |queue| queue.durable = false);
    is(not_durable, Severity::Loss, "orders", "not durable", DELETE);
    let auto_delete = about_work_queue(V4, |queue| queue.auto_delete = true);
    is(auto_delete, Severity::Loss, "orders", "auto-delete", DELETE);
    let expires = about_work_queue(V4, |queue| {
        queue.arguments.insert("x-expires".to_owned(), json!(60_000));
    });
    is(expires, Severity::Loss, "orders", "argument sets expires to 60000 ms", "without x-expires");
    let by_policy = about_work_queue(V4, |queue| {
        queue.policy = policy("theirs", json!({ "expires": 9, "ha-mode": "all" }));
    });
    let mended = "rabbitmqctl set_policy -p / --priority 8 --apply-to queues \
                  lapin-retry-orders-work-queue '^orders$' '{\"ha-mode\":\"all\"}'";
    is(by_policy, Severity::Loss, "orders", "the policy \"theirs\" sets expires to 9", mended);
    let nothing_else = about_work_queue(V4, |queue| {
        queue.policy = policy("theirs", json!({ "expires": 9 }));
    });
    is(nothing_else, Severity::Loss, "orders", "theirs", "'{\"message-ttl\":315360000000}'");
    let by_operator = about_work_queue(V4, |queue| {
        queue.operator_policy = policy("op", json!({ "expires": 9 }));
    });
    let clear = "rabbitmqctl clear_operator_policy -p / op";
    is(by_operator, Severity::Loss, "orders", "the operator policy \"op\"", clear);
}

#[test]
fn a_delivery_limit_without_a_dead_letter_exchange_drops_jobs() {
    let limited = |version, argument: Option<i64>, by_policy: Option<i64>| {
        about_work_queue(version, |queue| {
            queue.arguments.clear();
            if let Some(limit) = argument {
                queue.arguments.insert("x-delivery-limit".to_owned(), json!(limit));
            }
            if let Some(limit) = by_policy {
                queue.policy = policy("theirs", json!({ "delivery-limit": limit }));
            }
        })
    };
    let old = Version(3, 10, 8);
    let mended = "'{\"dead-letter-exchange\":\"\",\"dead-letter-routing-key\":\"orders.buried\"}'";
    for (version, argument, by_policy, says) in [
        (V4, None, None, "the broker's default sets its delivery limit to 20"),
        (V4, Some(5), None, "its own argument sets its delivery limit to 5"),
        (V4, Some(-1), Some(6), "the policy \"theirs\" sets its delivery limit to 6"),
        (V4, Some(9), Some(7), "the policy \"theirs\" sets its delivery limit to 7"),
        (old, Some(8), None, "its own argument sets its delivery limit to 8"),
        (old, Some(-1), None, "its own argument sets its delivery limit to 0"),
    ] {
        let found = limited(version, argument, by_policy);
        let remedy = if by_policy.is_none() { mended } else { "orders.buried" };
        is(found, Severity::Loss, "orders", says, remedy);
    }
    assert_eq!(limited(old, None, None), None);
    assert_eq!(limited(V4, Some(-1), None), None);
    assert_eq!(limited(V4, Some(2_147_483_647), None), None, "it is never reached");
    assert_eq!(limited(V4, None, Some(-1)), None);
    let classic = about_work_queue(V4, |queue| {
        *queue = Queue { quorum: false, arguments: Map::new(), ..queue.clone() };
    });
    assert_eq!(classic, None);
    let target_by_policy = about_work_queue(V4, |queue| {
        queue.arguments.clear();
        queue.policy = policy("dlx", json!({ "dead-letter-exchange": "dead" }));
    });
    assert_eq!(target_by_policy, None);
}

#[test]
fn a_length_limit_on_the_work_queue_keeps_retries_back_or_drops_jobs() {
    let by_argument = |overflow: &str| {
        about_work_queue(V4, |queue| {
            queue.arguments.insert("x-max-length".to_owned(), json!(10));
            queue.arguments.insert("x-overflow".to_owned(), json!(overflow));
        })
    };
    let slow = "max-length to 10: when it is full, the lanes try again every three minutes";
    is(by_argument("reject-publish"), Severity::Trouble, "orders", slow, "without x-max-length");
    let dead_lettered = "leave it without a run";
    is(by_argument("drop-head"), Severity::Trouble, "orders", dead_lettered, DELETE);
    let dropped = about_work_queue(V4, |queue| {
        *queue = Queue { quorum: false, arguments: Map::new(), ..queue.clone() };
        queue.policy = policy("theirs", json!({ "max-length-bytes": 1_000 }));
    });
    let mended = "'{\"dead-letter-exchange\":\"\",\"dead-letter-routing-key\":\"orders.buried\"}'";
    is(dropped, Severity::Loss, "orders", "max-length-bytes to 1000", mended);
}

#[test]
fn a_consumer_timeout_under_what_a_job_may_take_is_trouble_where_it_is_heeded() {
    let limited = |version, quorum, ms: u64| {
        about_work_queue(version, |queue| {
            queue.quorum = quorum;
            queue.arguments.insert("x-consumer-timeout".to_owned(), json!(ms));
        })
    };
    let says = "consumer timeout to 1m, and a job may be held for 25m 30s";
    let anew = "with a longer x-consumer-timeout";
    is(limited(V4, true, 60_000), Severity::Trouble, "orders", says, anew);
    is(limited(Version(4, 0, 5), false, 60_000), Severity::Trouble, "orders", says, anew);
    assert_eq!(limited(V4, true, 26 * 60_000), None);
    assert_eq!(limited(V4, false, 60_000), None, "4.3 does not heed it on classic queues");
    assert_eq!(limited(Version(3, 10, 8), true, 60_000), None, "3.10 knows none");
    let by_policy = about_work_queue(V4, |queue| {
        queue.policy = policy("theirs", json!({ "consumer-timeout": 60_000 }));
    });
    is(by_policy, Severity::Trouble, "orders", "\"theirs\"", "'{\"consumer-timeout\":3060000}'");
}

#[test]
fn a_policy_that_reaches_lanes_or_the_buried_queue_is_kept_off_by_the_shield() {
    let shield = topology().shield().command("/");
    for (queue, key, value, severity) in [
        (LANE, "overflow", json!("drop-head"), Severity::Loss),
        (LANE, "message-ttl", json!(1), Severity::Trouble),
        (LANE, "expires", json!(1), Severity::Loss),
        (LANE, "max-length", json!(1), Severity::Trouble),
        (LANE, "max-length-bytes", json!(1), Severity::Trouble),
        (LANE, "delivery-limit", json!(20), Severity::Trouble),
        ("orders.buried", "delivery-limit", json!(0), Severity::Loss),
        ("orders.buried", "overflow", json!("reject-publish-dlx"), Severity::Loss),
        ("orders.buried", "message-ttl", json!(1), Severity::Loss),
        ("orders.buried", "expires", json!(1), Severity::Loss),
        ("orders.buried", "max-length", json!(1), Severity::Loss),
    ] {
        let mut found = about_policy(&[queue], json!({ key: value }));
        assert_eq!(found.len(), 1, "{found:#?}");
        let says = format!("the policy \"theirs\" sets {key} to {value}");
        is(found.pop(), severity, queue, &says, &shield);
    }
    for never_reached in [-1, 2_147_483_647] {
        let harmless = json!({ "overflow": "reject-publish", "delivery-limit": never_reached });
        assert_eq!(about_policy(&[LANE, "orders.buried"], harmless), []);
    }
    let limited = json!({ "max-length": 9, "overflow": "reject-publish" });
    assert_eq!(about_policy(&["orders.buried"], limited), [], "how it is to be limited");
}

#[test]
fn the_same_on_many_queues_is_told_once() {
    let found =
        about_policy(&[LANE, "orders.retry.00030s", "orders.buried"], json!({ "expires": 1 }));
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(found[0].queue, "orders.buried");
    assert!(found[0].problem.ends_with("(the same on 2 more of its queues)"), "{}", found[0]);
}

#[test]
fn a_shield_is_set_above_the_policy_that_it_keeps_off_and_replaces_itself() {
    let mut seen = healthy(V4);
    let high = Policy { priority: 5_000, ..policy("theirs", json!({ "expires": 1 })).unwrap() };
    seen.queues.get_mut(LANE).unwrap().policy = Some(high.clone());
    is(judged(&seen).pop(), Severity::Loss, LANE, "theirs", "--priority 5001 ");
    let bent = Policy { name: "lapin-retry-orders".to_owned(), ..high };
    seen.queues.get_mut(LANE).unwrap().policy = Some(bent);
    is(judged(&seen).pop(), Severity::Loss, LANE, "lapin-retry-orders", "--priority 1000 ");
}

#[test]
fn an_operator_policy_cannot_be_kept_off() {
    let mut seen = healthy(V4);
    seen.queues.get_mut(LANE).unwrap().operator_policy = policy("op", json!({ "max-length": 2 }));
    let clear = "rabbitmqctl clear_operator_policy -p / op";
    is(
        judged(&seen).pop(),
        Severity::Trouble,
        LANE,
        "operator policy \"op\" sets max-length",
        clear,
    );
}

#[test]
fn old_lanes_and_those_made_on_first_use_are_looked_at_and_others_queues_are_not() {
    for (name, ours) in [
        ("orders.retry.00007s", true),
        ("orders.retry.busy.00002250ms", true),
        ("orders.retry.mine", false),
        ("other.buried", false),
    ] {
        let mut seen = healthy(V4);
        let bare = Queue { policy: policy("theirs", json!({ "expires": 1 })), ..queue(json!({})) };
        seen.queues.insert(name.to_owned(), bare);
        assert_eq!(judged(&seen).iter().any(|f| f.problem.contains("theirs")), ours, "{name}");
    }
}

#[test]
fn a_lane_with_other_arguments_is_named_with_each_difference_and_the_command() {
    let changed = |change: fn(&mut Queue)| {
        let mut seen = healthy(V4);
        change(seen.queues.get_mut(LANE).unwrap());
        judged(&seen).pop()
    };
    let delete = "rabbitmqctl delete_queue -p / orders.retry.00015s; a worker with declare";
    type Change = fn(&mut Queue);
    let cases: [(Change, &str); 6] = [
        (|q| q.durable = false, "it is not durable"),
        (|q| q.auto_delete = true, "it is auto-delete"),
        (|q| q.quorum = false, "x-queue-type is \"classic\" and not \"quorum\""),
        (
            |q| drop(q.arguments.insert("x-message-ttl".to_owned(), json!(14_000))),
            "x-message-ttl is 14000 and not 15000",
        ),
        (
            |q| drop(q.arguments.remove("x-dead-letter-strategy")),
            "x-dead-letter-strategy is not \"at-least-once\" but missing",
        ),
        (
            |q| drop(q.arguments.insert("x-max-length".to_owned(), json!(3))),
            "it has the argument x-max-length = 3",
        ),
    ];
    for (change, says) in cases {
        is(changed(change), Severity::Loss, LANE, says, delete);
    }
}

#[test]
fn a_queue_that_is_missing_is_told_of_where_nobody_else_does() {
    let mut seen = healthy(V4);
    seen.queues.remove(LANE);
    assert_eq!(judged(&seen), []);
    let found = judged_when(false, &seen).pop();
    is(found, Severity::Trouble, LANE, "does not exist", "declare = \"create\"");
    seen.queues.remove("orders");
    is(judged(&seen).pop(), Severity::Unchecked, "orders", "does not list it", "see the vhost");
}
