//! Bodies of control packets (docs/protocol.md section 3).

use crate::{DecodeError, PacketNumber, PathId, Reader, Writer};

/// Bytes of the position record in a ping; its meaning belongs to the collective layer.
pub const POSITION_RECORD_BYTES: usize = 32;
/// Bytes of the record in an abort; its meaning belongs to the collective layer.
pub const ABORT_RECORD_BYTES: usize = 64;
/// Most bitmap words for each path of an acknowledgement: 1024 packets.
pub const ACK_WORDS_MAX: usize = 16;
/// Most bitmap words of a status: 8192 chunks, 1024 bytes. Smaller datagrams have fewer (`ConnectionConfig::status_words_max`).
pub const STATUS_WORDS_MAX: usize = 128;
/// Bytes of a status before its bitmap.
pub const STATUS_FIXED_BYTES: usize = 24;

/// What the two ends of a transfer must agree about, opaque here (the collective layer puts operation, dtype,
/// reduction, root and element count into it).
pub type Descriptor = [u8; 16];

/// Prefix of opening data packets and body of probes: enough to recognise a mismatch from any one packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Opening {
    /// Bytes of the whole transfer.
    pub total_bytes: u64,
    /// What the sender believes this transfer is.
    pub descriptor: Descriptor,
    /// Microseconds since the sender called for what it sends, when this left; [`Opening::CALLED_US_MAX`]: so many or more.
    pub called_us: u32,
}

impl Opening {
    /// The most that `called_us` says: 16.8 s, in 24 bits.
    pub const CALLED_US_MAX: u32 = (1 << 24) - 1;
    /// The most that `total_bytes` says, in 40 bits. Offsets end at 2^32.
    pub const TOTAL_BYTES_MAX: u64 = (1 << 40) - 1;

    /// Whether both speak of the same transfer.
    #[must_use]
    pub fn agrees(&self, other: &Self) -> bool {
        (self.total_bytes, self.descriptor) == (other.total_bytes, other.descriptor)
    }

    /// Appends the wire form. What is larger than a field is written as the most that it holds.
    pub fn encode(&self, out: &mut Writer<'_>) {
        let called_us = u64::from(self.called_us.min(Self::CALLED_US_MAX));
        out.u64(self.total_bytes.min(Self::TOTAL_BYTES_MAX) | called_us << 40).put(&self.descriptor);
    }

    /// Takes it from the front of `reader`.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`].
    pub fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let word = reader.u64()?;
        let (total_bytes, called_us) = (word & Self::TOTAL_BYTES_MAX, (word >> 40) as u32);
        Ok(Self { total_bytes, descriptor: reader.array()?, called_us })
    }
}

/// Body of [`crate::Kind::Hello`]; the rest of the datagram is padding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HelloBody {
    /// What only somebody of the group can say: its fingerprint, or a proof of its secret.
    pub word: u64,
    /// In a reply, the `sent_at_us` of the packet that it answers.
    pub echo_us: u32,
}

impl HelloBody {
    /// Appends the wire form.
    pub fn encode(&self, out: &mut Writer<'_>) {
        out.u64(self.word).u32(self.echo_us);
    }

    /// Takes it from the front of `reader`.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`].
    pub fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self { word: reader.u64()?, echo_us: reader.u32()? })
    }
}

/// Fixed part of an acknowledgement; [`AckPath`]s follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AckBody {
    /// `sent_at_us` of the newest data packet that arrived.
    pub echo_us: u32,
    /// Microseconds between that packet's arrival and this acknowledgement.
    pub delay_us: u32,
    /// Payload bytes of this connection that arrived so far, duplicates left out.
    pub received_bytes: u64,
    /// Paths that follow.
    pub paths: u8,
}

impl AckBody {
    /// Appends the wire form.
    pub fn encode(&self, out: &mut Writer<'_>) {
        out.u32(self.echo_us).u32(self.delay_us).u64(self.received_bytes).u8(self.paths);
    }

    /// Takes it from the front of `reader`.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`].
    pub fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            echo_us: reader.u32()?,
            delay_us: reader.u32()?,
            received_bytes: reader.u64()?,
            paths: reader.u8()?,
        })
    }
}

