use std::{collections::BTreeSet, time::Duration};

use proptest::{collection::vec, prelude::*};
use tokio::time::Instant;

use super::{AckBook, Entry, STRAGGLE};

fn book<const N: u64>() -> (AckBook<u64>, Vec<Entry>) {
    let mut book = AckBook::new();
    let entries = (1..=N).map(|tag| book.enter(tag)).collect();
    (book, entries)
}

fn finish(book: &mut AckBook<u64>, entry: Entry, now: Instant) {
    book.finish(entry, entry.tag, now);
}

#[test]
fn what_finished_in_its_order_is_acked_together_at_once() {
    let (mut book, entries) = book::<4>();
    let now = Instant::now();
    for entry in &entries[..3] {
        finish(&mut book, *entry, now);
    }
    assert_eq!(book.take(now), [vec![1, 2, 3]]);
    assert_eq!(book.next(), None);
    finish(&mut book, entries[3], now);
    assert_eq!(book.take(now), [vec![4]]);
}

#[test]
fn what_finished_behind_a_slow_one_waits_a_few_milliseconds_and_is_acked_alone() {
    let (mut book, entries) = book::<8>();
    let now = Instant::now();
    finish(&mut book, entries[1], now);
    finish(&mut book, entries[2], now + Duration::from_millis(1));
    assert!(book.take(now).is_empty());
    assert_eq!(book.next(), Some(now + STRAGGLE));
    assert_eq!(book.take(now + STRAGGLE), [vec![2]]);
    finish(&mut book, entries[0], now + STRAGGLE);
    assert_eq!(book.take(now + STRAGGLE), [vec![1, 3]]);
    assert!(book.take(now + 2 * STRAGGLE).is_empty());
}

#[test]
fn an_ack_waits_for_more_only_while_the_broker_may_send_as_many_again() {
    let mut book = AckBook::new();
    let now = Instant::now();
    for tag in 1..4 {
        let entry = book.enter(tag);
        assert!(book.is_idle());
        finish(&mut book, entry, now);
        assert!(book.is_enough(), "the broker sent no more than one at a time");
        assert_eq!(book.take(now), [vec![tag]]);
    }
    let entries: Vec<_> = (4..14).map(|tag| book.enter(tag)).collect();
    for entry in &entries[..4] {
        finish(&mut book, *entry, now);
        assert!(!book.is_enough() && !book.is_idle());
    }
    finish(&mut book, entries[4], now);
    assert!(book.is_enough());
    assert_eq!(book.take(now), [vec![4, 5, 6, 7, 8]]);
    assert!(book.is_idle());
}

#[test]
fn what_finished_behind_a_slow_one_does_not_keep_the_broker_from_sending() {
    let (mut book, entries) = book::<8>();
    let now = Instant::now();
    for entry in &entries[1..4] {
        finish(&mut book, *entry, now);
    }
    assert!(book.take(now).is_empty());
    for entry in &entries[4..6] {
        finish(&mut book, *entry, now);
    }
    assert_eq!(book.take(now), [vec![2], vec![3]], "fewer than half of eight are kept");
    assert!(book.take(now).is_empty());
}

#[test]
fn in_a_hurry_none_waits() {
    let (mut book, entries) = book::<8>();
    let now = Instant::now();
    finish(&mut book, entries[1], now);
    book.hurry();
    assert!(book.is_enough());
    assert_eq!(book.take(now), [vec![2]]);
    finish(&mut book, entries[0], now);
    finish(&mut book, entries[4], now);
    assert_eq!(book.take(now), [vec![1], vec![5]]);
}

#[test]
fn a_slow_one_makes_the_book_no_longer_than_what_is_without_an_answer() {
    let mut book = AckBook::new();
    let mut now = Instant::now();
    let slow = book.enter(1);
    for tag in 2..1_000 {
        let entry = book.enter(tag);
        finish(&mut book, entry, now);
        assert_eq!(book.take(now), [vec![tag]], "the broker sent no more than two at a time");
        assert_eq!((book.row.len(), book.finished.len()), (1, 0));
        now += STRAGGLE;
    }
    finish(&mut book, slow, now);
    assert_eq!(book.take(now), [vec![1]]);
}

#[test]
fn after_a_gap_each_is_acked_alone_those_before_it_too() {
    let (mut book, entries) = book::<2>();
    let now = Instant::now();
    finish(&mut book, entries[0], now);
    let behind = book.enter(4);
    finish(&mut book, behind, now);
    finish(&mut book, entries[1], now);
    assert_eq!(book.take(now), [vec![1], vec![4], vec![2]]);
    let next = book.enter(5);
    finish(&mut book, next, now);
    assert_eq!(book.take(now), [vec![5]]);
}

