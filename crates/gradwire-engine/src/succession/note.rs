//! What members of a group that goes on without lost ranks tell each other outside of its transfers: a datagram of kind
//! `Members`, sealed like all others, whose body is one of these.

use gradwire_core::wire::{DecodeError, Reader, Writer};
use gradwire_membership::{Message, MESSAGE_BYTES_MAX};

/// One of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Note {
    /// Who is in the group from now on.
    Membership(Message),
    /// How to connect to the sender under a new epoch, and how far it has come.
    Ready(Ready),
}

/// See [`Note::Ready`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ready {
    pub(crate) epoch: u64,
    /// Connection id for the receiver to write into its packets.
    pub(crate) connection: u32,
    /// Every call before it has ended there.
    pub(crate) below: u64,
    /// Number of the next call that is made there.
    pub(crate) next: u64,
    /// The sender waits for what the receiver says. What answers it is no question: two who are ready do not go on answering each other.
    pub(crate) asks: bool,
    /// The sender has just joined, and has made no calls.
    pub(crate) is_new: bool,
    /// First call of the rank that joins, as all others know it.
    pub(crate) boundary: u64,
}

impl Ready {
    /// A boundary lies behind calls that were made, and nobody counts so far.
    fn is_possible(&self) -> bool {
        let ahead = self.next.checked_sub(self.below);
        ahead.is_some_and(|ahead| ahead <= AHEAD_MAX) && self.boundary < COUNT_MAX && self.next < COUNT_MAX
    }
}

fn read_flag(reader: &mut Reader<'_>, field: &'static str) -> Result<bool, DecodeError> {
    match reader.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(DecodeError::Field(field)),
    }
}

/// Calls and epochs that are counted up by one never come near it.
pub(crate) const COUNT_MAX: u64 = 1 << 48;
/// Calls that may have ended on one member and not on another; a larger difference is no member's.
pub(super) const AHEAD_MAX: u64 = 1 << 18;

impl Note {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; 1 + MESSAGE_BYTES_MAX];
        let mut writer = Writer::new(&mut out);
        match self {
            Self::Membership(message) => message.encode(writer.u8(0)),
            Self::Ready(Ready { epoch, connection, below, next, asks, is_new, boundary }) => {
                writer.u8(1).u64(*epoch).u32(*connection).u64(*below).u64(*next);
                writer.u8(u8::from(*asks)).u8(u8::from(*is_new)).u64(*boundary);
            }
        }
        // A group that is too large for it is refused before it begins.
        let bytes = writer.finish().unwrap_or(0);
        out.truncate(bytes);
        out
    }

    /// # Errors
    /// [`DecodeError`]: not what a member would send.
    pub(crate) fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        let note = match reader.u8()? {
            0 => Self::Membership(Message::decode(&mut reader)?),
            1 => Self::Ready(Ready {
                epoch: reader.u64()?,
                connection: reader.u32()?,
                below: reader.u64()?,
                next: reader.u64()?,
                asks: read_flag(&mut reader, "asks")?,
                is_new: read_flag(&mut reader, "is_new")?,
                boundary: reader.u64()?,
            }),
            kind => return Err(DecodeError::Kind(kind)),
        };
        match &note {
            Self::Ready(ready) if !ready.is_possible() => Err(DecodeError::Field("next")),
            _ if !reader.rest().is_empty() => Err(DecodeError::Field("length")),
            _ => Ok(note),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_read_as_they_were_written_and_nothing_else_is() {
        let ready =
            Ready { epoch: 3, connection: 77, below: 5, next: 9, asks: false, is_new: true, boundary: 4 };
        for note in [Note::Ready(ready), Note::Membership(Message::Join)] {
            let bytes = note.encode();
            assert_eq!(Note::decode(&bytes), Ok(note));
            assert!(Note::decode(&[&bytes[..], &[0]].concat()).is_err(), "something behind it");
            assert!(Note::decode(&bytes[..bytes.len() - 1]).is_err());
        }
        assert!(Note::decode(&[2]).is_err());
        for place in [29, 30] {
            let mut bytes = Note::Ready(ready).encode();
            bytes[place] = 2;
            assert!(Note::decode(&bytes).is_err(), "neither yes nor no");
        }
        assert!(Note::decode(&Note::Ready(Ready { next: 4, ..ready }).encode()).is_err());
        assert!(Note::decode(&Note::Ready(Ready { next: u64::MAX, ..ready }).encode()).is_err());
    }
}
