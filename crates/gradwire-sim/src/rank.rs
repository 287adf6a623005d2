//! One simulated rank: a real group, its tensors, and the socket that it would have.

use crate::plan::{OpPlan, OutputPlan};
use crate::record::Provenance;
use crate::{HostOptions, Scenario, Tensor};
use gradwire_collectives::{
    DeadlineRule, DeliveryReport, Group, GroupConfig, Host, OpError, OpId, PeerConfig, Request, TransmitSink,
};
use gradwire_core::wire::TransferId;
use gradwire_core::{ConnectionConfig, ConnectionId, Mark, Timestamp};
use std::collections::VecDeque;
use std::time::Duration;

/// A datagram under way.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    pub(crate) bytes: Vec<u8>,
    pub(crate) provenance: Option<Provenance>,
    /// The receiver's checksum will not match.
    pub(crate) corrupted: bool,
    /// A rank has sent it just like this: no stranger's, no flipped bits.
    pub(crate) genuine: bool,
    pub(crate) sent_at: Timestamp,
}

/// One collective on one rank.
#[derive(Debug)]
pub(crate) struct OpRun {
    pub(crate) input: Tensor,
    pub(crate) output: Tensor,
    pub(crate) residual: Tensor,
    pub(crate) submitted_at: Timestamp,
    pub(crate) finished: Option<Finished>,
}

/// How a collective ended on one rank. The tensors were copied when the group gave them back.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) at: Timestamp,
    pub(crate) outcome: Result<DeliveryReport, OpError>,
    pub(crate) output: Vec<u8>,
    pub(crate) residual: Vec<u8>,
}

/// A rank and everything around its group.
#[derive(Debug)]
pub(crate) struct Rank {
    pub(crate) group: Group,
    /// By place in the scenario; `None`: not submitted, or not taking part.
    pub(crate) runs: Vec<Option<OpRun>>,
    pub(crate) next_op: usize,
    pub(crate) in_flight: Vec<(OpId, usize)>,
    /// All so far.
    submitted: Vec<(OpId, usize)>,
    /// Every peer has answered.
    pub(crate) connected: bool,
    pub(crate) crashed: bool,
    /// The group on it has failed.
    pub(crate) has_failed: bool,
    /// What it did as a dedicated server, and whether all others have left it.
    pub(crate) served: Vec<DeliveryReport>,
    pub(crate) deserted: bool,
    /// Reasons for which it stands still.
    pub(crate) stops: u32,
    pub(crate) clock: Clock,
    pub(crate) socket: VecDeque<(usize, Packet)>,
    pub(crate) socket_bytes: u64,
    /// The time of the pending wake-up, and how many were armed: older ones are stale.
    pub(crate) armed_at: Option<Timestamp>,
    pub(crate) armed: u64,
    pub(crate) waits_for_room: bool,
    /// Wake-ups without time passing.
    pub(crate) idle_wakes: (Timestamp, u32),
}

impl Rank {
    pub(crate) fn new(scenario: &Scenario, rank: usize) -> Self {
        let clock = Clock { ahead: scenario.clock_of(rank), lost: Duration::ZERO };
        let mut group = Group::new(group_config(scenario, rank), clock.local(Timestamp::ZERO));
        let shares_cores = scenario.host.shares_cores && rank + 1 == scenario.world_size;
        group.set_host(Host { shares_cores, ..Host::default() });
        Self {
            group,
            runs: scenario.ops.iter().map(|_| None).collect(),
            // A dedicated server calls nothing.
            next_op: if rank < scenario.world_size { 0 } else { scenario.ops.len() },
            in_flight: Vec::new(),
            submitted: Vec::new(),
            connected: false,
            crashed: false,
            has_failed: false,
            served: Vec::new(),
            deserted: false,
            stops: 0,
            clock,
            socket: VecDeque::new(),
            socket_bytes: 0,
            armed_at: None,
            armed: 0,
            waits_for_room: false,
            idle_wakes: (Timestamp::ZERO, 0),
        }
    }

    pub(crate) const fn is_running(&self) -> bool {
        !self.crashed && self.stops == 0
    }

    /// Submits collective `op` of the scenario. The two times: that of the world, and that of this rank's clock.
    pub(crate) fn submit(
        &mut self,
        (now, local): (Timestamp, Timestamp),
        scenario: &Scenario,
        op: usize,
        rank: usize,
    ) {
        let plan = &scenario.ops[op];
        let policy = scenario.sabotage.policy(plan.policy);
        let run = OpRun::new(plan, now, op, rank, scenario.world_size);
        let input = if plan.in_place { run.output.view() } else { run.input.view() };
        let id = self.group.submit(
            local,
            Request {
                reduce: plan.reduce,
                input,
                output: run.output.view(),
                policy,
                residual: run.residual.view(),
                priority: plan.priority,
                ..Request::exact(plan.collective(op, rank, scenario.world_size), plan.dtype, OP_TIMEOUT)
            },
        );
        self.runs[op] = Some(run);
        self.in_flight.push((id, op));
        self.submitted.push((id, op));
    }

