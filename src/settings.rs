//! What both ways in have in common, and its defaults.

use std::{error::Error as StdError, fmt, sync::Arc, time::Duration};

use crate::{
    Declare, Doctor, Error, Event, Events, Outcome, Pauses, Policies, QueueType, RetryPolicy,
    doctor, event::Observer, policy::Classifier,
};

/// How jobs of one work queue are retried, whoever runs them.
///
/// | setting | default |
/// |---|---|
/// | policy | levels `[15, 30, 60, 120, 240, 480, 960]` s, jitter equal, 8 lanes |
/// | [`pauses`](Self::pauses) | 5 s, doubling to 5 min |
/// | [`queue_type`](Self::queue_type) | [`QueueType::Quorum`] |
/// | [`declare`](Self::declare) | [`Declare::Create`] |
/// | [`confirm_timeout`](Self::confirm_timeout) | 10 s |
/// | [`hand_offs`](Self::hand_offs) | 64 in flight |
/// | [`doctor`](Self::doctor), [`management`](Self::management) | [`Doctor::Warn`], no address |
/// | [`remember_done`](Self::remember_done) | 0: no job |
/// | [`crash_limit`](Self::crash_limit) | 3 |
/// | [`worker`](Self::worker) | `<host name>:<process id>` |
///
/// Fixed: the history keeps 8 attempts, an error text 1 KiB, our headers together 16 KiB.
///
/// A [`RetryPolicy`] or [`Policies`] are enough wherever settings are asked for.
///
/// Settings remember what was set on them: what was not stays as it is where they are given to a
/// [`Builder`](crate::Builder::settings) or to [`Handle::reload`](crate::Handle::reload).
#[derive(Clone)]
pub struct Settings {
    pub(crate) policies: Policies,
    pub(crate) pauses: Pauses,
    pub(crate) classifiers: Vec<Classifier>,
    pub(crate) queue_type: QueueType,
    pub(crate) declare: Declare,
    pub(crate) confirm_timeout: Duration,
    pub(crate) hand_offs: usize,
    pub(crate) remember_done: usize,
    pub(crate) hand_off_bound: Duration,
    /// How long a job is held while its hand-off fails: half the broker's consumer timeout.
    pub(crate) hold: Duration,
    /// How long a job may stay unacked while all goes well.
    pub(crate) held: Duration,
    pub(crate) doctor: Doctor,
    /// May hold a password.
    pub(crate) management: Option<String>,
    pub(crate) crash_limit: u32,
    pub(crate) worker: String,
    pub(crate) observers: Vec<Observer>,
    /// What was set, to be set again on top of others.
    changes: Vec<Change>,
}

type Change = Arc<dyn Fn(&mut Settings) + Send + Sync>;

impl Default for Settings {
    fn default() -> Self {
        Self {
            policies: RetryPolicy::default().into(),
            pauses: Pauses::default(),
            classifiers: Vec::new(),
            queue_type: QueueType::default(),
            declare: Declare::default(),
            confirm_timeout: Duration::from_secs(10),
            hand_offs: 64,
            remember_done: 0,
            hand_off_bound: Duration::from_secs(30),
            hold: Duration::from_secs(15 * 60),
            held: Duration::ZERO,
            doctor: Doctor::default(),
            management: None,
            crash_limit: 3,
            worker: format!(
                "{}:{}",
                gethostname::gethostname().to_string_lossy(),
                std::process::id()
            ),
            observers: Vec::new(),
            changes: Vec::new(),
        }
    }
}

impl Settings {
    /// Settings with this policy, or these.
    pub fn new(policies: impl Into<Policies>) -> Self {
        let policies = policies.into();
        Self::default().set(move |settings| settings.policies = policies.clone())
    }

    /// Every setter goes through here.
    fn set(mut self, change: impl Fn(&mut Self) + Send + Sync + 'static) -> Self {
        change(&mut self);
        self.changes.push(Arc::new(change));
        self
    }

    /// These, and on top of them what was set on `later`. Its classifiers and hooks, if it has any,
    /// take the place of those before.
    pub(crate) fn then(mut self, later: &Self) -> Self {
        if !later.classifiers.is_empty() {
            self.classifiers.clear();
        }
        if !later.observers.is_empty() {
            self.observers.clear();
        }
        later.changes.iter().for_each(|change| change(&mut self));
        self
    }

