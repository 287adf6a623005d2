//! What the ranks of a scenario are asked to do: collectives, their memory, and what can go wrong around them.

use crate::values::{by_factor, contribution_by, copied, encode};
use gradwire_collectives::{
    Algorithm, Collective, Dtype, Hadamard, Policy, ReduceOp, Rotation, WholeHadamard,
};
use std::time::Duration;

/// One collective of a scenario; every rank submits the same list in the same order.
#[derive(Clone, Debug, PartialEq)]
pub struct OpPlan {
    /// What.
    pub kind: OpKind,
    /// Element type.
    pub dtype: Dtype,
    /// Elements: of the tensor for reductions and broadcast, of one row where a view has `[world_size, elems]`.
    pub elems: usize,
    /// Reduction, where there is one.
    pub reduce: ReduceOp,
    /// What an all-reduce or a reduce-scatter may leave behind.
    pub policy: Policy,
    /// Whether input and output are the same memory (all-reduce only).
    pub in_place: bool,
    /// Lower goes first.
    pub priority: u8,
}

/// The collectives that are simulated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpKind {
    /// See [`Collective::AllReduce`].
    AllReduce(Algorithm),
    /// From this root.
    Broadcast(usize),
    /// See [`Collective::AllGather`].
    AllGather,
    /// See [`Collective::ReduceScatter`].
    ReduceScatter,
    /// To this root.
    Reduce(usize),
    /// To this root.
    Gather(usize),
    /// From this root.
    Scatter(usize),
    /// Uneven parts, some empty.
    AllToAll,
    /// See [`Collective::Barrier`].
    Barrier,
    /// One rank sends to another.
    SendReceive {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// Whether the receiver names its sender.
        any_source: bool,
    },
}

/// Something that happens to ranks or links at a time of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The rank does nothing for this long; its socket buffer fills up, its clock goes on (a stopped process).
    Pause(usize, Duration),
    /// The same, but its clock stands still too (a suspended virtual machine).
    Suspend(usize, Duration),
    /// The clock of a rank that keeps running jumps ahead. A monotonic clock never goes back.
    ClockJump(usize, Duration),
    /// Nothing passes between the two ranks for this long.
    Partition(usize, usize, Duration),
    /// One path between any two ranks loses so many of 1000 datagrams for this long, both ways; 1000: it is dead.
    GrayPath(usize, u16, Duration),
    /// The rank is gone for good.
    Crash(usize),
    /// The network stops losing, doubling and reordering.
    Heal,
}

impl Fault {
    /// The rank that it happens to; the first one of two.
    #[must_use]
    pub fn rank(&self) -> Option<usize> {
        match self {
            Self::Pause(rank, _)
            | Self::Suspend(rank, _)
            | Self::ClockJump(rank, _)
            | Self::Partition(rank, _, _)
            | Self::Crash(rank) => Some(*rank),
            Self::GrayPath(..) | Self::Heal => None,
        }
    }

    /// How long it lasts. A crash lasts for ever and is over at once: nothing heals after it.
    #[must_use]
    pub fn length(&self) -> Duration {
        match self {
            Self::Pause(_, length)
            | Self::Suspend(_, length)
            | Self::Partition(_, _, length)
            | Self::GrayPath(_, _, length) => *length,
            Self::ClockJump(..) | Self::Crash(_) | Self::Heal => Duration::ZERO,
        }
    }
}

impl OpPlan {
    /// An all-reduce of float32, averaged in place.
    #[must_use]
    pub fn all_reduce(algorithm: Algorithm, elems: usize, policy: Policy) -> Self {
        Self {
            kind: OpKind::AllReduce(algorithm),
            dtype: Dtype::F32,
            elems,
            reduce: ReduceOp::Avg,
            policy,
            in_place: true,
            priority: 0,
        }
    }

    /// Whether contributions may be left out.
    #[must_use]
    pub fn is_tolerant(&self) -> bool {
        matches!(self.kind, OpKind::AllReduce(_) | OpKind::ReduceScatter) && !self.policy.is_exact()
    }

    /// Elements that each rank gives to a reduction.
    #[must_use]
    pub fn given_elems(&self, world_size: usize) -> usize {
        match self.kind {
            OpKind::ReduceScatter => self.elems * world_size,
            _ => self.elems,
        }
    }

    /// Whether `rank` takes part.
    #[must_use]
    pub fn involves(&self, rank: usize) -> bool {
        match self.kind {
            OpKind::SendReceive { from, to, .. } => rank == from || rank == to,
            _ => true,
        }
    }

