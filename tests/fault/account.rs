//! Accounts for every job, and finds the source of every duplicate.

use crate::{
    journal::{Line, Verb},
    plan::{BLOCK, CONSUMER_TIMEOUT, Course},
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
};

/// Where a duplicate comes from. What follows from a duplicate at a later step of the same job has
/// the same source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    /// The worker was killed with the job unacked; its copy may have been confirmed.
    Crash,
    /// A hand-off without an answer was done again.
    Undecided,
    /// The channel was lost with the job unacked, or its ack on the way.
    LostChannel,
    /// A handler outlasted the consumer timeout: the broker took back all that its worker held.
    ConsumerTimeout,
    /// Handlers blocked the worker's runtime, so that acks and heartbeats stayed away.
    BlockedRuntime,
    /// The broker's own at-least-once dead-lettering.
    DeadLettering,
    /// Not ours: the publisher had no answer, and published again.
    Publisher,
    Unattributed,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Crash => "worker killed before the ack",
            Self::Undecided => "undecided confirm, published again",
            Self::LostChannel => "delivered again after a lost channel",
            Self::ConsumerTimeout => "delivered again after the consumer timeout",
            Self::BlockedRuntime => "delivered again while a runtime was blocked",
            Self::DeadLettering => "the broker's at-least-once dead-lettering",
            Self::Publisher => "the test's publisher, not ours",
            Self::Unattributed => "unattributed",
        })
    }
}

/// All that the journal has said.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    jobs: HashMap<String, Vec<Line>>,
    done: BTreeSet<String>,
    buried: BTreeSet<String>,
    /// By worker: when it was killed, or lost its connection.
    troubles: HashMap<String, Vec<(u64, Verb)>>,
    /// By worker: when it might lose what it held, from and to, and by what.
    spells: HashMap<String, Vec<(u64, u64, Source)>>,
    /// What the broker felt, from and to.
    faults: Vec<(u64, u64)>,
    /// By worker.
    attempts: HashMap<String, BTreeSet<u64>>,
    /// By worker: when it was killed or stopped.
    ends: HashMap<String, u64>,
}

/// A loss of the connection may be seen by the broker before the worker tells of it.
const LATE_MS: u64 = 3_000;
/// How often a node looks whether a consumer timeout is over, with what that takes.
const TICK_MS: u64 = 3_000;
/// A worker that does nothing for so long after the broker's return, while others do, is stuck.
const STUCK_MS: u64 = 40_000;
/// No lane has so long a delay.
const KEPT_BACK_MS: u64 = 70_000;

/// How long it took after each return of the broker, in ms, the shortest first.
#[derive(Debug, Default)]
pub(crate) struct Resumed {
    /// Until a job was run.
    pub(crate) any: Vec<u64>,
    /// Until each worker that had run some before ran one.
    pub(crate) each: Vec<u64>,
    pub(crate) stuck: Vec<String>,
}

/// A message of the buried queue.
#[derive(Clone, Debug)]
pub(crate) struct Corpse {
    pub(crate) id: String,
    pub(crate) reason: String,
}

#[derive(Debug, Default)]
pub(crate) struct Account {
    pub(crate) jobs: usize,
    pub(crate) done: usize,
    pub(crate) buried: usize,
    pub(crate) lost: Vec<String>,
    /// Those that follow from another of the same job are counted in the second place.
    pub(crate) duplicates: BTreeMap<Source, (usize, usize)>,
    /// Jobs that were long in a lane: the broker kept a dead letter back until it tried again.
    pub(crate) kept_back: usize,
    /// What should not be.
    pub(crate) oddities: Vec<String>,
}

impl Account {
    pub(crate) fn duplicates(&self) -> usize {
        self.duplicates.values().map(|(first, later)| first + later).sum()
    }

    pub(crate) fn unattributed(&self) -> usize {
        self.duplicates.get(&Source::Unattributed).map_or(0, |(first, later)| first + later)
    }
}

impl Ledger {
    pub(crate) fn add(&mut self, line: Line) {
        if let Verb::Killed | Verb::Stopped = line.verb {
            self.ends.insert(line.who.clone(), line.at);
        }
        match line.verb {
            Verb::Stopped => return,
            Verb::Killed | Verb::Disconnected | Verb::ChannelClosed => {
                self.troubles.entry(line.who).or_default().push((line.at, line.verb));
                return;
            }
            Verb::Blocks => {
                let end = line.at + BLOCK.as_millis() as u64 + LATE_MS;
                let spell = (line.at, end, Source::BlockedRuntime);
                self.spells.entry(line.who).or_default().push(spell);
                return;
            }
            Verb::Fault => return self.faults.push((line.at, u64::MAX)),
            Verb::Back => {
                if let Some(fault) = self.faults.last_mut() {
                    fault.1 = line.at;
                }
                return;
            }
            Verb::Attempt => {
                self.attempts.entry(line.who.clone()).or_default().insert(line.at);
            }
            Verb::Overstays => {
                let over = line.at + CONSUMER_TIMEOUT.as_millis() as u64;
                let spell = (over - 1_000, over + TICK_MS + LATE_MS, Source::ConsumerTimeout);
                self.spells.entry(line.who.clone()).or_default().push(spell);
            }
            Verb::Success => drop(self.done.insert(line.id.clone())),
            Verb::Buried => drop(self.buried.insert(line.id.clone())),
            _ => {}
        }
        self.jobs.entry(line.id.clone()).or_default().push(line);
    }

