use super::*;
use gradwire_core::Ecn;
use std::time::Duration;

/// Sends packets at given times and returns when, and in which order, they arrive.
struct Bench {
    fabric: Fabric,
    queue: EventQueue<Step>,
    /// Time in nanoseconds, and the packet's number.
    arrived: Vec<(u64, u8)>,
    marked: usize,
}

#[derive(Clone, Copy)]
enum Step {
    Fabric(FabricEvent),
}

impl From<FabricEvent> for Step {
    fn from(event: FabricEvent) -> Self {
        Self::Fabric(event)
    }
}

/// A packet of a test.
#[derive(Clone, Copy)]
struct Shot {
    from: u32,
    to: u32,
    bytes: u32,
    band: u8,
    ecn: Ecn,
    number: u8,
}

const SHOT: Shot = Shot { from: 0, to: 1, bytes: 1500, band: 0, ecn: Ecn::NotCapable, number: 0 };

impl Bench {
    /// Two leaves of four hosts and two spines: 1 byte takes 1 ns to hosts and a tenth of that in the core.
    fn new(thresholds: &[Option<u64>], damage: Damage) -> Self {
        let topology = LeafSpine {
            leaves: 2,
            spines: 2,
            hosts_per_leaf: 4,
            host_rate: 1_000_000_000,
            core_rate: 10_000_000_000,
            link_delay: Duration::from_nanos(1000),
            header_bytes: 0,
            queue: QueueOptions { buffer_bytes: 15_000, thresholds: thresholds.to_vec() },
            choice: PathChoice::PerFlow,
        };
        let fabric = Fabric::new(topology, Rng::new(1), damage);
        Self { fabric, queue: EventQueue::new(), arrived: Vec::new(), marked: 0 }
    }

    fn shoot(&mut self, shot: Shot) {
        let id = self.fabric.packets().take();
        let packet = self.fabric.packets().get_mut(id);
        (packet.from, packet.to, packet.band, packet.flow) = (shot.from, shot.to, shot.band, 0);
        (packet.payload_bytes, packet.ecn) = (shot.bytes - 1, shot.ecn);
        packet.head.push(shot.number);
        self.fabric.send(Timestamp::ZERO, id, &mut self.queue);
    }

    fn run(&mut self) -> Result<(), FabricViolation> {
        while let Some((now, Step::Fabric(event))) = self.queue.pop() {
            if let FabricNews::Arrival(id) = self.fabric.handle(now, event, &mut self.queue) {
                let packet = self.fabric.packets().get(id);
                self.marked += usize::from(packet.ecn == Ecn::Congestion);
                self.arrived.push((now.as_nanos(), packet.head[0]));
                self.fabric.packets().give_back(id);
            }
        }
        self.fabric.check()
    }

    /// Three hosts of the first leaf send to the fourth at once, `each` packets.
    fn incast(&mut self, each: u8, shot: Shot) {
        for number in 0..each {
            (0..3).for_each(|from| self.shoot(Shot { from, to: 3, number, ..shot }));
        }
    }
}

#[test]
fn a_packet_takes_its_serialisations_and_delays() {
    let mut bench = Bench::new(&[None], Damage::Nothing);
    bench.shoot(SHOT);
    bench.shoot(Shot { to: 5, number: 1, ..SHOT });
    bench.run().expect("sound");
    // Two links of 1500 and 1000 ns; the other one waits for it, and crosses two core links of 150 ns more.
    assert_eq!(bench.arrived, [(5_000, 0), (1_500 + 5_000 + 2 * 1_150, 1)]);
}

#[test]
fn a_full_port_drops_and_its_books_hold() {
    let mut bench = Bench::new(&[None], Damage::Nothing);
    bench.incast(20, SHOT);
    bench.run().expect("sound");
    // 60 packets come three at a time and one of three leaves: the port holds ten, and one is on the link.
    let stats = bench.fabric.port(bench.fabric.topology().host_port(3));
    assert_eq!((stats.arrived, stats.departed + stats.overflowed), (60, 60));
    assert_eq!((stats.bytes_most, bench.arrived.len() as u64), (15_000, stats.departed));
    assert!((30..=31).contains(&stats.departed), "{stats:?}");
}

#[test]
fn a_long_band_drops_what_is_not_capable_and_marks_what_is() {
    let mut bench = Bench::new(&[Some(4_500)], Damage::Nothing);
    bench.incast(6, SHOT);
    bench.run().expect("sound");
    let stats = bench.fabric.port(bench.fabric.topology().host_port(3));
    assert!(stats.dropped_selectively > 0 && stats.overflowed == 0 && stats.marked == 0, "{stats:?}");
    assert!(stats.bytes_most <= 4_500, "{stats:?}");
    let mut bench = Bench::new(&[Some(4_500)], Damage::Nothing);
    bench.incast(4, Shot { ecn: Ecn::Capable, ..SHOT });
    bench.run().expect("sound");
    assert_eq!((bench.arrived.len(), bench.marked > 0), (12, true));
}

