#![doc = include_str!("../README.md")]

mod admit;
mod clock;
mod consumer;
mod error;
mod event;
mod handoff;
mod job;
mod link;
mod message;
mod policy;
mod retry;
mod settings;
mod settle;
mod topology;

pub use lapin;

pub use self::{
    consumer::{Builder, Handle, Handler, RetryConsumer},
    error::{Error, ErrorKind},
    event::Event,
    job::Job,
    link::Broker,
    policy::{
        BuriedReason, FailureKind, IntoLevel, Jitter, Marked, Outcome, OutcomeExt, Panicked,
        RetryPolicy, TimedOut, reject, undecodable,
    },
    retry::{Jobs, Retry},
    settings::Settings,
    settle::{Receipt, Settled, Settling, UnsettledJob},
    topology::{Declare, QueueSpec, QueueType, Topology},
};
