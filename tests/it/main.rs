//! Behaviour on a real broker, one module a promise.

mod busy;
mod definitions;
mod lapin_oversized_headers;
mod lapin_traps;
mod outcomes;
mod policies;
mod retry_after;
mod support;
mod test_tools;
