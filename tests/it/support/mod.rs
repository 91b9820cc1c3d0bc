//! What every test against a real broker needs.
//!
//! A test makes a [`Vhost`] of its own, so that tests run in parallel without seeing each other, and
//! waits for conditions with [`eventually`], never for a fixed time. The HTTP calls block, therefore
//! tests are written as `#[tokio::test(flavor = "multi_thread")]`: on a current-thread runtime a
//! blocked test would also stop a [`Proxy`] it is waiting for.

mod amqp;
mod journal;
mod management;
mod proxy;
mod raw;
mod scene;
mod vhost;
mod wait;

pub(crate) use amqp::{
    confirm_channel, connect, consume, count, declare_work_queue, publish, table, try_publish,
    type_name,
};
pub(crate) use journal::{Attempt, End, Journal, as_the_body_says, steps};
pub(crate) use management::Management;
pub(crate) use proxy::Proxy;
pub(crate) use raw::{CORRELATION_ID, HEADERS, RawPublisher, raw_table, short};
pub(crate) use scene::{
    BURIED, LANE, Scene, WORK, header, next_job, ours, quick, settle_all, text,
};
pub(crate) use vhost::{User, Vhost};
pub(crate) use wait::{PATIENCE, eventually, next, within};

use lapin::uri::AMQPUri;

/// Where the broker listens, and whom to log in as.
pub(crate) fn amqp_uri() -> AMQPUri {
    parse_uri(&variable("AMQP_URL"))
}

/// `host:port` of the broker, for a [`Proxy`] in front of it.
pub(crate) fn broker_addr() -> String {
    let authority = amqp_uri().authority;
    format!("{}:{}", authority.host, authority.port)
}

pub(crate) fn parse_uri(url: &str) -> AMQPUri {
    url.parse().unwrap_or_else(|why| panic!("{url} is no AMQP URL: {why}"))
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| {
        panic!("{name} is not set: these tests need a broker, run `scripts/with-broker cargo test`")
    })
}
