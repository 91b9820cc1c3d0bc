//! The copy that is published in a job's place.

use std::{sync::Arc, time::SystemTime};

use lapin::{
    BasicProperties,
    types::{AMQPValue, ShortString},
};

use super::{
    Message, Outgoing, Story, budget,
    header::{OURS, is_the_brokers},
};
use crate::policy::BuriedReason;

const PERSISTENT: u8 = 2;

/// Makes copies of one work queue's jobs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copier<'a> {
    pub(crate) work_queue: &'a str,
    /// The publishing connection's user: the broker refuses a `user_id` of anybody else.
    pub(crate) user: &'a str,
    /// The largest frame that the broker takes, in bytes.
    pub(crate) frame_max: u32,
}

/// Nothing that may be cut makes the copy's headers fit into one frame.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooLarge;

impl Copier<'_> {
    /// The copy for a lane, which gives it back after the delay; without a delay, the copy for the
    /// tail of the work queue itself.
    pub(crate) fn onward(
        &self,
        message: &Arc<Message>,
        id: &str,
        story: &mut Story,
        queue: &str,
        delay_ms: Option<u64>,
    ) -> Result<Outgoing, TooLarge> {
        let mut properties = self.properties(message, id, story);
        let foreign = foreign_headers(&message.properties);
        let room = self.room(&properties);
        let headers = budget::fit(self.work_queue, &foreign, story, room).map_err(|_| TooLarge)?;
        properties = properties.with_headers(headers);
        if let Some(delay_ms) = delay_ms {
            properties = properties.with_expiration(delay_ms.to_string().into());
        }
        Ok(Outgoing { queue: queue.into(), properties, original: Arc::clone(message) })
    }

    /// The copy for the buried queue, and the reason on it. It always fits: what does not is left
    /// out and listed. If foreign headers had to go, the reason is `too-large`.
    pub(crate) fn burial(
        &self,
        message: &Arc<Message>,
        id: &str,
        mut story: Story,
        queue: &str,
        (reason, at, by): (BuriedReason, SystemTime, &str),
    ) -> (Outgoing, BuriedReason) {
        let properties = self.properties(message, id, &mut story);
        let room = self.room(&properties);
        if reason == BuriedReason::TooLarge {
            story.detail.get_or_insert_with(|| budget::too_large(self.frame_max));
        }
        story.bury(reason, at, by);
        let (headers, reason) = budget::fit_buried(
            self.work_queue,
            foreign_headers(&message.properties),
            story,
            reason,
            (room, self.frame_max),
        );
        let properties = properties.with_headers(headers);
        let copy = Outgoing { queue: queue.into(), properties, original: Arc::clone(message) };
        (copy, reason)
    }

    /// All properties but the headers and the expiration, which is either the lane's or none.
    fn properties(&self, message: &Message, id: &str, story: &mut Story) -> BasicProperties {
        let from = &message.properties;
        let mut to = BasicProperties::default()
            .with_delivery_mode(PERSISTENT)
            .with_message_id(ShortString::from(id));
        if let Some(value) = from.content_type() {
            to = to.with_content_type(value.clone());
        }
        if let Some(value) = from.content_encoding() {
            to = to.with_content_encoding(value.clone());
        }
        if let Some(value) = from.priority() {
            to = to.with_priority(*value);
        }
        if let Some(value) = from.correlation_id() {
            to = to.with_correlation_id(value.clone());
        }
        if let Some(value) = from.reply_to() {
            to = to.with_reply_to(value.clone());
        }
        if let Some(value) = from.timestamp() {
            to = to.with_timestamp(*value);
        }
        if let Some(value) = from.kind() {
            to = to.with_type(value.clone());
        }
        if let Some(value) = from.app_id() {
            to = to.with_app_id(value.clone());
        }
        if let Some(value) = from.cluster_id() {
            to = to.with_cluster_id(value.clone());
        }
        match from.user_id() {
            Some(user) if user.as_str() == self.user => to = to.with_user_id(user.clone()),
            Some(user) => {
                story.original_user_id.get_or_insert_with(|| user.to_string());
            }
            None => {}
        }
        to
    }

    /// What is left for the headers table in the header frame.
    fn room(&self, properties: &BasicProperties) -> usize {
        budget::room(self.frame_max, properties)
    }
}

