//! What a rank calls, in the 16 bytes that travel with its transfers and heartbeats.
//!
//! | byte | field |
//! | --- | --- |
//! | 0 | collective |
//! | 1 | dtype |
//! | 2 | reduction, 255 for none |
//! | 3 | schedule of an all-reduce, and 128 when the bucket is rotated; of a reduce-scatter 1 when what is lost is fed back |
//! | 4..8 | root, or tag of a point-to-point transfer; 2^32 - 1 for none |
//! | 8..14 | elements; of a part of a call ([`crate::PartOf`]) those of the whole |
//! | 14..16 | fingerprint of what must agree besides: policy, factor of a scaled sum |
//!
//! Two ranks whose descriptors differ at the same place of their sequence have called different things. Elements of
//! an all-to-all differ between pairs by right: its position says none, its transfers say those of the pair.

use crate::error::{Mismatch, Position, WITH_SETTINGS};
use crate::rotation;
use crate::{Algorithm, Collective, DeadlineRule, Dtype, Policy, ReduceOp, Request};
use gradwire_core::Descriptor;
use std::time::Duration;

/// One call, as far as ranks must agree about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Call {
    kind: Kind,
    dtype: Dtype,
    reduce: Option<u8>,
    algorithm: u8,
    root: u32,
    elems: u64,
    fingerprint: u16,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum Kind {
    AllReduce = 1,
    Broadcast = 2,
    AllGather = 3,
    ReduceScatter = 4,
    Reduce = 5,
    Gather = 6,
    Scatter = 7,
    AllToAll = 8,
    Barrier = 9,
    PointToPoint = 10,
    Refused = 11,
    Exchange = 12,
}

impl Call {
    /// What stands in a rank's sequence for a collective that it refused: it agrees with nothing but a refusal.
    pub(crate) const REFUSED: Self = Self {
        kind: Kind::Refused,
        dtype: Dtype::Bytes,
        reduce: None,
        algorithm: 0,
        root: NONE,
        elems: 0,
        fingerprint: 0,
    };

    /// The group's own exchange of what its ranks measured.
    pub(crate) const EXCHANGE: Self = Self { kind: Kind::Exchange, ..Self::REFUSED };
    /// The same call with its bucket rotated: its transfers are those of the padded one.
    pub(crate) fn rotated(mut self) -> Self {
        self.algorithm |= ROTATED;
        self
    }

    /// The most bytes of a bucket of `bytes` that a rank is sent at a time by `senders` others; `None` of what comes together at one rank, and of
    /// what each sends as it likes.
    pub(crate) fn bytes_at_once(&self, bytes: usize, senders: u32) -> Option<usize> {
        let schedule = self.algorithm & !ROTATED;
        let at_servers = self.kind == Kind::AllReduce && schedule == Algorithm::ParameterServer as u8;
        let kinds = [Kind::AllReduce, Kind::AllGather, Kind::ReduceScatter, Kind::Barrier, Kind::Exchange];
        let is_one_shot = self.kind == Kind::AllReduce && schedule == ONE_SHOT;
        let copies = if is_one_shot { senders as usize } else { 1 };
        (kinds.contains(&self.kind) && !at_servers).then_some(bytes * copies)
    }

    /// The call that `request` is, with the schedule that was chosen for it.
    pub(crate) fn of(request: &Request, algorithm: Algorithm) -> Self {
        let (kind, root, bytes) = Self::kind_of(request);
        let reduces = matches!(kind, Kind::AllReduce | Kind::ReduceScatter | Kind::Reduce);
        Self {
            kind,
            dtype: request.dtype,
            reduce: reduces.then(|| request.reduce.code()),
            algorithm: match kind {
                Kind::AllReduce => algorithm as u8,
                Kind::ReduceScatter => request.scattered_feedback().map_or(0, |_| FEEDS_BACK),
                _ => 0,
            },
            root,
            elems: request.part_of.as_ref().map_or((bytes / request.dtype.bytes()) as u64, |part| part.elems)
                & ELEMS_MASK,
            fingerprint: if reduces { fingerprint(&request.policy, request.reduce) } else { 0 },
        }
    }

