//! Any datagram at the parsers.
#![no_main]

libfuzzer_sys::fuzz_target!(|datagram: &[u8]| {
    gradwire_wire::fuzzing::parse_and_write_again(datagram);
});
