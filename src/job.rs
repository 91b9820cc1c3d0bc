//! What a handler sees of a job.

use std::{
    fmt,
    sync::{Arc, LazyLock, OnceLock},
};

use lapin::BasicProperties;
use rand::RngExt;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::{
    Marked,
    message::{Message, Story},
    undecodable,
};

/// One message, and what is known of its earlier attempts. Cheap to clone.
///
/// It can be read, not acknowledged: what becomes of it is decided by what the handler returns.
#[derive(Clone)]
pub struct Job(Arc<Inner>);

struct Inner {
    message: Arc<Message>,
    /// Most jobs have none yet, and it is large.
    story: Option<Box<Story>>,
    /// Made when it is asked for, if the publisher set none.
    made_id: OnceLock<String>,
    received: Instant,
}

impl Job {
    pub(crate) fn new(message: Message, story: impl Into<Option<Story>>) -> Self {
        let story = story.into().map(Box::new);
        let (made_id, received) = (OnceLock::new(), Instant::now());
        Self(Arc::new(Inner { message: Arc::new(message), story, made_id, received }))
    }

    /// The payload, byte for byte as it was published.
    pub fn body(&self) -> &[u8] {
        &self.0.message.body
    }

    /// The message's properties and headers, as delivered.
    pub fn properties(&self) -> &BasicProperties {
        &self.0.message.properties
    }

    /// The message id: the same at every attempt. Where the publisher set none it is made here,
    /// at random, and kept from the first failure on.
    pub fn id(&self) -> &str {
        match self.properties().message_id() {
            Some(id) if !id.as_str().is_empty() => id.as_str(),
            // So that a handler can tell a duplicate of a later attempt.
            _ => self.0.made_id.get_or_init(|| format!("{:032x}", rand::rng().random::<u128>())),
        }
    }

    /// The exchange that the job was published to: the original one, also on a retry.
    pub fn exchange(&self) -> &str {
        self.story().original_exchange().unwrap_or(self.0.message.exchange.as_str())
    }

    /// The routing key that the job was published with: the original one, also on a retry.
    pub fn routing_key(&self) -> &str {
        self.story().original_routing_key().unwrap_or(self.0.message.routing_key.as_str())
    }

    /// Failures charged to the job so far: 0 at the first attempt.
    pub fn retry_count(&self) -> u32 {
        self.story().retry_count
    }

    /// Whether the broker delivered this very message before, without an answer. A retry is a
    /// message of its own, so this says nothing about retries.
    pub fn redelivered(&self) -> bool {
        self.0.message.redelivered
    }

    /// Reads the body by its content type: MessagePack for `application/msgpack`,
    /// `application/x-msgpack` and `application/vnd.msgpack`, JSON for `application/json` and
    /// anything that ends in `+json`.
    ///
    /// # Errors
    /// Another content type or none, or a body that is no `T`. Returned from the handler, the
    /// error buries the job as `undecodable`: to try again would not change the body.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, Marked> {
        let content_type = self.properties().content_type().as_ref().map(|t| t.as_str());
        // Parameters such as `; charset=utf-8` change nothing for either format.
        let essence = content_type.unwrap_or("").split(';').next().unwrap_or("").trim();
        match essence.to_ascii_lowercase().as_str() {
            "application/msgpack" | "application/x-msgpack" | "application/vnd.msgpack" => {
                message_pack(self.body())
            }
            json if json == "application/json" || json.ends_with("+json") => {
                serde_json::from_slice(self.body())
                    .map_err(|e| undecodable(anyhow::Error::new(e).context("the body as JSON")))
            }
            "" => Err(undecodable(anyhow::anyhow!(
                "the message has no content type; publish it with \"application/json\" or \
                 \"application/msgpack\""
            ))),
            other => Err(undecodable(anyhow::anyhow!(
                "no decoder for the content type {other:?}; it is neither JSON nor MessagePack"
            ))),
        }
    }

    pub(crate) fn message(&self) -> &Arc<Message> {
        &self.0.message
    }

    /// When this delivery was taken from its consumer.
    pub(crate) fn received(&self) -> Instant {
        self.0.received
    }

    pub(crate) fn story(&self) -> &Story {
        static NONE: LazyLock<Story> = LazyLock::new(Story::default);
        self.0.story.as_deref().unwrap_or_else(|| &NONE)
    }

    /// The `type` property, for logs.
    pub(crate) fn kind(&self) -> &str {
        self.properties().kind().as_ref().map_or("", |kind| kind.as_str())
    }
}

