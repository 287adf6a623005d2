//! The way in of many datagrams at once.
//!
//! What a sender has to say at one moment is mostly a run: new data of one transfer, each packet and each chunk the next one. Receive
//! offload brings dozens of them as one piece. Taken one by one, each is parsed, looked up, judged and counted on its own; the heads of a
//! run are compared with what they must be, and the rest is done once (docs/performance.md says what that brings).
//! The state afterwards is that of the connection that took them one by one, to the last bit: where that is not certain, there is no run.

use super::Connection;
use crate::{Datagrams, Payloads, ReceivedMark, Timestamp};
use gradwire_wire::{Flags, Header, Kind, HEADER_BYTES};

/// Flags that a packet of a run may have: whatever they ask for is the same asked once or more often.
const IN_RUNS: Flags =
    Flags::CRITICAL.with(Flags::IMPORTANT).with(Flags::LAST_PERCENTILE).with(Flags::ACK_NOW);

/// A run that may be taken.
struct ArrivingRun {
    /// Of the first packet.
    header: Header,
    /// Place of its transfer in `receives`.
    index: usize,
    first_chunk: u32,
    chunks: u32,
}

impl Connection {
    /// As [`Connection::handle_marked_datagram`] for each datagram of the run with which `datagrams` begin. `None`: they begin with no
    /// run, nothing was changed, and the first is to be taken on its own.
    pub fn handle_run<'d>(
        &mut self,
        now: Timestamp,
        datagrams: Datagrams<'d>,
        mark: ReceivedMark,
    ) -> Option<Payloads<'d>> {
        let run = self.arriving_run(now, datagrams)?;
        self.take_run(now, &run, mark);
        let Header { transfer, offset, weight, .. } = run.header;
        let count = run.chunks as usize;
        let datagrams = datagrams.first(count);
        Some(Payloads { transfer, offset: u64::from(offset), weight, count, datagrams })
    }

    fn arriving_run(&self, now: Timestamp, datagrams: Datagrams<'_>) -> Option<ArrivingRun> {
        let mut all = datagrams.iter();
        let first = all.next()?;
        let (header, payload) = Header::decode(first).ok()?;
        let is_plain = header.kind == Kind::Data && IN_RUNS.contains(header.flags);
        // On several paths neighbours of a transfer go different ways.
        let is_on_only_path = self.paths.len() == 1 && self.paths.contains(header.path);
        let is_ours = header.connection == self.config.local && !self.liveness.is_aborting();
        if !is_plain || !is_on_only_path || !is_ours {
            return None;
        }
        if !self.paths.at(0).arrivals.is_next(header.packet_number) {
            return None;
        }
        let index = self.receives.iter().position(|half| half.request.transfer == header.transfer)?;
        let half = &self.receives[index];
        if !half.request.may_weigh(header.weight) {
            return None;
        }
        let first_chunk = half.grid.chunk_at(u64::from(header.offset), payload.len())?;
        let most = half.whole_chunks_missing(first_chunk, payload.len());
        let mut next = header;
        let follows = |datagram: &&[u8]| {
            next.packet_number = next.packet_number.next();
            // Inside of a transfer, whose bytes 32 bits count.
            next.offset = next.offset.wrapping_add(payload.len() as u32);
            datagram.len() == first.len() && datagram[..HEADER_BYTES] == next.encode()
        };
        let behind = most.saturating_sub(1) as usize;
        let mut chunks = 1 + all.take(behind).take_while(follows).count() as u32;
        // A contract that may close before the last of them is asked with fewer, in the end for each.
        while chunks > 1 && half.might_close_within(now, chunks, header.flags) {
            chunks /= 2;
        }
        (chunks > 1).then_some(ArrivingRun { header, index, first_chunk, chunks })
    }

    fn take_run(&mut self, now: Timestamp, run: &ArrivingRun, mark: ReceivedMark) {
        let ArrivingRun { header, index, first_chunk, chunks } = run;
        self.run = None;
        self.heard_on = header.path;
        self.transit.on_packet(now, header.sent_at_us);
        self.stats.tags.on_received(mark, header.flags.contains(Flags::IMPORTANT), *chunks);
        self.paths.at_mut(0).arrivals.record_run(now, header, *chunks);
        self.on_heard(now);
        let half = &mut self.receives[*index];
        self.stats.bytes_received += half.accept_run(now, *first_chunk, *chunks);
        self.stats.packets_received += u64::from(*chunks);
        half.grant_seen = true;
        if header.flags.contains(Flags::LAST_PERCENTILE) {
            half.on_last_percentile();
        }
        self.peer_sent_at = now;
        let (posted_at, is_first_pass_over) = (half.posted_at, half.is_first_pass_over());
        self.on_reached(posted_at);
        if is_first_pass_over {
            self.put_question_off(now, *index);
        }
        self.close_if_satisfied(now, *index);
    }
}
