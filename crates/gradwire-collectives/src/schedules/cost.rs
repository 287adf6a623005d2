//! What an all-reduce costs by each schedule: the model by which [`Algorithm::Auto`] chooses.
//!
//! Each step of a schedule has a latency, bytes that cross one rank's link, and messages that one rank sends; steps
//! follow each other. With R the link's rate, b the bytes of one transfer, N ranks and S bytes of the bucket:
//!
//! ```text
//!   time     = steps * (latency(b) + repair) + messages * MESSAGE + crossing * spread / R
//!   latency  = rtt / 2 of what leaves at once, rtt of what is paced, and one more where a grant must come first
//!   repair   = REPAIR_RTTS * rtt * expected rounds in which a packet of the step is still missing
//!
//!                     steps          b        messages      crossing             spread
//!   transpose         2              S / N    2 (N - 1)     2 (N - 1) / N * S    flows of one stage end at different times
//!   ring              2 (N - 1)      S / N    2 (N - 1)     2 (N - 1) / N * S    one flow on each link
//!   halving-doubling  2 log2 P       S / 2    2 log2 P      2 (P - 1) / P * S    P: the power of two up to N; a rank beyond
//!                     + 2 if N > P            + 2           + 2 S                it hands all of S over, and back
//!   one shot          1               S        N - 1         (N - 1) S            as a transpose
//!
//!   where ranks share cores: R is at most RATE_SHARED, a transpose's spread grows by FLOW_SHARED with each flow,
//!   and rtt is what a step costs in turns for a core: STEP_SHARED, and what is beyond RTT_SHARED
//! ```
//!
//! Where some links are slower than most, the slowest of them has R less, but in a weighted transpose, which is a candidate only there: a
//! transpose with more messages, in which ([`super::weighted`]) bytes are spread by the rates.
//!
//! A step waits for every rank, so a packet that any of them misses holds all up. In a reduce stage that may lose more than
//! the network does nothing is repaired.
//!
//! Parameter servers are for those who ask for them. Colocated ones are a transpose with fewer owners, never cheaper. Dedicated ones,
//! k of them, take 2 steps as well, and 2 max(1, N / k) S cross the busiest link, always more than the transpose's 2 (N - 1) / N S. Only
//! messages can be fewer: k + N follow each other instead of 2 (N - 1), so small sums among more than k + 2 ranks might gain a few
//! MESSAGE. They are left out all the same: N ranks send to a server at once whatever `incast` says, and a block that a
//! tolerant call loses there is nobody's, where the owner in a transpose always has its own value.
//!
//! Constants are fitted to the simulator (`sim/tests/cost.rs` holds the choice against the best of all schedules); what a
//! message costs was measured on real sockets (docs/performance.md), and so were those of ranks that share cores.

use super::weighted;
use crate::agreement::AgreedNetwork;
use crate::links::LinkShares;
use crate::Algorithm;
use std::time::Duration;

impl AgreedNetwork {
    /// A network that loses nothing, for plans of one that is not there. `rate`: bytes per second of one rank's link.
    #[must_use]
    pub const fn lossless(rtt: Duration, rate: u64) -> Self {
        Self { rtt, rate, packet_loss: 0.0, loss: 0.0, links: None, shares_cores: false, threads: 1 }
    }

    /// How long an all-reduce of `bytes` bytes takes by the model that `auto` chooses by, among `world_size` ranks that all send at
    /// once. `None`: the model does not know the schedule.
    #[must_use]
    pub fn time_of(&self, algorithm: Algorithm, bytes: usize, world_size: u32) -> Option<Duration> {
        let is_known = !matches!(algorithm, Algorithm::Auto | Algorithm::ParameterServer);
        let job = Job { bytes, world_size, incast: world_size.max(2) - 1, loss_bound: 0.0 };
        is_known.then(|| job.time(algorithm, self))
    }
}

/// What is reduced, over what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub(super) bytes: usize,
    pub(super) world_size: u32,
    /// Senders that share a receiver in a transpose.
    pub(super) incast: u32,
    /// Share that the reduce stage may lose.
    pub(super) loss_bound: f32,
}

impl Job {
    /// How long the reduction takes over this network.
    // claim: auto/cost-model
    pub(super) fn time(&self, algorithm: Algorithm, network: &AgreedNetwork) -> Duration {
        let plan = match algorithm {
            Algorithm::Ring => self.ring(),
            Algorithm::HalvingDoubling => self.halving(),
            Algorithm::WeightedTranspose => self.weighted(network),
            Algorithm::OneShot => self.one_shot(network.shares_cores),
            Algorithm::Auto | Algorithm::Transpose | Algorithm::ParameterServer => {
                self.transpose(network.shares_cores)
            }
        };
        plan.time(&self.bounded_in(algorithm, network), network)
    }

