//! TLS with a private CA and client certificates. `scripts/with-broker` makes both, where it starts
//! the broker itself.

use crate::support::{PATIENCE, Scene, eventually, parse_uri, quick, within};
use anyhow::anyhow;
use lapin::tcp::{OwnedIdentity, OwnedTLSConfig};
use lapin_retry::{Broker, Error, ErrorKind, Job, Retry, RetryConsumer};
use std::{env, fs, io::Write, path::PathBuf, time::Duration};

/// The broker's address with TLS, and where the certificates are. None with a broker of your own.
fn tls() -> Option<(String, PathBuf)> {
    let found = env::var("AMQPS_URL").ok().zip(env::var_os("AMQPS_CERTIFICATES"));
    if found.is_none() {
        // Past the harness, which keeps what a test prints to itself.
        let why = "skipped: TLS, for AMQPS_URL and AMQPS_CERTIFICATES are not set\n";
        let _ = std::io::stderr().write_all(why.as_bytes());
    }
    found.map(|(url, certificates)| (url, certificates.into()))
}

struct Certificates(PathBuf);

impl Certificates {
    fn ca(&self, name: &str) -> Option<String> {
        Some(fs::read_to_string(self.0.join(name)).unwrap())
    }

    fn client(&self) -> Option<OwnedIdentity> {
        let read = |name: &str| fs::read(self.0.join(name)).unwrap();
        Some(OwnedIdentity::PKCS8 { pem: read("client.pem"), key: read("client.key") })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_travel_over_tls_with_a_private_ca_and_a_client_certificate() {
    let Some((url, certificates)) = tls() else { return };
    let certificates = Certificates(certificates);
    let scene = Scene::new().await;
    let mut uri = parse_uri(&url);
    uri.vhost = scene.vhost.name().to_owned();
    uri.authority.userinfo.password = "guest".to_owned();
    let tls =
        OwnedTLSConfig { cert_chain: certificates.ca("ca.pem"), identity: certificates.client() };
    let broker = Broker::new(&uri.to_string()).unwrap().with_tls(tls);
    let handle = RetryConsumer::builder(&broker, "work")
        .settings(scene.settings())
        .handler(
            |job: Job| async move { if job.id() == "0000" { Err(anyhow!("no")) } else { Ok(()) } },
        )
        .start()
        .await
        .unwrap();
    scene.fill(10).await;
    eventually("nine are done", PATIENCE, async || scene.journal.finished().len() == 9).await;
    eventually("one is in a lane", PATIENCE, async || scene.journal.handed_off().len() == 1).await;
    eventually("both connections are encrypted", PATIENCE, async || {
        let connections = scene.vhost.api().connections();
        connections.iter().filter(|connection| connection["ssl"] == true).count() == 2
    })
    .await;
    within("shutdown", handle.shutdown(Duration::from_secs(5))).await;
    scene.journal.nothing_broke();
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_certificates_connecting_fails_and_no_password_is_told() {
    let Some((url, certificates)) = tls() else { return };
    let certificates = Certificates(certificates);
    let url = url.replace("guest:guest", "guest:hunter2");
    assert!(url.contains("hunter2"), "the address has a password");
    let attach = async |ca: Option<String>, identity: Option<OwnedIdentity>| -> Error {
        let tls = OwnedTLSConfig { cert_chain: ca, identity };
        let broker = Broker::new(&url).unwrap().with_tls(tls);
        let error = within("an error", Retry::attach(broker, "work", quick()));
        let error = error.await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Connection, "{error}");
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        error
    };
    let stranger = attach(certificates.ca("other-ca.pem"), certificates.client()).await;
    assert!(stranger.to_string().contains("certificate"), "{stranger}");
    let unknown = attach(None, certificates.client()).await;
    assert!(unknown.to_string().contains("certificate"), "{unknown}");
    attach(certificates.ca("ca.pem"), None).await;
    let refused = attach(certificates.ca("ca.pem"), certificates.client()).await;
    assert!(refused.to_string().contains("the password of the user \"guest\""), "{refused}");
}

/// lapin without TLS would take an amqps address for a plain one, and send the password.
#[tokio::test(flavor = "multi_thread")]
async fn an_amqps_address_never_becomes_a_plain_connection() {
    let scene = Scene::bare().await;
    let mut uri = parse_uri(&scene.url());
    uri.scheme = lapin::uri::AMQPScheme::AMQPS;
    let attach = Retry::attach(uri.to_string(), "work", quick());
    let error = within("an error", attach).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Connection, "{error}");
    assert!(scene.vhost.api().queues().is_empty());
}
