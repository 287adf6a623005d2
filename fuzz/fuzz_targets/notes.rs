//! Any notes of members of a group that goes on without lost ranks, at a member.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    gradwire_engine::fuzzing::take_notes(bytes);
});
