//! A TCP proxy in front of the broker that understands AMQP frames and can misbehave on demand.

mod revoking;

use self::revoking::Revoke;
use super::parse_uri;
use rand::seq::SliceRandom;
use std::{
    collections::{BTreeSet, HashMap},
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    task::{AbortHandle, JoinSet},
    time::Instant,
};

/// Listens on a loopback port of its own as long as this value exists. Passes every frame until told
/// otherwise; each switch works on the open connections and on later ones.
#[derive(Debug)]
pub(crate) struct Proxy {
    port: u16,
    line: Arc<Line>,
    connections: Arc<Mutex<JoinSet<io::Result<()>>>>,
    accepting: AbortHandle,
}

#[derive(Debug, Default)]
struct Line {
    refuse: AtomicBool,
    swallow_confirms: AtomicBool,
    alarm: watch::Sender<bool>,
    frozen: Mutex<Option<String>>,
    revoke: watch::Sender<Option<Revoke>>,
    /// Bytes that may still pass; without a limit if that is 0 or less.
    bytes_left: AtomicI64,
    stall: watch::Sender<bool>,
    /// Bytes per second in each direction, 0 for no limit.
    rate: AtomicU64,
    /// By direction: when the bytes that were let through so far are over a wire of that rate.
    free_at: Mutex<[Option<Instant>; 2]>,
    linger: Mutex<Duration>,
    opened: AtomicU64,
    publishes: AtomicU64,
    swallowed: AtomicU64,
    acks: AtomicU64,
    nacks: AtomicU64,
    rejects: AtomicU64,
}

impl Proxy {
    /// `target` is the broker's `host:port`; it may be down for now. Of several, with commas
    /// between, each connection goes to one that takes it.
    pub(crate) async fn start(target: impl Into<String>) -> Self {
        Self::start_at(0, target).await
    }

