//! How a consumer is, for whoever asks.

use std::{
    convert::Infallible,
    fmt,
    sync::Arc,
    time::{Instant, SystemTime},
};

use futures_util::{Stream, stream};
use tokio::sync::watch;

use super::run::Stop;
use crate::{
    Error,
    link::{BEAT, SILENT},
    pause::Pace,
    settle::Engine,
};

/// How a consumer is. See [`Handle::health`](crate::Handle::health).
///
/// Of several that are true at once, the one that stands last here is told.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Health {
    /// It takes jobs.
    Running,
    /// The broker blocks publishers, at a memory or disk alarm: jobs that fail wait for their
    /// hand-off.
    #[non_exhaustive]
    Blocked {
        /// Since when, to a second.
        since: SystemTime,
    },
    /// It takes no jobs: see [`Pauses`](crate::Pauses).
    #[non_exhaustive]
    Paused {
        /// When the next job is tried. None until it is resumed by hand, and while one is tried.
        until: Option<SystemTime>,
    },
    /// It lost the broker and starts over: see [`Reconnect`](crate::Reconnect).
    #[non_exhaustive]
    Reconnecting {
        /// Since when.
        since: SystemTime,
        /// Why the last try failed.
        error: String,
    },
    /// It was told to stop, and finishes what it began.
    #[non_exhaustive]
    Draining {
        /// Since when.
        since: SystemTime,
    },
    /// Its runtime has not run it for 5 s: handlers block the threads (call such code with
    /// `tokio::task::spawn_blocking`), or nobody drives the runtime any more.
    #[non_exhaustive]
    Unresponsive {
        /// Since when, to a second.
        since: SystemTime,
    },
    /// It has stopped: [`Handle::stopped`](crate::Handle::stopped) tells how.
    Stopped,
}

impl Health {
    /// Whether it takes jobs and can do all that may become of them: [`Running`](Self::Running).
    pub fn is_healthy(&self) -> bool {
        *self == Self::Running
    }

    /// `running`, `blocked`, `paused`, `reconnecting`, `draining`, `unresponsive` or `stopped`.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Blocked { .. } => "blocked",
            Self::Paused { .. } => "paused",
            Self::Reconnecting { .. } => "reconnecting",
            Self::Draining { .. } => "draining",
            Self::Unresponsive { .. } => "unresponsive",
            Self::Stopped => "stopped",
        }
    }
}

/// One line of text: `reconnecting since 2025-01-31T12:00:00.000Z: the last error`.
impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = humantime::format_rfc3339_millis;
        f.write_str(self.as_str())?;
        match self {
            Self::Running | Self::Stopped | Self::Paused { until: None } => Ok(()),
            Self::Paused { until: Some(until) } => write!(f, " until {}", time(*until)),
            Self::Blocked { since } | Self::Draining { since } | Self::Unresponsive { since } => {
                write!(f, " since {}", time(*since))
            }
            Self::Reconnecting { since, error } => write!(f, " since {}: {error}", time(*since)),
        }
    }
}

/// The broker is lost.
#[derive(Clone, Debug)]
pub(super) struct Lost {
    since: SystemTime,
    error: String,
}

impl Lost {
    /// Of a series of errors, the first tells since when, and the last why.
    pub(super) fn note(lost: &mut Option<Self>, error: &Error, now: SystemTime) {
        let since = lost.as_ref().map_or(now, |lost| lost.since);
        *lost = Some(Self { since, error: error.to_string() });
    }
}

/// What a running consumer last said of itself.
#[derive(Clone, Debug)]
pub(super) struct Sign {
    health: Health,
    at: Instant,
    /// The same on the wall.
    time: SystemTime,
}

/// What a consumer says of itself, and how its task ended: its health is made of these when somebody
/// asks, so that a consumer that no longer runs is not taken for a healthy one.
#[derive(Clone, Debug)]
pub(super) struct Vitals {
    pub(super) sign: watch::Receiver<Sign>,
    pub(super) ended: watch::Receiver<Option<Result<(), Error>>>,
}

