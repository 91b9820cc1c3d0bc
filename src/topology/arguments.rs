//! The one place that builds queue arguments. They are final: the broker answers 406 to others
//! for a name that exists, so whatever changes here must change the name, too.

use lapin::types::{AMQPValue, FieldTable};

use super::{QueueType, name::Name};

/// A delivery limit that is never reached. The broker's default of 20 would drop a buried job that
/// was looked at 21 times in the management UI, and send a waiting one back early. The value for
/// "no limit", -1, drops at the first delivery on RabbitMQ 3.10.
pub(crate) const DELIVERY_LIMIT: i64 = i32::MAX as i64;

pub(super) fn of(name: &Name<'_>, queue_type: QueueType) -> FieldTable {
    let mut arguments = FieldTable::default();
    let mut set = |key: &str, value: AMQPValue| {
        arguments.insert(key.into(), value);
    };
    let text = |value: &str| AMQPValue::LongString(value.into());
    let quorum = queue_type == QueueType::Quorum;

    set("x-queue-type", text(if quorum { "quorum" } else { "classic" }));
    if quorum {
        set("x-queue-leader-locator", text("balanced"));
        set("x-delivery-limit", AMQPValue::LongLongInt(DELIVERY_LIMIT));
    }
    let Some(delay_ms) = name.delay_ms() else { return arguments };

    // Back through the default exchange: to this work queue, and to no other consumer of the
    // exchange that the job came from.
    set("x-dead-letter-exchange", text(""));
    set("x-dead-letter-routing-key", text(name.work_queue));
    // The messages carry the same delay as their expiration. This one guards against a message
    // put here by hand without one, which would block the lane for ever.
    set("x-message-ttl", AMQPValue::LongLongInt(delay_ms.cast_signed()));
    if quorum {
        // At-least-once works only with reject-publish; the broker silently ignores it otherwise.
        set("x-dead-letter-strategy", text("at-least-once"));
        set("x-overflow", text("reject-publish"));
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(name: &Name<'_>, queue_type: QueueType) -> Vec<String> {
        of(name, queue_type).inner().keys().map(ToString::to_string).collect()
    }

    #[test]
    fn a_quorum_lane_dead_letters_at_least_once_to_its_work_queue() {
        let arguments = of(&Name::lane("orders", 15_000, Some(8_437)), QueueType::Quorum);
        let arguments = arguments.inner();
        for (key, value) in [
            ("x-queue-type", "quorum"),
            ("x-dead-letter-exchange", ""),
            ("x-dead-letter-routing-key", "orders"),
            ("x-dead-letter-strategy", "at-least-once"),
            ("x-overflow", "reject-publish"),
            ("x-queue-leader-locator", "balanced"),
        ] {
            assert_eq!(arguments[key], AMQPValue::LongString(value.into()), "{key}");
        }
        assert_eq!(arguments["x-message-ttl"], AMQPValue::LongLongInt(8_437));
        assert_eq!(arguments["x-delivery-limit"], AMQPValue::LongLongInt(2_147_483_647));
        assert_eq!(arguments.len(), 8);
    }

    #[test]
    fn a_classic_lane_has_only_what_classic_queues_take() {
        assert_eq!(
            keys(&Name::lane("orders", 15_000, None), QueueType::Classic),
            [
                "x-dead-letter-exchange",
                "x-dead-letter-routing-key",
                "x-message-ttl",
                "x-queue-type"
            ]
        );
    }

    #[test]
    fn the_buried_queue_keeps_everything() {
        assert_eq!(
            keys(&Name::buried("orders"), QueueType::Quorum),
            ["x-delivery-limit", "x-queue-leader-locator", "x-queue-type"]
        );
        assert_eq!(keys(&Name::buried("orders"), QueueType::Classic), ["x-queue-type"]);
    }
}
