//! The queues that a policy needs beside a work queue, as a value. Pure: `declare` makes them.

mod arguments;
mod deck;
mod declare;
mod name;
mod place;
mod probe;
mod shield;

use std::{collections::BTreeMap, sync::Arc};

use serde::Deserialize;

#[cfg(not(feature = "doctor"))]
use self::name::Name;
pub use self::shield::Shield;
#[cfg(feature = "doctor")]
pub(crate) use self::{
    arguments::DELIVERY_LIMIT,
    name::{Kind, Name},
    shield::{all, delete_queue, literally, set_policy},
};
pub(crate) use self::{
    deck::Decks,
    declare::{about_permissions, declare, make},
    probe::probe,
    shield::shell,
};
use crate::{
    Error, Policies, RetryPolicy,
    policy::{MAX_QUEUES, busy_delays, lane_delays},
};

/// The type of the lanes and of the buried queue. The work queue may be of either type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum QueueType {
    /// Quorum queues with at-least-once dead-lettering, the default. A job that expires in a lane
    /// leaves it only once the work queue has it on disk.
    ///
    /// Measured with 5,000 expiring messages and a SIGKILL of the broker, on RabbitMQ 3.10, 4.0
    /// and 4.3: none of 80,000 lost in 16 kills, at most 32 duplicates a kill.
    #[default]
    Quorum,
    /// Classic queues, for those who know why. **They lose jobs when the broker crashes**: in the
    /// same measurement 7 of 15 kills lost some, up to all 5,000.
    Classic,
}

/// What is done about the queues at the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Declare {
    /// Declare them, the default. Needs the configure permission on them.
    #[default]
    Create,
    /// Verify by passive declare that they are there, for workers without that permission.
    /// Arguments are not compared: the broker does not tell them.
    Check,
    /// Neither. A hand-off to a queue that is missing is tried again until it is there.
    Off,
}

/// One queue of ours: its name and all that is declared about it.
///
/// It is always durable, never exclusive, never auto-delete.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct QueueSpec {
    /// The queue's name.
    pub name: String,
    /// The arguments it is declared with. Final: another set of them gets another name.
    pub arguments: lapin::types::FieldTable,
}

/// One delay queue. Every message in it has the same expiration.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Lane {
    pub(crate) delay_ms: u64,
    /// Shared with the jobs that are on their way there.
    pub(crate) queue: Arc<QueueSpec>,
}

/// The queues that a policy makes for one work queue.
///
/// ```
/// use lapin_retry::{QueueType, RetryPolicy, Topology};
///
/// let topology = Topology::new("orders", RetryPolicy::new([15]).lanes(2), QueueType::Quorum)?;
/// let names: Vec<_> = topology.queues().map(|queue| queue.name.as_str()).collect();
/// assert_eq!(
///     names,
///     ["orders.buried", "orders.retry.00015s.00011250ms", "orders.retry.00015s.00015000ms"]
/// );
/// # Ok::<(), lapin_retry::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    work_queue: String,
    buried: QueueSpec,
    /// For each policy its levels' lanes by the level's nominal delay; equal levels share theirs.
    ladders: Vec<BTreeMap<u64, Vec<Lane>>>,
    busy: Vec<Lane>,
    hold: Vec<Lane>,
}

