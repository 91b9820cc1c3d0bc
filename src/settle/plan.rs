//! Where a job goes, as a value: decided from its story, its outcome and the rules. Knows no
//! channel.

#[cfg(test)]
mod tests;

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use rand::rngs::SmallRng;

use super::Settled;
use crate::{
    BuriedReason, Error, Event, FailureKind, Job, Outcome, QueueType, Settings, Topology,
    event::Postponed,
    message::{Failure, Story, span},
    policy::{Decision, Verdict},
    topology::{Decks, Lane},
};

/// What is left of a wait and shorter than this is waited out in the worker.
const SHORT: Duration = Duration::from_secs(1);
/// What is said of a burial for which there was no room.
const TOO_LARGE: &str = "its headers leave no room for the retry headers in an AMQP frame; the \
                         header buried-dropped-headers of the buried job says which were left out";
/// The resolution of a message's timestamp.
const TIMESTAMP: Duration = Duration::from_secs(1);

/// The policies and their queues. A job keeps the rules that it was admitted under.
#[derive(Debug)]
pub(crate) struct Rules {
    /// A reload changes policies, pauses, classifiers and the crash limit. What else stands here is
    /// not looked at.
    pub(super) settings: Settings,
    pub(crate) topology: Topology,
    chance: Mutex<Chance>,
}

#[derive(Debug)]
struct Chance {
    rng: SmallRng,
    decks: Decks,
}

/// Where a job goes, and with which story.
#[derive(Debug)]
pub(crate) struct Move {
    pub(super) story: Story,
    pub(super) to: To,
    pub(super) kind: FailureKind,
    pub(super) error: String,
}

#[derive(Clone, Debug)]
pub(super) enum To {
    /// Charged: on this level now.
    Level {
        level: u32,
        lane: Lane,
    },
    /// Not charged.
    Wait {
        why: Postponed,
        lane: Lane,
    },
    /// Not charged: back to the tail of its queue.
    WorkQueue,
    /// The same, and it may come back at once.
    Afresh,
    /// The same, to be run with nothing else in hand.
    Alone,
    Buried(BuriedReason),
}

/// What is done with a job on its arrival.
#[derive(Debug)]
pub(crate) enum Arrival {
    Run,
    /// Run it, once this has passed.
    RunAfter(Duration),
    /// It goes on without a run.
    Move(Box<Move>),
}

impl Move {
    /// Of a job that was not run.
    fn unrun(job: &Job, now: SystemTime, to: To) -> Self {
        let mut story = job.story().clone();
        // It may be the first that is seen of it.
        story.remember(job.message(), now);
        Self { story, to, kind: FailureKind::Failed, error: String::new() }
    }

    fn unrun_burial(job: &Job, now: SystemTime, reason: BuriedReason, why: String) -> Self {
        let mut to = Self::unrun(job, now, To::Buried(reason));
        to.story.detail = Some(why);
        to
    }

    /// Where it waits, if it does.
    pub(super) fn lane(&self) -> Option<&Lane> {
        match &self.to {
            To::Level { lane, .. } | To::Wait { lane, .. } => Some(lane),
            To::WorkQueue | To::Afresh | To::Alone | To::Buried(_) => None,
        }
    }

    /// Of a job that was not run, and does not come nearer to its delivery limit.
    pub(super) fn return_unrun(job: &Job, now: SystemTime) -> Self {
        Self::unrun(job, now, To::WorkQueue)
    }

    /// Of a job that was not run, and loses the counts of other queues.
    pub(super) fn start_afresh(job: &Job, now: SystemTime) -> Self {
        Self::unrun(job, now, To::Afresh)
    }

