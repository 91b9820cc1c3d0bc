//! Channels with many publishes in flight, and what the broker answers to each.
//!
//! Each queue has its own: the first copy for a quorum queue that does not answer stops the channel, and
//! with it all copies behind it (3.10, 4.3). One task publishes on all channels of a connection.

mod judge;

use std::{
    collections::HashMap,
    fmt, mem,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use futures_util::{StreamExt, stream::FuturesUnordered};
use lapin::{
    Channel, Confirmation, Connection, ConnectionStatus,
    options::{BasicPublishOptions, ConfirmSelectOptions},
};
use tokio::{
    runtime::Handle,
    sync::mpsc,
    time::{Instant, sleep},
};

use self::judge::{Answer, Asked, Judge, Landed, Said, Stray};
use super::{
    Answered, Confirmed,
    connection::{Session, is_closed, is_refusal, refused},
};
use crate::{Error, ErrorKind, clock::later, message::Outgoing};

/// How often, at least, it is looked who has waited for too long.
const LOOK: Duration = Duration::from_secs(1);

pub(super) const ENDED: &str = "the task that publishes has ended";

/// A channel to publish on. It is closed when nobody has it any more.
#[derive(Clone)]
pub(super) struct Pipe(Arc<Inner>);

struct Inner {
    channel: Channel,
    /// Nothing more is to be published on it.
    spoiled: AtomicBool,
    in_flight: AtomicUsize,
    hearing: Mutex<Hearing>,
}

#[derive(Default)]
struct Hearing {
    judge: Judge,
    answers: Vec<Answer>,
}

impl Pipe {
    pub(super) async fn open(connection: &Connection) -> Result<Self, lapin::Error> {
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        let (spoiled, in_flight) = (AtomicBool::default(), AtomicUsize::default());
        Ok(Self(Arc::new(Inner { channel, spoiled, in_flight, hearing: Mutex::default() })))
    }

    /// False once it takes no more.
    pub(super) fn is_open(&self) -> bool {
        !self.0.spoiled.load(Ordering::Relaxed) && self.0.channel.status().connected()
    }

    /// Nobody else has it.
    pub(super) fn is_idle(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    async fn publish(self, number: u64, mut copy: Box<Outgoing>) -> (Self, Answer) {
        let id = copy.properties.message_id().clone();
        let options = BasicPublishOptions { mandatory: true, ..Default::default() };
        let (to, body) = ((&*copy.queue).into(), &copy.original.body);
        // Taken here, not held beside: all this is kept of each copy in flight.
        let properties = mem::take(&mut copy.properties);
        let publishing = self.0.channel.basic_publish("".into(), to, options, body, properties);
        let said = match publishing.await {
            Ok(confirm) => match confirm.await {
                Ok(Confirmation::Ack(returned)) => Said::Ack(returned.map(Stray::from)),
                Ok(Confirmation::Nack(returned)) => Said::Nack(returned.map(Stray::from)),
                Ok(Confirmation::NotRequested) => {
                    Said::Undecided("the channel was not in confirm mode".to_owned())
                }
                Err(error) if is_refusal(&error) => Said::Refused(error),
                Err(error) => Said::Undecided(error.to_string()),
            },
            Err(error) if is_refusal(&error) => Said::Refused(error),
            // Found closed before anything was written.
            Err(error) if is_closed(&error) => Said::NotSent(error.to_string()),
            Err(error) => Said::Undecided(error.to_string()),
        };
        let Outgoing { queue, original, .. } = *copy;
        (self, Answer { asked: Asked { number, queue, id, original }, said })
    }

    /// Takes an answer. True if it is the first that is to be judged.
    fn hear(&self, answer: Answer) -> bool {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
        let answers = &mut self.hearing().answers;
        answers.push(answer);
        answers.len() == 1
    }

    /// What becomes of the copies, by all answers that have come.
    fn judge(&self) -> Vec<(Asked, Landed)> {
        let hearing = &mut *self.hearing();
        let answers = mem::take(&mut hearing.answers);
        let landed = hearing.judge.hear(answers, self.0.in_flight.load(Ordering::Relaxed));
        if hearing.judge.spoiled {
            self.0.spoiled.store(true, Ordering::Relaxed);
        }
        landed
    }

    fn hearing(&self) -> MutexGuard<'_, Hearing> {
        self.0.hearing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Pipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pipe").field("channel", &self.0.channel.id()).finish_non_exhaustive()
    }
}

/// The way to the task that publishes on all channels of a connection. It ends when nobody has the
/// connection any more.
#[derive(Debug)]
pub(super) struct Carrier(mpsc::UnboundedSender<Order>);

struct Order {
    pipe: Pipe,
    copy: Box<Outgoing>,
    tell: Tell,
}

/// Tells in any case, at the latest when it is dropped.
pub(super) struct Tell {
    pub(super) answered: Option<Answered>,
    /// Without a confirm until then it is undecided, unless the broker blocks publishers.
    pub(super) timeout: Duration,
    /// Dropping the last handle of a connection closes it.
    pub(super) session: Arc<Session>,
}

impl Tell {
    fn tell(&mut self, answer: Confirmed) {
        if let Confirmed::Undecided(_) = answer {
            // First of all: whoever hears of it goes on with other copies, and not on this connection.
            self.session.retire();
        }
        if let Some(answered) = self.answered.take() {
            answered(Some(answer));
        }
    }
}

impl Drop for Tell {
    fn drop(&mut self) {
        if self.answered.is_some() {
            self.tell(undecided());
        }
    }
}

/// Of a copy that the task had taken.
pub(super) fn undecided() -> Confirmed {
    Confirmed::Undecided(ENDED.to_owned())
}

pub(super) fn not_sent(queue: &str, why: impl fmt::Display) -> Confirmed {
    let text = format!("publishing to {queue:?}: {why}");
    Confirmed::NotSent(Error::new(ErrorKind::Connection, text))
}

impl Carrier {
    pub(super) fn start(connection: &Connection, runtime: &Handle) -> Self {
        // No more are in it than all consumers together have slots for hand-offs.
        let (orders, taken) = mpsc::unbounded_channel();
        runtime.spawn(carry(connection.status().clone(), taken));
        Self(orders)
    }

    pub(super) fn works(&self) -> bool {
        !self.0.is_closed()
    }

    /// Gives the way to tell back if the task has ended.
    pub(super) fn publish(&self, pipe: Pipe, copy: Box<Outgoing>, tell: Tell) -> Result<(), Tell> {
        self.0.send(Order { pipe, copy, tell }).map_err(|back| back.0.tell)
    }
}

async fn carry(connection: ConnectionStatus, mut orders: mpsc::UnboundedReceiver<Order>) {
    let (mut in_flight, mut waiting) = (FuturesUnordered::new(), Waiting::default());
    let mut look = pin!(sleep(LOOK));
    loop {
        tokio::select! {
            // Who is late hears of it, however much else there is to do.
            biased;
            () = &mut look, if !waiting.is_empty() => {
                // A runtime that was blocked reads late what was confirmed in time.
                let mut answers = Vec::new();
                take_all_ready(&mut in_flight, &mut answers);
                report(answers, &mut waiting);
                // Sent as an alarm began, they are answered when it is over. Until then there is no
                // other way to publish.
                let (now, blocked) = (Instant::now(), connection.blocked());
                for mut tell in waiting.overdue(now, |tell: &Tell| blocked.then_some(later(now, tell.timeout))) {
                    let why = format!("no confirm within {:?}", tell.timeout);
                    tell.tell(Confirmed::Undecided(why));
                }
                let later = now + LOOK;
                look.as_mut().reset(waiting.until().map_or(later, |until| until.min(later)));
            }
            order = orders.recv() => {
                // Whoever waits has the connection, so nobody does.
                let Some(Order { pipe, copy, tell }) = order else { return };
                let until = later(Instant::now(), tell.timeout);
                if until < look.deadline() {
                    look.as_mut().reset(until);
                }
                pipe.0.in_flight.fetch_add(1, Ordering::Relaxed);
                in_flight.push(pipe.publish(waiting.add(until, tell), copy));
            }
            Some(first) = in_flight.next() => {
                let mut answers = vec![first];
                take_all_ready(&mut in_flight, &mut answers);
                report(answers, &mut waiting);
            }
        }
    }
}

/// Reports what became of the copies, as far as these answers decide it.
fn report(answers: Vec<(Pipe, Answer)>, waiting: &mut Waiting<Tell>) {
    let hear = |(pipe, answer): (Pipe, Answer)| pipe.hear(answer).then_some(pipe);
    let heard: Vec<Pipe> = answers.into_iter().filter_map(hear).collect();
    for (asked, landed) in heard.iter().flat_map(Pipe::judge) {
        // Nobody waits any more if it took too long.
        if let Some(mut tell) = waiting.take(asked.number) {
            tell.tell(confirmed(landed, &asked.queue));
        }
    }
}

fn confirmed(landed: Landed, queue: &str) -> Confirmed {
    let what = || format!("publishing to {queue:?}");
    match landed {
        Landed::Confirmed => Confirmed::Yes,
        Landed::Returned(why) => Confirmed::Returned(why),
        Landed::Nacked => Confirmed::Nacked,
        Landed::NotSent(why) => not_sent(queue, why),
        Landed::Refused { alone: true, error } => Confirmed::NotSent(refused(&error, &what())),
        Landed::Refused { alone: false, error } => {
            Confirmed::Crowded(refused(&error, &what()).to_string())
        }
        Landed::Undecided(why) => Confirmed::Undecided(why),
    }
}

/// Those who wait for an answer, by number, and until when.
struct Waiting<T> {
    next: u64,
    tells: HashMap<u64, (Instant, T)>,
}

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Self { next: 0, tells: HashMap::new() }
    }
}

