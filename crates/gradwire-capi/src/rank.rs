//! A rank and its calls.

use crate::{
    GradwireConfig, GRADWIRE_CONNECTED, GRADWIRE_DONE, GRADWIRE_FAILED, GRADWIRE_GROUP_FAILED,
    GRADWIRE_INVALID, GRADWIRE_NONE, GRADWIRE_NULL, GRADWIRE_OK, GRADWIRE_SERVED,
};
use gradwire_collectives::{
    Algorithm, Collective, DeliveryReport, Dtype, Group, GroupEvent, ReduceOp, Request, Tags, TransmitSink,
    View,
};
use gradwire_core::{Ecn, Mark, ReceivedMark, Timestamp, TrafficClass};
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

/// A rank: what a handle points to.
#[derive(Debug)]
pub struct GradwireRank {
    group: Group,
    config: GradwireConfig,
}

/// See `include/gradwire.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GradwireEvent {
    /// [`GRADWIRE_CONNECTED`] to [`GRADWIRE_SERVED`].
    pub kind: u32,
    /// Ranks whose values are in the block that has the fewest; 0 of a worker of dedicated servers, which alone know.
    pub contributors_least: u32,
    /// Which call: as [`gradwire_all_reduce`] named it; 0 of [`GRADWIRE_SERVED`], since a server has named none.
    pub call: u64,
    /// Payload bytes sent.
    pub bytes_sent: u64,
    /// Of these again.
    pub bytes_sent_again: u64,
    /// Elements of this rank that did not count.
    pub elems_uncounted: u64,
    /// Elements of the result that did not come back.
    pub elems_filled: u64,
}

/// Where datagrams go: see `include/gradwire.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GradwireSink {
    /// Handed to both functions.
    pub context: *mut c_void,
    /// Whether another datagram fits: 0 is no.
    pub has_room: Option<unsafe extern "C" fn(*mut c_void) -> i32>,
    /// Takes a datagram: rank it is for, band (0 control, 1 and more data by class, the highest of all where the network is told
    /// nothing), whether it is ECN-capable, its two parts. Both are gone when the function returns.
    pub push: Option<unsafe extern "C" fn(*mut c_void, u32, u32, i32, *const u8, usize, *const u8, usize)>,
}

struct Sink {
    context: *mut c_void,
    has_room: unsafe extern "C" fn(*mut c_void) -> i32,
    push: unsafe extern "C" fn(*mut c_void, u32, u32, i32, *const u8, usize, *const u8, usize),
    tells_marks: bool,
}

impl TransmitSink for Sink {
    fn has_room(&self) -> bool {
        // SAFETY: the caller's own function and context.
        unsafe { (self.has_room)(self.context) != 0 }
    }

    fn push(&mut self, peer: u32, mark: Mark, head: &[u8], payload: &[u8]) {
        let (band, ecn) = match (self.tells_marks, mark.class) {
            (false, _) => (BAND_OF_OTHERS, false),
            (true, TrafficClass::Control) => (0, mark.ecn_capable),
            (true, TrafficClass::Data(class)) => (1 + u32::from(class), mark.ecn_capable),
        };
        let (head, payload) = ((head.as_ptr(), head.len()), (payload.as_ptr(), payload.len()));
        // SAFETY: the caller's own function and context; both parts are valid for their lengths until it returns.
        unsafe { (self.push)(self.context, peer, band, ecn.into(), head.0, head.1, payload.0, payload.1) };
    }
}

impl GradwireRank {
    fn all_reduce(&mut self, now: Timestamp, input: View, output: View) -> u64 {
        let importance = self.config.importance();
        let request = Request {
            reduce: ReduceOp::Avg,
            input,
            output,
            policy: self.config.policy(),
            tags: Tags { class: 0, importance: importance.map(|rule| Arc::new(rule) as Arc<_>) },
            ..Request::exact(
                Collective::AllReduce { algorithm: Algorithm::ParameterServer },
                Dtype::F32,
                CALL_MAX,
            )
        };
        self.group.submit(now, request).0
    }

