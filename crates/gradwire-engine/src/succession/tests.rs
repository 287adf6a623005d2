//! What members do between two epochs, in virtual time.

use super::*;
use crate::PendingGroup;
use crate::{Engine, EngineConfig, OnPeerLoss};
use gradwire_membership::Ballot;

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

/// What it has to say, to whom.
fn said(rank: &mut Succession) -> Vec<(Member, Note)> {
    let notes = rank.notes.drain(..).map(|(to, note)| (to, Note::decode(&note).expect("a member wrote it")));
    notes.collect()
}

fn left(rank: u32) -> OpError {
    let (host, during) = (String::new(), String::new());
    OpError::PeerLeft { rank, host, during, waited: Duration::ZERO, detail: "".into() }
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

/// Runs those who live until all are where `until` says, with messages that take no time, and of which `passes` says who gets what.
fn run(
    now: &mut Timestamp,
    living: &mut [Succession],
    until: impl Fn(&Succession) -> bool,
    passes: impl Fn(Member, &Note) -> bool,
) -> Vec<OpError> {
    let mut ended = Vec::new();
    while !living.iter().all(|rank| until(rank) || matches!(rank.phase, Phase::Over(_))) {
        let mut notes = Vec::new();
        for rank in living.iter_mut() {
            match rank.advance(*now) {
                Some(Step::End(error)) => {
                    rank.change(Phase::Over(error.clone()));
                    ended.push(error);
                }
                Some(Step::Reform(forming, unsure)) => rank.entered(*now, &forming.epoch, unsure),
                None => {}
            }
            notes.extend(rank.notes.drain(..).map(|(to, note)| (rank.me, to, note)));
        }
        let is_silence = notes.is_empty();
        for (from, to, note) in notes {
            let to = living.iter_mut().find(|rank| rank.me == to && !matches!(rank.phase, Phase::Over(_)));
            let note = Note::decode(&note).expect("a member wrote it");
            let to = to.filter(|to| passes(to.me, &note));
            to.into_iter().for_each(|rank| rank.on_note(*now, from, note.clone()));
        }
        if is_silence {
            let wakes = living.iter().filter_map(|rank| rank.wake_at(*now)).min();
            *now = wakes.unwrap_or(*now).max(*now + Duration::from_millis(1));
        }
    }
    ended
}

/// Whether its next epoch is decided.
fn is_decided(rank: &Succession) -> bool {
    !matches!(rank.phase, Phase::Waiting { .. })
}

#[test]
fn a_majority_goes_on_when_the_lowest_ranks_die_together_and_one_of_them_is_found() {
    let (_engine, mut ranks) = group_of(25);
    let (mut now, mut living) = (Timestamp::ZERO + Duration::from_secs(60), ranks.split_off(12));
    for rank in &mut living {
        assert!(rank.on_failed(now, &lost(0)));
    }
    assert_eq!(run(&mut now, &mut living, is_decided, |_, _| true), []);
    for rank in &living {
        assert_eq!(*ranks_of(rank.membership.epoch()), (12..25).collect::<Vec<u32>>());
    }
}

#[test]
fn half_of_the_ranks_stop_after_their_patience() {
    let (_engine, mut ranks) = group_of(24);
    let (mut now, mut living) = (Timestamp::ZERO + Duration::from_secs(60), ranks.split_off(12));
    for rank in &mut living {
        assert!(rank.on_failed(now, &lost(0)));
    }
    let ended = run(&mut now, &mut living, is_decided, |_, _| true);
    assert_eq!(ended.len(), 12);
    for error in ended {
        assert!(matches!(error, OpError::NotMember { outcome: NO_MAJORITY, .. }), "{error}");
    }
}

#[test]
fn a_rank_that_promises_before_it_hears_of_the_loss_names_the_lost_rank_all_the_same() {
    let (_engine, mut ranks) = group_of(3);
    let (mut now, mut living) = (Timestamp::ZERO + Duration::from_secs(60), ranks.split_off(1));
    assert!(living[0].on_failed(now, &lost(0)));
    let has_stopped = |rank: &Succession| !is_decided(rank);
    assert_eq!(run(&mut now, &mut living, has_stopped, |_, _| true), []);
    let error = lost(0);
    let nobody = OpError::Regrouped { epoch: 0 };
    assert_eq!(living[1].unfinished(), nobody, "it does not know yet who is lost, and it is not this rank");
    assert!(living[1].concerns(&error));
    assert!(living[1].on_failed(now, &error));
    assert!(matches!(living[1].unfinished(), OpError::PeerLost { rank: 0, .. }));
    assert!(!living[1].concerns(&lost(1)), "who has stopped loses others");
}

#[test]
fn all_name_the_same_lost_rank_whether_they_have_formed_the_epoch_between_or_not() {
    let (_engine, mut living) = group_of(5);
    let mut now = Timestamp::ZERO + Duration::from_secs(60);
    living.remove(3);
    living.iter_mut().for_each(|rank| assert!(rank.on_failed(now, &lost(3))));
    // Rank 1 does not hear that the others are ready.
    let is_deaf = |to: Member, note: &Note| to.rank == 1 && matches!(note, Note::Ready(_));
    let connects = |rank: &Succession| matches!(rank.phase, Phase::Connecting { .. });
    let is_there =
        |rank: &Succession| connects(rank) || matches!(rank.phase, Phase::Forming(_)) && rank.me.rank == 1;
    assert_eq!(run(&mut now, &mut living, is_there, |to, note| !is_deaf(to, note)), []);
    assert_eq!(living.iter().map(connects).collect::<Vec<bool>>(), [true, false, true, true]);
    // Then rank 4 is lost, the last one of epoch 1.
    living.truncate(3);
    for place in [0, 2] {
        assert!(living[place].on_failed(now, &lost(3)));
    }
    let is_over = |rank: &Succession| connects(rank) && rank.epoch == 2;
    assert_eq!(run(&mut now, &mut living, is_over, |_, _| true), []);
    for rank in &living {
        assert!(matches!(rank.unfinished(), OpError::PeerLost { rank: 4, .. }), "{:?}", rank.unfinished());
        let lost = rank.stats().lost;
        assert_eq!(lost.iter().map(|lost| (lost.rank, lost.epoch)).collect::<Vec<_>>(), [(3, 1), (4, 2)]);
    }
}

#[test]
fn who_is_ready_for_a_later_epoch_is_asked_for_it() {
    let (_engine, mut ranks) = group_of(2);
    let (mut first, now) = (ranks.swap_remove(0), Timestamp::ZERO);
    let newcomer = Member { rank: 1, incarnation: 1 };
    let ready = Ready { epoch: 1, connection: 1, below: 0, next: 0, asks: true, is_new: true, boundary: 0 };
    first.on_note(now, newcomer, Note::Ready(ready));
    assert!(first.advance(now).is_none());
    assert_eq!(said(&mut first), [(newcomer, Note::Membership(Message::Ask { epoch: 0 }))]);
    first.on_note(now, newcomer, Note::Ready(Ready { epoch: 0, ..ready }));
    assert!(first.advance(now).is_none());
    assert_eq!(said(&mut first), []);
}

#[test]
fn the_word_of_what_is_decided_goes_before_what_is_said_under_it() {
    let (_engine, mut ranks) = group_of(3);
    let mut now = Timestamp::ZERO + Duration::from_secs(60);
    ranks.pop();
    ranks.iter_mut().for_each(|rank| assert!(rank.on_failed(now, &lost(2))));
    let is_word = |note: &Note| match note {
        Note::Membership(Message::Decided(epoch)) => epoch.number == 1,
        note => matches!(note, Note::Ready(_)),
    };
    let mut words = Vec::new();
    while words.is_empty() {
        let mut notes = Vec::new();
        for rank in &mut ranks {
            assert!(rank.advance(now).is_none());
            let me = rank.me;
            notes.extend(said(rank).into_iter().map(|(to, note)| (me, to, note)));
        }
        now = now + Duration::from_millis(1);
        let others = notes.iter().filter(|(_, to, note)| to.rank == 1 && is_word(note));
        words.extend(others.map(|(_, _, note)| note.clone()));
        for (from, to, note) in notes {
            let to = ranks.iter_mut().find(|rank| rank.me == to);
            to.into_iter().for_each(|rank| rank.on_note(now, from, note.clone()));
        }
    }
    assert!(matches!(words[..], [Note::Membership(_), .., Note::Ready(_)]), "{words:?}");
}

#[test]
fn the_last_of_two_that_waits_already_stops_in_the_turn_in_which_the_other_one_leaves() {
    let (_engine, mut ranks) = group_of(2);
    let (mut first, now) = (ranks.swap_remove(0), Timestamp::ZERO + Duration::from_secs(60));
    let other = first.lives[1];
    let ballot = Ballot { counter: 1, proposer: other };
    first.on_note(now, other, Note::Membership(Message::Prepare { epoch: 0, ballot }));
    assert!(first.advance(now).is_none(), "it waits for the others");
    said(&mut first);
    assert!(first.wake_at(now).is_some_and(|at| at > now));
    assert!(first.on_failed(now, &left(1)));
    assert_eq!(first.wake_at(now), Some(now));
    assert!(matches!(first.advance(now), Some(Step::End(OpError::NotMember { outcome: NO_MAJORITY, .. }))));
}

#[test]
fn two_of_four_do_not_wait_for_the_votes_of_those_that_had_left_earlier() {
    let (_engine, mut ranks) = group_of(4);
    let (begun, mut living) =
        (Timestamp::ZERO + Duration::from_secs(60), ranks.drain(..2).collect::<Vec<_>>());
    for rank in &mut living {
        assert!(rank.on_failed(begun, &left(2)));
        [2, 3].into_iter().for_each(|other| rank.on_left(begun, other));
    }
    let mut now = begun;
    assert_eq!(run(&mut now, &mut living, is_decided, |_, _| true).len(), 2);
    let peer_timeout = living[0].peer_timeout;
    assert!(now - begun <= 2 * peer_timeout, "after {:?}", now - begun);
}

#[test]
fn what_is_kept_of_a_group_whose_members_come_and_go_is_bounded() {
    let (_engine, mut ranks) = group_of(2);
    let mut first = ranks.swap_remove(0);
    let now = Timestamp::ZERO;
    let epochs = 2 * EPOCHS_KEPT as u64;
    for number in 1..=epochs {
        let life = Member { rank: 1, incarnation: number };
        let members = vec![first.me, life];
        let epoch = Epoch { number, ..Epoch::first(members) };
        let ready =
            Ready { epoch: number, connection: 1, below: 0, next: 0, asks: false, is_new: true, boundary: 0 };
        first.on_note(now, life, Note::Ready(ready));
        first.note_changes(&epoch);
        assert_eq!(first.connection_of(&epoch, 1), 1, "of the latest life");
        first.entered(now, &epoch, 0..0);
    }
    let stats = first.stats();
    let lost = stats.lost.iter().map(|lost| lost.epoch);
    let joined = stats.joined.iter().map(|joined| (joined.epoch, joined.incarnation));
    let latest = epochs + 1 - CHANGES_KEPT as u64..=epochs;
    assert!(lost.eq(latest.clone()));
    assert!(joined.eq(latest.map(|number| (number, number))));
    assert_eq!(first.history.len(), EPOCHS_KEPT);
    assert_eq!(first.heard.len(), 1);
    assert_eq!(first.members_of(epochs).len(), 2);
}
