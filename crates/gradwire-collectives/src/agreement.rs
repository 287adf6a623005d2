//! What all ranks of a group know alike about their network: round trip, rate, loss.
//!
//! Whatever depends on a measurement and must be the same everywhere (the schedule of an all-reduce, whether it is
//! rotated) needs the same measurement everywhere. At fixed places of the sequence the group inserts a collective of its
//! own, an all-gather of one [`Word`] for each rank, and what comes out of it holds from a fixed later place on:
//!
//! ```text
//!   sequence   first          first + lag         first + every
//!      ------- exchange ------ holds from here --- exchange ------ ...
//! ```
//!
//! No rank waits for an exchange unless it is `lag` collectives ahead of the slowest one. Places depend on the sequence
//! alone, and every rank combines the same words, so nobody can disagree whatever arrives when.

mod loss_meter;

use crate::adaptive::StageEnd;
use crate::host::Host;
use crate::links::{LinkShares, MEASURED_RATE_MAX};
use crate::view::OwnMemory;
use crate::{Collective, Dtype, Request};
use gradwire_core::{ConnectionStats, Receipt};
use loss_meter::{LossMeter, PPM};
use std::time::Duration;

/// The network as every rank of a group knows it, at one place of the sequence.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct AgreedNetwork {
    /// Round-trip time of an empty network: the median over the ranks, of each rank's median over its peers.
    pub rtt: Duration,
    /// Bytes per second of one rank's link: the median over the ranks, of the fastest that each has sent on one connection or
    /// received from all that sent to it at once. Small messages show less than there is.
    pub rate: u64,
    /// Share of the packets that the network lost lately on their way to a rank, of the rank that lost most.
    pub packet_loss: f32,
    /// Share of the values that did not arrive lately, of the rank that lost most: of the packets, or of what tolerant
    /// reductions ended without, whichever is more.
    pub loss: f32,
    /// How fast each rank's link is; `None`: none is much slower than most.
    pub links: Option<LinkShares>,
    /// Whether the processor cores of some rank's host are shared by more ranks than there are cores.
    pub shares_cores: bool,
    /// Between how many network threads each rank divides what is large; one: it does not.
    pub threads: u8,
}

impl AgreedNetwork {
    /// Whether links are so fast that calls wait for processors: large calls are divided unasked, and links are not compared.
    #[must_use]
    pub const fn has_fast_links(&self) -> bool {
        self.rate > MEASURED_RATE_MAX
    }
}

/// Where in the sequence ranks exchange what they measured. The same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExchangePlan {
    /// Place of the first exchange.
    pub first: u64,
    /// Places from one exchange to the next, at least 2: an exchange has a place of its own.
    pub every: u64,
    /// Places from an exchange to the first collective for which its result holds, 1 to `every`.
    pub lag: u64,
}

impl ExchangePlan {
    /// A few collectives to measure; a lag that no training step reaches ahead of the slowest rank (a step of a large model
    /// has some 20 buckets); one more message to each peer for every 63 collectives.
    pub const DEFAULT: Self = Self { first: 8, every: 64, lag: 32 };

    /// Whether an exchange comes within the `places` behind `sequence`.
    fn is_within(&self, places: u64, sequence: u64) -> bool {
        let next = match sequence.checked_sub(self.first) {
            Some(after) => self.first + (after / self.every + 1) * self.every,
            None => self.first,
        };
        next - sequence <= places
    }

    /// Whether an exchange has the place `sequence`.
    fn is_at(&self, sequence: u64) -> bool {
        sequence.checked_sub(self.first).is_some_and(|after| after % self.every == 0)
    }

    /// # Panics
    /// When it is out of range.
    fn check(&self) {
        let Self { every, lag, .. } = *self;
        assert!(every >= 2 && (1..=every).contains(&lag), "{self:?}: every at least 2, lag 1 to every");
    }
}