impl Topology {
    /// What these policies need beside `work_queue`.
    ///
    /// # Errors
    /// [`ErrorKind::Configuration`](crate::ErrorKind::Configuration): a policy is impossible, a
    /// queue's name would be longer than 255 bytes, or there would be more than 200 queues.
    pub fn new(
        work_queue: &str,
        policies: impl Into<Policies>,
        queue_type: QueueType,
    ) -> Result<Self, Error> {
        let policies = policies.into();
        policies.validate()?;
        if work_queue.is_empty() {
            return Err(Error::configuration("queue: the name is empty; name the work queue"));
        }
        if work_queue.starts_with("amq.") {
            return Err(Error::configuration(format!(
                "queue: {work_queue:?} is a name that the broker chose, and no queue can be declared \
                 beside it: names with \"amq.\" are the broker's own; declare the work queue with a name"
            )));
        }
        for policy in policies.iter() {
            within_the_queue_limit(work_queue, policy)?;
        }
        let queue = |name: &Name| -> Result<QueueSpec, Error> {
            Ok(QueueSpec {
                arguments: arguments::of(name, queue_type),
                name: name.checked(work_queue)?,
            })
        };
        let lane = |delay_ms, name: Name| Ok(Lane { delay_ms, queue: Arc::new(queue(&name)?) });
        let level = |policy: &RetryPolicy, level_ms| -> Result<Vec<Lane>, Error> {
            let window = policy.window(level_ms);
            let jittered = window.lo != window.hi;
            lane_delays(window, policy.lane_count())
                .into_iter()
                .map(|ms| lane(ms, Name::lane(work_queue, level_ms, jittered.then_some(ms))))
                .collect()
        };
        let ladder = |policy: &RetryPolicy| -> Result<BTreeMap<u64, Vec<Lane>>, Error> {
            let levels = policy.distinct_levels_ms();
            levels.into_iter().map(|ms| Ok((ms, level(policy, ms)?))).collect()
        };
        let topology = Self {
            work_queue: work_queue.to_owned(),
            buried: queue(&Name::buried(work_queue))?,
            ladders: policies.iter().map(ladder).collect::<Result<_, Error>>()?,
            busy: busy_delays()
                .map(|ms| lane(ms, Name::busy(work_queue, ms)))
                .collect::<Result<_, Error>>()?,
            hold: place::HOLD_MS
                .into_iter()
                .map(|ms| lane(ms, Name::hold(work_queue, ms)))
                .collect::<Result<_, Error>>()?,
        };
        let queues = topology.queues().len();
        if queues > MAX_QUEUES {
            return Err(too_many(
                work_queue,
                format!("the lanes of {} policies and the buried queue", topology.ladders.len()),
                queues as u64,
                "use fewer lanes or levels, or levels and jitter that the policies share",
            ));
        }
        Ok(topology)
    }

    /// The queue that the jobs come from. It is the user's, never declared here.
    pub fn work_queue(&self) -> &str {
        &self.work_queue
    }

    /// Where jobs go that will not be tried again.
    pub fn buried(&self) -> &QueueSpec {
        &self.buried
    }

    /// The queues that are there from the start, by name: the buried queue, then the lanes level by
    /// level, the shortest first.
    pub fn queues(&self) -> impl ExactSizeIterator<Item = &QueueSpec> {
        let lanes = self.ladders.iter().flat_map(BTreeMap::values).flatten();
        let by_name: BTreeMap<&str, &QueueSpec> = std::iter::once(&self.buried)
            .chain(lanes.map(|lane| &*lane.queue))
            .map(|queue| (queue.name.as_str(), queue))
            .collect();
        by_name.into_values()
    }

    /// The queues that are made when the first job needs one: the ladder for busy jobs, and those
    /// for waits longer than the longest lane.
    pub fn queues_on_first_use(&self) -> impl Iterator<Item = &QueueSpec> {
        self.busy.iter().chain(&self.hold).map(|lane| &*lane.queue)
    }

    /// The policy that keeps others off these queues. It is not set by this: an operator does.
    pub fn shield(&self) -> Shield {
        Shield::new(&self.work_queue)
    }

    /// The lanes of a policy's level; never empty.
    pub(crate) fn lanes(&self, policy: usize, level_ms: u64) -> &[Lane] {
        &self.ladders[policy][&level_ms]
    }

    /// A queue of ours by its name.
    pub(crate) fn find(&self, name: &str) -> Option<&QueueSpec> {
        let mut all = self.queues().chain(self.queues_on_first_use());
        all.find(|queue| queue.name == name)
    }

    /// Whether a queue is made only when it is needed.
    pub(crate) fn is_on_first_use(&self, name: &str) -> bool {
        self.queues_on_first_use().any(|queue| queue.name == name)
    }
}

/// Refused before the lanes are made, so that a silly number costs nothing.
fn within_the_queue_limit(work_queue: &str, policy: &RetryPolicy) -> Result<(), Error> {
    let levels_ms = policy.distinct_levels_ms();
    let lanes = policy.lane_count();
    let of_level = |&ms: &u64| {
        let window = policy.window(ms);
        u64::from(lanes).min(window.hi - window.lo + 1)
    };
    let queues = levels_ms.iter().map(of_level).fold(1u64, u64::saturating_add);
    if queues <= MAX_QUEUES as u64 {
        return Ok(());
    }
    let levels = levels_ms.len();
    let fitting = (MAX_QUEUES - 1) / levels.max(1);
    let remedy = if fitting == 0 {
        format!("use at most {} different levels", MAX_QUEUES - 1)
    } else {
        format!("use at most {fitting} lanes, or fewer levels")
    };
    let what = format!("{levels} different levels of up to {lanes} lanes and the buried queue");
    Err(too_many(work_queue, what, queues, &remedy))
}

