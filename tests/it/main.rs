//! Behaviour on a real broker, one module a promise.

mod definitions;
mod lapin_oversized_headers;
mod lapin_traps;
mod outage;
mod pause;
mod pause_own_loop;
mod support;
mod test_tools;
mod workshop;