// claim: auto/agreed-network
/// State of one rank.
#[derive(Debug)]
pub(crate) struct Agreement {
    plan: ExchangePlan,
    world_size: u32,
    rank: u32,
    /// Holds for the collective that was started last.
    current: Option<AgreedNetwork>,
    /// Place of the exchange under way.
    pending: Option<u64>,
    /// The latest result, with the place from which on it holds.
    next: Option<(u64, AgreedNetwork)>,
    words: OwnMemory,
    /// This rank's.
    host: Host,
    meter: LossMeter,
    /// Fastest stage since the latest exchange, and of the period before the latest exchange that had one, bytes per second.
    fastest: u64,
    received_rate: u64,
    /// What the fastest connection was sent on when the latest collectives before an exchange ended, bytes per second.
    sent_rates: Vec<u64>,
    /// Of the latest large call.
    parts: u64,
    /// What the latest exchange said of each rank's link, bytes per second.
    rates: Vec<u64>,
}

impl Agreement {
    /// # Panics
    /// When the plan is out of range.
    pub(crate) fn new(plan: ExchangePlan, rank: u32, world_size: u32) -> Self {
        plan.check();
        Self {
            plan,
            world_size,
            rank,
            current: None,
            pending: None,
            next: None,
            words: OwnMemory::zeroed(world_size as usize * Word::BYTES),
            host: Host::default(),
            meter: LossMeter::default(),
            fastest: 0,
            received_rate: 0,
            sent_rates: Vec::new(),
            parts: 1,
            rates: Vec::new(),
        }
    }

    /// What the exchanges from now on say about this rank's host.
    pub(crate) fn set_host(&mut self, host: Host) {
        self.host = host;
    }

    pub(crate) fn host(&self) -> Host {
        self.host
    }

    /// Whether an exchange has the place `sequence`. One rank alone has nothing to agree on.
    pub(crate) fn has_place(&self, sequence: u64) -> bool {
        self.world_size > 1 && self.plan.is_at(sequence)
    }

    /// Whether the collective at `sequence` must wait until the exchange under way has ended here.
    pub(crate) fn must_wait(&self, sequence: u64) -> bool {
        self.pending.is_some_and(|at| sequence >= at + self.plan.lag)
    }

    /// The collective at `sequence` starts. What every rank knows alike then.
    pub(crate) fn reach(&mut self, sequence: u64) -> Option<AgreedNetwork> {
        if let Some((_, network)) = self.next.take_if(|(from, _)| *from <= sequence) {
            self.current = Some(network);
            if !self.plan.is_at(sequence) {
                // Whatever changed since is found out by the second half of what is measured before the next one.
                self.fastest = 0;
            }
        }
        self.current.clone()
    }

    /// What every rank knows alike at the collective that was started last.
    pub(crate) fn current(&self) -> Option<&AgreedNetwork> {
        self.current.as_ref()
    }

    /// The call that exchanges the words. Its memory is free: the exchange before has ended, since this one had to wait
    /// for it.
    pub(crate) fn request(&self) -> Request {
        let row = self.rank as usize * Word::BYTES;
        let words = self.words.view();
        Request {
            input: words.part(&(row..row + Word::BYTES)),
            output: words,
            priority: PRIORITY_LAST,
            ..Request::exact(Collective::AllGather, Dtype::Bytes, Duration::ZERO)
        }
    }

