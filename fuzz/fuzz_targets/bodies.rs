//! Any body of a control packet at its parser.
#![no_main]

libfuzzer_sys::fuzz_target!(|body: &[u8]| {
    gradwire_wire::fuzzing::parse_body(body);
});
