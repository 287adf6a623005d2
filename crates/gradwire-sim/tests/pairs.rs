//! Two connections without collectives, over many seeds.

use gradwire_sim::run_pair;

/// A millisecond each.
const SEEDS: u64 = 2_000;

#[test]
fn two_connections_keep_every_promise_of_the_transport_on_many_seeds() {
    let mut datagrams = 0;
    let mut failures = Vec::new();
    for seed in 0..SEEDS {
        let result = std::panic::catch_unwind(|| run_pair(seed));
        match result {
            Ok(Ok(sent)) => datagrams += sent,
            Ok(Err(why)) => failures.push(format!("seed {seed}: {why}")),
            Err(_) => failures.push(format!("seed {seed}: panic")),
        }
    }
    println!("{SEEDS} seeds, {datagrams} datagrams");
    let shown = failures.iter().take(3).cloned().collect::<Vec<_>>().join("\n");
    assert!(failures.is_empty(), "{} of {SEEDS} seeds failed:\n{shown}", failures.len());
}