    /// The exchange at `sequence` starts: writes this rank's word.
    pub(crate) fn begin(&mut self, sequence: u64, connections: impl Iterator<Item = ConnectionStats>) {
        self.pending = Some(sequence);
        let (mut word, sustained) = Word::of(connections, &mut self.meter);
        word.rate = word.rate.saturating_mul(self.parts);
        self.sent_rates.push(sustained.saturating_mul(self.parts));
        self.sent_rates.retain(|rate| *rate > 0);
        // A single one may be that of a time in which others waited for a core.
        let sent = median(&mut self.sent_rates).unwrap_or(0);
        self.sent_rates.clear();
        self.received_rate = match std::mem::take(&mut self.fastest) {
            0 => self.received_rate,
            measured => measured,
        };
        word.is_steady = sent > 0;
        // Of who has carried little there is the best sample of a round trip, of a slow link several times its rate. What it received may have
        // waited for repairs.
        word.rate = if word.is_steady { sent } else { word.rate }.max(self.received_rate);
        word.host = self.host;
        let row = self.rank as usize * Word::BYTES;
        self.words.view().part(&(row..row + Word::BYTES)).as_mut_slice().copy_from_slice(&word.encode());
    }

    /// Every word of the exchange at `sequence` is there. `true` the first time.
    pub(crate) fn settle(&mut self, sequence: u64) -> bool {
        if self.pending != Some(sequence) {
            return false;
        }
        self.pending = None;
        let words: Vec<Word> =
            self.words.view().as_slice().chunks_exact(Word::BYTES).map(Word::decode).collect();
        self.rates = self.rates_of(sequence, &words);
        let links = self.current.as_ref().and_then(|known| known.links.as_ref());
        self.next = combine(&words, &self.rates, links).map(|network| (sequence + self.plan.lag, network));
        true
    }

    /// The rates of the ranks' links. While a slow one is spared the others' are not used to the full and seem slower than they are, so what
    /// was known of them holds on, but for one exchange in a while: a second link may have become slow.
    fn rates_of(&self, sequence: u64, words: &[Word]) -> Vec<u64> {
        let number = (sequence - self.plan.first) / self.plan.every;
        let links = self.current.as_ref().and_then(|known| known.links.as_ref());
        let links = links.filter(|_| number % REMEMBERED_EXCHANGES != 0);
        // Two kinds of rates cannot be compared.
        let some_are_steady = words.iter().any(|word| word.is_steady);
        let rate = |(rank, word): (usize, &Word)| {
            let said = if some_are_steady && !word.is_steady { 0 } else { word.rate };
            match self.rates.get(rank) {
                Some(known) if links.is_some_and(|links| links.is_whole(rank)) => said.max(*known),
                _ => said,
            }
        };
        words.iter().enumerate().map(rate).collect()
    }

    /// An all-reduce has ended here, in each stage of which so many ranks sent to this one at once; of a large call it was one of so many parts, which
    /// took as much of the link each. What small ones are sent at is what the large ones before have found. `sent_rate`: the fastest connection's.
    pub(crate) fn on_ended(
        &mut self,
        (sequence, parts): (u64, Option<u32>),
        senders: [u32; 2],
        stages: &[StageEnd; 2],
        sent_rate: impl FnOnce() -> u64,
    ) {
        self.parts = parts.map_or(self.parts, u64::from);
        if self.plan.is_within(SENT_RATES, sequence) {
            if self.sent_rates.len() >= SENT_RATES as usize {
                // Of before the latest exchange, and ended after it.
                self.sent_rates.remove(0);
            }
            self.sent_rates.push(sent_rate().saturating_mul(self.parts));
        }
        let fastest =
            stages.iter().zip(senders).map(|(stage, senders)| stage.rate(senders)).max().unwrap_or(0);
        self.fastest = self.fastest.max(fastest.saturating_mul(self.parts));
    }

    /// A transfer that may lose something has ended here.
    pub(crate) fn on_tolerant(&mut self, receipt: &Receipt) {
        self.meter.expected_bytes += receipt.total_bytes;
        self.meter.missing_bytes += receipt.total_bytes - receipt.received_bytes;
    }
}

/// What one rank measured, and knows of its host. Zero where it measured nothing.
///
/// | byte | field |
/// | --- | --- |
/// | 0..4 | round trip, microseconds |
/// | 4..8 | packets lost, and 8..12 values left out, per million |
/// | 12..16 | flags: of its host ([`Host`]); bit 1, the rate is not that of a moment; others are zero, and not looked at |
/// | 16..24 | rate, bytes per second |
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Word {
    rtt_us: u32,
    lost_ppm: u32,
    left_out_ppm: u32,
    host: Host,
    is_steady: bool,
    rate: u64,
}

