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
}

/// Calls that may have ended on one member and not on another; a larger difference is no member's.
const AHEAD_MAX: u64 = 1 << 20;

impl Note {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; 1 + MESSAGE_BYTES_MAX];
        let mut writer = Writer::new(&mut out);
        match self {
            Self::Membership(message) => message.encode(writer.u8(0)),
            Self::Ready(Ready { epoch, connection, below, next }) => {
                writer.u8(1).u64(*epoch).u32(*connection).u64(*below).u64(*next);
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
            }),
            kind => return Err(DecodeError::Kind(kind)),
        };
        match &note {
            Self::Ready(ready) if ready.next < ready.below || ready.next - ready.below > AHEAD_MAX => {
                Err(DecodeError::Field("next"))
            }
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
        let ready = Ready { epoch: 3, connection: 77, below: 5, next: 9 };
        for note in [Note::Ready(ready), Note::Membership(Message::Join)] {
            let bytes = note.encode();
            assert_eq!(Note::decode(&bytes), Ok(note));
            assert!(Note::decode(&[&bytes[..], &[0]].concat()).is_err(), "something behind it");
            assert!(Note::decode(&bytes[..bytes.len() - 1]).is_err());
        }
        assert!(Note::decode(&[2]).is_err());
        assert!(Note::decode(&Note::Ready(Ready { next: 4, ..ready }).encode()).is_err());
        assert!(Note::decode(&Note::Ready(Ready { next: u64::MAX, ..ready }).encode()).is_err());
    }
}
