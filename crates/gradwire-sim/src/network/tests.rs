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
    assert_eq!(network.enqueue(at_port, 1, MTU_PAYLOAD), Some(Timestamp::from_nanos(740_000)));
}

#[test]
fn a_full_port_drops_and_drains_at_the_links_rate() {
    let mut network = network(|_| {});
    let taken = (0..200).filter(|_| network.enqueue(Timestamp::ZERO, 1, MTU_PAYLOAD).is_some()).count();
    assert_eq!(taken, 64);
    assert_eq!(network.stats().overflowed, 136);
    // After the time of ten datagrams there is room for ten.
    let later = Timestamp::ZERO + Duration::from_micros(1200);
    let taken = (0..200).filter(|_| network.enqueue(later, 1, MTU_PAYLOAD).is_some()).count();
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
