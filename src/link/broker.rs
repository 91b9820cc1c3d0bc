//! The address of a broker, and the two connections that everything on it shares.

use std::{fmt, net::Ipv6Addr, str::FromStr, sync::Arc};

use lapin::{ConnectionProperties, tcp::OwnedTLSConfig, uri::AMQPUri};

use super::{connection::Shared, dial::no_address};
use crate::Error;

/// A broker, shared by any number of consumers: one connection to consume, one to publish.
///
/// One connection for all consumers means that what kills it disturbs all of them. A message that
/// cannot be read (see [`ErrorKind::Unreadable`](crate::ErrorKind::Unreadable)) does so once; then
/// the consumer that met it tries again on a connection of its own.
///
/// Cheap to clone. Nothing is connected before it is needed, and a connection that dies is opened
/// again. The publishing connection is apart so that a broker that blocks publishers, at a memory
/// or disk alarm, does not freeze the acks. A connection that is silent for 40 s is dead; the
/// address may say otherwise with `?heartbeat=` and half of it in seconds.
///
/// It may be used from several runtimes. All connections of the process have their I/O on one thread
/// of their own, which runs as long as one of them exists.
///
/// ```
/// # use lapin_retry::Broker;
/// let broker = Broker::new("amqp://guest:guest@localhost:5672/%2f")?;
/// # Ok::<(), lapin_retry::Error>(())
/// ```
#[derive(Clone)]
pub struct Broker(pub(super) Arc<Inner>);

pub(super) struct Inner {
    addresses: Result<Vec<AMQPUri>, Error>,
    properties: ConnectionProperties,
    tls: OwnedTLSConfig,
    pub(super) publishing: Shared,
    pub(super) consuming: Shared,
    /// Only while publishers are blocked.
    pub(super) declaring: Shared,
}

impl Inner {
    fn new(addresses: Result<Vec<AMQPUri>, Error>) -> Self {
        Self {
            addresses,
            properties: ConnectionProperties::default(),
            tls: OwnedTLSConfig::default(),
            publishing: Shared::default(),
            consuming: Shared::default(),
            declaring: Shared::default(),
        }
    }

    /// The same broker over connections of its own.
    fn again(&self) -> Self {
        let again = Self::new(self.addresses.clone());
        Self { properties: self.properties.clone(), tls: self.tls.clone(), ..again }
    }
}

impl Broker {
    /// The broker at `url`, as `amqp://user:password@host:port/vhost`; with TLS `amqps://`. Without
    /// a vhost it is `/`; an IPv6 address stands in brackets, as in `amqp://[2001:db8::5]`.
    ///
    /// Several addresses, with commas between them, are the nodes of one cluster: see
    /// [`any_of`](Self::any_of).
    ///
    /// # Errors
    /// [`ErrorKind::Configuration`](crate::ErrorKind::Configuration): the text is no such URL. The
    /// error does not repeat it, since it may hold a password.
    pub fn new(url: &str) -> Result<Self, Error> {
        Self::any_of([url])
    }

    /// The cluster whose nodes are at these URLs. Each try to connect goes from one to the next, in
    /// random order, until one answers.
    ///
    /// ```
    /// # use lapin_retry::Broker;
    /// let broker = Broker::any_of(["amqp://me:secret@rabbit-1", "amqp://me:secret@rabbit-2"])?;
    /// # Ok::<(), lapin_retry::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Configuration`](crate::ErrorKind::Configuration): there are none, one of them is
    /// no AMQP URL, or they differ in the vhost, which would be another queue, or in the user.
    pub fn any_of<U: AsRef<str>>(urls: impl IntoIterator<Item = U>) -> Result<Self, Error> {
        Ok(Self(Arc::new(Inner::new(Ok(addresses(urls)?)))))
    }

    /// The same broker with these connection properties, such as client properties or an
    /// authentication provider. The connection's name is set here. A provider is called on the threads
    /// of the connections, which it must not block for long.
    ///
    /// **Leave lapin's own recovery off** (`enable_auto_recover`). Lost connections are opened again
    /// here, with their channels and consumers; lapin's recovery beside it would bring some of them
    /// back without a word, and others not at all. It finds no connection to recover.
    #[must_use]
    pub fn with_properties(self, properties: ConnectionProperties) -> Self {
        Self(Arc::new(Inner { properties, ..self.0.again() }))
    }

    /// The same broker with a private CA, a client certificate, or both, for `amqps` addresses.
    /// Takes this crate's feature `tls`, or one of lapin's.
    ///
    /// ```no_run
    /// use std::fs;
    /// use lapin_retry::{Broker, lapin::tcp::{OwnedIdentity, OwnedTLSConfig}};
    ///
    /// let tls = OwnedTLSConfig {
    ///     cert_chain: Some(fs::read_to_string("ca.pem")?),
    ///     identity: Some(OwnedIdentity::PKCS8 {
    ///         pem: fs::read("client.pem")?,
    ///         key: fs::read("client.key")?,
    ///     }),
    /// };
    /// let broker = Broker::new("amqps://me:secret@rabbit-1")?.with_tls(tls);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// To log in with the certificate in place of a password, add `?auth_mechanism=external` to the
    /// address.
    #[must_use]
    pub fn with_tls(self, tls: OwnedTLSConfig) -> Self {
        Self(Arc::new(Inner { tls, ..self.0.again() }))
    }

    /// Never none.
    pub(super) fn addresses(&self) -> Result<&[AMQPUri], Error> {
        self.0.addresses.as_deref().map_err(Clone::clone)
    }

    pub(super) fn properties(&self) -> &ConnectionProperties {
        &self.0.properties
    }

