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
//! Each part is a call of its own to its group, and says of which call it is a part: bounds of loss and deadlines hold for each, and so for the
//! whole. A part of an all-reduce or a broadcast is a stretch of the tensor; of an all-gather or a reduce-scatter it is the same stretch of each
//! rank's row, so that to its group it is an all-gather or a reduce-scatter of shorter rows:
//!
//! ```text
//!   rank 0's row | part 0 | part 1 |
//!   rank 1's row | part 0 | part 1 |
//! ```
//!
//! What meets at one rank is not divided, nor is what gives each rank another size, or a call whose policy learns from those of the same size,
//! or results of which may be lost. Nothing that is one rank's own business decides, such as importance or whether somebody asks for contributions.

use crate::agreement::AgreedNetwork;
use crate::tags::PartOfBucket;
use crate::{Collective, DeadlineRule, PartOf, Policy, Request, View};
use std::ops::Range;

/// The other parts of the request of call `sequence`, of which it keeps the first; none: it is not divided.
pub(crate) fn divide(request: &mut Request, sequence: u64, known: Option<&AgreedNetwork>) -> Vec<Request> {
    let Some(known) = known.filter(|_| request.part_of.is_none() && request.can_be_divided()) else {
        return Vec::new();
    };
    let columns = columns(request, usize::from(known.threads));
    if columns.len() < 2 {
        return Vec::new();
    }
    let elems = (row_bytes(request) / request.dtype.bytes()) as u64;
    let part_of =
        Some(Box::new(PartOf { elems, parts: columns.len() as u32, sequence, known: known.clone() }));
    let part = |columns| Request { part_of: part_of.clone(), ..part(request, columns) };
    let mut parts: Vec<Request> = columns.into_iter().map(part).collect();
    *request = parts.remove(0);
    parts
}

/// What each of at most `threads` parts has of every row. The same on every rank.
fn columns(request: &Request, threads: usize) -> Vec<Range<usize>> {
    let row = row_bytes(request);
    let parts = threads.min(request.bucket_bytes() / PART_BYTES_MIN).min(row / PAGE_BYTES).max(1);
    let even = row.div_ceil(parts);
    let bytes = even.next_multiple_of(if even >= 16 * PAGE_BYTES { PAGE_BYTES } else { LINE_BYTES });
    (0..row).step_by(bytes.max(1)).map(|start| start..row.min(start + bytes)).collect()
}

/// Bytes of each of its rows; of one row where it has none. Every rank has as many.
fn row_bytes(request: &Request) -> usize {
    match request.collective {
        Collective::AllGather => request.input.len(),
        _ => request.output.len(),
    }
}

/// What has these columns of each row of `whole`.
fn part(whole: &Request, columns: Range<usize>) -> Request {
    let row = row_bytes(whole);
    let of = |view: &View| match view.len() {
        0 => *view,
        bytes if bytes == row => view.part(&columns),
        _ => view.columns(row, &columns),
    };
    let (input, output, residual) = match whole.collective {
        // Nobody reads an input there, and it may have any size.
        Collective::Broadcast { .. } => (View::EMPTY, of(&whole.output), View::EMPTY),
        _ => (of(&whole.input), of(&whole.output), of(&whole.residual)),
    };
    let tags = whole.tags.of_part(&PartOfBucket { whole: whole.bucket_bytes(), row, columns });
    Request { input, output, residual, tags, ..whole.clone() }
}

impl Request {
    /// Whether it may be divided where it is large enough. The same on every rank: it depends on nothing that is a rank's own.
    #[must_use]
    pub fn can_be_divided(&self) -> bool {
        let is_spread = matches!(
            self.collective,
            Collective::AllReduce { .. }
                | Collective::AllGather
                | Collective::ReduceScatter
                | Collective::Broadcast { .. }
        );
        is_spread && !learns_from_calls(&self.policy) && !self.policy.gather.may_lose()
    }
}

