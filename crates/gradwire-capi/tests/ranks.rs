//! A worker and a server through the C interface, as a caller in another language sees them; and what the interface refuses.

use gradwire::*;
use std::ffi::c_void;
use std::ptr;

/// Datagrams on their way: to whom, and their bytes.
type Wire = Vec<(u32, Vec<u8>)>;

unsafe extern "C" fn has_room(_: *mut c_void) -> i32 {
    1
}

#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn push(
    wire: *mut c_void,
    to: u32,
    _band: u32,
    _ecn: i32,
    head: *const u8,
    head_bytes: usize,
    payload: *const u8,
    payload_bytes: usize,
) {
    // SAFETY: the context is the test's `Wire`, and both parts are valid during the call.
    let (wire, head, payload) = unsafe {
        let parts = (
            std::slice::from_raw_parts(head, head_bytes),
            std::slice::from_raw_parts(payload, payload_bytes),
        );
        (&mut *wire.cast::<Wire>(), parts.0, parts.1)
    };
    wire.push((to, [head, payload].concat()));
}

fn config(rank: u32) -> GradwireConfig {
    let mut config = GradwireConfig::default();
    // SAFETY: the name ends with a zero byte.
    assert_eq!(unsafe { gradwire_config_default(c"auto".as_ptr(), rank, 1, 1, &mut config) }, GRADWIRE_OK);
    config
}

fn datagrams_of(rank: *mut GradwireRank, now: u64) -> Wire {
    let mut wire = Wire::new();
    let context = (&raw mut wire).cast();
    let sink = GradwireSink { context, has_room: Some(has_room), push: Some(push) };
    // SAFETY: a live rank, and a sink whose context outlives the call.
    assert_eq!(unsafe { gradwire_poll_transmit(rank, now, &sink) }, GRADWIRE_OK);
    wire
}

#[test]
fn a_worker_gets_its_mean_back_from_a_server() {
    let mut input: Vec<f32> = (0..10_000_u16).map(f32::from).collect();
    let mut output = vec![0_f32; input.len()];
    let (mut now, mut call, mut is_called, mut done) = (0_u64, u64::MAX, false, None);
    // SAFETY: ranks live until they are freed below, and so does the memory of the call.
    unsafe {
        let ranks = [0, 1].map(|rank| gradwire_rank_new(&config(rank), now));
        assert!(ranks.iter().all(|rank| !rank.is_null()));
        for _ in 0..100_000 {
            for (from, rank) in ranks.into_iter().enumerate() {
                for (to, bytes) in datagrams_of(rank, now) {
                    let (bytes, length) = (bytes.as_ptr(), bytes.len());
                    let to = ranks[to as usize];
                    assert_eq!(gradwire_handle_datagram(to, now, from as u32, 0, bytes, length), GRADWIRE_OK);
                }
            }
            let mut event = GradwireEvent::default();
            while gradwire_poll_event(ranks[0], &mut event) == GRADWIRE_OK {
                if event.kind == 1 && !is_called {
                    is_called = true;
                    let (input, output) = (input.as_mut_ptr(), output.as_mut_ptr());
                    let code = gradwire_all_reduce(ranks[0], now, input, output, 10_000, &mut call);
                    assert_eq!(code, GRADWIRE_OK);
                }
                done = (event.kind == 2).then_some(event).or(done);
            }
            if done.is_some() {
                break;
            }
            now = ranks
                .map(|rank| gradwire_poll_timeout(rank))
                .into_iter()
                .min()
                .expect("two")
                .max(now + 1_000);
            ranks.iter().for_each(|rank| assert_eq!(gradwire_handle_timeout(*rank, now), GRADWIRE_OK));
        }
        ranks.iter().for_each(|rank| gradwire_rank_free(*rank));
    }
    let done = done.expect("the call ends");
    assert_eq!((done.call, done.elems_uncounted, done.bytes_sent >= 40_000), (call, 0, true));
    assert_eq!(done.contributors_least, 0, "only its server knows");
    assert_eq!(input, output);
}