    /// How the consumer pauses in an outage. Default: 5 s, doubling to 5 min.
    #[must_use]
    pub fn pauses(self, pauses: Pauses) -> Self {
        self.set(move |settings| settings.pauses = pauses)
    }

    /// Reads the outcome out of errors of a type that is not yours to mark. The first error of
    /// this type among the handler's error and its sources is asked about; `None` leaves it to the
    /// next classifier. More than one may be set: the first that has an answer decides.
    ///
    /// A marker such as [`reject`](crate::reject) wins over a classifier. Timeouts and panics are
    /// asked about as well, as [`TimedOut`](crate::TimedOut) and [`Panicked`](crate::Panicked).
    ///
    /// ```
    /// use std::io;
    /// use lapin_retry::{Outcome, RetryPolicy, Settings};
    ///
    /// let settings = Settings::new(RetryPolicy::default()).classify(|error: &io::Error| {
    ///     (error.kind() == io::ErrorKind::ConnectionRefused).then_some(Outcome::Outage)
    /// });
    /// ```
    #[must_use]
    pub fn classify<E: StdError + Send + Sync + 'static>(
        self,
        classify: impl Fn(&E) -> Option<Outcome> + Send + Sync + 'static,
    ) -> Self {
        let classifier = Classifier::new(classify);
        self.set(move |settings| settings.classifiers.push(classifier.clone()))
    }

    /// The type of the lanes and the buried queue. Default: quorum, with at-least-once
    /// dead-lettering. An existing lane of another type is an error, never changed.
    #[must_use]
    pub fn queue_type(self, queue_type: QueueType) -> Self {
        self.set(move |settings| settings.queue_type = queue_type)
    }

    /// What is done about our queues at the start. Default: [`Declare::Create`].
    #[must_use]
    pub fn declare(self, declare: Declare) -> Self {
        self.set(move |settings| settings.declare = declare)
    }

    /// How long a hand-off waits for the broker's confirm before it counts as undecided.
    /// Default: 10 s.
    #[must_use]
    pub fn confirm_timeout(self, timeout: Duration) -> Self {
        self.set(move |settings| settings.confirm_timeout = timeout)
    }

    /// How many hand-offs may be in flight at a time, for this consumer. Default: 64; at most 1000. A job
    /// that fails while there are as many waits in line: `settle` returns, and the place of its handler
    /// is free, when its turn has come.
    ///
    /// The copies for a queue share a channel of the publishing connection. While a quorum queue does
    /// not answer, RabbitMQ takes 400 messages on its channel, those in flight included, and then reads
    /// nothing more from the connection (3.10 and 4.3): with more than some 300 in flight, one such queue
    /// may hold up the copies for all others. All consumers of a [`Broker`](crate::Broker) together use at
    /// most half of the channels that the broker allows a connection: 1023 by default.
    #[must_use]
    pub fn hand_offs(self, in_flight: usize) -> Self {
        self.set(move |settings| settings.hand_offs = in_flight)
    }

    /// How many of the jobs that succeeded last are remembered, by their message ids. Default: 0,
    /// none; at most 1,000,000. Each takes up to 80 bytes of memory.
    ///
    /// An ack that is lost with its connection makes the broker deliver a job again whose work is
    /// done. If the job is remembered it is acked instead of being run again, and
    /// [`Event::AlreadyDone`] tells of it. That saves work; it does not make jobs run exactly once:
    /// each consumer remembers its own, until its process ends.
    ///
    /// A job is taken for one that is done only if the broker marks it as delivered again, and if
    /// its id, body, exchange, routing key, timestamp and counts are the same: a retry is run, and
    /// so is a job without an id of its publisher's. Leave it off where **different jobs have the
    /// same id**, body and timestamp: one that was given back before it was run may then be taken
    /// for another that is done, and is lost.
    #[must_use]
    pub fn remember_done(self, jobs: usize) -> Self {
        self.set(move |settings| settings.remember_done = jobs)
    }

    /// How long a hand-off may fail before the consumer pauses: 30 s. For tests that do not want to
    /// wait as long.
    #[doc(hidden)]
    #[must_use]
    pub fn hand_off_bound(self, bound: Duration) -> Self {
        self.set(move |settings| settings.hand_off_bound = bound)
    }

    /// What is done about what is wrong with the broker, the queues and their policies. They are
    /// looked at once, at the start, for at most 5 s. Default: [`Doctor::Warn`].
    ///
    /// It takes an address of the [`management`](Self::management) API and the feature `doctor`;
    /// without them the log says that nothing was looked at.
    #[must_use]
    pub fn doctor(self, doctor: Doctor) -> Self {
        self.set(move |settings| settings.doctor = doctor)
    }

    /// The broker's management API, for the [`doctor`](Self::doctor), as
    /// `http://user:password@host:15672`, or `https`. The user needs the tag `management` and must
    /// see the vhost, no more. Default: none. The address is repeated in no error and no log.
    #[must_use]
    pub fn management(self, address: impl Into<String>) -> Self {
        let address = address.into();
        self.set(move |settings| settings.management = Some(address.clone()))
    }

    /// After how many crashes of its process in a row a job is buried as `crash-loop`. Default: 3.
    ///
    /// Only those count that happened while the job ran alone, with nothing else in hand; before,
    /// the process may have died one to three times of that job among others. Whatever outcome a
    /// handler reports ends the series. A [`RetryConsumer`](crate::RetryConsumer) counts; a loop of
    /// your own cannot, see [`Retry`](crate::Retry).
    #[must_use]
    pub fn crash_limit(self, crashes: u32) -> Self {
        self.set(move |settings| settings.crash_limit = crashes)
    }

    /// The name of this worker in the history and in `buried-by`. Default: host name and process id.
    #[must_use]
    pub fn worker(self, name: impl Into<String>) -> Self {
        let name = name.into();
        self.set(move |settings| settings.worker.clone_from(&name))
    }

    /// Calls `hook` with every event, one after the other for each job, on whatever task it happens
    /// in: it must not block. More than one may be set. A panic in it harms nothing.
    #[must_use]
    pub fn on_event(self, hook: impl Fn(&Event) + Send + Sync + 'static) -> Self {
        let hook: Observer = Arc::new(hook);
        self.set(move |settings| settings.observers.push(Arc::clone(&hook)))
    }

    /// The same events as a stream with room for `capacity` of them, for hooks that are slow or
    /// asynchronous: an alert by mail, say. Those that do not fit are dropped and counted.
    ///
    /// ```
    /// use futures_util::StreamExt;
    /// use lapin_retry::{Event, RetryPolicy, Settings};
    ///
    /// let (settings, mut events) = Settings::new(RetryPolicy::default()).events(1000);
    /// # async fn alert(_: &str) {}
    /// # async fn example(mut events: lapin_retry::Events) {
    /// while let Some(event) = events.next().await {
    ///     if let Event::Buried { job, reason, .. } = event {
    ///         alert(&format!("{} is buried: {reason}", job.id())).await;
    ///     }
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn events(self, capacity: usize) -> (Self, Events) {
        let (events, feed) = Events::bounded(capacity);
        (self.on_event(feed), events)
    }

    pub(crate) fn validate(&self) -> Result<(), Error> {
        self.pauses.validate()?;
        if let Some(address) = &self.management {
            doctor::validate(address)?;
        }
        if self.hand_offs == 0 {
            return Err(Error::configuration("hand_offs: 0; at least one must be in flight"));
        }
        if self.hand_offs > 1000 {
            return Err(Error::configuration(format!(
                "hand_offs: {}; at most 1000, and with more than 300 a queue that does not answer \
                 may hold up the copies for all others",
                self.hand_offs
            )));
        }
        if self.remember_done > 1_000_000 {
            return Err(Error::configuration(format!(
                "remember_done: {}; at most 1000000, which take up to 80 MB",
                self.remember_done
            )));
        }
        if self.crash_limit == 0 {
            return Err(Error::configuration(
                "crash_limit: 0; what was merely in hand when a process died would be buried; use \
                 1 or more (the default is 3)",
            ));
        }
        if self.confirm_timeout.is_zero() {
            return Err(Error::configuration("confirm_timeout: zero; no confirm is that fast"));
        }
        Ok(())
    }
}