/// Whether calls of one size under it depend on those before.
fn learns_from_calls(policy: &Policy) -> bool {
    let learns = matches!(policy.deadline, DeadlineRule::WarmUp { .. } | DeadlineRule::SlowestLink { .. });
    learns || policy.soft.is_some() || policy.early.is_some()
}

/// As many parts as have so much on average: of smaller ones waking a thread would be much of what they take.
pub(crate) const PART_BYTES_MIN: usize = 1 << 20;
/// Parts begin at pages, as tensors do, and those of short rows, where that would make them unequal, at cache lines. They have a page of each row
/// on average, or packets would be small.
const PAGE_BYTES: usize = 4096;
const LINE_BYTES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Call;
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
        let others = divide(&mut first, 7, known);
        std::iter::once(&first).chain(&others).map(|part| part.output.len()).collect()
    }

    #[test]
    fn parts_are_equal_whole_pages_that_lie_behind_each_other() {
        let memory = OwnMemory::zeroed(3 * PART_BYTES_MIN + 20);
        let (mut first, end) = (request(memory.view()), memory.view().as_slice().as_ptr_range().end);
        first.residual = first.output;
        let others = divide(&mut first, 7, known(3).as_ref());
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
    fn what_learns_from_calls_or_may_lose_results_stays_whole_and_so_does_a_part() {
        let memory = OwnMemory::zeroed(4 * PART_BYTES_MIN);
        let whole = request(memory.view());
        let parts = |request: Request| lengths(&request, known(2).as_ref()).len();
        assert_eq!(parts(Request { policy: Policy::AUTO, ..whole.clone() }), 2);
        for policy in [Policy::MLT, Policy::DLCP, Policy::LTP, Policy::ULTIMA] {
            assert_eq!(parts(Request { policy, ..whole.clone() }), 1, "{policy:?}");
        }
        let exact_gather = crate::GatherRule::EXACT;
        assert_eq!(
            parts(Request { policy: Policy { gather: exact_gather, ..Policy::MLT }, ..whole.clone() }),
            2
        );
        assert_eq!(parts(Request { collective: Collective::Broadcast { root: 0 }, ..whole.clone() }), 2);
        for undivided in [Collective::Reduce { root: 0 }, Collective::Send { to: 1, tag: 0 }] {
            assert_eq!(parts(Request { collective: undivided, ..whole.clone() }), 1);
        }
        let part_of =
            Some(Box::new(PartOf { elems: 1 << 30, parts: 2, sequence: 7, known: known(2).unwrap() }));
        assert_eq!(parts(Request { part_of, ..whole }), 1);
    }

    /// Where in `memory` the pieces of a view lie, in order.
    fn places(view: &View, memory: &OwnMemory) -> Vec<Range<usize>> {
        let start = memory.view().as_slice().as_ptr() as usize;
        let piece = |piece: &[u8]| piece.as_ptr() as usize - start..piece.as_ptr_range().end as usize - start;
        view.pieces().map(piece).collect()
    }

    #[test]
    fn a_part_of_rows_has_the_same_columns_of_each_and_all_parts_have_every_byte_once() {
        let (rows, row) = (3, (PART_BYTES_MIN + 20) / 4 * 4);
        let (memory, owed) = (OwnMemory::zeroed(rows * row), OwnMemory::zeroed(rows * row));
        let (whole, residual) = (memory.view(), owed.view());
        let own = whole.part(&(row..2 * row));
        let gather = Request { input: own, collective: Collective::AllGather, ..request(whole) };
        let scatter =
            Request { output: own, residual, collective: Collective::ReduceScatter, ..request(whole) };
        for mut first in [gather, scatter] {
            let others = divide(&mut first, 7, known(2).as_ref());
            let parts: Vec<&Request> = std::iter::once(&first).chain(&others).collect();
            assert_eq!(parts.len(), 2);
            let mut all = Vec::new();
            for part in &parts {
                let (long, short) = match part.collective {
                    Collective::AllGather => (&part.output, &part.input),
                    _ => (&part.input, &part.output),
                };
                assert_eq!((long.len(), part.whole_bytes()), (rows * short.len(), row));
                let row_of = |rank: usize| long.part(&(rank * short.len()..(rank + 1) * short.len()));
                assert!(row_of(1).is(short), "in place stays in place");
                assert_eq!(
                    places(&row_of(2), &memory)[0].start - places(&row_of(0), &memory)[0].start,
                    2 * row
                );
                if part.collective == Collective::ReduceScatter {
                    assert_eq!(places(&part.residual, &owed), places(long, &memory));
                }
                assert_eq!(crate::validate::validate(part, 1, rows as u32, 1408), Ok(()));
                all.extend(places(long, &memory));
            }
            all.sort_unstable_by_key(|piece| piece.start);
            assert!(all[0].start == 0 && all.windows(2).all(|next| next[0].end == next[1].start));
            assert_eq!(all.last().map(|piece| piece.end), Some(rows * row));
        }
    }

    #[test]
    fn short_rows_make_fewer_parts_and_equal_ones() {
        let lengths = |rows: usize, row: usize, threads| {
            let memory = OwnMemory::zeroed(rows * row);
            let input = memory.view().part(&(0..row));
            let gather = Request { input, collective: Collective::AllGather, ..request(memory.view()) };
            lengths(&gather, known(threads).as_ref()).iter().map(|part| part / rows).collect::<Vec<_>>()
        };
        assert_eq!(lengths(512, PAGE_BYTES, 2), [PAGE_BYTES]);
        assert_eq!(lengths(512, 2 * PAGE_BYTES - 4, 2), [2 * PAGE_BYTES - 4]);
        assert_eq!(lengths(512, 3 * PAGE_BYTES, 8), [PAGE_BYTES; 3]);
        assert_eq!(lengths(256, 10_000, 2), [5_056, 4_944]);
        assert_eq!(lengths(256, 3 * PAGE_BYTES + 4, 3), [4_160, 4_160, 3_972]);
        assert_eq!(lengths(16, 40 * PAGE_BYTES + 4, 2), [21 * PAGE_BYTES, 19 * PAGE_BYTES + 4]);
    }

    #[test]
    fn of_a_broadcast_an_input_of_any_size_is_no_matter() {
        let (memory, other) = (OwnMemory::zeroed(2 * PART_BYTES_MIN), OwnMemory::zeroed(12));
        let collective = Collective::Broadcast { root: 0 };
        let broadcast = Request { input: other.view(), collective, ..request(memory.view()) };
        assert_eq!(lengths(&broadcast, known(2).as_ref()), [PART_BYTES_MIN; 2]);
    }

    #[test]
    fn what_is_a_ranks_own_changes_no_division_and_calls_of_two_sizes_agree_in_no_part() {
        let memory = OwnMemory::zeroed(3 * PART_BYTES_MIN);
        let whole = request(memory.view());
        let importance = Some(std::sync::Arc::new(crate::Given::new(vec![true])) as _);
        let tags = Tags { importance, ..Tags::default() };
        let own = Request { wants_contributions: true, tags, ..whole.clone() };
        assert_eq!(lengths(&own, known(2).as_ref()), lengths(&whole, known(2).as_ref()));
        let calls = |bytes: usize, threads| {
            let mut first = request(memory.view().part(&(0..bytes)));
            let others = divide(&mut first, 7, known(threads).as_ref());
            let call = |part: &Request| (part.output.len(), Call::of(part, Algorithm::Ring));
            std::iter::once(&first).chain(&others).map(call).collect::<Vec<_>>()
        };
        let (more, less) = (calls(3 * PART_BYTES_MIN, 3), calls(2 * PART_BYTES_MIN, 3));
        assert_eq!((more[0].0, more.len(), less.len()), (less[0].0, 3, 2));
        assert!(more.iter().zip(&less).all(|((_, more), (_, less))| !more.agrees(less)));
        assert!(more.iter().all(|(_, call)| call.agrees(&more[0].1)));
    }
}