/// What the job came with beside ours and the broker's own.
fn foreign_headers(properties: &BasicProperties) -> Vec<(&ShortString, &AMQPValue)> {
    let headers = properties.headers().iter().flat_map(|headers| headers.inner());
    let is_foreign = |name: &str| !OURS.contains(&name) && !is_the_brokers(name);
    headers.filter(|(name, _)| is_foreign(name.as_str())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{
        header::{string, tests::values},
        tests::{
            COPIER, bulky_headers, buried, failed_once, has_short_string, headers, message, second,
            table, with_headers,
        },
    };
    use lapin::types::{FieldArray, FieldTable};
    use proptest::prelude::*;

    fn retry(properties: BasicProperties) -> BasicProperties {
        let message = message(properties);
        let mut story = Story::read(&message, "orders");
        story.remember(&message, second(0));
        COPIER
            .onward(&message, "made", &mut story, "orders.retry.00015s", Some(15_000))
            .unwrap()
            .properties
    }

    fn burial(properties: BasicProperties) -> BasicProperties {
        let what = (BuriedReason::Rejected, second(0), "host:1");
        let (copy, reason) =
            COPIER.burial(&message(properties), "made", Story::default(), "orders.buried", what);
        assert_eq!(reason, BuriedReason::Rejected);
        copy.properties
    }

    #[test]
    fn all_properties_travel_but_delivery_mode_and_expiration() {
        let original = BasicProperties::default()
            .with_content_type("application/json".into())
            .with_content_encoding("gzip".into())
            .with_headers(table([("tenant", string("blue"))]))
            .with_delivery_mode(1)
            .with_priority(7)
            .with_correlation_id("correlation".into())
            .with_reply_to("replies".into())
            .with_expiration("86400000".into())
            .with_message_id("job-1".into())
            .with_timestamp(1_767_225_600)
            .with_type("order.created".into())
            .with_user_id("worker".into())
            .with_app_id("shop".into())
            .with_cluster_id("cluster".into());
        for copy in [retry(original.clone()), burial(original.clone())] {
            assert_eq!(copy.headers().as_ref().unwrap().inner()["tenant"], string("blue"));
            let expected = original
                .clone()
                .with_delivery_mode(2)
                // The job's id, which is the message's own where it has one.
                .with_message_id("made".into())
                .with_headers(FieldTable::default());
            let copy = copy.with_headers(FieldTable::default());
            assert_eq!(
                copy.clone().with_expiration("".into()),
                expected.with_expiration("".into()),
                "{copy:?}"
            );
        }
        assert_eq!(retry(original.clone()).expiration(), &Some("15000".into()));
        assert_eq!(burial(original).expiration(), &None);
    }

    #[test]
    fn nothing_is_made_up_but_what_a_copy_needs() {
        let copy = retry(BasicProperties::default()).with_headers(FieldTable::default());
        let needed = BasicProperties::default()
            .with_headers(FieldTable::default())
            .with_delivery_mode(2)
            .with_message_id("made".into())
            .with_expiration("15000".into());
        assert_eq!(copy, needed);
    }

    #[test]
    fn the_expiration_is_the_delay_in_decimal_digits() {
        let message = message(BasicProperties::default());
        for (delay, text) in [(1, "1"), (8_437, "8437"), (315_360_000_000, "315360000000")] {
            let copy =
                COPIER.onward(&message, "id", &mut Story::default(), "lane", Some(delay)).unwrap();
            assert_eq!(copy.properties.expiration(), &Some(text.into()));
        }
    }

    #[test]
    fn a_user_id_travels_only_where_the_broker_would_take_it() {
        let theirs = retry(BasicProperties::default().with_user_id("publisher".into()));
        assert_eq!(theirs.user_id(), &None);
        let kept = |copy: &BasicProperties| {
            copy.headers().as_ref().unwrap().inner().get("retry-original-user-id").cloned()
        };
        assert_eq!(kept(&theirs), Some(string("publisher")));
        // It is the first one that counts, for the copy's is this worker's.
        let again = retry(theirs.with_user_id("somebody".into()));
        assert_eq!(kept(&again), Some(string("publisher")));
        let ours = retry(BasicProperties::default().with_user_id("worker".into()));
        assert_eq!(ours.user_id(), &Some("worker".into()));
        assert_eq!(kept(&ours), None);
    }

    #[test]
    fn the_brokers_own_headers_are_not_sent_back_to_it() {
        let death = AMQPValue::FieldArray(vec![AMQPValue::FieldTable(table([]))].into());
        let names = [
            "x-death",
            "x-first-death-exchange",
            "x-first-death-queue",
            "x-first-death-reason",
            "x-last-death-exchange",
            "x-last-death-queue",
            "x-last-death-reason",
            "x-delivery-count",
            "x-acquired-count",
            "x-opt-delivery-time",
            "x-opt-",
            "CC",
            "BCC",
        ];
        let others = ["x-match", "x-delay", "x-deaths", "cc", "tenant"];
        let all = names.into_iter().chain(others);
        let message = with_headers(all.map(|name| (name, death.clone())));
        for copy in [failed_once(&message).0, buried(&message, BuriedReason::Exhausted)] {
            for name in names {
                assert!(!copy.contains_key(name), "{name}");
            }
            for name in others {
                assert_eq!(copy.inner()[name], death, "{name}");
            }
        }
    }

    #[test]
    fn carbon_copies_are_told_of_and_not_sent_again() {
        let names =
            |names: &[&str]| FieldArray::from(names.iter().map(|n| string(*n)).collect::<Vec<_>>());
        let message = with_headers([
            ("CC", AMQPValue::FieldArray(names(&["audit", "billing"]))),
            // Not what it must be, but not ours to judge.
            ("BCC", string("secret")),
        ]);
        let (copy, _) = failed_once(&message);
        let all = AMQPValue::FieldArray(names(&["audit", "billing", "secret"]));
        assert_eq!(copy.inner()["retry-original-cc"], all);
        let (again, _) = failed_once(&with_headers(
            copy.inner().iter().map(|(name, value)| (name.as_str(), value.clone())),
        ));
        assert_eq!(again.inner()["retry-original-cc"], all);
    }

    #[test]
    fn a_buried_job_tells_why() {
        let copy = buried(&message(BasicProperties::default()), BuriedReason::Exhausted);
        let copy = copy.inner();
        assert_eq!(copy["buried-reason"], string("exhausted"));
        assert_eq!(copy["buried-at"], string("2026-01-01T00:01:01.000Z"));
        assert_eq!(copy["buried-by"], string("host:1"));
        assert_eq!(copy["retry-error"], string("no route to host"));
        assert!(!copy.contains_key("retry-due-at"));
        assert!(!copy.contains_key("buried-dropped-headers"));
    }

    #[test]
    fn an_odd_value_is_kept_as_it_came() {
        let odd = AMQPValue::FieldTable(table([("a", AMQPValue::Float(0.5))]));
        let message = with_headers([
            ("retry-queue", string("orders")),
            ("retry-count", odd.clone()),
            ("retry-deadline", string("tomorrow")),
        ]);
        let copy = buried(&message, BuriedReason::InvalidHeaders);
        assert_eq!(copy.inner()["retry-count"], odd);
        assert_eq!(copy.inner()["retry-deadline"], string("tomorrow"));
        assert_eq!(copy.inner()["buried-reason"], string("invalid-headers"));
    }

    proptest! {
        #[test]
        fn foreign_headers_of_every_type_are_copied_unchanged(value in values()) {
            let message = with_headers([("tenant", value.clone())]);
            let told = |headers: FieldTable| format!("{:?}", headers.inner()["tenant"]);
            prop_assert_eq!(told(failed_once(&message).0), format!("{value:?}"));
            let copy = buried(&message, BuriedReason::Rejected);
            prop_assert_eq!(told(copy), format!("{value:?}"));
        }

        #[test]
        fn of_any_headers_those_of_nobody_we_know_are_copied_and_no_others(headers in headers()) {
            let message = message(BasicProperties::default().with_headers(headers.clone()));
            let nobodys = |name: &str| !OURS.contains(&name) && !is_the_brokers(name);
            for copy in [failed_once(&message).0, buried(&message, BuriedReason::Rejected)] {
                let foreign = |table: &FieldTable| {
                    let all = table.inner().iter().filter(|(name, _)| nobodys(name.as_str()));
                    format!("{:?}", all.collect::<Vec<_>>())
                };
                prop_assert_eq!(foreign(&copy), foreign(&headers));
                let known = |name: &str| nobodys(name) || OURS.contains(&name);
                prop_assert!(copy.inner().keys().all(|name| known(name.as_str())));
            }
        }

        #[test]
        fn no_short_string_is_written(headers in bulky_headers()) {
            let message = message(BasicProperties::default().with_headers(headers));
            for reason in [BuriedReason::Exhausted, BuriedReason::InvalidHeaders] {
                prop_assert!(!has_short_string(&buried(&message, reason)));
            }
            let mut story = Story::read(&message, "orders");
            if let Ok(copy) = COPIER.onward(&message, "id", &mut story, "lane", Some(1)) {
                prop_assert!(!has_short_string(copy.properties.headers().as_ref().unwrap()));
            }
        }
    }
}
