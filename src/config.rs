//! The configuration file: everything of the builder, for any number of consumers.

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    time::Duration,
};

use lapin::tcp::{OwnedIdentity, OwnedTLSConfig};
use serde::{Deserialize, de::Error as _};

use crate::{
    Broker, Builder, Declare, Doctor, Error, Pauses, Policies, QueueType, Reconnect, RetryConsumer,
    RetryPolicy, Select, Settings, policy::duration,
};

/// Where the broker's address is looked for when the file names no other variable.
const URL_VARIABLE: &str = "AMQP_URL";

/// A configuration file, read and checked.
///
/// ```toml
/// # The variable that holds the broker's address; this is the default. An address with a password
/// # does not belong in a file. Several addresses, with commas between them, are the nodes of one
/// # cluster.
/// url_env = "AMQP_URL"
/// # The same for the management API, for the doctor; without it the doctor does not look.
/// management_env = "RABBITMQ_MANAGEMENT_URL"
/// # Files in PEM format, for amqps addresses: a private CA, a client certificate and its key.
/// tls = { ca = "ca.pem", certificate = "client.pem", key = "client.key" }
///
/// [consumers.orders]                    # the name is yours
/// queue = "orders"                      # default: the name
/// policy = { levels = [15, "2m"], jitter = "equal", lanes = 8, max_age = "1d" }
/// # in place of levels: exponential = { initial = "500ms", multiplier = 2, max = "30s", attempts = 7 }
/// select = "type"                       # or "routing-key", or { header = "kind" }
/// types.sync = { levels = [5, 300], jitter = { proportional = 0.2 } }
/// pause = { first = 5, max = "5m" }
/// queue_type = "quorum"                 # or "classic"
/// declare = "create"                    # or "check", "off"
/// doctor = "warn"                       # or "refuse", "off"
/// confirm_timeout = 10
/// hand_offs = 64
/// remember_done = 0
/// crash_limit = 3
/// worker = "worker-1"
/// prefetch = 100
/// concurrency = 20
/// handler_timeout = "25m"
/// consumer_timeout = "30m"              # what the broker has; it is not set by this
/// reconnect = { first = "100ms", max = 30, limit = 20 } # without a limit: for ever
/// consumer_tag = "orders-1"
/// priority = 0
/// ```
///
/// Durations are whole seconds or text such as `"1m 30s"`. What is left out has its default, which
/// [`Builder`] and [`Settings`] tell.
#[derive(Clone, Debug)]
pub struct Config {
    url_env: String,
    management_env: Option<String>,
    tls: Tls,
    consumers: BTreeMap<String, Consumer>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default = "url_variable")]
    url_env: String,
    management_env: Option<String>,
    #[serde(default)]
    tls: Tls,
    consumers: BTreeMap<String, Consumer>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Tls {
    ca: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
}

impl Tls {
    fn read(&self) -> Result<OwnedTLSConfig, Error> {
        let cert_chain = self.ca.as_deref().map(|path| read("tls.ca", path)).transpose()?;
        let identity = match (&self.certificate, &self.key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => Some(OwnedIdentity::PKCS8 {
                pem: read("tls.certificate", certificate)?.into_bytes(),
                key: read("tls.key", key)?.into_bytes(),
            }),
            _ => {
                return Err(Error::configuration(
                    "tls: a certificate needs its key, and a key its certificate",
                ));
            }
        };
        Ok(OwnedTLSConfig { identity, cert_chain })
    }
}

fn read(field: &str, path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|error| {
        Error::configuration(format!("{field}: {}: {error}", path.display())).because(error)
    })
}

fn url_variable() -> String {
    URL_VARIABLE.to_owned()
}

