//! Queues that are made when they are needed, or that went missing.

use super::{Engine, Rules};
use crate::{
    Declare, Error,
    topology::{Lane, declare, make},
};

impl Engine {
    /// Makes or verifies the queues again, after a lost connection.
    pub(crate) async fn redeclare(&self) -> Result<(), Error> {
        declare(&*self.link, &self.rules().topology, self.settings.declare).await
    }

    /// Whether a queue is known to be there, as far as can be told at once.
    pub(super) fn is_made(&self, name: &str) -> bool {
        !self.rules().topology.is_on_first_use(name)
            || self.made.try_lock().is_ok_and(|made| made.contains(name))
    }

    /// The ladder for busy jobs and the hold lanes are made when the first job needs one.
    pub(super) async fn make_on_first_use(&self, name: &str) -> Result<(), Error> {
        let rules = self.rules();
        if rules.topology.is_on_first_use(name) {
            Box::pin(self.make_kind(&rules, name)).await?;
        }
        Ok(())
    }

    /// All of its kind at once, for the next job needs another.
    async fn make_kind(&self, rules: &Rules, name: &str) -> Result<(), Error> {
        let mut made = self.made.lock().await;
        if made.contains(name) {
            return Ok(());
        }
        let kind = |name: &str| name.rsplit_once('.').map(|(kind, _)| kind.to_owned());
        for queue in rules.topology.queues_on_first_use() {
            if kind(&queue.name) == kind(name) {
                make(&*self.link, queue, self.settings.declare).await?;
                made.insert(queue.name.clone());
            }
        }
        Ok(())
    }

    /// The queue went missing under us: it is made again, unless that is not ours to do.
    ///
    /// A lane is known from the move: under the rules of today there may be no such lane.
    pub(super) async fn declare_again(&self, lane: Option<&Lane>, name: &str, why: &str) -> String {
        let rules = self.rules();
        let lane = lane.map(|lane| &*lane.queue).filter(|queue| queue.name == name);
        let missing = lane.or_else(|| rules.topology.find(name));
        let Some(queue) = missing.filter(|_| self.settings.declare == Declare::Create) else {
            return format!(
                "the queue is missing ({why}); make it, or start with declare = \"create\""
            );
        };
        let _one_at_a_time = self.made.lock().await;
        match self.link.declare(queue).await {
            Ok(()) => format!("the queue was missing ({why}) and has been declared again"),
            Err(error) => format!("the queue is missing ({why}) and cannot be declared: {error}"),
        }
    }
}
