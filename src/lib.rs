#![doc = include_str!("../README.md")]

mod admit;
mod clock;
#[cfg(feature = "config")]
mod config;
mod consumer;
mod doctor;
mod error;
mod event;
#[cfg(test)]
mod fuzz;
mod handoff;
mod job;
mod link;
mod message;
#[cfg(test)]
mod micro;
mod pause;
mod policy;
mod retry;
mod settings;
mod settle;
mod topology;

pub use lapin;

#[cfg(feature = "config")]
pub use self::config::Config;
pub use self::{
    consumer::{Builder, Handle, Handler, Health, Reconnect, RetryConsumer},
    doctor::{Doctor, Finding, Severity},
    error::{Error, ErrorKind},
    event::{Event, Events, Postponed, Resumed},
    job::Job,
    link::Broker,
    pause::{PauseKind, Pauses},
    policy::{
        BuriedReason, FailureKind, IntoLevel, Jitter, Marked, Outcome, OutcomeExt, Panicked,
        Policies, RetryPolicy, Select, TimedOut, busy, outage, reject, retry_after, undecodable,
    },
    retry::{Jobs, Retry},
    settings::Settings,
    settle::{Receipt, Settled, Settling, UnsettledJob},
    topology::{Declare, QueueSpec, QueueType, Shield, Topology},
};
