//! What the fuzzers have found and learned stays true: every file of their corpus passes, without a fuzzer.

use crate::replay;
use gradwire_collectives::fuzzing;

#[test]
fn the_corpus_of_the_group_target_passes() {
    replay::replay("group", |program| _ = fuzzing::run_group(program));
    let seed = include_bytes!("../../../fuzz/corpus/group/all_reduces_end_well");
    assert_eq!(fuzzing::run_group(seed), 6, "the seeds reach what they are meant to");
    let seed = include_bytes!("../../../fuzz/corpus/group/a_dedicated_server_sums");
    assert_eq!(fuzzing::run_group(seed), 4, "two calls of two workers");
}

#[test]
fn the_corpus_of_the_records_target_passes() {
    replay::replay("records", fuzzing::parse_records);
}