#[test]
fn each_band_has_a_threshold_of_its_own_and_all_share_the_buffer() {
    let arrivals = |band| {
        let mut bench = Bench::new(&[None, Some(3_000), Some(6_000)], Damage::Nothing);
        bench.incast(8, Shot { band, ..SHOT });
        bench.run().expect("sound");
        bench.arrived.len()
    };
    assert_eq!((arrivals(0), arrivals(2)), (18, arrivals(1) + 2));
    let mut bench = Bench::new(&[None, None], Damage::Nothing);
    bench.incast(10, SHOT);
    bench.incast(10, Shot { band: 1, ..SHOT });
    bench.run().expect("sound");
    assert_eq!(bench.fabric.switches().bytes_most, 15_000);
}

#[test]
fn an_urgent_band_overtakes_and_within_a_band_nobody_does() {
    let mut bench = Bench::new(&[None, None], Damage::Nothing);
    for number in 0..4 {
        bench.shoot(Shot { band: 1, number, ..SHOT });
    }
    bench.shoot(Shot { band: 0, number: 9, ..SHOT });
    bench.run().expect("sound");
    let order: Vec<u8> = bench.arrived.iter().map(|(_, number)| *number).collect();
    assert_eq!(order, [0, 9, 1, 2, 3]);
}

#[test]
fn the_rate_is_exact_in_the_long_run() {
    let mut bench = Bench::new(&[None], Damage::Nothing);
    bench.fabric = Fabric::new(
        LeafSpine { host_rate: 50_000_000_000, ..bench.fabric.topology().clone() },
        Rng::new(1),
        Damage::Nothing,
    );
    // 1514 bytes at 400 Gbit/s are 30.28 ns.
    (0..100).for_each(|_| bench.shoot(Shot { bytes: 1514, ..SHOT }));
    bench.run().expect("sound");
    let last = bench.arrived.last().expect("all arrive").0;
    assert!(last.abs_diff(3028 + 31 + 2_000) <= 1, "{last}");
}

#[test]
fn flows_keep_to_one_spine_and_packets_choose_theirs() {
    let used = |choice| {
        let mut bench = Bench::new(&[None], Damage::Nothing);
        let topology = LeafSpine { choice, ..bench.fabric.topology().clone() };
        bench.fabric = Fabric::new(topology.clone(), Rng::new(1), Damage::Nothing);
        (0..64).for_each(|_| bench.shoot(Shot { to: 5, ..SHOT }));
        bench.run().expect("sound");
        [0, 1].map(|spine| bench.fabric.port(topology.uplink(0, spine)).departed)
    };
    let mut by_flow = used(PathChoice::PerFlow);
    by_flow.sort_unstable();
    assert_eq!(by_flow, [0, 64]);
    assert!(used(PathChoice::PerPacket).iter().all(|count| *count > 16));
}

#[test]
fn a_dead_link_loses_everything_and_a_gray_one_its_share() {
    let arrivals = |trouble| {
        let mut bench = Bench::new(&[None], Damage::Nothing);
        (0..2).for_each(|spine| bench.fabric.set_core_link(0, spine, trouble));
        (0..1000).for_each(|_| bench.shoot(Shot { to: 5, bytes: 100, ..SHOT }));
        bench.shoot(Shot { to: 2, bytes: 100, ..SHOT });
        bench.run().expect("sound");
        assert_eq!(bench.fabric.switches().lost + bench.arrived.len() as u64, 1001);
        bench.arrived.len()
    };
    assert_eq!(arrivals(PathTrouble::DEAD), 1);
    // Five standard deviations of a binomial with n = 1000 and p = 0.1.
    let came = arrivals(PathTrouble { loss: 0.1, ..PathTrouble::default() });
    assert!(came.abs_diff(901) < 48, "{came}");
}

#[test]
fn the_books_find_a_port_that_forgets_reorders_or_overfills() {
    let wrong = |damage| {
        let mut bench = Bench::new(&[None], damage);
        bench.incast(20, SHOT);
        bench.run().expect_err("the damage is found")
    };
    assert!(matches!(wrong(Damage::ForgetsDrops), FabricViolation::NotConserved { .. }));
    assert!(matches!(wrong(Damage::LetsOvertake), FabricViolation::Overtaken { .. }));
    assert!(matches!(wrong(Damage::OverfillsBuffers), FabricViolation::Overfull { .. }));
}
