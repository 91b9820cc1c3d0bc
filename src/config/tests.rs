//! What a file says, and what is said of a file that cannot be.

use super::*;
use crate::fuzz::fuzz;
use proptest::prelude::*;

fn parse(text: &str) -> Result<Config, Error> {
    Config::parse(text, "retry.toml")
}

#[test]
fn a_file_sets_all_that_the_builder_has() {
    let config = parse(
        r#"
        management_env = "PATH"

        [consumers.orders]
        queue = "shop.orders"
        policy = { levels = [15, "2m"], jitter = { proportional = 0.2 }, lanes = 4, max_age = "1d" }
        select = { header = "kind" }
        types.sync = { levels = [5] }
        pause = { first = 1, max = "1m", minimum = "500ms" }
        queue_type = "classic"
        declare = "check"
        doctor = "refuse"
        confirm_timeout = 3
        hand_offs = 8
        crash_limit = 5
        remember_done = 9
        worker = "w1"
        prefetch = 10
        concurrency = 2
        handler_timeout = "1m"
        reconnect = { first = "50ms", max = 7, limit = 9 }
        consumer_tag = "tag"
        priority = -1

        [consumers.mails]
        "#,
    )
    .unwrap();
    assert_eq!(config.names().collect::<Vec<_>>(), ["mails", "orders"]);
    let builder = format!("{:?}", config.builder("amqp://localhost", "orders").unwrap());
    for part in [
        "\"shop.orders\"",
        "Header(\"kind\")",
        "\"sync\"",
        "500ms",
        "Classic",
        "Check",
        "Refuse",
        "confirm_timeout: 3s",
        "hand_offs: 8",
        "crash_limit: 5",
        "remember_done: 9",
        "\"w1\"",
        "prefetch: 10",
        "Some(2)",
        "handler_timeout: 60s",
        "Reconnect { first: 50ms, max: 7s, limit: Some(9) }",
        "Some(\"tag\")",
        "LongInt(-1)",
        "86400s",
    ] {
        assert!(builder.contains(part), "{builder} should contain {part}");
    }
    let management = config.settings("orders").unwrap().management;
    assert_eq!(management, std::env::var("PATH").ok(), "what the variable holds");
    let mails = format!("{:?}", config.builder("amqp://localhost", "mails").unwrap());
    assert!(mails.contains("queue: \"mails\"") && mails.contains("prefetch: 100"), "{mails}");
    let sync = config.policies("orders").unwrap().get("sync");
    assert_eq!(sync, &RetryPolicy::new([5]));
    assert!(config.settings("nobody").unwrap_err().to_string().contains("mails, orders"));
}

#[test]
fn what_is_wrong_is_told_with_file_line_and_field() {
    for (text, says) in [
        ("[consumers.a]\nprefech = 1", "retry.toml:2: unknown field `prefech`"),
        ("[consumers.a]\nprefetch = \"many\"", "retry.toml:2:"),
        ("[consumers.a]\nprefetch = 0", "prefetch"),
        ("[consumers.a]\ncrash_limit = 0", "crash_limit: 0"),
        ("[consumers.a]\nremember_done = 1000001", "remember_done"),
        ("[consumers.a]\nhandler_timeout = 1.5", "retry.toml:2:"),
        ("[consumers.a]\nhandler_timeout = \"5 parsecs\"", "retry.toml:2:"),
        ("[consumers.a]\npolicy = { levels = [0] }", "retry.toml:2: levels[0]"),
        ("[consumers.a]\npolicy = { levels = [1], lane = 2 }", "unknown field `lane`"),
        ("[consumers.a]\npause = { first = 600 }", "pause.max"),
        ("[consumers.a]\nhandler_timeout = \"30m\"", "consumer timeout"),
        ("[consumers.a]\nreconnect = { first = 0 }", "reconnect.first"),
        ("[consumers.a]\nreconnect = { first = 9, max = 8 }", "reconnect.max"),
        ("[consumers.a]\nreconnect = { limit = 0 }", "reconnect.limit"),
        ("tls = { cert = \"c\" }\n[consumers.a]", "unknown field `cert`"),
        ("[consumers.a]\nselect = \"type\"", "select: there are no types"),
        ("[consumers.a]\nselect = \"kind\"", "retry.toml:2:"),
        ("[consumers.a]\ntypes.x = { levels = [] }", "levels"),
        ("[consumers.a]\npolicy = { levels = [1, 2, 3], lanes = 90 }", "271 queues"),
        ("[consumers.a\n", "retry.toml:1"),
        ("[consumers]\n", "no consumers"),
        ("url = \"amqp://me:hunter2@host\"\n[consumers.a]", "unknown field `url`"),
        ("[consumers.a]\nprefetch = \"amqp://me:hunter2@host\"", "\"amqp://@host\""),
        ("[consumers.a]\nselect = \"amqp://me:a://hunter2@b@host\"", "`amqp://@host`"),
    ] {
        let error = parse(text).expect_err(text).to_string();
        assert!(error.starts_with("retry.toml"), "{error}");
        assert!(error.contains(says), "{error} should say {says}");
        assert!(!error.contains("hunter2"), "{error}");
    }
    let unset = parse("management_env = \"NO_SUCH_VARIABLE\"\n[consumers.a]").unwrap();
    let error = unset.builder("amqp://localhost", "a").unwrap_err().to_string();
    assert!(error.starts_with("NO_SUCH_VARIABLE: not set") && error.contains("15672"), "{error}");
    let missing = Config::from_file("no/such/file.toml").unwrap_err().to_string();
    assert!(missing.contains("no/such/file.toml"), "{missing}");
}

