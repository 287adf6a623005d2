//! Random worlds: each seed draws a group, a network and faults.

use crate::checker::Violation;
use crate::rng::Rng;
use crate::world::{check_liveness, Detector, Fault, Sabotage, Weather, World, SETTINGS};
use gradwire_membership::Settings;
use std::time::Duration;

/// A run of a seed; what was wrong, and how many epochs there were.
pub(crate) fn run(seed: u64, sabotage: Sabotage) -> (Option<Violation>, u64) {
    run_with(seed, sabotage, (SETTINGS, Detector::All))
}

/// The same with other times, and another detector of the lost.
pub(crate) fn run_with(
    seed: u64,
    sabotage: Sabotage,
    ranks: (Settings, Detector),
) -> (Option<Violation>, u64) {
    let mut rng = Rng(seed ^ 0x0073_7761_726D);
    let world_size = 2 + rng.below(6) as u32;
    let weather = Weather {
        loss: [0, 0, 5, 30][rng.below(4) as usize],
        duplicate: [0, 10, 40][rng.below(3) as usize],
        delay_max_us: [500, 3_000, 20_000][rng.below(3) as usize],
    };
    let mut world = World::with(ranks, world_size, weather, sabotage, rng.next());
    world.run_for(Duration::from_millis(20 + rng.below(60)));
    for _ in 0..rng.below(9) {
        let fault = draw(&mut rng, &world, world_size);
        world.apply(&fault);
        world.run_for(Duration::from_millis(rng.below(250)));
    }
    check_liveness(&mut world);
    (world.checker.violation.clone(), world.latest().number)
}

fn draw(rng: &mut Rng, world: &World, world_size: u32) -> Fault {
    let rank = rng.below(u64::from(world_size)) as u32;
    let mut side = || (0..world_size).filter(|_| rng.chance(50)).collect::<Vec<_>>();
    let (left, right) = (side(), side());
    match rng.below(8) {
        0 | 1 if world.lives(rank) => Fault::Crash(rank),
        2 if world.lives(rank) => Fault::Leave(rank),
        0..=3 if !world.lives(rank) => Fault::Restart(rank),
        4 | 5 => Fault::Block(left, right),
        6 => Fault::Block((0..world_size).filter(|other| *other != rank).collect(), vec![rank]),
        _ => Fault::Heal,
    }
}

#[test]
fn no_seed_splits_the_group_mixes_epochs_or_gets_stuck() {
    let mut epochs = 0;
    for seed in 0..SEEDS {
        let (violation, number) = run(seed, Sabotage::None);
        assert_eq!(violation, None, "seed {seed}");
        epochs += number;
    }
    assert!(epochs > SEEDS, "{epochs} epochs: the seeds explore too little");
}

const SEEDS: u64 = 300;