/// What arrived on one path: bit `i` (bit `i % 64` of word `i / 64`) is packet `largest - i`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AckPath {
    /// The path.
    pub path: PathId,
    /// Largest packet number that arrived.
    pub largest: PacketNumber,
    /// Words in use.
    pub words: u8,
    /// The bitmap.
    pub bitmap: [u64; ACK_WORDS_MAX],
}

impl AckPath {
    /// Appends the wire form.
    pub fn encode(&self, out: &mut Writer<'_>) {
        let words = usize::from(self.words).min(ACK_WORDS_MAX);
        out.u8(self.path.0).u8(words as u8).u32(self.largest.0);
        for word in &self.bitmap[..words] {
            out.u64(*word);
        }
    }

    /// Takes it from the front of `reader`.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`], or [`DecodeError::Field`] for too many words.
    pub fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let path = PathId(reader.u8()?);
        let words = reader.u8()?;
        let largest = PacketNumber(reader.u32()?);
        let mut bitmap = [0; ACK_WORDS_MAX];
        let used = bitmap.get_mut(..usize::from(words)).ok_or(DecodeError::Field("ack words"))?;
        for word in used {
            *word = reader.u64()?;
        }
        Ok(Self { path, largest, words, bitmap })
    }
}

/// Where a transfer stands at its receiver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum TransferState {
    /// The receiver has not asked for it yet: only the eager window may be sent.
    Unposted = 0,
    /// Granted: all of it may be sent.
    Open = 1,
    /// Over, completely or within its contract: nothing more is wanted (MLT's stop).
    Closed = 2,
}

/// Body of [`crate::Kind::Status`]: bit `i` set means that chunk `first_chunk + i` is missing. Chunks from
/// `first_chunk + 64 * words` on are not described.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StatusBody {
    /// Where the transfer stands.
    pub state: TransferState,
    /// Chunks that have arrived.
    pub received_chunks: u32,
    /// Chunks that the contract still needs; zero when closed.
    pub wanted_chunks: u32,
    /// First chunk that the bitmap describes; a multiple of 64.
    pub first_chunk: u32,
    /// In an answer to a probe, the `sent_at_us` of the probe; else zero.
    pub echo_us: u32,
    /// When closed, the time that the receiver has learned to expect of this stage (ULTIMA's Timeout field,
    /// microseconds); zero when it has learned none.
    pub stage_us: u32,
    /// Words in use.
    pub words: u16,
    /// The bitmap of what is missing.
    pub missing: [u64; STATUS_WORDS_MAX],
}

impl StatusBody {
    /// Appends the wire form.
    pub fn encode(&self, out: &mut Writer<'_>) {
        let words = usize::from(self.words).min(STATUS_WORDS_MAX);
        out.u8(self.state as u8).u8(0).u16(words as u16);
        out.u32(self.received_chunks).u32(self.wanted_chunks).u32(self.first_chunk).u32(self.echo_us);
        out.u32(self.stage_us);
        for word in &self.missing[..words] {
            out.u64(*word);
        }
    }

    /// Takes it from the front of `reader`.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`], or [`DecodeError::Field`] for a value out of its range.
    pub fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let state = match reader.u8()? {
            0 => TransferState::Unposted,
            1 => TransferState::Open,
            2 => TransferState::Closed,
            _ => return Err(DecodeError::Field("transfer state")),
        };
        if reader.u8()? != 0 {
            return Err(DecodeError::Field("reserved byte"));
        }
        let words = reader.u16()?;
        let received_chunks = reader.u32()?;
        let wanted_chunks = reader.u32()?;
        let first_chunk = reader.u32()?;
        // The last chunk that the bitmap names must have a number, so that users may add without checking.
        if first_chunk % 64 != 0 || first_chunk.checked_add(u32::from(words) * 64).is_none() {
            return Err(DecodeError::Field("first chunk"));
        }
        let echo_us = reader.u32()?;
        let stage_us = reader.u32()?;
        let mut missing = [0; STATUS_WORDS_MAX];
        let used = missing.get_mut(..usize::from(words)).ok_or(DecodeError::Field("status words"))?;
        for word in used {
            *word = reader.u64()?;
        }
        Ok(Self { state, received_chunks, wanted_chunks, first_chunk, echo_us, stage_us, words, missing })
    }
}
