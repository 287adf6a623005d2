//! Which calls of an epoch go on, and how, when it ends.

use super::*;
use crate::{Completions, OpHandle};
use gradwire_collectives::{Algorithm, Dtype, Policy, View};
use std::time::Duration;

fn request(memory: &mut [u8], reduce: ReduceOp) -> Request {
    // SAFETY: the tests keep their memory longer than their calls.
    let view = unsafe { View::new(memory.as_mut_ptr(), memory.len()) };
    Request {
        reduce,
        input: view,
        output: view,
        ..Request::exact(
            Collective::AllReduce { algorithm: Algorithm::Auto },
            Dtype::U8,
            Duration::from_secs(1),
        )
    }
}

fn in_flight(id: u64) -> InFlight {
    let op = OpHandle::new(id, Completions::default());
    InFlight::new(op, Box::new(()), "exact")
}

fn add(calls: &mut Calls, memory: &mut [u8], reduce: ReduceOp) -> u64 {
    let CallId::Counted(number) = add_request(calls, request(memory, reduce)) else {
        panic!("it is counted")
    };
    number
}

fn add_request(calls: &mut Calls, request: Request) -> CallId {
    let before = Before::of(&request);
    calls.add(request, in_flight(0), before, Timestamp::ZERO)
}

fn started(calls: &mut Calls) -> Vec<u64> {
    let mut numbers = Vec::new();
    while let Some(next) = calls.next_to_start(|_| true, true) {
        if let Next::Start(CallId::Counted(number), _) = next {
            numbers.push(number);
        }
    }
    numbers
}

#[test]
fn a_call_that_is_made_again_begins_with_what_the_caller_gave() {
    let mut calls = Calls::default();
    let mut memory = [7; 8];
    add(&mut calls, &mut memory, ReduceOp::Avg);
    assert_eq!(started(&mut calls), [0]);
    memory.fill(1);
    calls.restart(1, 1);
    assert_eq!(started(&mut calls), [0]);
    assert_eq!(memory, [7; 8]);
}

#[test]
fn a_call_that_waits_or_is_made_again_has_the_time_that_its_caller_gave_it_and_no_more() {
    let mut calls = Calls::default();
    let mut memory = [7; 8];
    (0..=WINDOW_CALLS).for_each(|_| _ = add(&mut calls, &mut memory, ReduceOp::Avg));
    started(&mut calls);
    let waiting =
        |calls: &Calls, is_running| calls.waiting(is_running).map(|(number, _)| number).collect::<Vec<u64>>();
    assert_eq!(waiting(&calls, true), [WINDOW_CALLS], "the group has the others");
    assert_eq!(waiting(&calls, false).len() as u64, WINDOW_CALLS + 1);
    let left = |ms| calls.time_left(CallId::Counted(0), Timestamp::ZERO + Duration::from_millis(ms));
    assert_eq!([0, 400, 1000, 1400].map(left), [1000, 600, 0, 0].map(Duration::from_millis));
}

#[test]
fn a_call_that_is_refused_leaves_what_the_caller_gave() {
    let mut calls = Calls::default();
    let mut memory = [7; 8];
    add(&mut calls, &mut memory, ReduceOp::Sum);
    assert_eq!(started(&mut calls), [0]);
    memory.fill(1);
    calls.restart(1, 1);
    assert!(matches!(calls.next_to_start(|_| true, false), Some(Next::Refuse(CallId::Counted(0)))));
    assert!(calls.refuse(CallId::Counted(0)).is_some() && calls.refuse(CallId::Counted(0)).is_none());
    assert_eq!((memory, calls.below()), ([7; 8], 1));
}

#[test]
fn a_sum_in_place_that_needs_every_rank_leaves_what_the_caller_gave() {
    let (mut calls, mut rows) = (Calls::default(), [7; 16]);
    let input = request(&mut rows, ReduceOp::Sum).input;
    let own_row = request(&mut rows[8..], ReduceOp::Sum);
    add_request(&mut calls, Request { collective: Collective::ReduceScatter, input, ..own_row });
    let Some(Next::Start(call, _)) = calls.next_to_start(|_| true, true) else { panic!("it can") };
    rows[8..].fill(1);
    assert!(calls.refuse(call).is_some());
    assert_eq!(rows, [7; 16]);
}

#[test]
fn a_call_that_a_result_of_another_rank_does_not_fit_is_refused_with_what_the_caller_gave() {
    let mut calls = Calls::default();
    let mut memory = [7; 8];
    add(&mut calls, &mut memory, ReduceOp::Avg);
    assert_eq!(started(&mut calls), [0]);
    memory.fill(1);
    assert!(calls.end_with(0, &Held { bytes: vec![5; 4], epoch: 0 }).is_none());
    assert!(calls.refuse(CallId::Counted(0)).is_some());
    assert_eq!(memory, [7; 8]);
}

