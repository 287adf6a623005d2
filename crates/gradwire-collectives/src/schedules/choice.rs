//! What [`Algorithm::Auto`] is for a request, and why.
//!
//! Some schedules are out for what they do to the values, whatever they cost: a ring and halving-doubling hand on partial sums in
//! the tensor's dtype, which would round halves at each step, so halves are summed by a transpose even where one of those is asked for by
//! name; and halving-doubling is always exact. A ring hands on partial sums, so one lost packet takes several ranks'
//! values with it (for four ranks twice as many on average as in a transpose): where loss is tolerated it is chosen among
//! few ranks, or among any number that share processor cores while nothing at all is lost, and never where a contract cuts
//! what still flows, since that would use the bound up at every hop, nor where results may be lost, since it would hand on
//! what it has filled in. One shot is exact as well, and for small sums: what all ranks contribute is kept apart until it is
//! whole. Of the others the cost model takes the cheapest; before anything was
//! measured, a ring for large shards, one shot where it moves no more bytes than any other schedule, and else a transpose, which
//! takes two stages whatever the world size. Between two ranks one shot is that, and all others do the same.

use super::cost::Job;
use super::weighted::PORTION_BYTES_MIN;
use super::{Place, PIECE_BYTES};
use crate::agreement::AgreedNetwork;
use crate::policy::RING_RANKS_WHOLE_BOUND;
use crate::{Algorithm, Collective, Policy, ReduceOp, Request};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;

/// Chooses, and remembers what was chosen for each size, so that only a change is told.
#[derive(Debug, Default)]
pub(crate) struct Chooser {
    latest: BTreeMap<(usize, bool), Algorithm>,
}

impl Chooser {
    /// The schedule of a request, and when that is another one than before for its size, why.
    pub(crate) fn choose(
        &mut self,
        request: &Request,
        place: Place,
        agreed: Option<&AgreedNetwork>,
    ) -> (Algorithm, Option<String>) {
        let Collective::AllReduce { algorithm } = request.collective else { return (Algorithm::Auto, None) };
        let chosen = resolve(algorithm, request, place, agreed);
        if algorithm != Algorithm::Auto || place.world_size < 3 {
            return (chosen, None);
        }
        let key = (request.output.len(), request.policy.is_exact());
        if self.latest.len() >= SIZES_MAX && !self.latest.contains_key(&key) {
            // Where sizes differ from call to call that would be said of each.
            return (chosen, None);
        }
        if self.latest.insert(key, chosen) == Some(chosen) {
            return (chosen, None);
        }
        (chosen, Some(why(chosen, request, place, agreed)))
    }
}

/// The schedule of an all-reduce. The same on every rank: it depends on the call, the group and what is agreed alone.
pub(super) fn resolve(
    algorithm: Algorithm,
    request: &Request,
    place: Place,
    agreed: Option<&AgreedNetwork>,
) -> Algorithm {
    match algorithm {
        Algorithm::Auto => match agreed {
            Some(network) => {
                let job = job_of(request, place);
                let candidates = candidates(network).iter().copied();
                candidates
                    .filter(|candidate| is_fit(*candidate, request, place, agreed))
                    .min_by_key(|candidate| job.time(*candidate, network))
                    .unwrap_or(Algorithm::Transpose)
            }
            None => {
                let shard = request.output.len() / place.world_size as usize;
                let large = shard >= RING_SHARD_BYTES_MIN && is_fit(Algorithm::Ring, request, place, None);
                let at_once = place.world_size == 2 && is_fit(Algorithm::OneShot, request, place, None);
                match (large, at_once) {
                    (true, _) => Algorithm::Ring,
                    (_, true) => Algorithm::OneShot,
                    _ => Algorithm::Transpose,
                }
            }
        },
        Algorithm::HalvingDoubling | Algorithm::OneShot if !request.policy.is_exact() => Algorithm::Transpose,
        Algorithm::Ring | Algorithm::HalvingDoubling if rounds_sums(request) => Algorithm::Transpose,
        Algorithm::WeightedTranspose if !can_be_weighted(request, place) => Algorithm::Transpose,
        Algorithm::OneShot if !can_be_one_shot(request, place) => Algorithm::Transpose,
        chosen => chosen,
    }
}

/// Whether a partial sum would be rounded, where it is handed on in the tensor's dtype.
fn rounds_sums(request: &Request) -> bool {
    request.dtype.is_half() && !matches!(request.reduce, ReduceOp::Min | ReduceOp::Max)
}

