//! Tolerant reduce-scatter: what each rank keeps is the mean over what counted, and what did not count is owed by somebody: all of
//! a value by its sender, and less the mean for it by the owner of the row, who alone knows it.

use crate::common::{all_reduce, lossy, request, Fate, Net, Packet, Tensor, CHUNK_BYTES, NORMAL};
use gradwire_collectives::core::{Flags, Kind};
use gradwire_collectives::{
    Algorithm, Collective, DeliveryReport, DivideBy, Dtype, GatherRule, OpError, Policy, ReduceOp, Request,
    Rotation, View,
};

const CHUNK_ELEMS: usize = CHUNK_BYTES / 4;
const RANKS: u32 = 4;
/// 40 chunks and a short one: rows begin within a packet grid of the whole, and not on a cache line.
const ROW: usize = 40 * CHUNK_ELEMS + 13;
/// Not in any input: whoever reads it in a residual knows that nothing was written there.
const UNTOUCHED: f32 = -1.0;

/// Small integers that differ between ranks: every order of summation gives the same bits.
fn value(rank: u32, index: usize) -> f32 {
    (index % 5) as f32 + (rank * 16) as f32
}

#[derive(Clone, Copy)]
struct Setting {
    policy: Policy,
    reduce: ReduceOp,
    in_place: bool,
    feeds_back: bool,
}

const SETTING: Setting =
    Setting { policy: Policy::AUTO, reduce: ReduceOp::Avg, in_place: false, feeds_back: true };

struct Run {
    setting: Setting,
    inputs: Vec<Vec<f32>>,
    /// The rows that the ranks keep, one after the other.
    result: Vec<f32>,
    residuals: Vec<Vec<f32>>,
    reports: Vec<DeliveryReport>,
}

fn run(setting: Setting, net: Net) -> Run {
    let inputs = (0..RANKS).map(|rank| (0..RANKS as usize * ROW).map(|index| value(rank, index)).collect());
    run_of(setting, inputs.collect(), net)
}

fn run_of(setting: Setting, inputs: Vec<Vec<f32>>, mut net: Net) -> Run {
    let mut data: Vec<Tensor> = inputs.iter().map(|input| Tensor::f32(input.iter().copied())).collect();
    let mut outputs = vec![Tensor::f32(vec![0.0; ROW]); RANKS as usize];
    let mut residuals = vec![Tensor::f32(vec![UNTOUCHED; RANKS as usize * ROW]); RANKS as usize];
    for rank in 0..RANKS {
        let at = rank as usize;
        let input = data[at].view();
        let own = data[at].part(at * 4 * ROW..(at + 1) * 4 * ROW);
        let output = if setting.in_place { own } else { outputs[at].view() };
        let residual = if setting.feeds_back { residuals[at].view() } else { View::EMPTY };
        let Setting { policy, reduce, .. } = setting;
        let request = request(Collective::ReduceScatter);
        net.submit(rank, Request { input, output, residual, policy, reduce, ..request });
    }
    net.run_all(1);
    let rows = (0..RANKS as usize).flat_map(|at| {
        if setting.in_place {
            data[at].to_f32()[at * ROW..(at + 1) * ROW].to_vec()
        } else {
            outputs[at].to_f32()
        }
    });
    Run {
        setting,
        result: rows.collect(),
        inputs,
        residuals: residuals.iter().map(Tensor::to_f32).collect(),
        reports: (0..RANKS).map(|rank| net.report(rank).clone()).collect(),
    }
}

impl Run {
    fn counted(&self, index: usize) -> Vec<usize> {
        let counts = |rank: &usize| {
            let report = &self.reports[*rank];
            !report.uncounted.iter().any(|range| range.contains(&(index as u64)))
        };
        (0..RANKS as usize).filter(counts).collect()
    }

    /// Ranks in the result, and whether it divides by these alone.
    fn divisor(&self, index: usize) -> (usize, bool) {
        let count = self.counted(index).len();
        let half_are_missing = self.setting.feeds_back && 2 * count <= RANKS as usize;
        (count, self.setting.policy.divide_by == DivideBy::Contributions && !half_are_missing)
    }