#[test]
fn calls_that_others_may_not_have_ended_push_no_result_out() {
    let mut calls = Calls::default();
    let mut memory = [1; 8];
    let count = 2 * WINDOW_CALLS + 1;
    for _ in 0..=count {
        add(&mut calls, &mut memory, ReduceOp::Avg);
    }
    assert!(calls.end(CallId::Counted(0), Some(0), 3).is_some());
    for number in 1..count {
        let held = Held { bytes: vec![5; 8], epoch: 0 };
        let ended = if number % 2 == 0 {
            calls.refuse(CallId::Counted(number))
        } else {
            calls.end_with(number, &held)
        };
        assert!(ended.is_some() && calls.held(0).is_some(), "{number}");
    }
    assert!(calls.end(CallId::Counted(count), Some(0), 3).is_some());
    assert!(calls.held(0).is_none(), "all have contributed to this one");
}

#[test]
fn calls_that_need_only_their_root_push_a_result_out_after_as_many_windows_as_it_takes() {
    for (collective, members, windows) in [
        (Collective::Barrier, 8, 1),
        (Collective::AllReduce { algorithm: Algorithm::Auto }, 8, 1),
        (Collective::Broadcast { root: 0 }, 1, 1),
        (Collective::Broadcast { root: 0 }, 2, 2),
        (Collective::Broadcast { root: 0 }, 3, 2),
        (Collective::Broadcast { root: 0 }, 4, 3),
        (Collective::Broadcast { root: 0 }, 8, 4),
    ] {
        let mut calls = Calls::default();
        let mut memory = [1; 8];
        add(&mut calls, &mut memory, ReduceOp::Avg);
        assert!(calls.end(CallId::Counted(0), Some(0), members).is_some());
        for number in 1..=windows * WINDOW_CALLS {
            assert!(calls.held(0).is_some(), "{collective:?} {number} among {members}");
            let collective = collective.clone();
            let request = Request { collective, ..request(&mut memory, ReduceOp::Avg) };
            assert_eq!(add_request(&mut calls, request), CallId::Counted(number));
            assert!(calls.end(CallId::Counted(number), Some(0), members).is_some());
        }
        assert!(calls.held(0).is_none(), "{collective:?} among {members}");
    }
}

#[test]
fn as_many_windows_before_a_call_are_counted_where_each_call_fills_one() {
    let ended =
        |bytes_so_far| Kept { state: State::Ended(None), start: Start::Never, rows_before: 0, bytes_so_far };
    for (windows, forgotten) in [(1, 2), (2, 1), (3, 0)] {
        let kept = [1, WINDOW_BYTES + 2, 3 * WINDOW_BYTES].map(ended);
        let mut calls = Calls { kept: kept.into(), below: 3, ..Calls::default() };
        calls.forget(2, windows);
        assert_eq!(calls.first, forgotten, "{windows}");
    }
}

#[test]
fn a_report_of_what_was_taken_over_says_that_replicas_may_differ_where_results_may_be_lost() {
    let mut calls = Calls::default();
    let mut memory = [1; 8];
    for policy in [Policy::RELIABLE, Policy::AUTO, Policy::ULTIMA] {
        let request = Request { policy, ..request(&mut memory, ReduceOp::Avg) };
        let [called, ended] = [5, 9].map(Timestamp::from_nanos);
        let number = calls.next();
        calls.add(request, in_flight(0), Before::default(), called);
        let held = Held { bytes: vec![5; 8], epoch: 0 };
        let pending = calls.end_with(number, &held).expect("it fits");
        let report = pending.taken_over(number, ended);
        assert_eq!((report.submitted_at, report.submitted_at + report.elapsed), (called, ended));
        assert!(!report.in_sequence, "the number is one of all epochs");
        assert_eq!(report.replicas_identical, policy != Policy::ULTIMA, "{policy:?}");
    }
}

#[test]
fn who_joins_begins_with_the_call_that_the_others_make_next() {
    let mut calls = Calls::default();
    calls.begin_at(7);
    assert!(calls.has_no_part_in(6) && !calls.has_no_part_in(7));
    let mut memory = [1; 8];
    assert_eq!(add(&mut calls, &mut memory, ReduceOp::Avg), 7);
    calls.hold(6, Held::default());
    assert!(calls.held(6).is_none(), "it has no use for what came before");
    assert_eq!(started(&mut calls), [7]);
}

