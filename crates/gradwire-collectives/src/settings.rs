//! What the workers tell a dedicated server about a call: everything of its request that the descriptor has only a
//! fingerprint of.
//!
//! It travels as a small exact transfer in front of the data, with every call whose fingerprint is not zero. A server
//! so needs no configuration of its own, and no memory of earlier calls: whatever preset or bound a call names, server and
//! workers mean the same numbers.
//!
//! | byte | field |
//! | --- | --- |
//! | 0 | bit 0: tolerance counts after the first pass; 1: the call warms up; 2: a soft threshold; 3: an early timeout |
//! | 1 | rule of the deadline |
//! | 2 | recovery |
//! | 3 | fill of the gather stage |
//! | 4..6 | critical chunks |
//! | 6 | what a mean divides by |
//! | 7 | recovery of the gather stage |
//! | 8..12, 12..16, 16..20 | loss bound, floor, loss bound of the gather stage |
//! | 20..24, 24..28 | soft threshold: fraction, epoch |
//! | 28..32 | early timeout: share of the usual time |
//! | 32..40, 40..44 | deadline: nanoseconds or rounds; factor or percentile |
//! | 44 | traffic class of the worker's data, which results have too |
//! | 48..56 | nanoseconds of the latest deadline, all ones for none |
//! | 56..64 | factor of a scaled sum |
//! | 64..72 | nanoseconds that the sender allows for a stage (ULTIMA's t_B), all ones for none |

use crate::{DeadlineRule, DivideBy, EarlyRule, Fill, GatherRule, Policy, Rotation, SoftRule};
use gradwire_core::{Reliability, CLASSES_MAX};
use std::time::Duration;

/// See the module.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct CallSettings {
    pub(crate) policy: Policy,
    /// Of a scaled sum; 1 for every other reduction.
    pub(crate) factor: f64,
    /// The call is exact, because the policy measures first.
    pub(crate) warms_up: bool,
    /// What this worker allows for a stage, once it has learned it.
    pub(crate) stage_limit: Option<Duration>,
    /// Of the worker's data; the results' too.
    pub(crate) class: u8,
}

