//! A path over which nothing comes for long.

use super::*;
use crate::recovery::RttEstimator;

/// Two paths of which the second has died.
fn half_dead(spray: Spray) -> Network {
    let mut network = Network::with(2, (spray, 1), 7);
    network.flow(MS(50));
    network.paths[1].loss_percent = 100;
    network.flow(MS(50));
    network
}

fn second(network: &Network) -> PathStats {
    network.ends[0].path_stats()[1]
}

// test of: mlt/gray-path
#[test]
fn a_path_that_millions_of_packets_were_lost_on_comes_back_and_carries_all_when_the_other_one_dies() {
    for spray in [Spray::Adaptive, Spray::RoundRobin] {
        let mut network = half_dead(spray);
        network.finish(MS(500));
        network.run(MS(500));
        network.ends[0].paths.at_mut(1).ledger.lose_unseen(1 << 21);
        network.paths[1].loss_percent = 0;
        let lost = second(&network).packets_lost;
        network.flow(MS(1_000));
        let healed = second(&network);
        assert!(healed.trusted && healed.share > 0.25, "{spray:?}: {healed:?}");
        // Those before they were believed, and what overflowed a buffer since.
        assert!(healed.packets_lost - lost < healed.packets_sent / 10, "{spray:?}: {healed:?}");
        network.paths[0].loss_percent = 100;
        network.flow(MS(200));
        network.finish(MS(500));
    }
}

#[test]
fn the_longer_a_path_is_dead_the_fewer_copies_try_it_and_it_comes_back_soon_all_the_same() {
    let mut network = half_dead(Spray::Adaptive);
    let mut copies = [0; 3];
    for (time, copies) in [100, 400, 1_600].into_iter().zip(&mut copies) {
        let before = second(&network).copies_sent;
        network.flow(MS(time));
        *copies = second(&network).copies_sent - before;
    }
    // Each time is the same multiple of the one for which it had been dead before.
    assert!(copies.iter().all(|copies| (5..60).contains(copies)), "{copies:?}");
    network.paths[1].loss_percent = 0;
    network.flow(MS(300));
    assert!(second(&network).trusted, "{:?}", second(&network));
}

/// Nothing is sent behind it that could tell, so the question has to. The other path is known to be dead.
#[test]
fn the_first_question_about_a_lost_packet_goes_over_the_path_that_is_good() {
    let mut network = half_dead(Spray::Adaptive);
    network.finish(MS(500));
    assert!(!second(&network).trusted);
    let (transfer, bytes, descriptor) = (TransferId(network.next_transfer), 1_000, [1; 16]);
    let receive = ReceiveTransfer::new(transfer, bytes, descriptor, Contract::EXACT);
    network.ends[1].receive(network.now, receive).expect("a fresh transfer");
    let send = SendTransfer::exact(transfer, bytes, descriptor);
    network.ends[0].send(network.now, send).expect("a fresh transfer");
    let (answer, round_trip) = network.ends[0].paths.longest(RttEstimator::answer_timeout);
    network.drain();
    let is_data = |it: &[u8]| Header::decode(it).is_ok_and(|(it, _)| it.kind == gradwire_wire::Kind::Data);
    let before = network.wire.len();
    network.wire.retain(|_, (_, datagram)| !is_data(datagram));
    assert_eq!(network.wire.len(), before - 1, "the only packet is lost");
    // One until it is asked; the question and the answer, the packet and the end.
    network.finish(answer * 2 + round_trip * 2);
}