#[test]
fn a_sum_in_flight_is_refused_and_a_later_one_is_not() {
    let mut calls = Calls::default();
    let (mut a, mut b) = ([1; 8], [1; 8]);
    add(&mut calls, &mut a, ReduceOp::Sum);
    add(&mut calls, &mut b, ReduceOp::Sum);
    calls.restart(1, 1);
    assert!(matches!(calls.next_to_start(|_| true, false), Some(Next::Refuse(CallId::Counted(0)))));
    assert!(matches!(calls.next_to_start(|_| true, false), Some(Next::Start(CallId::Counted(1), _))));
}

#[test]
fn results_are_kept_for_a_window_and_no_call_starts_ahead_of_it() {
    let mut calls = Calls::default();
    let mut memory = [1; 8];
    for _ in 0..WINDOW_CALLS + 5 {
        add(&mut calls, &mut memory, ReduceOp::Avg);
    }
    assert_eq!(started(&mut calls), (0..WINDOW_CALLS).collect::<Vec<u64>>());
    assert!(calls.end(CallId::Counted(1), Some(0), 3).is_some());
    assert_eq!(started(&mut calls), [] as [u64; 0], "the oldest has not ended");
    assert!(calls.end(CallId::Counted(0), Some(0), 3).is_some() && calls.held(0).is_some());
    assert_eq!(started(&mut calls), [WINDOW_CALLS, WINDOW_CALLS + 1]);
    assert!(calls.end(CallId::Counted(WINDOW_CALLS), Some(0), 3).is_some());
    assert!(calls.held(0).is_none() && calls.held(1).is_some() && calls.has_ended(0));
}

#[test]
fn a_result_that_others_have_waits_for_its_call() {
    let mut calls = Calls::default();
    let held = Held { bytes: vec![5; 8], epoch: 0 };
    calls.hold(0, held.clone());
    assert!(calls.has_ended(0) && calls.held(0) == Some(&held));
    let mut memory = [1; 8];
    add(&mut calls, &mut memory, ReduceOp::Avg);
    let Some(Next::Take(0, held)) = calls.next_to_start(|_| true, true) else { panic!("it is here") };
    assert!(calls.end_with(0, &held).is_some());
    assert_eq!((memory, calls.below()), ([5; 8], 1));
}

#[test]
fn what_has_a_row_for_each_rank_takes_no_number_and_keeps_its_place_among_the_others() {
    let (mut calls, mut memory) = (Calls::default(), [1; 8]);
    let gather =
        |memory: &mut [u8]| Request { collective: Collective::AllGather, ..request(memory, ReduceOp::Sum) };
    assert_eq!(add(&mut calls, &mut memory, ReduceOp::Avg), 0);
    let rows = [0, 1].map(|_| add_request(&mut calls, gather(&mut memory)));
    assert_eq!(add(&mut calls, &mut memory, ReduceOp::Avg), 1);
    assert_eq!([0, 1, 2].map(|number| calls.rows_before(number)), [0, 2, 0]);
    let order: Vec<CallId> = std::iter::from_fn(|| match calls.next_to_start(|_| true, true)? {
        Next::Start(call, _) => Some(call),
        _ => None,
    })
    .collect();
    assert_eq!(order, [CallId::Counted(0), rows[0], rows[1], CallId::Counted(1)]);
    assert_eq!(calls.start_of(1), Start::At { epoch: 0, place: 3 });
    assert!(calls.end(rows[0], Some(0), 3).is_some() && calls.end(rows[0], Some(0), 3).is_none());
    assert_eq!((calls.below(), calls.next(), calls.drain().len()), (0, 2, 3));
}

#[test]
fn what_has_a_row_for_each_rank_is_refused_where_anybody_had_made_it_when_the_epoch_began_or_one_is_missing()
{
    let (mut calls, mut memory) = (Calls::default(), [1; 8]);
    let mut gather = |calls: &mut Calls| {
        let request = request(&mut memory, ReduceOp::Sum);
        add_request(calls, Request { collective: Collective::AllGather, ..request })
    };
    let in_flight = gather(&mut calls);
    assert!(matches!(calls.next_to_start(|_| true, true), Some(Next::Start(call, _)) if call == in_flight));
    // Another rank has made two before its call 0.
    let gaps = BTreeMap::from([(0, 2)]);
    calls.told(Vec::new(), RowsInFlight { below: 0, gaps });
    calls.restart(1, 0);
    let mut made = vec![in_flight];
    made.extend([1, 2].map(|_| gather(&mut calls)));
    for (call, is_refused) in made.into_iter().zip([true, true, false]) {
        match calls.next_to_start(|_| true, true) {
            Some(Next::Refuse(refused)) => assert!(is_refused && refused == call),
            Some(Next::Start(started, _)) => assert!(!is_refused && started == call),
            _ => panic!("it was made"),
        }
    }
    let later = gather(&mut calls);
    assert!(matches!(calls.next_to_start(|_| true, false), Some(Next::Refuse(call)) if call == later));
}
