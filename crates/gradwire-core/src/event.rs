//! What goes into a connection and what comes out of it.

use crate::{CloseReason, Contract, Mark, Timestamp, TransferTags};
use core::ops::Range;
use core::time::Duration;
use gradwire_wire::{Descriptor, Header, Opening, TransferId, ABORT_RECORD_BYTES, POSITION_RECORD_BYTES};

/// Whether a sender may leave holes until the receiver asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reliability {
    /// What counts as lost is sent again at once, before new data.
    Exact,
    /// What counts as lost is sent again only when the receiver's contract turns out to need it.
    Tolerant,
    /// What counts as lost is sent again once everything has been sent, after the new data of all other transfers
    /// (LTP's retransmission queue), until the receiver says stop.
    Deferred,
    /// Nothing is sent again (ULTIMA section 3.2): the receiver's deadline ends the transfer.
    BestEffort,
}

/// Posts the sending half of a transfer.
#[derive(Clone, Debug)]
pub struct SendTransfer {
    /// Its id; the receiver posts the same.
    pub transfer: TransferId,
    /// Its size; zero is allowed (a bare signal).
    pub bytes: u64,
    /// What it is; compared at the receiver.
    pub descriptor: Descriptor,
    /// What to do about losses.
    pub reliability: Reliability,
    /// Lower goes first; equal ones in the order in which they were posted.
    pub priority: u8,
    /// Chunks at each end that go first and are always sent again; the receiver's contract names as many.
    pub critical_chunks: u16,
    /// At which of the other chunks the first pass begins, to go round from there; modulo their number.
    pub begin: u32,
    /// What the network is told about its packets.
    pub tags: TransferTags,
    /// When what it carries was called for, here or by the last rank that it waited for; the receiver is told how long ago. `None`:
    /// just now, whenever that is.
    pub called_at: Option<Timestamp>,
}

impl SendTransfer {
    /// An exact one of the first priority, with nothing marked.
    #[must_use]
    pub fn exact(transfer: TransferId, bytes: u64, descriptor: Descriptor) -> Self {
        let (reliability, tags) = (Reliability::Exact, TransferTags::default());
        Self {
            transfer,
            bytes,
            descriptor,
            reliability,
            priority: 0,
            critical_chunks: 0,
            begin: 0,
            tags,
            called_at: None,
        }
    }
}

/// Posts the receiving half of a transfer, which grants it to the sender.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveTransfer {
    /// Its id.
    pub transfer: TransferId,
    /// Its size.
    pub bytes: u64,
    /// What it is; compared with the sender's.
    pub descriptor: Descriptor,
    /// When it is complete.
    pub contract: Contract,
    /// Told to the sender when the transfer closes: the time that this rank has learned to expect of the stage,
    /// microseconds, or zero.
    pub stage_us: u32,
    /// The fewest and the most ranks whose contributions a packet of it may sum. One that says anything else is dropped, and comes again.
    pub weights: (u16, u16),
}

impl ReceiveTransfer {
    /// One whose sender is told no time, and whose packets may say what they like of whom they sum.
    #[must_use]
    pub const fn new(transfer: TransferId, bytes: u64, descriptor: Descriptor, contract: Contract) -> Self {
        Self { transfer, bytes, descriptor, contract, stage_us: 0, weights: (0, u16::MAX) }
    }

    /// Whether a packet of it may say so.
    pub(crate) const fn may_weigh(&self, weight: u16) -> bool {
        self.weights.0 <= weight && weight <= self.weights.1
    }
}

/// New payload bytes, counted exactly once however often they arrive. The caller places or adds them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Payload<'a> {
    /// The transfer.
    pub transfer: TransferId,
    /// Byte offset in the transfer.
    pub offset: u64,
    /// Number of ranks whose contributions are summed in it.
    pub weight: u16,
    /// The bytes.
    pub bytes: &'a [u8],
}

