//! Datagrams out: header and opening from a small stack buffer, payload straight from the tensor.

use super::{drive, Group, TransmitSink};
use crate::ops::Ops;
use crate::peer::Peer;
use gradwire_core::wire::{Writer, HEADER_BYTES, OPENING_BYTES, TAG_BYTES};
use gradwire_core::{
    Body, Flags, Timestamp, Transmit, TransmitRun, MESSAGE_BYTES_MAX, MESSAGE_DATAGRAMS_MAX,
};

impl Group {
    /// Gives datagrams to the sink until it is full or no connection may send. Peers take turns, so that a fast
    /// one does not starve the others; a turn is a burst, because the kernel takes a burst to one peer at once.
    pub(super) fn transmit(&mut self, now: Timestamp, sink: &mut dyn TransmitSink) {
        let count = self.peers.len();
        self.peers.begin_turns(now);
        // Peers that were passed over, or had nothing, since the last one that sent.
        let (mut idle, mut from) = (0, self.turn);
        while sink.has_room() {
            let Some(slot) = self.peers.next_ready(from) else { break };
            idle += (slot + count - from) % count;
            if idle >= count {
                break;
            }
            from = (slot + 1) % count;
            if self.burst(now, slot, sink) {
                (idle, self.turn) = (0, from);
            } else {
                idle += 1;
            }
        }
        self.peers.end_turns(now);
    }

    /// One turn of one peer: as much data as one kernel message holds, behind its control packets. Whether anything was sent.
    fn burst(&mut self, now: Timestamp, slot: usize, sink: &mut dyn TransmitSink) -> bool {
        let Self { peers, ops, scratch, .. } = self;
        let (mut sent, mut left) = (0, MESSAGE_BYTES_MAX);
        while sent < MESSAGE_DATAGRAMS_MAX && sink.has_room() {
            let (head, body) = scratch.split_at_mut(HEADER_BYTES);
            let Some(transmit) = peers.poll_transmit(now, slot, body) else { break };
            sent += 1;
            let peer = &peers[slot];
            match transmit.body {
                Body::Control { bytes } => {
                    // All of it is head: the sink copies that, and the next control packet uses the scratch again.
                    head.copy_from_slice(&transmit.header.encode());
                    let datagram = &scratch[..HEADER_BYTES + bytes];
                    match transmit {
                        Transmit { is_trial: true, mark, .. } => sink.push_trial(peer.rank, mark, datagram),
                        Transmit { may_follow: true, mark, .. } => {
                            sink.push_patient(peer.rank, mark, datagram)
                        }
                        Transmit { mark, .. } => sink.push(peer.rank, mark, datagram, &[]),
                    }
                }
                Body::Payload { offset, bytes } => {
                    push_payload(peer, ops, transmit, offset as usize, bytes, sink);
                    let each = HEADER_BYTES + bytes + TAG_BYTES;
                    left = left.saturating_sub(each);
                    let most = (left / each).min(MESSAGE_DATAGRAMS_MAX - sent);
                    let most = sink.room_for(peer.rank, HEADER_BYTES + bytes, most);
                    if most > 0 {
                        if let Some(run) = peers.poll_transmit_run(now, slot, most) {
                            debug_assert_eq!(run.bytes, bytes, "room was asked for another length");
                            push_run(&peers[slot], ops, &run, sink);
                            sent += run.count;
                            left -= run.count * each;
                        }
                    }
                    if left < each {
                        break;
                    }
                }
            }
        }
        sent > 0
    }
}

fn push_run(peer: &Peer, ops: &mut Ops, run: &TransmitRun, sink: &mut dyn TransmitSink) {
    let transfer = run.header.transfer;
    let key = drive::key_of(ops, (&peer.traffic.sending, peer.serves), transfer);
    let Some(op) = key.and_then(|key| ops.at(key)) else {
        return debug_assert!(false, "{transfer:?} is sent to {} after its end", peer.rank);
    };
    let end = run.offset as usize + run.count * run.bytes;
    let mut rest = *run;
    while rest.count > 0 {
        let part = rest.offset as usize..end;
        let Some((payload, weight)) = op.payload(peer.rank, transfer, part, false) else {
            return debug_assert!(false, "{transfer:?} has no bytes at {}", rest.offset);
        };
        let count = payload.len() / run.bytes;
        if count == 0 {
            return debug_assert!(false, "{transfer:?} has chunks of more than {} bytes", run.bytes);
        }
        rest.header.weight = weight;
        sink.push_run(peer.rank, &TransmitRun { count, ..rest }, payload);
        rest = rest.behind(count);
    }
}

fn push_payload(
    peer: &Peer,
    ops: &mut Ops,
    transmit: Transmit,
    offset: usize,
    bytes: usize,
    sink: &mut dyn TransmitSink,
) {
    let Transmit { mut header, mark, opening, .. } = transmit;
    let key = drive::key_of(ops, (&peer.traffic.sending, peer.serves), header.transfer);
    let Some(op) = key.and_then(|key| ops.at(key)) else {
        return debug_assert!(false, "{:?} is sent to {} after its end", header.transfer, peer.rank);
    };
    let again = header.flags.contains(Flags::RETRANSMITTED);
    let Some((payload, weight)) = op.payload(peer.rank, header.transfer, offset..offset + bytes, again)
    else {
        return debug_assert!(false, "{:?} has no bytes at {offset}", header.transfer);
    };
    header.weight = weight;
    let mut head = [0; HEADER_BYTES + OPENING_BYTES];
    let mut writer = Writer::new(&mut head);
    writer.put(&header.encode());
    if let Some(opening) = opening {
        opening.encode(&mut writer);
    }
    let length = writer.finish().unwrap_or(HEADER_BYTES);
    sink.push(peer.rank, mark, &head[..length], payload);
}
