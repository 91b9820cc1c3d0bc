//! How a consumer is, for whoever asks.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::{sync::watch, time::Instant};

use super::run::Stop;
use crate::{Error, pause::Pace, settle::Engine};

/// How often it is looked whether the broker blocks publishers: lapin tells only one listener.
const LOOK: Duration = Duration::from_secs(1);

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
    /// It has stopped: [`Handle::stopped`](crate::Handle::stopped) tells how.
    Stopped,
}

impl Health {
    /// Whether it takes jobs and can do all that may become of them: [`Running`](Self::Running).
    pub fn is_healthy(&self) -> bool {
        *self == Self::Running
    }

    /// `running`, `blocked`, `paused`, `reconnecting`, `draining` or `stopped`.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Blocked { .. } => "blocked",
            Self::Paused { .. } => "paused",
            Self::Reconnecting { .. } => "reconnecting",
            Self::Draining { .. } => "draining",
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
            Self::Blocked { since } | Self::Draining { since } => {
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

/// All that health is made of.
pub(super) struct Signs {
    pub(super) engine: Arc<Engine>,
    pub(super) lost: watch::Receiver<Option<Lost>>,
    pub(super) stopping: watch::Receiver<Option<Stop>>,
    pub(super) ended: watch::Receiver<Option<Result<(), Error>>>,
    /// The end of a pause, and what was last reported of it.
    pub(super) until: Option<(Instant, SystemTime)>,
}

impl Signs {
    /// Tells `health` of every change, until the consumer has stopped.
    pub(super) async fn follow(mut self, health: watch::Sender<Health>) {
        let mut pace = self.engine.pace_changes();
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut blocked, mut draining) = (None, None);
        loop {
            let now = self.engine.now();
            blocked = self.engine.is_blocked().then(|| blocked.unwrap_or(now));
            if self.stopping.borrow_and_update().is_some() {
                draining.get_or_insert(now);
            }
            let pace_now = *pace.borrow_and_update();
            let is = self.health(pace_now, blocked, draining);
            let over = is == Health::Stopped;
            health.send_if_modified(|told| {
                let news = *told != is;
                *told = is;
                news
            });
            if over {
                return;
            }
            tokio::select! {
                () = changed(&mut pace) => {}
                () = changed(&mut self.lost) => {}
                () = changed(&mut self.stopping) => {}
                _ = self.ended.changed() => {}
                _ = look.tick() => {}
            }
        }
    }

    fn health(
        &mut self,
        pace: Pace,
        blocked: Option<SystemTime>,
        draining: Option<SystemTime>,
    ) -> Health {
        // An error: the consumer's task was ended by its runtime.
        if self.ended.borrow().is_some() || self.ended.has_changed().is_err() {
            return Health::Stopped;
        }
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
    fn on_the_wall(&mut self, instant: Instant) -> SystemTime {
        let fresh = self.engine.at(instant);
        let apart = |told: SystemTime| {
            fresh.duration_since(told).unwrap_or_else(|earlier| earlier.duration())
        };
        match self.until {
            Some((same, told)) if same == instant && apart(told) < LOOK => told,
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
            (Health::Stopped, "stopped".to_owned()),
        ] {
            assert_eq!(health.to_string(), text);
            assert!(text.starts_with(health.as_str()));
            assert_eq!(health.is_healthy(), health == Health::Running);
        }
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
