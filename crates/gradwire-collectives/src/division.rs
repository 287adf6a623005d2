//! What is large is divided between the network threads of a rank, each of which has a group of its own with those of the other ranks.
//!
//! One network thread carries a few gigabytes in a second at most: it copies, adds, opens what is sealed and looks at every packet. Where
//! links are faster than that and cores abound, the group that was called starts the first part itself and hands out the others
//! ([`crate::GroupEvent::Divided`]), whose order is that in which calls start: the same on every rank, because all decide by what
//! they have agreed on, at the same place of the sequence.
//!
//! ```text
//!   THREAD 1  group     [part 0 of call 7] ....... [part 0 of call 8]
//!   THREAD 2  its group [part 1 of call 7] ....... [part 1 of call 8]
//! ```
//!
//! Each part is a call of its own to its group: bounds of loss and deadlines hold for each, and so for the whole. Only all-reduces are
//! divided, and none whose policy learns from calls of the same size, or results of which may be lost.

use crate::agreement::AgreedNetwork;
use crate::{Collective, DeadlineRule, Policy, Request};

/// The other parts of a request, of which it keeps the first; none: it is not divided.
pub(crate) fn divide(request: &mut Request, known: Option<&AgreedNetwork>) -> Vec<Request> {
    let threads = known.map_or(1, |known| usize::from(known.threads));
    let bytes = request.output.len();
    let parts = threads.min(bytes / PART_BYTES_MIN);
    if parts < 2 || !can_be_divided(request) {
        return Vec::new();
    }
    let whole = request.clone();
    let part_bytes = bytes.div_ceil(parts).next_multiple_of(ALIGNMENT);
    let mut all = (0..parts).map(|part| {
        let range = part * part_bytes..bytes.min((part + 1) * part_bytes);
        let residual = if whole.residual.is_empty() { whole.residual } else { whole.residual.part(&range) };
        let (input, output) = (whole.input.part(&range), whole.output.part(&range));
        Request { input, output, residual, ..whole.clone() }
    });
    all.by_ref().take(1).for_each(|first| *request = first);
    all.collect()
}

/// Whether every element of it is treated alike and nobody asks about single ones.
fn can_be_divided(request: &Request) -> bool {
    let is_all_reduce = matches!(request.collective, Collective::AllReduce { .. });
    is_all_reduce
        && !request.wants_contributions
        && request.tags.importance.is_none()
        && !learns_from_calls(&request.policy)
        && !request.policy.gather.may_lose()
}

/// Whether calls of one size under it depend on those before.
fn learns_from_calls(policy: &Policy) -> bool {
    let learns = matches!(policy.deadline, DeadlineRule::WarmUp { .. } | DeadlineRule::SlowestLink { .. });
    learns || policy.soft.is_some() || policy.early.is_some()
}

/// Of smaller parts waking a thread would be much of what they take.
const PART_BYTES_MIN: usize = 1 << 20;
/// Parts begin at pages, as tensors do.
const ALIGNMENT: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::OwnMemory;
    use crate::{Algorithm, Dtype, Tags, View};
    use std::time::Duration;

    const SECOND: Duration = Duration::from_secs(1);

    fn known(threads: u8) -> Option<AgreedNetwork> {
        Some(AgreedNetwork { threads, ..AgreedNetwork::lossless(SECOND, 1) })
    }

    fn request(view: View) -> Request {
        let all_reduce = Collective::AllReduce { algorithm: Algorithm::Auto };
        Request { input: view, output: view, ..Request::exact(all_reduce, Dtype::F32, SECOND) }
    }

    fn lengths(request: &Request, known: Option<&AgreedNetwork>) -> Vec<usize> {
        let mut first = request.clone();
        let others = divide(&mut first, known);
        std::iter::once(&first).chain(&others).map(|part| part.output.len()).collect()
    }

    #[test]
    fn parts_are_equal_whole_pages_that_lie_behind_each_other() {
        let memory = OwnMemory::zeroed(3 * PART_BYTES_MIN + 20);
        let (mut first, end) = (request(memory.view()), memory.view().as_slice().as_ptr_range().end);
        first.residual = first.output;
        let others = divide(&mut first, known(3).as_ref());
        let parts: Vec<&Request> = std::iter::once(&first).chain(&others).collect();
        let lengths: Vec<usize> = parts.iter().map(|part| part.output.len()).collect();
        assert_eq!(lengths, [(1 << 20) + 4096, (1 << 20) + 4096, (1 << 20) - 8192 + 20]);
        for (part, next) in parts.iter().zip(&parts[1..]) {
            assert_eq!(part.output.as_slice().as_ptr_range().end, next.output.as_slice().as_ptr());
        }
        assert_eq!(parts[2].output.as_slice().as_ptr_range().end, end);
        assert!(parts.iter().all(|part| part.input.is(&part.output) && part.residual.is(&part.output)));
    }

    #[test]
    fn only_as_many_parts_as_are_large_enough() {
        let memory = OwnMemory::zeroed(2 * PART_BYTES_MIN);
        let whole = request(memory.view());
        assert_eq!(lengths(&whole, known(8).as_ref()), [PART_BYTES_MIN; 2]);
        for undivided in [None, known(1)] {
            assert_eq!(lengths(&whole, undivided.as_ref()), [2 * PART_BYTES_MIN]);
        }
        let small = request(memory.view().part(&(0..2 * PART_BYTES_MIN - 4)));
        assert_eq!(lengths(&small, known(8).as_ref()).len(), 1);
    }

    #[test]
    fn what_learns_from_calls_or_is_asked_about_single_elements_stays_whole() {
        let memory = OwnMemory::zeroed(4 * PART_BYTES_MIN);
        let whole = request(memory.view());
        let parts = |request: Request| lengths(&request, known(2).as_ref()).len();
        assert_eq!(parts(Request { policy: Policy::AUTO, ..whole.clone() }), 2);
        for policy in [Policy::MLT, Policy::DLCP, Policy::LTP, Policy::ULTIMA] {
            assert_eq!(parts(Request { policy, ..whole.clone() }), 1, "{policy:?}");
        }
        assert_eq!(parts(Request { wants_contributions: true, ..whole.clone() }), 1);
        let importance = Some(std::sync::Arc::new(crate::Given::new(vec![true])) as _);
        assert_eq!(parts(Request { tags: Tags { importance, ..Tags::default() }, ..whole.clone() }), 1);
        assert_eq!(parts(Request { collective: Collective::Broadcast { root: 0 }, ..whole }), 1);
    }
}
