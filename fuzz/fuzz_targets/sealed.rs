//! Any bytes as a datagram that was not opened yet.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    gradwire_engine::fuzzing::open_sealed(bytes);
});