impl CallSettings {
    /// Bytes of the record.
    pub(crate) const BYTES: usize = 72;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let policy = &self.policy;
        let mut out = [0; Self::BYTES];
        let bits = [policy.after_first_pass, self.warms_up, policy.soft.is_some(), policy.early.is_some()];
        out[0] = bits.iter().enumerate().fold(0, |all, (bit, set)| all | u8::from(*set) << bit);
        let (rule, value, share) = match policy.deadline {
            DeadlineRule::Never => (0, 0, 0.0),
            DeadlineRule::Fixed(time) => (1, nanos(Some(time)), 0.0),
            DeadlineRule::Measured { factor } => (2, 0, factor),
            DeadlineRule::SlowestLink { margin } => (3, nanos(Some(margin)), 0.0),
            DeadlineRule::WarmUp { rounds, percentile } => (4, u64::from(rounds), percentile),
        };
        (out[1], out[2], out[3]) = (rule, policy.recovery as u8, policy.gather.fill as u8);
        (out[6], out[7]) = (policy.divide_by as u8, policy.gather.recovery as u8);
        out[4..6].copy_from_slice(&policy.critical_chunks.to_le_bytes());
        let soft = policy.soft.unwrap_or(SoftRule { min_fraction: 0.0, epoch: 0 });
        let quiet_share = policy.early.map_or(0.0, |early| early.quiet_share);
        out[8..12].copy_from_slice(&policy.loss_bound.to_le_bytes());
        out[12..16].copy_from_slice(&policy.floor.to_le_bytes());
        out[16..20].copy_from_slice(&policy.gather.loss_bound.to_le_bytes());
        out[20..24].copy_from_slice(&soft.min_fraction.to_le_bytes());
        out[24..28].copy_from_slice(&soft.epoch.to_le_bytes());
        out[28..32].copy_from_slice(&quiet_share.to_le_bytes());
        out[32..40].copy_from_slice(&value.to_le_bytes());
        out[40..44].copy_from_slice(&share.to_le_bytes());
        out[44] = self.class;
        out[48..56].copy_from_slice(&nanos(policy.deadline_max).to_le_bytes());
        out[56..64].copy_from_slice(&self.factor.to_le_bytes());
        out[64..72].copy_from_slice(&nanos(self.stage_limit).to_le_bytes());
        out
    }

    /// `None` for what no version of this code writes.
    pub(crate) fn decode(record: &[u8; Self::BYTES]) -> Option<Self> {
        let u32_at = |at: usize| Some(u32::from_le_bytes(record.get(at..at + 4)?.try_into().ok()?));
        let u64_at = |at: usize| Some(u64::from_le_bytes(record.get(at..at + 8)?.try_into().ok()?));
        let f32_at = |at: usize| u32_at(at).map(f32::from_bits);
        let has = |bit: u8| record[0] >> bit & 1 == 1;
        let (value, share) = (u64_at(32)?, f32_at(40)?);
        let deadline = match record[1] {
            0 => DeadlineRule::Never,
            1 => DeadlineRule::Fixed(Duration::from_nanos(value)),
            2 => DeadlineRule::Measured { factor: share },
            3 => DeadlineRule::SlowestLink { margin: Duration::from_nanos(value) },
            4 => DeadlineRule::WarmUp { rounds: u16::try_from(value).ok()?, percentile: share },
            _ => return None,
        };
        let policy = Policy {
            loss_bound: f32_at(8)?,
            after_first_pass: has(0),
            deadline,
            deadline_max: time(u64_at(48)?),
            floor: f32_at(12)?,
            soft: if has(2) {
                Some(SoftRule { min_fraction: f32_at(20)?, epoch: u32_at(24)? })
            } else {
                None
            },
            early: if has(3) { Some(EarlyRule { quiet_share: f32_at(28)? }) } else { None },
            recovery: recovery(record[2])?,
            critical_chunks: u16::from_le_bytes([record[4], record[5]]),
            gather: GatherRule {
                loss_bound: f32_at(16)?,
                recovery: recovery(record[7])?,
                fill: [Fill::Zero, Fill::Previous, Fill::Local]
                    .into_iter()
                    .find(|fill| *fill as u8 == record[3])?,
            },
            divide_by: [DivideBy::Contributions, DivideBy::World]
                .into_iter()
                .find(|divide_by| *divide_by as u8 == record[6])?,
            // Whether a bucket is rotated is in the descriptor.
            rotation: Rotation::Off,
        };
        policy.validate().ok()?;
        let factor = f64::from_bits(u64_at(56)?);
        let class = record[44];
        let settings = Self { policy, factor, warms_up: has(1), stage_limit: time(u64_at(64)?), class };
        (usize::from(class) < CLASSES_MAX).then_some(settings)
    }
}

fn recovery(byte: u8) -> Option<Reliability> {
    RECOVERIES.into_iter().find(|recovery| *recovery as u8 == byte)
}

fn nanos(time: Option<Duration>) -> u64 {
    time.map_or(u64::MAX, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX - 1))
}

fn time(nanos: u64) -> Option<Duration> {
    (nanos != u64::MAX).then(|| Duration::from_nanos(nanos))
}

const RECOVERIES: [Reliability; 4] =
    [Reliability::Exact, Reliability::Tolerant, Reliability::Deferred, Reliability::BestEffort];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_survives_the_wire() {
        for (name, policy) in Policy::PRESETS {
            for (deadline_max, divide_by) in
                [(None, DivideBy::World), (Some(Duration::from_millis(7)), DivideBy::Contributions)]
            {
                let policy = Policy { deadline_max, divide_by, ..policy };
                let stage_limit = deadline_max.map(|most| most * 2);
                let settings =
                    CallSettings { policy, factor: 0.5, warms_up: name == "ultima", stage_limit, class: 7 };
                assert_eq!(CallSettings::decode(&settings.encode()), Some(settings), "{name}");
            }
        }
    }

    #[test]
    fn what_cannot_be_right_is_refused() {
        let policy = Policy::AUTO;
        let settings = CallSettings { policy, factor: 1.0, warms_up: false, stage_limit: None, class: 0 };
        for (at, byte) in [(1, 9), (2, 9), (3, 9), (6, 9), (7, 9), (11, 0x7F), (44, 8)] {
            let mut record = settings.encode();
            record[at] = byte;
            assert_eq!(CallSettings::decode(&record), None, "byte {at}");
        }
    }
}
