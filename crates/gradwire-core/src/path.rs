//! One way for packets between two ranks: its estimates, its flight, its rate.

use crate::arrivals::Arrivals;
use crate::drought::Drought;
use crate::recovery::{
    AckOutcome, AckSample, Controller, Ledger, Pacer, RateController, RttEstimator, SentPacket,
    SustainedRate, WayBack,
};
use crate::time::{ROUND_TRIP_BELIEVED, ROUND_TRIP_MAX_US};
use crate::{ConnectionConfig, RoundTrips, Timestamp};
use core::time::Duration;
use gradwire_wire::{AckPath, PacketNumber, PathId, TransferId};

/// Round-trip time assumed before the first sample.
const RTT_INITIAL: Duration = Duration::from_millis(20);
/// Shortest time between two packets with the same data in a flood while a path is too long to know of the loss by then.
const REPEATED_MIN: Duration = Duration::from_millis(1);
/// Acknowledgements that a window is worth at least.
const ACKS_PER_WINDOW: u64 = 4;

/// A round trip, and how long the acknowledgement waited for more packets at the receiver and behind others on its way back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trip {
    /// None where it was told of already.
    rtt: Option<Duration>,
    held: Duration,
    waited: Duration,
}

/// What an acknowledgement echoes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Echo {
    /// The stamp of a question.
    Question(u32),
    /// That of this packet, the newest one that has come on the path.
    Packet(PacketNumber),
}

/// From a stamp to its echo, less what that waited; `None` when it cannot be.
fn round_trip(now: Timestamp, echo_us: u32, delay_us: u32) -> Option<Duration> {
    let elapsed = now.as_wire_us().wrapping_sub(echo_us);
    let rtt = elapsed.checked_sub(delay_us).unwrap_or(elapsed);
    (rtt <= ROUND_TRIP_MAX_US).then(|| Duration::from_micros(u64::from(rtt.max(1))))
}

impl Trip {
    /// Of what a further entry of the acknowledgement names: it has waited as long on its way back.
    pub(crate) fn of_further_entries(self) -> Self {
        Self { rtt: None, held: Duration::ZERO, ..self }
    }
}

/// Sending and receiving state of one path.
#[derive(Debug)]
pub(crate) struct Path {
    pub(crate) id: PathId,
    pub(crate) ledger: Ledger,
    pub(crate) rtt: RttEstimator,
    /// Stamp of the latest question that was answered on it.
    answered_us: Option<u32>,
    /// Newest packet that an acknowledgement on this path has named. Those of the other paths name it too, mostly before: they say nothing
    /// of how long a round trip is here.
    named: Option<PacketNumber>,
    /// Every sample of it, for statistics.
    pub(crate) round_trips: RoundTrips,
    /// None with several paths: with it a path that has healed was seen not to get its share back, and why is not known.
    way_back: Option<WayBack>,
    pub(crate) controller: Controller,
    /// What it has carried for a while.
    pub(crate) sustained: SustainedRate,
    pub(crate) arrivals: Arrivals,
    /// None with several paths: those that lose all carry none of the data, only copies.
    drought: Option<Drought>,
    pacer: Pacer,
    chunk_bytes: u64,
    /// There was nothing to send though the window was open: delivery rates are lower bounds.
    app_limited: bool,
    last_sent_at: Timestamp,
    /// When an acknowledgement last named a packet of this path for the first time.
    pub(crate) news_at: Timestamp,
    /// Bytes sent since an acknowledgement was last asked for.
    unasked_bytes: u64,
    /// Bytes of full packets that are worth an acknowledgement.
    acked_bytes: u64,
    /// What counted as lost in this round trip and had only been overtaken: its rate controller has been told of it, and hears of so
    /// much less that is lost later in it.
    unlost_bytes: u64,
}

/// What an answered probe had asked about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) before: Before,
    /// When it left.
    pub(crate) at: Timestamp,
    /// The network's queue that it takes.
    pub(crate) queue: u8,
}