/// What files are made of, and what they had better not be.
const PIECES: [&str; 42] = [
    "[consumers.a]\n",
    "[consumers.a.policy]\n",
    "[[consumers]]\n",
    "consumers.a.policy = ",
    "policy = ",
    "levels = ",
    "exponential = ",
    "initial = ",
    "multiplier = ",
    "attempts = ",
    "jitter = ",
    "proportional = ",
    "lanes = ",
    "max_age = ",
    "pause = ",
    "first = ",
    "max = ",
    "types.x = ",
    "select = ",
    "prefetch = ",
    "handler_timeout = ",
    "priority = ",
    "{ ",
    " }",
    "[",
    "]",
    ", ",
    "\n",
    "\"",
    "'",
    "\"10y\"",
    "\"1m 30s\"",
    "0",
    "-1",
    "1e308",
    "nan",
    "inf",
    "0.0000001",
    "65536",
    "4294967295",
    "9223372036854775807",
    "18446744073709551616",
];
const VALID: [&str; 3] = [
    include_str!("../../examples/five_types.toml"),
    "[consumers.a]\npolicy = { levels = [15, \"2m\"], jitter = \"full\", lanes = 4, max_age = \"1d\" }\n\
     select = { header = \"kind\" }\ntypes.x = { levels = [5], jitter = { proportional = 0.2 } }\n\
     pause = { first = 1, max = \"1m\", minimum = \"500ms\" }\nqueue_type = \"classic\"\n\
     declare = \"check\"\nconfirm_timeout = 3\nhand_offs = 8\nremember_done = 9\nworker = \"w\"\nprefetch = 10\n\
     concurrency = 2\nhandler_timeout = \"1m\"\nconsumer_timeout = \"30m\"\nconsumer_tag = \"t\"\n\
     priority = -1\n",
    "[consumers.a]\npolicy = { exponential = { initial = \"500ms\", multiplier = 2.5, \
     max = \"30s\", attempts = 7 }, jitter = \"none\" }\n[consumers.b]\nqueue = \"b\"\n",
];

fn piece() -> impl Strategy<Value = String> {
    prop_oneof![
        6 => proptest::sample::select(PIECES.to_vec()).prop_map(str::to_owned),
        1 => any::<String>(),
        1 => any::<i64>().prop_map(|n| n.to_string()),
        1 => any::<f64>().prop_map(|n| n.to_string()),
    ]
}

/// A valid file in which some words, numbers and signs are others.
fn mutated() -> impl Strategy<Value = String> {
    let change = (any::<proptest::sample::Index>(), proptest::option::weighted(0.8, piece()));
    let changes = proptest::collection::vec(change, 1..6);
    (proptest::sample::select(VALID.to_vec()), changes).prop_map(|(valid, changes)| {
        let is_word = |c: char| c.is_alphanumeric() || "_-.".contains(c);
        let mut words: Vec<String> = Vec::new();
        for c in valid.chars() {
            match words.last_mut() {
                Some(word) if is_word(c) && word.ends_with(is_word) => word.push(c),
                _ => words.push(c.into()),
            }
        }
        for (at, change) in changes {
            *at.get_mut(&mut words) = change.unwrap_or_default();
        }
        words.concat()
    })
}

#[test]
fn whatever_is_in_the_file_it_is_read_or_refused() {
    let soup = proptest::collection::vec(piece(), 0..30).prop_map(|pieces| pieces.concat());
    let texts = prop_oneof![4 => mutated(), 2 => soup, 1 => any::<String>()];
    fuzz(texts, |text| {
        match parse(&text) {
            Ok(config) => {
                for name in config.names() {
                    let builder = config.builder("amqp://localhost", name).unwrap();
                    prop_assert!(builder.check().is_ok());
                    let _ = format!("{builder:?} {:?}", config.policies(name).unwrap().get("x"));
                }
            }
            Err(error) => prop_assert!(error.to_string().starts_with("retry.toml"), "{error}"),
        }
        Ok(())
    });
}

#[test]
fn what_is_wrong_with_a_certificate_is_told_with_its_field() {
    let tls =
        |tls: &str| parse(&format!("tls = {tls}\n[consumers.a]")).unwrap().tls.read().map(drop);
    tls("{}").unwrap();
    for (text, says) in [
        ("{ ca = \"no/such.pem\" }", "tls.ca: no/such.pem"),
        ("{ certificate = \"no/such.pem\" }", "needs its key"),
        ("{ certificate = \"no/such.pem\", key = \"k\" }", "tls.certificate: no/such.pem"),
    ] {
        let error = tls(text).expect_err(text).to_string();
        assert!(error.contains(says), "{error} should say {says}");
    }
}
