//! Messages as bytes. Every length and every number is checked before it is used: what decodes is a message that a member
//! could have sent, and encodes to the same bytes.
//!
//! A message is its kind (one byte) and what follows from it, little-endian; an epoch is its number, its frontier, its source,
//! the count of its members (one byte) and these; a member is rank and incarnation.

use crate::epoch::{Ballot, Epoch, Member};
use crate::message::{Message, Promise};
use alloc::vec::Vec;
use gradwire_core::wire::{DecodeError, Reader, Writer};

/// Largest group that can go on without a lost rank: its members must fit into one small datagram.
pub const MEMBERS_MAX: usize = 64;
/// Bytes of the largest message.
pub const MESSAGE_BYTES_MAX: usize = 1 + 8 + BALLOT_BYTES + 1 + BALLOT_BYTES + EPOCH_BYTES_MAX + 1 + 8;

const MEMBER_BYTES: usize = 4 + 8;
const BALLOT_BYTES: usize = 8 + MEMBER_BYTES;
const EPOCH_BYTES_MAX: usize = 8 + 8 + MEMBER_BYTES + 1 + MEMBERS_MAX * MEMBER_BYTES;
/// Numbers that are counted up by one never come near it; what claims to is refused, so that no sum overflows.
pub(crate) const COUNT_MAX: u64 = 1 << 48;

const PREPARE: u8 = 0;
const PROMISED: u8 = 1;
const ACCEPT: u8 = 2;
const ACCEPTED: u8 = 3;
const REFUSED: u8 = 4;
const DECIDED: u8 = 5;
const ASK: u8 = 6;
const JOIN: u8 = 7;

impl Message {
    /// Bytes of the largest message in a group of so many members.
    #[must_use]
    pub const fn bytes_max(members: usize) -> usize {
        MESSAGE_BYTES_MAX - MEMBERS_MAX * MEMBER_BYTES + members * MEMBER_BYTES
    }

    /// Writes it.
    pub fn encode(&self, out: &mut Writer<'_>) {
        match self {
            Self::Prepare { epoch, ballot } => put_attempt(out, PREPARE, *epoch, *ballot),
            Self::Promised { epoch, ballot, promise } => {
                put_attempt(out, PROMISED, *epoch, *ballot);
                put_promise(out, promise);
            }
            Self::Accept { epoch, ballot, next } => {
                put_attempt(out, ACCEPT, *epoch, *ballot);
                put_epoch(out, next);
            }
            Self::Accepted { epoch, ballot } => put_attempt(out, ACCEPTED, *epoch, *ballot),
            Self::Refused { epoch, ballot } => put_attempt(out, REFUSED, *epoch, *ballot),
            Self::Decided(epoch) => put_epoch(out.u8(DECIDED), epoch),
            Self::Ask { epoch } => _ = out.u8(ASK).u64(*epoch),
            Self::Join => _ = out.u8(JOIN),
        }
    }

    /// Reads one.
    ///
    /// # Errors
    /// [`DecodeError`]: truncated, or a field that no member would send.
    pub fn decode(bytes: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let kind = bytes.u8()?;
        match kind {
            DECIDED => return Ok(Self::Decided(epoch(bytes)?)),
            JOIN => return Ok(Self::Join),
            PREPARE..=REFUSED | ASK => {}
            _ => return Err(DecodeError::Kind(kind)),
        }
        let number = count(bytes, "epoch")?;
        if kind == ASK {
            return Ok(Self::Ask { epoch: number });
        }
        let ballot = ballot(bytes)?;
        Ok(match kind {
            PREPARE => Self::Prepare { epoch: number, ballot },
            PROMISED => Self::Promised { epoch: number, ballot, promise: promise(bytes)? },
            ACCEPT => Self::Accept { epoch: number, ballot, next: next_of(number, epoch(bytes)?)? },
            ACCEPTED => Self::Accepted { epoch: number, ballot },
            _ => Self::Refused { epoch: number, ballot },
        })
    }
}

