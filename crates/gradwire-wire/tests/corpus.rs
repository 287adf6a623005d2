//! What the fuzzers have found and learned stays true: every file of their corpus passes, without a fuzzer.

#[path = "../../../fuzz/replay.rs"]
mod replay;

#[test]
fn the_corpus_of_the_wire_target_passes() {
    replay::replay("wire", gradwire_wire::fuzzing::parse_and_write_again);
}

#[test]
fn the_corpus_of_the_bodies_target_passes() {
    replay::replay("bodies", gradwire_wire::fuzzing::parse_body);
}
