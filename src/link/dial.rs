//! Opens one connection: to which address, over what, and in what time.

use std::{
    io,
    net::{Shutdown, SocketAddr},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use lapin::{
    AsyncTcpStream, Connection, ConnectionState,
    uri::{AMQPScheme, AMQPUri},
};
use rand::seq::SliceRandom;
use socket2::{SockRef, Socket};
use tokio::net::TcpStream;

use super::{
    Broker,
    connection::{Purpose, refused},
};
use crate::{Error, ErrorKind};

/// How long connecting may take. A broker that is stopped still accepts connections.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long one address of a host may take to accept.
const REACH: Duration = Duration::from_secs(3);
/// How often it is looked whether a broker is back.
const LOOK: Duration = Duration::from_secs(2);
/// In seconds, unless the address says otherwise or the broker wants less. A connection that is
/// silent for twice as long is dead.
const HEARTBEAT: u16 = 20;

/// A second handle on the socket of a connection that is being made. lapin keeps a thread for it,
/// and one that waits for a silent broker would never end: dropping this ends the socket, and the
/// thread with it.
#[derive(Debug)]
struct Line(Option<Socket>);

impl Line {
    /// From here on the socket is lapin's: as long as there is another handle, it is not closed.
    fn hand_over(mut self) {
        self.0 = None;
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if let Some(socket) = &self.0 {
            // An error says that it has ended already.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// To the first of the broker's addresses that answers, in random order.
pub(super) async fn open(broker: &Broker, purpose: Purpose) -> Result<Connection, Error> {
    let mut addresses: Vec<_> = broker.addresses()?.iter().collect();
    addresses.shuffle(&mut rand::rng());
    let mut failed: Option<Error> = None;
    for uri in addresses {
        match open_one(broker, uri.clone(), purpose).await {
            Ok(opened) => return Ok(opened),
            Err(error) => {
                failed = Some(match failed {
                    None => error,
                    Some(before) => {
                        Error::new(error.kind(), format!("{before}; {error}")).because(error)
                    }
                });
            }
        }
    }
    Err(failed.unwrap_or_else(no_address))
}

/// Waits until a broker that took no connections takes them again. One that always did, behind a load
/// balancer, say, is not waited for: that it takes connections says nothing.
pub(super) async fn until_back(broker: &Broker) {
    if is_listening(broker).await {
        return std::future::pending().await;
    }
    loop {
        tokio::time::sleep(LOOK).await;
        if is_listening(broker).await {
            return;
        }
    }
}

async fn is_listening(broker: &Broker) -> bool {
    for uri in broker.addresses().unwrap_or_default() {
        let (host, port) = (uri.authority.host.as_str(), uri.authority.port);
        let connecting = tokio::time::timeout(LOOK, TcpStream::connect((host, port)));
        if let Ok(Ok(_)) = connecting.await {
            return true;
        }
    }
    false
}

pub(super) fn no_address() -> Error {
    Error::configuration("broker: no address")
}

async fn open_one(
    broker: &Broker,
    mut uri: AMQPUri,
    purpose: Purpose,
) -> Result<Connection, Error> {
    uri.query.heartbeat.get_or_insert(HEARTBEAT);
    let place = format!("{}:{}", uri.authority.host, uri.authority.port);
    let user = uri.authority.userinfo.username.clone();
    let connecting = connect(broker, uri, purpose);
    match tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
        Ok(Ok(opened)) => Ok(opened),
        Ok(Err(NotConnected::Io(error))) => {
            let text = format!("connecting to {place}: {error}");
            Err(Error::new(ErrorKind::Connection, text).because(error))
        }
        Ok(Err(NotConnected::Lapin(error))) => Err(not_connected(&error, &place, &user)),
        Ok(Err(NotConnected::NoTls)) => Err(Error::configuration(
            "broker: an amqps address needs TLS; enable this crate's feature \"tls\", or one of \
             lapin's",
        )),
        Err(_) => Err(Error::new(
            ErrorKind::Connection,
            format!("the broker at {place} did not answer within {CONNECT_TIMEOUT:?}"),
        )),
    }
}

enum NotConnected {
    Io(io::Error),
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

/// The first of a host's addresses that takes a connection: one that swallows them is not to keep the
/// others from their turn.
async fn reach<T, F: Future<Output = io::Result<T>>>(
    places: Vec<SocketAddr>,
    connect: impl Fn(SocketAddr) -> F,
) -> io::Result<T> {
    let mut failed = io::Error::other("the host has no address");
    for place in places {
        match tokio::time::timeout(REACH, connect(place)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => failed = error,
            Err(_) => failed = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(failed)
}

/// The socket is opened here and not by lapin, which keeps a task for every connection that it could
/// not open, and a thread for as long as one is not refused.
async fn connect(
    broker: &Broker,
    uri: AMQPUri,
    purpose: Purpose,
) -> Result<Connection, NotConnected> {
    let runtime = lapin::runtime::default_runtime()?;
    let host = uri.authority.host.as_str();
    let mut places: Vec<_> = tokio::net::lookup_host((host, uri.authority.port)).await?.collect();
    places.shuffle(&mut rand::rng());
    let mut stream = reach(places, |place| AsyncTcpStream::connect(&runtime, vec![place])).await?;
    let AsyncTcpStream::Plain(socket) = &stream else { return Err(NotConnected::NoTls) };
    let line = Line(Some(SockRef::from(socket.get_ref()).try_clone()?));
    if uri.scheme == AMQPScheme::AMQPS {
        stream = stream.into_tls(host, broker.tls().as_ref()).await?;
        // So lapin answers without a TLS of its own. The password would travel in plain text.
        if matches!(stream, AsyncTcpStream::Plain(_)) {
            return Err(NotConnected::NoTls);
        }
    }
    let properties = broker
        .properties()
        .clone()
        .with_connection_name(purpose.name().into())
        // lapin asks for a socket again in its own rhythm, unless it is told not to.
        .configure_backoff(|backoff| backoff.with_max_times(0));
    let stream = Mutex::new(Some(stream));
    let hand_over = async move |_, _| {
        let stream = stream.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Asked a second time it would be lapin's own recovery, which must not be.
        let closed = lapin::ErrorKind::InvalidConnectionState(ConnectionState::Closed);
        stream.ok_or_else(|| closed.into())
    };
    let connection = Connection::connector(uri, runtime, hand_over, properties).await?;
    line.hand_over();
    Ok(connection)
}

/// Whatever the broker's code, a refused login is not a right that the user lacks on a queue.
fn not_connected(error: &lapin::Error, place: &str, user: &str) -> Error {
    let why = refused(error, &format!("connecting to {place}"));
    let remedy = if why.kind() == ErrorKind::Permission {
        format!("; check the name and the password of the user {user:?}")
    } else {
        String::new()
    };
    Error::new(ErrorKind::Connection, format!("{why}{remedy}")).because(error.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_address_that_swallows_connections_keeps_no_other_from_its_turn() {
        let places: Vec<SocketAddr> = ["127.0.0.1:1", "127.0.0.2:1", "127.0.0.3:1"]
            .map(|place| place.parse().unwrap())
            .into();
        let last = places[2];
        let connect = |place: SocketAddr| async move {
            match place.ip().to_string().as_str() {
                "127.0.0.1" => std::future::pending().await,
                "127.0.0.2" => Err(io::ErrorKind::ConnectionRefused.into()),
                _ => Ok(place),
            }
        };
        assert_eq!(reach(places.clone(), connect).await.unwrap(), last);
        let refused = reach(places[..2].to_vec(), connect).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(reach(Vec::new(), connect).await.unwrap_err().kind(), io::ErrorKind::Other);
    }
}
