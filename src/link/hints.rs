//! What it means that no connection came about, for somebody who has only the address.

use std::io;

use lapin::uri::{AMQPAuthority, AMQPUri};

use super::connection::refused;
use crate::{Error, ErrorKind, topology::shell};

/// Which ports speak what, unless the broker is configured otherwise.
const PORTS: &str = "by default AMQP is on port 5672, AMQP over TLS on 5671, and 15672 is the \
                     management API's";

/// Why a connection could not be opened.
pub(super) enum NotConnected {
    Io(io::Error),
    /// The TLS handshake failed.
    Tls(io::Error),
    Lapin(lapin::Error),
    NoTls,
}

impl From<io::Error> for NotConnected {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<lapin::Error> for NotConnected {
    fn from(error: lapin::Error) -> Self {
        Self::Lapin(error)
    }
}

/// `host:port`, as it is written in an address.
pub(super) fn place(authority: &AMQPAuthority) -> String {
    let AMQPAuthority { host, port, .. } = authority;
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

impl NotConnected {
    /// What went wrong, at which address, and what to do about it.
    pub(super) fn explain(self, uri: &AMQPUri) -> Error {
        let what = format!("connecting to {}", place(&uri.authority));
        let because_of = |error: io::Error, hint: &str| {
            let text = format!("{what}: {error}{hint}");
            Error::new(ErrorKind::Connection, text).because(error)
        };
        match self {
            Self::Io(error) => because_of(error, ""),
            Self::Tls(error) => {
                let hint = about_tls(&error.to_string());
                because_of(error, &hint)
            }
            Self::Lapin(error) => {
                let why = refused(&error, &what);
                let hint = about_amqp(&error, uri);
                Error::new(ErrorKind::Connection, format!("{why}{hint}")).because(error)
            }
            Self::NoTls => Error::configuration(
                "broker: an amqps address needs TLS; enable this crate's feature \"tls\", or one \
                 of lapin's",
            ),
        }
    }
}

/// The texts are those of rustls and of OpenSSL, which native-tls uses on Linux.
fn about_tls(error: &str) -> String {
    let says = |parts: &[&str]| parts.iter().any(|part| error.contains(part));
    if says(&["UnknownIssuer", "local issuer", "self-signed", "self signed"]) {
        "; its certificate is signed by a CA that is not known here: give that CA's certificate to \
         Broker::with_tls, in a file tls.ca"
            .to_owned()
    } else if says(&["NotValidForName", "ostname mismatch"]) {
        "; write the host into the address as the broker's certificate names it".to_owned()
    } else if says(&["InvalidContentType", "wrong version number"]) {
        format!(
            "; what listens there does not speak TLS: use the broker's TLS port, or amqp:// for \
             its plain port; {PORTS}"
        )
    } else if says(&["CertificateRequired", "HandshakeFailure", "BadCertificate"]) {
        CLIENT_CERTIFICATE.to_owned()
    } else {
        format!("; is that the broker's TLS port? {PORTS}")
    }
}

const CLIENT_CERTIFICATE: &str = "; the broker wants a client certificate that it trusts: give one \
                                  and its key to Broker::with_tls, in a file tls.certificate and \
                                  tls.key";

fn about_amqp(error: &lapin::Error, uri: &AMQPUri) -> String {
    use lapin::ErrorKind::{IOError, ParsingError, ProtocolError};
    match error.kind() {
        ProtocolError(amqp) => about_a_refusal(amqp.get_message().as_str(), uri),
        ParsingError(_) => format!(
            "; what listens there does not speak plain AMQP: is it the TLS port? Its addresses \
             begin with amqps://; {PORTS}"
        ),
        IOError(error) => match error.kind() {
            io::ErrorKind::InvalidData => about_tls(&error.to_string()),
            io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof => format!(
                "; what listens there closed the connection before it spoke AMQP: another port, or \
                 a load balancer without a broker behind it; {PORTS}"
            ),
            _ => String::new(),
        },
        _ => String::new(),
    }
}

/// Whatever the broker's code, a refused login is not a right that the user lacks on a queue.
fn about_a_refusal(text: &str, uri: &AMQPUri) -> String {
    let user = &uri.authority.userinfo.username;
    if text.contains("Login was refused") {
        let far = !matches!(uri.authority.host.as_str(), "localhost" | "127.0.0.1" | "::1");
        let guest = if user == "guest" && far {
            ", which by default may log in from the broker's own machine only"
        } else {
            ""
        };
        return format!("; check the name and the password of the user {user:?}{guest}");
    }
    let vhost = shell(&uri.vhost);
    if text.contains("vhost") && text.contains("not found") {
        return if uri.vhost.is_empty() {
            "; the address ends with a slash and so names the vhost \"\": for the vhost \"/\" end it \
             with /%2f, or without the slash"
                .to_owned()
        } else {
            format!("; mend the end of the address, or: rabbitmqctl add_vhost {vhost}")
        };
    }
    if text.contains("access to vhost") {
        return format!(
            "; it has no rights there: rabbitmqctl set_permissions -p {vhost} {} CONFIGURE WRITE \
             READ, with the patterns that the README has under \"What a worker needs\"",
            shell(user)
        );
    }
    String::new()
}
