//! What a caller asks a group to do.

use crate::call::Call;
use crate::{AgreedNetwork, Dtype, Policy, ReduceOp, Tags, View};
use std::time::Duration;

/// Names a submitted collective on this rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OpId(pub u64);

/// How an all-reduce is scheduled.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Algorithm {
    /// The cheapest by size, world size and measured network, of those that suit the values; every rank chooses alike.
    Auto = 0,
    /// Ring. Hands on partial sums in the tensor's dtype: float16 and bfloat16 are summed by a transpose instead, in float32 and rounded
    /// once, as by halving and doubling. The alternative, partial sums in float32, would double the bytes.
    Ring = 1,
    /// Transpose (TAR, ULTIMA section 3.1).
    Transpose = 2,
    /// Recursive halving and doubling, for small sizes. Always exact: a request that may lose something is scheduled by
    /// transpose instead.
    HalvingDoubling = 3,
    /// Over the parameter servers of the group ([`crate::Servers`]).
    ParameterServer = 4,
    /// Transpose in which ranks with a slow link reduce less, or nothing, and the results of parts come back while others are still
    /// contributed. A transpose among two ranks, and where results may be lost. The incast factor does not apply.
    WeightedTranspose = 5,
    /// Every rank sends all of its input to every other one, which sums for itself: one stage, for small sizes. Always exact. A
    /// transpose for more than 64 KiB, or more than 1 MiB of all ranks together, for what may lose something, and where the incast factor is
    /// less than all other ranks.
    OneShot = 6,
}

impl Algorithm {
    /// Every schedule, at the place of its code.
    pub const ALL: [Self; 7] = [
        Self::Auto,
        Self::Ring,
        Self::Transpose,
        Self::HalvingDoubling,
        Self::ParameterServer,
        Self::WeightedTranspose,
        Self::OneShot,
    ];

    /// Its name in settings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Ring => "ring",
            Self::Transpose => "transpose",
            Self::HalvingDoubling => "halving_doubling",
            Self::ParameterServer => "parameter_server",
            Self::WeightedTranspose => "weighted_transpose",
            Self::OneShot => "one_shot",
        }
    }
}

/// The operation. Sizes are those of [`Request::input`] and [`Request::output`].
#[derive(Clone, PartialEq, Debug)]
pub enum Collective {
    /// `input` and `output` `[elems]`, may be the same memory.
    AllReduce {
        /// Schedule.
        algorithm: Algorithm,
    },
    /// `output` `[elems]` in place; the root's is sent.
    Broadcast {
        /// Rank that has the data.
        root: u32,
    },
    /// `input` `[elems]`, `output` `[world_size, elems]`; `input` may be the own row of `output`.
    AllGather,
    /// `input` `[world_size, elems]`, `output` `[elems]`; `output` may be the own row of `input`.
    ReduceScatter,
    /// `input` `[elems]`; `output` `[elems]` at the root, else empty.
    Reduce {
        /// Rank that gets the result.
        root: u32,
    },
    /// `input` `[elems]`; `output` `[world_size, elems]` at the root, else empty.
    Gather {
        /// Rank that gets the rows.
        root: u32,
    },
    /// `output` `[elems]`; `input` `[world_size, elems]` at the root, else empty.
    Scatter {
        /// Rank that has the rows.
        root: u32,
    },
    /// Bytes for each peer, in rank order. Both lists have `world_size` entries.
    AllToAll {
        /// Bytes of `input` that go to each rank.
        input_split_bytes: Vec<usize>,
        /// Bytes of `output` that come from each rank.
        output_split_bytes: Vec<usize>,
    },
    /// Nobody returns before everybody has come.
    Barrier,
    /// `input` to one rank.
    Send {
        /// Receiver.
        to: u32,
        /// Matched against the receiver's.
        tag: u32,
    },
    /// `output` from one rank, or from whoever sends first with this tag.
    Receive {
        /// Sender, or any.
        from: Option<u32>,
        /// Matched against the sender's.
        tag: u32,
    },
}

impl Collective {
    /// Whether it has a place in the group's sequence: every rank calls it.
    pub(crate) fn is_in_sequence(&self) -> bool {
        !matches!(self, Self::Send { .. } | Self::Receive { .. })
    }
}