impl<T> Waiting<T> {
    /// The number to ask for it by.
    fn add(&mut self, until: Instant, tell: T) -> u64 {
        self.next += 1;
        self.tells.insert(self.next, (until, tell));
        self.next
    }

    fn take(&mut self, number: u64) -> Option<T> {
        self.tells.remove(&number).map(|(_, tell)| tell)
    }

    /// Those who have waited for long enough, and are not to wait until later.
    fn overdue(&mut self, now: Instant, later: impl Fn(&T) -> Option<Instant>) -> Vec<T> {
        let late = self.tells.extract_if(|_, (until, tell)| {
            let later = if *until <= now { later(tell) } else { Some(*until) };
            *until = later.unwrap_or(*until);
            later.is_none()
        });
        late.map(|(_, (_, tell))| tell).collect()
    }

    fn until(&self) -> Option<Instant> {
        self.tells.values().map(|(until, _)| *until).min()
    }

    fn is_empty(&self) -> bool {
        self.tells.is_empty()
    }
}

/// All that have come. That nothing is to be had does not say that nothing is there:
/// `FuturesUnordered` at times leaves off, and wakes whoever asked.
fn take_all_ready<F: Future>(futures: &mut FuturesUnordered<F>, ready: &mut Vec<F::Output>) {
    let again = Arc::new(Again::default());
    let waker = Waker::from(Arc::clone(&again));
    loop {
        match futures.poll_next_unpin(&mut Context::from_waker(&waker)) {
            Poll::Ready(Some(one)) => ready.push(one),
            Poll::Ready(None) => return,
            Poll::Pending if again.0.swap(false, Ordering::AcqRel) => {}
            Poll::Pending => return,
        }
    }
}

