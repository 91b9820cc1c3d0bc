//! A password is in no log, no error, no event, no header, no panic and no debug text.

use crate::support::{
    BURIED, PATIENCE, Scene, User, WORK, broker_addr, connect, consume, eventually, quick, within,
};
use anyhow::anyhow;
use lapin::options::BasicGetOptions;
use lapin_retry::{
    Broker, Config, Error, ErrorKind, Event, Job, Retry, RetryConsumer, Settings, reject,
};
use std::{fmt::Debug, process::Command, time::Duration};
use tracing_subscriber::filter::LevelFilter;

/// What is looked for: it is in the password as it is and as it is written in a URL.
const WORD: &str = "xyzzyplugh";
const PASSWORD: &str = "xyzzyplugh/#1";
const ENCODED: &str = "xyzzyplugh%2F%231";
const CHILD: &str = "LAPIN_RETRY_TEST_CHILD";
/// Holds an address that is none.
const BAD_URL: &str = "LAPIN_RETRY_TEST_BAD_URL";

/// Runs a test once more in a process of its own, where everything that any thread logs can be
/// captured. None in that process.
fn captured() -> Option<String> {
    if std::env::var_os(CHILD).is_some() {
        let log = tracing_subscriber::fmt().with_max_level(LevelFilter::TRACE);
        log.with_ansi(false).with_writer(std::io::stdout).init();
        return None;
    }
    let this = std::thread::current().name().expect("the test's name").to_owned();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &this, "--nocapture"])
        .env(CHILD, "1")
        .env(BAD_URL, format!("amqp://me:{ENCODED}@host:port/vhost"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("TRACE") && text.contains("lapin::"), "nothing was captured: {text}");
    Some(text.into_owned())
}

/// The word, also as bytes, is on no line but those of lapin's that the README warns of.
fn assert_unspoken(text: &str) {
    let bytes = format!("{:?}", WORD.as_bytes());
    let forms = [WORD, bytes.trim_matches(['[', ']'])];
    let is_login = |line: &&str| {
        line.contains(" TRACE ")
            && line.contains("lapin::io_loop: will write to buffer next_msg=")
            && line.contains("Connection(StartOk(")
    };
    let told = text.lines().filter(|line| forms.iter().any(|form| line.contains(form)));
    let (logins, others): (Vec<_>, Vec<_>) = told.partition(is_login);
    assert!(others.is_empty(), "{others:#?}");
    assert!(!logins.is_empty(), "lapin has become discreet: the README need not warn any more");
}

/// On the standard output, where it is captured.
fn tell(what: &str, value: &(impl Debug + ?Sized)) {
    println!("{what}: {value:?} {value:#?}");
}

fn tell_error(what: &str, error: &Error) {
    println!("{what}: {error} {error:#}");
    tell(what, error);
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        println!("{what}, because of: {cause} {cause:?}");
        source = cause.source();
    }
}

fn url(user: &User, host: &str, vhost: &str) -> String {
    format!("amqp://{}:{ENCODED}@{host}/{vhost}", user.name())
}

