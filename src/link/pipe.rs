//! One channel with many publishes in flight, and what the broker answers to each.
//!
//! Each queue has its own: the first copy for a quorum queue that does not answer stops the channel, and
//! with it all copies behind it (3.10, 4.3).
//!
//! lapin gives a returned message to the confirm that it works off next, whosever that is. It keeps
//! the order, so a confirm that comes with none tells that all returned so far have been given out,
//! to confirms that were worked off before it. Therefore an answer is judged only together with all
//! those that have come; and one that comes with another's message, when all in flight have come.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use futures_util::{StreamExt, stream::FuturesUnordered};
use lapin::{
    Channel, Confirmation, Connection,
    message::BasicReturnMessage,
    options::{BasicPublishOptions, ConfirmSelectOptions},
    types::ShortString,
};
use tokio::sync::{mpsc, oneshot};

use super::connection::{is_closed, is_refusal};
use crate::message::{Message, Outgoing};

/// How often a channel that is used no more looks whether somebody still waits for an answer.
const LOOK: Duration = Duration::from_secs(1);

/// What became of a copy.
#[derive(Debug)]
pub(super) enum Landed {
    Confirmed,
    /// No queue took it; and what the broker said.
    Returned(String),
    Nacked,
    NotSent(String),
    /// The broker closed the channel: for its sake, if it was alone there.
    Refused {
        alone: bool,
        error: lapin::Error,
    },
    Undecided(String),
}

/// The way to the task that has the channel. Both end when nobody has one of these any more, or when
/// the channel has met what spoils it and all in flight have their answers.
#[derive(Clone, Debug)]
pub(super) struct Pipe {
    orders: mpsc::UnboundedSender<Order>,
    channel: Channel,
}

#[derive(Debug)]
struct Order {
    copy: Outgoing,
    tell: oneshot::Sender<Landed>,
}

impl Pipe {
    pub(super) async fn open(connection: &Connection) -> Result<Self, lapin::Error> {
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        // No more are in it than all consumers together have slots for hand-offs.
        let (orders, taken) = mpsc::unbounded_channel();
        tokio::spawn(carry(channel.clone(), taken));
        Ok(Self { orders, channel })
    }

    /// False once it takes no more.
    pub(super) fn is_open(&self) -> bool {
        !self.orders.is_closed() && self.channel.status().connected()
    }

    /// Nobody else has it.
    pub(super) fn is_idle(&self) -> bool {
        self.orders.strong_count() == 1
    }

    /// What becomes of the copy; or the copy, if it takes no more.
    pub(super) fn publish(
        &self,
        copy: Outgoing,
    ) -> Result<impl Future<Output = Landed> + use<>, Box<Outgoing>> {
        let (tell, told) = oneshot::channel();
        self.orders.send(Order { copy, tell }).map_err(|back| Box::new(back.0.copy))?;
        // As long as somebody waits the task goes on.
        let waits = self.clone();
        Ok(async move {
            let landed = told.await;
            drop(waits);
            landed.unwrap_or_else(|_| Landed::Undecided("the runtime shuts down".to_owned()))
        })
    }
}