/// Whether a weighted transpose can be made of it. Behind a late rank it takes as much memory for sums of halves as they have bytes, and
/// it writes to the output first what a lost result would leave as it was.
fn can_be_weighted(request: &Request, place: Place) -> bool {
    let fits = !request.dtype.is_half() || request.whole_bytes() <= PIECE_BYTES;
    place.world_size > 2 && fits && !request.policy.gather.may_lose()
}

/// Whether it is small enough for what all ranks contribute to be kept apart, and the incast factor lets them send to one at once.
fn can_be_one_shot(request: &Request, place: Place) -> bool {
    let bytes = request.whole_bytes();
    let is_small =
        bytes <= ONE_SHOT_BYTES_MAX && bytes * place.world_size as usize <= ONE_SHOT_ROWS_BYTES_MAX;
    is_small && place.world_size > 1 && place.incast + 1 == place.world_size
}

// claim: auto/shared-cores
/// Whether a ring of so many ranks may lose partial sums: few of them, or any number where a transpose costs more processor time and what
/// could be lost is not.
fn may_be_tolerant_ring(world_size: u32, agreed: Option<&AgreedNetwork>) -> bool {
    let is_spared = |known: &AgreedNetwork| known.shares_cores && known.packet_loss.max(known.loss) <= 0.0;
    world_size <= RING_RANKS_WHOLE_BOUND || agreed.is_some_and(is_spared)
}

fn shares_cores(agreed: Option<&AgreedNetwork>) -> bool {
    agreed.is_some_and(|known| known.shares_cores)
}

/// Whether a schedule does to the values what the request allows.
fn is_fit(algorithm: Algorithm, request: &Request, place: Place, agreed: Option<&AgreedNetwork>) -> bool {
    let Policy { after_first_pass, gather, .. } = request.policy;
    let (exact, half) = (request.policy.is_exact(), rounds_sums(request));
    let tolerant = after_first_pass && may_be_tolerant_ring(place.world_size, agreed);
    match algorithm {
        Algorithm::Ring => place.world_size > 2 && !half && !gather.may_lose() && (exact || tolerant),
        Algorithm::HalvingDoubling => {
            place.world_size > 2 && !half && exact && request.output.len() <= HALVING_BYTES_MAX
        }
        Algorithm::WeightedTranspose => {
            let Place { world_size, incast, .. } = place;
            let large = request.output.len() >= world_size as usize * WEIGHTED_SHARD_BYTES_MIN;
            can_be_weighted(request, place)
                && large
                && incast + 1 == world_size
                && (exact || after_first_pass)
        }
        Algorithm::OneShot => {
            let pays = !shares_cores(agreed) || ONE_SHOT_BYTES_SHARED.contains(&request.output.len());
            can_be_one_shot(request, place) && exact && (place.world_size == 2 || pays)
        }
        _ => true,
    }
}

fn job_of(request: &Request, place: Place) -> Job {
    let Place { world_size, incast, .. } = place;
    Job { bytes: request.whole_bytes(), world_size, incast, loss_bound: request.policy.loss_bound }
}

/// One line for people.
fn why(chosen: Algorithm, request: &Request, place: Place, agreed: Option<&AgreedNetwork>) -> String {
    let (bytes, ranks) = (request.whole_bytes(), place.world_size);
    let mut line = format!("all-reduce of {bytes} bytes among {ranks} ranks: {chosen:?}");
    let Some(network) = agreed else {
        line += ", by size: nothing is measured yet";
        return line;
    };
    let AgreedNetwork { rtt, rate, packet_loss, links, shares_cores, .. } = network;
    let megabits = *rate as f64 * 8e-6;
    let lost = packet_loss * 100.0;
    _ = write!(line, ", by cost at a round trip of {rtt:?}, {megabits:.0} Mbit/s, {lost:.2} % lost");
    if let Some(links) = links {
        _ = write!(line, ", {}", links.describe());
    }
    if *shares_cores {
        line += ", more ranks than cores on a host";
    }
    line.push(':');
    for candidate in candidates(network) {
        let time = job_of(request, place).time(*candidate, network);
        let fit = if is_fit(*candidate, request, place, agreed) { "" } else { " (not for these values)" };
        _ = write!(line, " {candidate:?} {time:.1?}{fit};");
    }
    line.pop();
    line
}

/// What may be chosen by cost: the last one only where links differ.
fn candidates(network: &AgreedNetwork) -> &'static [Algorithm] {
    const ALL: [Algorithm; 5] = [
        Algorithm::Transpose,
        Algorithm::OneShot,
        Algorithm::Ring,
        Algorithm::HalvingDoubling,
        Algorithm::WeightedTranspose,
    ];
    let alike = usize::from(network.links.is_none());
    &ALL[..ALL.len() - alike]
}

