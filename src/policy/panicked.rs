//! Panics of the user's code, as values.

use std::{
    any::Any,
    error::Error as StdError,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// The handler panicked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Panicked {
    message: String,
}

impl Panicked {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }

    /// Reads the payload of a panic, and drops it.
    pub(crate) fn by(payload: Box<dyn Any + Send>) -> Self {
        let message = match payload.downcast_ref::<&str>() {
            Some(text) => (*text).to_owned(),
            None => payload.downcast_ref::<String>().cloned().unwrap_or_else(|| "?".to_owned()),
        };
        // A payload is of any type, and its `Drop` may panic as well. So may that of the payload of
        // that panic: it is leaked.
        if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
            std::mem::forget(another);
        }
        Self { message }
    }

    /// What the panic said.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Panicked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the handler panicked: {}", self.message)
    }
}

impl StdError for Panicked {}

/// Calls the user's code. Nothing of a panic in it gets out, not even the `Drop` of its payload.
pub(crate) fn caught<T>(call: impl FnOnce() -> T) -> Result<T, Panicked> {
    catch_unwind(AssertUnwindSafe(call)).map_err(Panicked::by)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::panic_any;

    struct Bomb(u32);

    impl Drop for Bomb {
        fn drop(&mut self) {
            if self.0 > 0 {
                panic_any(Bomb(self.0 - 1));
            }
        }
    }

    #[test]
    fn a_panic_is_read_and_its_payload_does_no_harm() {
        let said = |panicked: Panicked| panicked.message().to_owned();
        assert_eq!(caught(|| 7), Ok(7));
        assert_eq!(caught(|| panic!("boom")).map_err(said), Err::<(), _>("boom".to_owned()));
        assert_eq!(caught(|| panic!("{}", 7)).map_err(said), Err::<(), _>("7".to_owned()));
        for bombs in 0..3 {
            let caught = caught(|| panic_any(Bomb(bombs)));
            assert_eq!(caught.map_err(said), Err::<(), _>("?".to_owned()), "{bombs}");
        }
    }
}
