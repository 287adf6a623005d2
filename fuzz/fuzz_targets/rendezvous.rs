//! Any text as the record of another rank.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| {
    gradwire_engine::fuzzing::read_record(text);
});