/// A worker whose password has the word in it.
async fn scene() -> (Scene, User) {
    let scene = Scene::new().await;
    let user = scene.vhost.user(".*", ".*", ".*");
    scene.vhost.api().add_user(user.name(), PASSWORD);
    (scene, user)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_cannot_be_reached_is_named_and_its_password_is_nowhere() {
    if let Some(text) = captured() {
        return assert_unspoken(&text);
    }
    let (scene, user) = scene().await;
    let (here, vhost) = (broker_addr(), scene.vhost.name().to_owned());
    scene.vhost.api().add_user(user.name(), "another");
    let login = "the password of the user";
    let of = |host: &str, vhost: &str| url(&user, host, vhost);
    let cases: [(&str, String, ErrorKind, &[&str]); 6] = [
        ("wrong password", of(&here, &vhost), ErrorKind::Connection, &[&here, login]),
        ("unknown vhost", of(&here, "no-such-vhost"), ErrorKind::Connection, &[&here]),
        ("closed port", of("127.0.0.1:1", "%2f"), ErrorKind::Connection, &["127.0.0.1:1"]),
        (
            "unknown host",
            of("no-such.invalid:1", "%2f"),
            ErrorKind::Connection,
            &["no-such.invalid"],
        ),
        ("no port", of("host:port", "%2f"), ErrorKind::Configuration, &["no AMQP URL"]),
        ("no URL", format!("{ENCODED}://{PASSWORD}"), ErrorKind::Configuration, &["no AMQP URL"]),
    ];
    for (name, url, kind, parts) in cases {
        let broker = Broker::from(&url);
        tell(name, &broker);
        let attached = within(name, Retry::attach(&broker, WORK, quick())).await.unwrap_err();
        let consumer = RetryConsumer::builder(&broker, WORK).handler(|_: Job| async { Ok(()) });
        tell(name, &consumer);
        let started = within(name, consumer.start()).await.unwrap_err();
        for error in [attached, started] {
            tell_error(name, &error);
            assert_eq!(error.kind(), kind, "{name}: {error}");
            for part in parts {
                assert!(error.to_string().contains(part), "{name}: {error} should contain {part}");
            }
        }
        if let Err(error) = Broker::new(&url) {
            tell_error(name, &error);
        }
    }
    for address in [format!("ftp://me:{ENCODED}@host"), format!("http://me:{ENCODED}@host:port")] {
        let settings = Settings::new(quick()).management(address);
        tell("settings", &settings);
        if let Err(error) = Retry::attach(&scene.url(), WORK, settings).await {
            tell_error("management", &error);
        }
    }
    let file = std::env::temp_dir().join(format!("{}.toml", scene.vhost.name()));
    let address = of(&here, &vhost);
    for text in [
        format!("url = {address:?}\n[consumers.a]"),
        format!("url_env = \"{address}\n[consumers.a]"),
        format!("[consumers.a]\nprefetch = {address:?}"),
        format!("[consumers.a]\nselect = {address:?}"),
        format!("[consumers.a]\npolicy = {{ levels = [{address:?}] }}"),
        address.clone(),
        format!("url_env = \"{BAD_URL}\"\n[consumers.a]"),
    ] {
        std::fs::write(&file, &text).unwrap();
        let config = Config::from_file(&file);
        let broker = config.and_then(|config| config.broker());
        tell_error("configuration", &broker.expect_err("no broker"));
    }
    std::fs::remove_file(&file).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn in_the_life_of_a_worker_its_password_is_nowhere() {
    if let Some(text) = captured() {
        for part in ["Retried", "Buried", "Disconnected", "a handler panics", "retry-history"] {
            assert!(text.contains(part), "no {part}");
        }
        return assert_unspoken(&text);
    }
    let (scene, user) = scene().await;
    let broker = Broker::from(url(&user, &broker_addr(), scene.vhost.name()));
    // Its user may not look there.
    let management = std::env::var("RABBITMQ_MANAGEMENT_URL").unwrap();
    let (_, host) = management.split_once('@').expect("a login");
    let settings = Settings::new(quick())
        .management(format!("http://{}:{ENCODED}@{host}", user.name()))
        .on_event(|event| tell("event", event));
    let settings = settings.on_event(scene.journal.hook()).on_event(|event: &Event| {
        assert!(!matches!(event, Event::Ready { .. }), "a hook panics");
    });
    tell("settings", &settings);
    let builder = RetryConsumer::builder(&broker, WORK).settings(settings.clone());
    tell("builder", &builder);
    let consumer = builder.handler(|job: Job| async move {
        tell("job", &job);
        match job.body() {
            b"fails" => Err(anyhow!("no")),
            b"rejects" => Err(reject(anyhow!("never")).into()),
            b"panics" => panic!("a handler panics"),
            _ => Ok(()),
        }
    });
    let handle = consumer.start().await.unwrap();
    for body in ["fails", "rejects", "panics"] {
        scene.job(body, Default::default(), body.as_bytes()).await;
    }
    scene.journal.until_buried(3).await;
    tell("handle", &handle);
    let get = async || {
        let options = BasicGetOptions { no_ack: true };
        scene.channel.basic_get(BURIED.into(), options).await.unwrap()
    };
    while let Some(message) = get().await {
        tell("buried", &message.properties);
    }

    let retry = Retry::attach(&broker, WORK, settings).await.unwrap();
    let connection = connect(&scene.url()).await;
    let channel = connection.create_channel().await.unwrap();
    let jobs = retry.jobs(consume(&channel, WORK, 1).await);
    tell("own loop", &(&retry, &jobs));
    drop(jobs);
    retry.close().await.unwrap();

    // The connection dies, and the next one is refused.
    scene.vhost.api().add_user(user.name(), "another");
    let name = scene.connection_called("lapin-retry consuming").await;
    scene.vhost.api().close_connection(&name);
    eventually("it is refused", PATIENCE, async || scene.journal.disconnected() >= 3).await;
    scene.vhost.api().add_user(user.name(), PASSWORD);
    scene.job("last", Default::default(), b"last").await;
    eventually("it is back", 2 * PATIENCE, async || scene.journal.done() == ["last"]).await;
    tell("handle", &handle);
    handle.shutdown(Duration::from_secs(5)).await;
    tell("stopped", &handle.stopped().await);
}
