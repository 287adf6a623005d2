//! By which path it is told what has come.

use super::{ack_path_bytes, Paths};
use crate::spray::PathSet;
use crate::Timestamp;
use gradwire_wire::{AckPath, ACK_WORDS_MAX};

/// Each path has acknowledgements of its own; in those of the others its latest 64 packets, or a few more, are enough.
const BRIEF_WORDS_MAX: usize = 4;

impl Paths {
    /// The path whose arrivals must be acknowledged now.
    pub(crate) fn ack_due(&self, now: Timestamp) -> Option<usize> {
        self.members.iter().position(|member| member.path.arrivals.is_due(now))
    }

    /// The path by which what came on path `index` is acknowledged: the same, unless nothing of this side's comes through there.
    pub(crate) fn way_back(&self, index: usize) -> usize {
        if self.members.len() > 1 && self.members[index].health.seems_dead() {
            usize::from(self.control(0).0)
        } else {
            index
        }
    }

    /// Other paths than `lead`, by which an acknowledgement about path `about` goes, on which something arrived and whose bitmaps fit in
    /// `room` bytes of it.
    pub(crate) fn others_to_acknowledge(&self, about: usize, lead: usize, mut room: usize) -> PathSet {
        let mut others = PathSet::default();
        if self.members.len() == 1 {
            return others;
        }
        for index in core::iter::once(about).chain(0..self.members.len()) {
            let Some(entry) = self.entry(index, about) else { continue };
            let bytes = ack_path_bytes(entry.words);
            if index != lead && !others.contains(index) && bytes <= room {
                room -= bytes;
                others.insert(index);
            }
        }
        others
    }

    /// What arrived on these paths, for an acknowledgement about path `about`.
    pub(crate) fn describe(&self, paths: PathSet, about: usize) -> impl Iterator<Item = AckPath> + '_ {
        (0..self.members.len())
            .filter(move |index| paths.contains(*index))
            .filter_map(move |index| self.entry(index, about))
    }

    /// What an acknowledgement about path `about` that goes by another one says of path `index`. Of `about` all that it can: what it does
    /// not name counts as lost.
    fn entry(&self, index: usize, about: usize) -> Option<AckPath> {
        let words = if index == about { ACK_WORDS_MAX } else { BRIEF_WORDS_MAX };
        self.members[index].path.arrivals.describe(1, words)
    }

    /// Acknowledgements have not arrived: the next ones name what those did, too.
    pub(crate) fn say_again(&mut self) {
        self.members.iter_mut().for_each(|member| member.path.arrivals.say_again());
    }
}
