//! Any datagrams at a connection with open transfers.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    gradwire_core::fuzzing::run_datagrams(bytes);
});
