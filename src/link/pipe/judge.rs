//! What an answer says, and of which copy.
//!
//! lapin gives a returned message to the confirm that it works off next, whosever that is. It keeps
//! the order, so a confirm that comes with none tells that all returned so far have been given out,
//! to confirms that were worked off before it. Therefore an answer is judged only together with all
//! those that have come; and one that comes with another's message, when all in flight have come.

use std::sync::Arc;

use lapin::{message::BasicReturnMessage, types::ShortString};

use crate::message::Message;

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

#[derive(Debug)]
pub(super) struct Answer {
    pub(super) asked: Asked,
    pub(super) said: Said,
}

/// Which copy, and how to know it again.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) number: u64,
    pub(super) queue: Arc<str>,
    pub(super) id: Option<ShortString>,
    pub(super) original: Arc<Message>,
}

#[derive(Debug)]
pub(super) enum Said {
    Ack(Option<Stray>),
    Nack(Option<Stray>),
    NotSent(String),
    Refused(lapin::Error),
    Undecided(String),
}

/// A message that was returned, not necessarily to the right place.
#[derive(Debug)]
pub(super) struct Stray {
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
        self.queue.as_str() == &*asked.queue
            && self.id == asked.id
            && self.body == asked.original.body
    }
}

#[derive(Debug, Default)]
pub(super) struct Judge {
    strays: Vec<Stray>,
    /// Confirmed, but with another's message: its own may still come.
    in_doubt: Vec<Asked>,
    /// Nothing more is to be published on this channel. With a stray, so that those in doubt see the
    /// end. After a nack, for a quorum queue that was full tells those channels that met it so, and
    /// RabbitMQ 3.10 does not tell them when a policy's limit is lifted. And it may be closed.
    pub(super) spoiled: bool,
    dead: bool,
}

impl Judge {
    /// What became of which copies, by all answers that have come by now and how many are still in
    /// flight.
    pub(super) fn hear(
        &mut self,
        mut answers: Vec<Answer>,
        in_flight: usize,
    ) -> Vec<(Asked, Landed)> {
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
        let mut landed = Vec::with_capacity(doubts.len());
        for (Answer { asked, said }, doubt) in answers.into_iter().zip(doubts) {
            let what = match said {
                Said::Ack(_) => match self.find(&asked) {
                    Some(stray) => Landed::Returned(stray.why),
                    None if doubt => {
                        self.in_doubt.push(asked);
                        continue;
                    }
                    None => Landed::Confirmed,
                },
                Said::Nack(_) => Landed::Nacked,
                Said::NotSent(why) => Landed::NotSent(why),
                Said::Refused(error) => Landed::Refused { alone, error },
                Said::Undecided(why) => Landed::Undecided(why),
            };
            landed.push((asked, what));
        }
        if in_flight == 0 {
            for asked in std::mem::take(&mut self.in_doubt) {
                let what = match self.find(&asked) {
                    Some(stray) => Landed::Returned(stray.why),
                    None if self.dead => {
                        let why = "the channel died before all returned messages had come";
                        Landed::Undecided(why.to_owned())
                    }
                    None => Landed::Confirmed,
                };
                landed.push((asked, what));
            }
        }
        landed
    }

    fn find(&mut self, asked: &Asked) -> Option<Stray> {
        let at = self.strays.iter().position(|stray| stray.is(asked))?;
        Some(self.strays.swap_remove(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{HashMap, VecDeque};

    fn message(body: &str) -> Arc<Message> {
        Arc::new(Message {
            exchange: "".into(),
            routing_key: "work".into(),
            redelivered: false,
            properties: Default::default(),
            body: body.into(),
        })
    }

    fn asked(n: usize) -> Asked {
        let id = Some(format!("{n}").into());
        Asked { number: n as u64, queue: "lane".into(), id, original: message("body") }
    }

    fn numbered(landed: Vec<(Asked, Landed)>) -> impl Iterator<Item = (u64, Landed)> {
        landed.into_iter().map(|(asked, landed)| (asked.number, landed))
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
            let mut open: VecDeque<_> = (0..fates.len()).map(|n| (n, asked(n))).collect();
            let mut told = HashMap::new();
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
                    told.extend(numbered(judge.hear(std::mem::take(&mut heard), open.len())));
                }
            }
            told.extend(numbered(judge.hear(heard, open.len())));
            if dies && !open.is_empty() {
                let lost = |(_, asked)| Answer { asked, said: Said::Undecided("died".to_owned()) };
                told.extend(numbered(judge.hear(open.drain(..).map(lost).collect(), 0)));
            }
            for (n, fate) in (0..).zip(&fates) {
                let landed = told.get(&n);
                match fate {
                    Fate::Taken if silent == 0 => prop_assert!(matches!(landed, Some(Landed::Confirmed)), "{landed:?}"),
                    Fate::Taken => prop_assert!(!matches!(landed, Some(Landed::Returned(_))), "{landed:?}"),
                    Fate::Returned if silent == 0 => {
                        prop_assert!(matches!(landed, Some(Landed::Returned(_))), "{landed:?}");
                    }
                    Fate::Returned => prop_assert!(!matches!(landed, Some(Landed::Confirmed)), "{landed:?}"),
                    Fate::Refused => prop_assert!(matches!(landed, Some(Landed::Nacked)), "{landed:?}"),
                    Fate::Silence => prop_assert!(
                        !matches!(landed, Some(Landed::Confirmed | Landed::Returned(_))), "{landed:?}"
                    ),
                }
            }
            let stray = fates.iter().any(|fate| matches!(fate, Fate::Returned | Fate::Refused));
            prop_assert!(judge.spoiled || !stray);
        }
    }

    #[test]
    fn of_several_that_are_refused_none_was_alone() {
        let refused = || Said::Refused(lapin::ErrorKind::InvalidChannel(1).into());
        let mut judge = Judge::default();
        judge.hear(vec![Answer { asked: asked(0), said: refused() }], 1);
        let landed = judge.hear(vec![Answer { asked: asked(1), said: refused() }], 0);
        assert!(matches!(landed[..], [(_, Landed::Refused { alone: false, .. })]), "{landed:?}");
    }

    #[test]
    fn a_refusal_is_for_the_sake_of_one_that_was_alone() {
        let refused = || Said::Refused(lapin::ErrorKind::InvalidChannel(1).into());
        for (in_flight, expected) in [(0, true), (1, false)] {
            let mut judge = Judge::default();
            let landed = judge.hear(vec![Answer { asked: asked(0), said: refused() }], in_flight);
            assert!(
                matches!(landed[..], [(_, Landed::Refused { alone, .. })] if alone == expected)
            );
            assert!(judge.spoiled);
        }
    }
}
