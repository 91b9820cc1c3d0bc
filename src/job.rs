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
    /// anything that ends in `+json`. A UTF-8 byte order mark before a JSON text is skipped.
    ///
    /// A content encoding such as `gzip` is not undone, nor is a charset other than UTF-8 converted:
    /// for these read [`body`](Self::body) yourself.
    ///
    /// # Errors
    /// Another content type or none, or a body that is no `T`; a content encoding or charset that is
    /// in the way is named. Returned from the handler, the error buries the job as `undecodable`: to
    /// try again would not change the body.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, Marked> {
        let content_type = self.properties().content_type().as_ref().map(|t| t.as_str());
        let (essence, parameters) = match content_type.unwrap_or_default().split_once(';') {
            Some((essence, parameters)) => (essence, parameters),
            None => (content_type.unwrap_or_default(), ""),
        };
        let decoded = match essence.trim().to_ascii_lowercase().as_str() {
            "application/msgpack" | "application/x-msgpack" | "application/vnd.msgpack" => {
                message_pack(self.body())
            }
            json if json == "application/json" || json.ends_with("+json") => json_text(self.body()),
            "" => Err((
                "the message has no content type; publish it with \"application/json\" or \
                 \"application/msgpack\""
                    .to_owned(),
                None,
            )),
            other => Err((
                format!(
                    "no decoder for the content type {other:?}; it is neither JSON nor MessagePack"
                ),
                None,
            )),
        };
        decoded.map_err(|(what, source)| {
            let what = what + &self.still_encoded(parameters);
            undecodable(match source {
                Some(source) => source.context(what),
                None => anyhow::Error::msg(what),
            })
        })
    }

    /// What is known of the body that no decoder here undoes.
    fn still_encoded(&self, parameters: &str) -> String {
        let is_plain = |name: &&str| {
            let name = name.to_ascii_lowercase();
            ["", "identity", "utf-8", "utf8", "us-ascii", "ascii"].contains(&name.as_str())
        };
        let mut text = String::new();
        let encoding = self.properties().content_encoding().as_ref().map(|e| e.as_str().trim());
        if let Some(encoding) = encoding.filter(|name| !is_plain(name)) {
            text += &format!(
                "; its content encoding {encoding:?} is not undone here: read job.body() and decode \
                 it yourself"
            );
        }
        let charset = parameters.split(';').find_map(|parameter| {
            let (name, value) = parameter.split_once('=')?;
            let is_it = name.trim().eq_ignore_ascii_case("charset");
            is_it.then(|| value.trim().trim_matches('"'))
        });
        if let Some(charset) = charset.filter(|name| !is_plain(name)) {
            text += &format!("; its charset is {charset:?}, and only UTF-8 is read here");
        }
        text
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

/// What could not be read, and why.
type Unread = (String, Option<anyhow::Error>);

fn json_text<T: DeserializeOwned>(body: &[u8]) -> Result<T, Unread> {
    const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();
    let body = body.strip_prefix(BYTE_ORDER_MARK).unwrap_or(body);
    serde_json::from_slice(body).map_err(|e| ("the body as JSON".to_owned(), Some(e.into())))
}

fn message_pack<T: DeserializeOwned>(body: &[u8]) -> Result<T, Unread> {
    let mut rest = body;
    let mut reader = rmp_serde::Deserializer::new(&mut rest);
    // As serde_json. Its own limit of 1024 lets a body of a kilobyte overflow the stack of a
    // thread of tokio's, which ends the process.
    reader.set_max_depth(128);
    let value = T::deserialize(&mut reader)
        .map_err(|e| ("the body as MessagePack".to_owned(), Some(e.into())))?;
    // A JSON text begins with what MessagePack takes for a small number.
    if rest.is_empty() {
        Ok(value)
    } else {
        Err((format!("the body as MessagePack: {} bytes are left over", rest.len()), None))
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
    fn a_byte_order_mark_before_a_json_text_is_skipped() {
        let order = Order { id: 7, item: "tea".to_owned() };
        let body = b"\xef\xbb\xbf{\"id\":7,\"item\":\"tea\"}".to_vec();
        let read: Order = job(Some("application/json"), body.clone()).decode().unwrap();
        assert_eq!(read, order);
        assert!(job(Some("application/msgpack"), body).decode::<Order>().is_err());
        let twice = "\u{feff}\u{feff}1".as_bytes().to_vec();
        assert!(job(Some("application/json"), twice).decode::<u8>().is_err(), "one, not all");
    }

    #[test]
    fn an_encoding_or_charset_that_is_in_the_way_is_named() {
        let read = |content_type: &str, encoding: Option<&str>, body: &[u8]| {
            let mut properties = BasicProperties::default().with_content_type(content_type.into());
            if let Some(encoding) = encoding {
                properties = properties.with_content_encoding(encoding.into());
            }
            let (exchange, routing_key) = ("shop".into(), "order.new".into());
            let body = body.to_vec();
            let message = Message { exchange, routing_key, redelivered: false, properties, body };
            Job::new(message, Story::default()).decode::<u8>().map_err(|error| error.to_string())
        };
        let (zipped, latin) = (b"\x1f\x8b\x08\x00", b"\"\xe9\"");
        for (content_type, encoding, body, says) in [
            ("application/json", Some("gzip"), zipped.as_slice(), "content encoding \"gzip\""),
            ("application/msgpack", Some("zstd"), zipped, "content encoding \"zstd\""),
            ("text/plain", Some("deflate"), zipped, "content encoding \"deflate\""),
            ("application/json; charset=ISO-8859-1", None, latin, "charset is \"ISO-8859-1\""),
            ("application/json;a=b; Charset = \"utf-16\"", None, latin, "charset is \"utf-16\""),
        ] {
            let error = read(content_type, encoding, body).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        // What is said of a body that can be read all the same is not judged.
        for (content_type, encoding) in [
            ("application/json; charset=ISO-8859-1", None),
            ("application/json", Some("utf-8")),
            ("application/json", Some("gzip")),
        ] {
            assert_eq!(read(content_type, encoding, b"7"), Ok(7));
        }
        for (content_type, encoding) in [
            ("application/json; charset=UTF-8", Some("identity")),
            ("application/json", Some("utf-8")),
            ("application/json; charset=\"us-ascii\"", Some("")),
        ] {
            assert_eq!(read(content_type, encoding, b"{"), Err("the body as JSON".to_owned()));
        }
    }

    #[test]
    fn an_id_is_made_where_there_is_none() {
        let (one, other) = (job(None, Vec::new()), job(None, Vec::new()));
        assert_eq!(one.id().len(), 32);
        assert_ne!(one.id(), other.id());
        assert_eq!(one.id(), one.clone().id());
    }
}
