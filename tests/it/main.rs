//! Behaviour on a real broker, one module a promise.

mod support;
mod test_tools;
