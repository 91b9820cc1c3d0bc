//! What the management API tells, as values.

use std::{collections::BTreeMap, fmt};

use serde_json::{Map, Value};

#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    pub(super) version: Version,
    /// The work queue, and the queues whose names look like ours.
    pub(super) queues: BTreeMap<String, Queue>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    pub(super) quorum: bool,
    pub(super) durable: bool,
    pub(super) auto_delete: bool,
    pub(super) arguments: Map<String, Value>,
    pub(super) policy: Option<Policy>,
    pub(super) operator_policy: Option<Policy>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Policy {
    pub(super) name: String,
    pub(super) priority: i64,
    pub(super) definition: Map<String, Value>,
}

/// Who says how a queue is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum By<'a> {
    Argument,
    Policy(&'a Policy),
    OperatorPolicy(&'a Policy),
}

impl Queue {
    /// All who set this, such as `max-length`, and to what. The argument comes first.
    pub(super) fn set(&self, key: &str) -> impl Iterator<Item = (By<'_>, &Value)> {
        let argument = self.arguments.get(&format!("x-{key}")).map(|value| (By::Argument, value));
        argument.into_iter().chain(self.policies().filter_map(|(by, policy)| {
            let value = policy.definition.get(key)?;
            Some((by, value))
        }))
    }

    /// Those of them who set the smallest number, which is the one that the broker takes.
    pub(super) fn smallest(&self, key: &str) -> Option<(By<'_>, i64)> {
        let numbers = self.set(key).filter_map(|(by, value)| Some((by, value.as_i64()?)));
        numbers.min_by_key(|&(_, number)| number)
    }

    pub(super) fn policies(&self) -> impl Iterator<Item = (By<'_>, &Policy)> {
        let policy = self.policy.iter().map(|policy| (By::Policy(policy), policy));
        policy.chain(self.operator_policy.iter().map(|own| (By::OperatorPolicy(own), own)))
    }

    pub(super) fn has_dead_letter_exchange(&self) -> bool {
        self.set("dead-letter-exchange").next().is_some()
    }

    /// Quorum queues take a policy's word before the argument's, classic queues after it.
    pub(super) fn refuses_when_full(&self) -> bool {
        let mut all = self.set("overflow");
        let overflow = if self.quorum { all.last() } else { all.next() };
        let text = overflow.and_then(|(_, value)| value.as_str());
        text.is_some_and(|text| text.starts_with("reject-publish"))
    }
}

impl fmt::Display for By<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Argument => f.write_str("its own argument"),
            Self::Policy(policy) => write!(f, "the policy {:?}", policy.name),
            Self::OperatorPolicy(policy) => write!(f, "the operator policy {:?}", policy.name),
        }
    }
}

/// A version of RabbitMQ: `4.0.5`, `3.13.0-rc.1`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(pub(super) u32, pub(super) u32, pub(super) u32);

impl Version {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split(['.', '-', '+', '~']).map(|part| part.parse().ok());
        Some(Self(numbers.next()??, numbers.next()??, numbers.next().flatten().unwrap_or(0)))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_compared_by_their_numbers() {
        for (text, version) in [
            ("3.10.8", Version(3, 10, 8)),
            ("4.3.6+1", Version(4, 3, 6)),
            ("3.13.0-rc.1", Version(3, 13, 0)),
            ("4.1", Version(4, 1, 0)),
        ] {
            assert_eq!(Version::parse(text), Some(version));
        }
        assert_eq!(Version::parse("unknown"), None);
        assert!(Version(3, 9, 29) < Version(3, 10, 0));
    }
}
