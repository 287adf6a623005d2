//! Whole collectives on memory alone: packets of all transfers come in any order, whole or not at all.

use super::*;
use crate::{Collective, DivideBy, Dtype, ReduceOp, Servers};
use gradwire_core::CloseReason;

const CHUNK_BYTES: usize = 128;

/// A packet under way: sender, receiver, transfer, and the bytes of it.
type Packet = (u32, u32, u32, Range<usize>);

/// A transfer under way: sender, receiver and index, packets that are not there, and what was lost of it.
struct Open {
    key: (u32, u32, u32),
    packets: usize,
    lost: Vec<Range<u64>>,
}

/// One collective on all ranks. Values are whole, so that every order of additions gives the same bits.
struct Ranks {
    ops: Vec<Op>,
    inputs: Vec<Vec<u8>>,
    outputs: Vec<Vec<u8>>,
    packets: Vec<Packet>,
    open: Vec<Open>,
    pool: Pool,
    chance: u64,
}

#[derive(Clone, Debug)]
struct Case {
    collective: Collective,
    dtype: Dtype,
    reduce: ReduceOp,
    world_size: u32,
    elems: usize,
    sequence: u64,
}

impl Case {
    fn algorithm(&self) -> Algorithm {
        match self.collective {
            Collective::AllReduce { algorithm } => algorithm,
            _ => Algorithm::Auto,
        }
    }

    /// Rows that a rank gives, and that it gets.
    fn rows(&self, rank: u32) -> (usize, usize) {
        match self.collective {
            Collective::ReduceScatter => (self.world_size as usize, 1),
            Collective::Reduce { root } => (1, usize::from(root == rank)),
            _ => (1, 1),
        }
    }

    fn value(&self, rank: u32, at: usize) -> f32 {
        ((at * 7 + rank as usize * 3) % 16) as f32 * self.world_size as f32
    }

    fn result(&self, at: usize) -> f32 {
        let sum: f32 = (0..self.world_size).map(|rank| self.value(rank, at)).sum();
        match self.reduce {
            ReduceOp::Avg => sum / self.world_size as f32,
            ReduceOp::PremulSum(factor) => sum * factor as f32,
            _ => sum,
        }
    }

    fn bytes(&self, elems: Range<usize>, value: impl Fn(usize) -> f32) -> Vec<u8> {
        let values: Vec<f32> = elems.map(value).collect();
        let mut bytes = vec![0; values.len() * self.dtype.bytes()];
        match self.dtype {
            Dtype::F32 => {
                bytes.chunks_mut(4).zip(values).for_each(|(b, v)| b.copy_from_slice(&v.to_le_bytes()))
            }
            Dtype::I64 => bytes
                .chunks_mut(8)
                .zip(values)
                .for_each(|(b, v)| b.copy_from_slice(&(v as i64).to_le_bytes())),
            half => crate::kernels::narrow(half, &values, &mut bytes),
        }
        bytes
    }
}

impl Ranks {
    fn new(case: &Case, seed: u64) -> Self {
        Self::with_values(case, seed, |rank, at| case.value(rank, at))
    }

    fn with_values(case: &Case, seed: u64, value: impl Fn(u32, usize) -> f32) -> Self {
        let mut ranks = Self {
            ops: Vec::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            packets: Vec::new(),
            open: Vec::new(),
            pool: Pool::default(),
            chance: seed,
        };
        for rank in 0..case.world_size {
            let (given, got) = case.rows(rank);
            ranks.inputs.push(case.bytes(0..given * case.elems, |at| value(rank, at)));
            ranks.outputs.push(vec![0; got * case.elems * case.dtype.bytes()]);
            let op = ranks.op(case, rank);
            ranks.ops.push(op);
        }
        for rank in 0..case.world_size {
            let mut posts = Vec::new();
            ranks.ops[rank as usize].start(&mut ranks.pool, &mut posts);
            ranks.send(rank, &posts);
        }
        ranks
    }

    fn op(&mut self, case: &Case, rank: u32) -> Op {
        let view = |bytes: &mut Vec<u8>| {
            // SAFETY: the vector is neither moved out nor resized, and nobody else touches it while the operation lives.
            unsafe { View::new(bytes.as_mut_ptr(), bytes.len()) }
        };
        let request = Request {
            input: view(&mut self.inputs[rank as usize]),
            output: view(&mut self.outputs[rank as usize]),
            reduce: case.reduce,
            policy: Policy { divide_by: DivideBy::Contributions, ..Policy::RELIABLE },
            ..Request::exact(case.collective.clone(), case.dtype, Duration::from_secs(1))
        };
        let place = Place {
            rank,
            world_size: case.world_size,
            sequence: case.sequence,
            chunk_bytes: CHUNK_BYTES,
            incast: case.world_size.max(2) - 1,
            servers: Servers::default(),
        };
        let name = Name {
            id: OpId(0),
            submitted: Timestamp::ZERO,
            point_to_point: None,
            rotation: None,
            links: None,
        };
        Op::new(request, case.algorithm(), place, name, &mut self.pool)
    }

