//! What the presets `dlcp`, `ltp` and `ultima` promise of whole reductions, on networks that lose.
//!
//! Every result is compared with the mean over exactly those contributions that the reports call counted.

use crate::common::{all_reduce, lossy, scatter, Fate, Net, Packet, Tensor, CHUNK_BYTES, NORMAL};
use gradwire_collectives::core::{Flags, Kind, Timestamp};
use gradwire_collectives::{
    Algorithm, DeadlineRule, DeliveryReport, Dtype, EarlyRule, Fill, GatherRule, OpError, PeerDelivery,
    Policy, ReduceOp, Request,
};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

const RANKS: u32 = 4;
const CHUNK_ELEMS: usize = CHUNK_BYTES / 4;
/// 40 chunks for each shard.
const ELEMS: usize = RANKS as usize * 40 * CHUNK_ELEMS;

/// Small integers that differ between ranks: every order of summation gives the same bits.
fn value(rank: u32, index: usize) -> f32 {
    (index % 5) as f32 + (rank * 16) as f32
}

/// One reduction as every rank saw it.
struct Round {
    results: Vec<Vec<f32>>,
    residuals: Vec<Vec<f32>>,
    reports: Vec<DeliveryReport>,
}

impl Round {
    fn counts(&self, rank: u32, index: usize) -> bool {
        !self.reports[rank as usize].uncounted.iter().any(|range| range.contains(&(index as u64)))
    }

    fn mean(&self, index: usize) -> f32 {
        let counted: Vec<u32> = (0..RANKS).filter(|rank| self.counts(*rank, index)).collect();
        counted.iter().map(|rank| value(*rank, index)).sum::<f32>() / counted.len() as f32
    }

    fn is_filled(&self, rank: usize, index: usize) -> bool {
        self.reports[rank].filled.iter().any(|range| range.contains(&(index as u64)))
    }

    /// The mean over what counted, the same bits on every rank that the result reached, and zero elsewhere.
    fn assert_exact_mask(&self) {
        for index in 0..self.results[0].len() {
            let mean = self.mean(index);
            for (rank, result) in self.results.iter().enumerate() {
                let want = if self.is_filled(rank, index) { 0.0 } else { mean };
                assert_eq!(result[index].to_bits(), want.to_bits(), "element {index}");
            }
        }
    }

    fn uncounted(&self) -> usize {
        self.reports.iter().map(|report| report.uncounted.len()).sum()
    }
}

/// What the outputs hold before a call.
const BEFORE: f32 = 500.0;

/// Runs one mean of `elems` elements under `policy`.
fn round(net: &mut Net, policy: Policy, elems: usize) -> Round {
    let mut tensors: Vec<Tensor> =
        (0..RANKS).map(|rank| Tensor::f32((0..elems).map(|index| value(rank, index)))).collect();
    let all = |value: f32| -> Vec<Tensor> { (0..RANKS).map(|_| Tensor::f32(vec![value; elems])).collect() };
    let (mut outputs, mut residuals) = (all(BEFORE), all(0.0));
    let before = net.done[0].len();
    for (rank, tensor) in (0..RANKS).zip(&mut tensors) {
        let (output, residual) = (outputs[rank as usize].view(), residuals[rank as usize].view());
        let request = all_reduce(tensor, Algorithm::Auto);
        net.submit(rank, Request { policy, reduce: ReduceOp::Avg, output, residual, ..request });
    }
    net.run_all(before + 1);
    let last = |rank: u32| net.done[rank as usize].values().last().expect("it has ended");
    let reports = (0..RANKS).map(|rank| last(rank).clone().expect("it ended well")).collect();
    let values = |tensors: &[Tensor]| tensors.iter().map(Tensor::to_f32).collect();
    Round { results: values(&outputs), residuals: values(&residuals), reports }
}

fn is_reduce_data(packet: &Packet) -> bool {
    packet.header.kind == Kind::Data && packet.header.transfer.index() == 0
}