#[test]
fn a_consumer_that_is_not_the_first_on_its_channel_acks_each_alone() {
    let mut book = AckBook::new();
    let entries = [book.enter(7), book.enter(8)];
    for entry in entries {
        finish(&mut book, entry, Instant::now());
    }
    assert_eq!(book.take(Instant::now()), [vec![7], vec![8]]);
}

#[test]
fn a_channel_that_begins_anew_begins_a_row_and_leaves_the_old_ones_alone() {
    let (mut book, entries) = book::<3>();
    let now = Instant::now();
    finish(&mut book, entries[0], now);
    let again = [book.enter(1), book.enter(2)];
    for entry in again {
        finish(&mut book, entry, now);
    }
    finish(&mut book, entries[1], now);
    assert_eq!(book.take(now), [vec![1], vec![2], vec![1, 2]]);
}

/// What a channel still holds unanswered, as the broker sees it.
#[derive(Debug)]
struct Channel {
    unacked: BTreeSet<u64>,
    finished: BTreeSet<u64>,
    acked: Vec<u64>,
}

impl Channel {
    /// What RabbitMQ does with an ack; one that covers nothing would close the channel.
    fn ack(&mut self, row: &[u64]) {
        let last = *row.last().expect("a row of none");
        assert!(last > 0, "tag 0 stands for all");
        let multiple = row.len() > 1;
        let covers = |tag: &u64| if multiple { *tag <= last } else { *tag == last };
        let covered: Vec<_> = self.unacked.iter().copied().filter(covers).collect();
        assert!(!covered.is_empty(), "{row:?} covers nothing of {:?}", self.unacked);
        for tag in covered {
            assert!(self.finished.contains(&tag), "{tag} is acked and not settled");
            self.unacked.remove(&tag);
            self.acked.push(tag);
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// A delivery of this consumer, or of another one on its channel.
    Deliver {
        ours: bool,
    },
    /// One of those at work, by its place among them, is done.
    Finish(prop::sample::Index),
    /// It is given back.
    GiveBack(prop::sample::Index),
    Take {
        after_ms: u64,
    },
}

fn step(others: bool) -> impl Strategy<Value = Step> {
    let ours = if others { prop::bool::weighted(0.98).boxed() } else { Just(true).boxed() };
    prop_oneof![
        4 => ours.prop_map(|ours| Step::Deliver { ours }),
        4 => any::<prop::sample::Index>().prop_map(Step::Finish),
        1 => any::<prop::sample::Index>().prop_map(Step::GiveBack),
        2 => (0..8_u64).prop_map(|after_ms| Step::Take { after_ms }),
    ]
}

/// Runs the steps against a broker, and returns how many acks it took.
fn run(steps: Vec<Step>) -> (usize, Channel) {
    let mut book = AckBook::new();
    let mut channel =
        Channel { unacked: BTreeSet::new(), finished: BTreeSet::new(), acked: Vec::new() };
    let (mut last, mut at_work, mut acks) = (0, Vec::<Entry>::new(), 0);
    let (mut now, mut given_back) = (Instant::now(), 0);
    let mut others = BTreeSet::new();
    for step in steps {
        match step {
            Step::Deliver { ours } => {
                last += 1;
                channel.unacked.insert(last);
                if ours {
                    at_work.push(book.enter(last));
                } else {
                    others.insert(last);
                }
            }
            Step::Finish(which) if !at_work.is_empty() => {
                let entry = at_work.swap_remove(which.index(at_work.len()));
                channel.finished.insert(entry.tag);
                finish(&mut book, entry, now);
            }
            Step::GiveBack(which) if !at_work.is_empty() => {
                let entry = at_work.swap_remove(which.index(at_work.len()));
                channel.unacked.remove(&entry.tag);
                book.answered(entry);
                given_back += 1;
            }
            Step::Finish(_) | Step::GiveBack(_) => {}
            Step::Take { after_ms } => {
                now += Duration::from_millis(after_ms);
                for row in book.take(now) {
                    channel.ack(&row);
                    acks += 1;
                }
                assert!(book.next().is_none_or(|next| next > now), "one waits for too long");
                assert!(book.row.len() <= channel.unacked.len(), "what has an answer is kept");
            }
        }
    }
    for entry in at_work {
        channel.finished.insert(entry.tag);
        finish(&mut book, entry, now);
    }
    for row in book.take(now) {
        channel.ack(&row);
        acks += 1;
    }
    assert_eq!(channel.unacked, others, "all of ours are acked, and nobody else's");
    assert_eq!(channel.acked.len() + given_back + others.len(), usize::try_from(last).unwrap());
    (acks, channel)
}

proptest! {
    #[test]
    fn each_is_acked_exactly_once_and_none_before_it_is_settled(steps in vec(step(false), 0..400)) {
        run(steps);
    }

    #[test]
    fn deliveries_of_another_consumer_on_the_channel_are_never_covered(
        steps in vec(step(true), 0..400),
    ) {
        run(steps);
    }
}
