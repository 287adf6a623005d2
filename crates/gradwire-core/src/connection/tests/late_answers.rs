//! Answers that the network has held or copied say nothing of how long a round trip is now.

use super::*;

fn smoothed(pair: &Pair) -> Duration {
    pair.ends[0].connection.paths.at(0).rtt.smoothed()
}

/// What is on its way to the first end.
fn answers(pair: &Pair, kind: Kind) -> Vec<Vec<u8>> {
    let answers = |it: Header| it.kind == kind && (kind == Kind::Ack || it.flags.contains(Flags::REPLY));
    let is_one = |datagram: &Vec<u8>| Header::decode(datagram).is_ok_and(|(it, _)| answers(it));
    let to_first = pair.wire.iter().filter(|(_, to, datagram)| *to == 0 && is_one(datagram));
    to_first.map(|(.., datagram)| datagram.clone()).collect()
}

fn pass(pair: &mut Pair, time: Duration) {
    let until = pair.now + time;
    pair.run_until(time * 2, |pair| pair.now >= until);
}

/// Delivered once more three seconds after it has come.
fn come_again(pair: &mut Pair, held: &[Vec<u8>]) {
    assert!(!held.is_empty());
    pass(pair, Duration::from_secs(3));
    let (now, before) = (pair.now, smoothed(pair));
    for datagram in held {
        pair.ends[0].connection.handle_datagram(now, datagram).expect("well-formed");
    }
    assert_eq!(smoothed(pair), before);
}

#[test]
fn a_copy_of_an_acknowledgement_is_no_round_trip() {
    let mut pair = Pair::connected(never);
    pair.receive(1, 1, 200_000, Contract::EXACT);
    pair.send(0, 1, pattern(200_000), Reliability::Exact);
    pair.run_until(Duration::from_secs(1), |pair| !answers(pair, Kind::Ack).is_empty());
    let held = answers(&pair, Kind::Ack);
    pair.run_until(Duration::from_secs(1), |pair| pair.missing(0, 1).is_some());
    come_again(&mut pair, &held);
}

#[test]
fn a_copy_of_the_answer_to_a_heartbeat_is_no_round_trip() {
    let mut pair = Pair::connected(never);
    pair.run_until(Duration::from_secs(5), |pair| !answers(pair, Kind::Ping).is_empty());
    let held = answers(&pair, Kind::Ping);
    come_again(&mut pair, &held);
}

/// A hello and its answer go to every address of a rank, and the fastest of the copies connects.
#[test]
fn a_copy_of_the_answer_to_a_hello_is_no_round_trip() {
    let mut pair = Pair::new(never);
    pair.run_until(Duration::from_secs(1), |pair| !answers(pair, Kind::Hello).is_empty());
    let held = answers(&pair, Kind::Hello);
    pair.run_until(Duration::from_secs(1), |pair| pair.ends.iter().all(|end| end.connection.is_connected()));
    come_again(&mut pair, &held);
}

/// Nobody calls the receiving end: the question is answered, and all that had been sent before it counts as lost.
#[test]
fn what_counted_as_lost_is_a_round_trip_only_of_a_time_to_be_believed() {
    for (held, is_sample) in [(Duration::from_millis(500), true), (Duration::from_secs(3), false)] {
        let mut pair = Pair::connected(never);
        pair.receive(1, 1, 5_000, Contract::EXACT);
        pair.send(0, 1, pattern(5_000), Reliability::Exact);
        pair.drain();
        let sent: Vec<(Timestamp, usize, Vec<u8>)> = pair.wire.drain(..).collect();
        let now = pair.now;
        let sender = &mut pair.ends[0].connection;
        sender.paths.at_mut(0).ledger.lose_before(now, &mut sender.outcome);
        let before = smoothed(&pair);
        // The receiver gets them much later, and acknowledges them at once.
        pair.now = pair.now + held;
        pair.ends.iter_mut().for_each(|end| end.connection.awake_until(now + held));
        let mut acks = Vec::new();
        for (.., datagram) in &sent {
            _ = pair.ends[1].connection.handle_datagram(pair.now, datagram);
        }
        let mut scratch = [0; 2048];
        let at = pair.now + Duration::from_millis(10);
        while let Some(transmit) = pair.ends[1].connection.poll_transmit(at, &mut scratch) {
            acks.push((transmit.header.kind, assemble(&transmit, &scratch, &BTreeMap::new())));
        }
        acks.retain(|(kind, _)| *kind == Kind::Ack);
        assert!(!acks.is_empty());
        for (_, ack) in &acks {
            pair.ends[0].connection.handle_datagram(at, ack).expect("well-formed");
        }
        assert_eq!(smoothed(&pair) > before, is_sample, "{held:?}");
    }
}

#[test]
fn of_the_answers_that_a_path_has_held_none_is_a_round_trip() {
    let mut pair = Pair::connected(never);
    let stamp = |at: Timestamp| at.as_wire_us();
    pass(&mut pair, Duration::from_secs(30));
    let now = pair.now;
    let path = pair.ends[0].connection.paths.at_mut(0);
    for seconds in [20, 18, 16, 2] {
        assert!(!path.is_news(now, stamp(now.before(Duration::from_secs(seconds)))), "{seconds} s");
    }
    assert!(path.is_news(now, stamp(now.before(Duration::from_millis(3)))));
    assert!(!path.is_news(now, stamp(now.before(Duration::from_millis(4)))), "a later one was answered");
    assert!(path.is_news(now, stamp(now.before(Duration::from_millis(1)))));
}