/// Loses `percent` of the data in the reduce stage and delays the rest by 50 us.
fn lossy_reduce(percent: u64) -> impl FnMut(&Packet) -> Fate {
    let mut count = 0;
    move |packet| {
        count += 1;
        if is_reduce_data(packet) && scatter(count, 100) < percent {
            Fate::Drop
        } else {
            NORMAL
        }
    }
}

// test of: ltp/early-close, ltp/critical-packets
#[test]
fn ltp_closes_early_and_never_with_less_than_its_data_percentage_or_without_its_critical_packets() {
    let mut net = Net::new(RANKS, lossy_reduce(8));
    let mut early = 0;
    for number in 0..30 {
        let round = round(&mut net, Policy::LTP, ELEMS);
        round.assert_exact_mask();
        for report in &round.reports {
            for peer in &report.peers {
                let share = peer.elems_received as f64 / peer.elems_expected as f64;
                assert!(peer.closed_by != "deadline", "{peer:?}");
                assert!(
                    share >= 0.8 - 1e-9 && (share == 1.0 || peer.closed_by == "soft_threshold"),
                    "{peer:?}"
                );
                early += usize::from(peer.closed_by == "soft_threshold");
            }
            for range in &report.uncounted {
                let first = range.start as usize / CHUNK_ELEMS % 40;
                let last = (range.end as usize - 1) / CHUNK_ELEMS % 40;
                assert!(
                    first != 0 && last != 39,
                    "round {number}: a critical packet of {range:?} did not count"
                );
            }
        }
    }
    assert!(early > 0, "nothing closed early: the test proves nothing");
}

#[test]
fn ltp_loses_nothing_before_a_link_has_been_measured() {
    let mut net = Net::new(RANKS, lossy_reduce(8));
    let policy = Policy {
        soft: Policy::LTP.soft.map(|soft| gradwire_collectives::SoftRule { epoch: 1, ..soft }),
        ..Policy::LTP
    };
    for _ in 0..4 {
        round(&mut net, policy, ELEMS).assert_exact_mask();
    }
}

/// Rank 2's link is the slowest, rank 1's loses every other packet whenever it is sent.
// test of: ltp/early-close
#[test]
fn a_link_that_loses_half_ends_at_the_threshold_of_the_slowest_link_and_c_more() {
    for margin in [30, 100].map(Duration::from_millis) {
        let deadline = DeadlineRule::SlowestLink { margin };
        let policy = Policy { deadline, ..Policy::LTP };
        let on = Rc::new(Cell::new(false));
        let loses = Rc::clone(&on);
        let mut net = Net::new(RANKS, move |packet| {
            let chunk = packet.header.offset / CHUNK_BYTES as u32;
            match (packet.header.kind, packet.from, packet.to) {
                // The first and the last packet are critical.
                (Kind::Data, 1, 0)
                    if loses.get() && is_reduce_data(packet) && chunk % 2 == 1 && chunk < 39 =>
                {
                    Fate::Drop
                }
                (Kind::Data, 2, 0) => Fate::Deliver(Duration::from_micros(u64::from(100 * (1 + chunk)))),
                _ => NORMAL,
            }
        });
        let mut shortest = [Duration::MAX; RANKS as usize];
        for _ in 0..3 {
            let report = round(&mut net, policy, ELEMS).reports.swap_remove(0);
            for peer in report.peers.iter().chain(&report.sources) {
                if peer.closed_by == "all_arrived" {
                    let shortest = &mut shortest[peer.rank as usize];
                    *shortest = (*shortest).min(peer.network_time);
                }
            }
        }
        on.set(true);
        let round = round(&mut net, policy, ELEMS);
        round.assert_exact_mask();
        let lossy = round.reports[0].peers.iter().find(|peer| peer.rank == 1).expect("a peer of the stage");
        assert_eq!((lossy.closed_by, lossy.elems_received), ("deadline", 21 * CHUNK_ELEMS as u64), "of 40");
        let slowest = shortest[1..].iter().max().expect("three links");
        assert_eq!(lossy.network_time, *slowest + margin, "{shortest:?}");
    }
}

/// What left the ranks as data of the reduce stage, by whether it was sent again.
type Sent = Rc<RefCell<[u64; 2]>>;

