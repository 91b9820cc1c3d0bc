use super::*;

fn builder() -> Builder {
    RetryConsumer::builder("amqp://localhost", "orders")
}

#[test]
fn an_impossible_consumer_is_refused_with_the_field_the_reason_and_the_remedy() {
    const MINUTE: Duration = Duration::from_secs(60);
    let reconnect = Reconnect::default;
    let long = || "t".repeat(256);
    let cases: [(Builder, &[&str]); 10] = [
        (builder().prefetch(0), &["prefetch: 0", "memory", "use 1 or more"]),
        (builder().concurrency(0), &["concurrency: 0", "no handler"]),
        (builder().handler_timeout(Duration::ZERO), &["handler_timeout: zero", "time out"]),
        // With the 30 s that a hand-off may take.
        (
            builder().handler_timeout(30 * MINUTE - Duration::from_secs(30)),
            &["handler_timeout: 1770s", "30s for the hand-off", "1800s", "rabbitmq.conf"],
        ),
        (
            builder().consumer_timeout(MINUTE),
            &["handler_timeout: 1500s", "consumer timeout of 60s", "raise both consumer_timeout"],
        ),
        (builder().consumer_tag(long()), &["consumer_tag", "255 bytes"]),
        (
            builder().priority(1).argument(&long(), AMQPValue::Void),
            &["argument", "ttt", "255 bytes"],
        ),
        (
            builder().reconnect(reconnect().first(Duration::ZERO)),
            &["reconnect.first: zero", "without a pause"],
        ),
        (
            builder().reconnect(reconnect().max(Duration::from_millis(99))),
            &["reconnect.max: 99ms", "shorter than the first"],
        ),
        (builder().reconnect(reconnect().limit(0)), &["reconnect.limit: 0", "1 or more"]),
    ];
    for (builder, parts) in cases {
        let error = builder.validate().expect_err(parts[0]);
        assert_eq!(error.kind(), ErrorKind::Configuration);
        for part in parts {
            assert!(error.to_string().contains(part), "{error} should say {part}");
        }
    }
}

#[test]
fn what_is_just_possible_is_not_refused() {
    let longest = Duration::from_secs(30 * 60 - 30) - Duration::from_millis(1);
    let wait = Duration::from_millis(100);
    builder()
        .prefetch(1)
        .concurrency(1)
        .handler_timeout(longest)
        .consumer_tag("t".repeat(255))
        .argument(&"a".repeat(255), AMQPValue::Void)
        .reconnect(Reconnect::default().first(wait).max(wait).limit(1))
        .validate()
        .unwrap();
}