impl Vitals {
    pub(super) fn health(&self) -> Health {
        // An error: the consumer's task was ended by its runtime.
        if self.ended.borrow().is_some() || self.ended.has_changed().is_err() {
            return Health::Stopped;
        }
        let sign = self.sign.borrow();
        // std's clock: the asker may be where tokio's is paused.
        if sign.at.elapsed() > BEAT * SILENT {
            Health::Unresponsive { since: sign.time }
        } else {
            sign.health.clone()
        }
    }

    /// The health now, and each other one that follows, up to the end.
    pub(super) fn changes(self) -> impl Stream<Item = Health> + Send + 'static {
        stream::unfold((self, None), async |(mut vitals, last)| {
            if last == Some(Health::Stopped) {
                return None;
            }
            loop {
                vitals.sign.mark_unchanged();
                let health = vitals.health();
                if last.as_ref() != Some(&health) {
                    return Some((health.clone(), (vitals, Some(health))));
                }
                tokio::select! {
                    () = changed(&mut vitals.sign) => {}
                    _ = vitals.ended.changed() => {}
                    () = tokio::time::sleep(BEAT) => {}
                }
            }
        })
    }
}

/// All that a consumer knows of its health.
pub(super) struct Signs {
    pub(super) engine: Arc<Engine>,
    pub(super) lost: watch::Receiver<Option<Lost>>,
    pub(super) stopping: watch::Receiver<Option<Stop>>,
    /// The end of a pause, and what was last reported of it.
    pub(super) until: Option<(tokio::time::Instant, SystemTime)>,
}

impl Signs {
    pub(super) fn new(
        engine: &Arc<Engine>,
        lost: watch::Receiver<Option<Lost>>,
        stopping: watch::Receiver<Option<Stop>>,
    ) -> (Self, watch::Sender<Sign>) {
        let (health, time) = (Health::Running, engine.now());
        let sign = watch::Sender::new(Sign { health, at: Instant::now(), time });
        (Self { engine: Arc::clone(engine), lost, stopping, until: None }, sign)
    }

    /// Gives a sign at every change and every second. It runs in the consumer's own task, so that one
    /// that is held up gives none.
    pub(super) async fn give(mut self, sign: watch::Sender<Sign>) -> Infallible {
        let mut pace = self.engine.pace_changes();
        let mut beat = tokio::time::interval(BEAT);
        beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut blocked, mut draining) = (None, None);
        loop {
            let time = self.engine.now();
            // Looked at with each beat: lapin tells only one listener.
            blocked = self.engine.is_blocked().then(|| blocked.unwrap_or(time));
            if self.stopping.borrow_and_update().is_some() {
                draining.get_or_insert(time);
            }
            let pace_now = *pace.borrow_and_update();
            let health = self.health(pace_now, blocked, draining);
            sign.send_replace(Sign { health, at: Instant::now(), time });
            tokio::select! {
                () = changed(&mut pace) => {}
                () = changed(&mut self.lost) => {}
                () = changed(&mut self.stopping) => {}
                _ = beat.tick() => {}
            }
        }
    }

    fn health(
        &mut self,
        pace: Pace,
        blocked: Option<SystemTime>,
        draining: Option<SystemTime>,
    ) -> Health {
        if let Some(since) = draining {
            return Health::Draining { since };
        }
        let lost = self.lost.borrow_and_update().clone();
        let until = match (pace, lost) {
            // In a pause nothing is tried, so that it may be long since the broker is back.
            (Pace::Paused { until }, _) => until,
            (Pace::Stuck { until, .. }, _) => Some(until),
            (_, Some(Lost { since, error })) => return Health::Reconnecting { since, error },
            (Pace::Probing, None) => None,
            (Pace::Open { .. }, None) => {
                return blocked.map_or(Health::Running, |since| Health::Blocked { since });
            }
        };
        Health::Paused { until: until.map(|until| self.on_the_wall(until)) }
    }

    /// Two readings of the wall clock differ a little, and that is no news.
    fn on_the_wall(&mut self, instant: tokio::time::Instant) -> SystemTime {
        let fresh = self.engine.at(instant);
        let apart = |told: SystemTime| {
            fresh.duration_since(told).unwrap_or_else(|earlier| earlier.duration())
        };
        match self.until {
            Some((same, told)) if same == instant && apart(told) < BEAT => told,
            _ => self.until.insert((instant, fresh)).1,
        }
    }
}

