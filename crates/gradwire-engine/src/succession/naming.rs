//! Whom reports and errors name. The group of an epoch numbers its members from 0; callers know ranks by the numbers of the first epoch.

use super::{lost_rank, Phase, Succession};
use crate::{LostStats, Outcome};
use gradwire_collectives::{DeliveryReport, Mismatch, OpError, PeerDelivery};
use std::time::Duration;

impl Succession {
    /// First rank of the present group's rank `rank`.
    pub(crate) fn first_rank(&self, rank: u32) -> u32 {
        self.members.get(rank as usize).copied().unwrap_or(rank)
    }

    /// How an operation of the present group ended, with ranks as the caller knows them. Not for what was made here, which has these.
    pub(crate) fn named(&self, outcome: Outcome) -> Outcome {
        match outcome {
            Ok(report) => Ok(named_in_report(report, |rank| self.first_rank(rank))),
            Err(error) => Err(self.named_error(error)),
        }
    }

    /// The same for why the present group failed.
    pub(crate) fn named_error(&self, error: OpError) -> OpError {
        named_in_error(error, |rank| self.first_rank(rank))
    }

    /// The error of a call that cannot be finished without the lost ranks. Once the epoch is there it names the same rank on all who are
    /// left, whether they were told why the one before ended or only that it did.
    pub(crate) fn unfinished(&self) -> OpError {
        // Until the next epoch is there only the verdict knows who has just been lost.
        let is_between = matches!(self.phase, Phase::Waiting { .. } | Phase::Forming(_) | Phase::Over(_));
        let latest = self.just_lost().filter(|_| is_between);
        let gone = || missing(&self.lost, self.epoch, &self.members, self.lineage.world_size());
        if let Some(rank) = latest.or_else(gone).or(self.verdict_rank()) {
            return self.unfinished_without(rank);
        }
        // All are there, and the group was formed again for one of them.
        let come = self.joined.iter().filter(|joined| !is_between && joined.epoch == self.epoch);
        match come.map(|joined| joined.rank).min() {
            Some(rank) => self.unfinished_since(rank),
            None => OpError::Regrouped { epoch: self.epoch },
        }
    }

    /// The same for a call that has begun before this rank joined, which had been lost.
    fn unfinished_since(&self, rank: u32) -> OpError {
        let detail = format!(
            "it has joined again, but a call of an epoch before cannot be finished in epoch {}",
            self.epoch
        );
        let during = "a call that began before it was back".to_owned();
        self.lost_error(rank, (Duration::ZERO, during), detail)
    }

    /// The same for a call that needs this rank, which is no member.
    pub(crate) fn unfinished_without(&self, rank: u32) -> OpError {
        let (silent, during, detail) = known_of(self.verdict.as_ref(), rank);
        let detail = format!(
            "{detail}; in epoch {} the others go on, but this call cannot be finished among them",
            self.epoch
        );
        self.lost_error(rank, (silent, during), detail)
    }

    fn lost_error(&self, rank: u32, (silent, during): (Duration, String), detail: String) -> OpError {
        let host = self.lineage.host(rank);
        OpError::PeerLost { rank, host, silent, during, detail: detail.into(), reported_by: None }
    }

    /// The rank that the latest verdict is about.
    pub(super) fn verdict_rank(&self) -> Option<u32> {
        self.verdict.as_ref().and_then(lost_rank)
    }

    /// The rank that the present group has lost: a member still, unless the verdict is of a loss before.
    pub(super) fn just_lost(&self) -> Option<u32> {
        self.verdict_rank().filter(|rank| self.members.contains(rank))
    }
}

/// For how long this rank has heard nothing of `rank`, in which call, and what else it knows, as its latest verdict says.
fn known_of(verdict: Option<&OpError>, rank: u32) -> (Duration, String, String) {
    match verdict {
        Some(OpError::PeerLost { rank: lost, silent, during, detail, .. }) if *lost == rank => {
            (*silent, during.clone(), detail.to_string())
        }
        Some(OpError::PeerLeft { rank: left, during, detail, .. }) if *left == rank => {
            (Duration::ZERO, during.clone(), format!("it left the group: {detail}"))
        }
        _ => (Duration::ZERO, "a call that it is needed for".to_owned(), "others found out".to_owned()),
    }
}

/// Who is missing in epoch `epoch`: of those who were lost just before it the first, or of all who are not there.
fn missing(lost: &[LostStats], epoch: u64, members: &[u32], world_size: u32) -> Option<u32> {
    let latest = lost.iter().filter(|lost| lost.epoch == epoch).map(|lost| lost.rank).min();
    latest.or_else(|| (0..world_size).find(|rank| !members.contains(rank)))
}