    /// The bound is each transfer's: of a few packets none may be missing.
    fn bounded_in(&self, algorithm: Algorithm, network: &AgreedNetwork) -> Self {
        if algorithm != Algorithm::WeightedTranspose {
            return *self;
        }
        let part = weighted::part_bytes(self.world_size, self.bytes, network.links.as_ref());
        let is_exact = part as f64 * f64::from(self.loss_bound) < PACKET_BYTES;
        Self { loss_bound: if is_exact { 0.0 } else { self.loss_bound }, ..*self }
    }

    fn ranks(&self) -> f64 {
        f64::from(self.world_size.max(1))
    }

    /// Crosses each link in both stages of a schedule that sends everything once.
    fn crossing(&self) -> f64 {
        2.0 * (self.ranks() - 1.0) / self.ranks() * self.bytes as f64
    }

    /// What crosses a link takes so many times as long where it is that of a transpose.
    fn spread(&self, shares_cores: bool) -> f64 {
        if self.incast <= 1 {
            return SPREAD_ONE_FLOW;
        }
        let further = if shares_cores { f64::from(self.incast.min(FLOWS_MEASURED) - 1) } else { 0.0 };
        SPREAD_TRANSPOSE.max(SPREAD_ONE_FLOW * (1.0 + FLOW_SHARED * further))
    }

    fn transpose(&self, shares_cores: bool) -> Plan {
        let others = self.ranks() - 1.0;
        let rounds = (others / f64::from(self.incast.max(1))).ceil().max(1.0);
        let shard = self.bytes as f64 / self.ranks();
        let spread = self.spread(shares_cores);
        Plan {
            steps: 2.0 * rounds,
            shard,
            messages: 2.0 * others,
            crossing: self.crossing(),
            spread,
            asks: true,
            at_typical_rate: None,
        }
    }

    fn weighted(&self, network: &AgreedNetwork) -> Plan {
        let transpose = Self { incast: self.world_size.max(2) - 1, ..*self }.transpose(network.shares_cores);
        let links = network.links.as_ref();
        Plan {
            messages: weighted::portions_of_each(self.world_size, self.bytes, links) * transpose.messages,
            at_typical_rate: links.map(|links| weighted::bytes_in_time(self.world_size, self.bytes, links)),
            ..transpose
        }
    }

    fn one_shot(&self, shares_cores: bool) -> Plan {
        let (others, bytes) = (self.ranks() - 1.0, self.bytes as f64);
        Plan {
            steps: 1.0,
            shard: bytes,
            messages: others,
            crossing: others * bytes,
            spread: self.spread(shares_cores),
            asks: true,
            at_typical_rate: None,
        }
    }

    fn ring(&self) -> Plan {
        let steps = 2.0 * (self.ranks() - 1.0);
        let shard = self.bytes as f64 / self.ranks();
        let crossing = self.crossing();
        let spread = SPREAD_ONE_FLOW;
        Plan { steps, shard, messages: steps, crossing, spread, asks: false, at_typical_rate: None }
    }

    fn halving(&self) -> Plan {
        let levels = self.world_size.max(1).ilog2();
        let cube = f64::from(1_u32 << levels);
        let (folds, bytes) = (if cube < self.ranks() { 2.0 } else { 0.0 }, self.bytes as f64);
        let steps = 2.0 * f64::from(levels) + folds;
        Plan {
            steps,
            shard: bytes / 2.0,
            messages: steps,
            crossing: 2.0 * (cube - 1.0) / cube * bytes + folds * bytes,
            spread: SPREAD_HALVING,
            asks: true,
            at_typical_rate: None,
        }
    }
}

/// One schedule of a job.
struct Plan {
    steps: f64,
    /// Bytes of one transfer.
    shard: f64,
    messages: f64,
    crossing: f64,
    spread: f64,
    /// A large transfer waits for its grant: it is posted when it begins, not a step before.
    asks: bool,
    /// What crosses a link of the typical rate meanwhile; `None`: `crossing`, on the slowest link.
    at_typical_rate: Option<f64>,
}