fn too_many(work_queue: &str, what: String, queues: u64, remedy: &str) -> Error {
    Error::configuration(format!(
        "lanes: {what} are {queues} queues for {work_queue:?}, and at most {MAX_QUEUES} are \
         allowed; {remedy}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Jitter;

    #[test]
    fn the_default_policy_makes_57_queues_that_sort_by_delay() {
        let topology = Topology::new("orders", RetryPolicy::default(), QueueType::Quorum).unwrap();
        let names: Vec<_> = topology.queues().map(|q| q.name.clone()).collect();
        assert_eq!(names.len(), 57);
        assert!(names.is_sorted());
        assert_eq!(names[0], "orders.buried");
        assert_eq!(names[1], "orders.retry.00015s.00008437ms");
        assert_eq!(names[56], "orders.retry.00960s.00960000ms");
    }

    #[test]
    fn without_jitter_a_level_is_one_queue() {
        let policy = RetryPolicy::new(["15s", "1500ms"]).jitter(Jitter::None);
        let topology = Topology::new("orders", policy.clone(), QueueType::Quorum).unwrap();
        let names: Vec<_> = topology.queues().map(|q| q.name.as_str()).collect();
        assert_eq!(names, ["orders.buried", "orders.retry.00001500ms", "orders.retry.00015s"]);
    }

    #[test]
    fn policies_share_lanes_of_equal_name_and_the_sum_is_limited() {
        let policy = |seconds: u64| RetryPolicy::new([seconds, 60]).lanes(4);
        let policies = Policies::new(policy(15)).with("a", policy(30)).with("b", policy(15));
        let topology = Topology::new("orders", policies, QueueType::Quorum).unwrap();
        assert_eq!(topology.queues().len(), 1 + 3 * 4);
        let many = (1..=13).fold(Policies::new(policy(15)), |policies, n| {
            let own = RetryPolicy::new((1..=4).map(|i| n * 100 + i)).lanes(4);
            policies.with(format!("type-{n}"), own)
        });
        let error = Topology::new("orders", many, QueueType::Quorum).unwrap_err().to_string();
        assert!(error.contains("217 queues") && error.contains("14 policies"), "{error}");
    }

    #[test]
    fn equal_levels_share_their_lanes() {
        let policy = RetryPolicy::new([5, 10, 5]).lanes(2);
        let topology = Topology::new("orders", policy.clone(), QueueType::Quorum).unwrap();
        assert_eq!(topology.queues().len(), 5);
    }

    #[test]
    fn more_than_200_queues_are_refused_with_the_count_and_the_remedy() {
        let refused = |policy: RetryPolicy| {
            Topology::new("orders", policy.clone(), QueueType::Quorum).unwrap_err().to_string()
        };
        let error = refused(RetryPolicy::default().lanes(29));
        assert!(error.contains("204 queues for \"orders\""), "{error}");
        assert!(error.contains("at most 28 lanes"), "{error}");
        let error = refused(RetryPolicy::new(1..=200u64));
        assert!(error.contains("at most 199 different levels"), "{error}");
        assert!(refused(RetryPolicy::new([1000]).lanes(u32::MAX)).contains("at most 199 lanes"));
        Topology::new("orders", RetryPolicy::default().lanes(28), QueueType::Quorum).unwrap();
        // Three milliseconds make three lanes, however many are asked for.
        let narrow = RetryPolicy::new(["3ms"]).jitter(Jitter::Full).lanes(u32::MAX);
        assert_eq!(
            Topology::new("orders", narrow, QueueType::Quorum).map(|t| t.queues().len()).ok(),
            Some(4)
        );
    }

    #[test]
    fn a_name_over_255_bytes_is_refused_before_anything_is_declared() {
        let longest = 255 - ".retry.00015s.00008437ms".len();
        let policy = RetryPolicy::new([15]);
        Topology::new(&"q".repeat(longest), policy.clone(), QueueType::Quorum).unwrap();
        let error =
            Topology::new(&"q".repeat(longest + 1), policy.clone(), QueueType::Quorum).unwrap_err();
        assert!(error.to_string().contains("255 bytes"), "{error}");
        assert!(Topology::new("", policy.clone(), QueueType::Quorum).is_err());
    }
}