    /// The naive reduction over the reports' mask, bit for bit, and to the last element what each rank owes.
    fn assert_as_naive(&self) {
        for (index, result) in self.result.iter().enumerate() {
            let counted = self.counted(index);
            assert!(counted.contains(&(index / ROW)), "its owner's own value counts, element {index}");
            let sum: f32 = counted.iter().map(|rank| self.inputs[*rank][index]).sum();
            let (ranks, (count, by_count)) = (RANKS as f32, self.divisor(index));
            let divisor = if by_count { count as f32 } else { ranks };
            let want = match self.setting.reduce {
                ReduceOp::Avg => sum / divisor,
                _ if divisor < ranks => sum * (f64::from(ranks) / f64::from(divisor)) as f32,
                _ => sum,
            };
            assert_eq!(result.to_bits(), want.to_bits(), "element {index}");
            for rank in 0..RANKS as usize {
                let mean = if self.setting.reduce == ReduceOp::Avg { 1.0 } else { 1.0 / f64::from(ranks) };
                let missing = RANKS as usize - count;
                let owed = match rank {
                    _ if !self.setting.feeds_back => UNTOUCHED,
                    _ if rank == index / ROW && missing > 0 && by_count => {
                        0.0 - (missing as f64 * mean) as f32 * want
                    }
                    _ if counted.contains(&rank) => UNTOUCHED,
                    _ => self.inputs[rank][index],
                };
                assert_eq!(self.residuals[rank][index], owed, "residual of {rank} at {index}");
            }
        }
    }

    fn owed(&self, rank: usize, index: usize) -> f32 {
        Some(self.residuals[rank][index]).filter(|value| *value != UNTOUCHED).unwrap_or_default()
    }

    fn uncounted(&self) -> u64 {
        self.reports.iter().flat_map(|report| &report.uncounted).map(|range| range.end - range.start).sum()
    }
}

/// Loses the first transmission of data where `lose` says so.
fn lose_chunks(lose: impl Fn(&Packet, usize) -> bool + 'static) -> impl FnMut(&Packet) -> Fate {
    move |packet| {
        let header = &packet.header;
        let first = header.kind == Kind::Data && !header.flags.contains(Flags::RETRANSMITTED);
        if first && lose(packet, header.offset as usize / CHUNK_BYTES) {
            return Fate::Drop;
        }
        NORMAL
    }
}

/// Every combination of what a caller may ask for.
fn settings() -> impl Iterator<Item = Setting> {
    (0..16).map(|bits: u32| Setting {
        reduce: if bits & 1 == 0 { ReduceOp::Avg } else { ReduceOp::Sum },
        policy: Policy {
            loss_bound: 0.1,
            divide_by: if bits & 2 == 0 { DivideBy::Contributions } else { DivideBy::World },
            ..Policy::AUTO
        },
        in_place: bits & 4 == 0,
        feeds_back: bits & 8 == 0,
    })
}

// test of: mlt/mean-over-contributions, auto/error-feedback
#[test]
fn of_whatever_is_missing_the_mean_is_over_what_counted_and_somebody_owes_the_rest() {
    for setting in settings() {
        // Of every row chunk 5 comes from its owner alone, chunk 6 from two ranks, chunk 7 from three: a tenth may be missing.
        let lost = |packet: &Packet, chunk: usize| {
            let distance = (packet.from + RANKS - packet.to) % RANKS;
            (5..8).contains(&chunk) && distance <= 8 - chunk as u32
        };
        let run = run(setting, Net::new(RANKS, lose_chunks(lost)));
        run.assert_as_naive();
        assert_eq!(run.uncounted(), u64::from(RANKS) * 6 * CHUNK_ELEMS as u64);
        for (rank, report) in run.reports.iter().enumerate() {
            assert_eq!(report.collective, "reduce_scatter");
            assert_eq!((report.contributors_least, report.contributors), (1, RANKS as u16));
            assert_eq!(report.elems, ROW as u64);
            assert_eq!(report.bytes_expected - report.bytes_received, 6 * CHUNK_BYTES as u64);
            assert!(report.peers.iter().all(|peer| peer.closed_by == "bound_met"), "{:?}", report.peers);
            assert_eq!(report.sources.len(), 0, "rank {rank} was sent a result");
        }
    }
}

// test of: report/streaming
#[test]
fn every_seed_gives_the_naive_mean_over_what_counted() {
    const MLT: Policy = Policy { gather: GatherRule::EXACT, ..Policy::MLT };
    let mut lost = 0;
    for seed in 0..12 {
        let policy = if seed % 2 == 0 { Policy::AUTO } else { MLT };
        let setting = Setting { policy, in_place: seed % 3 == 0, feeds_back: seed % 4 < 2, ..SETTING };
        let net = if seed % 5 == 0 {
            Net::with_incast(RANKS, Some(1), lossy(seed, 3))
        } else {
            Net::new(RANKS, lossy(seed, 1 + seed % 4))
        };
        let run = run(setting, net);
        run.assert_as_naive();
        assert!(run.reports.iter().all(|report| report.lost_share() <= 0.2 + 1e-9));
        lost += run.uncounted();
    }
    assert!(lost > 0, "no seed lost anything: the test proves nothing");
}

