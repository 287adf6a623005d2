//! Any tables of calls that the members of a new epoch tell each other.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    gradwire_engine::fuzzing::read_tables(bytes);
});
