//! All-gathers, reduce-scatters and broadcasts that are divided between several network threads of each rank.

use crate::common::dividing::{dividing, losing, reports, with};
use crate::common::{self, check_all_reduce, values, Broken, Tensor, PATIENCE};
use gradwire_engine::collectives::{
    Collective, DeliveryReport, Dtype, Given, OpError, Policy, ReduceOp, Request, Tags, View,
};
use gradwire_engine::{EngineConfig, GroupHandle, OpHandle, Security};
use std::sync::Arc;

const RANKS: usize = 3;
/// Of a row: with so many ranks three parts, and a rest that is no whole page.
const ROW: usize = (1 << 18) + 5;

/// What each rank calls: its own memory, and what it asks for.
struct Calls {
    tensors: Vec<Tensor>,
    others: Vec<Tensor>,
}

impl Calls {
    /// For each rank a tensor of `elems` elements that `fill` makes, and another one of `others` elements.
    fn new(elems: usize, others: usize, fill: impl Fn(usize, usize) -> f32) -> Self {
        let tensor = |rank| Tensor((0..elems).map(|i| fill(rank, i)).collect());
        let other = |_| Tensor(vec![-1.0; others]);
        Self { tensors: (0..RANKS).map(tensor).collect(), others: (0..RANKS).map(other).collect() }
    }

    fn submit(
        &mut self,
        groups: &[GroupHandle],
        request: impl Fn(usize, View, View) -> Request,
    ) -> Vec<OpHandle> {
        let memory = self.tensors.iter_mut().zip(&mut self.others);
        let calls = groups.iter().zip(memory).enumerate();
        calls
            .map(|(rank, (group, (tensor, other)))| {
                group.submit(request(rank, tensor.view(), other.view()), Box::new(())).unwrap()
            })
            .collect()
    }
}

fn exact(collective: Collective, input: View, output: View) -> Request {
    Request { input, output, ..Request::exact(collective, Dtype::F32, PATIENCE) }
}

fn row_of(tensor: &Tensor, rank: usize) -> &[f32] {
    &tensor.0[rank * ROW..(rank + 1) * ROW]
}

/// The element `i` of what `rank` has.
fn value(rank: usize, i: usize) -> f32 {
    (rank * 1_000_000 + i) as f32
}

fn assert_gathered(tensor: &Tensor) {
    for rank in 0..RANKS {
        assert!(row_of(tensor, rank).iter().enumerate().all(|(i, got)| *got == value(rank, i)), "row {rank}");
    }
}

#[test]
fn a_divided_all_gather_has_every_row_whole_and_one_report() {
    for (security, paths) in [(Security::Off, 1), (Security::On, 2)] {
        let (_engines, groups) = dividing(3, 3, &EngineConfig { security, paths, ..with(3) });
        let mut calls = Calls::new(ROW, RANKS * ROW, value);
        let ops = calls.submit(&groups, |_, input, output| exact(Collective::AllGather, input, output));
        for report in reports(&ops) {
            let sent = report.bytes_sent - report.bytes_retransmitted;
            assert_eq!((report.elems, sent), ((RANKS * ROW) as u64, (8 * ROW) as u64));
            assert_eq!((report.bytes_received, report.bytes_expected), ((8 * ROW) as u64, (8 * ROW) as u64));
        }
        calls.others.iter().for_each(assert_gathered);
    }
}

#[test]
fn a_divided_all_gather_in_place_keeps_its_own_row() {
    let (_engines, groups) = dividing(3, 2, &with(2));
    let own = |rank, i: usize| if i / ROW == rank { value(rank, i % ROW) } else { -1.0 };
    let mut calls = Calls::new(RANKS * ROW, 1, own);
    let rows: Vec<View> =
        calls.tensors.iter_mut().enumerate().map(|(rank, tensor)| view_of_row(tensor, rank)).collect();
    let ops = calls.submit(&groups, |rank, output, _| exact(Collective::AllGather, rows[rank], output));
    reports(&ops);
    calls.tensors.iter().for_each(assert_gathered);
}

fn view_of_row(tensor: &mut Tensor, rank: usize) -> View {
    tensor.view_within(rank * ROW..(rank + 1) * ROW)
}

