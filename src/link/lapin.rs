//! The seam's implementation with lapin: publishing, declaring, checking.

use std::{future::Future, pin::pin, sync::Arc, time::Duration};

use futures_util::{FutureExt, StreamExt, future::BoxFuture};
use lapin::{options::QueueDeclareOptions, types::FieldTable};
use tokio::{sync::oneshot, time::Instant};

use super::{
    Answered, Broker, Confirmed, Limits, Link, Subscribe, Subscription, Tag,
    connection::{Purpose, Session, Shared, refused},
    consuming::subscribe,
    dial::until_back,
    pipe::{ENDED, Pipe, not_sent, undecided},
    probe,
};
use crate::{Error, ErrorKind, message::Outgoing, topology::QueueSpec};

/// What RabbitMQ negotiates unless told otherwise, in bytes.
const FRAME_MAX: u32 = 131_072;
/// How long a declare, a check or a consume may take.
pub(super) const ANSWER: Duration = Duration::from_secs(30);
/// How often who waits for an answer looks whether it can still come.
pub(super) const DEAD_CHECK: Duration = Duration::from_secs(1);
const BUSY: &str = "no channel to publish on came free in time";

/// One work queue's way to a broker.
#[derive(Debug)]
pub(crate) struct LapinLink {
    broker: Broker,
    confirm_timeout: Duration,
}

impl LapinLink {
    pub(crate) fn new(broker: Broker, confirm_timeout: Duration) -> Self {
        Self { broker, confirm_timeout }
    }

    async fn publishing(&self) -> Result<Arc<Session>, Error> {
        self.broker.0.publishing.session(&self.broker, Purpose::Publishing).await
    }

    /// Each declare and check has a channel to itself, for a refusal closes it; and not on the
    /// consuming connection, which a refusal can take down while a large delivery arrives. While the
    /// publishing connection is blocked nothing is written on it: one that publishes nothing is not.
    async fn queue_declare(
        &self,
        what: &str,
        queue: &str,
        options: QueueDeclareOptions,
        arguments: FieldTable,
    ) -> Result<(), Error> {
        let broker = &self.broker.0;
        let blocked = broker.publishing.is_blocked();
        let (shared, purpose) = if blocked {
            (&broker.declaring, Purpose::Declaring)
        } else {
            broker.declaring.let_go();
            (&broker.publishing, Purpose::Publishing)
        };
        let session = shared.session(&self.broker, purpose).await?;
        let declared = async {
            let _turn = session.declaring().await;
            let channel = session.channel().await?;
            let declared = channel.queue_declare(queue.into(), options, arguments).await?;
            // Dropped, it would be closed some time later, and count until then.
            let _ = channel.close(200, "done".into()).await;
            Ok(declared)
        };
        let declared = in_time(declared, what, &session).await?;
        declared.map(drop).map_err(|error| refused(&error, what))
    }

    /// On the channel for its queue, or alone on one of its own.
    async fn land(&self, session: &Arc<Session>, copy: Box<Outgoing>, alone: bool) -> Confirmed {
        if is_blocked(session) {
            let why = "the broker blocks publishers (a memory or disk alarm)";
            return not_sent(&copy.queue, why);
        }
        let _turn = if alone {
            let waiting = tokio::time::timeout(self.confirm_timeout, session.alone());
            let Ok(turn) = waiting.await else { return not_sent(&copy.queue, BUSY) };
            Some(turn)
        } else {
            None
        };
        let (tell, told) = oneshot::channel();
        let open = if alone { None } else { session.open_pipe(&copy.queue) };
        let pipe = match open {
            Some(pipe) => pipe,
            None => match self.pipe(session, &copy.queue, alone).await {
                Ok(pipe) => pipe,
                Err(why) => return not_sent(&copy.queue, why),
            },
        };
        // Nobody waits any more if the engine gave up.
        let answered = Box::new(move |answer| drop(tell.send(answer)));
        let queue = Arc::clone(&copy.queue);
        if session.publish(pipe, copy, self.confirm_timeout, answered).is_err() {
            return not_sent(&queue, ENDED);
        }
        told.await.ok().flatten().unwrap_or_else(undecided)
    }

    /// A channel to publish on, opened if there is none; or why there is none.
    async fn pipe(&self, session: &Session, queue: &Arc<str>, alone: bool) -> Result<Pipe, String> {
        let opening = async {
            match alone {
                true => Pipe::open(&session.connection).await.map(Some),
                false => session.pipe(queue).await,
            }
        };
        match tokio::time::timeout(self.confirm_timeout, opening).await {
            Ok(Ok(Some(pipe))) => Ok(pipe),
            Ok(Ok(None)) => Err(BUSY.to_owned()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => {
                session.retire();
                Err("the broker opened no channel in time".to_owned())
            }
        }
    }
}

/// What is published then would be sent, and confirmed, only when the alarm is over.
fn is_blocked(session: &Session) -> bool {
    session.connection.status().blocked()
}

impl Link for LapinLink {
    fn publish(&self, copy: Box<Outgoing>, alone: bool) -> BoxFuture<'_, Confirmed> {
        async move {
            match self.publishing().await {
                Ok(session) => self.land(&session, copy, alone).await,
                Err(error) => Confirmed::NotSent(error),
            }
        }
        .boxed()
    }

