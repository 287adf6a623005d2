//! What the fuzzers have found and learned stays true: every file of their corpus passes, without a fuzzer.

use crate::replay;
use gradwire_engine::fuzzing;

#[test]
fn the_corpus_of_the_rendezvous_target_passes() {
    replay::replay("rendezvous", |bytes| fuzzing::read_record(&String::from_utf8_lossy(bytes)));
    fuzzing::read_record(&fuzzing::peer_record_json());
}

#[test]
fn the_corpus_of_the_sealed_targets_passes() {
    replay::replay("sealed", fuzzing::open_sealed);
    replay::replay("sealed_records", |bytes| fuzzing::read_sealed_record(&String::from_utf8_lossy(bytes)));
    fuzzing::read_sealed_record(&fuzzing::sealed_peer_record());
}

#[test]
fn the_corpus_of_the_interfaces_target_passes() {
    replay::replay("interfaces", |bytes| fuzzing::choose_interfaces(&String::from_utf8_lossy(bytes)));
}

#[test]
fn the_corpus_of_the_notes_target_passes() {
    replay::replay("notes", fuzzing::take_notes);
    fuzzing::take_notes(&fuzzing::some_notes());
}

#[test]
fn the_corpus_of_the_targets_of_groups_that_go_on_passes() {
    replay::replay("running", |bytes| _ = fuzzing::read_running(&String::from_utf8_lossy(bytes)));
    assert!(fuzzing::read_running(&fuzzing::some_running()), "the seeds reach what they are meant to");
    let seed = include_str!("../../../fuzz/corpus/running/an_epoch_that_nobody_could_read");
    assert!(!fuzzing::read_running(seed));
    replay::replay("tables", fuzzing::read_tables);
}
