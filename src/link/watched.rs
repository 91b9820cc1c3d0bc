//! What lapin does not report: a consumer that was begun as its connection died may wait for ever.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::{
    Stream, StreamExt,
    stream::{BoxStream, Fuse},
};
use tokio::time::{Interval, MissedTickBehavior, interval};

use crate::{Error, ErrorKind};

/// How often a consumer that brings nothing is looked after.
const LOOK: Duration = Duration::from_secs(1);

/// A stream that ends with an error once its source is dead, though it may not say so.
pub(super) struct Watched<T> {
    stream: Fuse<BoxStream<'static, Result<T, Error>>>,
    is_alive: Box<dyn Fn() -> bool + Send>,
    /// What is said of a source that died without a word.
    dead: String,
    look: Interval,
    /// It was found dead: what it has to say of that may be on its way.
    missed: bool,
}

impl<T: 'static> Watched<T> {
    pub(super) fn new(
        stream: impl Stream<Item = Result<T, Error>> + Send + 'static,
        is_alive: impl Fn() -> bool + Send + 'static,
        dead: String,
    ) -> Self {
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let is_alive = Box::new(is_alive);
        Self { stream: stream.boxed().fuse(), is_alive, dead, look, missed: false }
    }
}

impl<T: 'static> Stream for Watched<T> {
    type Item = Result<T, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Poll::Ready(item) = self.stream.poll_next_unpin(cx) {
            return Poll::Ready(item);
        }
        loop {
            ready!(self.look.poll_tick(cx));
            let dead = !(self.is_alive)();
            if dead && self.missed {
                let error = Error::new(ErrorKind::Connection, self.dead.as_str());
                return Poll::Ready(Some(Err(error)));
            }
            self.missed = dead;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream;
    use std::sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    };
    use tokio::time::{Instant, timeout};

    #[tokio::test(start_paused = true)]
    async fn a_stream_whose_source_died_ends_within_two_looks_and_not_before() {
        let alive = Arc::new(AtomicBool::new(true));
        let source = stream::iter([Ok(1)]).chain(stream::pending());
        let is_alive = Arc::clone(&alive);
        let mut watched =
            Watched::new(source, move || is_alive.load(Ordering::Relaxed), "dead".to_owned());
        assert_eq!(watched.next().await.unwrap().unwrap(), 1);
        let hour = Duration::from_secs(3600);
        assert!(timeout(hour, watched.next()).await.is_err(), "it is alive");
        alive.store(false, Ordering::Relaxed);
        let died = Instant::now();
        let error = watched.next().await.unwrap().unwrap_err();
        assert_eq!(error.to_string(), "dead");
        assert!(died.elapsed() <= 2 * LOOK, "{:?}", died.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_dead_source_has_to_say_comes_first() {
        let source = stream::iter([Ok(1), Err(Error::new(ErrorKind::Closed, "why"))]);
        let mut watched = Watched::new(source, || false, "dead".to_owned());
        assert_eq!(watched.next().await.unwrap().unwrap(), 1);
        assert_eq!(watched.next().await.unwrap().unwrap_err().to_string(), "why");
        assert!(watched.next().await.is_none());
    }
}
