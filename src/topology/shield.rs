//! What an operator sets for our queues: patterns that match them, and the policy that keeps others
//! off them.

/// A policy that keeps others off our queues: only the one of the highest priority applies.
///
/// What it sets, the lanes have anyway. An *operator policy* it cannot keep off.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shield {
    /// The policy's name.
    pub name: String,
    /// Matches the lanes and the buried queue, and not the work queue.
    pub pattern: String,
    /// Default: 1000.
    pub priority: i64,
    /// What it sets, as JSON.
    pub definition: &'static str,
}

impl Shield {
    pub(super) fn new(work_queue: &str) -> Self {
        Self {
            name: format!("lapin-retry-{work_queue}"),
            pattern: ours(work_queue),
            priority: 1000,
            definition: r#"{"overflow":"reject-publish"}"#,
        }
    }

    /// The command that sets it, for a shell.
    ///
    /// ```
    /// # use lapin_retry::{QueueType, RetryPolicy, Topology};
    /// let topology = Topology::new("orders", RetryPolicy::default(), QueueType::Quorum)?;
    /// assert_eq!(
    ///     topology.shield().command("/"),
    ///     "rabbitmqctl set_policy -p / --priority 1000 --apply-to queues lapin-retry-orders \
    ///      '^orders\\.(retry\\..*|buried)$' '{\"overflow\":\"reject-publish\"}'"
    /// );
    /// # Ok::<(), lapin_retry::Error>(())
    /// ```
    pub fn command(&self, vhost: &str) -> String {
        set_policy(vhost, self.priority, &self.name, &self.pattern, self.definition)
    }
}

pub(crate) fn set_policy(
    vhost: &str,
    priority: i64,
    name: &str,
    pattern: &str,
    definition: &str,
) -> String {
    format!(
        "rabbitmqctl set_policy -p {} --priority {priority} --apply-to queues {} {} {}",
        shell(vhost),
        shell(name),
        shell(pattern),
        shell(definition)
    )
}

pub(crate) fn delete_queue(vhost: &str, queue: &str) -> String {
    format!("rabbitmqctl delete_queue -p {} {}", shell(vhost), shell(queue))
}

/// The pattern of the lanes and the buried queue.
pub(crate) fn ours(work_queue: &str) -> String {
    format!(r"^{}\.(retry\..*|buried)$", literally(work_queue))
}

/// The pattern of these and the work queue.
pub(crate) fn all(work_queue: &str) -> String {
    format!(r"^{}($|\.(retry\..*|buried)$)", literally(work_queue))
}

/// The regular expression that matches this text and no other.
pub(crate) fn literally(text: &str) -> String {
    let mut pattern = String::new();
    for c in text.chars() {
        if c.is_ascii_punctuation() && !matches!(c, '-' | '_') {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern
}

/// One word of a command.
pub(crate) fn shell(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:@%+=,".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stands_for_itself_in_a_pattern_and_in_a_command() {
        assert_eq!(ours("a.b+c_d-e"), r"^a\.b\+c_d-e\.(retry\..*|buried)$");
        assert_eq!(all("a|b"), r"^a\|b($|\.(retry\..*|buried)$)");
        assert_eq!(shell("orders.buried"), "orders.buried");
        assert_eq!(shell("it's $HOME"), r"'it'\''s $HOME'");
        assert_eq!(shell(""), "''");
        assert_eq!(delete_queue("a b", "q"), "rabbitmqctl delete_queue -p 'a b' q");
    }
}
