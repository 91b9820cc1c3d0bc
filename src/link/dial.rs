//! Opens one connection: to which address, over what, and in what time.

use std::{
    io,
    net::Shutdown,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use futures_util::{StreamExt, stream::FuturesUnordered};
use lapin::{
    AsyncTcpStream, Connection, ConnectionState,
    uri::{AMQPScheme, AMQPUri},
};
use rand::seq::SliceRandom;
use socket2::{SockRef, Socket};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::{
    Broker,
    connection::Purpose,
    hints::{NotConnected, place},
    io::Io,
};
use crate::{Error, ErrorKind};

/// How long connecting may take. A broker that is stopped still accepts connections.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the next address waits for one that neither answers nor fails.
const HEAD_START: Duration = Duration::from_secs(2);
/// How often it is looked whether a broker is back.
const LOOK: Duration = Duration::from_secs(2);
/// The protocol and its version, with which a client begins.
const GREETING: &[u8] = b"AMQP\0\0\x09\x01";
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
    let mut addresses = broker.addresses()?.to_vec();
    addresses.shuffle(&mut rand::rng());
    let opening = first(addresses, |uri| open_one(broker, uri, purpose));
    opening.await.map_err(|failed| {
        let together = failed.into_iter().reduce(|before, error| {
            Error::new(error.kind(), format!("{before}; {error}")).because(error)
        });
        together.unwrap_or_else(no_address)
    })
}

/// What comes of the first place that works, or why none does. One that keeps silent stays in the
/// race, but it does not keep the others from their turn.
async fn first<P, T, E, F: Future<Output = Result<T, E>>>(
    places: Vec<P>,
    connect: impl Fn(P) -> F,
) -> Result<T, Vec<E>> {
    let mut places = places.into_iter();
    let mut trying = FuturesUnordered::new();
    let mut failed = Vec::new();
    loop {
        trying.extend(places.next().map(&connect));
        tokio::select! {
            tried = trying.next() => match tried {
                Some(Ok(opened)) => return Ok(opened),
                Some(Err(error)) => failed.push(error),
                None => return Err(failed),
            },
            () = tokio::time::sleep(HEAD_START), if places.len() > 0 => {}
        }
    }
}

/// Waits until a broker that was away greets again. One that never ceased to is not waited for: that
/// it greets says nothing.
pub(super) async fn until_back(broker: &Broker) {
    if greets(broker).await {
        return std::future::pending().await;
    }
    loop {
        tokio::time::sleep(LOOK).await;
        if greets(broker).await {
            return;
        }
    }
}

/// Whether a broker answers at some address. That it takes connections says nothing: a load balancer
/// takes them without one, and the system does for a process that is stopped. Behind TLS it has to do.
async fn greets(broker: &Broker) -> bool {
    let addresses = broker.addresses().unwrap_or_default().to_vec();
    let greeting = first(addresses, async |AMQPUri { scheme, authority, .. }| {
        let mut stream = TcpStream::connect((authority.host, authority.port)).await?;
        if scheme == AMQPScheme::AMQP {
            stream.write_all(GREETING).await?;
            // The first byte of its own greeting.
            stream.read_exact(&mut [0]).await?;
        }
        Ok::<_, io::Error>(())
    });
    matches!(tokio::time::timeout(LOOK, greeting).await, Ok(Ok(())))
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
    let connecting = connect(broker, uri.clone(), purpose);
    match tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
        Ok(connected) => connected.map_err(|why| why.explain(&uri)),
        Err(_) => Err(Error::new(
            ErrorKind::Connection,
            format!(
                "the broker at {} did not answer within {CONNECT_TIMEOUT:?}",
                place(&uri.authority)
            ),
        )),
    }
}

