//! A member misses the word of what was decided, and who decided it dies: it hears of it from whoever is ahead, also from a rank that is
//! new in the next epoch.

use crate::world::{Fault, Sabotage, Weather, World, ENGINE_SETTINGS, SETTINGS, TICK};
use gradwire_core::Timestamp;
use gradwire_membership::{Ballot, Epoch, Member, Membership, Message, Transmit};

const A: Member = Member { rank: 0, incarnation: 1 };
const B: Member = Member { rank: 1, incarnation: 1 };
const C: Member = Member { rank: 2, incarnation: 2 };

fn said(member: &mut Membership) -> Vec<Transmit> {
    core::iter::from_fn(|| member.poll_transmit()).collect()
}

/// Of A and B, where C was taken in and A does not know.
fn one_that_missed_it() -> (Membership, Epoch) {
    let first = Epoch::first(vec![A, B]);
    let next = Epoch { number: 1, members: vec![A, B, C], ..first.clone() };
    (Membership::founder(A, first, ENGINE_SETTINGS), next)
}

#[test]
fn who_says_something_of_a_later_epoch_is_asked_for_it() {
    let now = Timestamp::ZERO;
    let ballot = Ballot { counter: 1, proposer: C };
    for message in [Message::Prepare { epoch: 1, ballot }, Message::Ask { epoch: 1 }] {
        let (mut member, next) = one_that_missed_it();
        member.handle_message(now, C, message);
        assert_eq!(said(&mut member), [Transmit { to: C, message: Message::Ask { epoch: 0 } }]);
        member.handle_message(now, C, Message::Decided(next.clone()));
        assert_eq!(member.epoch(), &next);
    }
    let (mut member, next) = one_that_missed_it();
    member.hear_of(C, 0);
    assert_eq!(said(&mut member), [], "it is no further");
    member.hear_of(C, next.number);
    assert_eq!(said(&mut member), [Transmit { to: C, message: Message::Ask { epoch: 0 } }]);
}

#[test]
fn two_that_ask_each_other_do_not_go_on_asking() {
    let (mut behind, next) = one_that_missed_it();
    let mut ahead = Membership::joiner(C, behind.epoch().clone(), ENGINE_SETTINGS, Timestamp::ZERO);
    ahead.handle_message(Timestamp::ZERO, B, Message::Decided(next.clone()));
    let mut on_the_way = vec![(C, A, Message::Ask { epoch: 1 })];
    let mut handled = 0;
    while let Some((from, to, message)) = on_the_way.pop() {
        handled += 1;
        assert!(handled < 10, "they go on");
        let member = if to == A { &mut behind } else { &mut ahead };
        member.handle_message(Timestamp::ZERO, from, message);
        on_the_way.extend(said(member).into_iter().map(|sent| (to, sent.to, sent.message)));
    }
    assert_eq!((behind.epoch(), ahead.epoch()), (&next, &next));
}

#[test]
fn a_joiner_and_the_member_that_missed_its_coming_are_a_majority_when_the_third_dies() {
    let weather = Weather { loss: 0, duplicate: 0, delay_max_us: 2_000 };
    let begun = |fault_at| {
        let mut world = World::new(3, weather, Sabotage::None, 1);
        world.apply(&Fault::Crash(2));
        run_until(&mut world, 1);
        world.fault_at = fault_at;
        world.apply(&Fault::Restart(2));
        world
    };
    let mut calm = begun(None);
    let first = calm.handled + 1;
    run_until(&mut calm, 2);
    let mut missed = 0;
    for at in first..=calm.handled {
        // From here on rank 1 hears nothing of rank 0.
        let mut world = begun(Some((at, Fault::Block(vec![0], vec![1]))));
        run_until(&mut world, 2);
        world.apply(&Fault::Crash(0));
        if world.latest().members.len() < 3 {
            continue;
        }
        missed += u64::from(!world.is_in_latest(1));
        world.run_for(2 * SETTINGS.patience);
        assert_eq!(world.checker.violation, None, "message {at}");
        assert!(!world.has_given_up(1) && !world.has_given_up(2), "message {at}: {:?}", world.latest());
        assert!(world.latest().number > 2, "message {at}");
    }
    assert!(missed > 0, "rank 1 knew of it each time");
}

fn run_until(world: &mut World, epoch: u64) {
    for _ in 0..100 {
        if world.latest().number < epoch {
            world.run_for(TICK);
        }
    }
}