/// What had been sent when a probe left.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Before {
    /// Packets before this number.
    Number(PacketNumber),
    /// Packets sent then or earlier.
    Time(Timestamp),
}

impl Path {
    pub(crate) fn new(id: PathId, config: &ConnectionConfig, now: Timestamp) -> Self {
        let chunk_bytes = u64::from(config.chunk_bytes());
        let pacer = Pacer::new(now);
        Self {
            id,
            ledger: if config.has_class_queues() { Ledger::by_queue() } else { Ledger::new() },
            rtt: RttEstimator::new(RTT_INITIAL),
            answered_us: None,
            named: None,
            round_trips: RoundTrips::default(),
            way_back: (config.paths == 1).then(WayBack::default),
            controller: Controller::new(config.controller, &config.controller_settings()),
            sustained: SustainedRate::default(),
            arrivals: Arrivals::new(id, config),
            drought: (config.paths == 1).then(Drought::default),
            pacer: if config.paths == 1 { pacer.in_whole_bursts(chunk_bytes) } else { pacer },
            chunk_bytes,
            app_limited: true,
            last_sent_at: now,
            news_at: now,
            unasked_bytes: 0,
            acked_bytes: u64::from(config.ack_every) * chunk_bytes,
            unlost_bytes: 0,
        }
    }

    /// Looks for the path's rate from the beginning: what was known of it is out of date.
    pub(crate) fn restart(&mut self, config: &ConnectionConfig) {
        self.controller = self.controller.restarted(config.controller, &config.controller_settings());
        self.sustained = SustainedRate::default();
    }

    fn is_window_full(&self) -> bool {
        let in_flight = self.ledger.in_flight();
        in_flight > 0 && in_flight + self.chunk_bytes > self.window()
    }

    fn window(&self) -> u64 {
        let tried = self.drought.as_ref().map_or(u64::MAX, |drought| drought.window(self.chunk_bytes));
        self.controller.cwnd().min(tried)
    }

    /// Whether a data packet may leave now; called only when there is one.
    pub(crate) fn may_send(&mut self, now: Timestamp) -> bool {
        let (rate, burst) = (self.controller.pacing_rate(), self.controller.burst());
        let full = self.is_window_full();
        if full {
            self.pacer.on_held_back();
        }
        let open = !full && now >= self.rests_until() && self.pacer.allows(now, rate, burst);
        self.app_limited &= open;
        open
    }

    /// The same, where [`Path::may_send`] has just said so and only packets have left since, none of them later than that.
    pub(crate) fn may_send_on(&self, now: Timestamp) -> bool {
        let open = !self.is_window_full() && self.pacer.allows_on();
        debug_assert_eq!(open, {
            let (rate, burst) = (self.controller.pacing_rate(), self.controller.burst());
            !self.is_window_full() && self.pacer.clone().allows(now, rate, burst)
        });
        open
    }

    /// When the pacer lets the next packet go; `None` when the window is full: an acknowledgement must come first.
    pub(crate) fn sends_at(&self) -> Option<Timestamp> {
        let (rate, burst) = (self.controller.pacing_rate(), self.controller.burst());
        (!self.is_window_full()).then(|| self.pacer.next_send(rate, burst).max(self.rests_until()))
    }

    /// A packet of so many bytes has arrived, as the end of its transfer says: that comes before an acknowledgement, and is said once.
    pub(crate) fn on_said_to_arrive(&mut self, bytes: u32) {
        self.drought.iter_mut().for_each(|drought| drought.on_arrived(bytes));
    }

    /// The bytes of the smallest of many packets of which none has arrived, though what they belong to was asked about and answered.
    pub(crate) fn lost_in_drought(&self) -> Option<u32> {
        self.drought.as_ref().and_then(Drought::smallest)
    }

    fn rests_until(&self) -> Timestamp {
        self.drought.as_ref().map_or(Timestamp::ZERO, Drought::until)
    }

    /// There is nothing to send.
    pub(crate) fn on_starved(&mut self) {
        self.pacer.on_starved(self.controller.makes_up_pauses());
        self.app_limited = true;
    }

