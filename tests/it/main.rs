//! Behaviour on a real broker, one module a promise.

mod deadline;
mod definitions;
mod isolation;
mod lapin_oversized_headers;
mod lapin_traps;
mod properties;
mod rolling_deploy;
mod schedule;
mod support;
mod test_tools;
