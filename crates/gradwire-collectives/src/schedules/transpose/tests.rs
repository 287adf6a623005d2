use super::*;
use crate::memory::Reduction;
use crate::{DivideBy, Dtype, ReduceOp, Servers, View};
use std::collections::BTreeSet;

const ROW: usize = 4 * 64 + 12;

type Sends = Vec<(u32, u32, u32)>;

/// One rank with memory of its own.
struct Rank {
    schedule: Transpose,
    memory: Memory,
    _bytes: Vec<u8>,
}

impl Rank {
    fn new(rank: u32, world_size: u32, incast: u32) -> Self {
        Self::with_bytes(rank, world_size, incast, 64 * world_size as usize)
    }

    fn with_bytes(rank: u32, world_size: u32, incast: u32, bytes: usize) -> Self {
        let place = place(rank, world_size, 5, incast);
        let mut bytes = vec![0; bytes];
        // SAFETY: the vector is kept beside the view and nobody else touches it.
        let view = unsafe { View::new(bytes.as_mut_ptr(), bytes.len()) };
        let (dtype, reduce) = (Dtype::F32, ReduceOp::Sum);
        let divide_by = DivideBy::Contributions;
        let reduction = Reduction { dtype, reduce, world_size: world_size as u16, divide_by };
        let memory = Memory::new((view, view, View::EMPTY), reduction, 64);
        Self { schedule: Transpose::rotating(place, bytes.len(), true), memory, _bytes: bytes }
    }

    /// Of a reduce-scatter of rows of four chunks and a bit.
    fn scattering(rank: u32, world_size: u32, incast: u32) -> Self {
        let mut all = Self::with_bytes(rank, world_size, incast, ROW * world_size as usize);
        all.memory.output = all.memory.input.part(&(rank as usize * ROW..(rank as usize + 1) * ROW));
        all.schedule = Transpose::scattering(place(rank, world_size, 5, incast), ROW);
        all
    }
}

fn place(rank: u32, world_size: u32, sequence: u64, incast: u32) -> Place {
    Place { rank, world_size, sequence, chunk_bytes: 64, incast, servers: Servers::default() }
}

fn sends_of(from: u32, posts: &mut Vec<Post>) -> Sends {
    let send = |post| match post {
        Post::Send { to, index, .. } => Some((from, to, index)),
        Post::Receive { .. } => None,
    };
    posts.drain(..).filter_map(send).collect()
}

/// The sends of each round, when all those of a round end together.
fn rounds(mut ranks: Vec<Rank>) -> Vec<Sends> {
    let (mut posts, mut pool) = (Vec::new(), Pool::default());
    let mut rounds = vec![Vec::new()];
    for (rank, from) in ranks.iter_mut().zip(0..) {
        rank.schedule.start(&mut rank.memory, &mut pool, &mut posts);
        rounds[0].extend(sends_of(from, &mut posts));
    }
    while let Some(ended) = rounds.last().filter(|round| !round.is_empty()).cloned() {
        let mut next = Vec::new();
        for (from, to, index) in ended {
            let receiver = &mut ranks[to as usize];
            receiver.schedule.on_received(from, index, &mut receiver.memory, &mut posts);
            next.extend(sends_of(to, &mut posts));
            ranks[from as usize].schedule.on_sent(to, index, &mut posts);
            ranks[from as usize].schedule.on_concluded(to, index, &mut posts);
            next.extend(sends_of(from, &mut posts));
        }
        rounds.push(next);
    }
    rounds.pop();
    rounds
}

// test of: ultima/incast-factor
#[test]
fn an_incast_of_i_takes_two_times_n_minus_1_over_i_rounds_and_never_more_senders() {
    for world_size in 2..=16 {
        for incast in 1..world_size {
            let rounds = rounds((0..world_size).map(|rank| Rank::new(rank, world_size, incast)).collect());
            let case = format!("{world_size} ranks, incast {incast}");
            assert_eq!(rounds.len() as u32, 2 * (world_size - 1).div_ceil(incast), "{case}");
            let mut pairs = BTreeSet::new();
            for round in rounds {
                for rank in 0..world_size {
                    let senders = round.iter().filter(|(_, to, _)| *to == rank).count();
                    assert!(senders as u32 <= incast, "{case}: {senders} send to {rank}");
                }
                assert!(round.into_iter().all(|send| pairs.insert(send)), "{case}: a pair met twice");
            }
            assert_eq!(pairs.len() as u32, 2 * world_size * (world_size - 1), "{case}");
        }
    }
}

