//! The copy that is published in a job's place.

use std::{sync::Arc, time::SystemTime};

use lapin::{
    BasicProperties,
    types::{FieldTable, ShortString},
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
        mut story: Story,
        queue: &str,
        delay_ms: Option<u64>,
    ) -> Result<Outgoing, TooLarge> {
        let mut properties = self.properties(message, id, &mut story);
        let foreign = foreign_headers(&message.properties);
        let room = self.room(&properties);
        let headers = budget::fit(self.work_queue, &foreign, &mut story, room)?;
        properties = properties.with_headers(headers);
        if let Some(delay_ms) = delay_ms {
            properties = properties.with_expiration(delay_ms.to_string().into());
        }
        Ok(Outgoing { queue: queue.to_owned(), properties, original: Arc::clone(message) })
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
        story.bury(reason, at, by);
        let (headers, reason) = budget::fit_buried(
            self.work_queue,
            foreign_headers(&message.properties),
            story,
            reason,
            room,
        );
        let properties = properties.with_headers(headers);
        let copy = Outgoing { queue: queue.to_owned(), properties, original: Arc::clone(message) };
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
fn foreign_headers(properties: &BasicProperties) -> FieldTable {
    let mut foreign = FieldTable::default();
    let headers = properties.headers().iter().flat_map(|headers| headers.inner());
    for (key, value) in headers {
        if !OURS.contains(&key.as_str()) && !is_the_brokers(key.as_str()) {
            foreign.insert(key.clone(), value.clone());
        }
    }
    foreign
}
