//! The text of an error, for headers, events and logs.

use crate::message::cut;

/// The most that is kept of an error's text in memory and in events, in bytes.
const ERROR_TEXT: usize = 16 * 1024;

/// An error and its sources, as `outer: inner`. Layers that say the same, as markers do, are written
/// once. The user's code writes them, and may panic.
pub(crate) fn chain(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    // Where what was said last begins.
    let mut last = 0;
    for layer in error.chain().skip(1) {
        if text.len() > ERROR_TEXT {
            break;
        }
        let said = layer.to_string();
        if said != text[last..] {
            let colon = if text.is_empty() { "" } else { ": " };
            last = text.len() + colon.len();
            text.extend([colon, &said]);
        }
    }
    cut(text, ERROR_TEXT).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reject;
    use anyhow::{Context, anyhow};

    #[test]
    fn a_chain_tells_each_layer_once() {
        let io = std::io::Error::other("disk full");
        let error = anyhow::Error::new(io).context("saving");
        assert_eq!(chain(&error), "saving: disk full");
        assert_eq!(chain(&reject(anyhow!("no use")).into()), "no use");
        let marked = Err::<(), _>(reject(anyhow!("no use"))).context("outer").unwrap_err();
        assert_eq!(chain(&marked), "outer: no use");
    }

    #[test]
    fn an_error_of_a_megabyte_is_cut() {
        let long = "ü".repeat(1 << 20);
        assert!(chain(&anyhow!(long)).len() <= ERROR_TEXT);
    }
}
