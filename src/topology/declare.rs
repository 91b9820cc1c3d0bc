//! Makes or verifies the queues on a broker, before anything is consumed.

use futures_util::{StreamExt, stream};

use super::{Declare, QueueSpec, Topology, shield};
use crate::{Error, ErrorKind, link::Link};

/// A quorum queue takes 7-25 ms to declare; at most so many are declared at a time. The link takes fewer
/// where the broker allows few channels.
const SIDE_BY_SIDE: usize = 8;

/// The work queue first: a lane whose target is missing keeps its jobs, and tries again only every
/// three minutes.
pub(crate) async fn declare(
    link: &dyn Link,
    topology: &Topology,
    mode: Declare,
) -> Result<(), Error> {
    let explain = |error| about_permissions(error, topology.work_queue());
    let work_queue = link.check(topology.work_queue()).await;
    work_queue.map_err(|e| explain(about_the_work_queue(e, topology)))?;
    let queues = topology.queues();
    let needed = queues.len();
    let each: Vec<_> = queues.map(|queue| make(link, queue, mode)).collect();
    let mut answers = stream::iter(each).buffered(SIDE_BY_SIDE);
    let mut made = 0;
    let mut refused = None;
    while let Some(answer) = answers.next().await {
        match answer {
            Ok(()) => made += 1,
            // The first refusal is the reason; all the same every answer is waited for. To let go of
            // a channel while the broker closes it leaves a close-ok behind, which lapin then takes
            // for the next channel's of that number.
            Err(error) => {
                refused.get_or_insert(error);
            }
        }
    }
    match refused {
        None => Ok(()),
        Some(error) if error.kind() == ErrorKind::QueueLimit => Err(Error::new(
            ErrorKind::QueueLimit,
            format!(
                "{:?} needs {needed} queues beside it, {made} are there and {} are missing: {error}; \
                 raise the limit of the vhost, or use fewer levels or lanes",
                topology.work_queue(),
                needed - made
            ),
        )),
        Some(error) => Err(explain(error)),
    }
}

/// The broker's refusal names the right and the queue; this adds the patterns that grant it.
pub(crate) fn about_permissions(error: Error, work_queue: &str) -> Error {
    if error.kind() != ErrorKind::Permission {
        return error;
    }
    // The broker's code for it is that of a missing right.
    if error.to_string().contains("in exclusive use") {
        return Error::new(
            ErrorKind::Refused,
            format!(
                "{error}; another consumer has asked to be the only one (exclusive): stop it, or start \
                 it without, and use the queue argument x-single-active-consumer where one at a time \
                 is wanted"
            ),
        );
    }
    Error::new(
        ErrorKind::Permission,
        format!(
            "{error}; a worker needs configure on {}, write on ^amq\\.default$ and read on {}; \
             without configure, make the queues beforehand and use declare = \"check\"",
            shield::ours(work_queue),
            shield::all(work_queue)
        ),
    )
}

/// One of ours: declared, verified, or taken to be there.
pub(crate) async fn make(link: &dyn Link, queue: &QueueSpec, mode: Declare) -> Result<(), Error> {
    match mode {
        Declare::Create => {
            let declared = link.declare(queue).await;
            declared.map_err(|e| about_arguments(e, &link.vhost(), queue))
        }
        Declare::Check => link.check(&queue.name).await.map_err(|e| about_a_lane(e, queue)),
        Declare::Off => Ok(()),
    }
}

pub(super) fn about_the_work_queue(error: Error, topology: &Topology) -> Error {
    match error.kind() {
        ErrorKind::MissingQueue => Error::new(
            ErrorKind::MissingQueue,
            format!(
                "the work queue {:?} does not exist; declare it before its jobs are consumed \
                 (it is yours, so it is not declared here)",
                topology.work_queue()
            ),
        ),
        ErrorKind::Refused if error.to_string().contains("RESOURCE_LOCKED") => Error::new(
            ErrorKind::Refused,
            format!(
                "the work queue {:?} is exclusive: it is its own connection's and is deleted with \
                 it, jobs and all; declare it durable and not exclusive ({error})",
                topology.work_queue()
            ),
        ),
        _ => error,
    }
}

fn about_arguments(error: Error, vhost: &str, queue: &QueueSpec) -> Error {
    if error.kind() != ErrorKind::Inequivalent {
        return error;
    }
    Error::new(
        ErrorKind::Inequivalent,
        format!(
            "{error}; the queue exists with other arguments and is left as it is: use the queue type \
             that it has, or delete it once it is empty: {}",
            shield::delete_queue(vhost, &queue.name)
        ),
    )
}

fn about_a_lane(error: Error, queue: &QueueSpec) -> Error {
    match error.kind() {
        ErrorKind::MissingQueue => Error::new(
            ErrorKind::MissingQueue,
            format!(
                "the queue {:?} does not exist and declare = \"check\" makes none; start a worker \
                 with declare = \"create\" once, or import the definitions",
                queue.name
            ),
        ),
        _ => error,
    }
}
