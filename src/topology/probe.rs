//! Before anything is declared: can the work queue be one, and can copies be published?

use super::{Topology, about_permissions, declare::about_the_work_queue};
use crate::{Error, ErrorKind, Finding, Severity, link::Link};

/// Refuses what cannot work, and returns what could not be found out.
pub(crate) async fn probe(link: &dyn Link, topology: &Topology) -> Result<Vec<Finding>, Error> {
    let queue = topology.work_queue();
    let explain = |error| about_permissions(error, queue);
    let unchecked = |problem: &str, remedy: &str| Finding {
        severity: Severity::Unchecked,
        queue: queue.to_owned(),
        problem: problem.to_owned(),
        remedy: remedy.to_owned(),
    };
    let mut findings = Vec::new();
    let is_stream = link.is_stream(queue).await;
    match is_stream.map_err(|error| explain(about_the_work_queue(error, topology)))? {
        Some(false) => {}
        Some(true) => {
            return Err(Error::new(
                ErrorKind::Refused,
                format!(
                    "the work queue {queue:?} is a stream, which keeps what was acked and cannot \
                     requeue: jobs would be lost; use a quorum or a classic queue, into which a \
                     consumer of your own may copy what is in the stream"
                ),
            ));
        }
        None => findings.push(unchecked(
            "not looked at: whether it is a stream, from which jobs would be lost",
            "see its type in the management UI",
        )),
    }
    if !link.may_publish().await.map_err(explain)? {
        findings.push(unchecked(
            "not looked at: whether this user may publish to the default exchange, for the broker \
             blocks publishers or did not answer in time",
            "grant write on ^amq\\.default$; without it no job can be retried or buried",
        ));
    }
    Ok(findings)
}