fn counting(sent: &Sent, mut fate: impl FnMut(&Packet) -> Fate) -> impl FnMut(&Packet) -> Fate {
    let sent = Rc::clone(sent);
    move |packet| {
        if is_reduce_data(packet) {
            sent.borrow_mut()[usize::from(packet.header.flags.contains(Flags::RETRANSMITTED))] += 1;
        }
        fate(packet)
    }
}

// test of: ultima/best-effort, ultima/t-b, ultima/early-timeout
#[test]
fn ultima_is_exact_while_it_warms_up_and_then_sends_nothing_again_in_bounded_time() {
    let sent = Sent::default();
    let mut net = Net::new(RANKS, counting(&sent, lossy_reduce(5)));
    for _ in 0..20 {
        let round = round(&mut net, Policy::ULTIMA, ELEMS);
        round.assert_exact_mask();
        assert_eq!(round.uncounted(), 0);
        assert!(round.reports.iter().all(|report| report.warm_up && report.reduce_ended_by == "all_arrived"));
    }
    let again = sent.borrow()[1];
    assert!(again > 0, "nothing was lost: the test proves nothing");
    let mut reasons = [0; 3];
    for _ in 0..20 {
        let round = round(&mut net, Policy::ULTIMA, ELEMS);
        round.assert_exact_mask();
        for report in &round.reports {
            assert!(!report.warm_up && report.gather_ended_by == "all_arrived");
            for peer in &report.peers {
                match peer.closed_by {
                    "all_arrived" => reasons[0] += 1,
                    "early_timeout" => reasons[1] += 1,
                    "deadline" => reasons[2] += 1,
                    other => panic!("closed by {other}"),
                }
                assert!(peer.closed_by == "all_arrived" || peer.elems_received < peer.elems_expected);
            }
        }
    }
    assert_eq!(sent.borrow()[1], again, "best effort sent something again");
    assert!(reasons[0] > 0 && reasons[1] > 0, "{reasons:?}");
}

// test of: ultima/best-effort, ultima/t-b, ultima/early-timeout
#[test]
fn results_under_ultima_are_never_sent_again_either_and_what_is_missing_is_zero() {
    let again = Rc::new(Cell::new(0));
    let (sent, lost) = (Rc::clone(&again), Rc::new(Cell::new(0)));
    let count = Rc::clone(&lost);
    let (mut net, policy) = warm(move |packet| {
        let is_result = packet.header.kind == Kind::Data && packet.header.transfer.index() == 1;
        sent.set(sent.get() + u32::from(is_result && packet.header.flags.contains(Flags::RETRANSMITTED)));
        count.set(count.get() + 1);
        is_result && scatter(count.get(), 100) < 5
    });
    let mut reasons = BTreeSet::new();
    for _ in 0..10 {
        let round = round(&mut net, policy, ELEMS);
        round.assert_exact_mask();
        assert_eq!(round.uncounted(), 0, "the other stage loses nothing");
        for report in &round.reports {
            assert!(!report.replicas_identical && report.elapsed < Duration::from_millis(50));
            for source in &report.sources {
                reasons.insert(source.closed_by);
                assert!(source.closed_by == "all_arrived" || source.elems_received < source.elems_expected);
            }
            let of = |elems: fn(&PeerDelivery) -> u64| report.sources.iter().map(elems).sum::<u64>();
            let filled: u64 = report.filled.iter().map(|range| range.end - range.start).sum();
            assert_eq!(filled, of(|source| source.elems_expected) - of(|source| source.elems_received));
        }
    }
    assert_eq!(again.get(), 0, "best effort sent a result again");
    assert!(reasons.contains("all_arrived") && reasons.contains("early_timeout"), "{reasons:?}");
}

// test of: mlt/lossy-pull
#[test]
fn results_under_mlt_are_waited_for_down_to_its_one_bound() {
    let mut net = Net::new(RANKS, lossy(8, 3));
    let mut filled = 0;
    for _ in 0..10 {
        let round = round(&mut net, Policy::MLT, ELEMS);
        round.assert_exact_mask();
        for report in &round.reports {
            for source in &report.sources {
                let needed = source.elems_expected as f64 * 0.9;
                assert!(source.elems_received as f64 >= needed, "{source:?}");
            }
            filled += report.filled.len();
        }
    }
    assert!(filled > 0, "no result was lost: the test proves nothing");
}

