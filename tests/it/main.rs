//! Behaviour on a real broker, one module a promise.

mod definitions;
mod hand_off_pause;
mod lapin_oversized_headers;
mod lapin_traps;
mod outage;
mod pause;
mod pause_own_loop;
mod support;
mod test_tools;
mod workshop;
