//! What members do between two epochs, in virtual time.

use super::*;
use crate::PendingGroup;
use crate::{Engine, EngineConfig, OnPeerLoss};

#[test]
fn who_has_heard_everybody_by_the_deadline_gives_nobody_up() {
    let on_peer_loss = OnPeerLoss::Continue;
    let config = EngineConfig { network_threads: Some(1), on_peer_loss, ..EngineConfig::default() };
    let engines = [(); 2].map(|()| Engine::start(config.clone()).expect("it starts"));
    let mut pending =
        engines.iter().zip(0..).map(|(engine, rank)| engine.new_group(rank, 2, "two").expect("valid"));
    let (first, other) = (pending.next().expect("a rank"), pending.next().expect("a rank"));
    let mut succession = Succession::new(first.into_lineage(&[other.record()]).expect("they agree"));
    let (begun, epoch) = (Timestamp::ZERO, Epoch::first(succession.lives.clone()));
    succession.entered(begun, &epoch, 0..1);
    let deadline = begun + succession.peer_timeout;
    assert!(succession.connects_too_long(deadline));
    succession.on_unreachable(deadline, &[]);
    assert!(matches!(succession.phase, Phase::Connecting { .. }));
    succession.on_unreachable(deadline, &[1]);
    assert!(matches!(succession.phase, Phase::Waiting { .. }));
}

#[test]
fn once_an_epoch_is_decided_only_the_loss_of_one_of_its_members_concerns_it() {
    let life = |rank, incarnation| Member { rank, incarnation };
    let before = [life(0, 0), life(2, 0), life(3, 0), life(5, 1)];
    // Rank 2 is lost, and rank 3 has come back.
    let epoch = Epoch { number: 4, ..Epoch::first(vec![life(0, 0), life(3, 1), life(5, 1)]) };
    let of = |error: OpError| loses_member(&epoch, &before, &error);
    assert_eq!([0, 1, 2, 3, 4].map(|rank| of(lost(rank))), [true, false, false, true, false]);
    assert!(!of(OpError::ShutDown("a call".to_owned())));
}

/// So many ranks of a group, which share a network thread that has nothing to do.
fn group_of(ranks: u32) -> (Engine, Vec<Succession>) {
    let on_peer_loss = OnPeerLoss::Continue;
    let config = EngineConfig { network_threads: Some(1), on_peer_loss, ..EngineConfig::default() };
    let engine = Engine::start(config).expect("it starts");
    let begin = |rank| engine.new_group(rank, ranks, "many").expect("valid");
    let pending: Vec<PendingGroup> = (0..ranks).map(begin).collect();
    let records: Vec<String> = pending.iter().map(PendingGroup::record).collect();
    let lineage = |pending: PendingGroup| {
        let own = pending.record();
        let others: Vec<String> = records.iter().filter(|record| **record != own).cloned().collect();
        pending.into_lineage(&others).expect("they agree")
    };
    (engine, pending.into_iter().map(|pending| Succession::new(lineage(pending))).collect())
}

fn lost(rank: u32) -> OpError {
    OpError::PeerLost {
        rank,
        host: String::new(),
        silent: Duration::ZERO,
        during: String::new(),
        detail: "".into(),
        reported_by: None,
    }
}

/// Runs those who live until nobody waits for the next epoch any more, with messages that take no time.
fn run(now: &mut Timestamp, living: &mut [Succession]) -> Vec<OpError> {
    let mut ended = Vec::new();
    while living.iter().any(|rank| matches!(rank.phase, Phase::Waiting { .. })) {
        let mut notes = Vec::new();
        for rank in living.iter_mut() {
            if let Some(Step::End(error)) = rank.advance(*now) {
                rank.change(Phase::Over(error.clone()));
                ended.push(error);
            }
            notes.extend(rank.notes.drain(..).map(|(to, note)| (rank.me, to, note)));
        }
        let is_silence = notes.is_empty();
        for (from, to, note) in notes {
            let to = living.iter_mut().find(|rank| rank.me == to && !matches!(rank.phase, Phase::Over(_)));
            let note = Note::decode(&note).expect("a member wrote it");
            to.into_iter().for_each(|rank| rank.on_note(*now, from, note.clone()));
        }
        if is_silence {
            let wakes = living.iter().filter_map(Succession::wake_at).min();
            *now = wakes.unwrap_or(*now).max(*now + Duration::from_millis(1));
        }
    }
    ended
}

#[test]
fn a_majority_goes_on_when_the_lowest_ranks_die_together_and_one_of_them_is_found() {
    let (_engine, mut ranks) = group_of(25);
    let (mut now, mut living) = (Timestamp::ZERO + Duration::from_secs(60), ranks.split_off(12));
    for rank in &mut living {
        assert!(rank.on_failed(now, &lost(0)));
    }
    assert_eq!(run(&mut now, &mut living), []);
    for rank in &living {
        let Phase::Forming(forming) = &rank.phase else { panic!("rank {} forms no group", rank.me.rank) };
        assert_eq!(*ranks_of(&forming.epoch), (12..25).collect::<Vec<u32>>());
    }
}

#[test]
fn half_of_the_ranks_stop_after_their_patience() {
    let (_engine, mut ranks) = group_of(24);
    let (mut now, mut living) = (Timestamp::ZERO + Duration::from_secs(60), ranks.split_off(12));
    for rank in &mut living {
        assert!(rank.on_failed(now, &lost(0)));
    }
    let ended = run(&mut now, &mut living);
    assert_eq!(ended.len(), 12);
    for error in ended {
        assert!(matches!(error, OpError::NotMember { outcome: NO_MAJORITY, .. }), "{error}");
    }
}
