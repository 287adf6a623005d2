//! Any text as what a member of a group that runs tells a rank that wants to join it.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| {
    _ = gradwire_engine::fuzzing::read_running(text);
});
