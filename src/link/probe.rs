//! Asks the broker, at the start, what would otherwise show when it is too late. Changes nothing.

use std::time::Duration;

use lapin::{
    BasicProperties, ErrorKind,
    options::{BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions},
    types::{AMQPValue, FieldTable},
};
use tokio::time::sleep;

use super::connection::Session;

/// How long to wait for a confirm, at most: less than any request to the broker may take.
const CONFIRM: Duration = Duration::from_secs(5);
/// How often it is looked whether the broker blocks publishers meanwhile.
const BLOCKED_CHECK: Duration = Duration::from_millis(50);

/// Whether a queue is a stream, by a consume that no queue accepts: its priority is no number. Classic
/// and quorum queues say so; a stream says that it knows no priorities (3.10, 4.0, 4.3). A declare would
/// say it as well, but takes the right to configure the queue. `None`: it was accepted after all.
pub(super) async fn is_stream(
    session: &Session,
    queue: &str,
) -> Result<Option<bool>, lapin::Error> {
    let channel = session.channel().await?;
    channel.basic_qos(1, BasicQosOptions::default()).await?;
    let mut arguments = FieldTable::default();
    arguments.insert("x-priority".into(), AMQPValue::LongString("none".into()));
    let options = BasicConsumeOptions::default();
    match channel.basic_consume(queue.into(), "".into(), options, arguments).await {
        Ok(_) => {
            // What was delivered is requeued.
            let _ = channel.close(200, "done".into()).await;
            Ok(None)
        }
        Err(error) => match error.kind() {
            ErrorKind::ProtocolError(amqp)
                if amqp.get_message().as_str().contains("'x-priority'") =>
            {
                Ok(Some(names_a_stream(amqp.get_message().as_str())))
            }
            _ => Err(error),
        },
    }
}

/// The queue's name is in the text as well, in quotes, and may be anything.
fn names_a_stream(text: &str) -> bool {
    let kind = text.rsplit_once(" of queue type ").map_or("", |(_, kind)| kind);
    kind.contains("stream") && !kind.contains('\'')
}

/// Whether the user may publish to the default exchange, by a message for a queue that does not exist:
/// without `mandatory` the broker confirms and drops it. False if it does not answer in time, or blocks
/// publishers; a lack of the right is an error.
pub(super) async fn may_publish(
    session: &Session,
    timeout: Duration,
) -> Result<bool, lapin::Error> {
    let channel = session.channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    // A task of its own: a channel that is closed before what was published on it is written kills
    // the connection.
    let mut publishing = tokio::spawn(async move {
        let nowhere = format!("lapin-retry.probe.{:032x}", rand::random::<u128>());
        let (options, properties) = (BasicPublishOptions::default(), BasicProperties::default());
        let published = channel.basic_publish("".into(), nowhere.into(), options, b"", properties);
        published.await?.await?;
        let _ = channel.close(200, "done".into()).await;
        Ok(true)
    });
    let blocked = async {
        while !session.connection.status().blocked() {
            sleep(BLOCKED_CHECK).await;
        }
    };
    tokio::select! {
        answer = &mut publishing => answer.unwrap_or(Ok(false)),
        () = blocked => Ok(false),
        () = sleep(timeout.min(CONFIRM)) => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_type_that_the_broker_names_makes_a_queue_a_stream() {
        let refusal = |name: &str, end: &str| {
            format!(
                "PRECONDITION_FAILED - invalid arg 'x-priority' for queue '{name}' in vhost '/'{end}"
            )
        };
        let other = ": \"expected integer, got longstr\"";
        let stream = " of queue type rabbit_stream_queue";
        for name in ["orders", "a stream", "a of queue type rabbit_stream_queue"] {
            assert!(names_a_stream(&refusal(name, stream)), "{name}");
            assert!(!names_a_stream(&refusal(name, other)), "{name}");
        }
    }
}