async fn carry(channel: Channel, mut orders: mpsc::UnboundedReceiver<Order>) {
    let mut in_flight = FuturesUnordered::new();
    let mut judge = Judge::default();
    let mut takes_more = true;
    while takes_more || !in_flight.is_empty() {
        tokio::select! {
            biased;
            order = orders.recv(), if takes_more => match order {
                Some(order) => in_flight.push(publish(&channel, order)),
                None => takes_more = false,
            },
            Some(first) = in_flight.next() => {
                let mut answers = vec![first];
                take_all_ready(&mut in_flight, &mut answers);
                judge.hear(answers, in_flight.len());
                if judge.spoiled {
                    orders.close();
                }
            }
            () = tokio::time::sleep(LOOK), if !takes_more => {
                if orders.sender_strong_count() == 0 {
                    return;
                }
            }
        }
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

async fn publish(channel: &Channel, Order { copy, tell }: Order) -> Answer {
    let Outgoing { queue, properties, original } = copy;
    let id = properties.message_id().clone();
    let options = BasicPublishOptions { mandatory: true, ..Default::default() };
    let (to, body) = (queue.as_str().into(), &original.body);
    let said = match channel.basic_publish("".into(), to, options, body, properties).await {
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
    Answer { asked: Asked { queue, id, original, tell }, said }
}

#[derive(Debug)]
struct Answer {
    asked: Asked,
    said: Said,
}

/// Who waits, and how to know the copy again.
#[derive(Debug)]
struct Asked {
    queue: String,
    id: Option<ShortString>,
    original: Arc<Message>,
    tell: oneshot::Sender<Landed>,
}

impl Asked {
    fn hears(self, landed: Landed) {
        // Nobody waits any more if it took too long.
        let _ = self.tell.send(landed);
    }
}

#[derive(Debug)]
enum Said {
    Ack(Option<Stray>),
    Nack(Option<Stray>),
    NotSent(String),
    Refused(lapin::Error),
    Undecided(String),
}

/// A message that was returned, not necessarily to the right place.
#[derive(Debug)]
struct Stray {
    queue: ShortString,
    id: Option<ShortString>,
    body: Vec<u8>,
    why: String,
}

impl From<BasicReturnMessage> for Stray {
    fn from(returned: BasicReturnMessage) -> Self {
        let delivery = returned.delivery;
        Self {
            queue: delivery.routing_key,
            id: delivery.properties.message_id().clone(),
            body: delivery.data,
            why: returned.reply_text.to_string(),
        }
    }
}

impl Stray {
    /// What is alike in this is as good as the same.
    fn is(&self, asked: &Asked) -> bool {
        self.queue.as_str() == asked.queue
            && self.id == asked.id
            && self.body == asked.original.body
    }
}

#[derive(Debug, Default)]
struct Judge {
    strays: Vec<Stray>,
    /// Confirmed, but with another's message: its own may still come.
    in_doubt: Vec<Asked>,
    /// Nothing more is to be published on this channel. With a stray, so that those in doubt see the
    /// end. After a nack, for a quorum queue that was full tells those channels that met it so, and
    /// RabbitMQ 3.10 does not tell them when a policy's limit is lifted. And it may be closed.
    spoiled: bool,
    dead: bool,
}

impl Judge {
    /// Of all that have come by now, and how many are still in flight.
    fn hear(&mut self, mut answers: Vec<Answer>, in_flight: usize) {
        // lapin tells those in flight one by one that the channel is closed.
        let alone = !self.dead && answers.len() + in_flight == 1;
        let mut doubts = Vec::with_capacity(answers.len());
        for Answer { said, .. } in &mut answers {
            let stray = match said {
                Said::Ack(stray) | Said::Nack(stray) => stray.take(),
                _ => {
                    self.dead = true;
                    None
                }
            };
            self.spoiled |= self.dead || stray.is_some() || matches!(said, Said::Nack(_));
            doubts.push(stray.is_some());
            self.strays.extend(stray);
        }
        for (Answer { asked, said }, doubt) in answers.into_iter().zip(doubts) {
            match said {
                Said::Ack(_) => match self.find(&asked) {
                    Some(stray) => asked.hears(Landed::Returned(stray.why)),
                    None if doubt => self.in_doubt.push(asked),
                    None => asked.hears(Landed::Confirmed),
                },
                Said::Nack(_) => asked.hears(Landed::Nacked),
                Said::NotSent(why) => asked.hears(Landed::NotSent(why)),
                Said::Refused(error) => asked.hears(Landed::Refused { alone, error }),
                Said::Undecided(why) => asked.hears(Landed::Undecided(why)),
            }
        }
        if in_flight == 0 {
            for asked in std::mem::take(&mut self.in_doubt) {
                let landed = match self.find(&asked) {
                    Some(stray) => Landed::Returned(stray.why),
                    None if self.dead => {
                        let why = "the channel died before all returned messages had come";
                        Landed::Undecided(why.to_owned())
                    }
                    None => Landed::Confirmed,
                };
                asked.hears(landed);
            }
        }
    }

    fn find(&mut self, asked: &Asked) -> Option<Stray> {
        let at = self.strays.iter().position(|stray| stray.is(asked))?;
        Some(self.strays.swap_remove(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn message(body: &str) -> Arc<Message> {
        Arc::new(Message {
            exchange: "".into(),
            routing_key: "work".into(),
            redelivered: false,
            properties: Default::default(),
            body: body.into(),
        })
    }

    fn asked(n: usize) -> (Asked, oneshot::Receiver<Landed>) {
        let (tell, told) = oneshot::channel();
        let id = Some(format!("{n}").into());
        (Asked { queue: "lane".to_owned(), id, original: message("body"), tell }, told)
    }

    fn stray(n: usize) -> Stray {
        Stray {
            queue: "lane".into(),
            id: Some(format!("{n}").into()),
            body: b"body".into(),
            why: "NO_ROUTE".to_owned(),
        }
    }

    /// What the broker sends of one publish: a return before the ack or nack.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Fate {
        Taken,
        Returned,
        Refused,
        Silence,
    }

    fn fate() -> impl Strategy<Value = Fate> {
        use Fate::*;
        prop_oneof![4 => Just(Taken), 3 => Just(Returned), 1 => Just(Refused), 1 => Just(Silence)]
    }

    proptest! {
        /// Returns come in the order of the publishes, confirms in any that has them after their
        /// returns; lapin gives each confirm the first return that waits.
        #[test]
        fn whatever_comes_to_whom_none_is_taken_for_confirmed_that_was_returned(
            fates in prop::collection::vec(fate(), 1..12),
            order in prop::collection::vec(any::<prop::sample::Index>(), 24),
            chunks in prop::collection::vec(1_usize..5, 24),
            dies in any::<bool>(),
        ) {
            let (mut open, mut told) = (VecDeque::new(), Vec::new());
            for n in 0..fates.len() {
                let (asked, receiver) = asked(n);
                open.push_back((n, asked));
                told.push(receiver);
            }
            let (mut judge, mut fifo, mut returns) = (Judge::default(), VecDeque::new(), 0);
            let (mut heard, mut chunks) = (Vec::new(), chunks.into_iter().cycle());
            let mut chunk = chunks.next().unwrap();
            let silent = fates.iter().filter(|fate| **fate == Fate::Silence).count();
            let mut order = order.into_iter().cycle();
            while open.len() > silent {
                let at = order.next().unwrap().index(open.len());
                let n = open[at].0;
                if fates[n] == Fate::Silence {
                    continue;
                }
                // The channel works publishes off in order, so all returns up to here have come.
                for (earlier, fate) in fates.iter().enumerate().take(n + 1).skip(returns) {
                    if *fate == Fate::Returned {
                        fifo.push_back(stray(earlier));
                    }
                }
                returns = returns.max(n + 1);
                let (_, asked) = open.remove(at).unwrap();
                let given = fifo.pop_front();
                let said = match fates[n] {
                    Fate::Refused => Said::Nack(given),
                    _ => Said::Ack(given),
                };
                heard.push(Answer { asked, said });
                chunk -= 1;
                if chunk == 0 {
                    chunk = chunks.next().unwrap();
                    // Those of one look come in no order.
                    heard.reverse();
                    judge.hear(std::mem::take(&mut heard), open.len());
                }
            }
            judge.hear(heard, open.len());
            if dies && !open.is_empty() {
                let lost = |(_, asked)| Answer { asked, said: Said::Undecided("died".to_owned()) };
                judge.hear(open.drain(..).map(lost).collect(), 0);
            }
            for (fate, told) in fates.iter().zip(&mut told) {
                let landed = told.try_recv();
                match fate {
                    Fate::Taken if silent == 0 => prop_assert!(matches!(landed, Ok(Landed::Confirmed)), "{landed:?}"),
                    Fate::Taken => prop_assert!(!matches!(landed, Ok(Landed::Returned(_))), "{landed:?}"),
                    Fate::Returned if silent == 0 => {
                        prop_assert!(matches!(landed, Ok(Landed::Returned(_))), "{landed:?}");
                    }
                    Fate::Returned => prop_assert!(!matches!(landed, Ok(Landed::Confirmed)), "{landed:?}"),
                    Fate::Refused => prop_assert!(matches!(landed, Ok(Landed::Nacked)), "{landed:?}"),
                    Fate::Silence => prop_assert!(
                        !matches!(landed, Ok(Landed::Confirmed | Landed::Returned(_))), "{landed:?}"
                    ),
                }
            }
            let stray = fates.iter().any(|fate| matches!(fate, Fate::Returned | Fate::Refused));
            prop_assert!(judge.spoiled || !stray);
        }
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

    #[test]
    fn of_several_that_are_refused_none_was_alone() {
        let refused = || Said::Refused(lapin::ErrorKind::InvalidChannel(1).into());
        let (mut judge, (one, _told), (other, mut told)) = (Judge::default(), asked(0), asked(1));
        judge.hear(vec![Answer { asked: one, said: refused() }], 1);
        judge.hear(vec![Answer { asked: other, said: refused() }], 0);
        let landed = told.try_recv().unwrap();
        assert!(matches!(landed, Landed::Refused { alone: false, .. }), "{landed:?}");
    }

    #[test]
    fn a_refusal_is_for_the_sake_of_one_that_was_alone() {
        let refused = || Said::Refused(lapin::ErrorKind::InvalidChannel(1).into());
        for (in_flight, expected) in [(0, true), (1, false)] {
            let (mut judge, (asked, mut told)) = (Judge::default(), asked(0));
            judge.hear(vec![Answer { asked, said: refused() }], in_flight);
            let landed = told.try_recv().unwrap();
            assert!(matches!(landed, Landed::Refused { alone, .. } if alone == expected));
            assert!(judge.spoiled);
        }
    }
}
