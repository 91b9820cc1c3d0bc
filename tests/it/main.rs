//! Behaviour on a real broker, one module a promise.

mod configuration;
mod hostile;
mod hostile_sizes;
mod lapin_nested_headers;
mod lapin_oversized_headers;
mod lapin_traps;
mod oversized;
mod support;
mod test_tools;
mod ways_in;