/// Without its sender there is no news any more.
async fn changed<T>(watched: &mut watch::Receiver<T>) {
    if watched.changed().await.is_err() {
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::StreamExt;
    use std::time::Duration;
    use tokio::time::timeout;

    #[test]
    fn the_line_of_text_says_it_all() {
        let since = SystemTime::UNIX_EPOCH;
        let time = "1970-01-01T00:00:00.000Z";
        for (health, text) in [
            (Health::Running, "running".to_owned()),
            (Health::Blocked { since }, format!("blocked since {time}")),
            (Health::Paused { until: Some(since) }, format!("paused until {time}")),
            (Health::Paused { until: None }, "paused".to_owned()),
            (
                Health::Reconnecting { since, error: "away".to_owned() },
                format!("reconnecting since {time}: away"),
            ),
            (Health::Draining { since }, format!("draining since {time}")),
            (Health::Unresponsive { since }, format!("unresponsive since {time}")),
            (Health::Stopped, "stopped".to_owned()),
        ] {
            assert_eq!(health.to_string(), text);
            assert!(text.starts_with(health.as_str()));
            assert_eq!(health.is_healthy(), health == Health::Running);
        }
    }

    fn vitals(age: Duration) -> (Vitals, impl Sized, watch::Sender<Option<Result<(), Error>>>) {
        let at = Instant::now().checked_sub(age).unwrap();
        let sign = Sign { health: Health::Running, at, time: SystemTime::UNIX_EPOCH };
        let (end, ended) = watch::channel(None);
        let (keep, sign) = watch::channel(sign);
        (Vitals { sign, ended }, keep, end)
    }

    #[test]
    fn a_consumer_that_gives_no_sign_is_not_healthy_whatever_it_said_last() {
        let (fresh, _sign, _end) = vitals(Duration::ZERO);
        assert_eq!(fresh.health(), Health::Running);
        let (silent, _sign, end) = vitals(BEAT * (SILENT + 1));
        assert_eq!(silent.health(), Health::Unresponsive { since: SystemTime::UNIX_EPOCH });
        end.send_replace(Some(Ok(())));
        assert_eq!(silent.health(), Health::Stopped);
        // Its runtime was dropped.
        let (gone, _sign, end) = vitals(Duration::ZERO);
        drop(end);
        assert_eq!(gone.health(), Health::Stopped);
    }

    #[tokio::test(start_paused = true)]
    async fn changes_begin_with_the_health_now_and_end_with_the_consumer() {
        let (vitals, _sign, end) = vitals(BEAT * (SILENT + 1));
        let mut changes = Box::pin(vitals.changes());
        let since = SystemTime::UNIX_EPOCH;
        assert_eq!(changes.next().await, Some(Health::Unresponsive { since }));
        assert!(timeout(Duration::from_secs(60), changes.next()).await.is_err(), "no news");
        drop(end);
        assert_eq!(changes.next().await, Some(Health::Stopped));
        assert_eq!(changes.next().await, None);
    }

    #[test]
    fn a_loss_keeps_its_beginning_and_tells_the_last_error() {
        let error = |text: &str| Error::new(crate::ErrorKind::Connection, text);
        let (first, later) = (SystemTime::UNIX_EPOCH, SystemTime::now());
        let mut lost = None;
        Lost::note(&mut lost, &error("cut"), first);
        Lost::note(&mut lost, &error("refused"), later);
        let lost = lost.unwrap();
        assert_eq!((lost.since, lost.error.as_str()), (first, "refused"));
    }
}