    /// Onward from `now`, which the story then tells of: into a lane, or to the work queue, and when
    /// it is due, after all hops; or the reason to bury it.
    pub(super) fn onward(
        &mut self,
        now: SystemTime,
    ) -> Result<(Option<Lane>, SystemTime), BuriedReason> {
        if let To::Buried(reason) = self.to {
            return Err(reason);
        }
        let Some(lane) = self.lane().cloned() else { return Ok((None, now)) };
        let due = now + wait(&lane, &self.story);
        self.story.go_to(due);
        Ok((Some(lane), due))
    }

    /// What to say of a job that is due then, or buried; and what became of it.
    pub(super) fn said(self, job: Job, due: Result<SystemTime, BuriedReason>) -> (Event, Settled) {
        let Self { to, kind, error, story } = self;
        let delay = |lane: &Lane| Duration::from_millis(lane.delay_ms);
        match (to, due) {
            (_, Err(reason)) | (To::Buried(reason), _) => {
                let detail = match reason {
                    BuriedReason::TooLarge => TOO_LARGE.to_owned(),
                    _ => story.detail.unwrap_or_default(),
                };
                // Of a job that was not run this is all that there is to say.
                let error = if error.is_empty() { detail.clone() } else { error };
                (Event::Buried { job, reason, detail, error }, Settled::Buried)
            }
            (To::Level { level, lane }, Ok(due)) => {
                let settled = Settled::Retried { level, due };
                (Event::Retried { job, level, delay: delay(&lane), due, kind, error }, settled)
            }
            (To::Wait { why, lane }, Ok(due)) => {
                let event = Event::Postponed { job, delay: delay(&lane), due, why };
                (event, Settled::Postponed { due })
            }
            (To::WorkQueue | To::Afresh, Ok(_)) => {
                (Event::Returned { job, error }, Settled::Returned)
            }
            (To::Alone, Ok(_)) => {
                let crashes = job.story().crash_count;
                (Event::Suspected { job, crashes }, Settled::Returned)
            }
        }
    }
}

impl Rules {
    /// `queue_type` is the one at the start: a reload does not change it.
    pub(crate) fn new(
        queue: &str,
        settings: Settings,
        queue_type: QueueType,
    ) -> Result<Self, Error> {
        Ok(Self {
            topology: Topology::new(queue, &settings.policies, queue_type)?,
            settings,
            chance: Mutex::new(Chance { rng: rand::make_rng(), decks: Decks::default() }),
        })
    }

    /// Before the handler. A header that makes no sense is judged only when the job fails: one that
    /// would have succeeded is not buried for it.
    pub(crate) fn on_arrival(&self, job: &Job, now: SystemTime) -> Arrival {
        let story = job.story();
        let max_age = self.settings.policies.at(self.settings.policies.of(job)).age_limit();
        if let Some((end, limit)) = story.expires_at(job.properties(), max_age, now) {
            // A timestamp has whole seconds, so a job that comes first may be younger.
            let grace = if story.is_first() { TIMESTAMP } else { Duration::ZERO };
            if let Ok(late) = now.duration_since(end)
                && late > grace
            {
                let why = format!("it arrived {} after {}", span(late), limit.text(end));
                return Arrival::Move(Box::new(Move::unrun_burial(
                    job,
                    now,
                    BuriedReason::Expired,
                    why,
                )));
            }
        }
        let left = story.still_to_wait(now);
        if left.is_zero() {
            Arrival::Run
        } else if left < SHORT {
            Arrival::RunAfter(left)
        } else {
            Arrival::Move(Box::new(self.hop(job, left, now)))
        }
    }

    /// The next lane of a wait that has begun.
    fn hop(&self, job: &Job, left: Duration, now: SystemTime) -> Move {
        let (policy, wait_ms) = (self.settings.policies.of(job), whole_ms(left));
        if !self.topology.in_reach(policy, wait_ms) {
            let why = format!("{}: {}", job.story().wait_text(), out_of_reach(left));
            return Move::unrun_burial(job, now, BuriedReason::InvalidHeaders, why);
        }
        let lane = self.topology.place(policy, wait_ms, &mut self.chance().rng).clone();
        let wait_left = wait_ms.saturating_sub(lane.delay_ms);
        let mut to = Move::unrun(job, now, To::Wait { why: Postponed::NotDue, lane });
        to.story.wait_left = Some(wait_left);
        to
    }

