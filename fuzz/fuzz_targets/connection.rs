//! Any history of two connections and the link between them.
#![no_main]

libfuzzer_sys::fuzz_target!(|program: &[u8]| {
    gradwire_core::fuzzing::run_connection(program);
});