    /// Whether the packet that leaves now must be acknowledged at once: four times in each window, so that a small
    /// window never waits for the receiver's count of packets; and in a flood after as many packets as that count: what
    /// would bring an acknowledgement later may be lost.
    pub(crate) fn wants_ack(&mut self, bytes: u32) -> bool {
        self.unasked_bytes += u64::from(bytes);
        let wants = self.unasked_bytes >= self.asks_after();
        if wants {
            self.unasked_bytes = 0;
        }
        wants
    }

    /// Bytes after which an acknowledgement is asked for.
    fn asks_after(&self) -> u64 {
        let quarter = self.window() / ACKS_PER_WINDOW;
        if self.controller.is_flooded() {
            quarter.min(self.acked_bytes)
        } else {
            quarter
        }
    }

    /// A data packet left that takes this queue of the network.
    pub(crate) fn on_sent(&mut self, now: Timestamp, packet: SentPacket, queue: u8) {
        if self.ledger.in_flight() == 0 && now.since(self.last_sent_at) > self.rtt.smoothed() {
            self.controller.on_idle_restart(now);
        }
        self.last_sent_at = now;
        self.sustained.on_sent(now, self.ledger.in_flight());
        let bytes = u64::from(packet.bytes);
        self.ledger.on_sent(packet, queue, self.app_limited);
        self.pacer.on_sent(bytes, self.controller.burst());
    }

    /// Packets like `first`, `most` at most, each with the next number and chunk, leave right behind another while the path lets them go and
    /// wants no acknowledgement of one. How many.
    pub(crate) fn send_run(&mut self, now: Timestamp, first: SentPacket, queue: u8, most: u32) -> u32 {
        debug_assert_eq!(self.last_sent_at, now, "a run is behind another packet, so nothing was idle");
        let (bytes, burst, asks_after) = (u64::from(first.bytes), self.controller.burst(), self.asks_after());
        let (mut packet, mut count) = (first, 0);
        while count < most && self.unasked_bytes + bytes < asks_after && self.may_send_on(now) {
            self.unasked_bytes += bytes;
            self.ledger.on_sent(packet, queue, self.app_limited);
            self.pacer.on_sent(bytes, burst);
            (packet.number, packet.chunk) = (packet.number.next(), packet.chunk + 1);
            count += 1;
        }
        count
    }

    /// Takes a round-trip sample from an echoed time stamp; `None` when it cannot be.
    pub(crate) fn sample_rtt(&mut self, now: Timestamp, echo_us: u32) -> Option<Duration> {
        let rtt = round_trip(now, echo_us, 0)?;
        self.take_sample(now, rtt);
        Some(rtt)
    }

    fn take_sample(&mut self, now: Timestamp, rtt: Duration) {
        self.rtt.on_sample(now, rtt);
        self.round_trips.add(rtt);
    }

    /// Whether the answer to a question (a probe, a ping) that left with this stamp says how long a round trip is now: not if a later one was
    /// answered before, nor if the network has held it.
    pub(crate) fn is_news(&mut self, now: Timestamp, echo_us: u32) -> bool {
        let age = |stamp: u32| now.as_wire_us().wrapping_sub(stamp);
        let is_later = self.answered_us.is_none_or(|answered| age(echo_us) < age(answered));
        let is_fresh = Duration::from_micros(u64::from(age(echo_us))) <= ROUND_TRIP_BELIEVED;
        if is_later && is_fresh {
            self.answered_us = Some(echo_us);
        }
        is_later && is_fresh
    }

