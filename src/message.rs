//! What travels with a job: the message as it was delivered, our headers on it, and the copy that
//! is published in its place. Pure: no channel.

mod budget;
mod copy;
mod death;
mod header;
mod limit;
mod story;
#[cfg(test)]
pub(crate) mod tests;

use std::{fmt, sync::Arc};

use lapin::{
    BasicProperties,
    types::{AMQPValue, ShortString},
};

pub(crate) use self::{
    copy::{Copier, TooLarge},
    header::cut,
    limit::span,
    story::{Failure, Story},
};
use crate::policy::Interrupted;

/// What a quorum queue counts: deliveries that failed and, from RabbitMQ 4.3 on, all that came before.
const DELIVERY_COUNT: &str = "x-delivery-count";
const ACQUIRED_COUNT: &str = "x-acquired-count";
const DEATHS: &str = "x-death";

/// A message as the broker delivered it.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) exchange: ShortString,
    pub(crate) routing_key: ShortString,
    pub(crate) redelivered: bool,
    pub(crate) properties: BasicProperties,
    pub(crate) body: Vec<u8>,
}

impl Message {
    /// How many steps it has come towards the delivery limit of its quorum queue.
    pub(crate) fn delivery_count(&self) -> u32 {
        self.header(DELIVERY_COUNT).and_then(header::number).unwrap_or(0)
    }

    /// How often it was delivered without an answer. A count is the broker's only if it was
    /// delivered before: else somebody may have copied it.
    pub(crate) fn interrupted(&self) -> Interrupted {
        let count = self.delivery_count();
        match self.redelivered {
            false => Interrupted::Never,
            true if self.has(header::BURIED_REASON) => Interrupted::Exhumed,
            true if self.has(ACQUIRED_COUNT) => Interrupted::Failed(count),
            true if self.has(DELIVERY_COUNT) => Interrupted::Times(count),
            true => Interrupted::Before,
        }
    }

    /// Whether it came from a lane or another dead-lettering queue. RabbitMQ 4.3 keeps the counts and
    /// the redelivered flag of such a message: if somebody looked at it there, it seems to have been
    /// interrupted here.
    pub(crate) fn was_dead_lettered(&self) -> bool {
        self.has(DEATHS)
    }

    fn has(&self, name: &str) -> bool {
        self.header(name).is_some()
    }

    fn header(&self, name: &str) -> Option<&AMQPValue> {
        self.properties.headers().as_ref()?.inner().get(name)
    }
}

/// The string in a header, if it is one.
pub(crate) fn text_header(properties: &BasicProperties, name: &str) -> Option<String> {
    header::text(properties.headers().as_ref()?.inner().get(name)?)
}

/// A copy on its way to one queue, through the default exchange.
#[derive(Clone)]
pub(crate) struct Outgoing {
    pub(crate) queue: Arc<str>,
    pub(crate) properties: BasicProperties,
    /// The body is the original's, never encoded anew.
    pub(crate) original: Arc<Message>,
}

impl fmt::Debug for Outgoing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outgoing").field("queue", &self.queue).finish_non_exhaustive()
    }
}