#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "Fields")]
struct Consumer {
    queue: Option<String>,
    settings: Settings,
    prefetch: Option<u16>,
    concurrency: Option<usize>,
    handler_timeout: Option<Duration>,
    consumer_timeout: Option<Duration>,
    reconnect: Reconnect,
    consumer_tag: Option<String>,
    priority: Option<i32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    queue: Option<String>,
    #[serde(default)]
    policy: RetryPolicy,
    select: Option<Select>,
    #[serde(default)]
    types: BTreeMap<String, RetryPolicy>,
    #[serde(default)]
    pause: Pauses,
    #[serde(default)]
    queue_type: QueueType,
    #[serde(default)]
    declare: Declare,
    #[serde(default)]
    doctor: Doctor,
    #[serde(default, deserialize_with = "optional_duration")]
    confirm_timeout: Option<Duration>,
    hand_offs: Option<usize>,
    #[serde(default)]
    remember_done: usize,
    #[serde(default = "crash_limit")]
    crash_limit: u32,
    worker: Option<String>,
    prefetch: Option<u16>,
    concurrency: Option<usize>,
    #[serde(default, deserialize_with = "optional_duration")]
    handler_timeout: Option<Duration>,
    #[serde(default, deserialize_with = "optional_duration")]
    consumer_timeout: Option<Duration>,
    #[serde(default)]
    reconnect: Reconnect,
    consumer_tag: Option<String>,
    priority: Option<i32>,
}

fn crash_limit() -> u32 {
    Settings::default().crash_limit
}

fn optional_duration<'de, D: serde::Deserializer<'de>>(
    from: D,
) -> Result<Option<Duration>, D::Error> {
    duration(from).map(Some)
}

impl TryFrom<Fields> for Consumer {
    type Error = Error;

    /// Checks all of it together, so that the error has the place in the file.
    fn try_from(fields: Fields) -> Result<Self, Error> {
        let mut policies = Policies::new(fields.policy);
        if fields.select.is_some() && fields.types.is_empty() {
            return Err(Error::configuration(
                "select: there are no types to select; add them as types.NAME = { .. }, or drop it",
            ));
        }
        policies = policies.select(fields.select.unwrap_or_default());
        for (value, policy) in fields.types {
            policies = policies.with(value, policy);
        }
        let mut settings = Settings::new(policies)
            .pauses(fields.pause)
            .queue_type(fields.queue_type)
            .declare(fields.declare)
            .doctor(fields.doctor)
            .remember_done(fields.remember_done)
            .crash_limit(fields.crash_limit);
        if let Some(timeout) = fields.confirm_timeout {
            settings = settings.confirm_timeout(timeout);
        }
        if let Some(in_flight) = fields.hand_offs {
            settings = settings.hand_offs(in_flight);
        }
        if let Some(worker) = fields.worker {
            settings = settings.worker(worker);
        }
        let consumer = Self {
            queue: fields.queue,
            settings,
            prefetch: fields.prefetch,
            concurrency: fields.concurrency,
            handler_timeout: fields.handler_timeout,
            consumer_timeout: fields.consumer_timeout,
            reconnect: fields.reconnect,
            consumer_tag: fields.consumer_tag,
            priority: fields.priority,
        };
        // Any broker and queue will do to find a contradiction.
        let broker = Broker::from("amqp://localhost");
        consumer.builder(broker, "queue", consumer.settings.clone()).check()?;
        Ok(consumer)
    }
}

