//! Whether a bad path loses its share of new data and a healed one gets it back, judged by packets alone.
//!
//! ```text
//!   path turns gray -> [evidence(loss) packets for each path, SETTLE_RTTS] -> counted: at most a part of its even share
//!   path heals      -> [RETURN packets of the pair, RETURN_RTTS] -> counted: at least a part of its even share
//! ```
//!
//! A share is of the packets that are sent for the first time: repairs and copies take any path. What is counted of a
//! stretch is judged when it ends, if it is long enough and says something: the other paths lost nothing, for
//! paths are compared with each other; and a healed path lost nothing more, or it was right to mistrust it again.

use crate::Violation;
use gradwire_core::wire::{Flags, Header, Kind};
use gradwire_core::Timestamp;
use std::collections::BTreeMap;
use std::time::Duration;

/// Sender and receiver.
type Pair = (usize, usize);

/// All paths of a run.
#[derive(Debug, Default)]
pub(crate) struct PathWatch {
    paths: usize,
    /// What is wrong with each path now.
    states: Vec<State>,
    stretches: BTreeMap<(Pair, usize), Stretch>,
    /// What a datagram takes from one rank to another: moving average.
    transit: BTreeMap<Pair, Duration>,
    judged: u64,
}

/// What is wrong with a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Nothing, and nothing ever was, or it is not known.
    Usual,
    /// It loses so many of 1000, at least [`GRAY_PER_MILLE`].
    Gray(u16),
    /// It was gray, and nothing is wrong with any path now.
    Healed,
}

/// One path from one rank to another while its state lasts.
#[derive(Clone, Copy, Debug, Default)]
struct Stretch {
    /// New data packets, and all data packets that were lost: here and on the other paths.
    here: Tally,
    others: Tally,
    /// When enough had been seen, by the number of packets.
    enough_at: Option<Timestamp>,
    /// New data packets since the share had to be right: on this path, on all.
    counted: u64,
    counted_of: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    sent: u64,
    lost: u64,
}

impl PathWatch {
    /// Judges nothing with fewer than two paths, or when `adapts` is false: only the adaptive spray compares paths.
    pub(crate) fn new(paths: u8, adapts: bool) -> Self {
        let paths = if adapts && paths > 1 { usize::from(paths) } else { 0 };
        Self { paths, states: vec![State::Usual; paths], ..Self::default() }
    }

    /// A path begins to lose so many of 1000 datagrams, or heals.
    pub(crate) fn on_change(
        &mut self,
        now: Timestamp,
        path: usize,
        loss_per_mille: u16,
    ) -> Result<(), Violation> {
        if path >= self.paths {
            return Ok(());
        }
        let result = self.judge_all(now);
        let was_gray = matches!(self.states[path], State::Gray(_));
        self.states[path] = match loss_per_mille {
            0 if was_gray => State::Healed,
            loss if loss >= GRAY_PER_MILLE => State::Gray(loss),
            _ => State::Usual,
        };
        result
    }

    /// A rank sends a data packet.
    pub(crate) fn on_sent(&mut self, now: Timestamp, pair: Pair, header: &Header) {
        if self.paths == 0 || header.kind != Kind::Data {
            return;
        }
        let is_new = !header.flags.contains(Flags::RETRANSMITTED);
        let way = |pair| self.transit.get(&pair).copied().unwrap_or_default();
        let round_trip = way(pair) + way((pair.1, pair.0));
        let is_healthy = !self.states.iter().any(|state| matches!(state, State::Gray(_)));
        for path in 0..self.paths {
            let is_here = path == usize::from(header.path.0);
            let stretch = self.stretches.entry((pair, path)).or_default();
            stretch.on_sent(
                now,
                is_here,
                is_new,
                (self.states[path], is_healthy),
                (round_trip, self.paths as u64),
            );
        }
    }

    /// The network lost a data packet, or a port had no room for it.
    pub(crate) fn on_lost(&mut self, pair: Pair, header: &Header) {
        if header.kind != Kind::Data {
            return;
        }
        for path in 0..self.paths {
            let stretch = self.stretches.entry((pair, path)).or_default();
            let is_here = path == usize::from(header.path.0);
            (if is_here { &mut stretch.here } else { &mut stretch.others }).lost += 1;
        }
    }