    fn send(&mut self, from: u32, posts: &[Post]) {
        for post in posts {
            let Post::Send { to, index, range, .. } = post else { continue };
            let bytes = range.len();
            let grid = (0..bytes.max(1)).step_by(CHUNK_BYTES);
            let packets = grid.map(|at| (from, *to, *index, at..(at + CHUNK_BYTES).min(bytes)));
            self.packets.extend(packets);
            let packets = bytes.div_ceil(CHUNK_BYTES).max(1);
            self.open.push(Open { key: (from, *to, *index), packets, lost: Vec::new() });
        }
    }

    /// Delivers all; the packets that `is_lost` are not.
    fn run(&mut self, is_lost: impl Fn(&Packet) -> bool) {
        while !self.packets.is_empty() {
            self.chance = self.chance.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            let start = (self.chance >> 33) as usize % self.packets.len();
            let count = self.packets.len();
            let at = (start..start + count)
                .map(|at| at % count)
                .find(|at| self.is_expected(*at))
                .expect("a transfer under way is expected, or nothing will ever be");
            let packet = self.packets.swap_remove(at);
            self.deliver(&packet, is_lost(&packet));
        }
    }

    fn is_expected(&mut self, at: usize) -> bool {
        let (from, to, index, _) = self.packets[at].clone();
        self.ops[to as usize].receives.at(from, index).is_some()
    }

    fn deliver(&mut self, (from, to, index, bytes): &Packet, is_lost: bool) {
        let transfer = self.ops[*from as usize].transfer(*index, false);
        if !is_lost && !bytes.is_empty() {
            let sender = &mut self.ops[*from as usize];
            let (payload, weight) = sender.payload(*to, transfer, bytes.clone(), false).expect("it is open");
            let payload = payload.to_vec();
            let (least, most) = self.ops[*to as usize].weights_of(*from, *index);
            assert!((least..=most).contains(&weight), "{from} to {to}, transfer {index}: {weight}");
            self.ops[*to as usize].on_payload(*from, transfer, bytes.start, weight, &payload);
        }
        let at = self.open.iter().position(|open| open.key == (*from, *to, *index)).expect("it is open");
        self.open[at].packets -= 1;
        if is_lost {
            self.open[at].lost.push(bytes.start as u64..bytes.end as u64);
        }
        if self.open[at].packets == 0 {
            let open = self.open.swap_remove(at);
            self.conclude((*from, *to), transfer, open.lost);
        }
    }

    fn conclude(&mut self, (from, to): (u32, u32), transfer: TransferId, missing: Vec<Range<u64>>) {
        let receipt = Receipt {
            transfer,
            reason: CloseReason::AllArrived,
            received_bytes: 0,
            total_bytes: 0,
            waited_for_peer: Duration::ZERO,
            called_at: None,
            began_at: Timestamp::ZERO,
            elapsed: Duration::ZERO,
            deadline: None,
            missing: missing.clone(),
        };
        let mut posts = Vec::new();
        self.ops[to as usize].on_received((from, Duration::ZERO), &receipt, &mut posts);
        self.send(to, &posts);
        posts.clear();
        self.ops[from as usize].on_sent(
            to,
            &SendReceipt { transfer, missing, stage_us: 0, is_untaken: false },
            &mut posts,
        );
        self.send(from, &posts);
    }

    fn passed_again(&self) -> usize {
        self.ops.iter().map(|op| op.memory.passed_again).sum()
    }
}

fn cases() -> impl Iterator<Item = Case> {
    let all_reduce = |algorithm| Collective::AllReduce { algorithm };
    let collectives = [
        all_reduce(Algorithm::Ring),
        all_reduce(Algorithm::Transpose),
        all_reduce(Algorithm::HalvingDoubling),
        all_reduce(Algorithm::ParameterServer),
        all_reduce(Algorithm::OneShot),
        Collective::ReduceScatter,
        Collective::Reduce { root: 1 },
    ];
    let kinds = [
        (Dtype::F32, ReduceOp::Avg),
        (Dtype::F32, ReduceOp::PremulSum(0.5)),
        (Dtype::I64, ReduceOp::Avg),
        (Dtype::Bf16, ReduceOp::Avg),
    ];
    let large_reduces = kinds.into_iter().flat_map(|(dtype, reduce)| {
        [3, 4, 7].map(|world_size| Case {
            collective: Collective::Reduce { root: world_size / 2 },
            dtype,
            reduce,
            world_size,
            // The fewest that are gathered, of each dtype as many.
            elems: 32_768 * if world_size == 3 { 4 } else { world_size as usize - 1 } + 5,
            sequence: 0,
        })
    });
    let all = collectives.into_iter().flat_map(move |collective| {
        let kinds = kinds.into_iter().filter({
            let handed_on = [all_reduce(Algorithm::Ring), all_reduce(Algorithm::HalvingDoubling)];
            let in_halves = handed_on.contains(&collective);
            move |(dtype, _)| !in_halves || !dtype.is_half()
        });
        kinds.flat_map(move |(dtype, reduce)| {
            let collective = collective.clone();
            (2..=9).map(move |world_size| Case {
                collective: collective.clone(),
                dtype,
                reduce,
                world_size,
                // Shards that end within a packet, and one that is short.
                elems: 61 * world_size as usize + 5,
                sequence: u64::from(world_size) / 2,
            })
        })
    });
    all.chain(large_reduces)
}