impl Consumer {
    fn builder(&self, broker: Broker, name: &str, settings: Settings) -> Builder {
        let queue = self.queue.as_deref().unwrap_or(name);
        let mut builder =
            RetryConsumer::builder(broker, queue).settings(settings).reconnect(self.reconnect);
        if let Some(jobs) = self.prefetch {
            builder = builder.prefetch(jobs);
        }
        if let Some(handlers) = self.concurrency {
            builder = builder.concurrency(handlers);
        }
        if let Some(timeout) = self.handler_timeout {
            builder = builder.handler_timeout(timeout);
        }
        if let Some(timeout) = self.consumer_timeout {
            builder = builder.consumer_timeout(timeout);
        }
        if let Some(tag) = &self.consumer_tag {
            builder = builder.consumer_tag(tag);
        }
        if let Some(priority) = self.priority {
            builder = builder.priority(priority);
        }
        builder
    }
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// [`ErrorKind::Configuration`](crate::ErrorKind::Configuration) with the file, the line and the
    /// field: the file cannot be read, is no TOML, has an unknown key, a value of a wrong kind or
    /// unit, or settings that contradict each other.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|error| {
            Error::configuration(format!("{}: {error}", path.display())).because(error)
        })?;
        Self::parse(&text, path.display())
    }

    fn parse(text: &str, place: impl fmt::Display) -> Result<Self, Error> {
        let file: File = toml::from_str(text).map_err(|error| {
            let line = error
                .span()
                .map(|span| text[..span.start].bytes().filter(|b| *b == b'\n').count() + 1);
            let line = line.map_or(String::new(), |line| format!(":{line}"));
            // The Display of toml's error would repeat the line, and with it what it holds.
            Error::configuration(format!("{place}{line}: {}", without_login(error.message())))
        })?;
        if file.consumers.is_empty() {
            let why = toml::de::Error::custom("no consumers; add a table [consumers.NAME]");
            return Err(Error::configuration(format!("{place}: {}", why.message())));
        }
        let File { url_env, management_env, tls, consumers } = file;
        Ok(Self { url_env, management_env, tls, consumers })
    }

    /// The broker whose address is in the environment, or the cluster whose addresses are.
    ///
    /// # Errors
    /// [`ErrorKind::Configuration`](crate::ErrorKind::Configuration), naming the variable: it is not
    /// set, or holds no AMQP URL. What it holds is not repeated. Or a file named under `tls` cannot
    /// be read.
    pub fn broker(&self) -> Result<Broker, Error> {
        let variable = &self.url_env;
        let what = "the broker's address, such as amqp://user:password@host:5672/%2f";
        let url = from_environment(variable, what)?;
        let broker = Broker::new(&url)
            .map_err(|error| Error::configuration(format!("{variable}: {error}")))?;
        Ok(broker.with_tls(self.tls.read()?))
    }

    /// The names of the consumers in the file.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.consumers.keys().map(String::as_str)
    }

    /// A builder with all that the file says of this consumer.
    ///
    /// # Errors
    /// [`ErrorKind::Configuration`](crate::ErrorKind::Configuration): the file has no such consumer,
    /// or names a variable for the management API that is not set.
    pub fn builder(&self, broker: impl Into<Broker>, name: &str) -> Result<Builder, Error> {
        Ok(self.consumer(name)?.builder(broker.into(), name, self.settings(name)?))
    }

    /// The settings of this consumer, for [`Retry::attach`](crate::Retry::attach) and
    /// [`Handle::reload`](crate::Handle::reload). What the file leaves out has its default there, too:
    /// of what a reload changes only classifiers, which are code, stay as they are.
    ///
    /// # Errors
    /// As [`builder`](Self::builder).
    pub fn settings(&self, name: &str) -> Result<Settings, Error> {
        let settings = self.consumer(name)?.settings.clone();
        let Some(variable) = &self.management_env else { return Ok(settings) };
        let what = "the management API's address, such as http://user:password@host:15672";
        Ok(settings.management(from_environment(variable, what)?))
    }

    /// The policies of this consumer, for a look at its levels.
    ///
    /// # Errors
    /// [`ErrorKind::Configuration`](crate::ErrorKind::Configuration): the file has no such consumer.
    pub fn policies(&self, name: &str) -> Result<&Policies, Error> {
        Ok(&self.consumer(name)?.settings.policies)
    }

    fn consumer(&self, name: &str) -> Result<&Consumer, Error> {
        self.consumers.get(name).ok_or_else(|| {
            let known: Vec<_> = self.names().collect();
            Error::configuration(format!(
                "consumers.{name}: the file has no such consumer, only {}",
                known.join(", ")
            ))
        })
    }
}

fn from_environment(variable: &str, what: &str) -> Result<String, Error> {
    std::env::var(variable)
        .map_err(|_| Error::configuration(format!("{variable}: not set; it holds {what}")))
}

/// An address that stands where none belongs is repeated in the error without its name and password,
/// whatever signs its writer forgot to encode.
fn without_login(message: &str) -> String {
    let login = message.find("://").map(|at| at + 3).zip(message.rfind('@'));
    match login.filter(|(start, end)| start < end) {
        Some((start, end)) => format!("{}{}", &message[..start], &message[end..]),
        None => message.to_owned(),
    }
}