    /// A datagram has arrived.
    pub(crate) fn on_delivered(&mut self, now: Timestamp, sent_at: Timestamp, pair: Pair) {
        if self.paths > 0 {
            let took = now.since(sent_at);
            let usual = self.transit.entry(pair).or_insert(took);
            *usual = (*usual * 7 + took) / 8;
        }
    }

    /// Judges what was counted so far and begins anew.
    pub(crate) fn judge_all(&mut self, now: Timestamp) -> Result<(), Violation> {
        for (((from, to), path), stretch) in std::mem::take(&mut self.stretches) {
            let Some((most, least)) = stretch.bounds(self.states[path], self.paths as u64) else { continue };
            self.judged += 1;
            let (packets, of) = (stretch.counted, stretch.counted_of);
            if packets < least || packets > most {
                return Err(Violation::PathShare { from, to, path, at: now, packets, of, least, most });
            }
        }
        Ok(())
    }

    /// Shares that were judged so far.
    pub(crate) fn judged(&self) -> u64 {
        self.judged
    }
}

impl Stretch {
    fn on_sent(
        &mut self,
        now: Timestamp,
        is_here: bool,
        is_new: bool,
        (state, is_healthy): (State, bool),
        (round_trip, paths): (Duration, u64),
    ) {
        let tally = if is_here { &mut self.here } else { &mut self.others };
        tally.sent += 1;
        let rtts = match state {
            State::Usual => return,
            State::Gray(loss) if self.here.sent + self.others.sent < evidence(loss) * paths => return,
            State::Healed if !is_healthy || self.here.sent + self.others.sent < RETURN => return,
            State::Gray(_) => SETTLE_RTTS,
            State::Healed => RETURN_RTTS,
        };
        let enough_at = *self.enough_at.get_or_insert(now);
        if is_new && now >= enough_at + round_trip * rtts {
            self.counted_of += 1;
            self.counted += u64::from(is_here);
        }
    }

    /// The most and the least that it may have carried; `None` when nothing can be said.
    fn bounds(&self, state: State, paths: u64) -> Option<(u64, u64)> {
        let even = self.counted_of / paths;
        if self.counted_of < COUNTED_MIN {
            return None;
        }
        match state {
            State::Gray(loss) if self.others.lost == 0 => Some((even / gray_part(loss) + GRAY_SLACK, 0)),
            State::Healed if self.here.lost == 0 => Some((u64::MAX, even / HEALED_PART)),
            _ => None,
        }
    }
}

/// Packets on a gray path, at an even share, after which chance is no excuse: 38 of them are lost on average, and fewer
/// than fourteen once in a million times.
fn evidence(loss_per_mille: u16) -> u64 {
    (LOSSES_TELLING * 1_000).div_ceil(u64::from(loss_per_mille)).max(EVIDENCE_MIN)
}

/// Of its even share a gray path may carry one part in so many: one that loses little comes back now and then, because
/// its trials go well.
fn gray_part(loss_per_mille: u16) -> u64 {
    if loss_per_mille >= CLEARLY_PER_MILLE {
        8
    } else {
        2
    }
}

/// From this loss on a path has to lose its share...
const GRAY_PER_MILLE: u16 = 10;
/// ... and from this one on nearly all of it.
const CLEARLY_PER_MILLE: u16 = 50;
const LOSSES_TELLING: u64 = 38;
/// Beyond this a path is dead as well as gray: 768 packets are 38 losses at 5 %.
const EVIDENCE_MIN: u64 = 768;
/// Round trips from there until nothing new goes over it.
const SETTLE_RTTS: u32 = 8;
/// What it costs to find out again, once, that it has not healed.
const GRAY_SLACK: u64 = 512;
/// Packets of a pair after which a healed path must be back: 256 copies, one for 16 packets.
const RETURN: u64 = 16 * 256 + 512;
/// As above, four copies in a round trip.
const RETURN_RTTS: u32 = 64;
/// Of its even share a healed path must have one part in so many: of two paths the better one is taken, and one that is
/// never better gets a quarter of the even share of four.
const HEALED_PART: u64 = 8;
/// Fewest packets that say something about a share.
const COUNTED_MIN: u64 = 1_000;