    fn event(&mut self) -> Option<GradwireEvent> {
        let of = |kind| GradwireEvent { kind, ..GradwireEvent::default() };
        Some(match self.group.poll_event()? {
            GroupEvent::Connected => of(GRADWIRE_CONNECTED),
            GroupEvent::Done { op, outcome: Ok(report) } => {
                GradwireEvent { call: op.0, ..done(GRADWIRE_DONE, &report) }
            }
            GroupEvent::Done { op, outcome: Err(_) } => GradwireEvent { call: op.0, ..of(GRADWIRE_FAILED) },
            GroupEvent::Failed(_) => of(GRADWIRE_GROUP_FAILED),
            GroupEvent::Served(report) => done(GRADWIRE_SERVED, &report),
            _ => of(0),
        })
    }
}

fn done(kind: u32, report: &DeliveryReport) -> GradwireEvent {
    let elems = |ranges: &[std::ops::Range<u64>]| ranges.iter().map(|range| range.end - range.start).sum();
    GradwireEvent {
        kind,
        contributors_least: report.contributors_least.into(),
        call: 0,
        bytes_sent: report.bytes_sent,
        bytes_sent_again: report.bytes_retransmitted,
        elems_uncounted: elems(&report.uncounted),
        elems_filled: elems(&report.filled),
    }
}

/// A new rank, which starts to connect. Null: the settings are null or out of range.
///
/// # Safety
/// `config` points to settings or is null.
#[no_mangle]
pub unsafe extern "C" fn gradwire_rank_new(config: *const GradwireConfig, now_ns: u64) -> *mut GradwireRank {
    // SAFETY: the caller promises that it points to settings where it is not null.
    let Some(config) = unsafe { config.as_ref() }.copied().filter(GradwireConfig::is_valid) else {
        return std::ptr::null_mut();
    };
    let group = Group::new(config.group(), Timestamp::from_nanos(now_ns));
    Box::into_raw(Box::new(GradwireRank { group, config }))
}

/// Frees a rank; nothing is said to the others. Memory lent to its calls is the caller's again.
///
/// # Safety
/// `rank` is of [`gradwire_rank_new`] and not freed yet, or null.
#[no_mangle]
pub unsafe extern "C" fn gradwire_rank_free(rank: *mut GradwireRank) {
    if !rank.is_null() {
        // SAFETY: it came from `Box::into_raw`, and the caller promises that it was not freed.
        drop(unsafe { Box::from_raw(rank) });
    }
}

/// Calls for the mean of `input` over the workers, `elems` values in float32, in `output`. `call`: the number of the call in its event.
/// `GRADWIRE_INVALID`: no values, or more than a rank can send (4 GiB, and 4,194,304 times the payload of a datagram), memory that is
/// not aligned or overlaps, or a dedicated server, which calls nothing. A call that is not done after 120 s of the caller's time fails,
/// and the group with it.
///
/// # Safety
/// `rank` as in [`gradwire_rank_free`]. `input` and `output` are `elems` values each, aligned, the same or apart, which nobody touches
/// until the event of the call; `call` can be written. Any of them may be null.
#[no_mangle]
pub unsafe extern "C" fn gradwire_all_reduce(
    rank: *mut GradwireRank,
    now_ns: u64,
    input: *mut f32,
    output: *mut f32,
    elems: usize,
    call: *mut u64,
) -> i32 {
    // SAFETY: the caller promises a live rank where it is not null, and that nobody else uses it.
    let Some(rank) = (unsafe { rank.as_mut() }) else { return GRADWIRE_NULL };
    if input.is_null() || output.is_null() || call.is_null() {
        return GRADWIRE_NULL;
    }
    let possible = 4..=rank.config.call_bytes_max();
    let Some(bytes) = elems.checked_mul(4).filter(|bytes| possible.contains(bytes)) else {
        return GRADWIRE_INVALID;
    };
    let apart = input.addr().abs_diff(output.addr());
    if !input.is_aligned() || !output.is_aligned() || (1..bytes).contains(&apart) || rank.config.is_server() {
        return GRADWIRE_INVALID;
    }
    // SAFETY: the caller promises `elems` values each, and that nobody touches them until the event of the call.
    let views = unsafe { (View::new(input.cast(), bytes), View::new(output.cast(), bytes)) };
    let name = rank.all_reduce(Timestamp::from_nanos(now_ns), views.0, views.1);
    // SAFETY: not null, and the caller promises that it can be written.
    unsafe { call.write(name) };
    GRADWIRE_OK
}