    fn publish_at_once(&self, copy: Box<Outgoing>, answered: Answered) {
        let working = self.broker.0.publishing.working();
        let open = working.filter(|session| !is_blocked(session));
        let way = open.and_then(|session| Some((session.open_pipe(&copy.queue)?, session)));
        let Some((pipe, session)) = way else { return answered(None) };
        if let Err(answered) = session.publish(pipe, copy, self.confirm_timeout, answered) {
            answered(None);
        }
    }

    fn declare<'a>(&'a self, queue: &'a QueueSpec) -> BoxFuture<'a, Result<(), Error>> {
        async move {
            let what = format!("declaring queue {:?}", queue.name);
            let durable = QueueDeclareOptions { durable: true, ..Default::default() };
            self.queue_declare(&what, &queue.name, durable, queue.arguments.clone()).await
        }
        .boxed()
    }

    fn is_stream<'a>(&'a self, queue: &'a str) -> BoxFuture<'a, Result<Option<bool>, Error>> {
        async move {
            let what = format!("looking at the type of queue {queue:?}");
            let publishing = self.publishing().await?;
            // The refusal closes the channel. Where the broker allows few, lapin gives its number to the
            // next one too early, and the request there fails with the same refusal.
            let session = if publishing.has_few_channels() {
                Shared::default().session(&self.broker, Purpose::Declaring).await?
            } else {
                publishing
            };
            let asked = in_time(probe::is_stream(&session, queue), &what, &session).await?;
            asked.map_err(|error| refused(&error, &what))
        }
        .boxed()
    }

    fn may_publish(&self) -> BoxFuture<'_, Result<bool, Error>> {
        async move {
            let what = "publishing to the default exchange";
            let session = self.publishing().await?;
            // Nothing is written while it is blocked.
            if is_blocked(&session) {
                return Ok(false);
            }
            let asking = probe::may_publish(&session, self.confirm_timeout);
            let asked = in_time(asking, what, &session).await?;
            asked.map_err(|error| refused(&error, what))
        }
        .boxed()
    }

    fn check<'a>(&'a self, queue: &'a str) -> BoxFuture<'a, Result<(), Error>> {
        async move {
            let what = format!("looking for queue {queue:?}");
            let passive = QueueDeclareOptions { passive: true, ..Default::default() };
            self.queue_declare(&what, queue, passive, FieldTable::default()).await
        }
        .boxed()
    }

    fn consume<'a>(
        &'a self,
        how: &'a Subscribe,
        alone: bool,
    ) -> BoxFuture<'a, Result<Subscription, Error>> {
        let subscribing = subscribe(self.broker.clone(), how.clone(), alone);
        let what = how.queue.clone();
        let (tell, told) = oneshot::channel();
        // A task of its own: the broker would go on to send jobs to a consumer that nobody waited
        // for, and lapin keeps such a one, with its channel.
        tokio::spawn(async move {
            if let Err(Ok(mut unwanted)) = tell.send(subscribing.await) {
                unwanted.control.cancel().await;
                while let Some(Ok(incoming)) = unwanted.incoming.next().await {
                    incoming.tag.give_back().await;
                }
            }
        });
        async move {
            let ended = || format!("consuming queue {what:?}: the runtime shuts down");
            told.await.unwrap_or_else(|_| Err(Error::new(ErrorKind::Closed, ended())))
        }
        .boxed()
    }

    fn vhost(&self) -> String {
        let first = self.broker.addresses().ok().and_then(<[_]>::first);
        first.map(|uri| uri.vhost.clone()).unwrap_or_default()
    }

    fn limits(&self) -> Limits {
        let session = self.broker.0.publishing.last();
        let negotiated = session.map_or(0, |s| s.connection.configuration().frame_max());
        let first = self.broker.addresses().ok().and_then(<[_]>::first);
        Limits {
            user: first.map(|uri| uri.authority.userinfo.username.clone()).unwrap_or_default(),
            // 0 means that the broker sets no limit of its own.
            frame_max: if negotiated == 0 { FRAME_MAX } else { negotiated },
        }
    }

    fn until_back(&self) -> BoxFuture<'_, ()> {
        until_back(&self.broker).boxed()
    }

    fn is_blocked(&self) -> bool {
        self.broker.0.publishing.is_blocked()
    }
}

/// To what lapin is asked while its connection dies it may never answer. A connection that does
/// not answer is not used again.
pub(super) async fn in_time<T>(
    asked: impl Future<Output = T>,
    what: &str,
    session: &Session,
) -> Result<T, Error> {
    let mut asked = pin!(asked);
    let (end, mut dead) = (Instant::now() + ANSWER, false);
    loop {
        if let Ok(answer) = tokio::time::timeout(DEAD_CHECK, &mut asked).await {
            return Ok(answer);
        }
        // What it has to say of its death may still be on its way.
        let was_dead = std::mem::replace(&mut dead, !session.connection.status().connected());
        let why = if was_dead && dead {
            "the connection died".to_owned()
        } else if Instant::now() >= end {
            format!("the broker did not answer within {ANSWER:?}")
        } else {
            continue;
        };
        session.retire();
        return Err(Error::new(ErrorKind::Connection, format!("{what}: {why}")));
    }
}
