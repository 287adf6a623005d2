//! One change after another crash, at every message of the protocol: whoever dies when, the others agree and go on.

use crate::checker::Violation;
use crate::world::{check_liveness, Fault, Sabotage, World, SETTINGS, SILENCE, TICK};
use std::time::Duration;

const BEFORE: Duration = Duration::from_millis(50);

/// What happens before the crash that is tried at every step.
fn change(world: &mut World, faults: &[Fault]) {
    world.run_for(BEFORE);
    for fault in faults {
        world.apply(fault);
        world.run_for(Duration::from_millis(300));
    }
}

/// Runs the change once, then again with each rank crashing at each message; returns how many runs that were.
fn explore(world_size: u32, faults: &[Fault]) -> u64 {
    let mut calm = World::calm(world_size);
    change(&mut calm, faults);
    check_liveness(&mut calm);
    assert_eq!(calm.checker.violation, None);
    let messages = calm.handled;
    assert!(messages > 10, "only {messages} messages: nothing was explored");
    for at in 1..=messages {
        for rank in 0..world_size {
            let mut world = World::calm(world_size);
            world.fault_at = Some((at, Fault::Crash(rank)));
            change(&mut world, faults);
            check_liveness(&mut world);
            assert_eq!(world.checker.violation, None, "rank {rank} crashed at message {at} of {faults:?}");
            assert!(world.has_majority(), "rank {rank} crashed at message {at}: the majority is gone");
        }
    }
    messages * u64::from(world_size)
}

/// The first proposer is not heard any more from each message on, while it hears the others; what was wrong then.
pub(crate) fn mute_the_proposer(sabotage: Sabotage) -> Vec<Violation> {
    let (proposer, others) = (vec![0], vec![1, 2, 3]);
    let runs = (1..5).flat_map(|seed| (1..25).map(move |at| (seed, at)));
    let wrong = runs.filter_map(|(seed, at)| {
        let mut world = World::calm_with(5, sabotage, seed);
        world.fault_at = Some((at, Fault::Block(proposer.clone(), others.clone())));
        change(&mut world, &[Fault::Crash(4)]);
        world.run_for(Duration::from_millis(500));
        check_liveness(&mut world);
        world.checker.violation
    });
    wrong.collect()
}

#[test]
fn a_proposer_that_decides_and_can_tell_nobody_is_followed_all_the_same() {
    assert_eq!(mute_the_proposer(Sabotage::None), []);
}

#[test]
fn a_second_crash_at_every_message_of_the_change_after_the_first() {
    assert!(explore(5, &[Fault::Crash(2)]) > 50);
}

#[test]
fn the_first_proposer_crashes_and_another_rank_at_every_message() {
    assert!(explore(5, &[Fault::Crash(0)]) > 50);
}

#[test]
fn a_crash_at_every_message_while_a_rank_joins_again() {
    assert!(explore(5, &[Fault::Crash(1), Fault::Restart(1)]) > 100);
}

#[test]
fn a_crash_at_every_message_while_two_ranks_are_cut_off_and_come_back() {
    let (few, many) = (vec![3, 4], vec![0, 1, 2]);
    let cut = [Fault::Block(few.clone(), many.clone()), Fault::Block(many, few), Fault::Heal];
    let mut world = World::calm(5);
    change(&mut world, &cut);
    check_liveness(&mut world);
    assert_eq!(world.checker.violation, None);
    assert_eq!(world.steps().len(), 5, "the two joined again");
}

#[test]
fn two_of_four_go_nowhere_and_say_so() {
    let mut world = World::calm(4);
    let (left, right) = (vec![0, 1], vec![2, 3]);
    world.run_for(BEFORE);
    world.apply(&Fault::Block(left.clone(), right.clone()));
    world.apply(&Fault::Block(right, left));
    world.run_for(Duration::from_secs(1));
    let before = world.latest().number;
    world.run_for(Duration::from_secs(4));
    assert_eq!((before, world.latest().number), (0, 0), "half of the members raised the epoch");
    assert!((0..4).all(|rank| world.has_given_up(rank)), "nobody waits for ever");
    assert_eq!(world.checker.violation, None);
}

#[test]
fn the_last_of_two_cannot_go_on() {
    let mut world = World::calm(2);
    change(&mut world, &[Fault::Crash(1)]);
    world.run_for(Duration::from_secs(4));
    assert!(world.has_given_up(0) && world.latest().number == 0);
}

// test of: faults/deaf-proposer-is-left
#[test]
fn a_rank_that_hears_nobody_does_not_keep_the_others() {
    let mut world = World::calm(3);
    world.run_for(BEFORE);
    world.apply(&Fault::Block(vec![1, 2], vec![0]));
    let mut waited = Duration::ZERO;
    while world.latest().number == 0 && waited < Duration::from_secs(2) {
        world.run_for(TICK);
        waited += TICK;
    }
    assert!(waited < SILENCE + 2 * SETTINGS.attempt, "{waited:?}");
    assert_eq!(world.latest().members.iter().map(|member| member.rank).collect::<Vec<_>>(), [1, 2]);
    check_liveness(&mut world);
    assert_eq!(world.checker.violation, None);
}
