//! The fixed header in front of every datagram (docs/protocol.md section 2).

use crate::{ConnectionId, DecodeError, PacketNumber, PathId, Reader, TransferId, Writer};

/// Bytes of the header.
pub const HEADER_BYTES: usize = 24;

/// Protocol version, the high four bits of the first byte.
pub const VERSION: u8 = 1;

/// What the body of a packet holds; the low four bits of the first byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Elements of a transfer at a byte offset.
    Data = 0,
    /// Which packet numbers arrived on each path, with a time stamp echo.
    Ack = 1,
    /// The receiver's view of one transfer: its state and the bitmap of what is missing.
    Status = 2,
    /// The sender asks for the [`Kind::Status`] of one transfer.
    Probe = 3,
    /// Opens a connection and proves that full-sized datagrams pass.
    Hello = 4,
    /// Liveness of an idle connection and the sender's position in its sequence of collectives.
    Ping = 5,
    /// The peer leaves in good order.
    Goodbye = 6,
    /// The peer's group failed; the body is a record that the collective layer understands.
    Abort = 7,
    /// Who is in the group from now on; the body is a note that the engine understands. A connection knows nothing of it.
    Members = 8,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 9] = [
        Self::Data,
        Self::Ack,
        Self::Status,
        Self::Probe,
        Self::Hello,
        Self::Ping,
        Self::Goodbye,
        Self::Abort,
        Self::Members,
    ];

    const fn from_bits(bits: u8) -> Option<Self> {
        Some(match bits {
            0 => Self::Data,
            1 => Self::Ack,
            2 => Self::Status,
            3 => Self::Probe,
            4 => Self::Hello,
            5 => Self::Ping,
            6 => Self::Goodbye,
            7 => Self::Abort,
            8 => Self::Members,
            _ => return None,
        })
    }
}

/// Flag bits of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Flags(u8);

impl Flags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// Must arrive: never counted into a loss budget (LTP section III-E).
    pub const CRITICAL: Self = Self(1);
    /// One of the last percent of its transfer (ULTIMA section 3.3.2).
    pub const LAST_PERCENTILE: Self = Self(1 << 1);
    /// Not the first transmission of this data.
    pub const RETRANSMITTED: Self = Self(1 << 2);
    /// Large magnitude: survives selective dropping longest (MLT section 4.2.2).
    pub const IMPORTANT: Self = Self(1 << 3);
    /// On an acknowledgement or a status, which have no magnitude and use the bit of [`Flags::IMPORTANT`]: its sender is flooded
    /// by strangers.
    pub const FLOODED: Self = Self(1 << 3);
    /// The body begins with an [`crate::Opening`].
    pub const OPENING: Self = Self(1 << 4);
    /// Everything of this transfer has been sent at least once.
    pub const ALL_SENT: Self = Self(1 << 5);
    /// Answers a packet of the same kind.
    pub const REPLY: Self = Self(1 << 6);
    /// Acknowledge at once: the sender's window is too small to wait for several packets. On a probe: the sender asks what has come of all
    /// that it sent before, and not of the transfer alone.
    pub const ACK_NOW: Self = Self(1 << 7);

    /// The raw bits.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Both sets.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether every flag of `other` is set.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// The header. On the wire, little-endian:
///
/// | byte | field |
/// |---|---|
/// | 0 | version (high 4 bits), kind (low 4 bits) |
/// | 1 | flags |
/// | 2..4 | weight (data), since when there was no answer (probe) |
/// | 4..7 | connection id |
/// | 7 | path |
/// | 8..12 | packet number |
/// | 12..16 | transfer id |
/// | 16..20 | byte offset (data), first chunk of interest (probe) |
/// | 20..24 | send time, microseconds modulo 2^32 |
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// What the body holds.
    pub kind: Kind,
    /// Flag bits.
    pub flags: Flags,
    /// Number of ranks whose contributions are summed in this payload (1 for a rank's own values). On a probe: how long ago the oldest one was
    /// sent that had no answer, nor any after it, in 64 microseconds.
    pub weight: u16,
    /// Id that the receiver chose for this association.
    pub connection: ConnectionId,
    /// Path the packet was sent on.
    pub path: PathId,
    /// Number of this packet on its path; zero for control packets, which are not numbered.
    pub packet_number: PacketNumber,
    /// Transfer the packet belongs to; zero where none.
    pub transfer: TransferId,
    /// Byte offset of the payload in its transfer.
    pub offset: u32,
    /// Sender's clock when the packet was sent, in microseconds modulo 2^32.
    pub sent_at_us: u32,
}

impl Header {
    /// A control header of `kind` with every other field zero.
    #[must_use]
    pub const fn control(kind: Kind, connection: ConnectionId) -> Self {
        Self {
            kind,
            flags: Flags::NONE,
            weight: 0,
            connection,
            path: PathId(0),
            packet_number: PacketNumber(0),
            transfer: TransferId(0),
            offset: 0,
            sent_at_us: 0,
        }
    }

    /// The wire form.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        let [c0, c1, c2, _] = self.connection.value().to_le_bytes();
        Writer::new(&mut out)
            .u8(VERSION << 4 | self.kind as u8)
            .u8(self.flags.bits())
            .u16(self.weight)
            .put(&[c0, c1, c2, self.path.0])
            .u32(self.packet_number.0)
            .u32(self.transfer.0)
            .u32(self.offset)
            .u32(self.sent_at_us);
        out
    }

    /// Parses the header and returns it with the body that follows.
    ///
    /// # Errors
    /// A [`DecodeError`] when the bytes are too short, of another version, of an unknown kind.
    pub fn decode(datagram: &[u8]) -> Result<(Self, &[u8]), DecodeError> {
        let mut reader = Reader::new(datagram);
        let first = reader.u8()?;
        if first >> 4 != VERSION {
            return Err(DecodeError::Version(first >> 4));
        }
        let kind = Kind::from_bits(first & 0x0F).ok_or(DecodeError::Kind(first & 0x0F))?;
        let flags = Flags(reader.u8()?);
        let weight = reader.u16()?;
        let connection_and_path = reader.u32()?;
        let header = Self {
            kind,
            flags,
            weight,
            connection: ConnectionId::from_masked(connection_and_path),
            path: PathId((connection_and_path >> 24) as u8),
            packet_number: PacketNumber(reader.u32()?),
            transfer: TransferId(reader.u32()?),
            offset: reader.u32()?,
            sent_at_us: reader.u32()?,
        };
        Ok((header, reader.rest()))
    }
}
