//! The way out of many packets at once.
//!
//! New data of one transfer leaves in runs of dozens of packets at one moment. What was decided for the first of them holds for all that
//! follow ([`Run`]), and most of them differ in number and place alone: these are counted, and handed out, as one
//! (docs/performance.md says what that brings). The state afterwards is that of the connection that gave them one by one, to the last bit.
//! The first packet and the last one, a critical one and one that asks for an acknowledgement leave by themselves. Where the last percent
//! begins, or important chunks do or end, another piece does.

use super::outbound::Choice;
use super::Connection;
use crate::recovery::SentPacket;
use crate::{Body, Flags, Mark, Timestamp, Transmit};
use gradwire_wire::{Header, Kind, PacketNumber};

/// What was decided for a packet of new data holds for those behind it until something else happens to the connection: there is no control to
/// send, nothing goes before this transfer, and its only path is open.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) at: Timestamp,
    pub(super) send: usize,
}

/// Data packets to send, each with the next number and the next chunk. Their payload is `bytes * count` bytes of the transfer
/// `header.transfer` from `offset` on, taken by the caller from its own memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TransmitRun {
    /// Of the first; for those behind it see [`TransmitRun::header_of`]. The caller sets `weight` before encoding.
    pub header: Header,
    /// How the network is asked to treat them.
    pub mark: Mark,
    /// Byte offset of the first.
    pub offset: u64,
    /// Payload of each, bytes.
    pub bytes: usize,
    /// How many.
    pub count: usize,
}

impl TransmitRun {
    /// Header of the packet so many behind the first.
    #[must_use]
    pub fn header_of(&self, place: usize) -> Header {
        // Inside of a transfer, whose bytes 32 bits count.
        let offset = self.header.offset.wrapping_add((place * self.bytes) as u32);
        let packet_number = PacketNumber(self.header.packet_number.0.wrapping_add(place as u32));
        Header { packet_number, offset, ..self.header }
    }

    /// The packet so many behind the first, on its own.
    #[must_use]
    pub fn packet(&self, place: usize) -> Transmit {
        Transmit {
            header: self.header_of(place),
            mark: self.mark,
            is_trial: false,
            may_follow: false,
            opening: None,
            body: Body::Payload { offset: self.offset + (place * self.bytes) as u64, bytes: self.bytes },
        }
    }

    /// Without so many of its first packets.
    #[must_use]
    pub fn behind(&self, places: usize) -> Self {
        let offset = self.offset + (places * self.bytes) as u64;
        Self { header: self.header_of(places), offset, count: self.count - places, ..*self }
    }
}

impl Connection {
    /// As [`Connection::poll_transmit`] would give them: the next packets, `most` at most, of the run whose latest packet left at this
    /// moment, each as long as that one: the caller has asked for room for so many of its length. `None`: the next datagram is none of
    /// those, or there is none; ask [`Connection::poll_transmit`].
    pub fn poll_transmit_run(&mut self, now: Timestamp, most: usize) -> Option<TransmitRun> {
        let index = self.run.filter(|run| run.at == now)?.send;
        if !self.probe_due.is_empty() {
            return None;
        }
        let send = &self.sends[index];
        let (chunk, alike) = send.alike_ahead(u32::try_from(most).unwrap_or(u32::MAX))?;
        debug_assert!(
            self.is_next(now, Choice { send: index, chunk, again: false }),
            "{chunk} would not be chosen"
        );
        let (transfer, bytes, offset) =
            (send.request.transfer, send.grid.len(chunk), send.grid.offset(chunk));
        let is_in_last_percent = send.is_in_last_percent(chunk);
        let number = self.paths.at(0).ledger.next_number();
        let first = SentPacket { number, transfer, chunk, bytes, sent_at: now };
        let queue = self.config.queue_of(send.request.tags.class);
        let count = self.paths.send_run(now, first, queue, alike);
        if count == 0 {
            return None;
        }
        self.sends[index].on_sent_run(chunk, count);
        let next = Choice { send: index, chunk: chunk + count, again: false };
        debug_assert!(
            count == alike || self.is_next(now, next),
            "{count} of {alike} leave, and another would be chosen"
        );
        self.count_sent(&first, count);
        let mut flags = if is_in_last_percent { Flags::LAST_PERCENTILE } else { Flags::NONE };
        let mark = self.mark_data(index, chunk, (false, count), &mut flags);
        let mut header = self.header(now, Kind::Data, transfer);
        header.flags = flags;
        header.weight = 1;
        header.path = self.paths.at(0).id;
        header.packet_number = number;
        header.offset = offset as u32;
        Some(TransmitRun { header, mark, offset, bytes: bytes as usize, count: count as usize })
    }
}
