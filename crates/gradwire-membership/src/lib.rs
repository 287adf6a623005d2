//! Who is in the group, and since when: the epochs of `on_peer_loss="continue"`.
//!
//! Sans-IO like the layers below: calls bring `now`, what a peer said and whom the transport has given up; what is to be said,
//! what changed and when to call again is polled. An **epoch** is a number, the members that may take part in collectives
//! under it, and the step that all of them begin from. The members of an epoch choose the next one by majority, one
//! decision for each number (a single-decree Paxos whose acceptors are the members), so two halves of a torn network can never
//! both go on. docs/membership.md tells the protocol, what it promises and what it does not.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod acceptor;
mod attempt;
mod codec;
mod epoch;
mod event;
mod machine;
mod message;
mod settings;
mod turn;

pub use codec::{MEMBERS_MAX, MESSAGE_BYTES_MAX};
pub use epoch::{Ballot, Epoch, Member};
pub use event::Event;
pub use machine::Membership;
pub use message::{Message, Promise, Transmit};
pub use settings::Settings;
