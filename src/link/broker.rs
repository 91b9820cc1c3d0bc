//! The address of a broker, and the two connections that everything on it shares.

use std::{fmt, str::FromStr, sync::Arc};

use lapin::{ConnectionProperties, uri::AMQPUri};

use super::connection::Shared;
use crate::Error;

/// A broker, shared by any number of consumers: one connection to consume, one to publish.
///
/// One connection for all consumers means that what kills it disturbs all of them. A message that
/// cannot be read (see [`ErrorKind::Unreadable`](crate::ErrorKind::Unreadable)) does so once; then
/// the consumer that met it tries again on a connection of its own.
///
/// Cheap to clone. Nothing is connected before it is needed, and a connection that dies is opened
/// again. The publishing connection is apart so that a broker that blocks publishers, at a memory
/// or disk alarm, does not freeze the acks.
///
/// ```
/// # use lapin_retry::Broker;
/// let broker = Broker::new("amqp://guest:guest@localhost:5672/%2f")?;
/// # Ok::<(), lapin_retry::Error>(())
/// ```
#[derive(Clone)]
pub struct Broker(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub(super) address: Result<AMQPUri, Error>,
    pub(super) properties: ConnectionProperties,
    pub(super) publishing: Shared,
    pub(super) consuming: Shared,
}

impl Broker {
    /// The broker at `url`, as `amqp://user:password@host:port/vhost`.
    ///
    /// # Errors
    /// [`ErrorKind::Configuration`](crate::ErrorKind::Configuration): the text is no such URL. The
    /// error does not repeat it, since it may hold a password.
    pub fn new(url: &str) -> Result<Self, Error> {
        let broker = Self::from(url);
        broker.address()?;
        Ok(broker)
    }

    /// The same broker with these connection properties, such as client properties or an
    /// authentication provider. The connection's name is set here; lapin's own recovery must be
    /// left off.
    #[must_use]
    pub fn with_properties(self, properties: ConnectionProperties) -> Self {
        Self(Arc::new(Inner {
            address: self.0.address.clone(),
            properties,
            publishing: Shared::default(),
            consuming: Shared::default(),
        }))
    }

    pub(super) fn address(&self) -> Result<&AMQPUri, Error> {
        self.0.address.as_ref().map_err(Clone::clone)
    }
}

/// Takes the URL as it is; what is wrong with it is said when it is used.
impl From<&str> for Broker {
    fn from(url: &str) -> Self {
        let address = AMQPUri::from_str(url).map_err(|_| {
            Error::configuration(
                "broker: the address is no AMQP URL; write it like \
                 amqp://user:password@host:5672/vhost, with %2f for the vhost \"/\"",
            )
        });
        Self(Arc::new(Inner {
            address,
            properties: ConnectionProperties::default(),
            publishing: Shared::default(),
            consuming: Shared::default(),
        }))
    }
}

impl From<String> for Broker {
    fn from(url: String) -> Self {
        Self::from(url.as_str())
    }
}

impl From<&String> for Broker {
    fn from(url: &String) -> Self {
        Self::from(url.as_str())
    }
}

impl From<&Broker> for Broker {
    fn from(broker: &Broker) -> Self {
        broker.clone()
    }
}

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Broker");
        if let Ok(uri) = &self.0.address {
            out.field("host", &uri.authority.host)
                .field("port", &uri.authority.port)
                .field("vhost", &uri.vhost);
        }
        out.finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_in_no_error_and_no_debug_text() {
        let broker = Broker::new("amqp://me:hunter2@localhost:5672/%2f").unwrap();
        assert!(!format!("{broker:?}").contains("hunter2"));
        for url in ["http://me:hunter2@localhost", "hunter2", "amqp://me:hunter2@localhost:99999"] {
            let error = Broker::new(url).expect_err(url);
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
    }
}
