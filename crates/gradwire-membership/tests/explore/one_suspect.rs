//! Many ranks die together, and only one of them is ever given up by the transport: with it the group of that epoch has failed. In the
//! engine's proportions.

use crate::swarm::run_with;
use crate::world::{Detector, Fault, Sabotage, Weather, World, ENGINE_SETTINGS, SILENCE, TICK};
use std::time::Duration;

const BEFORE: Duration = Duration::from_millis(50);

fn world(world_size: u32) -> World {
    let weather = Weather { loss: 0, duplicate: 0, delay_max_us: 2_000 };
    World::with((ENGINE_SETTINGS, Detector::First), world_size, weather, Sabotage::None, 1)
}

/// Until somebody is in an epoch of this number, or nobody can be any more; how long it took.
fn run_until(world: &mut World, epoch: u64) -> Duration {
    let mut waited = Duration::ZERO;
    while world.latest().number < epoch && waited < 3 * ENGINE_SETTINGS.patience {
        world.run_for(TICK);
        waited += TICK;
    }
    waited
}

#[test]
fn the_first_survivor_waits_for_none_of_the_dead_before_it() {
    for (world_size, dead) in [(3, 1), (5, 2), (7, 3), (25, 12), (64, 31)] {
        let mut world = world(world_size);
        world.run_for(BEFORE);
        world.apply(&Fault::CrashAll((0..dead).collect()));
        let waited = run_until(&mut world, 1);
        let members: Vec<u32> = world.latest().members.iter().map(|member| member.rank).collect();
        assert_eq!(members, (dead..world_size).collect::<Vec<_>>(), "{dead} of {world_size}: {waited:?}");
        assert!(waited < SILENCE + 2 * ENGINE_SETTINGS.attempt, "{dead} of {world_size}: {waited:?}");
        assert_eq!(world.checker.violation, None);
    }
}

#[test]
fn a_proposer_and_all_behind_it_that_die_at_any_message_keep_nobody_for_ever() {
    const WORLD_SIZE: u32 = 11;
    let begun = |fault_at| {
        let mut world = world(WORLD_SIZE);
        world.run_for(BEFORE);
        world.fault_at = fault_at;
        world.apply(&Fault::Crash(WORLD_SIZE - 1));
        run_until(&mut world, 1);
        world
    };
    let messages = begun(None).handled;
    let (mut epochs, dead) = (Vec::new(), (0..4).collect::<Vec<u32>>());
    for at in 1..=messages {
        let mut world = begun(Some((at, Fault::CrashAll(dead.clone()))));
        world.run_for(ENGINE_SETTINGS.patience / 2);
        assert_eq!(world.checker.violation, None, "message {at}");
        let has_given_up: Vec<u32> = (0..WORLD_SIZE).filter(|rank| world.has_given_up(*rank)).collect();
        assert_eq!(has_given_up, [], "message {at}");
        let members: Vec<u32> = world.latest().members.iter().map(|member| member.rank).collect();
        assert_eq!(members, (4..WORLD_SIZE - 1).collect::<Vec<_>>(), "message {at}");
        epochs.push(world.latest().number);
    }
    epochs.sort_unstable();
    epochs.dedup();
    assert_eq!(epochs, [1, 2], "they died before the first decision and behind it");
}

#[test]
fn no_seed_splits_the_group_or_mixes_epochs() {
    let mut epochs = 0;
    for seed in 0..SEEDS {
        let (violation, number) = run_with(seed, Sabotage::None, (ENGINE_SETTINGS, Detector::First));
        assert_eq!(violation, None, "seed {seed}");
        epochs += number;
    }
    assert!(epochs > SEEDS / 2, "{epochs} epochs: the seeds explore too little");
}

const SEEDS: u64 = 300;
