//! A group of two of which one leaves in good order: no vote can come any more, unless the next epoch was agreed on before.

use crate::world::{Detector, Fault, Sabotage, Weather, World, ENGINE_SETTINGS, TICK};
use gradwire_core::Timestamp;
use gradwire_membership::{Ballot, Epoch, Event, Member, Membership, Message, Promise};

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

/// Ranks 0 to `world_size - 1`, of which this is `own`.
fn one_of(world_size: u32, own: u32) -> (Membership, Vec<Member>) {
    let members: Vec<Member> = (0..world_size).map(|rank| Member { rank, incarnation: 1 }).collect();
    let me = members[own as usize];
    (Membership::founder(me, Epoch::first(members.clone()), ENGINE_SETTINGS), members)
}

/// When it halts, if nothing comes any more.
fn halts_at(member: &mut Membership) -> Timestamp {
    loop {
        let at = member.poll_timeout().expect("nothing waits for ever");
        member.handle_timeout(at);
        if has_halted(member) {
            return at;
        }
    }
}

#[test]
fn too_few_that_can_vote_wait_no_longer_than_another_attempt_could_take() {
    let now = Timestamp::ZERO;
    // The first of four, which attempts at once; two that have left earlier are told with the loss.
    let (mut first, members) = one_of(4, 0);
    first.has_left(now, members[2]);
    assert!(!has_halted(&mut first));
    let mut enough = first.clone();
    first.has_left(now, members[3]);
    assert_eq!(halts_at(&mut first), now + 2 * ENGINE_SETTINGS.attempt);
    assert_eq!(halts_at(&mut enough), now + ENGINE_SETTINGS.patience, "two others may be slow");
    // One that has promised before it hears of the second goodbye.
    let (mut other, later) = (one_of(4, 1).0, now + ENGINE_SETTINGS.attempt);
    let ballot = Ballot { counter: 1, proposer: members[0] };
    other.handle_message(now, members[0], Message::Prepare { epoch: 0, ballot });
    members[2..].iter().for_each(|member| other.has_left(later, *member));
    assert_eq!(halts_at(&mut other), later + 2 * ENGINE_SETTINGS.attempt);
}

#[test]
fn the_next_epoch_may_have_been_decided_by_those_that_leave_then() {
    let now = Timestamp::ZERO;
    let (mut member, members) = one_of(3, 0);
    members[1..].iter().for_each(|other| member.has_left(now, *other));
    assert!(!has_halted(&mut member), "two of three need no vote of this one");
    let joiner = Member { rank: 3, incarnation: 1 };
    let next = Epoch { number: 1, members: vec![members[0], members[1], joiner], ..member.epoch().clone() };
    member.handle_message(now, joiner, Message::Decided(next.clone()));
    assert_eq!(member.epoch(), &next);
}

#[test]
fn a_majority_goes_on_at_once_without_all_that_have_left() {
    let (mut first, members) = one_of(5, 0);
    let now = Timestamp::ZERO;
    members[3..].iter().for_each(|member| first.has_left(now, *member));
    first.handle_timeout(now);
    let ballot = Ballot { counter: 1, proposer: members[0] };
    let promise = Promise { accepted: None, progress: Some(0) };
    for from in &members[1..3] {
        let promised = Message::Promised { epoch: 0, ballot, promise: promise.clone() };
        first.handle_message(now, *from, promised);
    }
    first.handle_message(now, members[1], Message::Accepted { epoch: 0, ballot });
    first.handle_message(now, members[2], Message::Accepted { epoch: 0, ballot });
    assert_eq!(first.epoch().members, members[..3]);
}

#[test]
fn two_of_four_stop_soon_when_the_others_have_left() {
    let weather = Weather { loss: 0, duplicate: 0, delay_max_us: 2_000 };
    let mut world = World::with((ENGINE_SETTINGS, Detector::First), 4, weather, Sabotage::None, 1);
    world.run_for(TICK);
    [1, 3].iter().for_each(|rank| world.apply(&Fault::Leave(*rank)));
    world.run_for(4 * ENGINE_SETTINGS.attempt);
    assert!(world.has_given_up(0) && world.has_given_up(2));
    assert_eq!(world.checker.violation, None);
}