/// How long something was under way in each stage. Its transfers do not begin at the same moment.
fn stage_times(report: &DeliveryReport) -> [Duration; 2] {
    [&report.peers, &report.sources].map(|stage| {
        let mut spans: Vec<_> = stage.iter().map(|peer| (peer.began_at, peer.ended_at)).collect();
        assert!(!spans.is_empty(), "nobody has sent");
        spans.sort_unstable();
        let (mut time, mut until) = (Duration::ZERO, spans[0].0);
        for (began_at, ended_at) in spans {
            time += ended_at.since(until.max(began_at));
            until = until.max(ended_at);
        }
        time
    })
}

/// What a rank has at the end of its warm-up: its own times, and those of the others but for the last round, which they tell
/// in the next one.
// test of: ultima/t-b
#[test]
fn the_limit_is_the_95th_percentile_of_the_times_that_the_stages_took_on_all_ranks() {
    let on = Rc::new(Cell::new(false));
    let cut = Rc::clone(&on);
    let mut lossy = lossy_reduce(5);
    let mut net = Net::new(RANKS, move |packet| {
        let header = &packet.header;
        let is_about_it = matches!(header.kind, Kind::Data | Kind::Probe) && header.transfer.index() == 0;
        // One packet begins the transfer; that is all, not even the word that all has been sent.
        let is_first = header.kind == Kind::Data && header.offset == 0;
        match cut.get() {
            true if is_about_it && (packet.from, packet.to) == (1, 0) && !is_first => Fate::Drop,
            true => NORMAL,
            // Ranks differ, and so do rounds.
            false if packet.to == 3 && is_reduce_data(packet) => Fate::Deliver(Duration::from_micros(
                50 + scatter(u64::from(packet.header.transfer.op()), 9)
                    * u64::from(packet.header.offset / 50),
            )),
            false => lossy(packet),
        }
    });
    let mut times = Vec::new();
    for number in 0..20 {
        let round = round(&mut net, Policy::ULTIMA, ELEMS);
        let of_others = round.reports[1..].iter().filter(|_| number < 19).flat_map(stage_times);
        // They are told in microseconds.
        times.extend(of_others.map(|time| Duration::from_micros(time.as_micros() as u64)));
        times.extend(stage_times(&round.reports[0]));
    }
    times.sort_unstable();
    assert_eq!(times.len(), 2 * 20 + 3 * 2 * 19);
    on.set(true);
    let round = round(&mut net, Policy::ULTIMA, ELEMS);
    let cut_off = round.reports[0].peers.iter().find(|peer| peer.rank == 1).expect("a peer of the stage");
    let limit = times[(times.len() * 95).div_ceil(100) - 1];
    assert_eq!((cut_off.closed_by, cut_off.network_time), ("deadline", limit));
}

/// Warmed up with two rounds, on a network that loses what `lose` says after that.
fn warm(lose: impl Fn(&Packet) -> bool + 'static) -> (Net, Policy) {
    let on = Rc::new(RefCell::new(false));
    let switch = Rc::clone(&on);
    let mut net =
        Net::new(RANKS, move |packet| if *switch.borrow() && lose(packet) { Fate::Drop } else { NORMAL });
    let policy = Policy { deadline: DeadlineRule::WarmUp { rounds: 2, percentile: 0.95 }, ..Policy::ULTIMA };
    for _ in 0..2 {
        assert_eq!(round(&mut net, policy, ELEMS).uncounted(), 0);
    }
    *on.borrow_mut() = true;
    (net, policy)
}

#[test]
fn a_round_of_which_everything_is_lost_still_ends() {
    let (mut net, policy) = warm(|packet| is_reduce_data(packet) && packet.from == 1);
    for _ in 0..3 {
        let round = round(&mut net, policy, ELEMS);
        round.assert_exact_mask();
        for report in
            round.reports.iter().enumerate().filter(|(rank, _)| *rank != 1).map(|(_, report)| report)
        {
            let peer = report.peers.iter().find(|peer| peer.rank == 1).expect("a peer of the stage");
            assert_eq!(peer.elems_received, 0);
            assert!(["early_timeout", "deadline"].contains(&peer.closed_by), "{}", peer.closed_by);
            assert!(report.elapsed < Duration::from_millis(50), "{:?}", report.elapsed);
        }
    }
}

