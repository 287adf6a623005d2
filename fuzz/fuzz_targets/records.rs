//! Any bytes as the records that ranks tell each other.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    gradwire_collectives::fuzzing::parse_records(bytes);
});