    pub(crate) fn done(&self) -> usize {
        self.done.len()
    }

    /// As far as the workers lived to tell.
    pub(crate) fn buried(&self) -> usize {
        self.buried.len()
    }

    pub(crate) fn attempts(&self) -> usize {
        self.jobs.values().flatten().filter(|line| line.verb == Verb::Attempt).count()
    }

    pub(crate) fn resumed(&self) -> Resumed {
        let mut resumed = Resumed::default();
        for &(begin, back) in &self.faults {
            let mut first = None;
            let busy = |at: u64| self.attempts.values().any(|all| all.range(at..).next().is_some());
            for (who, attempts) in &self.attempts {
                let after = attempts.range(back..).next().map(|at| at - back);
                first = first.into_iter().chain(after).min();
                // A newcomer has nothing to come back to.
                if attempts.range(..begin).next().is_none() {
                    continue;
                }
                let end = self.ends.get(who).copied().unwrap_or(u64::MAX);
                match after {
                    Some(after) => resumed.each.push(after),
                    None if end > back.saturating_add(STUCK_MS) && busy(back + STUCK_MS) => {
                        resumed.stuck.push(who.clone());
                    }
                    None => {}
                }
            }
            resumed.any.extend(first);
        }
        resumed.any.sort_unstable();
        resumed.each.sort_unstable();
        resumed
    }

    /// Compares what was published with what became of it.
    pub(crate) fn account(
        &self,
        seed: u64,
        published: &BTreeSet<String>,
        corpses: &[Corpse],
    ) -> Account {
        let mut account = Account { jobs: published.len(), ..Account::default() };
        let mut graves: BTreeMap<&str, Vec<&Corpse>> = BTreeMap::new();
        for corpse in corpses {
            graves.entry(&corpse.id).or_default().push(corpse);
        }
        for id in published {
            let (done, graves) = (self.done.contains(id), graves.remove(id.as_str()));
            match (done, &graves) {
                (true, None) => account.done += 1,
                (false, Some(_)) => account.buried += 1,
                (false, None) => {
                    account.lost.push(id.clone());
                    continue;
                }
                (true, Some(graves)) => {
                    account.done += 1;
                    account
                        .oddities
                        .push(format!("{id} is done, and buried: {}", graves[0].reason));
                }
            }
            let buried = graves.unwrap_or_default();
            if buried.is_empty() == Course::of(seed, id).ends_buried() {
                let reason = buried.first().map_or("not", |corpse| &corpse.reason);
                account.oddities.push(format!("{id} was planned otherwise: buried {reason}"));
            }
            self.explain(id, &buried, &mut account);
        }
        let others = graves.keys().map(|id| format!("{id} is buried, but was never confirmed"));
        account.oddities.extend(others);
        account
    }

