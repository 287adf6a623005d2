//! What two ranks do while strangers flood one of them.

use super::*;

fn pace(pair: &Pair) -> u64 {
    use crate::recovery::RateController;
    pair.ends[0].connection.paths.at(0).controller.pacing_rate()
}

fn exchange(pair: &mut Pair, transfer: u32, bytes: usize) {
    pair.receive(1, transfer, bytes, Contract::EXACT);
    pair.send(0, transfer, pattern(bytes), Reliability::Exact);
    pair.run_until(Duration::from_secs(20), |pair| pair.missing(0, transfer).is_some());
}

// test of: faults/holds-its-rate-in-a-flood
#[test]
fn a_flooded_rank_says_so_and_its_peer_keeps_its_pace_whatever_is_lost_until_it_is_over() {
    let mut pair = Pair::connected(never);
    exchange(&mut pair, 1, 4 << 20);
    let calm = pair.ends[0].connection.stats().bandwidth;
    pair.ends[1].connection.set_flooded(true);
    pair.lose = |_, dice| dice % 2 == 0;
    exchange(&mut pair, 2, 4 << 20);
    assert!(pace(&pair) >= calm / 8 * 7 - 8, "{} of {calm}", pace(&pair));
    pair.ends[1].connection.set_flooded(false);
    pair.lose = never;
    exchange(&mut pair, 3, 1 << 20);
    assert!(!pair.ends[0].connection.peer_is_flooded);
}

#[test]
fn what_is_asked_in_a_flood_is_repeated_without_ever_longer_pauses() {
    let answered = |flooded: bool| {
        let mut pair = Pair::connected(never);
        exchange(&mut pair, 1, 1 << 20);
        pair.ends.iter_mut().for_each(|end| end.connection.set_flooded(flooded));
        // Nothing gets through in the first second.
        pair.lose = |header, _| header.sent_at_us < 1_000_000;
        let asked = pair.ends[0].connection.stats().probes_sent;
        pair.receive(1, 2, 100, Contract::EXACT);
        pair.send(0, 2, pattern(100), Reliability::Exact);
        pair.run_until(Duration::from_secs(20), |pair| pair.missing(0, 2).is_some());
        pair.ends[0].connection.stats().probes_sent - asked
    };
    let (calm, flooded) = (answered(false), answered(true));
    assert!(flooded > 5 * calm, "{flooded} and {calm} questions");
}

#[test]
fn in_a_flood_an_acknowledgement_is_asked_for_after_as_many_packets_as_are_worth_one() {
    use crate::recovery::RateController;
    let mut pair = Pair::connected(never);
    exchange(&mut pair, 1, 4 << 20);
    let Connection { config, paths, .. } = &mut pair.ends[0].connection;
    let (bytes, path) = (config.chunk_bytes(), paths.at_mut(0));
    let asked_after = |path: &mut crate::path::Path| {
        path.wants_ack(u32::MAX);
        (1..).find(|_| path.wants_ack(bytes)).unwrap()
    };
    let (quarter, every) = (path.controller.cwnd() / 4, u64::from(config.ack_every));
    assert!(quarter > 2 * every * u64::from(bytes), "so that the two differ: {quarter}");
    assert_eq!(asked_after(path), quarter.div_ceil(u64::from(bytes)));
    path.controller.set_flooded(true);
    assert_eq!(asked_after(path), every);
}

#[test]
fn an_acknowledgement_that_is_refused_changes_no_rate() {
    let mut pair = Pair::connected(never);
    exchange(&mut pair, 1, 1 << 20);
    let now = pair.now;
    let connection = &mut pair.ends[0].connection;
    for kind in [Kind::Ack, Kind::Status] {
        let header = Header { flags: Flags::FLOODED, ..Header::control(kind, connection.config.local) };
        let datagram = header.encode();
        let refused = connection.handle_datagram(now, &datagram);
        assert!(refused.is_err() && !connection.peer_is_flooded, "{kind:?}: {refused:?}");
    }
}

#[test]
fn barriers_are_no_rate_that_is_held() {
    let mut pair = Pair::connected(never);
    for transfer in 1..50 {
        exchange(&mut pair, transfer, 32);
    }
    let start = pace(&pair);
    pair.ends[0].connection.set_flooded(true);
    assert_eq!(pace(&pair), start);
}

#[test]
fn a_path_that_begins_anew_goes_on_holding_its_rate() {
    let mut pair = Pair::connected(never);
    exchange(&mut pair, 1, 4 << 20);
    let connection = &mut pair.ends[0].connection;
    connection.set_flooded(true);
    let config = connection.config.clone();
    connection.paths.at_mut(0).restart(&config);
    assert!(connection.paths.at(0).controller.is_flooded());
    connection.set_flooded(false);
    assert!(!connection.paths.at(0).controller.is_flooded());
}
