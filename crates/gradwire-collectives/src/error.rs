//! How a collective fails. Every variant names the rank and what disagreed.

use crate::{Dtype, ReduceOp};
use std::fmt;
use std::time::Duration;
use thiserror::Error;

/// Where a rank is in the group's sequence of collectives: what its descriptors and heartbeats carry.
#[derive(Clone, Debug, PartialEq)]
pub struct Position {
    /// Number of the collective.
    pub sequence: u64,
    /// Its name, for people.
    pub collective: String,
    /// Element type.
    pub dtype: Dtype,
    /// Reduction, where there is one.
    pub reduce: Option<ReduceOp>,
    /// Elements.
    pub elems: u64,
    /// Root, where there is one.
    pub root: Option<u32>,
    /// Tag of a message from one rank to another.
    pub tag: Option<u32>,
}

impl Position {
    /// Name of the reduction. A scaled sum is without its factor, which a descriptor has as a fingerprint only.
    #[must_use]
    pub fn reduction(&self) -> Option<String> {
        self.reduce.map(|reduce| match reduce {
            ReduceOp::PremulSum(_) => "PremulSum".to_owned(),
            _ => format!("{reduce:?}"),
        })
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} x {:?}", self.collective, self.elems, self.dtype)?;
        if let Some(reduction) = self.reduction() {
            write!(f, ", {reduction}")?;
        }
        match (self.root, self.tag) {
            (Some(root), _) => write!(f, ", root {root}"),
            (None, Some(tag)) => write!(f, ", tag {tag}"),
            (None, None) => Ok(()),
        }
    }
}

/// Two ranks called different things at the same place of their sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Mismatch {
    /// One rank.
    pub rank_a: u32,
    /// What it called.
    pub a: Position,
    /// The other rank.
    pub rank_b: u32,
    /// What that one called.
    pub b: Position,
}

/// Why a collective did not complete. After any of these but [`OpError::Invalid`] the group is poisoned: every
/// later call fails with the same cause, because ranks may disagree about what has been done.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum OpError {
    /// The request itself is wrong. Nothing of it was sent. The call keeps its place in this rank's sequence: the
    /// group goes on if every rank was refused there, and a rank whose own call was right gets [`Self::Mismatch`].
    #[error("invalid request: {0}")]
    Invalid(String),
    /// Ranks called different things.
    #[error("ranks {} and {} disagree at {} {}: rank {} called {}, rank {} called {}{}", .0.rank_a, .0.rank_b, numbered(.0), .0.a.sequence, .0.rank_a, .0.a, .0.rank_b, .0.b, about_settings(.0))]
    Mismatch(Box<Mismatch>),
    /// A rank fell silent.
    #[error("rank {rank} ({host}) is lost{}{relayed}: {detail}", when_lost(*.silent, .during), relayed = .reported_by.map_or(String::new(), |r| format!(" (reported by rank {r})")))]
    PeerLost {
        /// The lost rank.
        rank: u32,
        /// Its host.
        host: String,
        /// How long nothing was heard; zero where only others found out.
        silent: Duration,
        /// Collective in progress here.
        during: String,
        /// What had arrived from it here, in which stage, and where it last said that it was, or was seen.
        detail: Box<str>,
        /// Rank that found out, when it was not this one.
        reported_by: Option<u32>,
    },
    /// A rank left while it was still needed.
    #[error("rank {rank} ({host}) left the group {}: {detail}", when_needed(.during, *.waited))]
    PeerLeft {
        /// The rank.
        rank: u32,
        /// Its host.
        host: String,
        /// Collective in progress here, or the call that needs it and was made later.
        during: String,
        /// How long that had waited.
        waited: Duration,
        /// What had arrived from it here, in which stage, and where it last said that it was, or was seen.
        detail: Box<str>,
    },
    /// The call's timeout passed.
    #[error("{during} timed out after {waited:?}, when its timeout passed: {detail}")]
    TimedOut {
        /// Collective in progress here.
        during: String,
        /// How long it waited.
        waited: Duration,
        /// For each peer that is behind: what had arrived of what, and where that rank last said it was, or was seen.
        detail: String,
    },
    /// What answers in the place of a rank is not of this group.
    #[error("what answers as rank {rank} ({host}) is not of this group: it is of an earlier start, was shown other records, or does not know the job secret, if there is one. Start all ranks again, and let nobody else write to the store")]
    Settings {
        /// The rank.
        rank: u32,
        /// Its host.
        host: String,
        /// What its hello says.
        theirs: u64,
    },
    /// A dedicated server may not take as much memory as the call needs on it.
    #[error("server rank {rank} ({host}) may hold {bytes_max} bytes of sums, {during} needs {needed} of them there: allow it more, or start more servers")]
    ServerMemory {
        /// The server.
        rank: u32,
        /// Its host.
        host: String,
        /// The call; by its number there where this rank has not come to it.
        during: String,
        /// Bytes that the call needs on it.
        needed: u64,
        /// Bytes that it may take.
        bytes_max: u64,
    },
    /// Another rank's group failed for a reason of its own, or this rank's because its network thread panicked.
    #[error("rank {rank} ({host}) aborted the group: {cause}; {}: {detail}", what_ended(.during, *.waited))]
    Aborted {
        /// The rank.
        rank: u32,
        /// Its host.
        host: Box<str>,
        /// Its reason.
        cause: Box<str>,
        /// Collective in progress here, or the call that was made later.
        during: String,
        /// How long that had waited.
        waited: Duration,
        /// For each peer that is behind: what had arrived here of what, in which stage, and where that rank last said it was, or was seen.
        detail: Box<str>,
    },
    /// This rank may not go on: no majority of the ranks could be reached, or the others have gone on without it.
    #[error("this rank stops in epoch {epoch}: {outcome}; it began with: {cause}")]
    NotMember {
        /// Number of the last epoch that this rank was in.
        epoch: u64,
        /// What happened, for people.
        outcome: &'static str,
        /// The loss that began it.
        cause: String,
    },
    /// The members form their group again, as far as is known with all of them: for a rank that did not come after all, or for one that is lost but not
    /// named yet. What was in flight cannot be finished; the group goes on.
    #[error("nobody is known to be lost, but the group is formed again behind epoch {epoch}: a call that is in flight meanwhile cannot be finished, and can be made again")]
    Regrouped {
        /// The last epoch that this rank was in when the call ended.
        epoch: u64,
    },
    /// The group was shut down on this rank.
    #[error("the group was shut down while {0} was in flight")]
    ShutDown(String),
}