/// The sum of element `i` of row `row` over all ranks, when each has [`values`].
fn sum(row: usize, i: usize) -> f32 {
    (RANKS * (RANKS + 1) / 2 * ((row * ROW + i) % 1_000)) as f32
}

#[test]
fn a_divided_reduce_scatter_has_exact_sums_also_in_place_and_of_halves() {
    let (_engines, groups) = dividing(3, 3, &with(3));
    let mut calls = Calls::new(RANKS * ROW, ROW, |_, _| 0.0);
    for in_place in [false, true] {
        calls.tensors.iter_mut().enumerate().for_each(|(rank, tensor)| tensor.0 = values(rank, RANKS * ROW));
        let rows: Vec<View> =
            calls.tensors.iter_mut().enumerate().map(|(rank, tensor)| view_of_row(tensor, rank)).collect();
        let ops = calls.submit(&groups, |rank, input, output| {
            exact(Collective::ReduceScatter, input, if in_place { rows[rank] } else { output })
        });
        for report in reports(&ops) {
            assert_eq!((report.elems, report.bytes_received), (ROW as u64, (8 * ROW) as u64));
        }
        for rank in 0..RANKS {
            let got = if in_place { row_of(&calls.tensors[rank], rank) } else { &calls.others[rank].0 };
            assert!(got.iter().enumerate().all(|(i, got)| *got == sum(rank, i)), "rank {rank}");
        }
    }
    let mut calls = Calls::new(RANKS * ROW, ROW, |_, i| halves(i, 1));
    let ops = calls.submit(&groups, |_, input, output| Request {
        dtype: Dtype::Bf16,
        ..exact(Collective::ReduceScatter, input, output)
    });
    assert!(reports(&ops).iter().all(|report| report.elems == 2 * ROW as u64));
    for (rank, other) in calls.others.iter().enumerate() {
        let expected = |i: usize| halves(rank * ROW + i, RANKS as u32).to_bits();
        assert!(other.0.iter().enumerate().all(|(i, got)| got.to_bits() == expected(i)), "rank {rank}");
    }
}

/// Two bfloat16 in the place of element `i`, so small numbers times `factor` that they are whole.
fn halves(i: usize, factor: u32) -> f32 {
    let half = |at: usize| (((at % 61) as u32 * factor) as f32).to_bits() >> 16;
    f32::from_bits(half(2 * i) | half(2 * i + 1) << 16)
}

#[test]
fn a_tolerant_reduce_scatter_is_divided_too_and_what_it_loses_is_within_its_bound_and_owed() {
    let (_engines, groups, policy) = losing();
    let mut lost = 0.0;
    for _ in 0..10 {
        let mut calls = Calls::new(RANKS * ROW, ROW, |rank, i| ((rank + 1) * (i % 1_000)) as f32);
        let mut residuals: Vec<Tensor> = (0..RANKS).map(|_| Tensor(vec![0.0; RANKS * ROW])).collect();
        let owed: Vec<View> = residuals.iter_mut().map(Tensor::view).collect();
        let importance = Some(Arc::new(Given::new(vec![true, false, true])) as _);
        let ops = calls.submit(&groups, |rank, input, output| Request {
            policy,
            residual: owed[rank],
            tags: Tags { importance: importance.clone(), ..Tags::default() },
            ..exact(Collective::ReduceScatter, input, output)
        });
        for (rank, report) in reports(&ops).iter().enumerate() {
            assert!(report.lost_share() <= 0.051, "{}", report.lost_share());
            lost += report.lost_share();
            assert_owes_what_is_reported(rank, &calls.tensors[rank], &residuals[rank], report);
        }
        for (row, other) in calls.others.iter().enumerate() {
            for (i, got) in other.0.iter().enumerate() {
                let owed: f32 = residuals.iter().map(|residual| residual.0[row * ROW + i]).sum();
                let exact = sum(row, i);
                assert!((got + owed - exact).abs() <= 1e-3 * exact.max(1.0), "{got} and {owed} of {exact}");
            }
        }
    }
    assert!(lost > 0.0, "nothing was lost at all");
}