// test of: ultima/last-percentile, ultima/early-timeout
#[test]
fn one_lost_packet_does_not_cost_the_whole_limit() {
    let (mut net, policy) =
        warm(|packet| is_reduce_data(packet) && packet.header.offset == 5 * CHUNK_BYTES as u32);
    let round = round(&mut net, policy, ELEMS);
    for report in &round.reports {
        assert_eq!(report.reduce_ended_by, "early_timeout");
        assert!(report
            .peers
            .iter()
            .all(|peer| peer.elems_received + CHUNK_ELEMS as u64 == peer.elems_expected));
    }
}

#[test]
fn many_reductions_in_flight_wait_for_the_warm_up_and_then_end() {
    let mut net = Net::new(RANKS, lossy(3, 3));
    let policy = Policy { deadline: DeadlineRule::WarmUp { rounds: 3, percentile: 0.95 }, ..Policy::ULTIMA };
    let mut tensors: Vec<Vec<Tensor>> = (0..12)
        .map(|_| (0..RANKS).map(|rank| Tensor::f32((0..ELEMS).map(|index| value(rank, index)))).collect())
        .collect();
    for bucket in &mut tensors {
        for (rank, tensor) in (0..RANKS).zip(bucket) {
            let request = all_reduce(tensor, Algorithm::Auto);
            net.submit(rank, Request { policy, reduce: ReduceOp::Avg, ..request });
        }
    }
    net.run_all(12);
    for (number, bucket) in tensors.iter().enumerate() {
        let nth = |rank: u32| net.done[rank as usize].values().nth(number).expect("all have ended");
        let reports: Vec<DeliveryReport> =
            (0..RANKS).map(|rank| nth(rank).clone().expect("it ended well")).collect();
        assert!(reports.iter().all(|report| report.warm_up == (number < 3)));
        let results = bucket.iter().map(Tensor::to_f32).collect();
        Round { results, residuals: Vec::new(), reports }.assert_exact_mask();
    }
}

#[test]
fn whole_numbers_are_never_lossy_whatever_the_preset() {
    for (name, policy) in Policy::PRESETS {
        let mut net = Net::perfect(2);
        let mut tensor = Tensor(vec![0; 4000]);
        let request = all_reduce(&mut tensor, Algorithm::Auto);
        let op = net.submit(0, Request { dtype: Dtype::I32, policy, ..request });
        net.run_for(Duration::from_millis(1));
        let refused = matches!(net.done[0].get(&op), Some(Err(OpError::Invalid(_))));
        assert_eq!(refused, name != "reliable", "{name}");
    }
}

#[test]
fn best_effort_without_an_end_that_all_ranks_know_is_refused() {
    for policy in [
        Policy { deadline: DeadlineRule::Never, ..Policy::ULTIMA },
        Policy { deadline: DeadlineRule::Measured { factor: 4.0 }, ..Policy::ULTIMA },
        Policy { floor: 0.5, ..Policy::ULTIMA },
        Policy { early: Some(EarlyRule { quiet_share: 1.5 }), ..Policy::ULTIMA },
        Policy { deadline: DeadlineRule::WarmUp { rounds: 0, percentile: 0.95 }, ..Policy::ULTIMA },
    ] {
        assert!(policy.validate().is_err(), "{policy:?}");
    }
    for (name, policy) in Policy::PRESETS {
        assert_eq!(policy.validate(), Ok(()), "{name}");
    }
}

/// Loses chunks of what is sent back to rank 1, the first time.
fn lose_results(chunks: &'static [u32]) -> impl FnMut(&Packet) -> Fate {
    move |packet| {
        let header = &packet.header;
        let is_result = header.kind == Kind::Data && header.transfer.index() == 1;
        let first = !header.flags.contains(Flags::RETRANSMITTED);
        if is_result && first && packet.to == 1 && chunks.contains(&(header.offset / CHUNK_BYTES as u32)) {
            Fate::Drop
        } else {
            NORMAL
        }
    }
}