    /// Kind, root or tag, and the bytes that every rank has of it.
    fn kind_of(request: &Request) -> (Kind, u32, usize) {
        let (input, output) = (request.input.len(), request.output.len());
        match request.collective {
            Collective::AllReduce { .. } => (Kind::AllReduce, NONE, output),
            Collective::Broadcast { root } => (Kind::Broadcast, root, output),
            Collective::AllGather => (Kind::AllGather, NONE, input),
            Collective::ReduceScatter => (Kind::ReduceScatter, NONE, output),
            Collective::Reduce { root } => (Kind::Reduce, root, input),
            Collective::Gather { root } => (Kind::Gather, root, input),
            Collective::Scatter { root } => (Kind::Scatter, root, output),
            Collective::AllToAll { .. } => (Kind::AllToAll, NONE, 0),
            Collective::Barrier => (Kind::Barrier, NONE, 0),
            Collective::Send { tag, .. } => (Kind::PointToPoint, tag, input),
            Collective::Receive { tag, .. } => (Kind::PointToPoint, tag, output),
        }
    }

    /// Whether it is an all-reduce that goes round a ring.
    pub(crate) fn is_ring(&self) -> bool {
        self.kind == Kind::AllReduce && self.algorithm & !ROTATED == RING
    }

    /// Whether dedicated servers take part in it. Nothing that has no elements reaches them.
    pub(crate) fn is_over_servers(&self) -> bool {
        self.kind == Kind::AllReduce && self.algorithm & !ROTATED == PARAMETER_SERVER && self.elems > 0
    }

    /// Whether the descriptor alone does not say all of it: then its settings travel in front of the data.
    pub(crate) fn has_settings(&self) -> bool {
        self.fingerprint != 0
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The reduction; a scaled sum has its factor in the settings, if there are any, and else 1.
    pub(crate) fn reduce_op(&self) -> Option<ReduceOp> {
        self.reduce.and_then(ReduceOp::from_code)
    }

    /// Bytes of the bucket that is sent: of a rotated one with its padding.
    pub(crate) fn bytes(&self) -> Option<usize> {
        let elems = usize::try_from(self.elems).ok()?;
        let sent = if self.algorithm & ROTATED == 0 { elems } else { rotation::elems(elems) };
        sent.checked_mul(self.dtype.bytes())
    }

    /// The same call as one pair of an all-to-all sees it; every other call is the same for every pair.
    pub(crate) fn for_pair(mut self, bytes: usize) -> Self {
        if self.kind == Kind::AllToAll {
            self.elems = (bytes / self.dtype.bytes()) as u64 & ELEMS_MASK;
        }
        self
    }

    /// The wire form.
    pub(crate) fn encode(&self) -> Descriptor {
        let mut out = [0; 16];
        out[0] = self.kind as u8;
        out[1] = self.dtype as u8;
        out[2] = self.reduce.unwrap_or(255);
        out[3] = self.algorithm;
        out[4..8].copy_from_slice(&self.root.to_le_bytes());
        out[8..14].copy_from_slice(&self.elems.to_le_bytes()[..6]);
        out[14..].copy_from_slice(&self.fingerprint.to_le_bytes());
        out
    }

    /// `None` for bytes that no version of this code writes.
    pub(crate) fn decode(bytes: &Descriptor) -> Option<Self> {
        let [kind, dtype, reduce, algorithm, r0, r1, r2, r3, e0, e1, e2, e3, e4, e5, f0, f1] = *bytes;
        let reduce = (reduce != 255).then_some(reduce);
        if reduce.is_some_and(|code| ReduceOp::from_code(code).is_none()) {
            return None;
        }
        Some(Self {
            kind: Kind::ALL.into_iter().find(|k| *k as u8 == kind)?,
            dtype: Dtype::from_code(dtype)?,
            reduce,
            algorithm,
            root: u32::from_le_bytes([r0, r1, r2, r3]),
            elems: u64::from_le_bytes([e0, e1, e2, e3, e4, e5, 0, 0]),
            fingerprint: u16::from_le_bytes([f0, f1]),
        })
    }

    /// Whether two ranks at the same place of their sequence have called the same thing.
    pub(crate) fn agrees(&self, other: &Self) -> bool {
        let elems = if self.kind == Kind::AllToAll { other.elems } else { self.elems };
        Self { elems, ..*self } == *other
    }

    /// Its tag, if it is a point-to-point transfer.
    pub(crate) fn tag(&self) -> Option<u32> {
        (self.kind == Kind::PointToPoint).then_some(self.root)
    }

    /// Its name, with the schedule of an all-reduce.
    pub(crate) fn name(&self) -> &'static str {
        match (self.kind, self.algorithm & !ROTATED) {
            (Kind::AllReduce, RING) => "all_reduce/ring",
            (Kind::AllReduce, HALVING) => "all_reduce/halving_doubling",
            (Kind::AllReduce, PARAMETER_SERVER) => "all_reduce/parameter_server",
            (Kind::AllReduce, WEIGHTED) => "all_reduce/weighted_transpose",
            (Kind::AllReduce, ONE_SHOT) => "all_reduce/one_shot",
            (Kind::AllReduce, _) => "all_reduce/transpose",
            (Kind::Broadcast, _) => "broadcast",
            (Kind::AllGather, _) => "all_gather",
            (Kind::ReduceScatter, _) => "reduce_scatter",
            (Kind::Reduce, _) => "reduce",
            (Kind::Gather, _) => "gather",
            (Kind::Scatter, _) => "scatter",
            (Kind::AllToAll, _) => "all_to_all",
            (Kind::Barrier, _) => "barrier",
            (Kind::PointToPoint, _) => "send/receive",
            (Kind::Refused, _) => "a call that it refused as invalid",
            (Kind::Exchange, _) => "the exchange of what ranks measured",
        }
    }

