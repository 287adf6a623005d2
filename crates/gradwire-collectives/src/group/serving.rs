//! A dedicated server's side of a group: it calls nothing, and takes part in what its workers call.
//!
//! Calls over servers are numbered alike by all workers, from 0. A server starts them in that order, each when the first
//! packet of any worker has named it and there is memory for its sum. What is early waits in the eager buffers.

use super::{Group, GroupEvent};
use crate::call::Call;
use crate::op::{Name, Op};
use crate::ops::{Key, IN_FLIGHT_MAX};
use crate::settings::CallSettings;
use crate::verdict::{AbortRecord, Cause};
use crate::{OpError, OpId};
use gradwire_core::wire::Opening;
use gradwire_core::{Descriptor, Receipt, Timestamp, TransferId};
use std::collections::BTreeMap;

/// What only a server has.
#[derive(Debug)]
pub(super) struct Serving {
    /// Calls that have not been started, by number: who called first, and what.
    offered: BTreeMap<u64, (u32, Descriptor)>,
    /// Who called first, by number modulo the length.
    callers: [u32; IN_FLIGHT_MAX],
    /// Bytes that sums may take, and take.
    bytes_max: u64,
    bytes: u64,
    /// Buffers of ended calls, with their bytes.
    spare: Vec<Vec<u8>>,
    spare_bytes: u64,
    has_been_deserted: bool,
}

impl Serving {
    pub(super) fn new(bytes_max: u64) -> Self {
        Self {
            offered: BTreeMap::new(),
            callers: [0; IN_FLIGHT_MAX],
            bytes_max,
            bytes: 0,
            spare: Vec::new(),
            spare_bytes: 0,
            has_been_deserted: false,
        }
    }

    /// A buffer of at least `bytes` bytes; `wide_bytes` are taken beside it. Buffers that do not fit are given back to the
    /// system before another is taken from it, so that all of them together stay below the limit.
    fn take(&mut self, bytes: usize, wide_bytes: usize) -> Vec<u8> {
        let room = (self.bytes_max - self.bytes).saturating_sub(wide_bytes as u64);
        let fits = |buffer: &Vec<u8>| buffer.len() >= bytes && buffer.len() as u64 <= room;
        let buffer = match self.spare.iter().position(fits) {
            Some(at) => {
                self.spare_bytes -= self.spare[at].len() as u64;
                self.spare.swap_remove(at)
            }
            None => {
                if self.spare_bytes + bytes as u64 > room {
                    self.spare.clear();
                    self.spare_bytes = 0;
                }
                vec![0; bytes]
            }
        };
        self.bytes += (buffer.len() + wide_bytes) as u64;
        buffer
    }

    fn give_back(&mut self, buffer: Vec<u8>, wide_bytes: usize) {
        self.bytes -= (buffer.len() + wide_bytes) as u64;
        self.spare_bytes += buffer.len() as u64;
        self.spare.push(buffer);
    }
}

impl Group {
    /// Whether this rank is a dedicated server.
    pub(super) fn is_server(&self) -> bool {
        self.serving.is_some()
    }

    /// A worker begins a transfer of a call that this server has not started, or that is over.
    pub(super) fn on_call_offered(
        &mut self,
        now: Timestamp,
        slot: usize,
        transfer: TransferId,
        opening: &Opening,
    ) {
        let caller = self.peers[slot].rank;
        let theirs = opening.descriptor;
        let ahead = (transfer.op() as u16).wrapping_sub(self.next_start as u16);
        if usize::from(ahead) >= IN_FLIGHT_MAX {
            // It has been started: an index that this server does not wait for may belong to another call.
            let Some((number, ours)) = self.history.at_op(transfer.op()) else { return };
            return self.compare(now, slot, number, (ours, theirs));
        }
        let number = self.next_start + u64::from(ahead);
        let Some(serving) = &mut self.serving else { return };
        let (first, ours) = *serving.offered.entry(number).or_insert((caller, theirs));
        serving.callers[(number % IN_FLIGHT_MAX as u64) as usize] = first;
        self.compare(now, slot, number, (ours, theirs));
        self.start_offered(now);
    }

