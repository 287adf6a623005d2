//! When each transfer began and ended, seen from outside: in the datagrams that ranks send.
//!
//! A transfer ends when its receiver says for the first time that it is over. A push (or any first contribution) begins when
//! its sender called; a pull when the last push of the same call to its sender has ended.

use gradwire_core::wire::{Header, Kind, Reader, StatusBody, TransferState};
use gradwire_core::{Flags, Timestamp};
use std::collections::HashMap;
use std::time::Duration;

/// One transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Flow {
    /// Rank that sends.
    pub(super) from: u32,
    /// Rank that receives.
    pub(super) to: u32,
    /// Its call, in the order of calls.
    pub(super) op: u32,
    /// Which of the call's transfers between the two.
    pub(super) index: u32,
    /// When its first packet was handed to the NIC.
    pub(super) first_sent: Timestamp,
    /// When its receiver said that it is over.
    pub(super) ended: Option<Timestamp>,
}

/// Every transfer of a run.
#[derive(Debug, Default)]
pub(super) struct FlowLog {
    flows: Vec<Flow>,
    /// Looked up only, never walked through: its order is no part of the run.
    places: HashMap<(u32, u32, u32), usize>,
}

impl FlowLog {
    /// A datagram leaves rank `from` for rank `to`. Returns its path.
    pub(super) fn on_sent(
        &mut self,
        now: Timestamp,
        (from, to): (u32, u32),
        head: &[u8],
        payload_bytes: usize,
    ) -> u8 {
        let Ok((header, body)) = Header::decode(head) else { return 0 };
        match header.kind {
            Kind::Data if header.flags.contains(Flags::OPENING) && payload_bytes > 0 => {
                self.places.entry((from, to, header.transfer.0)).or_insert_with(|| {
                    let (op, index) = (header.transfer.op(), header.transfer.index());
                    self.flows.push(Flow { from, to, op, index, first_sent: now, ended: None });
                    self.flows.len() - 1
                });
            }
            Kind::Status => self.on_status(now, (to, from, header.transfer.0), body),
            _ => {}
        }
        header.path.0
    }

    fn on_status(&mut self, now: Timestamp, key: (u32, u32, u32), body: &[u8]) {
        let closed = StatusBody::decode(&mut Reader::new(body));
        if !closed.is_ok_and(|status| status.state == TransferState::Closed) {
            return;
        }
        if let Some(place) = self.places.get(&key) {
            self.flows[*place].ended.get_or_insert(now);
        }
    }

    /// What has been seen so far, in the order of the first packets; forgets it.
    pub(super) fn take(&mut self) -> Vec<Flow> {
        self.places.clear();
        std::mem::take(&mut self.flows)
    }
}

/// How long the transfers of one call took: those of the first stage from `called_at` of their sender on, those of the second
/// from the end of the last one that their sender waited for. Schedules of many steps have no such stages: each transfer of
/// theirs takes from its first packet on.
pub(super) fn times(
    flows: &[Flow],
    has_two_stages: bool,
    called_at: impl Fn(&Flow) -> Timestamp,
) -> Vec<(bool, Duration)> {
    if !has_two_stages {
        return flows.iter().filter_map(|flow| Some((false, flow.ended? - flow.first_sent))).collect();
    }
    let mut ready: HashMap<(u32, u32), Timestamp> = HashMap::new();
    for flow in flows.iter().filter(|flow| flow.index == REDUCE) {
        if let Some(ended) = flow.ended {
            let latest = ready.entry((flow.to, flow.op)).or_insert(ended);
            *latest = ended.max(*latest);
        }
    }
    let time = |flow: &Flow| {
        let ended = flow.ended?;
        match flow.index {
            REDUCE => Some((false, ended - called_at(flow))),
            GATHER => {
                let since = ready.get(&(flow.from, flow.op)).copied().unwrap_or(flow.first_sent);
                Some((true, ended - since))
            }
            _ => None,
        }
    };
    flows.iter().filter_map(time).collect()
}

/// Indices of the two stages of a transpose and of parameter servers (docs/architecture.md).
const REDUCE: u32 = 0;
const GATHER: u32 = 1;
