use super::*;

const MTU_PAYLOAD: usize = 1458; // 1500 bytes on the wire

fn network(change: impl FnOnce(&mut NetworkOptions)) -> Network {
    let mut options = NetworkOptions::uniform(12_500_000, 64 * 1500, Duration::from_millis(1));
    change(&mut options);
    Network::new(options, 3, &Rng::new(1))
}

#[test]
fn a_datagram_takes_two_serialisations_and_the_delay() {
    let mut network = network(|_| {});
    let flight = network.transmit(Timestamp::ZERO, 0, 1, MTU_PAYLOAD);
    // 1500 bytes at 12.5 MB/s: 120 us on each link.
    let at_port = flight.arrives_at.expect("nothing is lost");
    assert_eq!(at_port, Timestamp::from_nanos(620_000));
    assert_eq!(network.enqueue(at_port, Port::Host(1), MTU_PAYLOAD), Some(Timestamp::from_nanos(740_000)));
}

#[test]
fn a_full_port_drops_and_drains_at_the_links_rate() {
    let mut network = network(|_| {});
    let taken =
        (0..200).filter(|_| network.enqueue(Timestamp::ZERO, Port::Host(1), MTU_PAYLOAD).is_some()).count();
    assert_eq!(taken, 64);
    assert_eq!(network.stats().overflowed, 136);
    // After the time of ten datagrams there is room for ten.
    let later = Timestamp::ZERO + Duration::from_micros(1200);
    let taken = (0..200).filter(|_| network.enqueue(later, Port::Host(1), MTU_PAYLOAD).is_some()).count();
    assert_eq!(taken, 10);
}

#[test]
fn the_share_of_lost_datagrams_meets_its_probability() {
    let mut network = network(|options| options.impairments.loss = 0.1);
    for _ in 0..50_000 {
        network.transmit(Timestamp::ZERO, 0, 1, 100);
    }
    // Five standard deviations of a binomial with n = 50,000 and p = 0.1.
    assert!(network.stats().lost.abs_diff(5_000) < 336, "{:?}", network.stats());
}

#[test]
fn burst_losses_come_in_runs_of_the_expected_length() {
    let burst = Burst { enter: 0.01, leave: 0.25, loss: 1.0, lasts_max: Duration::from_secs(9) };
    let mut network = network(|options| options.impairments.burst = Some(burst));
    let lost: Vec<bool> =
        (0..100_000).map(|_| network.transmit(Timestamp::ZERO, 0, 1, 100).arrives_at.is_none()).collect();
    let runs = lost.windows(2).filter(|pair| !pair[0] && pair[1]).count() as f64;
    let mean_length = lost.iter().filter(|lost| **lost).count() as f64 / runs;
    assert!((3.7..4.3).contains(&mean_length), "a mean run of 1/0.25 = 4 was expected, got {mean_length}");
}

#[test]
fn jitter_keeps_order_and_reordering_breaks_it() {
    let order_breaks = |change: fn(&mut Impairments)| {
        let mut network = network(|options| change(&mut options.impairments));
        let arrivals: Vec<_> =
            (0..1000).filter_map(|_| network.transmit(Timestamp::ZERO, 0, 1, 100).arrives_at).collect();
        arrivals.windows(2).filter(|pair| pair[1] < pair[0]).count()
    };
    assert_eq!(order_breaks(|impairments| impairments.jitter = Duration::from_millis(5)), 0);
    let reordered = order_breaks(|impairments| {
        impairments.reorder = 0.05;
        impairments.reorder_delay = Duration::from_millis(5);
    });
    assert!(reordered > 20, "{reordered}");
}

#[test]
fn a_partition_loses_everything_between_its_two_ranks_until_it_is_repaired() {
    let mut network = network(|_| {});
    network.set_partition(0, 1, true);
    assert_eq!(network.transmit(Timestamp::ZERO, 0, 1, 100).arrives_at, None);
    assert_eq!(network.transmit(Timestamp::ZERO, 1, 0, 100).arrives_at, None);
    assert!(network.transmit(Timestamp::ZERO, 0, 2, 100).arrives_at.is_some());
    network.set_partition(0, 1, false);
    assert!(network.transmit(Timestamp::ZERO, 0, 1, 100).arrives_at.is_some());
}

#[test]
fn a_dead_path_loses_everything_between_its_two_ranks_until_it_has_healed_and_the_others_nothing() {
    let mut network = network(|_| {});
    let arrives = |network: &mut Network, path, from, to| {
        network.transmit_on(path, Timestamp::ZERO, (from, to), 100).arrives_at.is_some()
    };
    network.set_path(0, 1, 2, Some(PathTrouble::DEAD));
    assert!(!arrives(&mut network, 2, 0, 1) && !arrives(&mut network, 2, 1, 0));
    assert!(
        arrives(&mut network, 0, 0, 1) && arrives(&mut network, 3, 0, 1) && arrives(&mut network, 2, 0, 2)
    );
    network.set_path(0, 1, 2, None);
    assert!(arrives(&mut network, 2, 0, 1));
}

