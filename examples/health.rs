//! A health check over HTTP, and an orderly end.
//!
//! ```sh
//! scripts/with-broker cargo run --example health
//! curl -i http://127.0.0.1:8080/
//! ```
//!
//! `HEALTH_ADDR` in the environment is another address to listen at.
//!
//! Answers 200 while the consumer takes jobs, and 503 with the reason while it does not: paused,
//! without its broker, blocked by it, held up, or stopping. As a *readiness* check that is what you want; as a
//! *liveness* check it is not, for a restart brings no broker back.
//!
//! The first Ctrl-C or SIGTERM lets running handlers finish, the second ends the process now: what it
//! had not acked, the broker delivers again.

use std::{env, time::Duration};

use lapin::{
    Connection, ConnectionProperties,
    options::QueueDeclareOptions,
    types::{AMQPValue, FieldTable},
};
use lapin_retry::{Handle, Health, Job, RetryConsumer, RetryPolicy};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

const QUEUE: &str = "health";
/// Kubernetes, for one, waits 30 s between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(25);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt::init();
    let url = env::var("AMQP_URL").unwrap_or_else(|_| "amqp://localhost".to_owned());
    declare_work_queue(&url).await?;
    let consumer = RetryConsumer::builder(&url, QUEUE)
        .policy(RetryPolicy::new([15, 30, 60]))
        .handler(work)
        .start()
        .await?;

    let place = env::var("HEALTH_ADDR").unwrap_or_else(|_| "127.0.0.1:8080".to_owned());
    let listener = TcpListener::bind(&place).await?;
    println!("consuming {QUEUE}; health at http://{}/", listener.local_addr()?);
    tokio::spawn(serve(listener, consumer.clone()));

    tokio::select! {
        () = signal() => println!("finishing what was begun; once more to end now"),
        // At the limit of its `Reconnect`, if it has one.
        ended = consumer.stopped() => return Ok(ended?),
    }
    tokio::select! {
        () = consumer.shutdown(GRACE) => {}
        () = signal() => std::process::exit(130),
    }
    Ok(consumer.stopped().await?)
}

async fn work(job: Job) -> anyhow::Result<()> {
    println!("{} bytes", job.body().len());
    Ok(())
}

/// Ctrl-C, or what an orchestrator sends.
async fn signal() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate()).expect("a signal handler");
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = terminate.recv() => {}
        }
    }
    #[cfg(not(unix))]
    let _ = tokio::signal::ctrl_c().await;
}

async fn serve(listener: TcpListener, consumer: Handle) {
    loop {
        match listener.accept().await {
            Ok((client, _)) => {
                let answering = answer(client, consumer.health());
                tokio::spawn(tokio::time::timeout(Duration::from_secs(5), answering));
            }
            // Out of file handles, say.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Whatever the request, there is one answer.
async fn answer(mut client: TcpStream, health: Health) -> std::io::Result<()> {
    // Read first: a socket that is closed with a request unread takes the answer with it.
    let mut request = [0; 4096];
    let mut read = 0;
    while read < request.len() && !request[..read].windows(4).any(|end| end == b"\r\n\r\n") {
        match client.read(&mut request[read..]).await? {
            0 => break,
            more => read += more,
        }
    }
    let status = if health.is_healthy() { "200 OK" } else { "503 Service Unavailable" };
    let body = json!({ "status": health.as_str(), "detail": health.to_string() }).to_string();
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n",
        body.len()
    );
    client.write_all((head + &body).as_bytes()).await?;
    client.shutdown().await
}

async fn declare_work_queue(url: &str) -> anyhow::Result<()> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    let text = |text: &str| AMQPValue::LongString(text.into());
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), text("quorum"));
    // RabbitMQ 4 drops what it delivered 21 times, unless the queue says where it is to go.
    arguments.insert("x-dead-letter-exchange".into(), text(""));
    arguments.insert("x-dead-letter-routing-key".into(), text(&format!("{QUEUE}.buried")));
    channel.queue_declare(QUEUE.into(), QueueDeclareOptions::durable(), arguments).await?;
    connection.close(200, "done".into()).await?;
    Ok(())
}