fn message_pack<T: DeserializeOwned>(body: &[u8]) -> Result<T, Marked> {
    let mut rest = body;
    let mut reader = rmp_serde::Deserializer::new(&mut rest);
    // As serde_json. Its own limit of 1024 lets a body of a kilobyte overflow the stack of a
    // thread of tokio's, which ends the process.
    reader.set_max_depth(128);
    let value = T::deserialize(&mut reader)
        .map_err(|e| undecodable(anyhow::Error::new(e).context("the body as MessagePack")))?;
    // A JSON text begins with what MessagePack takes for a small number.
    if rest.is_empty() {
        Ok(value)
    } else {
        Err(undecodable(anyhow::anyhow!(
            "the body as MessagePack: {} bytes are left over",
            rest.len()
        )))
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("id", &self.id())
            .field("exchange", &self.exchange())
            .field("routing_key", &self.routing_key())
            .field("retry_count", &self.retry_count())
            .field("bytes", &self.body().len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::{Deserialize, Serialize};

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Order {
        id: u32,
        item: String,
    }

    fn job(content_type: Option<&str>, body: Vec<u8>) -> Job {
        let mut properties = BasicProperties::default();
        if let Some(content_type) = content_type {
            properties = properties.with_content_type(content_type.into());
        }
        let message = Message {
            exchange: "shop".into(),
            routing_key: "order.new".into(),
            redelivered: false,
            properties,
            body,
        };
        Job::new(message, Story::default())
    }

    #[test]
    fn bodies_are_read_by_content_type() {
        let order = Order { id: 7, item: "tea".to_owned() };
        let json = serde_json::to_vec(&order).unwrap();
        let pack = rmp_serde::to_vec(&order).unwrap();
        let named = rmp_serde::to_vec_named(&order).unwrap();
        for (content_type, body) in [
            ("application/json", &json),
            ("application/json; charset=utf-8", &json),
            ("application/vnd.shop.order+json", &json),
            ("Application/JSON", &json),
            ("application/msgpack", &pack),
            ("application/x-msgpack", &named),
            ("application/vnd.msgpack", &named),
        ] {
            let read: Order = job(Some(content_type), body.clone()).decode().unwrap();
            assert_eq!(read, order, "{content_type}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_undecodable_and_says_why() {
        let json = br#"{"id":7,"item":"tea"}"#.to_vec();
        for (content_type, body, why) in [
            (None, json.clone(), "no content type"),
            (Some("text/plain"), json.clone(), "text/plain"),
            (Some("application/json"), b"{".to_vec(), "as JSON"),
            (Some("application/json"), Vec::new(), "as JSON"),
            (Some("application/json"), b"{\"id\":-1}".to_vec(), "as JSON"),
            (Some("application/msgpack"), json.clone(), "as MessagePack"),
            (Some("application/msgpack"), Vec::new(), "as MessagePack"),
        ] {
            let error = job(content_type, body).decode::<Order>().unwrap_err();
            assert_eq!(error.outcome(), crate::Outcome::Undecodable);
            assert!(error.to_string().contains(why), "{error} should say {why}");
        }
        let left_over = job(Some("application/msgpack"), json).decode::<u8>().unwrap_err();
        assert!(left_over.to_string().contains("left over"), "{left_over}");
    }

    #[test]
    fn an_id_is_made_where_there_is_none() {
        let (one, other) = (job(None, Vec::new()), job(None, Vec::new()));
        assert_eq!(one.id().len(), 32);
        assert_ne!(one.id(), other.id());
        assert_eq!(one.id(), one.clone().id());
    }
}
