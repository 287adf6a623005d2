//! How soon what was lost of an exact transfer goes out again, judged by packets alone (`auto`, promise 3).
//!
//! ```text
//!   lost --- [a later packet or a question is on its way] --- [its answer] --- sent again
//!        at most a number of the longest round trips seen, and fixed times
//! ```
//!
//! A question that is asked when the loss should have been known, and answered, leaves no excuse. Until then:
//! the clock starts anew with each repair for the same receiver: they leave one after the other. It also does when a
//! question or an answer is lost, and the next question waits twice as long, at most the protocol's longest pause. That
//! pause is also one for ranks that have not met: they repeat their greeting first. A sender that is paced waits for its turn as
//! well: as long as it last waited before the loss.

use crate::Violation;
use gradwire_core::wire::{Flags, Header, Kind};
use gradwire_core::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Sender and receiver.
type Pair = (usize, usize);
/// A chunk on the wire: its way, its transfer, its place.
type Chunk = (Pair, u32, u32);

/// All exact transfers of a run.
#[derive(Debug, Default)]
pub(crate) struct RepairWatch {
    exact: BTreeSet<(Pair, u32)>,
    /// Chunks that have not arrived, since when, and how long their sender had last waited for its turn.
    lost: BTreeMap<Chunk, (Timestamp, Duration)>,
    arrived: BTreeSet<Chunk>,
    pairs: BTreeMap<Pair, PairState>,
    judged: u64,
    has_many_paths: bool,
}

/// What is known of one way.
#[derive(Clone, Debug, Default)]
struct PairState {
    /// The longest that a datagram has taken.
    transit_max: Duration,
    repaired_at: Timestamp,
    /// When data left last, and how long after what had left before.
    data_at: Timestamp,
    turn: Duration,
    /// When its sender first spoke as one that was answered: until then it says nothing but its greeting.
    met_at: Option<Timestamp>,
    /// When a question or an answer was lost last on this way.
    deaf_at: Option<Timestamp>,
    /// When each question was asked, by its stamp; when those that were answered were asked and answered.
    asked: BTreeMap<u32, Timestamp>,
    answered: Vec<(Timestamp, Timestamp)>,
}

impl PairState {
    /// Data leaves.
    fn takes_its_turn(&mut self, now: Timestamp) {
        if now > self.data_at {
            self.turn = now.since(self.data_at);
            self.data_at = now;
        }
    }
}

impl RepairWatch {
    /// Nothing seen yet.
    pub(crate) fn new(paths: u8) -> Self {
        Self { has_many_paths: paths > 1, ..Self::default() }
    }

    /// A rank sends a data packet; `is_exact`: of a transfer of which nothing may be missing. `idle`: the time that the hosts
    /// may add.
    pub(crate) fn on_sent(
        &mut self,
        now: Timestamp,
        pair: Pair,
        header: &Header,
        is_exact: bool,
        idle: Duration,
    ) -> Result<(), Violation> {
        if is_exact {
            self.exact.insert((pair, header.transfer.0));
        }
        let since = self.lost.remove(&(pair, header.transfer.0, header.offset));
        let state = self.pairs.entry(pair).or_default();
        let repaired_at = state.repaired_at;
        if header.flags.contains(Flags::RETRANSMITTED) {
            state.repaired_at = now;
        }
        state.takes_its_turn(now);
        let Some((lost_at, turn)) = since else { return Ok(()) };
        self.judged += 1;
        // What waited behind another repair has the excuses since that one: the answers that would have let it go may be lost.
        let judge = |since| {
            let (began_at, bound) = self.terms(pair, since, idle + turn);
            let waited = now.since(began_at.max(repaired_at));
            (waited > bound).then_some((waited, bound))
        };
        let Some((waited, bound)) = judge(lost_at).and(judge(lost_at.max(repaired_at))) else {
            return Ok(());
        };
        let (from, to) = pair;
        let (transfer, offset) = (header.transfer.0, header.offset);
        Err(Violation::RepairedLate { from, to, transfer, offset, at: now, waited, bound })
    }