/// A datagram to send: `header.encode()`, then the opening if there is one, then the body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transmit {
    /// The header; for data the caller sets `weight` before encoding.
    pub header: Header,
    /// How the network is asked to treat it.
    pub mark: Mark,
    /// It asks whether another way than the one in use could carry its path; see [`crate::Connection::try_path`].
    pub is_trial: bool,
    /// An acknowledgement that may leave behind the data of the same moment: at its path's rate a full message takes no longer than
    /// acknowledgements may be held back.
    pub may_follow: bool,
    /// Prefix of opening data packets.
    pub opening: Option<Opening>,
    /// What follows.
    pub body: Body,
}

/// Body of a datagram to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Body {
    /// These bytes of the transfer `header.transfer`, taken by the caller from its own memory.
    Payload {
        /// Byte offset.
        offset: u64,
        /// Length.
        bytes: usize,
    },
    /// This many bytes, already written to the front of the caller's scratch buffer.
    Control {
        /// Length.
        bytes: usize,
    },
}

/// How a transfer ended at its receiver.
#[derive(Clone, PartialEq, Debug)]
pub struct Receipt {
    /// The transfer.
    pub transfer: TransferId,
    /// Why it is over.
    pub reason: CloseReason,
    /// Bytes that arrived.
    pub received_bytes: u64,
    /// Bytes of the whole.
    pub total_bytes: u64,
    /// Time between posting and the first packet.
    pub waited_for_peer: Duration,
    /// When the sender had called, by what its packets said when they came: off by what the fastest packet takes to come here.
    /// `None`: none of those that say so came.
    pub called_at: Option<Timestamp>,
    /// When the first packet came, or the end if none did.
    pub began_at: Timestamp,
    /// Time between the first packet and the end: the network.
    pub elapsed: Duration,
    /// How long its contract let it wait for what was lost, from its first packet on ([`crate::Contract::deadline`]).
    pub deadline: Option<Duration>,
    /// Byte ranges that did not arrive, in order, disjoint.
    pub missing: alloc::vec::Vec<Range<u64>>,
}

/// How a transfer ended at its sender.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SendReceipt {
    /// The transfer.
    pub transfer: TransferId,
    /// Byte ranges that did not count at the receiver, in order, disjoint.
    pub missing: alloc::vec::Vec<Range<u64>>,
    /// What the receiver said in [`ReceiveTransfer::stage_us`]; zero when nothing is known.
    pub stage_us: u32,
    /// The receiver left in good order without having taken it: no call there waited for it.
    pub is_untaken: bool,
}

/// Something the layer above must know.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The peer answered for the first time.
    Connected {
        /// First round-trip time.
        rtt: Duration,
    },
    /// A packet of a transfer that we have not posted arrived (once for each transfer).
    Offered {
        /// The transfer.
        transfer: TransferId,
        /// The sender's size and description.
        opening: Opening,
    },
    /// A receiving half is over. Its payload has been handed out before this event.
    Received(Receipt),
    /// A sending half is over: the memory behind it is no longer read.
    Sent(SendReceipt),
    /// The two ends disagree about a transfer.
    Mismatch {
        /// The transfer.
        transfer: TransferId,
        /// What we posted.
        ours: Opening,
        /// What the peer sends.
        theirs: Opening,
    },
    /// A hello with another word than the peer's: it comes from somebody else, or the two have other settings, records or secrets.
    HelloMismatch {
        /// What it says.
        theirs: u64,
    },
    /// The peer's latest position record (from its heartbeats), when it changed.
    Position([u8; POSITION_RECORD_BYTES]),
    /// Nothing was heard for the peer timeout. The connection is closed.
    PeerSilent {
        /// For how long.
        silent: Duration,
    },
    /// The peer left in good order: it needs nothing more. How each send to it ended has been said before.
    PeerLeft,
    /// The peer's group failed; first arrival only.
    Aborted([u8; ABORT_RECORD_BYTES]),
}

impl SendReceipt {
    /// Everything counted, as far as is known.
    pub(crate) fn complete(transfer: TransferId) -> Self {
        Self { transfer, missing: alloc::vec::Vec::new(), stage_us: 0, is_untaken: false }
    }
}