    /// Whether transfer `index` belongs to the reduce stage of a reduction that has a policy.
    pub(crate) fn may_lose(&self, index: u32, world_size: u32) -> bool {
        let is_of_reduce_stage = match (self.kind, self.algorithm & !ROTATED) {
            (Kind::AllReduce, RING) => index < world_size.saturating_sub(1),
            (Kind::AllReduce, WEIGHTED) => index % 2 == 0,
            (Kind::AllReduce, ONE_SHOT) => false,
            (Kind::AllReduce | Kind::ReduceScatter, _) => index == 0,
            _ => false,
        };
        self.fingerprint != 0 && is_of_reduce_stage
    }

    /// Whether transfer `index` from `from` carries what `from` itself had waited for, so that the call that it tells of may be
    /// another rank's.
    pub(crate) fn passes_calls_on(&self, from: u32, index: u32) -> bool {
        match self.kind {
            Kind::AllReduce => match self.algorithm & !ROTATED {
                HALVING => true,
                WEIGHTED => index % 2 == 1,
                _ => index > 0,
            },
            Kind::Broadcast => from != self.root,
            _ => false,
        }
    }

    /// Name, size and number, for messages.
    pub(crate) fn during(&self, sequence: u64) -> String {
        format!("{} #{sequence} ({} x {:?})", self.name(), self.elems, self.dtype)
    }

    fn position(&self, sequence: u64) -> Position {
        let mut collective = self.name().to_owned();
        if self.algorithm & ROTATED != 0 {
            collective += ", rotated";
        }
        if self.kind == Kind::ReduceScatter && self.algorithm == FEEDS_BACK {
            collective += ", with error feedback";
        }
        if self.fingerprint != 0 {
            collective += &format!("{WITH_SETTINGS}{:04x}", self.fingerprint);
        }
        Position {
            sequence,
            collective,
            dtype: self.dtype,
            reduce: self.reduce.and_then(ReduceOp::from_code),
            elems: self.elems,
            root: (self.root != NONE && self.tag().is_none()).then_some(self.root),
            tag: self.tag(),
        }
    }
}

/// What two ranks called at `sequence`, the lower rank first, so that every rank words the error alike.
pub(crate) fn mismatch(sequence: u64, one: (u32, &Descriptor), other: (u32, &Descriptor)) -> Mismatch {
    let (first, second) = if one.0 <= other.0 { (one, other) } else { (other, one) };
    let position = |descriptor| match Call::decode(descriptor) {
        Some(call) => call.position(sequence),
        None => Position {
            sequence,
            collective: format!("something unknown ({descriptor:02x?})"),
            dtype: Dtype::Bytes,
            reduce: None,
            elems: 0,
            root: None,
            tag: None,
        },
    };
    Mismatch { rank_a: first.0, a: position(first.1), rank_b: second.0, b: position(second.1) }
}

impl Kind {
    const ALL: [Self; 12] = [
        Self::AllReduce,
        Self::Broadcast,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Reduce,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::Barrier,
        Self::PointToPoint,
        Self::Refused,
        Self::Exchange,
    ];
}

