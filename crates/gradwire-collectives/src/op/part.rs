//! Which part of which call an operation is ([`crate::GroupEvent::Divided`]); most are whole.

use super::Op;
use crate::division::PART_BYTES_MIN;
use crate::Request;

/// See the module's documentation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// Into so many the call was divided.
    count: u32,
    /// Its number in the group that was called.
    sequence: u64,
}

impl Part {
    /// Of a request that has the place `sequence` in this group.
    pub(super) fn of(request: &Request, sequence: u64) -> Self {
        let sequence = request.part_of.as_ref().map_or(sequence, |part| part.sequence);
        Self { count: request.parts(), sequence }
    }
}

impl Op {
    /// The number that callers know it by.
    pub(crate) fn number(&self) -> u64 {
        self.part.sequence
    }

    /// Name, size and number, for messages.
    pub(crate) fn during(&self) -> String {
        self.call.during(self.number())
    }

    /// Into how many parts the call was divided, if it is so large that it might have been.
    pub(crate) fn parts_if_large(&self) -> Option<u32> {
        (self.bytes >= PART_BYTES_MIN).then_some(self.part.count)
    }
}
