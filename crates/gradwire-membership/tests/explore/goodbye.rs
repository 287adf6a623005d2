//! A group of two of which one leaves in good order: no vote can come any more, unless the next epoch was agreed on before.

use crate::world::ENGINE_SETTINGS;
use gradwire_core::Timestamp;
use gradwire_membership::{Ballot, Epoch, Event, Member, Membership, Message};

const A: Member = Member { rank: 0, incarnation: 1 };
const B: Member = Member { rank: 1, incarnation: 1 };
const C: Member = Member { rank: 2, incarnation: 1 };

fn has_halted(membership: &mut Membership) -> bool {
    core::iter::from_fn(|| membership.poll_event()).any(|event| event == Event::Halted { epoch: 0 })
}

fn one_of_two() -> Membership {
    Membership::founder(A, Epoch::first(vec![A, B]), ENGINE_SETTINGS)
}

#[test]
fn who_is_left_alone_halts_at_once() {
    let mut alone = one_of_two();
    alone.has_left(Timestamp::ZERO, B);
    assert!(has_halted(&mut alone));
}

#[test]
fn the_goodbye_of_another_life_is_nobodys() {
    let mut member = one_of_two();
    member.has_left(Timestamp::ZERO, Member { incarnation: 2, ..B });
    assert!(!has_halted(&mut member) && member.poll_timeout().is_none());
}

#[test]
fn the_loss_of_another_life_is_nobodys() {
    let mut member = one_of_two();
    for incarnation in [0, 2] {
        member.suspect(Timestamp::ZERO, Member { incarnation, ..B });
        assert_eq!(member.poll_timeout(), None, "it has nothing to do");
    }
    member.suspect(Timestamp::ZERO, B);
    assert!(member.poll_timeout().is_some());
}

#[test]
fn who_has_accepted_the_next_epoch_waits_for_the_word_that_it_was_chosen() {
    let (mut member, now) = (one_of_two(), Timestamp::ZERO);
    let ballot = Ballot { counter: 1, proposer: B };
    let next = Epoch { number: 1, members: vec![A, B, C], ..member.epoch().clone() };
    member.handle_message(now, B, Message::Prepare { epoch: 0, ballot });
    member.handle_message(now, B, Message::Accept { epoch: 0, ballot, next: next.clone() });
    member.has_left(now, B);
    assert!(!has_halted(&mut member), "A and C are most of the next one");
    member.handle_message(now, C, Message::Decided(next.clone()));
    assert_eq!(member.epoch(), &next);
}
