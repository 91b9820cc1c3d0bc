//! Looks at a broker through its management API.
//!
//! The queues are read with `disable_stats`: the statistics tell of a queue's policy only seconds
//! after the queue was made (up to 9 s measured), and are dear where there are many queues.

use std::time::Instant;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use ureq::{
    Agent,
    http::header::AUTHORIZATION,
    tls::{RootCerts, TlsConfig},
};

use super::{
    BOUND,
    seen::{Policy, Queue, Seen, Version},
    split,
};
use crate::topology::{all, literally};

const PAGE: usize = 500;
/// More than these are not looked at: each costs a request.
const OPERATOR_POLICIES: usize = 20;

/// In a task that may block, and ends at the bound although nobody can stop it.
pub(super) async fn look(address: &str, vhost: &str, work_queue: &str) -> Result<Seen, String> {
    let (base, user) = split(address).ok_or("the address is no HTTP URL")?;
    let host = base.split_once("://").map_or("", |(_, host)| host).to_owned();
    let api = Api {
        agent: Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .tls_config(TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build())
            .build()
            .into(),
        base,
        authorization: user.map(authorization),
        vhost: encoded(vhost),
        deadline: Instant::now() + BOUND,
    };
    let work_queue = work_queue.to_owned();
    let looked = tokio::task::spawn_blocking(move || api.look(&work_queue)).await;
    let looked = looked.unwrap_or_else(|_| Err("the look at it was ended".to_owned()));
    looked.map_err(|why| format!("the management API at {host}: {why}"))
}

struct Api {
    agent: Agent,
    base: String,
    authorization: Option<String>,
    vhost: String,
    deadline: Instant,
}

#[derive(Deserialize)]
struct Overview {
    rabbitmq_version: String,
}

#[derive(Deserialize)]
struct PolicyInfo {
    name: String,
    pattern: String,
    #[serde(rename = "apply-to", default)]
    apply_to: String,
    #[serde(default)]
    priority: i64,
    #[serde(default, deserialize_with = "object")]
    definition: Map<String, Value>,
}

#[derive(Deserialize)]
struct QueueInfo {
    name: String,
    #[serde(default)]
    r#type: String,
    #[serde(default)]
    durable: bool,
    #[serde(default)]
    auto_delete: bool,
    #[serde(default, deserialize_with = "object")]
    arguments: Map<String, Value>,
    policy: Option<String>,
}

#[derive(Deserialize)]
struct Page<T> {
    items: Vec<T>,
    #[serde(default)]
    page_count: usize,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

/// The broker writes an empty object as a list in places.
fn object<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Map<String, Value>, D::Error> {
    Ok(match Value::deserialize(from)? {
        Value::Object(object) => object,
        _ => Map::new(),
    })
}

impl Api {
    fn look(&self, work_queue: &str) -> Result<Seen, String> {
        let overview: Overview = self.get("overview?columns=rabbitmq_version")?;
        let version = &overview.rabbitmq_version;
        let unknown = || format!("its version {version:?} is not understood");
        let version = Version::parse(version).ok_or_else(unknown)?;
        let mut seen = Seen { version, ..Seen::default() };
        let policies: Vec<PolicyInfo> = self.get(&format!("policies/{}", self.vhost))?;
        let columns = "name,type,durable,auto_delete,arguments,policy";
        let queues: Vec<QueueInfo> = self.queues(&format!("(?-i){}", all(work_queue)), columns)?;
        for queue in queues {
            let of_name = |name: String| policies.iter().find(|policy| policy.name == name);
            let seen_queue = Queue {
                quorum: queue.r#type == "quorum",
                durable: queue.durable,
                auto_delete: queue.auto_delete,
                arguments: queue.arguments,
                policy: queue.policy.and_then(of_name).map(PolicyInfo::policy),
                operator_policy: None,
            };
            seen.queues.insert(queue.name, seen_queue);
        }
        self.look_at_operator_policies(work_queue, &mut seen)?;
        Ok(seen)
    }

