//! Any calls of any ranks, and any history of the links between them.
#![no_main]

libfuzzer_sys::fuzz_target!(|program: &[u8]| {
    gradwire_collectives::fuzzing::run_group(program);
});