// test of: auto/error-feedback
#[test]
fn over_many_steps_every_gradient_counts_once_however_few_ranks_are_in_a_mean() {
    // Of the first three chunks all but the owner's are always lost, of the fourth those of one rank.
    let lost =
        |packet: &Packet, chunk: usize| chunk < 3 || chunk == 3 && (packet.from + 1) % RANKS == packet.to;
    let setting = Setting { policy: Policy { loss_bound: 0.1, ..Policy::AUTO }, ..SETTING };
    let steps = 8;
    let gradients: Vec<Vec<f32>> =
        (0..RANKS).map(|rank| (0..RANKS as usize * ROW).map(|index| value(rank, index)).collect()).collect();
    let mut applied = vec![0.0_f64; RANKS as usize * ROW];
    let mut inputs = gradients.clone();
    for _ in 0..steps {
        let run = run_of(setting, inputs, Net::new(RANKS, lose_chunks(lost)));
        applied.iter_mut().zip(&run.result).for_each(|(sum, mean)| *sum += f64::from(*mean));
        let next = |rank: usize| {
            gradients[rank].iter().enumerate().map(|(at, g)| g + run.owed(rank, at)).collect::<Vec<f32>>()
        };
        inputs = (0..RANKS as usize).map(next).collect();
    }
    for index in 0..applied.len() {
        let given: f64 = gradients.iter().map(|of| f64::from(of[index]) * f64::from(steps)).sum();
        let owed: f64 =
            (0..RANKS as usize).map(|rank| f64::from(inputs[rank][index] - gradients[rank][index])).sum();
        let held = f64::from(RANKS) * applied[index] + owed;
        // Each step rounds a mean, what is owed for it and the next input, none larger than all that was given.
        let rounding = f64::from(steps) * 3.0 * f64::from(RANKS) * given * f64::from(f32::EPSILON);
        assert!((held - given).abs() <= rounding, "element {index}: {held} of {given}");
        let largest = (0..RANKS as usize).map(|rank| inputs[rank][index].abs()).fold(0.0, f32::max);
        assert!(
            f64::from(largest) <= given,
            "element {index}: {largest} is owed, all that was given is {given}"
        );
    }
}

#[test]
fn it_sends_half_of_what_an_all_reduce_sends() {
    let mut scattering = run(SETTING, Net::perfect(RANKS)).reports;
    let mut data = vec![Tensor::f32(vec![1.0; RANKS as usize * ROW]); RANKS as usize];
    let mut net = Net::perfect(RANKS);
    for rank in 0..RANKS {
        let request = all_reduce(&mut data[rank as usize], Algorithm::Transpose);
        net.submit(rank, Request { policy: Policy::AUTO, reduce: ReduceOp::Avg, ..request });
    }
    net.run_all(1);
    let sent: u64 = scattering.drain(..).map(|report| report.bytes_sent).sum();
    let all_reduced: u64 = (0..RANKS).map(|rank| net.report(rank).bytes_sent).sum();
    assert_eq!((2 * sent, sent), (all_reduced, 12 * 4 * ROW as u64));
}