    /// Starts the calls whose turn it is, while there is memory.
    pub(super) fn start_offered(&mut self, now: Timestamp) {
        while self.failed.is_none() && self.ops.has_room(self.next_start) {
            let number = self.next_start;
            let Some(serving) = &self.serving else { return };
            let Some((_, descriptor)) = serving.offered.get(&number) else { return };
            // Ranks of one version send nothing else to a server.
            let Some(call) = Call::decode(descriptor).filter(Call::is_over_servers) else { return };
            let name = Name {
                id: OpId(self.next_op),
                submitted: now,
                point_to_point: None,
                rotation: None,
                links: None,
            };
            let (bytes, wide_bytes) = Op::bytes_of_serving(&call, self.place(number));
            let needed = (bytes as u64).saturating_add(wide_bytes as u64);
            if needed > serving.bytes_max {
                return self.fail_memory(now, number, *descriptor, needed);
            }
            if needed > serving.bytes_max - serving.bytes {
                return;
            }
            self.serve(now, call, name, (bytes, wide_bytes));
        }
    }

    fn serve(&mut self, now: Timestamp, call: Call, name: Name, (bytes, wide_bytes): (usize, usize)) {
        let number = self.next_start;
        let place = self.place(number);
        let Some(serving) = &mut self.serving else { return };
        serving.offered.remove(&number);
        let buffer = serving.take(bytes, wide_bytes);
        let op = Op::serving(call, buffer, place, name, &mut self.pool);
        self.next_op += 1;
        self.next_start = number + 1;
        self.history.record(number, call.encode());
        let key = self.ops.insert_collective(Box::new(op));
        self.update_position(now);
        self.begin(now, key);
    }

    /// Takes the buffer of a call that is over, which may let the next one begin.
    pub(super) fn take_back(&mut self, (buffer, wide_bytes): (Vec<u8>, usize)) {
        let Some(serving) = &mut self.serving else { return };
        serving.give_back(buffer, wide_bytes);
        self.pool.trim(serving.bytes_max - serving.bytes);
    }

    /// A receive has ended that may have brought the settings of a call. They come from the network: without settings that
    /// can be read the call would wait for ever, so the group fails.
    pub(super) fn learn_settings(
        &mut self,
        now: Timestamp,
        slot: usize,
        key: Option<Key>,
        receipt: &Receipt,
    ) {
        let from = self.peers[slot].rank;
        let Some(op) = key.and_then(|key| self.ops.at(key)) else { return };
        if self.serving.is_none() || !op.awaits_settings(from, receipt.transfer) {
            return;
        }
        match CallSettings::decode(&op.settings) {
            Some(settings) => {
                op.follow(&settings);
                self.adaptive.follows(&settings, op.bytes());
            }
            None => {
                let (call, number) = (op.call.encode(), self.sequence_of(slot, receipt.transfer));
                self.fail_call_settings(now, from, call, number);
            }
        }
    }

    fn fail_call_settings(&mut self, now: Timestamp, from: u32, call: Descriptor, number: u64) {
        let about = AbortRecord::about(Cause::CallSettings, self.rank, from);
        let record = AbortRecord { calls: [call, Descriptor::default()], sequence: number, ..about };
        let error = self.error_of(now, record);
        self.fail(now, error, &record);
    }

    /// Who called what this rank compares with others: at a server, the worker that it heard first.
    pub(super) fn caller_of(&self, sequence: u64) -> u32 {
        let caller = |serving: &Serving| serving.callers[(sequence % IN_FLIGHT_MAX as u64) as usize];
        self.serving.as_ref().map_or(self.rank, caller)
    }

    /// A worker has left in good order. When all have, the server is done.
    pub(super) fn on_worker_left(&mut self) {
        let world_size = self.world_size;
        let all_left = self.peers.iter().filter(|peer| peer.rank < world_size).all(|peer| peer.has_left);
        let Some(serving) = &mut self.serving else { return };
        if all_left && self.failed.is_none() && !std::mem::replace(&mut serving.has_been_deserted, true) {
            self.events.push_back(GroupEvent::WorkersLeft);
        }
    }

    fn fail_memory(&mut self, now: Timestamp, number: u64, call: Descriptor, needed: u64) {
        let bytes_max = self.serving.as_ref().map_or(0, |serving| serving.bytes_max);
        let record = AbortRecord {
            calls: [call, Descriptor::default()],
            sequence: number,
            amounts: [needed, bytes_max],
            ..AbortRecord::about(Cause::ServerMemory, self.rank, self.rank)
        };
        let during = Call::decode(&call).map_or_else(String::new, |call| call.during(number));
        let error = OpError::ServerMemory {
            rank: self.rank,
            host: "this rank".to_owned(),
            during,
            needed,
            bytes_max,
        };
        self.fail(now, error, &record);
    }
}
