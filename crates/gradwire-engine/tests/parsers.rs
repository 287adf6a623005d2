//! Whatever a store or a user hands in, the parsers answer with a value or an error.

use gradwire_engine::fuzzing::{choose_interfaces, peer_record_json, read_record};
use proptest::prelude::*;

/// Pieces of which lists of interfaces are made, whole and broken.
fn list() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "eth0",
        "eth1",
        "eth",
        "lo",
        "docker",
        "10.0.0.1",
        "10.0.0.0/8",
        "10.1.0.0/33",
        "::1",
        "fe80::/10",
        "2001:db8::/32",
        "0.0.0.0/0",
        "::/0",
        "/",
        "^",
        "",
        " ",
        "127.0.0.1",
    ]);
    let lists = prop::collection::vec(piece, 0..5).prop_map(|pieces| pieces.join(","));
    (any::<bool>(), lists).prop_map(|(not, list)| if not { format!("^{list}") } else { list })
}

proptest! {
    #[test]
    fn a_choice_of_interfaces_names_addresses_that_peers_can_use(asked in list(), wild in ".{0,30}") {
        choose_interfaces(&asked);
        choose_interfaces(&wild);
    }

    #[test]
    fn a_record_that_was_tampered_with_is_read_or_refused(
        at in any::<prop::sample::Index>(),
        change in prop::sample::select(vec!["0", "-1", "9", "4294967296", "\"", "}", ",", "null", "[", "e9", "é"]),
        cut in 0_usize..30,
    ) {
        let mut record: Vec<char> = peer_record_json().chars().collect();
        let at = at.index(record.len());
        record.splice(at..(at + cut).min(record.len()), change.chars());
        read_record(&record.into_iter().collect::<String>());
    }
}