/// FNV-1a over the settings, folded to 16 bits; 0 for the default (exact, no factor).
fn fingerprint(policy: &Policy, reduce: ReduceOp) -> u16 {
    let factor = match reduce {
        ReduceOp::PremulSum(factor) => factor,
        _ => 1.0,
    };
    if *policy == Policy::RELIABLE && factor.to_bits() == 1.0_f64.to_bits() {
        return 0;
    }
    let (rule, value) = match policy.deadline {
        DeadlineRule::Never => (0, 0),
        DeadlineRule::Fixed(time) => (1, nanos(time)),
        DeadlineRule::Measured { factor } => (2, u64::from(factor.to_bits())),
        DeadlineRule::SlowestLink { margin } => (3, nanos(margin)),
        DeadlineRule::WarmUp { rounds, percentile } => {
            (4, u64::from(rounds) << 32 | u64::from(percentile.to_bits()))
        }
    };
    let soft =
        policy.soft.map_or(0, |soft| u64::from(soft.epoch) << 32 | u64::from(soft.min_fraction.to_bits()));
    let words = [
        u64::from(policy.loss_bound.to_bits()),
        u64::from(policy.after_first_pass),
        rule,
        value,
        policy.deadline_max.map_or(0, nanos),
        u64::from(policy.floor.to_bits()),
        soft,
        policy.early.map_or(u64::MAX, |early| u64::from(early.quiet_share.to_bits())),
        policy.recovery as u64,
        u64::from(policy.critical_chunks),
        u64::from(policy.gather.loss_bound.to_bits()),
        policy.gather.recovery as u64,
        policy.gather.fill as u64,
        policy.divide_by as u64,
        policy.rotation as u64,
        factor.to_bits(),
    ];
    let hash =
        words.iter().flat_map(|word| word.to_le_bytes()).fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
        });
    ((hash ^ hash >> 16 ^ hash >> 32 ^ hash >> 48) as u16).max(1)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