impl From<RetryPolicy> for Settings {
    fn from(policy: RetryPolicy) -> Self {
        Self::new(policy)
    }
}

impl From<Policies> for Settings {
    fn from(policies: Policies) -> Self {
        Self::new(policies)
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("policies", &self.policies)
            .field("pauses", &self.pauses)
            .field("queue_type", &self.queue_type)
            .field("declare", &self.declare)
            .field("confirm_timeout", &self.confirm_timeout)
            .field("hand_offs", &self.hand_offs)
            .field("doctor", &self.doctor)
            .field("remember_done", &self.remember_done)
            .field("crash_limit", &self.crash_limit)
            .field("worker", &self.worker)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    fn numbered(n: u32) -> Outcome {
        Outcome::RetryAfter(Duration::from_secs(n.into()))
    }

    #[test]
    fn what_was_set_last_wins_and_what_was_not_set_stays() {
        let policy = |seconds: u64| RetryPolicy::new([seconds]);
        let first = Settings::new(policy(1))
            .pauses(Pauses::default().max(Duration::from_secs(9)))
            .queue_type(QueueType::Classic)
            .declare(Declare::Off)
            .confirm_timeout(Duration::from_secs(1))
            .hand_offs(1)
            .remember_done(1)
            .hand_off_bound(Duration::from_secs(1))
            .doctor(Doctor::Off)
            .management("http://localhost:1")
            .crash_limit(1)
            .worker("first")
            .classify(|_: &std::io::Error| Some(numbered(1)))
            .on_event(|_| ());
        let all = |settings: &Settings| {
            let Settings { confirm_timeout, hand_off_bound, management, .. } = settings;
            let (hooks, classifiers) = (settings.observers.len(), settings.classifiers.len());
            format!(
                "{settings:?} {confirm_timeout:?} {hand_off_bound:?} {management:?} {hooks} {classifiers}"
            )
        };
        let default = Settings::default().worker("first");
        assert_ne!(all(&first), all(&default));
        assert_eq!(all(&first.clone().then(&Settings::default())), all(&first));
        assert_eq!(all(&default.clone().then(&first)), all(&first), "each setter is remembered");
        let changed = first.clone().then(&Settings::default().crash_limit(2));
        assert_eq!(all(&changed), all(&first.clone().crash_limit(2)));
        let changed = first.clone().then(&policy(2).into());
        assert_eq!(changed.policies, policy(2).into());
        assert_eq!((changed.crash_limit, changed.classifiers.len()), (1, 1));
    }

    #[test]
    fn classifiers_and_hooks_that_are_given_take_the_place_of_those_before() {
        let says = |n| Settings::default().classify(move |_: &std::io::Error| Some(numbered(n)));
        let settings = says(1).on_event(|_| ()).then(&says(2).on_event(|_| ()).on_event(|_| ()));
        let verdict = crate::policy::Verdict::from_result(
            Err(std::io::Error::other("no").into()),
            &settings.classifiers,
        );
        let crate::policy::Verdict::Failed { outcome, .. } = verdict else { panic!("{verdict:?}") };
        assert_eq!(outcome, numbered(2));
        assert_eq!((settings.classifiers.len(), settings.observers.len()), (1, 2));
    }

    fn settings() -> Settings {
        Settings::default()
    }

    #[test]
    fn impossible_settings_are_refused_with_the_field_the_reason_and_the_remedy() {
        let cases: [(Settings, &[&str]); 7] = [
            (settings().hand_offs(0), &["hand_offs: 0", "at least one"]),
            (settings().hand_offs(1_001), &["hand_offs: 1001", "at most 1000"]),
            (settings().remember_done(1_000_001), &["remember_done: 1000001", "at most 1000000"]),
            (settings().crash_limit(0), &["crash_limit: 0", "use 1 or more", "3"]),
            (settings().confirm_timeout(Duration::ZERO), &["confirm_timeout: zero"]),
            (
                settings().pauses(Pauses::default().first(Duration::ZERO)),
                &["pause.first: zero", "would not pause"],
            ),
            (
                settings().management("localhost:15672"),
                &["management", "http://user:password@host"],
            ),
        ];
        for (settings, parts) in cases {
            let error = settings.validate().expect_err(parts[0]);
            assert_eq!(error.kind(), ErrorKind::Configuration);
            for part in parts {
                assert!(error.to_string().contains(part), "{error} should say {part}");
            }
        }
    }

    #[test]
    fn what_is_just_possible_is_not_refused() {
        settings()
            .hand_offs(1_000)
            .remember_done(1_000_000)
            .crash_limit(1)
            .confirm_timeout(Duration::from_nanos(1))
            .validate()
            .unwrap();
        settings().hand_offs(1).validate().unwrap();
    }
}