// test of: report/streaming
#[test]
fn the_pass_that_adds_the_last_contribution_makes_the_result_and_there_is_no_other() {
    for (seed, case) in (0..).zip(cases()) {
        let mut ranks = Ranks::new(&case, seed);
        ranks.run(|_| false);
        for (rank, output) in (0..).zip(&ranks.outputs) {
            let first =
                if case.collective == Collective::ReduceScatter { rank as usize * case.elems } else { 0 };
            let (_, rows) = case.rows(rank);
            let want = case.bytes(first..first + rows * case.elems, |at| case.result(at));
            assert!(*output == want, "rank {rank} of {case:?}");
        }
        assert_eq!(ranks.passed_again(), 0, "bytes were passed over again in {case:?}");
        assert!(ranks.ops.iter().all(Op::is_complete), "{case:?}");
    }
}

// test of: auto/one-shot
#[test]
fn of_whom_a_packet_may_be_a_sum_all_agree() {
    let of = |algorithm| {
        let case = Case {
            collective: Collective::AllReduce { algorithm },
            dtype: Dtype::F32,
            reduce: ReduceOp::Sum,
            world_size: 4,
            elems: 400,
            sequence: 0,
        };
        let mut op = Ranks::new(&case, 1).ops.swap_remove(1);
        let of = |(from, index)| op.receives.at(from, index).is_some().then(|| op.weights_of(from, index));
        (0..4).flat_map(|from| (0..6).map(move |index| (from, index))).filter_map(of).collect::<Vec<_>>()
    };
    assert_eq!(of(Algorithm::Ring), [(1, 1), (1, 2), (0, 4)], "two steps and a result");
    let transpose = of(Algorithm::Transpose);
    assert!(transpose.contains(&(1, 1)) && !transpose.contains(&(0, u16::MAX)), "{transpose:?}");
    let uncounted = of(Algorithm::HalvingDoubling);
    assert!(uncounted.iter().all(|weights| *weights == (0, u16::MAX)), "{uncounted:?}");
}

#[test]
fn in_one_shot_every_rank_gets_the_same_bits_whatever_came_first() {
    let case = Case {
        collective: Collective::AllReduce { algorithm: Algorithm::OneShot },
        dtype: Dtype::F32,
        reduce: ReduceOp::Sum,
        world_size: 5,
        elems: 96,
        sequence: 0,
    };
    // 2^24 + 1 is 2^24 in float32, and 1 + 1 + 2^24 is more.
    let value = |rank: u32, at: usize| if at % 5 == rank as usize { 16_777_216.0 } else { 1.0 };
    let want = case.bytes(0..case.elems, |at| (1..5).fold(value(0, at), |sum, rank| sum + value(rank, at)));
    for seed in 0..20 {
        let mut ranks = Ranks::with_values(&case, seed, value);
        ranks.run(|_| false);
        assert!(
            ranks.outputs.iter().all(|output| *output == want),
            "by the order in which they came: {seed}"
        );
    }
}

fn elem(bytes: &[u8], at: usize) -> f32 {
    f32::from_le_bytes(bytes[4 * at..4 * at + 4].try_into().expect("four bytes"))
}

// test of: report/streaming
#[test]
fn only_blocks_that_loss_left_incomplete_are_passed_over_again() {
    for algorithm in [Algorithm::Ring, Algorithm::Transpose, Algorithm::ParameterServer] {
        let case = Case {
            collective: Collective::AllReduce { algorithm },
            dtype: Dtype::F32,
            reduce: ReduceOp::Avg,
            world_size: 4,
            elems: 4 * 96,
            sequence: 0,
        };
        let mut ranks = Ranks::new(&case, 7);
        // The second packet of the first contribution of rank 1, whoever it is for.
        let first = ranks.packets.iter().find(|(from, ..)| *from == 1).cloned().expect("it contributes");
        ranks.run(|(from, to, index, bytes)| {
            (*from, *to, *index) == (first.0, first.1, first.2) && bytes.start == CHUNK_BYTES
        });
        assert_eq!(ranks.passed_again(), CHUNK_BYTES, "{algorithm:?}");
        let whole = case.bytes(0..case.elems, |at| case.result(at));
        let wrong: Vec<usize> =
            (0..case.elems).filter(|at| elem(&ranks.outputs[0], *at) != elem(&whole, *at)).collect();
        assert!(
            wrong.len() <= CHUNK_BYTES / 4 && !wrong.is_empty(),
            "{algorithm:?}: {} elements",
            wrong.len()
        );
        for at in wrong {
            let without = (case.result(at) * 4.0 - case.value(1, at)) / 3.0;
            assert!(
                elem(&ranks.outputs[0], at).to_bits() == without.to_bits(),
                "{algorithm:?}, element {at}"
            );
        }
    }
}