// test of: ultima/incast-factor
#[test]
fn a_reduce_scatter_is_the_first_stage_with_the_same_bound_on_senders() {
    for world_size in 1..=8 {
        for incast in 1..world_size.max(2) {
            for piece_bytes in [64, 192, usize::MAX] {
                if piece_bytes < ROW && incast + 1 < world_size {
                    continue; // no longer in rounds: see `pieces_of_all_shards_arrive_with_any_incast_factor`
                }
                let case = format!("{world_size} ranks, incast {incast}, pieces of {piece_bytes}");
                let mut ranks: Vec<Rank> =
                    (0..world_size).map(|rank| Rank::scattering(rank, world_size, incast)).collect();
                for rank in &mut ranks {
                    let place = rank.schedule.place;
                    rank.schedule = Transpose::scattering(place, ROW).in_pieces(piece_bytes);
                }
                let pieces = ROW.div_ceil(piece_bytes.min(ROW)) as u32;
                let rounds = rounds(ranks);
                if pieces == 1 {
                    assert_eq!(rounds.len() as u32, (world_size - 1).div_ceil(incast), "{case}");
                }
                let mut met = BTreeSet::new();
                for round in rounds {
                    for rank in 0..world_size {
                        let senders = round.iter().filter(|(_, to, _)| *to == rank).count();
                        assert!(pieces > 1 || senders as u32 <= incast, "{case}: {senders} send to {rank}");
                    }
                    assert!(round.iter().all(|(_, _, index)| *index != GATHER), "{case}: a result was sent");
                    assert!(round.into_iter().all(|send| met.insert(send)), "{case}: a piece was sent twice");
                }
                assert_eq!(met.len() as u32, pieces * world_size * (world_size - 1), "{case}");
            }
        }
    }
}

#[test]
fn sends_that_wait_for_a_slot_keep_the_memory() {
    let mut rank = Rank::new(0, 4, 1);
    let (mut posts, mut pool) = (Vec::new(), Pool::default());
    rank.schedule.start(&mut rank.memory, &mut pool, &mut posts);
    assert_eq!(sends_of(0, &mut posts), [(0, 1, REDUCE)]);
    assert!(rank.schedule.has_more());
    for to in 1..4 {
        rank.schedule.on_concluded(to, REDUCE, &mut posts);
    }
    assert_eq!(sends_of(0, &mut posts).len(), 2);
    assert!(!rank.schedule.has_more(), "the result is not there yet: receives hold the memory");
}

/// Every transfer between two ranks of a shard of four chunks, in pieces of one and a half, in the order of its start.
#[test]
fn a_shard_in_pieces_is_contributed_piece_by_piece_when_all_have_sent_the_one_before() {
    let mut rank = Rank::with_bytes(1, 3, 2, 3 * 256);
    rank.schedule = rank.schedule.in_pieces(96);
    let (mut posts, mut pool) = (Vec::new(), Pool::default());
    rank.schedule.start(&mut rank.memory, &mut pool, &mut posts);
    let own = rank.schedule.own.shard.clone();
    let sends = |posts: &[Post]| -> Vec<(u32, u32, usize)> {
        let send = |post: &Post| match post {
            Post::Send { to, index, range, .. } => Some((*to, *index, range.len())),
            Post::Receive { .. } => None,
        };
        posts.iter().filter_map(send).collect()
    };
    let receives = |posts: &[Post]| -> Vec<(u32, u32, Target)> {
        let receive = |post: &Post| match post {
            Post::Receive { from, index, target, bytes: 64, .. } => Some((*from, *index, *target)),
            _ => None,
        };
        posts.iter().filter_map(receive).collect()
    };
    assert_eq!(sends(&posts), [(2, 0, 64), (0, 0, 64)], "a chunk at a time");
    assert_eq!(receives(&posts).len(), 2);
    posts.clear();
    let first_chunk = rank.schedule.first_chunk();
    for (piece, index) in [(1, 3), (2, 4), (3, 5)] {
        let before = index_of_piece(piece - 1);
        rank.schedule.on_received(0, before, &mut rank.memory, &mut posts);
        assert!(posts.is_empty(), "rank 2 has not sent piece {}", piece - 1);
        rank.schedule.on_received(2, before, &mut rank.memory, &mut posts);
        let target = Target::Add { at: 64 * piece, chunk: first_chunk + piece };
        assert_eq!(receives(&posts), [(2, index, target), (0, index, target)]);
        posts.clear();
        rank.schedule.on_sent(2, before, &mut posts);
        assert!(posts.is_empty(), "the memory of a shard is free when all of it has been sent");
        rank.schedule.on_concluded(2, before, &mut posts);
        assert_eq!(sends(&posts), [(2, index, 64)]);
        posts.clear();
    }
    rank.schedule.on_sent(2, 5, &mut posts);
    assert!(matches!(posts[..], [Post::Receive { from: 2, index: GATHER, bytes: 256, .. }]));
    posts.clear();
    rank.schedule.on_received(0, 5, &mut rank.memory, &mut posts);
    rank.schedule.on_received(2, 5, &mut rank.memory, &mut posts);
    assert_eq!(sends(&posts), [(2, GATHER, own.len()), (0, GATHER, own.len())]);
}