    fn explain(&self, id: &str, buried: &[&Corpse], account: &mut Account) {
        let lines = self.jobs.get(id).map(Vec::as_slice).unwrap_or_default();
        let travels = |pair: &&[Line]| {
            pair[0].verb == Verb::HandedOff
                && pair[1].verb == Verb::Attempt
                && pair[1].at - pair[0].at > KEPT_BACK_MS
        };
        account.kept_back += usize::from(lines.windows(2).any(|pair| travels(&pair)));
        let mut undecided = lines.iter().filter(|line| line.verb == Verb::Undecided).peekable();
        let mut known: Option<Source> = None;
        let count = |account: &mut Account, source: Source, follows: bool| {
            let counts = account.duplicates.entry(source).or_default();
            if follows {
                counts.1 += 1
            } else {
                counts.0 += 1
            }
            if source == Source::Unattributed && !follows {
                account.oddities.push(format!("a duplicate of {id} is unattributed"));
            }
        };
        let attempts: Vec<&Line> = lines.iter().filter(|line| line.verb == Verb::Attempt).collect();
        for (index, now) in attempts.iter().enumerate() {
            let same = || attempts[..index].iter().filter(|before| before.step == now.step);
            let Some(first) = same().next() else { continue };
            let mut twins = same().filter(|before| is_same(&before.copy, &now.copy));
            let twin = twins.clone().next();
            let source = match twins.find_map(|twin| self.cause(lines, twin, now)) {
                Some(source) => {
                    count(account, source, false);
                    source
                }
                _ => {
                    // Another copy.
                    let answer = undecided.next_if(|line| line.at <= now.at).is_some();
                    let published_again = first.copy == "-"
                        && lines.iter().any(|line| line.verb == Verb::Republished);
                    let own = match (answer, published_again, twin, known) {
                        (true, ..) => Some(Source::Undecided),
                        (_, true, ..) => Some(Source::Publisher),
                        (_, _, Some(twin), _) if self.felt(made(&attempts, twin), now.at) => {
                            Some(Source::DeadLettering)
                        }
                        (.., None) => Some(Source::Unattributed),
                        (.., Some(_)) => None,
                    };
                    let source = own.or(known).unwrap_or(Source::Unattributed);
                    count(account, source, own.is_none());
                    source
                }
            };
            known = Some(source);
        }
        // A job that is charged or waits before it is run once more is at another step by then.
        let successes: Vec<&Line> =
            lines.iter().filter(|line| line.verb == Verb::Success).collect();
        for (index, now) in successes.iter().enumerate().skip(1) {
            let before = successes[index - 1];
            if successes[..index].iter().all(|earlier| earlier.step != now.step) {
                let own = if known.is_none() { self.why_lost(lines, before, now) } else { None };
                let source = own.or(known).unwrap_or(Source::Unattributed);
                count(account, source, own.is_none() && known.is_some());
                known = Some(source);
            }
        }
        for _ in buried.iter().skip(1) {
            let own = match (undecided.next().is_some(), known) {
                (true, _) => Some(Source::Undecided),
                (false, None) => Some(Source::Unattributed),
                (false, Some(_)) => None,
            };
            let source = own.or(known).unwrap_or(Source::Unattributed);
            count(account, source, own.is_none());
            known = Some(source);
        }
    }

    /// Why the same message was delivered again, if it was: by the broker, or set aside by a
    /// worker.
    fn cause(&self, lines: &[Line], before: &Line, now: &Line) -> Option<Source> {
        // It is told of when its copy is confirmed, which may be run by then; and not at all by a
        // worker that ends meanwhile, but the copy shows it.
        let until = now.at + LATE_MS;
        let told =
            |line: &Line| line.verb == Verb::SetAside && (before.at..=until).contains(&line.at);
        let set_aside = now.copy.starts_with('/') || lines.iter().any(told);
        // A stale delivery may be run after the one that took its place.
        if !(now.redelivered || before.redelivered || set_aside) {
            return None;
        }
        self.why_lost(lines, before, now)
    }

    /// Why the broker did not take the answer to a delivery, as its job was run once more.
    fn why_lost(&self, lines: &[Line], before: &Line, now: &Line) -> Option<Source> {
        let trouble = |kind: Verb, until: u64| {
            let mut troubles = self.troubles.get(&before.who).into_iter().flatten();
            // A kill is noted before it is done.
            let from = before.at - if kind == Verb::Killed { LATE_MS } else { 0 };
            troubles.any(|(at, verb)| *verb == kind && (from..=until).contains(at))
        };
        let mut spells = self.spells.get(&before.who).into_iter().flatten();
        let spell = spells.rfind(|(from, to, _)| before.at <= *to && *from <= now.at);
        let told = lines.iter().any(|line| {
            matches!(line.verb, Verb::Stale | Verb::Duplicated | Verb::SetAside)
                && (line.who == before.who || line.who == now.who)
                && line.step == before.step
                && is_same(&line.copy, &before.copy)
                && line.at >= before.at
        });
        if trouble(Verb::Killed, now.at) {
            Some(Source::Crash)
        } else if let Some((.., source)) = spell {
            Some(*source)
        } else if told
            || trouble(Verb::Disconnected, now.at + LATE_MS)
            || trouble(Verb::ChannelClosed, now.at + LATE_MS)
            || self.felt(before.at, now.at)
        {
            Some(Source::LostChannel)
        } else {
            None
        }
    }

    /// Whether something happened to the broker in this time.
    fn felt(&self, from: u64, to: u64) -> bool {
        self.faults.iter().any(|&(begin, end)| begin <= to && from <= end)
    }
}

/// A message that a worker set aside has lost its first half.
fn is_same(copy: &str, other: &str) -> bool {
    let half =
        |copy: &str| copy.split_once('/').map(|(due, failed)| (due.to_owned(), failed.to_owned()));
    match (half(copy), half(other)) {
        (Some((a, failed)), Some((b, as_well))) => {
            failed == as_well && (a == b || a.is_empty() || b.is_empty())
        }
        _ => copy == other,
    }
}

/// No later than this the copy was made: by the attempt before.
fn made(attempts: &[&Line], copy: &Line) -> u64 {
    let before = attempts.iter().filter(|line| line.step != copy.step && line.at < copy.at);
    before.map(|line| line.at).max().unwrap_or(0)
}