// test of: auto/error-feedback
#[test]
fn a_value_that_is_lost_and_whose_result_is_lost_as_well_counts_exactly_once() {
    for fill in [Fill::Zero, Fill::Previous, Fill::Local] {
        // Between ranks 0 and 1 the same chunk of shard 0 both times.
        let mut net = Net::new(RANKS, |packet| {
            let header = &packet.header;
            let is_new = header.kind == Kind::Data && !header.flags.contains(Flags::RETRANSMITTED);
            let is_chunk = is_new && header.offset == 7 * CHUNK_BYTES as u32;
            match (is_chunk, packet.from, packet.to, header.transfer.index()) {
                (true, 1, 0, 0) | (true, 0, 1, 1) => Fate::Drop,
                _ => NORMAL,
            }
        });
        let gather = GatherRule::bounded(0.05, fill);
        let round = round(&mut net, Policy { after_first_pass: true, gather, ..Policy::DLCP }, ELEMS);
        let lost = 7 * CHUNK_ELEMS..8 * CHUNK_ELEMS;
        let range = lost.start as u64..lost.end as u64;
        assert_eq!(
            (&round.reports[1].uncounted, &round.reports[1].filled),
            (&vec![range.clone()], &vec![range])
        );
        let sum =
            |values: &[Vec<f32>], index: usize| values.iter().map(|rank| f64::from(rank[index])).sum::<f64>();
        for index in 0..ELEMS {
            let given = (0..RANKS).map(|rank| f64::from(value(rank, index))).sum::<f64>();
            // The mean of three ranks, which three hold, and what is owed are rounded once each; none is larger than this.
            let wrong = sum(&round.results, index) + sum(&round.residuals, index) - given;
            let rounding = 4.0 * f64::from(BEFORE * f32::EPSILON / 2.0);
            assert!(wrong.abs() <= rounding, "{fill:?}, element {index}: {wrong}");
            assert!(lost.contains(&index) || round.residuals.iter().all(|rank| rank[index] == 0.0));
        }
    }
}

// test of: dlcp/pull-bound, mlt/fill
#[test]
fn a_result_lost_within_the_bound_of_the_gather_stage_is_filled_and_reported() {
    for fill in [Fill::Zero, Fill::Previous, Fill::Local] {
        let mut net = Net::new(RANKS, lose_results(&[7]));
        // Nothing that still flows is cut, so that only what the network lost is missing.
        let gather = GatherRule::bounded(0.05, fill);
        let policy = Policy { after_first_pass: true, gather, ..Policy::DLCP };
        let round = round(&mut net, policy, ELEMS);
        // The first collective: shard j comes from rank j.
        let want: Vec<_> = [0, 2, 3]
            .map(|shard: u64| (shard * 40 + 7) * CHUNK_ELEMS as u64)
            .map(|start| start..start + CHUNK_ELEMS as u64)
            .into();
        assert_eq!(round.reports[1].filled, want);
        assert_eq!(round.reports[1].gather_ended_by, "bound_met");
        assert!(round.reports.iter().all(|report| !report.replicas_identical && report.uncounted.is_empty()));
        for index in 0..ELEMS {
            let mean = round.mean(index);
            let lost = want.iter().any(|range| range.contains(&(index as u64)));
            let filled = match fill {
                Fill::Zero => 0.0,
                Fill::Previous => BEFORE,
                Fill::Local => value(1, index),
            };
            assert_eq!(
                round.results[1][index],
                if lost { filled } else { mean },
                "{fill:?}, element {index}"
            );
            assert_eq!(round.results[0][index], mean);
        }
    }
}