    /// Takes the tensors back. Returns the collective's place, or `None` when it is not in flight.
    pub(crate) fn finish(
        &mut self,
        now: Timestamp,
        id: OpId,
        outcome: Result<DeliveryReport, OpError>,
    ) -> Option<usize> {
        let place = self.in_flight.iter().position(|(candidate, _)| *candidate == id)?;
        let (_, op) = self.in_flight.swap_remove(place);
        let run = self.runs[op].as_mut()?;
        run.finished = Some(Finished {
            at: now,
            outcome,
            output: run.output.as_slice().to_vec(),
            residual: run.residual.as_slice().to_vec(),
        });
        // The memory is the caller's again: a packet that is still sent from it would carry this.
        run.input.fill(SCRIBBLE);
        run.output.fill(SCRIBBLE);
        run.residual.fill(SCRIBBLE);
        Some(op)
    }

    /// The collective in flight whose input holds `payload`, and where in it.
    pub(crate) fn locate(&self, ops: &[OpPlan], payload: *const u8) -> Option<(usize, u64)> {
        self.in_flight.iter().find_map(|(_, op)| {
            let run = self.runs[*op].as_ref()?;
            let tensor = if ops[*op].in_place { &run.output } else { &run.input };
            tensor.offset_of(payload).map(|offset| (*op, offset))
        })
    }

    /// The collective in flight one of whose tensors holds `payload`.
    pub(crate) fn holder(&self, payload: *const u8) -> Option<usize> {
        let holds = |op: usize| {
            let run = self.runs[op].as_ref();
            run.is_some_and(|run| {
                [&run.input, &run.output].iter().any(|tensor| tensor.offset_of(payload).is_some())
            })
        };
        self.in_flight.iter().map(|(_, op)| *op).find(|op| holds(*op))
    }

    /// The collective that a transfer to `to` belongs to, in flight or over for its caller.
    pub(crate) fn sends(&mut self, to: usize, transfer: TransferId) -> Option<usize> {
        let id = self.group.call_of(to as u32, transfer)?;
        self.submitted.iter().find(|(submitted, _)| *submitted == id).map(|(_, op)| *op)
    }

    /// Whether the group has begun collective `op`: it may have to wait for an exchange of the group's own.
    pub(crate) fn has_begun(&self, op: usize) -> bool {
        let id = self.in_flight.iter().find(|(_, place)| *place == op).map(|(id, _)| *id);
        id.is_none_or(|id| self.group.has_begun(id))
    }

    /// Whether a collective before `op` may still measure how long such collectives take: those behind it wait.
    pub(crate) fn warms_up_before(&self, ops: &[OpPlan], op: usize) -> bool {
        let is_warm_up = |plan: &OpPlan| matches!(plan.policy.deadline, DeadlineRule::WarmUp { .. });
        self.in_flight.iter().any(|(_, earlier)| *earlier < op && is_warm_up(&ops[*earlier]))
    }

    /// Whether every collective of the scenario is over here.
    pub(crate) fn is_done(&self, ops: &[OpPlan]) -> bool {
        self.next_op == ops.len() && self.in_flight.is_empty()
    }
}

/// A monotonic clock of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    /// By how much it started or jumped ahead of the world's time.
    ahead: Duration,
    /// For how long it has stood still.
    lost: Duration,
}

impl Clock {
    /// What it shows.
    pub(crate) fn local(&self, now: Timestamp) -> Timestamp {
        Timestamp::ZERO + ((now + self.ahead) - (Timestamp::ZERO + self.lost))
    }

    pub(crate) fn jump(&mut self, length: Duration) {
        self.ahead += length;
    }

    pub(crate) fn lose(&mut self, length: Duration) {
        self.lost += length;
    }
}

impl OpRun {
    fn new(plan: &OpPlan, now: Timestamp, op: usize, rank: usize, world_size: usize) -> Self {
        let content = plan.input(op, rank, world_size);
        let (input, output) = match (plan.output(op, rank, world_size), content) {
            (OutputPlan::Empty(_), Some(content)) if plan.in_place => {
                (Tensor::new(0, 0), Tensor::from_bytes(&content))
            }
            (OutputPlan::Empty(bytes), content) => {
                (Tensor::from_bytes(&content.unwrap_or_default()), Tensor::new(bytes, STALE))
            }
            (OutputPlan::Holds(held), _) => (Tensor::new(0, 0), Tensor::from_bytes(&held)),
        };
        let given_bytes = plan.given_elems(world_size) * plan.dtype.bytes();
        let residual_bytes = if plan.is_tolerant() { given_bytes } else { 0 };
        let residual = Tensor::new(residual_bytes, RESIDUAL_FILL);
        Self { input, output, residual, submitted_at: now, finished: None }
    }
}