/// Below this the round trips of the ring's steps outweigh what flows cost each other.
const RING_SHARD_BYTES_MIN: usize = 128 << 10;
/// Smaller ones are not cut into portions enough for all.
const WEIGHTED_SHARD_BYTES_MIN: usize = 4 * PORTION_BYTES_MIN;
/// Halving is for messages, not for bytes: beyond it the model is not held against anything.
const HALVING_BYTES_MAX: usize = 64 << 10;
/// So much leaves without a grant.
const ONE_SHOT_BYTES_MAX: usize = 64 << 10;
/// Where more than two ranks share cores, which the model knows by messages and bytes of one rank: below it a transpose has one owner, and
/// 2 (N - 1) messages in place of N (N - 1), above it all ranks' bytes are more work than a step that is saved (docs/performance.md).
const ONE_SHOT_BYTES_SHARED: Range<usize> = 65..(16 << 10) + 1;
/// What is kept apart of all ranks.
const ONE_SHOT_ROWS_BYTES_MAX: usize = 1 << 20;
/// Sizes repeat, since the buckets of a model do. Of others than the first ones nothing is told.
const SIZES_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::links::LinkShares;
    use crate::{Dtype, Servers, View};
    use std::time::Duration;

    fn all_reduce(memory: &mut [u8], dtype: Dtype, policy: Policy) -> Request {
        // SAFETY: the request only carries the view, nothing reads through it.
        let view = unsafe { View::new(memory.as_mut_ptr(), memory.len()) };
        Request {
            input: view,
            output: view,
            policy,
            ..Request::exact(
                Collective::AllReduce { algorithm: Algorithm::Auto },
                dtype,
                Duration::from_secs(1),
            )
        }
    }

    fn place(world_size: u32) -> Place {
        Place {
            rank: 0,
            world_size,
            sequence: 0,
            chunk_bytes: 1408,
            incast: world_size - 1,
            servers: Servers::EVERY_RANK,
        }
    }

    fn network(rtt_ms: u64, loss: f32) -> Option<AgreedNetwork> {
        let lossless = AgreedNetwork::lossless(Duration::from_millis(rtt_ms), 12_500_000);
        Some(AgreedNetwork { packet_loss: loss, loss, ..lossless })
    }

    #[test]
    fn unmeasured_it_is_a_ring_for_large_sums_that_lose_little_by_it() {
        let mut memory = vec![0; 8 * RING_SHARD_BYTES_MIN];
        let chosen =
            |request: &Request, world_size| resolve(Algorithm::Auto, request, place(world_size), None);
        let large = all_reduce(&mut memory, Dtype::F32, Policy::RELIABLE);
        assert_eq!(chosen(&large, 8), Algorithm::Ring);
        assert_eq!(chosen(&large, 2), Algorithm::Transpose);
        let tolerant = all_reduce(&mut memory, Dtype::F32, Policy::AUTO);
        assert_eq!(chosen(&tolerant, 4), Algorithm::Ring);
        assert_eq!(chosen(&tolerant, 8), Algorithm::Transpose);
        let cutting = all_reduce(&mut memory, Dtype::F32, Policy::MLT);
        assert_eq!(chosen(&cutting, 4), Algorithm::Transpose);
        let half = all_reduce(&mut memory, Dtype::Bf16, Policy::RELIABLE);
        assert_eq!(chosen(&half, 8), Algorithm::Transpose);
        let small = all_reduce(&mut memory[..1000], Dtype::F32, Policy::RELIABLE);
        assert_eq!(chosen(&small, 8), Algorithm::Transpose);
        assert_eq!(resolve(Algorithm::Ring, &small, place(2), None), Algorithm::Ring, "asked for");
        let named = |request: &Request| {
            [Algorithm::Ring, Algorithm::HalvingDoubling].map(|name| resolve(name, request, place(8), None))
        };
        assert_eq!(named(&half), [Algorithm::Transpose; 2], "both would round each partial sum");
        let largest = Request { reduce: ReduceOp::Max, ..half };
        assert_eq!(named(&largest), [Algorithm::Ring, Algorithm::HalvingDoubling], "nothing to round");
    }

    #[test]
    fn no_cost_makes_it_a_schedule_that_harms_the_values() {
        let mut memory = vec![0; 32 << 10];
        let mut chosen = |dtype, policy, ranks, network: &Option<AgreedNetwork>| {
            let request = all_reduce(&mut memory, dtype, policy);
            resolve(Algorithm::Auto, &request, place(ranks), network.as_ref())
        };
        let near = network(1, 0.0).map(|far| AgreedNetwork {
            rtt: Duration::from_micros(5),
            rate: 1_250_000_000,
            ..far
        });
        assert_eq!(chosen(Dtype::F32, Policy::RELIABLE, 32, &near), Algorithm::HalvingDoubling);
        assert_eq!(chosen(Dtype::Bf16, Policy::RELIABLE, 32, &near), Algorithm::Transpose);
        assert_eq!(chosen(Dtype::F32, Policy::AUTO, 32, &near), Algorithm::Transpose);
        assert_eq!(chosen(Dtype::F32, Policy::DLCP, 4, &near), Algorithm::Transpose);
    }

    // test of: auto/one-shot
    #[test]
    fn one_shot_is_for_small_sums_that_lose_nothing() {
        let mut memory = vec![0; 128 << 10];
        let mut chosen = |bytes: usize, policy, ranks, network: &Option<AgreedNetwork>| {
            let request = all_reduce(&mut memory[..bytes], Dtype::F32, policy);
            resolve(Algorithm::Auto, &request, place(ranks), network.as_ref())
        };
        let (exact, one_shot, transpose) = (Policy::RELIABLE, Algorithm::OneShot, Algorithm::Transpose);
        let far = network(10, 0.0);
        for bytes in [4, 4096, 64 << 10] {
            assert_eq!(
                [None, far.clone()].map(|known| chosen(bytes, exact, 2, &known)),
                [one_shot; 2],
                "{bytes}"
            );
        }
        assert_eq!(chosen(68 << 10, exact, 2, &far), transpose, "too large");
        assert_eq!(
            chosen(4096, exact, 4, &None),
            transpose,
            "it moves more bytes, and nobody knows how fast they are"
        );
        assert_eq!(chosen(4096, exact, 4, &far), one_shot);
        let auto = [&None, &far].map(|known| chosen(4096, Policy::AUTO, 2, known));
        assert_eq!(auto, [transpose; 2], "nobody waits for what may be lost");
        assert_eq!(chosen(4096, Policy::MLT, 2, &far), transpose, "its paper says how it is exchanged");
        let near = network(1, 0.0).map(|known| AgreedNetwork { rate: 1_250_000_000, ..known });
        let shared = near.clone().map(|known| AgreedNetwork { shares_cores: true, ..known });
        assert_eq!([&near, &shared].map(|known| chosen(64, exact, 4, known)), [one_shot, transpose]);
        assert_eq!([&near, &shared].map(|known| chosen(1024, exact, 4, known)), [one_shot; 2]);
        assert_eq!(chosen(20 << 10, exact, 4, &shared), transpose);
        assert_eq!(chosen(20 << 10, exact, 2, &shared), one_shot);
    }

    // test of: auto/one-shot
    #[test]
    fn one_shot_that_was_asked_for_is_a_transpose_where_it_is_too_much_or_may_lose_something() {
        let mut memory = vec![0; 68 << 10];
        let mut named = |bytes: usize, policy, place| {
            let request = all_reduce(&mut memory[..bytes], Dtype::F32, policy);
            resolve(Algorithm::OneShot, &request, place, None)
        };
        let one_at_a_time = Place { incast: 1, ..place(4) };
        assert_eq!(named(64 << 10, Policy::RELIABLE, place(16)), Algorithm::OneShot);
        for (bytes, policy, place) in [
            (68 << 10, Policy::RELIABLE, place(4)),
            (64 << 10, Policy::RELIABLE, place(17)),
            (4096, Policy::AUTO, place(4)),
            (4096, Policy::RELIABLE, one_at_a_time),
            (4096, Policy::RELIABLE, place(1)),
        ] {
            assert_eq!(
                named(bytes, policy, place),
                Algorithm::Transpose,
                "{bytes} bytes, {policy:?}, {place:?}"
            );
        }
    }

    // test of: auto/shared-cores
    #[test]
    fn many_ranks_share_a_tolerant_ring_only_where_they_share_cores_and_nothing_is_lost() {
        let mut memory = vec![0; 25 << 20];
        let mut chosen = |dtype, policy, change: &dyn Fn(&mut AgreedNetwork)| {
            let mut network = AgreedNetwork::lossless(Duration::from_micros(200), 1_250_000_000);
            network.shares_cores = true;
            change(&mut network);
            let request = all_reduce(&mut memory, dtype, policy);
            let (algorithm, why) = Chooser::default().choose(&request, place(8), Some(&network));
            let says_so = why.is_some_and(|why| why.contains("more ranks than cores"));
            assert_eq!(says_so, network.shares_cores);
            algorithm
        };
        let as_it_is = |_: &mut AgreedNetwork| {};
        assert_eq!(chosen(Dtype::F32, Policy::AUTO, &as_it_is), Algorithm::Ring);
        for change in [
            |network: &mut AgreedNetwork| network.shares_cores = false,
            |network: &mut AgreedNetwork| network.packet_loss = 1e-6,
            |network: &mut AgreedNetwork| network.loss = 1e-6,
        ] {
            assert_eq!(chosen(Dtype::F32, Policy::AUTO, &change), Algorithm::Transpose);
        }
        let at_once = Policy { after_first_pass: false, ..Policy::AUTO };
        for (dtype, policy) in
            [(Dtype::Bf16, Policy::AUTO), (Dtype::F32, Policy::DLCP), (Dtype::F32, at_once)]
        {
            assert_eq!(chosen(dtype, policy, &as_it_is), Algorithm::Transpose);
        }
    }

    // test of: auto/slow-links
    #[test]
    fn a_slow_link_is_spared_where_that_does_no_harm_and_saves_time() {
        let mut memory = vec![0; 1 << 20];
        let slow = |rates: [u64; 4]| {
            let links = LinkShares::of(rates.into_iter(), 12_500_000, None);
            network(1, 0.0).map(|alike| AgreedNetwork { links, ..alike })
        };
        let (one, none) = (slow([12_500_000, 12_500_000, 6_250_000, 12_500_000]), slow([12_500_000; 4]));
        let mut chosen = |dtype, policy, bytes: usize, network: &Option<AgreedNetwork>, place| {
            let request = all_reduce(&mut memory[..bytes], dtype, policy);
            resolve(Algorithm::Auto, &request, place, network.as_ref())
        };
        for (dtype, policy) in
            [(Dtype::F32, Policy::RELIABLE), (Dtype::F32, Policy::AUTO), (Dtype::Bf16, Policy::AUTO)]
        {
            assert_eq!(chosen(dtype, policy, 1 << 20, &one, place(4)), Algorithm::WeightedTranspose);
            assert_ne!(chosen(dtype, policy, 1 << 20, &none, place(4)), Algorithm::WeightedTranspose);
        }
        assert_ne!(chosen(Dtype::F32, Policy::RELIABLE, 4096, &one, place(4)), Algorithm::WeightedTranspose);
        let one_at_a_time = Place { incast: 1, ..place(4) };
        assert_ne!(
            chosen(Dtype::F32, Policy::RELIABLE, 1 << 20, &one, one_at_a_time),
            Algorithm::WeightedTranspose
        );
        for cutting in [Policy::MLT, Policy::ULTIMA] {
            assert_eq!(chosen(Dtype::F32, cutting, 1 << 20, &one, place(4)), Algorithm::Transpose);
        }
        let lossy = all_reduce(&mut memory, Dtype::F32, Policy::DLCP);
        assert_eq!(resolve(Algorithm::WeightedTranspose, &lossy, place(4), None), Algorithm::Transpose);
        assert_eq!(resolve(Algorithm::WeightedTranspose, &lossy, place(2), None), Algorithm::Transpose);
    }

    #[test]
    fn only_a_change_is_told_and_it_names_the_measurement() {
        let mut memory = vec![0; 1 << 20];
        let request = all_reduce(&mut memory, Dtype::F32, Policy::AUTO);
        let mut chooser = Chooser::default();
        let (first, why) = chooser.choose(&request, place(4), None);
        assert_eq!(first, Algorithm::Ring);
        assert!(why.is_some_and(|why| why.contains("nothing is measured yet")));
        assert_eq!(chooser.choose(&request, place(4), network(1, 0.0).as_ref()), (Algorithm::Ring, None));
        let (changed, why) = chooser.choose(&request, place(4), network(20, 0.01).as_ref());
        assert_eq!(changed, Algorithm::Transpose);
        let why = why.expect("it changed");
        assert!(why.contains("round trip of 20ms, 100 Mbit/s, 1.00 % lost") && why.contains("Ring"), "{why}");
        assert_eq!(chooser.choose(&request, place(4), network(20, 0.01).as_ref()).1, None);
    }

    #[test]
    fn where_sizes_differ_from_call_to_call_the_first_ones_alone_are_told() {
        let mut chooser = Chooser::default();
        let mut told = |elements: usize| {
            let mut memory = vec![0; 4 * elements];
            let request = all_reduce(&mut memory, Dtype::F32, Policy::AUTO);
            chooser.choose(&request, place(4), None).1.is_some()
        };
        assert_eq!((1..2_000).filter(|elements| told(*elements)).count(), SIZES_MAX);
        assert!(!told(1));
    }
}