/// The socket is opened here and not by lapin, which keeps a task for every connection that it could
/// not open, and a thread for as long as one is not refused.
async fn connect(
    broker: &Broker,
    uri: AMQPUri,
    purpose: Purpose,
) -> Result<Connection, NotConnected> {
    let io = Io::get()?;
    // The current one: the I/O thread's.
    let runtime = lapin::runtime::default_runtime()?;
    let host = uri.authority.host.as_str();
    let mut places: Vec<_> = tokio::net::lookup_host((host, uri.authority.port)).await?.collect();
    places.shuffle(&mut rand::rng());
    let reaching = first(places, |place| AsyncTcpStream::connect(&runtime, vec![place]));
    let mut stream = reaching.await.map_err(|mut failed| {
        failed.pop().unwrap_or_else(|| io::Error::other("the host has no address"))
    })?;
    let AsyncTcpStream::Plain(socket) = &stream else { return Err(NotConnected::NoTls) };
    let line = Line(Some(SockRef::from(socket.get_ref()).try_clone()?));
    if uri.scheme == AMQPScheme::AMQPS {
        let is_plain = |stream: &_| matches!(stream, AsyncTcpStream::Plain(_));
        stream = encrypted(stream.into_tls(host, broker.tls().as_ref()), is_plain).await?;
    }
    let properties = broker
        .properties()
        .clone()
        .with_connection_name(purpose.name().into())
        // lapin asks for a socket again in its own rhythm, unless it is told not to.
        .configure_backoff(|backoff| backoff.with_max_times(0));
    let stream = Mutex::new(Some(stream));
    let hand_over = async move |_, _| {
        // lapin's thread keeps this as long as it runs, and needs the I/O thread as long.
        let _io = &io;
        let stream = stream.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Asked a second time it would be lapin's own recovery, which must not be.
        let closed = lapin::ErrorKind::InvalidConnectionState(ConnectionState::Closed);
        stream.ok_or_else(|| closed.into())
    };
    let connection = Connection::connector(uri, runtime, hand_over, properties).await?;
    line.hand_over();
    Ok(connection)
}

/// A lapin that was built without TLS returns the plain socket and no error: the password would travel
/// in plain text.
async fn encrypted<S>(
    encrypting: impl Future<Output = io::Result<S>>,
    is_plain: impl Fn(&S) -> bool,
) -> Result<S, NotConnected> {
    let stream = encrypting.await.map_err(NotConnected::Tls)?;
    if is_plain(&stream) { Err(NotConnected::NoTls) } else { Ok(stream) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_that_is_still_plain_after_tls_was_asked_for_is_refused() {
        let is_plain = |stream: &&str| *stream == "plain";
        let kept = encrypted(async { Ok("plain") }, is_plain).await;
        assert!(matches!(kept, Err(NotConnected::NoTls)));
        assert!(matches!(encrypted(async { Ok("tls") }, is_plain).await, Ok("tls")));
        let broken = async { Err(io::Error::other("no handshake")) };
        assert!(matches!(encrypted(broken, is_plain).await, Err(NotConnected::Tls(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_swallows_connections_keeps_no_other_from_its_turn() {
        #[derive(Clone, Copy)]
        enum Place {
            Silent,
            Refuses,
            Takes,
            Late,
        }
        use Place::*;
        let connect = |place| async move {
            match place {
                Silent => std::future::pending().await,
                Refuses => Err("refused"),
                Takes => Ok("taken"),
                Late => {
                    tokio::time::sleep(HEAD_START + HEAD_START / 2).await;
                    Ok("late")
                }
            }
        };
        for (places, expected, took) in [
            (vec![Takes, Silent], Ok("taken"), 0),
            (vec![Refuses, Takes], Ok("taken"), 0),
            (vec![Silent, Refuses, Takes], Ok("taken"), 1),
            (vec![Silent, Silent, Takes], Ok("taken"), 2),
            // It has had its turn, and wins all the same.
            (vec![Late, Silent, Takes], Ok("late"), 1),
            (vec![Refuses, Refuses], Err(vec!["refused"; 2]), 0),
            (vec![], Err(vec![]), 0),
        ] {
            let began = tokio::time::Instant::now();
            assert_eq!(first(places, connect).await, expected);
            assert_eq!(began.elapsed().as_secs() / HEAD_START.as_secs(), took);
        }
    }
}
