//! The tests over real sockets as one program: what they have in common is compiled once. Programs of their own are `allocation` and
//! `flood`, which count what their process allocates, and `news`, which takes its logger.

mod builds;
mod chaos;
mod common;
mod corpus;
mod divided_rows;
mod going_on;
mod lanes;
mod loopback;
mod old_records;
mod panics;
mod parsers;
mod paths;
#[path = "../../../fuzz/replay.rs"]
mod replay;
mod security;
mod servers;
mod tags;
mod translated;