    /// A rank has been answered by another, of which it hears this at its first word since.
    pub(crate) fn on_met(&mut self, now: Timestamp, pair: Pair) {
        self.pairs.entry(pair).or_default().met_at.get_or_insert(now);
    }

    /// A rank asks what has arrived.
    pub(crate) fn on_asked(&mut self, now: Timestamp, pair: Pair, header: &Header) {
        self.pairs.entry(pair).or_default().asked.insert(header.sent_at_us, now);
    }

    /// A datagram did not come through.
    pub(crate) fn on_lost(&mut self, now: Timestamp, pair: Pair, header: &Header) {
        if header.kind != Kind::Data {
            return self.pairs.entry(pair).or_default().deaf_at = Some(now);
        }
        let chunk = (pair, header.transfer.0, header.offset);
        if self.exact.contains(&(pair, header.transfer.0)) && !self.arrived.contains(&chunk) {
            let turn = self.pairs.get(&pair).map_or(Duration::ZERO, |state| state.turn.min(TURN_MAX));
            self.lost.insert(chunk, (now, turn));
        }
    }

    /// A datagram reaches its receiver.
    pub(crate) fn on_delivered(&mut self, now: Timestamp, sent_at: Timestamp, pair: Pair, header: &Header) {
        let state = self.pairs.entry(pair).or_default();
        state.transit_max = state.transit_max.max(now.since(sent_at));
        if header.kind == Kind::Ack && header.flags.contains(Flags::REPLY) {
            let asking = self.pairs.entry((pair.1, pair.0)).or_default();
            let asked_at = asking.asked.get(&header.offset).copied();
            asking.answered.extend(asked_at.map(|asked_at| (asked_at, now)));
        }
        if header.kind == Kind::Data && self.exact.contains(&(pair, header.transfer.0)) {
            let chunk = (pair, header.transfer.0, header.offset);
            self.arrived.insert(chunk);
            self.lost.remove(&chunk);
        }
    }

    /// How many repairs were judged.
    pub(crate) const fn judged(&self) -> u64 {
        self.judged
    }

    /// A sender asks after the smoothed round trip and four variations, at most five of the longest; an answer to what it sent
    /// before the loss starts that anew, after at most one; and the answer takes one. Twice as much where a question goes over
    /// one path and says nothing yet about what was lost on another.
    const fn round_trips(&self) -> u32 {
        if self.has_many_paths {
            ROUND_TRIPS * 2
        } else {
            ROUND_TRIPS
        }
    }

    /// From when on a repair is awaited, and for how long.
    fn terms(&self, pair: Pair, lost_at: Timestamp, idle: Duration) -> (Timestamp, Duration) {
        let unknown = PairState::default();
        let there = self.pairs.get(&pair).unwrap_or(&unknown);
        let back = self.pairs.get(&(pair.1, pair.0)).unwrap_or(&unknown);
        let bound = (there.transit_max + back.transit_max) * self.round_trips() + FIXED + idle;
        let met_at = there.met_at.zip(back.met_at).map(|(there, back)| there.max(back));
        let excuses = [there.deaf_at, back.deaf_at, Some(met_at.unwrap_or(lost_at))].into_iter().flatten();
        let Some(excused_at) = excuses.filter(|at| *at >= lost_at).max() else { return (lost_at, bound) };
        let told = there.answered.iter().find(|(asked_at, _)| *asked_at >= lost_at + bound);
        match told {
            Some((_, answered_at)) if *answered_at < excused_at => (*answered_at, bound),
            _ => (excused_at, bound + PAUSE_MAX),
        }
    }
}

const ROUND_TRIPS: u32 = 7;
/// The longest pause between two questions.
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// The longest that a pacer lets a sender wait; more is a sender that had nothing to send.
const TURN_MAX: Duration = Duration::from_millis(10);
/// What a sender adds to round trips: 200 us before a packet counts as overtaken, 100 us before it asks.
const FIXED: Duration = Duration::from_micros(200);
