//! Any text as the choice of interfaces.
#![no_main]

libfuzzer_sys::fuzz_target!(|asked: &str| {
    gradwire_engine::fuzzing::choose_interfaces(asked);
});
