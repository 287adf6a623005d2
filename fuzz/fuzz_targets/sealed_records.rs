//! Any text as what a rank with a job secret published.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| {
    gradwire_engine::fuzzing::read_sealed_record(text);
});