    /// The round trip that an acknowledgement completes, which its sender stamped with `sent_at_us` and which names a newest packet and since
    /// when that is there; `None` as above. It is a sample (RFC 9002 section 5.1) if it echoes a question, or a packet that is newer than what
    /// this path's acknowledgements have named before. What is not in flight any more was held on its way (Karn), was acknowledged over another
    /// path, or is of a path that has become so slow that all is late, which would not be known otherwise: of that, if it is a time to be believed.
    pub(crate) fn sample_trip(
        &mut self,
        now: Timestamp,
        echo: Echo,
        sent_at_us: u32,
        (newest_us, held_us): (u32, u32),
    ) -> Option<Trip> {
        // As what it waits on its way back, of an only path's.
        let is_possible = held_us <= now.as_wire_us().wrapping_sub(newest_us) && self.way_back.is_some();
        let held = Duration::from_micros(if is_possible { u64::from(held_us) } else { 0 });
        let (rtt, is_sample) = match echo {
            Echo::Question(stamp) => (round_trip(now, stamp, 0)?, true),
            Echo::Packet(number) => {
                let rtt = round_trip(now, newest_us, held_us)?;
                let is_due = self.ledger.is_in_flight(number) || rtt <= ROUND_TRIP_BELIEVED;
                let is_sample = self.names_anew(number) && is_due;
                (rtt, is_sample)
            }
        };
        if is_sample {
            self.take_sample(now, rtt);
        }
        let waited = self.way_back.as_mut().map_or(Duration::ZERO, |way| way.waited(now, sent_at_us, rtt));
        Some(Trip { rtt: is_sample.then_some(rtt), held, waited })
    }

    /// An acknowledgement on this path has this packet as its newest. Whether none has named a newer one, nor this one, before.
    pub(crate) fn names_anew(&mut self, number: PacketNumber) -> bool {
        let was_sent = self.ledger.next_number().since(number) > 0;
        let is_newer = was_sent && self.named.is_none_or(|named| number.since(named) > 0);
        if is_newer {
            self.named = Some(number);
        }
        is_newer
    }

    /// Applies an acknowledgement; `outcome` lists what it changed. `false`: it acknowledges what was never sent.
    pub(crate) fn on_ack(
        &mut self,
        now: Timestamp,
        ack: &AckPath,
        trip: Option<Trip>,
        outcome: &mut AckOutcome,
    ) -> bool {
        let held = |trip: Trip| if self.controller.measures_arrivals() { trip.held } else { Duration::ZERO };
        let since_arrival = trip.map_or(Duration::ZERO, |trip| held(trip) + trip.waited);
        if !self.ledger.on_ack(now, since_arrival, ack, self.rtt.loss_delay(), outcome) {
            return false;
        }
        if !outcome.acked.is_empty() {
            self.news_at = now;
        }
        self.inform_controller(now, trip, outcome);
        true
    }

    /// A transfer is over. What its packets are acknowledged by the peer may hold back, as this rank would where they come as far apart.
    pub(crate) fn forget(&mut self, transfer: TransferId) {
        let rate = self.controller.pacing_rate().max(1);
        let held = self.arrivals.hold().of(Duration::from_nanos(self.chunk_bytes * 1_000_000_000 / rate));
        self.ledger.forget(transfer, held);
    }

    /// When [`Path::on_loss_timeout`] is due.
    pub(crate) fn loss_time(&self) -> Option<Timestamp> {
        if self.controller.is_flooded() {
            return self.ledger.oldest_sent_at().map(|at| at + self.flood_delay());
        }
        self.ledger.loss_time(self.rtt.loss_delay())
    }

    /// Declares by time what counts as lost.
    pub(crate) fn on_loss_timeout(&mut self, now: Timestamp, outcome: &mut AckOutcome) {
        if self.controller.is_flooded() {
            let late = self.flood_delay().as_nanos() as u64;
            return self.lose_before(
                now,
                Timestamp::from_nanos(now.as_nanos().saturating_sub(late)),
                outcome,
            );
        }
        self.ledger.on_timeout(now, self.rtt.loss_delay(), outcome);
        self.inform_controller(now, None, outcome);
    }

    /// After how long what was not acknowledged goes again in a flood, overtaken or not: so much is lost of the last packets, and of
    /// their repetitions, that a round trip for each would be most of the time. While there is nothing else to send it goes twice in
    /// a round trip, but no more often than once in a millisecond; over paths that are so short as often as otherwise.
    fn flood_delay(&self) -> Duration {
        let delay = self.rtt.loss_delay();
        if self.app_limited {
            (delay / 2).max(REPEATED_MIN.min(delay))
        } else {
            delay
        }
    }

