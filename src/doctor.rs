//! What is wrong with this broker, these queues and their policies, looked at once, at the start.
//!
//! `findings` judges what was seen, and is pure; `management` looks.

#[cfg(feature = "doctor")]
mod findings;
#[cfg(feature = "doctor")]
mod management;
#[cfg(feature = "doctor")]
mod seen;

use std::fmt;
#[cfg(feature = "doctor")]
use std::time::Duration;

use serde::Deserialize;

use crate::{Error, ErrorKind, Event, Settings, Topology, event::emit, link::Link};

/// How long the look may take.
#[cfg(feature = "doctor")]
const BOUND: Duration = Duration::from_secs(5);

/// What is done about what the doctor finds at the start. See [`Settings::doctor`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Doctor {
    /// Nothing is looked at.
    Off,
    /// Each finding is an [`Event::Found`], and a line in the log. The default.
    #[default]
    Warn,
    /// The same, and the start fails with [`ErrorKind::Unfit`] if anything was found. What could not
    /// be looked at ([`Severity::Unchecked`]) makes no start fail.
    Refuse,
}

/// How bad a [`Finding`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Severity {
    /// Something could not be looked at.
    Unchecked,
    /// Jobs stay, but some come late or too early, run twice, or wait with their workers.
    Trouble,
    /// Jobs can be lost.
    Loss,
}

/// Something that is wrong with the broker, a queue or a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// The queue, or the first of them.
    pub queue: String,
    /// What is wrong, with the argument or the policy that says so.
    pub problem: String,
    /// What mends it; where it can be, a command for a shell.
    pub remedy: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "queue {:?}: {}; {}", self.queue, self.problem, self.remedy)
    }
}

/// Looks, and reports each finding, also those that are there already. It takes at most five seconds.
pub(crate) async fn examine(
    link: &dyn Link,
    topology: &Topology,
    settings: &Settings,
    mut findings: Vec<Finding>,
) -> Result<(), Error> {
    if settings.doctor == Doctor::Off {
        return Ok(());
    }
    findings.extend(look(&link.vhost(), topology, settings).await);
    for finding in &findings {
        let (queue, finding) = (topology.work_queue().to_owned(), finding.clone());
        emit(topology.work_queue(), &settings.observers, &Event::Found { queue, finding });
    }
    let serious = |finding: &&Finding| finding.severity > Severity::Unchecked;
    let told: Vec<_> = findings.iter().filter(serious).map(|f| format!("\n- {f}")).collect();
    if settings.doctor == Doctor::Warn || told.is_empty() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unfit,
        format!(
            "{:?} is refused by the doctor for {} (doctor = \"warn\" starts all the same):{}",
            topology.work_queue(),
            if told.len() == 1 {
                "a finding".to_owned()
            } else {
                format!("{} findings", told.len())
            },
            told.concat()
        ),
    ))
}

#[cfg(feature = "doctor")]
async fn look(vhost: &str, topology: &Topology, settings: &Settings) -> Vec<Finding> {
    let unchecked = |why: String, remedy: &str| vec![unchecked(vhost, topology, &why, remedy)];
    let Some(address) = &settings.management else {
        return unchecked(
            "there is no address of the management API".to_owned(),
            "set it with Settings::management, or management_env in a file",
        );
    };
    let looking = management::look(address, vhost, topology.work_queue());
    let seen = match tokio::time::timeout(BOUND, looking).await {
        Ok(Ok(seen)) => seen,
        Ok(Err(why)) => {
            return unchecked(why, "mend that, or turn the doctor off: Settings::doctor");
        }
        Err(_) => {
            let why = format!("the management API did not answer within {BOUND:?}");
            return unchecked(why, "mend that, or turn the doctor off: Settings::doctor");
        }
    };
    let asked = findings::Asked {
        vhost,
        topology,
        verified: settings.declare != crate::Declare::Off,
        held: settings.held.max(settings.hold),
    };
    findings::findings(&asked, &seen)
}

#[cfg(not(feature = "doctor"))]
async fn look(vhost: &str, topology: &Topology, _: &Settings) -> Vec<Finding> {
    let why = "this was built without the feature `doctor`";
    vec![unchecked(vhost, topology, why, "enable it, or turn the doctor off: Settings::doctor")]
}

fn unchecked(vhost: &str, topology: &Topology, why: &str, remedy: &str) -> Finding {
    Finding {
        severity: Severity::Unchecked,
        queue: topology.work_queue().to_owned(),
        problem: format!(
            "not looked at: the broker's version, the work queue's arguments and consumer timeout, \
             and the policies on it and on our queues, for {why}"
        ),
        remedy: format!(
            "{remedy}; what keeps other policies off our queues: {}",
            topology.shield().command(vhost)
        ),
    }
}

/// Checks an address of the management API without looking there.
pub(crate) fn validate(address: &str) -> Result<(), Error> {
    match split(address) {
        Some(_) => Ok(()),
        None => Err(Error::configuration(
            "management: the address is no HTTP URL; write it like http://user:password@host:15672",
        )),
    }
}

/// The address without user and slash at its end, and `user:password` as it is written there.
fn split(address: &str) -> Option<(String, Option<&str>)> {
    let (scheme, rest) = address.split_once("://")?;
    let (authority, path) = rest.find('/').map_or((rest, ""), |slash| rest.split_at(slash));
    let (user, host) = match authority.rsplit_once('@') {
        Some((user, host)) => (Some(user), host),
        None => (None, authority),
    };
    let odd = |c: char| c.is_whitespace() || c.is_control() || "?#\\".contains(c);
    let sound = matches!(scheme, "http" | "https") && !host.is_empty() && !rest.contains(odd);
    sound.then(|| (format!("{scheme}://{host}{}", path.trim_end_matches('/')), user))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_taken_apart_and_its_password_is_in_no_error() {
        for (address, base, user) in [
            ("http://localhost:15672", "http://localhost:15672", None),
            ("http://me:a%40b@host:15672/", "http://host:15672", Some("me:a%40b")),
            ("https://me:hunter2@[::1]/rabbit/", "https://[::1]/rabbit", Some("me:hunter2")),
            ("http://me:hun@ter2@host", "http://host", Some("me:hun@ter2")),
        ] {
            assert_eq!(split(address), Some((base.to_owned(), user)));
            validate(address).unwrap();
        }
        for address in
            ["", "localhost:15672", "amqp://me:hunter2@host", "http://me:hunter2@", "http:// h"]
        {
            let error = validate(address).unwrap_err();
            assert!(error.to_string().starts_with("management: "));
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
    }
}