#[test]
fn a_call_that_is_too_large_for_the_datagrams_is_refused_at_once() {
    // Only addresses: the call that fits is dropped with its rank, before anything reads them.
    let values = ptr::without_provenance_mut::<f32>(1 << 20);
    let (mut call, mut event) = (0, GradwireEvent::default());
    for (datagram_bytes, payload) in [(512, 448_usize), (1_472, 1_408)] {
        let most = (payload << 22).min(u32::MAX as usize) / 4;
        // SAFETY: a live rank until it is freed; nobody touches the memory of its call.
        unsafe {
            let rank = gradwire_rank_new(&GradwireConfig { datagram_bytes, ..config(0) }, 0);
            let code = gradwire_all_reduce(rank, 0, values, values, most + 1, &mut call);
            assert_eq!(code, GRADWIRE_INVALID, "{datagram_bytes}");
            assert_eq!(gradwire_all_reduce(rank, 0, values, values, most, &mut call), GRADWIRE_OK);
            assert_eq!((call, gradwire_poll_event(rank, &mut event)), (0, GRADWIRE_NONE), "nothing failed");
            gradwire_rank_free(rank);
        }
    }
}

#[test]
fn null_and_nonsense_are_refused_and_change_nothing() {
    let (mut event, mut call, mut datagram) = (GradwireEvent::default(), 0, GradwireDatagram::default());
    let mut values = [0_f32; 8];
    let bytes = [0_u8; 64];
    // SAFETY: pointers are null or point to what they should; that is what is tested.
    unsafe {
        assert!(gradwire_rank_new(ptr::null(), 0).is_null());
        assert!(gradwire_rank_new(&GradwireConfig { rank: 9, ..config(0) }, 0).is_null());
        let rank = gradwire_rank_new(&config(0), 0);
        let server = gradwire_rank_new(&config(1), 0);
        let input = values.as_mut_ptr();
        let null = ptr::null_mut::<GradwireRank>();
        let codes = [
            gradwire_config_default(ptr::null(), 0, 1, 1, &mut config(0)),
            gradwire_config_default(c"auto".as_ptr(), 0, 1, 1, ptr::null_mut()),
            gradwire_describe(ptr::null(), 64, &mut datagram),
            gradwire_describe(bytes.as_ptr(), 64, ptr::null_mut()),
            gradwire_all_reduce(null, 0, input, input, 8, &mut call),
            gradwire_all_reduce(rank, 0, ptr::null_mut(), input, 8, &mut call),
            gradwire_all_reduce(rank, 0, input, ptr::null_mut(), 8, &mut call),
            gradwire_all_reduce(rank, 0, input, input, 8, ptr::null_mut()),
            gradwire_handle_datagram(null, 0, 1, 0, bytes.as_ptr(), 64),
            gradwire_handle_datagram(rank, 0, 1, 0, ptr::null(), 64),
            gradwire_handle_timeout(null, 0),
            gradwire_poll_transmit(null, 0, ptr::null()),
            gradwire_poll_transmit(rank, 0, ptr::null()),
            gradwire_poll_transmit(
                rank,
                0,
                &GradwireSink { context: ptr::null_mut(), has_room: None, push: Some(push) },
            ),
            gradwire_poll_event(null, &mut event),
            gradwire_poll_event(rank, ptr::null_mut()),
        ];
        assert!(codes.iter().all(|code| *code == GRADWIRE_NULL), "{codes:?}");
        let codes = [
            gradwire_config_default(c"fast".as_ptr(), 0, 1, 1, &mut config(0)),
            gradwire_describe(bytes.as_ptr(), 3, &mut datagram),
            gradwire_all_reduce(rank, 0, input, input, 0, &mut call),
            gradwire_all_reduce(rank, 0, input, input, usize::MAX, &mut call),
            gradwire_all_reduce(rank, 0, input.byte_add(1), input, 2, &mut call),
            gradwire_all_reduce(rank, 0, input.add(1), input, 2, &mut call),
            gradwire_all_reduce(rank, 0, input, input.add(3), 4, &mut call),
            gradwire_all_reduce(server, 0, input, input, 8, &mut call),
            gradwire_handle_datagram(rank, 0, 1, 4, bytes.as_ptr(), 64),
        ];
        assert!(codes.iter().all(|code| *code == GRADWIRE_INVALID), "{codes:?}");
        assert_eq!(
            gradwire_handle_datagram(rank, 0, 7, 0, bytes.as_ptr(), 64),
            GRADWIRE_OK,
            "of nobody: counted"
        );
        assert_eq!(gradwire_poll_event(rank, &mut event), GRADWIRE_NONE);
        assert_eq!(gradwire_poll_event(server, &mut event), GRADWIRE_NONE);
        assert_eq!(
            gradwire_all_reduce(rank, 0, input, input.add(4), 4, &mut call),
            GRADWIRE_OK,
            "side by side"
        );
        assert_eq!(gradwire_poll_timeout(ptr::null()), u64::MAX);
        gradwire_rank_free(server);
        gradwire_rank_free(rank);
        gradwire_rank_free(ptr::null_mut());
    }
}
