//! Behaviour on a real broker, one module a promise.