// test of: dlcp/pull-bound
#[test]
fn results_lost_beyond_the_bound_of_the_gather_stage_are_sent_again() {
    let mut net = Net::new(RANKS, lose_results(&[1, 3, 5, 7, 9, 11]));
    let dlcp = round(&mut net, Policy::DLCP, ELEMS);
    assert!(dlcp.reports.iter().all(|report| report.filled.is_empty()), "1 % of 40 packets is less than one");
    let policy = Policy { gather: GatherRule { loss_bound: 0.1, ..Policy::DLCP.gather }, ..Policy::DLCP };
    let wider = round(&mut net, policy, ELEMS);
    let filled: u64 = wider.reports[1].filled.iter().map(|range| range.end - range.start).sum();
    assert!(
        filled <= 3 * 4 * CHUNK_ELEMS as u64,
        "4 of 40 packets from each of 3 ranks, of 6 that were lost"
    );
}

// test of: dlcp/pull-bound
#[test]
fn on_a_network_that_loses_nothing_no_result_with_a_bound_of_its_own_is_cut() {
    let round = round(&mut Net::perfect(RANKS), Policy::DLCP, 10 * ELEMS);
    assert!(round.uncounted() > 0, "contributions are, as soon as the bound is met");
    assert!(round.reports.iter().all(|report| report.filled.is_empty()));
    assert!(round.results.iter().all(|result| *result == round.results[0]));
}

// test of: dlcp/per-tensor-bound
#[test]
fn each_tensor_keeps_its_own_bound_also_once_its_deadline_has_passed() {
    let mut net = Net::new(RANKS, lossy_reduce(15));
    let mut tensors: Vec<Tensor> =
        (0..2 * RANKS).map(|_| Tensor::f32((0..ELEMS).map(|i| value(0, i)))).collect();
    let bounds = [0.025, 0.4];
    for (at, tensor) in tensors.iter_mut().enumerate() {
        let request = all_reduce(tensor, Algorithm::Auto);
        // Over before what is asked for again can come.
        let deadline = DeadlineRule::Fixed(Duration::from_micros(150));
        let policy = Policy { deadline, ..Policy::DLCP.bounded_by(bounds[at / RANKS as usize]) };
        net.submit(at as u32 % RANKS, Request { policy, reduce: ReduceOp::Avg, ..request });
    }
    net.run_all(2);
    let lost = |number: usize| -> Vec<f64> {
        let nth = |rank: usize| net.done[rank].values().nth(number).expect("both have ended");
        let report = |rank| nth(rank).as_ref().expect("it ended well");
        (0..RANKS as usize).map(|rank| report(rank).lost_share()).collect()
    };
    assert!(lost(0).iter().all(|share| *share <= 0.025 + 1e-9), "{:?}", lost(0));
    assert!(lost(1).iter().all(|share| *share <= 0.4 + 1e-9), "{:?}", lost(1));
    assert!(lost(1).iter().any(|share| *share > 0.025), "{:?}: the test proves nothing", lost(1));
}

// test of: dlcp/zero-rtt-start, mlt/fast-start
#[test]
fn data_leaves_before_a_word_of_the_receiver_and_no_more_than_the_eager_window() {
    let data: Rc<RefCell<Vec<u32>>> = Rc::default();
    let seen = Rc::clone(&data);
    let mut net = Net::new(RANKS, move |packet| {
        if packet.header.kind == Kind::Data && packet.from == 0 {
            seen.borrow_mut().push(packet.to);
        }
        NORMAL
    });
    net.run_until(Duration::from_secs(1), |net| net.connected.iter().all(|connected| *connected));
    let mut tensor = Tensor::f32((0..40 * ELEMS).map(|index| value(0, index)));
    let called_at: Timestamp = net.now;
    let request = all_reduce(&mut tensor, Algorithm::Transpose);
    net.submit(0, Request { policy: Policy::DLCP, reduce: ReduceOp::Avg, ..request });
    net.run_for(Duration::ZERO);
    assert_eq!(net.now, called_at, "no time has passed, so nothing has been heard");
    assert!(!data.borrow().is_empty(), "data must leave in the first round trip");
    // The other ranks never call: what they can be made to buffer is bounded.
    net.run_for(Duration::from_millis(500));
    for to in 1..RANKS {
        let packets = data.borrow().iter().filter(|rank| **rank == to).count();
        assert!(packets > 0 && packets <= (64 << 10) / CHUNK_BYTES, "{packets} packets to rank {to}");
    }
}