/// What the socket's sending side takes from a group in one go.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    pub(crate) room_bytes: u64,
    pub(crate) was_full: bool,
    pub(crate) datagrams: Vec<Outgoing>,
    /// Buffers of datagrams that have arrived, to be used again.
    pub(crate) spare: Vec<Vec<u8>>,
}

/// A datagram that a group handed out.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) to: usize,
    pub(crate) bytes: Vec<u8>,
    pub(crate) payload: *const u8,
    pub(crate) payload_bytes: usize,
}

impl TransmitSink for Outbox {
    fn has_room(&self) -> bool {
        self.room_bytes > 0
    }

    fn room_for(&self, _peer: u32, bytes: usize, most: usize) -> usize {
        usize::try_from(self.room_bytes.div_ceil(bytes as u64)).map_or(most, |fit| most.min(fit))
    }

    fn push(&mut self, peer: u32, _mark: Mark, head: &[u8], payload: &[u8]) {
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.clear();
        bytes.extend_from_slice(head);
        bytes.extend_from_slice(payload);
        self.room_bytes = self.room_bytes.saturating_sub(bytes.len() as u64);
        self.was_full = self.room_bytes == 0;
        let (payload, payload_bytes) = (payload.as_ptr(), payload.len());
        self.datagrams.push(Outgoing { to: peer as usize, bytes, payload, payload_bytes });
    }
}

fn group_config(scenario: &Scenario, rank: usize) -> GroupConfig {
    let peers = (0..scenario.ranks()).filter(|peer| *peer != rank);
    GroupConfig {
        rank: rank as u32,
        world_size: scenario.world_size as u32,
        peers: peers
            .map(|peer| PeerConfig {
                rank: peer as u32,
                host: format!("host{peer}"),
                connection: connection_config(scenario, rank, peer),
            })
            .collect(),
        incast: scenario.host.incast,
        exchange: scenario.host.exchange,
        servers: scenario.host.servers,
    }
}

impl HostOptions {
    /// Settings of the connection from one of `ranks` ranks to another.
    pub(crate) fn connection(&self, ranks: usize, rank: usize, peer: usize) -> ConnectionConfig {
        let id = |receiver: usize, sender: usize| {
            // Different for all senders to one receiver, however many pairs there are: beyond 4,095 ranks 24 bits do not name each pair.
            let value = (receiver * ranks + sender) % CONNECTION_IDS + 1;
            ConnectionId::new(value as u32).expect("more than zero and less than 2^24")
        };
        ConnectionConfig {
            local: id(rank, peer),
            remote: id(peer, rank),
            datagram_bytes: self.datagram_bytes,
            fingerprint: FINGERPRINT,
            hello: gradwire_core::HelloWords::both(FINGERPRINT),
            eager_bytes: self.eager_bytes,
            ack_every: self.ack_every,
            ack_delay_max: self.ack_delay_max,
            controller: self.controller,
            initial_rate: self.initial_rate,
            incast: (ranks as u32 - 1).max(1),
            turn: gradwire_core::recovery::Turn::Any,
            receive_buffer_bytes: self.socket_bytes / (ranks as u64 - 1).max(1),
            peer_timeout: self.peer_timeout,
            paths: self.paths,
            spray: self.spray,
            spray_run: 1,
            class_queues: 0,
        }
    }
}

fn connection_config(scenario: &Scenario, rank: usize, peer: usize) -> ConnectionConfig {
    let config = scenario.host.connection(scenario.ranks(), rank, peer);
    ConnectionConfig { spray: scenario.sabotage.spray(scenario.host.spray), ..config }
}

/// Connection ids that there are: 24 bits, not zero.
const CONNECTION_IDS: usize = (1 << 24) - 1;
/// What every rank says of the group's settings.
pub(crate) const FINGERPRINT: u64 = 0x0067_7261_6477_6972;
/// Longer than every run: a collective that needs it is stuck.
const OP_TIMEOUT: Duration = Duration::from_secs(3600);
/// What outputs hold before the call; a place that was never written shows it.
pub(crate) const STALE: u8 = 0xEE;
/// What residuals hold before the call and must still hold where everything counted.
pub(crate) const RESIDUAL_FILL: u8 = 0x5E;
const SCRIBBLE: u8 = 0xDD;

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_peers_of_a_rank_have_different_ids_and_both_ends_know_them_in_groups_of_any_size() {
        let options = HostOptions::default();
        for ranks in [2, 4095, 4096, 6000] {
            let rank = ranks - 1;
            let ids: BTreeSet<_> =
                (0..rank).map(|peer| options.connection(ranks, rank, peer).local).collect();
            assert_eq!(ids.len(), rank);
            let (ours, theirs) = (options.connection(ranks, rank, 0), options.connection(ranks, 0, rank));
            assert_eq!((ours.local, ours.remote), (theirs.remote, theirs.local));
        }
    }
}