fn put_attempt(out: &mut Writer<'_>, kind: u8, epoch: u64, ballot: Ballot) {
    out.u8(kind).u64(epoch);
    put_ballot(out, ballot);
}

fn put_ballot(out: &mut Writer<'_>, ballot: Ballot) {
    out.u64(ballot.counter);
    put_member(out, ballot.proposer);
}

fn put_member(out: &mut Writer<'_>, member: Member) {
    out.u32(member.rank).u64(member.incarnation);
}

fn put_promise(out: &mut Writer<'_>, promise: &Promise) {
    out.u8(u8::from(promise.accepted.is_some()));
    if let Some((ballot, epoch)) = &promise.accepted {
        put_ballot(out, *ballot);
        put_epoch(out, epoch);
    }
    out.u8(u8::from(promise.progress.is_some()));
    if let Some(progress) = promise.progress {
        out.u64(progress);
    }
}

fn put_epoch(out: &mut Writer<'_>, epoch: &Epoch) {
    out.u64(epoch.number).u64(epoch.frontier);
    put_member(out, epoch.source);
    // A larger group is refused before it begins.
    out.u8(u8::try_from(epoch.members.len()).unwrap_or(u8::MAX));
    epoch.members.iter().for_each(|member| put_member(out, *member));
}

fn count(bytes: &mut Reader<'_>, field: &'static str) -> Result<u64, DecodeError> {
    let value = bytes.u64()?;
    if value < COUNT_MAX {
        Ok(value)
    } else {
        Err(DecodeError::Field(field))
    }
}

fn flag(bytes: &mut Reader<'_>) -> Result<bool, DecodeError> {
    match bytes.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(DecodeError::Field("flag")),
    }
}

fn member(bytes: &mut Reader<'_>) -> Result<Member, DecodeError> {
    Ok(Member { rank: bytes.u32()?, incarnation: bytes.u64()? })
}

fn ballot(bytes: &mut Reader<'_>) -> Result<Ballot, DecodeError> {
    Ok(Ballot { counter: count(bytes, "ballot")?, proposer: member(bytes)? })
}

fn promise(bytes: &mut Reader<'_>) -> Result<Promise, DecodeError> {
    let accepted = if flag(bytes)? { Some((ballot(bytes)?, epoch(bytes)?)) } else { None };
    let progress = if flag(bytes)? { Some(count(bytes, "progress")?) } else { None };
    Ok(Promise { accepted, progress })
}

fn epoch(bytes: &mut Reader<'_>) -> Result<Epoch, DecodeError> {
    let (number, frontier) = (count(bytes, "epoch")?, count(bytes, "frontier")?);
    let source = member(bytes)?;
    let members = usize::from(bytes.u8()?);
    if members == 0 || members > MEMBERS_MAX {
        return Err(DecodeError::Field("members"));
    }
    let members = (0..members).map(|_| member(bytes)).collect::<Result<Vec<Member>, DecodeError>>()?;
    let is_sorted = members.windows(2).all(|pair| pair[0].rank < pair[1].rank);
    if !is_sorted || members.binary_search(&source).is_err() {
        return Err(DecodeError::Field("members"));
    }
    Ok(Epoch { number, members, frontier, source })
}