#[test]
fn a_slow_path_keeps_its_order_and_is_overtaken_by_the_others() {
    let slow = PathTrouble { loss: 0.0, delay: Duration::from_millis(3) };
    let mut network = network(|options| options.paths = vec![PathTrouble::default(), slow]);
    let mut at = |path| network.transmit_on(path, Timestamp::ZERO, (0, 1), 100).arrives_at.expect("no loss");
    let (first, slow, slower, last) = (at(0), at(1), at(1), at(0));
    assert!(first < last && last < slow && slow < slower);
    assert!(slow - first > Duration::from_millis(3));
}

#[test]
fn equal_seeds_treat_equal_traffic_alike() {
    let flights = |seed| {
        let mut options = NetworkOptions::uniform(12_500_000, 96_000, Duration::from_millis(1));
        options.impairments =
            Impairments { loss: 0.1, reorder: 0.1, duplicate: 0.1, ..Impairments::default() };
        let mut network = Network::new(options, 2, &Rng::new(seed));
        (0..500).map(|_| network.transmit(Timestamp::ZERO, 0, 1, 100)).collect::<Vec<_>>()
    };
    assert_eq!(flights(5), flights(5));
    assert_ne!(flights(5), flights(6));
}

#[test]
fn up_and_down_links_have_rates_of_their_own_and_a_far_host_a_delay() {
    let mut network = network(|options| {
        let near = options.link(0);
        let delay = Duration::from_millis(3);
        options.links = vec![near, LinkOptions { up_rate: 1_250_000, down_rate: 6_250_000, delay, ..near }];
    });
    // 120 us up, 500 us and 3 ms of delay.
    let at_port = network.transmit(Timestamp::ZERO, 0, 1, MTU_PAYLOAD).arrives_at.expect("nothing is lost");
    assert_eq!(at_port, Timestamp::from_nanos(3_620_000));
    // 240 us down.
    let received = network.enqueue(at_port, Port::Host(1), MTU_PAYLOAD);
    assert_eq!(received, Some(Timestamp::from_nanos(3_860_000)));
    // 1200 us up on the way back.
    let back = network.transmit(Timestamp::ZERO, 1, 0, MTU_PAYLOAD).arrives_at;
    assert_eq!(back, Some(Timestamp::from_nanos(4_700_000)));
}

#[test]
fn a_bucket_lets_some_datagrams_go_at_once_after_an_idle_time_and_the_rate_holds_behind_them() {
    let mut network = network(|options| {
        let near = options.link(0);
        options.links = vec![LinkOptions { bucket_bytes: 4 * 1500, ..near }];
    });
    let mut sent_at = |at: u64| {
        let delay = Duration::from_micros(500).as_nanos() as u64;
        let arrives_at = network.transmit(Timestamp::from_nanos(at), 0, 1, MTU_PAYLOAD).arrives_at;
        arrives_at.expect("nothing is lost").as_nanos() - delay
    };
    for idle_until in [100_000_000, 200_000_000] {
        let waits = [0; 6].map(|_| sent_at(idle_until) - idle_until);
        assert_eq!(waits, [0, 0, 0, 0, 120_000, 240_000]);
    }
}

#[test]
fn only_what_goes_to_the_other_rack_waits_for_the_trunk() {
    let trunk =
        Trunk { first_rack: 2, rate: 1_250_000, delay: Duration::from_millis(1), buffer_bytes: 10 * 1500 };
    let mut network = network(|options| options.trunk = Some(trunk));
    assert_eq!(network.first_port(0, 1), Port::Host(1));
    assert_eq!((network.first_port(1, 2), network.first_port(2, 0)), (Port::Trunk(0), Port::Trunk(1)));
    // 1.2 ms for each datagram, and a millisecond of delay; the two directions do not share.
    for direction in [0, 1] {
        let through: Vec<_> = (0..12)
            .filter_map(|_| network.enqueue(Timestamp::ZERO, Port::Trunk(direction), MTU_PAYLOAD))
            .collect();
        assert_eq!(through.len(), 10, "the trunk's port holds ten");
        assert_eq!(through[1], Timestamp::from_nanos(3_400_000));
    }
}

#[test]
fn an_impaired_rank_leaves_the_others_alone() {
    let mut network = network(|options| {
        options.impairments.loss = 1.0;
        options.impaired_rank = Some(2);
    });
    assert!(network.transmit(Timestamp::ZERO, 0, 1, 100).arrives_at.is_some());
    assert_eq!(network.transmit(Timestamp::ZERO, 0, 2, 100).arrives_at, None);
    assert_eq!(network.transmit(Timestamp::ZERO, 2, 1, 100).arrives_at, None);
}