impl Word {
    const BYTES: usize = 24;
    const IS_STEADY: u32 = 2;

    /// What was measured, the rate that of a moment; of the host it says nothing. And what the fastest connection carried for a while.
    fn of(connections: impl Iterator<Item = ConnectionStats>, meter: &mut LossMeter) -> (Self, u64) {
        let (mut rtts, mut rate, mut sustained, mut numbered, mut arrived) = (Vec::new(), 0, 0, 0, 0);
        for stats in connections {
            if !stats.rtt_min.is_zero() {
                rtts.push(u32::try_from(stats.rtt_min.as_micros()).unwrap_or(u32::MAX).max(1));
            }
            rate = rate.max(stats.bandwidth);
            sustained = sustained.max(stats.sustained_rate);
            numbered += stats.packets_numbered;
            arrived += stats.packets_arrived;
        }
        meter.update(numbered, arrived);
        let rtt_us = median(&mut rtts).unwrap_or(0);
        let LossMeter { lost_ppm, left_out_ppm, .. } = *meter;
        let host = Host::default();
        (Self { rtt_us, lost_ppm, left_out_ppm, host, is_steady: false, rate }, sustained)
    }

    fn encode(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..4].copy_from_slice(&self.rtt_us.to_le_bytes());
        out[4..8].copy_from_slice(&self.lost_ppm.to_le_bytes());
        out[8..12].copy_from_slice(&self.left_out_ppm.to_le_bytes());
        let flags = self.host.flags() | if self.is_steady { Self::IS_STEADY } else { 0 };
        out[12..16].copy_from_slice(&flags.to_le_bytes());
        out[16..24].copy_from_slice(&self.rate.to_le_bytes());
        out
    }

    /// Any bytes are a word: shares above one are taken for one, and unknown flags are left out.
    fn decode(bytes: &[u8]) -> Self {
        let u32_at = |at: usize| {
            let mut raw = [0; 4];
            raw.copy_from_slice(&bytes[at..at + 4]);
            u32::from_le_bytes(raw)
        };
        let mut rate = [0; 8];
        rate.copy_from_slice(&bytes[16..24]);
        Self {
            rtt_us: u32_at(0),
            lost_ppm: u32_at(4).min(PPM as u32),
            left_out_ppm: u32_at(8).min(PPM as u32),
            host: Host::of_flags(u32_at(12)),
            is_steady: u32_at(12) & Self::IS_STEADY != 0,
            rate: u64::from_le_bytes(rate),
        }
    }
}

/// Reads `bytes` as what ranks say, writes it again and agrees on it, for the fuzzer.
///
/// # Panics
/// When a word does not survive its way back, a share is above one, or what one rank says of its cores is lost.
pub(crate) fn parse_words(bytes: &[u8]) {
    let words: Vec<Word> = bytes.chunks_exact(Word::BYTES).map(Word::decode).collect();
    assert!(words.iter().all(|word| Word::decode(&word.encode()) == *word));
    let rates: Vec<u64> = words.iter().map(|word| word.rate).collect();
    if let Some(agreed) = combine(&words, &rates, None) {
        assert!([agreed.loss, agreed.packet_loss].iter().all(|share| (0.0..=1.0).contains(share)));
        assert_eq!(agreed.shares_cores, words.iter().any(|word| word.host.shares_cores));
    }
}

