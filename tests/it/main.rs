//! Behaviour on a real broker, one module a promise.

mod busy;
mod configuration;
mod deadline;
mod definitions;
mod hand_off;
mod hostile;
mod hostile_sizes;
mod isolation;
mod lapin_nested_headers;
mod lapin_oversized_headers;
mod lapin_traps;
mod lost_connections;
mod lost_lane;
mod outcomes;
mod oversized;
mod policies;
mod properties;
mod retry_after;
mod rolling_deploy;
mod schedule;
mod shutdown;
mod support;
mod test_tools;
mod ways_in;
