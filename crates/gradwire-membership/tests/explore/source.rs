//! Who is taken for a source of the parameters although it was given up.

use crate::swarm::run_with;
use crate::world::{Detector, Sabotage, ENGINE_SETTINGS};
use core::time::Duration;
use gradwire_core::Timestamp;
use gradwire_membership::{Epoch, Member, Membership, Message, Promise, Transmit};

const PROMISES: Member = Member { rank: 0, incarnation: 1 };
const SLOW: Member = Member { rank: 1, incarnation: 1 };
const JOINED: Member = Member { rank: 2, incarnation: 2 };

fn said(membership: &mut Membership) -> Vec<Transmit> {
    core::iter::from_fn(|| membership.poll_transmit()).collect()
}

/// Lets time pass until a message is said of which `found` makes something, for so long.
fn find<T>(
    membership: &mut Membership,
    now: &mut Timestamp,
    within: Duration,
    found: impl Fn(&Message) -> Option<T>,
) -> Option<T> {
    let end = *now + within;
    while let Some(at) = membership.poll_timeout().filter(|at| *at < end) {
        *now = at.max(*now);
        membership.handle_timeout(*now);
        if let Some(found) = said(membership).iter().find_map(|each| found(&each.message)) {
            return Some(found);
        }
    }
    None
}

fn proposed(message: &Message) -> Option<Epoch> {
    match message {
        Message::Accept { next, .. } => Some(next.clone()),
        _ => None,
    }
}

/// One that has just joined, has no parameters yet, gives a member up and has its promise all the same; another one says nothing so far.
fn proposer() -> (Membership, Timestamp) {
    let (first, mut now) = (Epoch::first(vec![PROMISES, SLOW]), Timestamp::ZERO);
    let epoch = Epoch { number: 1, members: vec![PROMISES, SLOW, JOINED], ..first.clone() };
    let mut membership = Membership::joiner(JOINED, first, ENGINE_SETTINGS, now);
    membership.handle_message(now, PROMISES, Message::Decided(epoch));
    membership.suspect(now, PROMISES);
    promise(&mut membership, &mut now);
    (membership, now)
}

/// To the next attempt.
fn promise(membership: &mut Membership, now: &mut Timestamp) {
    let prepared = |message: &Message| match message {
        Message::Prepare { ballot, .. } => Some(*ballot),
        _ => None,
    };
    let ballot = find(membership, now, ENGINE_SETTINGS.patience, prepared).expect("an attempt");
    let promise = Promise { accepted: None, progress: Some(0) };
    membership.handle_message(*now, PROMISES, Message::Promised { epoch: 1, ballot, promise });
}

#[test]
fn who_alone_has_the_parameters_and_promises_is_kept_although_it_was_given_up() {
    // Rank 1 has done a step more than the others, which give it up for a while: they know that it lives, and none of them has its parameters.
    let (violation, _) = run_with(2_936, Sabotage::None, (ENGINE_SETTINGS, Detector::First));
    assert_eq!(violation, None);
}

#[test]
fn who_was_given_up_is_no_source_before_all_others_were_waited_for_once() {
    let (mut membership, mut now) = proposer();
    let first = ENGINE_SETTINGS.attempt + ENGINE_SETTINGS.repeat;
    assert_eq!(
        find(&mut membership, &mut now, first, proposed),
        None,
        "the slow one may have the parameters"
    );
    promise(&mut membership, &mut now);
    let next = find(&mut membership, &mut now, ENGINE_SETTINGS.patience, proposed).expect("a proposal");
    assert_eq!((next.source, next.members), (PROMISES, vec![PROMISES, JOINED]));
}

#[test]
fn who_has_left_or_has_come_back_as_another_life_is_no_source() {
    for leaves in [true, false] {
        let (mut membership, mut now) = proposer();
        let first = ENGINE_SETTINGS.attempt + ENGINE_SETTINGS.repeat;
        assert_eq!(find(&mut membership, &mut now, first, proposed), None);
        promise(&mut membership, &mut now);
        if leaves {
            membership.has_left(now, PROMISES);
        } else {
            membership.handle_message(now, Member { incarnation: 3, ..PROMISES }, Message::Join);
        }
        assert_eq!(find(&mut membership, &mut now, ENGINE_SETTINGS.patience, proposed), None, "{leaves}");
    }
}