    pub(super) fn tls(&self) -> &OwnedTLSConfig {
        &self.0.tls
    }
}

fn addresses<U: AsRef<str>>(urls: impl IntoIterator<Item = U>) -> Result<Vec<AMQPUri>, Error> {
    let mut addresses = Vec::new();
    for list in urls {
        for url in split(list.as_ref()) {
            addresses.push(parse(url)?);
        }
    }
    let Some(first) = addresses.first() else {
        return Err(no_address());
    };
    if addresses.iter().any(|address| address.vhost != first.vhost) {
        return Err(Error::configuration(
            "broker: the addresses name different vhosts; they are the nodes of one cluster, so give \
             all of them the same vhost, and another vhost a Broker of its own",
        ));
    }
    // The broker takes no message whose user id is another's.
    let user = |address: &AMQPUri| address.authority.userinfo.username.clone();
    if addresses.iter().any(|address| user(address) != user(first)) {
        return Err(Error::configuration(
            "broker: the addresses name different users; use one for all nodes",
        ));
    }
    Ok(addresses)
}

/// The addresses in a list with commas. A password may hold a comma, too.
fn split(list: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut start = 0;
    for (comma, _) in list.match_indices(',') {
        let next = list[comma + 1..].trim_start();
        if next.starts_with("amqp://") || next.starts_with("amqps://") {
            found.push(list[start..comma].trim());
            start = comma + 1;
        }
    }
    found.push(list[start..].trim());
    found
}

fn parse(url: &str) -> Result<AMQPUri, Error> {
    if url.starts_with("http://") || url.starts_with("https://") {
        return Err(Error::configuration(
            "broker: the address is no AMQP URL but an HTTP one; the broker's own begins with \
             amqp:// or amqps://, and that of its management API belongs into \
             Settings::management, in a file into management_env",
        ));
    }
    let mut address = AMQPUri::from_str(url).map_err(|_| {
        Error::configuration(
            "broker: the address is no AMQP URL; write it like \
             amqp://user:password@host:5672/vhost, with %2f for the vhost \"/\"; several stand in \
             full, with commas between them",
        )
    })?;
    if address.authority.host.contains(',') {
        return Err(Error::configuration(format!(
            "broker: the address names several hosts, {}; write the address of each in full, with \
             commas between them: amqp://user:password@host-1/vhost,amqp://user:password@host-2/vhost",
            address.authority.host
        )));
    }
    // lapin takes such a host for none, which is localhost.
    if let Some(host) = ipv6(url) {
        address.authority.host = host.to_string();
    }
    Ok(address)
}

/// The host of an address, if it is in brackets.
fn ipv6(url: &str) -> Option<Ipv6Addr> {
    let (_, rest) = url.split_once("://")?;
    let authority = rest.split(['/', '?', '#']).next()?;
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    host.strip_prefix('[')?.split_once(']')?.0.parse().ok()
}

/// Takes the URL as it is; what is wrong with it is said when it is used.
impl From<&str> for Broker {
    fn from(url: &str) -> Self {
        Self(Arc::new(Inner::new(addresses([url]))))
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
        for uri in self.addresses().unwrap_or_default() {
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

    #[test]
    fn a_cluster_has_at_least_one_address_and_one_vhost() {
        let broker = Broker::any_of(["amqp://a/v", "amqps://b:5671/v"]).unwrap();
        assert_eq!(broker.addresses().unwrap().len(), 2);
        let none: [&str; 0] = [];
        assert!(Broker::any_of(none).is_err());
        assert!(Broker::any_of(["amqp://a/v", "amqp://b/w"]).is_err());
        let error = Broker::any_of(["amqp://a/v", "me:hunter2@b"]).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    }

    #[test]
    fn addresses_are_told_apart_although_a_password_holds_a_comma() {
        assert_eq!(split("amqp://a"), ["amqp://a"]);
        assert_eq!(split("amqp://a,amqps://b, amqp://c"), ["amqp://a", "amqps://b", "amqp://c"]);
        assert_eq!(split("amqp://me:x,y@a,amqp://b"), ["amqp://me:x,y@a", "amqp://b"]);
        let vhosts = |broker: Broker| {
            let addresses = broker.addresses().unwrap();
            addresses.iter().map(|uri| uri.vhost.clone()).collect::<Vec<_>>()
        };
        assert_eq!(vhosts(Broker::from("amqp://a/v,amqp://b/v")), ["v", "v"]);
        assert_eq!(vhosts(Broker::any_of(["amqp://a,amqp://b", "amqp://c"]).unwrap()), ["/"; 3]);
        let error = Broker::from("amqp://a,b/v").addresses().unwrap_err().to_string();
        assert!(error.contains("several hosts, a,b") && error.contains("in full"), "{error}");
    }

    #[test]
    fn a_host_in_brackets_is_an_ipv6_address() {
        let host = |url: &str| {
            let authority = parse(url).unwrap().authority;
            (authority.host, authority.port)
        };
        assert_eq!(host("amqp://[2001:db8::5]"), ("2001:db8::5".to_owned(), 5672));
        assert_eq!(host("amqps://me:a%40@[::1]:99/[::2]?heartbeat=5"), ("::1".to_owned(), 99));
        assert_eq!(host("amqp://me:[::3]@h/[::2]"), ("h".to_owned(), 5672));
        assert_eq!(host("amqp://127.0.0.1:1/v"), ("127.0.0.1".to_owned(), 1));
        assert_eq!(host("amqp:///v"), ("localhost".to_owned(), 5672));
        for url in ["amqp://[::1", "amqp://[fe80::1%25eth0]/", "amqp://[localhost]/"] {
            assert!(parse(url).is_err(), "{url}");
        }
    }
}
