//! Which policy a job gets.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::RetryPolicy;
use crate::{Error, Job, message::text_header};

/// The policies of one work queue: a default, and others for some kinds of jobs.
///
/// They share the work queue, the buried queue, and lanes of equal name.
///
/// ```
/// use lapin_retry::{Policies, RetryPolicy, Select};
///
/// let policies = Policies::new(RetryPolicy::new([15, 30, 60]))
///     .select(Select::Type)
///     .with("observation", RetryPolicy::new(["500ms", "5s", "30s"]))
///     .with("sync", RetryPolicy::new([5, 60, 300]));
/// assert_eq!(policies.get("sync").retries(), 3);
/// assert_eq!(policies.get("mail"), policies.get("any other"));
/// # policies.validate().unwrap();
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Policies {
    /// The default first.
    all: Vec<RetryPolicy>,
    select: Select,
    /// Where in `all` the policy of a value is.
    by_value: BTreeMap<String, usize>,
}

/// What tells the kinds of jobs apart.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Select {
    /// The AMQP property `type`, the default.
    #[default]
    Type,
    /// The routing key that the job was published with, also on a retry.
    RoutingKey,
    /// A header with a string.
    Header(String),
}

impl Policies {
    /// One policy for all jobs.
    pub fn new(default: RetryPolicy) -> Self {
        Self { all: vec![default], select: Select::default(), by_value: BTreeMap::new() }
    }

    /// What tells the kinds of jobs apart. Default: [`Select::Type`].
    #[must_use]
    pub fn select(mut self, select: Select) -> Self {
        self.select = select;
        self
    }

    /// Another policy for jobs with this `value` of what is selected.
    #[must_use]
    pub fn with(mut self, value: impl Into<String>, policy: RetryPolicy) -> Self {
        self.by_value.insert(value.into(), self.all.len());
        self.all.push(policy);
        self
    }

    /// Checks every policy.
    ///
    /// # Errors
    /// As [`RetryPolicy::validate`], with the kind of job in front of the field.
    pub fn validate(&self) -> Result<(), Error> {
        self.all[0].validate()?;
        for (value, &index) in &self.by_value {
            self.all[index]
                .validate()
                .map_err(|error| Error::configuration(format!("policy {value:?}: {error}")))?;
        }
        Ok(())
    }

    /// The policy of jobs with this `value` of what is selected; the default if they have none of
    /// their own.
    pub fn get(&self, value: &str) -> &RetryPolicy {
        self.at(self.by_value.get(value).copied().unwrap_or(0))
    }

    /// Which policy a job has, for [`Self::at`] and the lanes made for it.
    pub(crate) fn of(&self, job: &Job) -> usize {
        if self.by_value.is_empty() {
            return 0;
        }
        let value = match &self.select {
            Select::Type => Some(job.kind().to_owned()),
            Select::RoutingKey => Some(job.routing_key().to_owned()),
            Select::Header(name) => text_header(job.properties(), name),
        };
        value.and_then(|value| self.by_value.get(&value).copied()).unwrap_or(0)
    }

    pub(crate) fn at(&self, index: usize) -> &RetryPolicy {
        &self.all[index]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &RetryPolicy> {
        self.all.iter()
    }

    /// The same with another default.
    pub(crate) fn with_default(mut self, default: RetryPolicy) -> Self {
        self.all[0] = default;
        self
    }
}

impl From<RetryPolicy> for Policies {
    fn from(policy: RetryPolicy) -> Self {
        Self::new(policy)
    }
}

impl From<&RetryPolicy> for Policies {
    fn from(policy: &RetryPolicy) -> Self {
        Self::new(policy.clone())
    }
}

impl From<&Policies> for Policies {
    fn from(policies: &Policies) -> Self {
        policies.clone()
    }
}
