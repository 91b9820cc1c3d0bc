//! An address that is wrong says what is wrong with it, and one that is right works however it is
//! written.

use crate::support::{PATIENCE, Scene, WORK, amqp_uri, broker_addr, eventually, quick, within};
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin_retry::{Broker, Error, ErrorKind, Retry, RetryConsumer};
use std::{net::SocketAddr, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// Passes each connection on to the broker. None where there is no IPv6.
async fn on_ipv6() -> Option<SocketAddr> {
    let Ok(listener) = TcpListener::bind("[::1]:0").await else {
        eprintln!("not tested: this machine has no ::1");
        return None;
    };
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut broker = TcpStream::connect(broker_addr()).await?;
                tokio::io::copy_bidirectional(&mut client, &mut broker).await
            });
        }
    });
    Some(address)
}

/// The scene's address with another authority.
fn at(scene: &Scene, place: impl std::fmt::Display) -> String {
    let url = scene.url();
    let place = place.to_string();
    let (login, rest) = url.split_once('@').expect("a user");
    let (_, vhost) = rest.split_once('/').expect("a vhost");
    format!("{login}@{place}/{vhost}")
}

async fn refusal(broker: impl Into<Broker>) -> Error {
    let (broker, kind) = (broker.into(), ErrorKind::Connection);
    let attached = within("an error", Retry::attach(&broker, WORK, quick())).await.unwrap_err();
    assert_eq!(attached.kind(), kind, "{attached}");
    let consumer =
        RetryConsumer::builder(&broker, WORK).policy(quick()).handler(|_| async { Ok(()) });
    let started = within("an error", consumer.start()).await.unwrap_err();
    assert_eq!(started.to_string(), attached.to_string());
    attached
}

#[track_caller]
fn says(error: &Error, parts: &[&str]) {
    for part in parts {
        assert!(error.to_string().contains(part), "{error} should contain {part}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_with_an_ipv6_address_is_reached_there_alone_and_in_a_list() {
    let Some(address) = on_ipv6().await else { return };
    let scene = Scene::new().await;
    let ids = scene.fill(3).await;
    let (here, dead) = (at(&scene, address), at(&scene, "[::1]:1"));
    Retry::attach(&here, WORK, scene.settings()).await.unwrap().close().await.unwrap();
    // A list in one text, as it stands in a variable.
    let list = format!("{dead}, {here}");
    let handle = RetryConsumer::builder(list, WORK)
        .settings(scene.settings())
        .handler(|_| async { Ok(()) })
        .start()
        .await
        .unwrap();
    eventually("all are done", PATIENCE, async || scene.journal.finished() == ids).await;
    within("shutdown", handle.shutdown(Duration::ZERO)).await;

    says(&refusal(dead).await, &["[::1]:1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vhost_that_is_not_there_or_not_open_to_the_user_is_named_with_the_remedy() {
    let scene = Scene::new().await;
    let slash = at(&scene, broker_addr());
    let (address, _) = slash.rsplit_once('/').unwrap();
    let error = refusal(format!("{address}/")).await;
    says(&error, &["the vhost \"\"", "%2f", "without the slash"]);
    let error = refusal(format!("{address}/no%20where")).await;
    says(&error, &["no where not found", "rabbitmqctl add_vhost 'no where'"]);

    let user = scene.vhost.user(".*", ".*", ".*");
    let path = format!("permissions/{}/{}", scene.vhost.name(), user.name());
    scene.vhost.api().delete(&path);
    let error = refusal(user.url()).await;
    let command = format!("rabbitmqctl set_permissions -p {} {}", scene.vhost.name(), user.name());
    says(&error, &["refused for user", &command]);
}

/// A port where every connection gets this answer, and then its end.
async fn port_that_says(answer: &'static [u8]) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                client.read_exact(&mut [0; 8]).await?;
                client.write_all(answer).await?;
                client.shutdown().await?;
                // Until the other side has read it.
                client.read(&mut [0]).await
            });
        }
    });
    port
}

fn to(port: u16, scheme: AMQPScheme) -> String {
    let mut uri = AMQPUri { scheme, ..amqp_uri() };
    uri.authority.host = "127.0.0.1".to_owned();
    uri.authority.port = port;
    uri.to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_that_speaks_no_amqp_is_told_from_the_one_that_is_meant() {
    // What a TLS port answers to a plain greeting: a fatal alert.
    for answer in [&b"\x15\x03\x03\x00\x02\x02\x46"[..], b"HTTP/1.1 400 Bad Request\r\n\r\n"] {
        let port = port_that_says(answer).await;
        let error = refusal(to(port, AMQPScheme::AMQP)).await;
        let place = format!("127.0.0.1:{port}");
        says(&error, &[&place, "does not speak plain AMQP", "amqps://", "5671", "15672"]);
    }
    // As the management port does to what is no HTTP, after a while; or a proxy without a backend.
    let port = port_that_says(b"").await;
    let error = refusal(to(port, AMQPScheme::AMQP)).await;
    says(&error, &["closed the connection", "5672", "5671", "15672", "load balancer"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_management_port_in_place_of_the_amqp_port_is_named() {
    let scene = Scene::bare().await;
    let api = std::env::var("RABBITMQ_MANAGEMENT_URL").expect("set by scripts/with-broker");
    let (_, place) = api.trim_end_matches('/').rsplit_once('@').expect("a user");
    let error = refusal(at(&scene, place)).await;
    says(&error, &[place, "closed the connection", "15672", "management"]);
    // The address of the API itself.
    let error = Broker::new(&api).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Configuration);
    says(&error, &["management API", "Settings::management", "amqp://"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plain_port_in_place_of_the_tls_port_is_named() {
    let scene = Scene::bare().await;
    let tls = scene.url().replace("amqp://", "amqps://");
    says(&refusal(tls).await, &["does not speak TLS", "amqp://", "5671"]);
}