    /// All entries of an acknowledgement are applied: declares what they show to be lost, where the network has a queue for each class.
    pub(crate) fn lose_overtaken(&mut self, now: Timestamp, outcome: &mut AckOutcome) {
        self.ledger.on_timeout(now, self.rtt.loss_delay(), outcome);
        if !outcome.lost.is_empty() {
            self.inform_controller(now, None, outcome);
        }
    }

    /// Everything sent at or before `sent_at` that is not acknowledged by now is lost.
    pub(crate) fn lose_before(&mut self, now: Timestamp, sent_at: Timestamp, outcome: &mut AckOutcome) {
        self.ledger.lose_before(sent_at, outcome);
        self.inform_controller(now, None, outcome);
    }

    /// A probe was answered: everything sent before it that it has not overtaken, and that is not acknowledged by now, is lost.
    pub(crate) fn on_answer(&mut self, now: Timestamp, asked: Asked, outcome: &mut AckOutcome) {
        match asked.before {
            Before::Number(next) => self.ledger.lose_older(next, (asked.at, asked.queue), outcome),
            Before::Time(at) => self.ledger.lose_asked_before(at, asked.queue, outcome),
        }
        self.inform_controller(now, None, outcome);
    }

    /// Tells the rate controller, and what compares links, what an acknowledgement or timer changed.
    fn inform_controller(&mut self, now: Timestamp, trip: Option<Trip>, outcome: &AckOutcome) {
        let bytes = |packets: &[SentPacket]| packets.iter().map(|p| u64::from(p.bytes)).sum();
        let lost_bytes: u64 = bytes(&outcome.lost);
        self.unlost_bytes += outcome.unlost.1;
        let was_told = lost_bytes.min(self.unlost_bytes);
        self.unlost_bytes = if outcome.round_ended { 0 } else { self.unlost_bytes - was_told };
        let sample = AckSample {
            now,
            rtt: trip.and_then(|trip| Some(trip.rtt? - trip.waited)),
            waited: trip.map_or(Duration::ZERO, |trip| trip.waited),
            acked_bytes: bytes(&outcome.acked),
            lost_bytes: lost_bytes - was_told,
            in_flight: self.ledger.in_flight(),
            delivery_rate: outcome.delivery_rate,
            rate_bytes: outcome.rate_bytes,
            app_limited: outcome.app_limited,
            round_ended: outcome.round_ended,
        };
        let is_flooded = self.controller.is_flooded();
        match &mut self.drought {
            // What strangers crowd out is no broken way, and whoever yields to them is shut out.
            Some(drought) if is_flooded => *drought = Drought::default(),
            Some(drought) => {
                drought.on_lost(now, &outcome.lost, self.rtt.min());
                outcome.acked.iter().for_each(|packet| drought.on_arrived(packet.bytes));
            }
            None => {}
        }
        self.sustained.on_ack(now, sample.acked_bytes, sample.in_flight);
        self.controller.on_ack(&sample);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_packets_go_again_in_a_flood_no_later_than_those_of_bulk_however_short_the_path() {
        for rtt_us in [20, 100, 500, 1_000, 1_800, 5_000, 40_000] {
            let mut path = Path::new(PathId(0), &crate::config::tests::config(), Timestamp::ZERO);
            path.rtt.on_sample(Timestamp::ZERO, Duration::from_micros(rtt_us));
            path.app_limited = false;
            let bulk = path.flood_delay();
            path.app_limited = true;
            let tail = path.flood_delay();
            assert!(tail <= bulk, "{rtt_us} us: {tail:?} and {bulk:?}");
            assert!(tail * 2 <= bulk.max(REPEATED_MIN * 2), "{rtt_us} us: {tail:?} and {bulk:?}");
        }
    }
}