/// `None` as long as no rank has measured a round trip and a rate. A rank that has sent nothing has no say in what was measured; of its
/// host each knows.
fn combine(words: &[Word], rates: &[u64], links: Option<&LinkShares>) -> Option<AgreedNetwork> {
    let mut rtts: Vec<u32> = words.iter().map(|word| word.rtt_us).filter(|rtt| *rtt > 0).collect();
    let mut measured: Vec<u64> = rates.iter().copied().filter(|rate| *rate > 0).collect();
    let lost = words.iter().map(|word| word.lost_ppm).max()?;
    let left_out = words.iter().map(|word| word.left_out_ppm).max()?;
    let share = |ppm: u32| ppm as f32 / PPM as f32;
    let rate = median(&mut measured)?;
    Some(AgreedNetwork {
        rtt: Duration::from_micros(u64::from(median(&mut rtts)?)),
        rate,
        packet_loss: share(lost),
        loss: share(lost.max(left_out)),
        links: LinkShares::of(rates.iter().copied(), rate, links),
        shares_cores: words.iter().any(|word| word.host.shares_cores),
        threads: Host::threads_of_all(words.iter().map(|word| word.host), rate > MEASURED_RATE_MAX),
    })
}

/// The value in the middle, the lower one of two.
fn median<T: Ord + Copy>(values: &mut [T]) -> Option<T> {
    values.sort_unstable();
    values.get(values.len().saturating_sub(1) / 2).copied()
}