impl Plan {
    fn time(&self, job: &Job, network: &AgreedNetwork) -> Duration {
        let (rtt, rate) = pace(network);
        let (paced, granted) = (self.shard > AT_ONCE_BYTES, self.asks && self.shard > EAGER_BYTES);
        let trips = 0.5 + if paced { 0.5 } else { 0.0 } + if granted { 0.5 } else { 0.0 };
        let loss = f64::from(network.packet_loss);
        let repaired = if network.packet_loss < job.loss_bound { 0.5 } else { 1.0 };
        let packets = (self.crossing * job.ranks() / PACKET_BYTES / self.steps).max(job.ranks());
        let repair = REPAIR_RTTS * repaired * rounds(loss, packets);
        let seconds = self.steps * rtt * (trips + repair)
            + self.messages * MESSAGE.as_secs_f64()
            + self.at_typical_rate(network) * self.spread / rate.max(1) as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

impl Plan {
    fn at_typical_rate(&self, network: &AgreedNetwork) -> f64 {
        let slowest = network.links.as_ref().map_or(1.0, LinkShares::slowest);
        self.at_typical_rate.unwrap_or(self.crossing / slowest)
    }
}

/// What a step waits for, in seconds, and bytes per second of a link.
fn pace(network: &AgreedNetwork) -> (f64, u64) {
    let AgreedNetwork { rtt, rate, shares_cores, .. } = *network;
    if !shares_cores {
        return (rtt.as_secs_f64(), rate);
    }
    ((STEP_SHARED + rtt.saturating_sub(RTT_SHARED)).as_secs_f64(), rate.min(RATE_SHARED))
}

/// Expected rounds of repair until none of `packets` is missing: the sum over k of 1 - (1 - p^k)^n.
fn rounds(loss: f64, packets: f64) -> f64 {
    let missing_after = |k: i32| 1.0 - (packets * (-loss.powi(k)).ln_1p()).exp();
    if loss > 0.0 {
        (1..ROUNDS_MAX).map(missing_after).sum()
    } else {
        0.0
    }
}

/// Leaves in the first burst of a flow, before anything paces it.
const AT_ONCE_BYTES: f64 = 8.0 * 1024.0;
/// The default eager window.
const EAGER_BYTES: f64 = 256.0 * 1024.0;
const PACKET_BYTES: f64 = 1408.0;
/// To find out, to send again, and what is behind it in the queue.
const REPAIR_RTTS: f64 = 1.5;
/// Beyond it nothing is left to repair at any loss below one half.
const ROUNDS_MAX: i32 = 20;
/// One flow on a link uses nearly all of it.
const SPREAD_ONE_FLOW: f64 = 1.1;
/// Of several, all wait for the one that ends last.
const SPREAD_TRANSPOSE: f64 = 1.2;
/// What each further flow at once adds to the processor time of a byte, which is what ranks that share cores wait for: 25 MB among 4 and 8
/// of them on 2 cores took 2.97 and 8.5 s/GB by transpose, 2.66 and 6.25 by ring, whose links have one flow each.
const FLOW_SHARED: f64 = 0.06;
/// Flows at once among those 8; what more of them cost was not measured, so no more is assumed.
const FLOWS_MEASURED: u32 = 7;
/// The ring among those 4 moved so much over each link. The fastest connection is sent on at up to twice that, while others wait for the
/// core.
const RATE_SHARED: u64 = 1_250_000_000;
/// What a round trip between ranks that share cores is taken for, while it is below [`RTT_SHARED`] (60 to 600 us were measured there): a
/// step that waits leaves the core to others, and one that goes on has to get it back. The steps that a ring has more of cost 60 us
/// each in calls of 0.25 MB and up to 170 us in calls of 1 and 4 MB.
const STEP_SHARED: Duration = Duration::from_micros(150);
/// The part of a round trip that is waiting for a core; what is beyond it is the network's.
const RTT_SHARED: Duration = Duration::from_micros(600);
/// As one flow, and a step waits for the larger of two halves.
const SPREAD_HALVING: f64 = 1.2;
/// Two system calls and a wake-up for a message of its own.
const MESSAGE: Duration = Duration::from_micros(5);

#[cfg(test)]
mod tests {
    use super::*;

    const MB: usize = 1 << 20;

    fn network(rtt_us: u64, rate: u64, loss: f32) -> AgreedNetwork {
        let near = AgreedNetwork::lossless(Duration::from_micros(rtt_us), rate);
        AgreedNetwork { packet_loss: loss, loss, ..near }
    }

    fn job(bytes: usize, world_size: u32) -> Job {
        Job { bytes, world_size, incast: world_size - 1, loss_bound: 0.0 }
    }

    fn ratio(job: Job, network: &AgreedNetwork) -> f64 {
        let of = |algorithm| job.time(algorithm, network).as_secs_f64();
        of(Algorithm::Ring) / of(Algorithm::Transpose)
    }

    // test of: auto/cost-model
    #[test]
    fn a_ring_pays_where_bytes_cost_more_than_round_trips_and_nothing_is_lost() {
        let slow = network(300, 12_500_000, 0.0);
        assert!(ratio(job(25 * MB, 4), &slow) < 1.0 && ratio(job(MB, 4), &slow) < 1.0);
        assert!(ratio(job(64 << 10, 4), &network(10_000, 12_500_000, 0.0)) > 1.0);
        assert!(ratio(job(MB, 4), &network(10_000, 12_500_000, 0.0)) > 1.0);
        assert!(ratio(job(4 * MB, 4), &network(10_000, 125_000_000, 0.01)) > 1.0);
    }

    // test of: auto/shared-cores
    #[test]
    fn where_ranks_share_cores_large_sums_go_round_a_ring_as_was_measured() {
        // 0.25 MB to 25 MB on 2 cores; 4 MB took as long either way among 4.
        let measured = [
            (8, 250_000, false),
            (8, 1_000_000, false),
            (8, 4_000_000, true),
            (8, 25_000_000, true),
            (4, 250_000, false),
            (4, 1_000_000, false),
            (4, 25_000_000, true),
        ];
        for (ranks, bytes, is_ring) in measured {
            for (rtt_us, rate_mb) in
                [60, 200, 600].into_iter().flat_map(|rtt| [500, 1_250, 2_500].map(|r| (rtt, r)))
            {
                let alike = network(rtt_us, rate_mb * 1_000_000, 0.0);
                let shared = AgreedNetwork { shares_cores: true, ..alike };
                let ratio = ratio(job(bytes, ranks), &shared);
                assert_eq!(
                    ratio < 1.0,
                    is_ring,
                    "{ranks} ranks, {bytes} bytes, {rtt_us} us, {rate_mb} MB/s: {ratio}"
                );
            }
        }
        let shared = AgreedNetwork { shares_cores: true, ..network(200, 1_250_000_000, 0.0) };
        for (ranks, least, most) in [(4, 0.87, 0.92), (8, 0.73, 0.77)] {
            // 1.1 and 1.35 times as long by transpose.
            let ratio = ratio(job(25_000_000, ranks), &shared);
            assert!((least..most).contains(&ratio), "{ranks}: {ratio}");
        }
    }

    // test of: auto/shared-cores
    #[test]
    fn shared_cores_do_not_hide_that_ranks_are_far_from_each_other() {
        let shared = AgreedNetwork { shares_cores: true, ..network(20_000, 1_250_000_000, 0.0) };
        assert!(ratio(job(25_000_000, 8), &shared) > 1.0);
    }

    #[test]
    fn one_flow_at_a_time_costs_no_more_where_cores_are_shared() {
        let one = Job { incast: 1, ..job(25_000_000, 8) };
        assert!(one.transpose(true).spread <= one.transpose(false).spread);
        assert!(job(MB, 8).transpose(true).spread > job(MB, 8).transpose(false).spread);
        assert!(job(MB, 64).transpose(true).spread <= job(MB, 8).transpose(true).spread);
    }

    #[test]
    fn a_rank_in_a_large_group_far_from_nobody_spares_messages_by_halving() {
        let near = network(20, 1_250_000_000, 0.0);
        let of = |job: Job, algorithm, network: &AgreedNetwork| job.time(algorithm, network);
        let (small, far) = (job(4096, 32), network(1_000, 1_250_000_000, 0.0));
        assert!(of(small, Algorithm::HalvingDoubling, &near) < of(small, Algorithm::Transpose, &near));
        assert!(of(small, Algorithm::HalvingDoubling, &far) > of(small, Algorithm::Transpose, &far));
    }

    #[test]
    fn what_may_be_lost_in_the_reduce_stage_is_not_repaired_there() {
        let lossy = network(1_000, 12_500_000, 0.02);
        let (exact, tolerant) = (job(MB, 4), Job { loss_bound: 0.05, ..job(MB, 4) });
        assert!(tolerant.time(Algorithm::Ring, &lossy) < exact.time(Algorithm::Ring, &lossy));
    }

    #[test]
    fn rounds_of_repair_grow_with_packets_and_loss() {
        assert!(rounds(0.0, 1e6) <= 0.0);
        assert!((rounds(0.01, 1.0) - 0.0101).abs() < 1e-4);
        assert!(rounds(0.01, 1e4) > 1.6 && rounds(0.1, 1e4) > 3.7);
    }

    #[test]
    fn one_rank_and_no_bytes_have_a_finite_time() {
        for algorithm in [Algorithm::Ring, Algorithm::Transpose, Algorithm::HalvingDoubling] {
            let nothing = Job { bytes: 0, world_size: 1, incast: 1, loss_bound: 0.0 };
            assert!(nothing.time(algorithm, &network(1, 1, 0.9)) < Duration::from_secs(1));
        }
    }
}
