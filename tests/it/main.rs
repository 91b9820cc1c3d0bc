//! Behaviour on a real broker, one module a promise.

mod hand_off;
mod lapin_oversized_headers;
mod lapin_traps;
mod lost_connections;
mod lost_lane;
mod shutdown;
mod support;
mod test_tools;
