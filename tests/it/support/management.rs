//! The management HTTP API, seen from one vhost.
//!
//! The broker gathers its statistics every five seconds. Names, types, arguments and the content of a
//! queue are current; counters (`messages`, `messages_dlx`, rates) and the lists of connections and
//! consumers lag: poll them with `eventually`, and take exact counts of ready messages with `count`.

use super::{PATIENCE, variable};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use ureq::{Agent, http};

/// A client that panics when the broker refuses, because then the test's set-up is broken.
#[derive(Debug, Clone)]
pub(crate) struct Management {
    agent: Agent,
    base: String,
    authorization: String,
    vhost: String,
}

impl Management {
    pub(crate) fn new(vhost: &str) -> Self {
        let url = variable("RABBITMQ_MANAGEMENT_URL");
        let (credentials, host) = url
            .strip_prefix("http://")
            .and_then(|rest| rest.trim_end_matches('/').split_once('@'))
            .unwrap_or_else(|| panic!("RABBITMQ_MANAGEMENT_URL is not http://user:pass@host:port"));
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(Duration::from_secs(30)))
            // One that a busy broker closes at the same moment would fail the request.
            .max_idle_connections(0)
            .build()
            .into();
        Self {
            agent,
            base: format!("http://{host}/api"),
            authorization: format!("Basic {}", base64(credentials.as_bytes())),
            vhost: encode(vhost),
        }
    }

    /// The resource at `path` below `/api/`, or `None` if there is none.
    pub(crate) fn get(&self, path: &str) -> Option<Value> {
        match self.request("GET", path, None) {
            Ok((404, _)) => None,
            answer => Some(expect_json("GET", path, answer)),
        }
    }

    pub(crate) fn put(&self, path: &str, body: &Value) {
        expect_success("PUT", path, self.request("PUT", path, Some(body)));
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Value {
        expect_json("POST", path, self.request("POST", path, Some(body)))
    }

    /// Imports a definitions file into the vhost, as the management UI does.
    pub(crate) fn import(&self, definitions: &Value) {
        let path = format!("definitions/{}", self.vhost);
        expect_success("POST", &path, self.request("POST", &path, Some(definitions)));
    }

    pub(crate) fn delete(&self, path: &str) {
        expect_success("DELETE", path, self.request("DELETE", path, None));
    }

    /// Deletes what may be gone already. Never panics, so it may run in a `drop` during a panic.
    pub(crate) fn try_delete(&self, path: &str) {
        match self.request("DELETE", path, None) {
            Ok((200..=299 | 404, _)) => {}
            other => eprintln!("left behind on the broker: {path}: {other:?}"),
        }
    }

    /// The queue with its `type`, `arguments` and statistics such as a quorum queue's `messages_dlx`.
    pub(crate) fn queue(&self, name: &str) -> Option<Value> {
        self.get(&format!("queues/{}/{}", self.vhost, encode(name)))
    }

    /// The names of the vhost's queues, sorted.
    pub(crate) fn queues(&self) -> Vec<String> {
        let path = format!("queues/{}?columns=name", self.vhost);
        let queues = self.list(&path);
        let name = |queue: &Value| queue["name"].as_str().expect("a name").to_owned();
        let mut names: Vec<String> = queues.iter().map(name).collect();
        names.sort();
        names
    }

    /// Up to `n` messages with `properties`, `headers` and `payload`; they stay in the queue, but come
    /// back marked as redelivered, and in a quorum queue each look counts as a delivery.
    pub(crate) fn peek(&self, queue: &str, n: u32) -> Vec<Value> {
        self.messages(queue, n, "ack_requeue_true")
    }

    /// Like [`peek`](Self::peek), but the messages leave the queue.
    pub(crate) fn take(&self, queue: &str, n: u32) -> Vec<Value> {
        self.messages(queue, n, "ack_requeue_false")
    }

    /// Looks at up to `n` messages as the UI's "Get messages" does, with the acknowledgement mode
    /// `ack_requeue_true` or `reject_requeue_true`, and returns how many it saw. None if the broker
    /// refuses, as it may just after a restart.
    pub(crate) fn look(&self, queue: &str, n: u32, ackmode: &str) -> Option<usize> {
        let path = format!("queues/{}/{}/get", self.vhost, encode(queue));
        let body = json!({ "count": n, "ackmode": ackmode, "encoding": "auto" });
        let (200, text) = self.request("POST", &path, Some(&body)).ok()? else { return None };
        Some(serde_json::from_str::<Value>(&text).ok()?.as_array()?.len())
    }

    /// Sets a policy for all queues that match `pattern`. It takes effect a moment later.
    pub(crate) fn set_policy(&self, name: &str, pattern: &str, priority: i32, definition: &Value) {
        self.put(
            &format!("policies/{}/{}", self.vhost, encode(name)),
            &json!({ "pattern": pattern, "priority": priority, "apply-to": "queues", "definition": definition }),
        );
    }

    pub(crate) fn delete_policy(&self, name: &str) {
        self.delete(&format!("policies/{}/{}", self.vhost, encode(name)));
    }

    pub(crate) fn set_vhost_limit_max_queues(&self, most: u32) {
        let path = format!("vhost-limits/{}/max-queues", self.vhost);
        self.put(&path, &json!({ "value": most }));
    }

    /// Makes a user who can log in by AMQP only. See `Vhost::user`, which also removes them.
    pub(crate) fn add_user(&self, name: &str, password: &str) {
        let user = json!({ "password": password, "tags": "" });
        self.put(&format!("users/{}", encode(name)), &user);
    }

    pub(crate) fn set_permissions(&self, user: &str, configure: &str, write: &str, read: &str) {
        self.put(
            &format!("permissions/{}/{}", self.vhost, encode(user)),
            &json!({ "configure": configure, "write": write, "read": read }),
        );
    }

    /// The vhost's connections; `name` is what [`close_connection`](Self::close_connection) wants,
    /// `user_provided_name` the one given by the client.
    /// The broker's major and minor version.
    pub(crate) fn version(&self) -> (u32, u32) {
        let overview = self.get("overview").expect("an overview");
        let version = overview["rabbitmq_version"].as_str().expect("a version");
        let mut parts = version.split('.').map(|part| part.parse().expect("a number"));
        (parts.next().expect("major"), parts.next().expect("minor"))
    }

    pub(crate) fn connections(&self) -> Vec<Value> {
        self.list(&format!("vhosts/{}/connections", self.vhost))
    }

    /// Closes a connection from the broker's side, as an operator does. It may be gone already.
    pub(crate) fn close_connection(&self, name: &str) {
        self.try_delete(&format!("connections/{}", encode(name)));
    }

    pub(crate) fn consumers(&self) -> Vec<Value> {
        self.list(&format!("consumers/{}", self.vhost))
    }

    pub(super) fn add_vhost(&self) {
        self.put(&format!("vhosts/{}", self.vhost), &json!({}));
    }

    /// Up to `n` messages, put back or not as "Get messages" of the management UI does it: its modes are
    /// `ack_requeue_true`, `reject_requeue_true`, `ack_requeue_false` and `reject_requeue_false`.
    pub(crate) fn messages(&self, queue: &str, n: u32, ackmode: &str) -> Vec<Value> {
        let path = format!("queues/{}/{}/get", self.vhost, encode(queue));
        let body = json!({ "count": n, "ackmode": ackmode, "encoding": "auto" });
        // Of a quorum queue that has just been declared RabbitMQ 3.10 may say so for a moment.
        let not_yet = |answer: &Answer| matches!(answer, Ok((400, why)) if why.contains("noproc"));
        let ask = || self.request("POST", &path, Some(&body));
        let (mut answer, started) = (ask(), Instant::now());
        while not_yet(&answer) && started.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(50));
            answer = ask();
        }
        match expect_json("POST", &path, answer) {
            Value::Array(mut messages) => {
                // The headers are nested in the properties; tests ask for them all the time.
                for message in &mut messages {
                    message["headers"] = message["properties"]["headers"].clone();
                }
                messages
            }
            other => panic!("{path}: not a list: {other}"),
        }
    }

    fn list(&self, path: &str) -> Vec<Value> {
        match self.get(path) {
            Some(Value::Array(items)) => items,
            other => panic!("{path}: not a list: {other:?}"),
        }
    }

    fn request(&self, method: &str, path: &str, body: Option<&Value>) -> Answer {
        let request = http::Request::builder()
            .method(method)
            .uri(format!("{}/{path}", self.base))
            .header("authorization", &self.authorization)
            .header("content-type", "application/json");
        let mut response = match body {
            Some(body) => self.agent.run(request.body(body.to_string())?)?,
            None => self.agent.run(request.body(())?)?,
        };
        let status = response.status().as_u16();
        Ok((status, response.body_mut().read_to_string()?))
    }
}

type Answer = Result<(u16, String), ureq::Error>;

fn expect_success(method: &str, path: &str, answer: Answer) -> String {
    match answer {
        Ok((200..=299, text)) => text,
        Ok((status, text)) => panic!("{method} {path}: {status} {text}"),
        Err(error) => panic!("{method} {path}: {error}"),
    }
}

fn expect_json(method: &str, path: &str, answer: Answer) -> Value {
    let text = expect_success(method, path, answer);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{method} {path}: {error}: {text}"))
}

/// One path segment, percent-encoded.
fn encode(segment: &str) -> String {
    let byte = |b: u8| match b {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
            char::from(b).to_string()
        }
        other => format!("%{other:02X}"),
    };
    segment.bytes().map(byte).collect()
}

/// Basic authentication is all we would want a crate for.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let byte = |i: usize| u32::from(chunk.get(i).copied().unwrap_or(0));
        let group = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            if digit <= chunk.len() {
                let index = (group >> (18 - 6 * digit)) & 63;
                text.push(char::from(DIGITS[index as usize]));
            } else {
                text.push('=');
            }
        }
    }
    text
}