    /// Bytes of `elems` elements.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.elems * self.dtype.bytes()
    }

    /// The same with the padding of a rotated bucket.
    #[must_use]
    pub fn sent_bytes(&self) -> usize {
        let rotates =
            self.is_tolerant() && self.kind != OpKind::ReduceScatter && self.policy.rotation != Rotation::Off;
        let padded = Hadamard::of(self.elems).filter(|_| rotates && WholeHadamard::of(self.elems).is_none());
        padded.map_or(self.elems, Hadamard::padded) * self.dtype.bytes()
    }

    /// The call of `rank`. `op` is the place of this plan in the scenario.
    #[must_use]
    pub fn collective(&self, op: usize, rank: usize, world_size: usize) -> Collective {
        let split = |from, to| self.split_bytes(op, from, to);
        match self.kind {
            OpKind::AllReduce(algorithm) => Collective::AllReduce { algorithm },
            OpKind::Broadcast(root) => Collective::Broadcast { root: root as u32 },
            OpKind::AllGather => Collective::AllGather,
            OpKind::ReduceScatter => Collective::ReduceScatter,
            OpKind::Reduce(root) => Collective::Reduce { root: root as u32 },
            OpKind::Gather(root) => Collective::Gather { root: root as u32 },
            OpKind::Scatter(root) => Collective::Scatter { root: root as u32 },
            OpKind::AllToAll => Collective::AllToAll {
                input_split_bytes: (0..world_size).map(|to| split(rank, to)).collect(),
                output_split_bytes: (0..world_size).map(|from| split(from, rank)).collect(),
            },
            OpKind::Barrier => Collective::Barrier,
            OpKind::SendReceive { from, to, .. } if rank == from => {
                Collective::Send { to: to as u32, tag: op as u32 }
            }
            OpKind::SendReceive { from, any_source, .. } => {
                Collective::Receive { from: (!any_source).then_some(from as u32), tag: op as u32 }
            }
        }
    }

    /// What `rank` holds in its input before the call; `None` when it has none.
    #[must_use]
    pub fn input(&self, op: usize, rank: usize, world_size: usize) -> Option<Vec<u8>> {
        match self.kind {
            OpKind::AllReduce(_) | OpKind::Reduce(_) => Some(self.reduced_input(op, rank, self.elems)),
            OpKind::ReduceScatter => Some(self.reduced_input(op, rank, self.elems * world_size)),
            OpKind::AllGather | OpKind::Gather(_) => Some(self.copied(op, rank, 0)),
            OpKind::Scatter(root) => (rank == root).then(|| self.rows(op, root, world_size)),
            OpKind::AllToAll => Some((0..world_size).flat_map(|to| self.part(op, rank, to)).collect()),
            OpKind::SendReceive { from, to, .. } => (rank == from).then(|| self.copied(op, from, to)),
            OpKind::Broadcast(_) | OpKind::Barrier => None,
        }
    }

    /// Size of the output of `rank`, and what it holds before the call where that matters.
    #[must_use]
    pub fn output(&self, op: usize, rank: usize, world_size: usize) -> OutputPlan {
        let bytes = match self.kind {
            OpKind::AllReduce(_) | OpKind::ReduceScatter | OpKind::Scatter(_) => self.bytes(),
            OpKind::Broadcast(root) if rank == root => return OutputPlan::Holds(self.copied(op, root, 0)),
            OpKind::Broadcast(_) => self.bytes(),
            OpKind::AllGather => self.bytes() * world_size,
            OpKind::Reduce(root) if rank == root => self.bytes(),
            OpKind::Gather(root) if rank == root => self.bytes() * world_size,
            OpKind::AllToAll => (0..world_size).map(|from| self.split_bytes(op, from, rank)).sum(),
            OpKind::SendReceive { to, .. } if rank == to => self.bytes(),
            _ => 0,
        };
        OutputPlan::Empty(bytes)
    }

    /// Bytes that one rank sends to another in an all-to-all: uneven, sometimes none.
    #[must_use]
    pub fn split_bytes(&self, op: usize, from: usize, to: usize) -> usize {
        let share = (op + 3 * from + 5 * to) % 4;
        self.elems * share / 3 * self.dtype.bytes()
    }

    /// Row `to` of what `from` holds for an all-to-all.
    #[must_use]
    pub fn part(&self, op: usize, from: usize, to: usize) -> Vec<u8> {
        copied(op, from, to, self.split_bytes(op, from, to))
    }

    /// One row of `elems` elements that is only copied.
    #[must_use]
    pub fn copied(&self, op: usize, from: usize, to: usize) -> Vec<u8> {
        copied(op, from, to, self.bytes())
    }

    fn rows(&self, op: usize, root: usize, world_size: usize) -> Vec<u8> {
        (0..world_size).flat_map(|to| self.copied(op, root, to)).collect()
    }

    fn reduced_input(&self, op: usize, rank: usize, elems: usize) -> Vec<u8> {
        let value = |factor| contribution_by(self.dtype, self.reduce, rank, factor);
        by_factor(self.dtype, op, 0..elems as u64, |factor| encode(self.dtype, value(factor)))
    }
}

/// The output before the call.
#[derive(Debug)]
pub enum OutputPlan {
    /// This many bytes that nobody reads.
    Empty(usize),
    /// Data that the collective reads (the root of a broadcast).
    Holds(Vec<u8>),
}