/// One call of a collective.
#[derive(Clone, Debug)]
pub struct Request {
    /// What to do.
    pub collective: Collective,
    /// Element type of both views.
    pub dtype: Dtype,
    /// Reduction, where there is one.
    pub reduce: ReduceOp,
    /// Memory read.
    pub input: View,
    /// Memory written; may be `input` where the collective says so.
    pub output: View,
    /// Only all-reduce and reduce-scatter may be tolerant: [`Policy::RELIABLE`] for everything that was not opted in.
    pub policy: Policy,
    /// Same size and dtype as `output`, or empty: what each own value that did not count in a tolerant reduction still
    /// owes to the mean is written here at its place, all else is left as it was (error feedback): the value less the mean
    /// that stood in for it, or all of it where zero did ([`crate::DivideBy`]). In a ring the partial sum that was lost,
    /// less as many means as ranks are in it. Added to this rank's next input, it counts exactly once. Where the result
    /// did not arrive here either, what this rank has filled in ([`crate::Fill`]) is what stood in. Of a rotated
    /// bucket every element is written if anything did not count: it gets its part of what is owed. Never aliases the other views.
    ///
    /// Of a reduce-scatter it is like `input`, on every rank or on none: nobody but the owner of a row learns its mean. So a rank owes all
    /// of a value that did not count, and the owner of a row, in its own row, less the mean for each rank that is missing. Where
    /// half of the ranks or more are missing the mean divides by all of them instead, and its owner owes nothing: what it would
    /// owe would outgrow what it holds.
    pub residual: View,
    /// Longest that the call may take; then it ends with [`crate::OpError::TimedOut`].
    pub timeout: Duration,
    /// Lower goes first when several are in flight.
    pub priority: u8,
    /// What the network is told about its packets.
    pub tags: Tags,
    /// Whether the report says how many ranks are in each block of the result ([`crate::DeliveryReport::contributions`]). Local
    /// to this rank: others may want something else.
    pub wants_contributions: bool,
    /// Of a part of a call: of which ([`crate::GroupEvent::Divided`]).
    pub part_of: Option<Box<PartOf>>,
}

/// A call that was divided.
#[derive(Clone, PartialEq, Debug)]
pub struct PartOf {
    /// Elements of the whole, or of each row of it, by which ranks see that they have made the same call.
    pub(crate) elems: u64,
    /// How many there are, each with memory of its own beside the tensor.
    pub(crate) parts: u32,
    /// Its number in the sequence of the group that was called, for people.
    pub(crate) sequence: u64,
    /// What all ranks knew where it began: whatever depends on it is alike in all parts.
    pub(crate) known: AgreedNetwork,
}

impl Request {
    /// Into how many parts the call was divided that it is of.
    pub(crate) fn parts(&self) -> u32 {
        self.part_of.as_ref().map_or(1, |part| part.parts)
    }

    /// Bytes of the result of the whole, of an all-reduce.
    pub(crate) fn whole_bytes(&self) -> usize {
        self.part_of.as_ref().map_or(self.output.len(), |part| part.elems as usize * self.dtype.bytes())
    }

    /// An exact call, a sum where it reduces, that goes before all others. It has no memory yet: set `input` and `output`.
    #[must_use]
    pub fn exact(collective: Collective, dtype: Dtype, timeout: Duration) -> Self {
        Self {
            collective,
            dtype,
            reduce: ReduceOp::Sum,
            input: View::EMPTY,
            output: View::EMPTY,
            policy: Policy::RELIABLE,
            residual: View::EMPTY,
            timeout,
            priority: 0,
            tags: Tags::default(),
            wants_contributions: false,
            part_of: None,
        }
    }

    /// What messages call it, as call number `sequence`.
    #[must_use]
    pub fn during(&self, sequence: u64) -> String {
        Call::of(self, Algorithm::Auto).during(sequence)
    }

    /// Bytes of the bucket that is reduced.
    pub(crate) fn bucket_bytes(&self) -> usize {
        match self.collective {
            Collective::ReduceScatter => self.input.len(),
            _ => self.output.len(),
        }
    }

    /// This rank's row of a tolerant reduce-scatter whose losses are fed back, in bytes: as many as its output has.
    pub(crate) fn scattered_feedback(&self) -> Option<usize> {
        let feeds_back = !self.policy.is_exact() && !self.residual.is_empty();
        (self.collective == Collective::ReduceScatter && feeds_back).then_some(self.output.len())
    }

    /// Bare signals between all pairs, without memory and for nobody to wait for.
    pub(crate) fn nothing() -> Self {
        Self::exact(Collective::Barrier, Dtype::Bytes, Duration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_stand_at_the_place_of_their_code() {
        for (code, algorithm) in Algorithm::ALL.into_iter().enumerate() {
            assert_eq!(algorithm as usize, code);
        }
    }
}