    /// A suspect is not run: it goes to the tail of its queue, to be run alone; or, if its process
    /// died each time that it ran alone, it is buried.
    pub(crate) fn count_crash(&self, job: &Job, now: SystemTime, worker: &str) -> Move {
        let mut to = Move { kind: FailureKind::Crash, ..Move::unrun(job, now, To::Alone) };
        let lone_crashes = job.story().crash_count;
        if lone_crashes > 0 {
            to.error = format!(
                "a worker's process died while it ran this job alone, {lone_crashes} in a row"
            );
            let policy = self.settings.policies.at(self.settings.policies.of(job));
            let level = policy.level_label(job.story().retry_count);
            let (kind, error) = (to.kind, to.error.as_str());
            to.story.note(Failure { kind, error, at: now, level, worker });
        }
        if lone_crashes >= self.settings.crash_limit {
            let limit = self.settings.crash_limit;
            to.story.detail = Some(format!(
                "{lone_crashes} processes in a row died while they ran it with nothing else; the \
                 crash limit is {limit}"
            ));
            to.to = To::Buried(BuriedReason::CrashLoop);
        } else {
            to.story.count_lone_run();
        }
        to
    }

    /// After an attempt. Nowhere if the job is done.
    pub(crate) fn after_attempt(
        &self,
        job: &Job,
        verdict: Verdict,
        now: SystemTime,
        worker: &str,
    ) -> Option<Move> {
        // Of most jobs nothing is copied.
        if matches!(verdict, Verdict::Done) {
            return None;
        }
        let index = self.settings.policies.of(job);
        let policy = self.settings.policies.at(index);
        let mut story = job.story().clone();
        story.time_has_come();
        story.survived();
        let decision = policy.decide(story.retry_count, story.busy_count, &verdict);
        let Verdict::Failed { kind, error, .. } = verdict else { return None };
        let level = policy.level_label(story.retry_count);
        let failure = Failure { kind, error: &error, at: now, level, worker };
        // A failure needs the headers, so now they are judged.
        let odd = story.is_odd();
        let mut in_a_row = 0;
        match decision {
            Decision::Done => return None,
            Decision::Busy => in_a_row = story.note_busy(failure),
            Decision::Return
            | Decision::Bury(BuriedReason::Rejected | BuriedReason::Undecodable) => {
                story.note(failure);
            }
            Decision::Retry(_) | Decision::RetryAfter(..) | Decision::Bury(_) => {
                story.charge(failure);
            }
        }
        story.remember(job.message(), now);
        let to = match decision {
            _ if odd => {
                story.detail = Some(story.odd_text());
                To::Buried(BuriedReason::InvalidHeaders)
            }
            Decision::Done => return None,
            Decision::Bury(reason) => {
                story.detail = Some(why_buried(reason, story.retry_count, policy.retries()));
                To::Buried(reason)
            }
            Decision::Return => To::WorkQueue,
            Decision::Busy => {
                To::Wait { why: Postponed::Busy { in_a_row }, lane: self.busy(in_a_row) }
            }
            Decision::Retry(level) => {
                let lane = self.draw(index, policy.level_ms(level).unwrap_or_default());
                To::Level { level, lane }
            }
            Decision::RetryAfter(level, delay) => {
                match self.wait_from(index, delay, now, &mut story) {
                    Some(lane) => To::Level { level, lane },
                    None => {
                        let asked = out_of_reach(delay);
                        story.detail = Some(format!("its handler asked for too long: {asked}"));
                        To::Buried(BuriedReason::Expired)
                    }
                }
            }
        };
        let to = in_time(to, &mut story, job, policy.age_limit(), now);
        if let To::Level { level, .. } = to {
            story.set_level(policy.level_label(level));
        }
        Some(Move { story, to, kind, error })
    }