impl OpError {
    /// The same for a call that meets it: where nothing was in progress here when the group failed, it is this one that is ended by it.
    pub(crate) fn met_by(mut self, call: impl FnOnce() -> String) -> Self {
        if let Self::PeerLeft { during, .. } | Self::Aborted { during, .. } = &mut self {
            if during == IDLE {
                *during = call();
            }
        }
        self
    }
}

/// What is in progress where no call is.
pub(crate) const IDLE: &str = "nothing (it was idle)";

/// Messages between two ranks have numbers of their own.
fn numbered(mismatch: &Mismatch) -> &'static str {
    if mismatch.a.tag.is_some() && mismatch.b.tag.is_some() {
        return "message";
    }
    "collective"
}

/// What a fingerprint of settings says of their difference is no help to people.
fn about_settings(mismatch: &Mismatch) -> &'static str {
    let Mismatch { a, b, .. } = mismatch;
    let settings = |position: &Position| {
        position.collective.split_once(WITH_SETTINGS).map(|(_, settings)| settings.to_owned())
    };
    if settings(a) == settings(b) {
        return "";
    }
    if [a, b].into_iter().all(|position| matches!(position.reduce, Some(ReduceOp::PremulSum(_)))) {
        return "; these settings are the factor of the scaled sum, and how much loss is tolerated and how, if any: give the same on every rank";
    }
    "; these settings are how much loss is tolerated and how (the preset and what is given beside it: loss_bound, deadline, floor, \
     gather_loss_bound, gather_fill, divide_by, hadamard and the like), and the factor of a scaled sum: give the same on every rank"
}

/// Comes before the fingerprint in [`Position::collective`].
pub(crate) const WITH_SETTINGS: &str = " with settings ";

fn when_lost(silent: Duration, during: &str) -> String {
    match silent {
        Duration::ZERO => format!(" during {during}"),
        _ => format!(": silent for {silent:?} during {during}"),
    }
}

fn when_needed(during: &str, waited: Duration) -> String {
    match waited {
        Duration::ZERO if during == IDLE => "when nothing was in progress here".to_owned(),
        Duration::ZERO => format!("before {during}, which needs it"),
        _ => format!("while {during} needed it, after {waited:?}"),
    }
}

fn what_ended(during: &str, waited: Duration) -> String {
    match waited {
        Duration::ZERO if during == IDLE => "nothing was in progress here".to_owned(),
        Duration::ZERO => format!("{during} ends with it here"),
        _ => format!("{during} had waited {waited:?} here"),
    }
}
/// What is said of peers, one after the other, the first of them alone where there are many: of a call that times out all ranks may be
/// behind, each says so of all, and what one looks for would be lost among it.
pub fn first_named(said: impl ExactSizeIterator<Item = String>) -> String {
    let more = said.len().saturating_sub(NAMED_MAX);
    let mut said: Vec<String> = said.take(NAMED_MAX).collect();
    if more > 0 {
        said.push(format!("and {more} more"));
    }
    said.join("; ")
}

/// The ranks of a host, which fail together.
const NAMED_MAX: usize = 8;