    /// At a port that is known before.
    pub(crate) async fn start_at(port: u16, target: impl Into<String>) -> Self {
        let target = target.into();
        let listener = TcpListener::bind(("127.0.0.1", port)).await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let line = Arc::new(Line::default());
        let connections = Arc::new(Mutex::new(JoinSet::new()));
        let accepting = tokio::spawn({
            let (line, connections) = (line.clone(), connections.clone());
            async move {
                while let Ok((client, _)) = listener.accept().await {
                    line.opened.fetch_add(1, SeqCst);
                    if line.refuse.load(SeqCst) {
                        continue;
                    }
                    let carry = carry(client, target.clone(), line.clone());
                    connections.lock().expect("no panic inside").spawn(carry);
                }
            }
        })
        .abort_handle();
        Self { port, line, connections, accepting }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// `url`, but by way of this proxy.
    pub(crate) fn url(&self, url: &str) -> String {
        let mut uri = parse_uri(url);
        uri.authority.host = "127.0.0.1".to_owned();
        uri.authority.port = self.port;
        uri.to_string()
    }

    /// Drops the broker's `basic.ack` and `basic.nack`; all else passes. A later ack with the
    /// `multiple` flag, once the switch is off, confirms the swallowed ones too.
    pub(crate) fn swallow_confirms(&self, on: bool) {
        self.line.swallow_confirms.store(on, SeqCst);
    }

    /// Stops each channel that publishes to this queue, as the broker does whose quorum queue does not
    /// answer: nothing comes back on it any more.
    pub(crate) fn freeze(&self, queue: Option<&str>) {
        *self.line.frozen.lock().expect("no panic inside") = queue.map(str::to_owned);
    }

    /// Reads and passes nothing in either direction, with the sockets open: a dead network.
    pub(crate) fn stall(&self, on: bool) {
        self.line.stall.send_replace(on);
    }

    /// A slow wire: all connections together pass at most so many bytes per second in each direction;
    /// `None` for no limit.
    pub(crate) fn throttle(&self, bytes_per_second: Option<u64>) {
        self.line.rate.store(bytes_per_second.unwrap_or(0), SeqCst);
    }

    /// Whoever ends without a farewell is missed by the broker only after this.
    pub(crate) fn linger(&self, wait: Duration) {
        *self.line.linger.lock().expect("no panic inside") = wait;
    }

    /// What a broker does at a memory alarm: whoever publishes is told `connection.blocked`, and
    /// nothing more is read from them until it is over.
    pub(crate) fn alarm(&self, on: bool) {
        self.line.alarm.send_replace(on);
    }

    /// Closes new connections as soon as they are made.
    pub(crate) fn refuse(&self, on: bool) {
        self.line.refuse.store(on, SeqCst);
    }

    /// Closes all open connections, on both sides, and returns when that is done.
    pub(crate) async fn cut(&self) {
        let mut open = std::mem::take(&mut *self.connections.lock().expect("no panic inside"));
        open.shutdown().await;
    }

    /// Closes, on both sides, the connection that passes the last of the next `bytes`, mostly in the
    /// middle of a frame.
    pub(crate) fn cut_after(&self, bytes: u32) {
        self.line.bytes_left.store(bytes.into(), SeqCst);
    }

    /// Connections that clients have opened so far, the closed and the refused ones included.
    pub(crate) fn opened(&self) -> u64 {
        self.line.opened.load(SeqCst)
    }

    /// `basic.publish` frames the clients have sent.
    pub(crate) fn publishes(&self) -> u64 {
        self.line.publishes.load(SeqCst)
    }

    /// Publishes whose confirm was dropped.
    pub(crate) fn confirms_swallowed(&self) -> u64 {
        self.line.swallowed.load(SeqCst)
    }

    /// Deliveries that the clients have acked. An ack with the `multiple` flag counts for each that
    /// it answers, and one that answers none counts all the same.
    pub(crate) fn acks(&self) -> u64 {
        self.line.acks.load(SeqCst)
    }

    /// Deliveries that the clients have nacked.
    pub(crate) fn nacks(&self) -> u64 {
        self.line.nacks.load(SeqCst)
    }

    /// Deliveries that the clients have rejected.
    pub(crate) fn rejects(&self) -> u64 {
        self.line.rejects.load(SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // The open connections end with the last owner of their `JoinSet`.
        self.accepting.abort();
    }
}

#[derive(Clone, Copy)]
enum From {
    Client,
    Broker,
}

async fn carry(client: TcpStream, target: String, line: Arc<Line>) -> io::Result<()> {
    let broker = reach(&target).await?;
    // Without this, Nagle's algorithm would add some 40 ms to each small frame.
    client.set_nodelay(true)?;
    broker.set_nodelay(true)?;
    let (client_in, client_out) = client.into_split();
    let (broker_in, broker_out) = broker.into_split();
    let (client_out, broker_out) = (Output::new(client_out), Output::new(broker_out));
    let unanswered = Unanswered::default();
    let carrying = async {
        tokio::try_join!(
            pump(client_in, (&broker_out, &client_out), From::Client, (&line, &unanswered)),
            pump(broker_in, (&client_out, &broker_out), From::Broker, (&line, &unanswered)),
        )
    };
    let ended = tokio::select! {
        ended = carrying => ended.map(drop),
        ended = line.revoking((&client_out, &broker_out), &unanswered) => ended,
    };
    if ended.is_err() {
        line.lingering().await;
    }
    ended
}

async fn reach(targets: &str) -> io::Result<TcpStream> {
    let mut targets: Vec<&str> = targets.split(',').collect();
    targets.shuffle(&mut rand::rng());
    let mut last = io::Error::other("no target");
    for target in targets {
        match TcpStream::connect(target).await {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Written to by whole frames.
type Output = tokio::sync::Mutex<OwnedWriteHalf>;

/// Carries one direction, frame by frame, until it ends; then the other side is told so. `back` is
/// the way to whoever sends.
async fn pump(
    mut input: OwnedReadHalf,
    (output, back): (&Output, &Output),
    from: From,
    (line, unanswered): (&Line, &Unanswered),
) -> io::Result<()> {
    let mut stall = line.stall.subscribe();
    let mut frame = Vec::new();
    while read_frame(&mut input, &mut frame, &mut stall).await? {
        flowing(&mut stall).await;
        if matches!(from, From::Client) && method(&frame) == Some((60, 40)) {
            line.until_no_alarm(back).await?;
        }
        if passes(&frame, from, line, unanswered) {
            line.until_sent(frame.len(), from).await;
            let length = i64::try_from(frame.len()).expect("a frame");
            let left = line.bytes_left.fetch_sub(length, SeqCst);
            if (1..=length).contains(&left) {
                output
                    .lock()
                    .await
                    .write_all(&frame[..usize::try_from(left).expect("positive")])
                    .await?;
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            output.lock().await.write_all(&frame).await?;
        }
    }
    if matches!(from, From::Client) {
        line.lingering().await;
    }
    output.lock().await.shutdown().await
}

impl Line {
    /// As long as a frame takes on a slow wire, behind those before it.
    async fn until_sent(&self, length: usize, from: From) {
        let rate = self.rate.load(SeqCst);
        let free = {
            let mut free_at = self.free_at.lock().expect("no panic inside");
            let free_at = &mut free_at[from as usize];
            if rate == 0 {
                *free_at = None;
                return;
            }
            let now = Instant::now();
            let takes = Duration::from_secs_f64(length as f64 / rate as f64);
            *free_at.insert(free_at.map_or(now, |free| free.max(now)) + takes)
        };
        tokio::time::sleep_until(free).await;
    }

    async fn lingering(&self) {
        let wait = *self.linger.lock().expect("no panic inside");
        tokio::time::sleep(wait).await;
    }

    async fn until_no_alarm(&self, publisher: &Output) -> io::Result<()> {
        let mut alarm = self.alarm.subscribe();
        if !*alarm.borrow() {
            return Ok(());
        }
        let blocked = [1, 0, 0, 0, 0, 0, 8, 0, 10, 0, 60, 3, b'l', b'o', b'w', 0xCE];
        publisher.lock().await.write_all(&blocked).await?;
        let _ = alarm.wait_for(|alarm| !*alarm).await;
        let unblocked = [1, 0, 0, 0, 0, 0, 4, 0, 10, 0, 61, 0xCE];
        publisher.lock().await.write_all(&unblocked).await
    }
}

/// What has no answer on a connection, by channel.
#[derive(Debug, Default)]
struct Unanswered(Mutex<HashMap<[u8; 2], OnChannel>>);

#[derive(Debug, Default)]
struct OnChannel {
    deliveries: BTreeSet<u64>,
    published: u64,
    publishes: BTreeSet<u64>,
    frozen: bool,
    consumers: Vec<Vec<u8>>,
    /// Closed by the proxy: nothing of it passes until the client opens it again.
    severed: bool,
    /// The broker has yet to answer that it is closed.
    close_ok_due: bool,
}

impl Unanswered {
    /// How many deliveries or publishes a frame answers.
    fn note(&self, frame: &[u8], from: From, method: (u16, u16)) -> u64 {
        let mut channels = self.0.lock().expect("no panic inside");
        let channel = channels.entry([frame[1], frame[2]]).or_default();
        let arguments = &frame[11..];
        let multiple = method != (60, 90) && arguments.get(8).is_some_and(|bits| bits & 1 == 1);
        match (from, method) {
            // A channel begins: its number may have been another one's.
            (From::Client, (20, 10)) => {
                let close_ok_due = channel.close_ok_due;
                *channel = OnChannel { close_ok_due, ..OnChannel::default() };
            }
            (_, (20, 40)) => channel.consumers.clear(),
            (From::Broker, (60, 21)) => {
                let length = usize::from(arguments[0]);
                channel.consumers.push(arguments[1..=length].to_vec());
            }
            (From::Client, (60, 40)) => {
                channel.published += 1;
                channel.publishes.insert(channel.published);
            }
            (From::Broker, (60, 60)) => {
                let consumer_tag = usize::from(arguments[0]);
                channel.deliveries.extend(number(&arguments[1 + consumer_tag..]));
            }
            (From::Broker, (60, 71)) => channel.deliveries.extend(number(arguments)),
            (From::Client, (60, 80 | 90 | 120)) => {
                return answer(&mut channel.deliveries, number(arguments), multiple);
            }
            (From::Broker, (60, 80 | 120)) => {
                return answer(&mut channel.publishes, number(arguments), multiple);
            }
            _ => {}
        }
        0
    }
}

impl Unanswered {
    /// Whether the channel of a frame is frozen, from this frame on, or closed.
    fn is_frozen(&self, frame: &[u8], from: From, queue: Option<&str>) -> bool {
        let mut channels = self.0.lock().expect("no panic inside");
        let channel = channels.entry([frame[1], frame[2]]).or_default();
        if matches!(from, From::Broker) && channel.close_ok_due {
            channel.close_ok_due = method(frame) != Some((20, 41));
            return true;
        }
        if matches!(from, From::Client) && channel.severed {
            channel.severed = method(frame) != Some((20, 10));
            return channel.severed;
        }
        if matches!(from, From::Client) && method(frame) == Some((60, 40)) {
            // Two reserved bytes, and then the exchange, which is the default one.
            channel.frozen |= queue.is_some() && routing_key(&frame[11..]) == queue;
        }
        channel.frozen && matches!(from, From::Broker)
    }
}

/// Of a publish to the default exchange.
fn routing_key(arguments: &[u8]) -> Option<&str> {
    let [_, _, 0, length, rest @ ..] = arguments else { return None };
    std::str::from_utf8(rest.get(..usize::from(*length))?).ok()
}

/// How many are answered by this.
fn answer(unanswered: &mut BTreeSet<u64>, tag: Option<u64>, multiple: bool) -> u64 {
    let Some(tag) = tag else { return 0 };
    let before = unanswered.len();
    if multiple {
        // 0 stands for all.
        unanswered.retain(|one| tag != 0 && *one > tag);
    } else {
        unanswered.remove(&tag);
    }
    (before - unanswered.len()) as u64
}

/// The delivery tag that begins like this.
fn number(start: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(*start.first_chunk()?))
}

/// Reads one whole frame, or answers `false` when the stream has ended.
async fn read_frame(
    input: &mut OwnedReadHalf,
    frame: &mut Vec<u8>,
    stall: &mut watch::Receiver<bool>,
) -> io::Result<bool> {
    frame.clear();
    loop {
        let missing = frame_length(frame) - frame.len();
        if missing == 0 {
            return Ok(true);
        }
        flowing(stall).await;
        frame.reserve(missing);
        // Read no further than this frame, so that what follows stays in the socket.
        let mut rest = (&mut *input).take(missing as u64);
        tokio::select! {
            // A read that is given up here has taken nothing: `read_buf` is safe to cancel.
            _ = stall.wait_for(|stalled| *stalled) => {}
            read = rest.read_buf(frame) => if read? == 0 { return Ok(false) },
        }
    }
}

/// How long the frame is that begins like this, as far as one can tell yet.
fn frame_length(start: &[u8]) -> usize {
    match *start {
        // The protocol header, "AMQP" and a version, is what a connection begins with.
        [b'A', ..] => 8,
        // Type, channel and size come before the payload, an end mark after it.
        [_, _, _, a, b, c, d, ..] => 7 + u32::from_be_bytes([a, b, c, d]) as usize + 1,
        _ => 7,
    }
}

/// The class and the method of a frame that holds one.
fn method(frame: &[u8]) -> Option<(u16, u16)> {
    const METHOD: u8 = 1;
    let [METHOD, _, _, _, _, _, _, class_1, class_2, method_1, method_2, ..] = *frame else {
        return None;
    };
    Some((u16::from_be_bytes([class_1, class_2]), u16::from_be_bytes([method_1, method_2])))
}

fn passes(frame: &[u8], from: From, line: &Line, unanswered: &Unanswered) -> bool {
    let frozen = line.frozen.lock().expect("no panic inside").clone();
    if unanswered.is_frozen(frame, from, frozen.as_deref()) {
        return false;
    }
    let Some(method) = method(frame) else { return true };
    let answered = unanswered.note(frame, from, method);
    match (from, method) {
        (From::Client, (60, 40)) if !is_probe(frame) => line.publishes.fetch_add(1, SeqCst),
        (From::Client, (60, 80)) => line.acks.fetch_add(answered.max(1), SeqCst),
        (From::Client, (60, 120)) => line.nacks.fetch_add(answered.max(1), SeqCst),
        (From::Client, (60, 90)) => line.rejects.fetch_add(1, SeqCst),
        (From::Broker, (60, 80 | 120)) if line.swallow_confirms.load(SeqCst) => {
            line.swallowed.fetch_add(answered.max(1), SeqCst);
            return false;
        }
        _ => 0,
    };
    true
}

/// What a worker publishes at its start to see whether it may.
fn is_probe(frame: &[u8]) -> bool {
    routing_key(&frame[11..]).is_some_and(|key| key.starts_with("lapin-retry.probe."))
}

async fn flowing(stall: &mut watch::Receiver<bool>) {
    // The sender cannot be gone: the line that owns it is borrowed by the caller.
    let _ = stall.wait_for(|stalled| !*stalled).await;
}
