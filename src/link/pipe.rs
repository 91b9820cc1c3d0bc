//! One channel with many publishes in flight, and what the broker answers to each.
//!
//! Each queue has its own: the first copy for a quorum queue that does not answer stops the channel, and
//! with it all copies behind it (3.10, 4.3).

mod judge;

use std::{
    mem,
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
    options::{BasicPublishOptions, ConfirmSelectOptions},
};
use tokio::sync::{mpsc, oneshot};

pub(super) use self::judge::Landed;
use self::judge::{Answer, Asked, Judge, Said, Stray};
use super::connection::{is_closed, is_refusal};
use crate::message::Outgoing;

/// How often a channel that is used no more looks whether somebody still waits for an answer.
const LOOK: Duration = Duration::from_secs(1);

/// The way to the task that has the channel. Both end when nobody has one of these any more, or when
/// the channel has met what spoils it and all in flight have their answers.
#[derive(Clone, Debug)]
pub(super) struct Pipe {
    orders: mpsc::UnboundedSender<Order>,
    channel: Channel,
}

#[derive(Debug)]
struct Order {
    copy: Box<Outgoing>,
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
        copy: Box<Outgoing>,
    ) -> Result<impl Future<Output = Landed> + use<>, Box<Outgoing>> {
        let (tell, told) = oneshot::channel();
        self.orders.send(Order { copy, tell }).map_err(|back| back.0.copy)?;
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

async fn publish(channel: &Channel, Order { mut copy, tell }: Order) -> Answer {
    let id = copy.properties.message_id().clone();
    let options = BasicPublishOptions { mandatory: true, ..Default::default() };
    let (to, body) = (copy.queue.as_str().into(), &copy.original.body);
    // Taken here, not held beside: all this is kept of each copy in flight.
    let publishing =
        channel.basic_publish("".into(), to, options, body, mem::take(&mut copy.properties));
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
    Answer { asked: Asked { queue, id, original, tell }, said }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

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