/// Takes a datagram of rank `from`. `ecn`: the ECN field it came with, 0 to 3. What is wrong with the datagram is only counted.
///
/// # Safety
/// `rank` as in [`gradwire_rank_free`], `bytes` are `length` bytes to read; either may be null.
#[no_mangle]
pub unsafe extern "C" fn gradwire_handle_datagram(
    rank: *mut GradwireRank,
    now_ns: u64,
    from: u32,
    ecn: u32,
    bytes: *const u8,
    length: usize,
) -> i32 {
    // SAFETY: as in `gradwire_all_reduce`.
    let Some(rank) = (unsafe { rank.as_mut() }) else { return GRADWIRE_NULL };
    if bytes.is_null() {
        return GRADWIRE_NULL;
    }
    let Ok(ecn @ 0..=3) = u8::try_from(ecn) else { return GRADWIRE_INVALID };
    // SAFETY: not null, and the caller promises the length.
    let datagram = unsafe { std::slice::from_raw_parts(bytes, length) };
    let mark = ReceivedMark { class: None, ecn: Ecn::from_bits(ecn) };
    rank.group.handle_marked_datagram(Timestamp::from_nanos(now_ns), from, datagram, mark);
    GRADWIRE_OK
}

/// Does what is due.
///
/// # Safety
/// `rank` as in [`gradwire_rank_free`].
#[no_mangle]
pub unsafe extern "C" fn gradwire_handle_timeout(rank: *mut GradwireRank, now_ns: u64) -> i32 {
    // SAFETY: as in `gradwire_all_reduce`.
    let Some(rank) = (unsafe { rank.as_mut() }) else { return GRADWIRE_NULL };
    rank.group.handle_timeout(Timestamp::from_nanos(now_ns));
    GRADWIRE_OK
}

/// Gives every datagram that may leave now to `sink`, until it has no room.
///
/// # Safety
/// `rank` as in [`gradwire_rank_free`]; `sink` points to a sink or is null, and its functions may be called with its context.
#[no_mangle]
pub unsafe extern "C" fn gradwire_poll_transmit(
    rank: *mut GradwireRank,
    now_ns: u64,
    sink: *const GradwireSink,
) -> i32 {
    // SAFETY: as in `gradwire_all_reduce`; the same of the sink.
    let (Some(rank), Some(sink)) = (unsafe { (rank.as_mut(), sink.as_ref()) }) else { return GRADWIRE_NULL };
    let (Some(has_room), Some(push)) = (sink.has_room, sink.push) else { return GRADWIRE_NULL };
    let tells_marks = rank.config.importance().is_some();
    let mut sink = Sink { context: sink.context, has_room, push, tells_marks };
    rank.group.poll_transmit(Timestamp::from_nanos(now_ns), &mut sink);
    GRADWIRE_OK
}

/// When the rank must be asked again ([`gradwire_handle_timeout`], then [`gradwire_poll_transmit`]), in nanoseconds; the largest
/// number: never, or the rank is null.
///
/// # Safety
/// `rank` as in [`gradwire_rank_free`].
#[no_mangle]
pub unsafe extern "C" fn gradwire_poll_timeout(rank: *const GradwireRank) -> u64 {
    // SAFETY: as in `gradwire_all_reduce`.
    let rank = unsafe { rank.as_ref() };
    let timeout = rank.and_then(|rank| rank.group.poll_timeout());
    timeout.map_or(u64::MAX, |timeout| timeout.at.as_nanos())
}

/// The next event. `GRADWIRE_NONE`: there is none, and `event` was left as it is.
///
/// # Safety
/// `rank` as in [`gradwire_rank_free`]; `event` can be written; either may be null.
#[no_mangle]
pub unsafe extern "C" fn gradwire_poll_event(rank: *mut GradwireRank, event: *mut GradwireEvent) -> i32 {
    // SAFETY: as in `gradwire_all_reduce`.
    let Some(rank) = (unsafe { rank.as_mut() }) else { return GRADWIRE_NULL };
    if event.is_null() {
        return GRADWIRE_NULL;
    }
    let Some(found) = rank.event() else { return GRADWIRE_NONE };
    // SAFETY: not null, and the caller promises that it can be written.
    unsafe { event.write(found) };
    GRADWIRE_OK
}

/// Behind every class: the last band of whatever has fewer.
const BAND_OF_OTHERS: u32 = 9;
/// A call that takes longer is stuck: as `include/gradwire.h` says.
const CALL_MAX: Duration = Duration::from_secs(120);