fn next_of(number: u64, next: Epoch) -> Result<Epoch, DecodeError> {
    if next.number == number + 1 {
        Ok(next)
    } else {
        Err(DecodeError::Field("epoch"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec;

    fn bytes_of(message: &Message) -> Vec<u8> {
        let mut bytes = vec![0; MESSAGE_BYTES_MAX];
        let mut writer = Writer::new(&mut bytes);
        message.encode(&mut writer);
        let length = writer.finish().expect("it fits");
        bytes.truncate(length);
        bytes
    }

    fn any_member() -> impl Strategy<Value = Member> {
        (any::<u32>(), any::<u64>()).prop_map(|(rank, incarnation)| Member { rank, incarnation })
    }

    fn any_ballot() -> impl Strategy<Value = Ballot> {
        (0..COUNT_MAX, any_member()).prop_map(|(counter, proposer)| Ballot { counter, proposer })
    }

    fn any_epoch() -> impl Strategy<Value = Epoch> {
        let members = prop::collection::btree_map(any::<u32>(), any::<u64>(), 1..=MEMBERS_MAX);
        (0..COUNT_MAX, 0..COUNT_MAX, members, any::<prop::sample::Index>()).prop_map(
            |(number, frontier, members, source)| {
                let members: Vec<Member> =
                    members.into_iter().map(|(rank, incarnation)| Member { rank, incarnation }).collect();
                let source = *source.get(&members);
                Epoch { number, members, frontier, source }
            },
        )
    }

    fn any_message() -> impl Strategy<Value = Message> {
        let accepted = prop::option::of((any_ballot(), any_epoch()));
        let promise = (accepted, prop::option::of(0..COUNT_MAX))
            .prop_map(|(accepted, progress)| Promise { accepted, progress });
        let numbers = || (0..COUNT_MAX, any_ballot());
        prop_oneof![
            numbers().prop_map(|(epoch, ballot)| Message::Prepare { epoch, ballot }),
            (numbers(), promise).prop_map(|((epoch, ballot), promise)| Message::Promised {
                epoch,
                ballot,
                promise
            }),
            (any_ballot(), any_epoch()).prop_map(|(ballot, mut next)| {
                next.number = next.number.max(1);
                Message::Accept { epoch: next.number - 1, ballot, next }
            }),
            numbers().prop_map(|(epoch, ballot)| Message::Accepted { epoch, ballot }),
            numbers().prop_map(|(epoch, ballot)| Message::Refused { epoch, ballot }),
            any_epoch().prop_map(Message::Decided),
            (0..COUNT_MAX).prop_map(|epoch| Message::Ask { epoch }),
            Just(Message::Join),
        ]
    }

    proptest! {
        #[test]
        fn what_was_written_is_read_again(message in any_message()) {
            let bytes = bytes_of(&message);
            prop_assert_eq!(Message::decode(&mut Reader::new(&bytes)), Ok(message));
            for length in 0..bytes.len() {
                prop_assert!(Message::decode(&mut Reader::new(&bytes[..length])).is_err());
            }
        }

        #[test]
        fn whatever_decodes_is_written_as_it_was(mut bytes in prop::collection::vec(any::<u8>(), 0..200), kind in 0_u8..9) {
            if let Some(first) = bytes.first_mut() {
                *first = kind;
            }
            let mut reader = Reader::new(&bytes);
            if let Ok(message) = Message::decode(&mut reader) {
                let read = bytes.len() - reader.rest().len();
                prop_assert_eq!(bytes_of(&message), &bytes[..read]);
            }
        }
    }

    #[test]
    fn numbers_and_members_that_cannot_be_are_refused() {
        let one = Member { rank: 1, incarnation: 0 };
        let epoch = |members: Vec<Member>, number| Epoch { number, members, frontier: 0, source: one };
        let refused = |message: &Message| Message::decode(&mut Reader::new(&bytes_of(message))).is_err();
        assert!(!refused(&Message::Decided(epoch(vec![one], 1))));
        assert!(refused(&Message::Decided(epoch(vec![], 1))), "nobody");
        assert!(refused(&Message::Decided(epoch(vec![one, one], 1))), "twice");
        assert!(refused(&Message::Decided(epoch(vec![Member { rank: 2, incarnation: 0 }], 1))), "no source");
        assert!(refused(&Message::Decided(epoch(vec![one], u64::MAX))), "a number that overflows");
        let ballot = Ballot { counter: 1, proposer: one };
        assert!(refused(&Message::Accept { epoch: 3, ballot, next: epoch(vec![one], 3) }), "not the next");
    }
}