const NONE: u32 = u32::MAX;
const ELEMS_MASK: u64 = (1 << 48) - 1;
/// Beside the schedule.
const ROTATED: u8 = 128;
/// Of a reduce-scatter. Each rank owes what another one's feedback counts on, so all of them feed back or none does.
const FEEDS_BACK: u8 = 1;
const RING: u8 = Algorithm::Ring as u8;
const HALVING: u8 = Algorithm::HalvingDoubling as u8;
const PARAMETER_SERVER: u8 = Algorithm::ParameterServer as u8;
const WEIGHTED: u8 = Algorithm::WeightedTranspose as u8;
const ONE_SHOT: u8 = Algorithm::OneShot as u8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DivideBy, EarlyRule, Fill, GatherRule, Rotation, SoftRule};
    use gradwire_core::Reliability;

    fn request(collective: Collective, policy: Policy) -> Request {
        Request {
            reduce: ReduceOp::Avg,
            policy,
            ..Request::exact(collective, Dtype::F32, Duration::from_secs(1))
        }
    }

    #[test]
    fn descriptors_survive_the_wire() {
        let all_reduce = Collective::AllReduce { algorithm: Algorithm::Auto };
        for (collective, policy) in [
            (all_reduce, Policy::AUTO),
            (Collective::Broadcast { root: 3 }, Policy::RELIABLE),
            (Collective::Receive { from: None, tag: 77 }, Policy::RELIABLE),
        ] {
            let call = Call::of(&request(collective, policy), Algorithm::Ring);
            assert_eq!(Call::decode(&call.encode()), Some(call));
        }
        assert_eq!(Call::decode(&[0; 16]), None);
        assert_eq!(Call::decode(&[255; 16]), None);
    }

    #[test]
    fn every_setting_that_must_agree_changes_the_descriptor() {
        let of = |policy, reduce, algorithm| {
            let request = Request { reduce, ..request(Collective::AllReduce { algorithm }, policy) };
            Call::of(&request, algorithm).encode()
        };
        let mut seen = vec![];
        for policy in [
            Policy::RELIABLE,
            Policy::MLT,
            Policy::AUTO,
            Policy { loss_bound: 0.06, ..Policy::AUTO },
            Policy { floor: 0.6, ..Policy::AUTO },
            Policy { deadline: DeadlineRule::Fixed(Duration::from_millis(5)), ..Policy::AUTO },
            Policy { deadline_max: Some(Duration::from_millis(5)), ..Policy::AUTO },
            Policy::DLCP,
            Policy { gather: GatherRule { fill: Fill::Local, ..Policy::DLCP.gather }, ..Policy::DLCP },
            Policy { recovery: Reliability::Deferred, ..Policy::DLCP },
            Policy { divide_by: DivideBy::World, ..Policy::DLCP },
            Policy::LTP,
            Policy { critical_chunks: 2, ..Policy::LTP },
            Policy { soft: Some(SoftRule { min_fraction: 0.8, epoch: 7 }), ..Policy::LTP },
            Policy { soft: Some(SoftRule { min_fraction: 0.7, epoch: 1000 }), ..Policy::LTP },
            Policy {
                deadline: DeadlineRule::SlowestLink { margin: Duration::from_millis(100) },
                ..Policy::LTP
            },
            Policy::ULTIMA,
            Policy { gather: GatherRule::EXACT, ..Policy::ULTIMA },
            Policy { early: Some(EarlyRule { quiet_share: 0.2 }), ..Policy::ULTIMA },
            Policy { early: None, ..Policy::ULTIMA },
            Policy { rotation: Rotation::Auto, ..Policy::ULTIMA },
            Policy { rotation: Rotation::On, ..Policy::ULTIMA },
            Policy { deadline: DeadlineRule::WarmUp { rounds: 19, percentile: 0.95 }, ..Policy::ULTIMA },
            Policy { deadline: DeadlineRule::WarmUp { rounds: 20, percentile: 0.9 }, ..Policy::ULTIMA },
        ] {
            for reduce in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::PremulSum(0.5), ReduceOp::PremulSum(0.25)]
            {
                for algorithm in [
                    Algorithm::Ring,
                    Algorithm::Transpose,
                    Algorithm::HalvingDoubling,
                    Algorithm::ParameterServer,
                    Algorithm::WeightedTranspose,
                    Algorithm::OneShot,
                ] {
                    let descriptor = of(policy, reduce, algorithm);
                    let rotated = Call::decode(&descriptor).expect("of this version").rotated().encode();
                    for descriptor in [descriptor, rotated] {
                        assert!(!seen.contains(&descriptor));
                        seen.push(descriptor);
                    }
                }
            }
        }
    }

    #[test]
    fn what_comes_together_at_one_rank_or_server_is_not_counted_and_in_one_shot_all_others_send_the_bucket() {
        let all_reduce = Collective::AllReduce { algorithm: Algorithm::Auto };
        let of = |collective, algorithm| {
            let request = Request::exact(collective, Dtype::F32, Duration::from_secs(1));
            Call::of(&request, algorithm)
        };
        let at_once = |call: Call| call.bytes_at_once(5, 3);
        assert_eq!(at_once(of(all_reduce.clone(), Algorithm::Ring)), Some(5));
        assert_eq!(at_once(of(all_reduce.clone(), Algorithm::Transpose).rotated()), Some(5));
        assert_eq!([of(Collective::Barrier, Algorithm::Auto), Call::EXCHANGE].map(at_once), [Some(5); 2]);
        assert_eq!(at_once(of(all_reduce.clone(), Algorithm::OneShot)), Some(15));
        let served = of(all_reduce, Algorithm::ParameterServer);
        assert_eq!([served, served.rotated()].map(at_once), [None; 2]);
        for at_one in [Collective::Reduce { root: 0 }, Collective::Gather { root: 0 }] {
            assert_eq!(at_once(of(at_one, Algorithm::Auto)), None);
        }
    }
    fn mismatch_of(a: &Request, b: &Request) -> Mismatch {
        let of = |request: &Request| Call::of(request, Algorithm::Ring).encode();
        mismatch(3, (0, &of(a)), (1, &of(b)))
    }

    #[test]
    fn messages_that_disagree_are_told_apart_by_their_tag_and_have_no_root() {
        let one = |collective, dtype| Request::exact(collective, dtype, Duration::from_secs(1));
        let found = mismatch_of(
            &one(Collective::Send { to: 1, tag: 7 }, Dtype::F32),
            &one(Collective::Receive { from: Some(0), tag: 7 }, Dtype::F64),
        );
        assert_eq!((found.a.root, found.a.tag, found.b.root, found.b.tag), (None, Some(7), None, Some(7)));
        let text = crate::OpError::Mismatch(Box::new(found)).to_string();
        assert!(text.contains("at message 3:") && text.contains("F32, tag 7,"), "{text}");
        let broadcast = |root| one(Collective::Broadcast { root }, Dtype::F32);
        let found = mismatch_of(&broadcast(0), &broadcast(1));
        assert_eq!((found.a.root, found.a.tag, found.b.root), (Some(0), None, Some(1)));
        let text = crate::OpError::Mismatch(Box::new(found)).to_string();
        assert!(text.contains("at collective 3:") && text.contains("root 1"), "{text}");
    }

    #[test]
    fn factors_that_disagree_are_named_as_such_without_one_that_nobody_gave() {
        let all_reduce = Collective::AllReduce { algorithm: Algorithm::Auto };
        let scaled = |factor| Request {
            reduce: ReduceOp::PremulSum(factor),
            ..request(all_reduce.clone(), Policy::RELIABLE)
        };
        let found = mismatch_of(&scaled(3.0), &scaled(2.0));
        assert_eq!(found.a.reduction().as_deref(), Some("PremulSum"));
        let text = crate::OpError::Mismatch(Box::new(found)).to_string();
        assert!(!text.contains("1.0") && text.contains("; these settings are the factor of"), "{text}");
    }
}
