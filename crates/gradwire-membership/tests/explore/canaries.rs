//! The checker can fail: each way to break the protocol is found within some seeds, as what it is.

use crate::checker::Violation;
use crate::every_step::mute_the_proposer;
use crate::swarm::run;
use crate::world::Sabotage;

fn found(sabotage: Sabotage, is_it: impl Fn(&Violation) -> bool) {
    let mut others = Vec::new();
    for seed in 0..SEEDS {
        let Some(violation) = run(seed, sabotage).0 else { continue };
        if is_it(&violation) {
            return println!("seed {seed} shows {violation:?}");
        }
        others.push(violation);
    }
    panic!("nothing of the kind in {SEEDS} seeds, but {others:?}");
}

#[test]
fn forged_votes_are_found() {
    found(Sabotage::VotesAreForged, |it| matches!(it, Violation::NoMajority(_)));
}

#[test]
fn acceptors_that_forget_split_the_group() {
    let wrong = mute_the_proposer(Sabotage::AcceptedIsForgotten);
    assert!(wrong.iter().any(|it| matches!(it, Violation::SplitBrain(_))), "{wrong:?}");
}

#[test]
fn processes_that_take_their_old_place_are_found() {
    found(Sabotage::AmnesiacsVote, |it| matches!(it, Violation::StatesDiffer(_) | Violation::SplitBrain(_)));
}

#[test]
fn steps_completed_after_the_promise_are_found() {
    found(Sabotage::FreezeIsIgnored, |it| matches!(it, Violation::StatesDiffer(_)));
}

#[test]
fn parameters_that_were_not_fetched_are_found() {
    found(Sabotage::NothingIsFetched, |it| matches!(it, Violation::StatesDiffer(_)));
}

#[test]
fn contributions_of_another_epoch_are_found() {
    found(Sabotage::EpochsAreMixed, |it| {
        matches!(it, Violation::MixedEpochs(_) | Violation::StatesDiffer(_))
    });
}

const SEEDS: u64 = 1_000;
