//! What the fuzzers have found and learned stays true: every file of their corpus passes, without a fuzzer.

use gradwire_core::fuzzing;

#[path = "../../../fuzz/replay.rs"]
mod replay;

#[test]
fn the_corpus_of_the_connection_target_passes() {
    replay::replay("connection", |program| _ = fuzzing::run_connection(program));
}

#[test]
fn the_corpus_of_the_datagrams_target_passes() {
    replay::replay("datagrams", fuzzing::run_datagrams);
}