#[test]
fn halves_are_averaged_in_float32_over_what_counted_and_owed_in_halves() {
    let mut net = Net::new(3, lose_chunks(|packet, chunk| packet.from == 1 && packet.to == 0 && chunk == 7));
    let bf16 = |value: f32| value.to_le_bytes()[2..].to_vec();
    let row_bytes = 40 * CHUNK_BYTES;
    let mut tensors: Vec<Tensor> =
        [1.0, 3.0, 4.0].into_iter().map(|value| Tensor(bf16(value).repeat(3 * row_bytes / 2))).collect();
    let mut outputs = vec![Tensor(vec![0; row_bytes]); 3];
    let mut residuals = vec![Tensor(vec![0; 3 * row_bytes]); 3];
    for rank in 0..3_u32 {
        let at = rank as usize;
        let (input, output, residual) = (tensors[at].view(), outputs[at].view(), residuals[at].view());
        let (dtype, reduce, policy) = (Dtype::Bf16, ReduceOp::Avg, Policy::AUTO);
        let request = request(Collective::ReduceScatter);
        net.submit(rank, Request { dtype, input, output, residual, reduce, policy, ..request });
    }
    net.run_all(1);
    let chunk = |of: &Tensor, at: usize| of.0[at * CHUNK_BYTES..(at + 1) * CHUNK_BYTES].to_vec();
    let repeated = |value: f32| bf16(value).repeat(CHUNK_BYTES / 2);
    assert_eq!(chunk(&outputs[0], 7), repeated(2.5), "of ranks 0 and 2");
    assert_eq!(chunk(&residuals[0], 7), repeated(-2.5), "what stood in for rank 1");
    assert_eq!(chunk(&residuals[1], 7), repeated(3.0), "what rank 1 sent in vain");
    let written =
        residuals.iter().map(|of| of.0.chunks(CHUNK_BYTES).filter(|c| c.iter().any(|b| *b != 0)).count());
    assert_eq!(written.sum::<usize>(), 2);
}

// test of: auto/error-feedback
#[test]
fn what_is_not_finite_is_owed_by_nobody() {
    let lost = |packet: &Packet, chunk: usize| {
        packet.to == 0 && (packet.from, chunk) != (3, 8) && (7..9).contains(&chunk) && packet.from > 1
    };
    let mut inputs = vec![vec![1.0; RANKS as usize * ROW]; RANKS as usize];
    inputs[2][7 * CHUNK_ELEMS..8 * CHUNK_ELEMS].fill(f32::INFINITY);
    inputs[0][8 * CHUNK_ELEMS..9 * CHUNK_ELEMS].fill(f32::INFINITY);
    let policy = Policy { loss_bound: 0.1, ..Policy::AUTO };
    let run = run_of(Setting { policy, ..SETTING }, inputs, Net::new(RANKS, lose_chunks(lost)));
    assert!(run.uncounted() > 0);
    assert!(run.residuals.iter().flatten().all(|value| value.is_finite()));
    assert!(run.residuals[2][7 * CHUNK_ELEMS..8 * CHUNK_ELEMS].iter().all(|value| *value == 0.0), "infinity");
    assert!(
        run.residuals[2][8 * CHUNK_ELEMS..9 * CHUNK_ELEMS].iter().all(|value| *value == 1.0),
        "finite beside it"
    );
    assert!(run.residuals[0][8 * CHUNK_ELEMS..9 * CHUNK_ELEMS].iter().all(|value| *value == 0.0), "its mean");
}

fn ends_with(change: impl Fn(u32, &mut Request)) -> OpError {
    let mut net = Net::perfect(2);
    let mut data = vec![Tensor::f32(vec![1.0; 2000]); 2];
    let mut outputs = vec![Tensor::f32(vec![1.0; 1000]); 2];
    for rank in 0..2 {
        let (input, output) = (data[rank as usize].view(), outputs[rank as usize].view());
        let mut request =
            Request { input, output, policy: Policy::AUTO, ..request(Collective::ReduceScatter) };
        change(rank, &mut request);
        net.submit(rank, request);
    }
    net.run_all(1);
    net.error(1).clone()
}

#[test]
fn ranks_that_disagree_about_error_feedback_are_told_so() {
    let mut residual = Tensor::f32(vec![0.0; 2000]);
    let view = residual.view();
    let error = ends_with(|rank, request| {
        if rank == 1 {
            request.residual = view;
        }
    });
    assert!(matches!(error, OpError::Mismatch(_)), "{error}");
    assert!(error.to_string().contains("with error feedback"), "{error}");
}

#[test]
fn what_a_reduce_scatter_cannot_do_is_refused() {
    let mut short = Tensor::f32(vec![0.0; 1000]);
    let view = short.view();
    for (change, word) in [
        (
            Box::new(|r: &mut Request| r.policy = Policy::DLCP) as Box<dyn Fn(&mut Request)>,
            "gather_loss_bound",
        ),
        (Box::new(|r: &mut Request| r.policy.rotation = Rotation::On), "hadamard"),
        (Box::new(|r: &mut Request| r.dtype = Dtype::I32), "cannot tolerate loss"),
        (Box::new(move |r: &mut Request| r.residual = view), "residual of 4000 bytes"),
    ] {
        let error = ends_with(|_, request| change(request));
        assert!(error.to_string().contains(word), "{error}");
    }
}