fn named_in_report(mut report: DeliveryReport, first_rank: impl Fn(u32) -> u32) -> DeliveryReport {
    let rename = |peer: &mut PeerDelivery| peer.rank = first_rank(peer.rank);
    report.peers.iter_mut().for_each(rename);
    report.sources.iter_mut().for_each(rename);
    report.takings.iter_mut().for_each(|taking| taking.rank = first_rank(taking.rank));
    report
}

fn named_in_error(mut error: OpError, first_rank: impl Fn(u32) -> u32) -> OpError {
    let rename = |rank: &mut u32| *rank = first_rank(*rank);
    match &mut error {
        OpError::PeerLost { rank, reported_by, .. } => {
            rename(rank);
            reported_by.iter_mut().for_each(rename);
        }
        OpError::PeerLeft { rank, .. }
        | OpError::Aborted { rank, .. }
        | OpError::Settings { rank, .. }
        | OpError::ServerMemory { rank, .. } => rename(rank),
        OpError::Mismatch(mismatch) => {
            let Mismatch { rank_a, a, rank_b, b } = &mut **mismatch;
            [rank_a, rank_b].into_iter().for_each(rename);
            [a, b].into_iter().filter_map(|position| position.root.as_mut()).for_each(rename);
        }
        _ => {}
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use gradwire_collectives::{Dtype, Position};

    #[test]
    fn whoever_was_lost_last_is_blamed_and_later_the_first_who_is_not_there() {
        let lost = |rank, epoch| LostStats { rank, host: String::new(), epoch };
        // Of five ranks 1 was lost, then 3 and 2 together; then 2 has come back.
        let all = [lost(1, 1), lost(3, 2), lost(2, 2)];
        assert_eq!(missing(&all, 1, &[0, 2, 3, 4], 5), Some(1));
        assert_eq!(missing(&all, 2, &[0, 4], 5), Some(2));
        assert_eq!(missing(&all, 3, &[0, 2, 4], 5), Some(1));
        assert_eq!(missing(&[], 3, &[0, 2, 4], 5), Some(1), "on the one that has come back too");
        assert_eq!(missing(&all, 5, &[0, 1, 2, 3, 4], 5), None);
    }

    #[test]
    fn a_rank_that_left_was_not_silent() {
        let left = OpError::PeerLeft {
            rank: 2,
            host: "worker-2".to_owned(),
            during: "broadcast 7".to_owned(),
            waited: Duration::from_secs(1),
            detail: "nothing of it had arrived".into(),
        };
        let (silent, during, detail) = known_of(Some(&left), 2);
        assert_eq!(detail, "it left the group: nothing of it had arrived");
        let host = "worker-2".to_owned();
        let error =
            OpError::PeerLost { rank: 2, host, silent, during, detail: detail.into(), reported_by: None };
        let said =
            "rank 2 (worker-2) is lost during broadcast 7: it left the group: nothing of it had arrived";
        assert_eq!(error.to_string(), said);
        assert_eq!(known_of(Some(&left), 1).2, "others found out");
        assert_eq!(known_of(None, 2).2, "others found out");
    }

    #[test]
    fn every_rank_in_an_error_is_one_of_the_first_epoch_and_a_tag_is_none() {
        let named = |error| named_in_error(error, |rank| [0, 2, 3][rank as usize]);
        let lost = |rank, reported_by| OpError::PeerLost {
            rank,
            host: String::new(),
            silent: Duration::ZERO,
            during: String::new(),
            detail: "".into(),
            reported_by,
        };
        assert_eq!(named(lost(1, Some(2))), lost(2, Some(3)));
        assert_eq!(named(lost(2, None)), lost(3, None));
        let settings = |rank| OpError::Settings { rank, host: String::new(), theirs: 7 };
        assert_eq!(named(settings(1)), settings(2));
        let position = |root, tag| Position {
            sequence: 1,
            collective: "a call".to_owned(),
            dtype: Dtype::F32,
            reduce: None,
            elems: 1,
            root,
            tag,
        };
        let mismatch =
            |(rank_a, a), (rank_b, b)| OpError::Mismatch(Box::new(Mismatch { rank_a, a, rank_b, b }));
        let broadcast =
            |(a, root_a), (b, root_b)| mismatch((a, position(root_a, None)), (b, position(root_b, None)));
        assert_eq!(named(broadcast((0, Some(1)), (2, None))), broadcast((0, Some(2)), (3, None)));
        let send = |a, b| mismatch((a, position(None, Some(1))), (b, position(None, Some(1))));
        assert_eq!(named(send(0, 1)), send(0, 2));
    }
}
