//! The broker's nodes: where they are, and, if `scripts/fault-run` keeps them, how to kill them.

use crate::{
    plan::WORK,
    support::{broker_addr, parse_uri},
};
use lapin::{
    Channel, Connection, ConnectionProperties, options::QueueDeclareOptions, types::FieldTable,
};
use rand::seq::SliceRandom;
use std::{env, fs, path::PathBuf, time::Duration};
use tokio::time::{sleep, timeout};

#[derive(Clone, Debug)]
pub(crate) struct Nodes {
    /// The vhost's, with the address of any node.
    url: String,
    pub(crate) addresses: Vec<String>,
    /// As the nodes call themselves.
    pub(crate) names: Vec<String>,
    /// Where each has a pipe for orders and one for answers; none if they are not ours to kill.
    keepers: Option<PathBuf>,
}

impl Nodes {
    pub(crate) fn new(url: String) -> Self {
        let list = |variable| {
            let list = env::var(variable).ok()?;
            Some(list.split(',').map(str::to_owned).collect::<Vec<_>>())
        };
        Self {
            url,
            addresses: list("FAULT_ADDRESSES").unwrap_or_else(|| vec![broker_addr()]),
            names: list("FAULT_NAMES").unwrap_or_default(),
            keepers: env::var_os("FAULT_NODES").map(PathBuf::from),
        }
    }

    pub(crate) fn are_ours(&self) -> bool {
        self.keepers.is_some()
    }

    pub(crate) fn is_cluster(&self) -> bool {
        self.addresses.len() > 1
    }

    /// Gives an order to the keeper of a node, from 0: `start`, `kill`, `pause`, `resume`, or a
    /// command of RabbitMQ's to run there. Returns when it is carried out, but does not wait until
    /// a node that was started answers.
    pub(crate) async fn order(&self, node: usize, order: &str) {
        let keepers = self.keepers.clone().expect("nodes that are ours");
        let pipe = move |end: &str| keepers.join(format!("{}.{end}", node + 1));
        let line = format!("{order}\n");
        let carried_out = tokio::task::spawn_blocking(move || {
            fs::write(pipe("order"), line)?;
            fs::read_to_string(pipe("answer"))
        });
        let answer = carried_out.await.expect("no panic").expect("a keeper");
        if answer.trim() != "0" {
            println!("node {}: {order}: status {}", node + 1, answer.trim());
        }
    }

    /// A channel to a node that answers and sees the work queue, none if there is none at the
    /// moment. No fault is between.
    pub(crate) async fn channel(&self) -> Option<(Connection, Channel)> {
        let mut addresses = self.addresses.clone();
        addresses.shuffle(&mut rand::rng());
        for address in addresses {
            if let Ok(Ok(found)) = timeout(Duration::from_secs(3), self.channel_at(&address)).await
            {
                return Some(found);
            }
        }
        None
    }

    async fn channel_at(&self, address: &str) -> lapin::Result<(Connection, Channel)> {
        let mut uri = parse_uri(&self.url);
        let (host, port) = address.split_once(':').expect("host:port");
        uri.authority.host = host.to_owned();
        uri.authority.port = port.parse().expect("a port");
        let connection = Connection::connect_uri(uri, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        let passive = QueueDeclareOptions { passive: true, ..Default::default() };
        channel.queue_declare(WORK.into(), passive, FieldTable::default()).await?;
        Ok((connection, channel))
    }

    /// Waits until some node answers and sees the work queue.
    pub(crate) async fn until_back(&self) {
        for _ in 0..600 {
            if self.channel().await.is_some() {
                return;
            }
            sleep(Duration::from_millis(200)).await;
        }
        panic!("the broker does not come back");
    }

    /// Waits until this node answers.
    pub(crate) async fn until_up(&self, node: usize) {
        let only = Self { addresses: vec![self.addresses[node].clone()], ..self.clone() };
        only.until_back().await;
    }
}