/// Of the rows of others a rank owes what is reported, and nothing else.
fn assert_owes_what_is_reported(rank: usize, tensor: &Tensor, residual: &Tensor, report: &DeliveryReport) {
    let mut uncounted = vec![false; RANKS * ROW];
    for range in &report.uncounted {
        uncounted[range.start as usize..range.end as usize].fill(true);
    }
    for (i, (value, owed)) in tensor.0.iter().zip(&residual.0).enumerate() {
        if i / ROW != rank {
            assert_eq!(*owed, if uncounted[i] { *value } else { 0.0 }, "element {i} of rank {rank}");
        }
    }
}

#[test]
fn parts_of_a_reduce_scatter_are_on_further_network_threads() {
    let config = EngineConfig { mtu: Some(1_500), ..common::impatient() };
    let (_engines, groups) = dividing(3, 2, &config);
    let importance = Some(Arc::new(Broken { on: "gradwire-lane" }) as _);
    let mut calls = Calls::new(RANKS * ROW, ROW, |_, _| 1.0);
    let ops = calls.submit(&groups, |_, input, output| Request {
        policy: Policy::AUTO,
        reduce: ReduceOp::Avg,
        tags: Tags { importance: importance.clone(), ..Tags::default() },
        ..exact(Collective::ReduceScatter, input, output)
    });
    for op in &ops {
        let outcome = op.wait(Some(PATIENCE)).expect("ends in time");
        assert!(outcome.is_err(), "{outcome:?}");
    }
}

#[test]
fn a_divided_broadcast_reaches_all_from_any_root() {
    let (_engines, groups) = dividing(3, 3, &with(3));
    for root in 0..RANKS {
        let mut calls =
            Calls::new(RANKS * ROW, 1, |rank, i| if rank == root { value(rank, i) } else { -1.0 });
        let collective = Collective::Broadcast { root: root as u32 };
        let ops = calls.submit(&groups, |_, tensor, _| exact(collective.clone(), tensor, tensor));
        assert!(reports(&ops).iter().all(|report| report.elems == (RANKS * ROW) as u64));
        for tensor in &calls.tensors {
            assert!(tensor.0.iter().enumerate().all(|(i, got)| *got == value(root, i)), "root {root}");
        }
    }
}

#[test]
fn calls_of_all_kinds_in_flight_together_keep_apart() {
    let (_engines, groups) = dividing(3, 3, &with(3));
    let mut gathers = Calls::new(ROW, RANKS * ROW, value);
    let mut scatters = Calls::new(RANKS * ROW, ROW, |rank, i| ((rank + 1) * (i % 1_000)) as f32);
    let mut small = Calls::new(7, RANKS * 7, |rank, _| rank as f32);
    let mut ops = Vec::new();
    for _ in 0..4 {
        ops.extend(gathers.submit(&groups, |_, input, output| exact(Collective::AllGather, input, output)));
        ops.extend(small.submit(&groups, |_, input, output| exact(Collective::AllGather, input, output)));
        ops.extend(
            scatters.submit(&groups, |_, input, output| exact(Collective::ReduceScatter, input, output)),
        );
        reports(&ops);
        ops.clear();
        check_all_reduce(&groups, 1_000_000);
    }
    gathers.others.iter().for_each(assert_gathered);
    for (rank, other) in scatters.others.iter().enumerate() {
        assert!(other.0.iter().enumerate().all(|(i, got)| *got == sum(rank, i)), "rank {rank}");
    }
    let rows: Vec<f32> = (0..RANKS * 7).map(|i| (i / 7) as f32).collect();
    assert!(small.others.iter().all(|other| other.0 == rows));
}

#[test]
fn ranks_that_call_different_collectives_of_one_size_hear_of_it_at_once() {
    let (_engines, groups) = dividing(3, 2, &with(2));
    let mut calls = Calls::new(RANKS * ROW, ROW, |_, _| 1.0);
    let ops = calls.submit(&groups, |rank, long, short| match rank {
        0 => exact(Collective::AllGather, short, long),
        _ => exact(Collective::ReduceScatter, long, short),
    });
    for op in &ops {
        let outcome = op.wait(Some(PATIENCE / 2)).expect("long before the call's timeout");
        assert!(matches!(outcome, Err(OpError::Mismatch(_))), "{outcome:?}");
    }
}