/// Collectives before an exchange of which the rate of connections is taken, beside that of the exchange itself.
const SENT_RATES: u64 = 8;
/// With the default plan a thousand collectives.
const REMEMBERED_EXCHANGES: u64 = 16;
/// Nobody waits for an exchange as long as ranks keep together, so everything else goes first.
const PRIORITY_LAST: u8 = u8::MAX;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adaptive::stage_end::tests::receipt;
    use gradwire_core::Timestamp;

    const PLAN: ExchangePlan = ExchangePlan { first: 3, every: 5, lag: 2 };

    fn word(rtt_us: u32, lost_ppm: u32, rate: u64) -> Word {
        Word { rtt_us, lost_ppm, left_out_ppm: 2 * lost_ppm, host: Host::default(), is_steady: false, rate }
    }

    fn stats(sent: u64, lost: u64, rtt_us: u64, bandwidth: u64) -> ConnectionStats {
        ConnectionStats {
            packets_numbered: sent,
            packets_arrived: sent - lost,
            rtt_min: Duration::from_micros(rtt_us),
            bandwidth,
            ..ConnectionStats::default()
        }
    }

    #[test]
    fn words_survive_the_wire_and_any_bytes_are_one() {
        let hosts = [Host::default(), Host { shares_cores: true, threads: 8, insists: true }];
        for (host, is_steady) in hosts.into_iter().flat_map(|host| [(host, false), (host, true)]) {
            let word = Word { host, is_steady, ..word(250, 1000, 125_000_000) };
            assert_eq!(Word::decode(&word.encode()), word);
        }
        assert_eq!(Word::decode(&[255; Word::BYTES]).lost_ppm, 1_000_000);
        let mut unknown = [0; Word::BYTES];
        unknown[12..16].copy_from_slice(&[0b1000_1000, 255, 255, 255]);
        assert_eq!(Word::decode(&unknown), Word::decode(&[0; Word::BYTES]), "flags of a later version");
    }

    #[test]
    fn one_rank_whose_cores_are_shared_is_enough_for_all_to_know_and_the_next_exchange_forgets_it() {
        let mut agreement = Agreement::new(PLAN, 1, 3);
        let mut shared_after = |sequence, own, others: [bool; 2]| {
            agreement.set_host(Host { shares_cores: own, ..Host::default() });
            agreement.begin(sequence, [stats(1000, 0, 100, 5_000)].into_iter());
            for (rank, shares_cores) in [0, 2].into_iter().zip(others) {
                let host = Host { shares_cores, ..Host::default() };
                let silent = Word { host, ..word(0, 0, 0) }.encode();
                let row = rank * Word::BYTES..(rank + 1) * Word::BYTES;
                agreement.words.view().as_mut_slice()[row].copy_from_slice(&silent);
            }
            assert!(agreement.settle(sequence));
            agreement.reach(sequence + PLAN.lag).expect("this rank has measured").shares_cores
        };
        assert!(!shared_after(3, false, [false, false]));
        assert!(shared_after(8, true, [false, false]));
        assert!(shared_after(13, false, [false, true]), "of a rank that has measured nothing");
        assert!(!shared_after(18, false, [false, false]));
    }

    #[test]
    fn places_follow_from_the_sequence_alone() {
        let agreement = Agreement::new(PLAN, 0, 2);
        let places: Vec<u64> = (0..20).filter(|place| agreement.has_place(*place)).collect();
        assert_eq!(places, [3, 8, 13, 18]);
        assert!((0..20).all(|place| !Agreement::new(PLAN, 0, 1).has_place(place)));
    }

    // test of: auto/agreed-network
    #[test]
    fn a_result_holds_from_its_place_on_and_only_that_place_waits_for_it() {
        let mut agreement = Agreement::new(PLAN, 1, 2);
        agreement.begin(3, [stats(1000, 20, 100, 5_000)].into_iter());
        assert!(!agreement.must_wait(4) && agreement.must_wait(5));
        let other = word(200, 50_000, 7_000).encode();
        agreement.words.view().as_mut_slice()[..Word::BYTES].copy_from_slice(&other);
        assert!(agreement.settle(3) && !agreement.settle(3));
        assert_eq!((agreement.must_wait(5), agreement.reach(4)), (false, None));
        let network = AgreedNetwork {
            rtt: Duration::from_micros(100),
            rate: 5_000,
            packet_loss: 0.05,
            loss: 0.1,
            links: None,
            shares_cores: false,
            threads: 1,
        };
        assert_eq!(agreement.reach(5), Some(network.clone()));
        assert_eq!((agreement.reach(6).as_ref(), agreement.current()), (Some(&network), Some(&network)));
    }

    #[test]
    fn ranks_that_measured_nothing_have_no_say_and_the_worst_loss_counts() {
        let words = [word(0, 0, 0), word(300, 10, 900), word(100, 70, 500), word(200, 0, 700)];
        let network = combine(&words, &words.map(|word| word.rate), None).expect("three have measured");
        assert_eq!((network.rtt, network.rate), (Duration::from_micros(200), 700));
        assert_eq!(network.loss.to_bits(), (140.0_f32 / 1e6).to_bits());
        assert_eq!(combine(&[word(0, 0, 0); 3], &[0; 3], None), None);
    }

    #[test]
    fn one_sample_of_a_rate_that_is_too_high_does_not_count() {
        let mut agreement = Agreement::new(PLAN, 0, 2);
        for (sequence, rate) in (0..3).zip([100, 350, 104]) {
            agreement.on_ended((sequence, None), [1; 2], &[StageEnd::NOTHING; 2], || rate);
        }
        let last = ConnectionStats { sustained_rate: 98, ..stats(1000, 0, 100, 500) };
        agreement.begin(3, [last].into_iter());
        assert_eq!(Word::decode(&agreement.words.view().as_slice()[..Word::BYTES]).rate, 100);
        let last = ConnectionStats { sustained_rate: 40, ..stats(1000, 0, 100, 500) };
        agreement.on_ended((4, Some(3)), [1; 2], &[StageEnd::NOTHING; 2], || 50);
        agreement.begin(8, [last].into_iter());
        let said = Word::decode(&agreement.words.view().as_slice()[..Word::BYTES]).rate;
        assert_eq!(said, 120, "of 150 and 120: each of three threads carries a third");
        let plan = ExchangePlan { first: 8, every: 64, lag: 32 };
        let sampled: Vec<u64> = (0..140).filter(|place| plan.is_within(2, *place)).collect();
        assert_eq!(sampled, [6, 7, 70, 71, 134, 135]);
    }

    /// Of three ranks that measure so much.
    fn exchange(agreement: &mut Agreement, sequence: u64, rates: [u64; 3]) -> Option<Vec<u8>> {
        agreement.begin(sequence, std::iter::empty());
        let words = rates.map(|rate| word(100, 0, rate).encode()).concat();
        agreement.words.view().as_mut_slice().copy_from_slice(&words);
        assert!(agreement.settle(sequence));
        agreement.reach(sequence + PLAN.lag)?.links.map(|links| links.eighths().to_vec())
    }

    #[test]
    fn the_rate_of_a_moment_is_said_only_where_nothing_else_is_known() {
        let moment = stats(1_000, 0, 200, 25_000_000);
        let longer = ConnectionStats { sustained_rate: 6_000_000, ..moment };
        let said = |connections: &[ConnectionStats]| {
            let mut agreement = Agreement::new(PLAN, 0, 3);
            agreement.begin(PLAN.first, connections.iter().copied());
            let word = Word::decode(&agreement.words.view().as_slice()[..Word::BYTES]);
            (word.rate, word.is_steady)
        };
        assert_eq!(said(&[moment]), (25_000_000, false));
        assert_eq!(said(&[longer]), (6_000_000, true));
        assert_eq!(said(&[moment, longer]), (6_000_000, true), "another connection of the same link");
    }

    #[test]
    fn rates_of_moments_are_not_compared_with_others() {
        let agreement = Agreement::new(PLAN, 0, 3);
        let steady = |rate: u64| Word { is_steady: true, ..word(200, 0, rate) };
        let moment = |rate: u64| word(200, 0, rate);
        let rates = |words: &[Word]| agreement.rates_of(PLAN.first, words);
        assert_eq!(rates(&[moment(1), moment(2), moment(3)]), [1, 2, 3]);
        assert_eq!(rates(&[steady(1), moment(2), steady(3)]), [1, 0, 3]);
    }

    // test of: auto/slow-links
    #[test]
    fn as_long_as_a_slow_link_is_spared_the_others_are_known_to_be_fast_though_nothing_shows_it() {
        let mut agreement = Agreement::new(PLAN, 0, 3);
        assert_eq!(exchange(&mut agreement, 3, [1000, 1000, 500]), Some(vec![8, 8, 4]));
        assert_eq!(exchange(&mut agreement, 8, [550, 550, 500]), Some(vec![8, 8, 4]), "nothing shows more");
        assert_eq!(exchange(&mut agreement, 13, [900, 550, 1000]), None, "it is fast again");
        assert_eq!(
            exchange(&mut agreement, 18, [500, 1000, 1000]),
            Some(vec![4, 8, 8]),
            "nothing was remembered"
        );
    }

    #[test]
    fn few_packets_change_no_share_and_count_later() {
        let mut meter = LossMeter::default();
        let mut lost_ppm =
            |sent, lost| Word::of([stats(sent, lost, 1, 1)].into_iter(), &mut meter).0.lost_ppm;
        assert_eq!(lost_ppm(100, 50), 0, "a share of 100 packets is no share");
        assert_eq!(lost_ppm(1_000, 100), 100_000);
        assert_eq!(lost_ppm(1_010, 110), 100_000);
        assert_eq!(lost_ppm(2_000, 110), 10_000, "the ten before count now");
    }

    #[test]
    fn what_tolerant_reductions_end_without_counts_as_lost() {
        let mut agreement = Agreement::new(PLAN, 0, 2);
        let receipt = Receipt {
            reason: gradwire_core::CloseReason::Deadline,
            received_bytes: 900_000,
            total_bytes: 1_000_000,
            waited_for_peer: Duration::ZERO,
            ..receipt(Timestamp::ZERO, Duration::from_millis(1))
        };
        agreement.on_tolerant(&receipt);
        assert_eq!(
            Word::of([stats(1_000, 0, 1, 1)].into_iter(), &mut agreement.meter).0.left_out_ppm,
            100_000
        );
    }
}