    /// Without an outcome: it comes back like a job that is busy.
    pub(crate) fn postpone(
        &self,
        job: &Job,
        (why, error): (Postponed, &str),
        now: SystemTime,
        worker: &str,
    ) -> Option<Move> {
        let (outcome, kind) = (Outcome::Busy, FailureKind::Busy);
        let verdict = Verdict::Failed { outcome, kind, error: error.to_owned() };
        let mut to = self.after_attempt(job, verdict, now, worker)?;
        // Unless it is charged or buried by now.
        if let To::Wait { why: busy, .. } = &mut to.to {
            *busy = why;
        }
        Some(to)
    }

    fn draw(&self, policy: usize, level_ms: u64) -> Lane {
        let lanes = self.topology.lanes(policy, level_ms);
        let mut chance = self.chance();
        let Chance { rng, decks } = &mut *chance;
        decks.draw((policy, level_ms), lanes, rng).clone()
    }

    fn busy(&self, in_a_row: u32) -> Lane {
        self.topology.place_busy(in_a_row, &mut self.chance().rng).clone()
    }

    /// A lane for a wait that begins now; where one lane is not enough, the story says what is left.
    fn wait_from(
        &self,
        policy: usize,
        delay: Duration,
        now: SystemTime,
        story: &mut Story,
    ) -> Option<Lane> {
        let wait_ms = whole_ms(delay);
        if !self.topology.in_reach(policy, wait_ms) {
            return None;
        }
        let lane = self.topology.place(policy, wait_ms, &mut self.chance().rng).clone();
        if lane.delay_ms < wait_ms {
            story.wait_left = Some(wait_ms - lane.delay_ms);
            // The header has whole milliseconds, and what it cuts off would be early.
            story.not_before = now.checked_add(Duration::from_millis(wait_ms + 1));
        }
        Some(lane)
    }

    fn chance(&self) -> std::sync::MutexGuard<'_, Chance> {
        self.chance.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The buried queue instead, if the wait would end after the deadline.
fn in_time(to: To, story: &mut Story, job: &Job, max_age: Option<Duration>, now: SystemTime) -> To {
    let (To::Level { lane, .. } | To::Wait { lane, .. }) = &to else { return to };
    let wait = wait(lane, story);
    let Some((end, limit)) = story.expires_at(job.properties(), max_age, now) else { return to };
    match (now + wait).duration_since(end) {
        Ok(late) if !late.is_zero() => {
            let (wait, late, limit) = (span(wait), span(late), limit.text(end));
            story.detail = Some(format!("its next delay of {wait} would end {late} after {limit}"));
            To::Buried(BuriedReason::Expired)
        }
        _ => to,
    }
}

/// How long it waits, from the publish on: in this lane, and then as long as the story says.
fn wait(lane: &Lane, story: &Story) -> Duration {
    let left = Duration::from_millis(story.wait_left.unwrap_or_default());
    left.saturating_add(Duration::from_millis(lane.delay_ms))
}

/// What the policy's decision says, for people. `failures` are those charged, with this one.
fn why_buried(reason: BuriedReason, failures: u32, levels: u32) -> String {
    let plural = |n: u32, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    match reason {
        BuriedReason::Rejected => "its handler said that trying again is of no use".to_owned(),
        BuriedReason::Undecodable => "its body cannot be read".to_owned(),
        _ => {
            let (failures, levels) = (plural(failures, "time"), plural(levels, "level"));
            format!("it failed {failures}, and its policy has {levels}")
        }
    }
}

fn out_of_reach(wait: Duration) -> String {
    format!(
        "a wait of {}; the longest is 10 years, and 10,000 hops through the longest lane",
        span(wait)
    )
}

/// Rounded up, for nothing comes early; at least 1.
fn whole_ms(delay: Duration) -> u64 {
    u64::try_from(delay.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX).max(1)
}
