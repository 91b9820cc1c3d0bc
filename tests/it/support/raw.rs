//! A publisher that writes what lapin would not: the bytes of a message's properties as they are
//! given.

use super::parse_uri;
use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
const BASIC: u16 = 60;

/// One connection with one channel in confirm mode. It blocks; its errors are panics.
#[derive(Debug)]
pub(crate) struct RawPublisher {
    stream: TcpStream,
}

/// Which properties follow, as the bits of the property flags.
pub(crate) const HEADERS: u16 = 1 << 13;
pub(crate) const CORRELATION_ID: u16 = 1 << 10;

impl RawPublisher {
    pub(crate) fn connect(url: &str) -> Self {
        let uri = parse_uri(url);
        let address = (uri.authority.host.as_str(), uri.authority.port);
        let stream = TcpStream::connect(address).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        let mut this = Self { stream };
        let user = &uri.authority.userinfo;
        let login = format!("\0{}\0{}", user.username, user.password);
        this.write(b"AMQP\x00\x00\x09\x01");
        this.expect(10, 10);
        let no_table = 0u32.to_be_bytes();
        let login = [&u32::try_from(login.len()).unwrap().to_be_bytes(), login.as_bytes()].concat();
        this.method(0, 10, 11, &[&no_table, &short(b"PLAIN"), &login, &short(b"en_US")]);
        this.expect(10, 30);
        this.method(0, 10, 31, &[&2047u16.to_be_bytes(), &131_072u32.to_be_bytes(), &[0, 0]]);
        this.method(0, 10, 40, &[&short(uri.vhost.as_bytes()), &short(b""), &[0]]);
        this.expect(10, 41);
        this.method(1, 20, 10, &[&short(b"")]);
        this.expect(20, 11);
        this.method(1, 85, 10, &[&[0]]);
        this.expect(85, 11);
        this
    }

    /// Publishes to `queue` and waits for the confirm. `properties` are what `flags` announce.
    pub(crate) fn publish(&mut self, queue: &str, flags: u16, properties: &[u8], body: &[u8]) {
        let mandatory = [1];
        self.method(1, BASIC, 40, &[&[0, 0], &short(b""), &short(queue.as_bytes()), &mandatory]);
        let size = (body.len() as u64).to_be_bytes();
        let head = [&BASIC.to_be_bytes()[..], &[0, 0], &size, &flags.to_be_bytes(), properties];
        self.frame(HEADER, 1, &head.concat());
        if !body.is_empty() {
            self.frame(BODY, 1, body);
        }
        self.expect(BASIC, 80);
    }

    fn method(&mut self, channel: u16, class: u16, method: u16, arguments: &[&[u8]]) {
        let head = [class.to_be_bytes(), method.to_be_bytes()].concat();
        self.frame(METHOD, channel, &[&head, &*arguments.concat()].concat());
    }

    fn frame(&mut self, kind: u8, channel: u16, payload: &[u8]) {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        self.write(&[&[kind], &channel.to_be_bytes()[..], &length, payload, &[0xCE]].concat());
    }

    fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("to write");
    }

    /// The next frame must be this method.
    fn expect(&mut self, class: u16, method: u16) {
        let mut head = [0; 7];
        self.stream.read_exact(&mut head).expect("a frame");
        let length = u32::from_be_bytes([head[3], head[4], head[5], head[6]]) as usize;
        let mut payload = vec![0; length + 1];
        self.stream.read_exact(&mut payload).expect("the rest of it");
        let wanted = [class.to_be_bytes(), method.to_be_bytes()].concat();
        assert!(
            payload.starts_with(&wanted),
            "wanted method {class}.{method}, got {}",
            String::from_utf8_lossy(&payload)
        );
    }
}

/// A short string; it need not be UTF-8.
pub(crate) fn short(text: &[u8]) -> Vec<u8> {
    let mut bytes = vec![u8::try_from(text.len()).expect("at most 255 bytes")];
    bytes.extend_from_slice(text);
    bytes
}

/// A table's fields with their length before them.
pub(crate) fn raw_table(fields: &[u8]) -> Vec<u8> {
    let length = u32::try_from(fields.len()).expect("a table that fits");
    [&length.to_be_bytes(), fields].concat()
}