    /// Before 4.3 a queue does not tell, without statistics, which of these it has. So the broker
    /// is asked which queues a pattern matches: nobody else reads it as the broker does.
    fn look_at_operator_policies(&self, work_queue: &str, seen: &mut Seen) -> Result<(), String> {
        let mut policies: Vec<PolicyInfo> =
            self.get(&format!("operator-policies/{}", self.vhost))?;
        policies.retain(|policy| policy.apply_to != "exchanges" && policy.apply_to != "streams");
        if policies.len() > OPERATOR_POLICIES {
            return Err(format!("there are more than {OPERATOR_POLICIES} operator policies"));
        }
        policies.sort_by_key(|policy| std::cmp::Reverse(policy.priority));
        for policy in policies {
            let pattern =
                format!(r"(?-i)(?=^{})(?=[\s\S]*?(?:{}))", literally(work_queue), policy.pattern);
            for Named { name } in self.queues(&pattern, "name")? {
                if let Some(queue) = seen.queues.get_mut(&name)
                    && queue.operator_policy.is_none()
                    && policy.applies_to(queue)
                {
                    queue.operator_policy = Some(policy.policy());
                }
            }
        }
        Ok(())
    }

    /// The queues whose names the pattern matches, whatever their number.
    fn queues<T: DeserializeOwned>(&self, pattern: &str, columns: &str) -> Result<Vec<T>, String> {
        let mut all = Vec::new();
        for page in 1.. {
            let (vhost, pattern) = (&self.vhost, encoded(pattern));
            let got: Page<T> = self.get(&format!(
                "queues/{vhost}?disable_stats=true&page={page}&page_size={PAGE}&use_regex=true\
                 &name={pattern}&columns={columns}"
            ))?;
            all.extend(got.items);
            if page >= got.page_count {
                break;
            }
        }
        Ok(all)
    }

    /// An error repeats neither the address nor what was sent.
    fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, String> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let request = self.agent.get(format!("{}/api/{path}", self.base));
        let mut request = request.config().timeout_global(Some(left)).build();
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let mut response = request.call().map_err(|error| failed(&error))?;
        let status = response.status();
        if !status.is_success() {
            let hint = match status.as_u16() {
                401 | 403 => "; it takes a user with the tag management, and their password",
                404 => "; is that the management API, and may its user see the vhost?",
                _ => "",
            };
            return Err(format!("{status}{hint}"));
        }
        let text = response.body_mut().read_to_string().map_err(|error| failed(&error))?;
        serde_json::from_str(&text)
            .map_err(|error| format!("its answer is not understood: {error}"))
    }
}

/// Whoever waits for the look gives up at the same moment, and may be later: both say the same.
fn failed(error: &ureq::Error) -> String {
    match error {
        ureq::Error::Timeout(_) => format!("did not answer within {BOUND:?}"),
        other => other.to_string(),
    }
}

impl PolicyInfo {
    fn policy(&self) -> Policy {
        Policy {
            name: self.name.clone(),
            priority: self.priority,
            definition: self.definition.clone(),
        }
    }

    fn applies_to(&self, queue: &Queue) -> bool {
        match self.apply_to.as_str() {
            "quorum_queues" => queue.quorum,
            "classic_queues" => !queue.quorum,
            _ => true,
        }
    }
}

fn authorization(user: &str) -> String {
    let (name, password) = user.split_once(':').unwrap_or((user, ""));
    let decoded = |text| percent_decode_str(text).collect::<Vec<u8>>();
    let credentials = [decoded(name), b":".to_vec(), decoded(password)].concat();
    format!("Basic {}", STANDARD.encode(credentials))
}

fn encoded(segment: &str) -> String {
    utf8_percent_encode(segment, NON_ALPHANUMERIC).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_sent_as_it_was_before_it_was_written_into_an_address() {
        assert_eq!(authorization("martin:secret"), "Basic bWFydGluOnNlY3JldA==");
        assert_eq!(authorization("a%40b:c%3Ad"), format!("Basic {}", STANDARD.encode("a@b:c:d")));
    }
}