#[derive(Default)]
struct Again(AtomicBool);

impl Wake for Again {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn each_is_taken_once_by_its_number_or_when_it_is_late() {
        let start = Instant::now();
        let at = |second| start + Duration::from_secs(second);
        let mut waiting = Waiting::default();
        let numbers = [3, 1, 2, 4].map(|second| waiting.add(at(second), second));
        assert_eq!(waiting.until(), Some(at(1)));
        assert_eq!(waiting.take(numbers[1]), Some(1));
        assert_eq!(waiting.take(numbers[1]), None);
        assert_eq!(waiting.until(), Some(at(2)));
        assert_eq!(waiting.overdue(at(3), |second| (*second == 3).then_some(at(5))), [2]);
        assert_eq!((waiting.take(numbers[2]), waiting.until()), (None, Some(at(4))));
        let mut late = waiting.overdue(at(5), |_| None);
        late.sort_unstable();
        assert_eq!(late, [3, 4]);
        assert!(waiting.is_empty());
    }

    #[test]
    fn all_that_have_come_are_taken_whatever_else_is_polled_between() {
        // Each is woken while it is polled, which makes the set leave off.
        let restless = || async {
            for _ in 0..3 {
                let mut woken = false;
                std::future::poll_fn(|context| {
                    context.waker().wake_by_ref();
                    if std::mem::replace(&mut woken, true) {
                        Poll::Ready(())
                    } else {
                        Poll::Pending
                    }
                })
                .await;
            }
            0
        };
        let mut futures: FuturesUnordered<futures_util::future::BoxFuture<'_, i32>> =
            FuturesUnordered::new();
        for _ in 0..10 {
            futures.push(restless().boxed());
        }
        for n in 1..=10 {
            futures.push(async move { n }.boxed());
        }
        futures.push(std::future::pending().boxed());
        let mut ready = Vec::new();
        take_all_ready(&mut futures, &mut ready);
        assert_eq!((ready.len(), futures.len()), (20, 1));
    }
}