/// How many of the ranks finish their sum where a receive takes what was sent before or after it, in any order of ranks.
fn sums_finished(world_size: u32, incast: u32, pieces: usize) -> usize {
    let bytes = 64 * pieces * world_size as usize;
    let mut ranks: Vec<Rank> = (0..world_size)
        .map(|rank| {
            let mut made = Rank::with_bytes(rank, world_size, incast, bytes);
            made.schedule = made.schedule.in_pieces(64);
            made
        })
        .collect();
    let (mut posts, mut pool) = (Vec::new(), Pool::default());
    let (mut sent, mut awaited, mut summed) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let mut take = |rank: u32, posts: &mut Vec<Post>, sent: &mut BTreeSet<_>, awaited: &mut BTreeSet<_>| {
        for post in posts.drain(..) {
            match post {
                Post::Send { index: GATHER, .. } => _ = summed.insert(rank),
                Post::Send { to, index, .. } => _ = sent.insert((rank, to, index)),
                Post::Receive { index: GATHER, .. } => {}
                Post::Receive { from, index, .. } => _ = awaited.insert((from, rank, index)),
            }
        }
    };
    for rank in 0..world_size {
        let one = &mut ranks[rank as usize];
        one.schedule.start(&mut one.memory, &mut pool, &mut posts);
        take(rank, &mut posts, &mut sent, &mut awaited);
    }
    while let Some(met) = sent.intersection(&awaited).copied().next() {
        let (from, to, index) = met;
        sent.remove(&met);
        awaited.remove(&met);
        let receiver = &mut ranks[to as usize];
        receiver.schedule.on_received(from, index, &mut receiver.memory, &mut posts);
        take(to, &mut posts, &mut sent, &mut awaited);
        let sender = &mut ranks[from as usize].schedule;
        sender.on_sent(to, index, &mut posts);
        sender.on_concluded(to, index, &mut posts);
        take(from, &mut posts, &mut sent, &mut awaited);
    }
    summed.len()
}

#[test]
fn pieces_of_all_shards_arrive_with_any_incast_factor() {
    for world_size in 2..=8 {
        for incast in 1..world_size {
            for pieces in 1..=5 {
                let case = format!("{world_size} ranks, incast {incast}, {pieces} pieces");
                assert_eq!(sums_finished(world_size, incast, pieces), world_size as usize, "{case}");
            }
        }
    }
}

/// The rank that owns the first shard of a bucket in collective `sequence`, as each rank sees it.
fn owner_of_first_shard(world_size: u32, sequence: u64) -> u32 {
    let bytes = 64 * world_size as usize;
    let owner_by = |rank: u32| {
        let transpose = Transpose::rotating(place(rank, world_size, sequence, 1), bytes, true);
        let mut owners = transpose.owners;
        owners.push(transpose.own);
        let first = owners.iter().find(|owner| owner.shard.start == 0).map(|owner| owner.rank);
        first.expect("somebody owns it")
    };
    let owner = owner_by(0);
    assert!((1..world_size).all(|rank| owner_by(rank) == owner), "ranks disagree about {sequence}");
    owner
}

// test of: ultima/rotating-responsibility
#[test]
fn no_rank_owns_a_part_of_a_bucket_more_often_than_others_however_many_buckets_a_step_has() {
    for world_size in [2, 3, 4, 7, 8, 16] {
        let rounds = 32;
        for buckets in (1..=world_size).chain([2 * world_size, 4 * world_size, 360]) {
            for bucket in [0, buckets - 1] {
                let mut owned = vec![0; world_size as usize];
                for step in 0..rounds * world_size {
                    let sequence = u64::from(step) * u64::from(buckets) + u64::from(bucket);
                    owned[owner_of_first_shard(world_size, sequence) as usize] += 1;
                }
                let case = format!("{world_size} ranks, bucket {bucket} of {buckets}: {owned:?}");
                // By chance 32 +- 5.6; a period in common with the step would leave ranks out.
                assert!(owned.iter().all(|times| (8..=60).contains(times)), "{case}");
            }
        }
    }
}

#[test]
fn of_as_many_collectives_as_ranks_each_gives_a_short_shard_to_another_rank() {
    for world_size in 1..=16 {
        for round in 0..20 {
            let sequences = round * world_size..(round + 1) * world_size;
            let owner = |sequence| owner_of_first_shard(world_size, u64::from(sequence));
            assert_eq!(sequences.map(owner).collect::<BTreeSet<_>>().len(), world_size as usize);
        }
    }
}
