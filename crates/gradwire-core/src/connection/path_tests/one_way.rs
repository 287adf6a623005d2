//! Paths whose two directions are two cards, as each side numbers its ways by itself.

use super::*;

const BYTES: u64 = 1 << 20;

/// For each side, over which of its paths nothing arrives.
type Dead = [[bool; PATHS]; 2];

impl Network {
    fn post_from(&mut self, from: usize, bytes: u64) {
        let transfer = TransferId(self.next_transfer);
        self.next_transfer += 1;
        let send = SendTransfer::exact(transfer, bytes, [1; 16]);
        self.ends[from].send(self.now, send).expect("a fresh transfer");
        let receive = ReceiveTransfer::new(transfer, bytes, [1; 16], Contract::EXACT);
        self.ends[1 - from].receive(self.now, receive).expect("a fresh transfer");
    }

    fn step_with(&mut self, dead: Dead, end: Timestamp) {
        self.drain();
        self.wire.retain(|_, (to, datagram)| {
            let path = Header::decode(datagram).expect("it was encoded").0.path;
            !dead[1 - *to][usize::from(path.0)]
        });
        self.step(end);
    }

    /// A transfer from each of these sides at once.
    fn exchange(&mut self, senders: &[usize], dead: Dead) {
        senders.iter().for_each(|from| self.post_from(*from, BYTES));
        self.end_with(dead);
    }

    /// Waits until all that was posted has ended: the first one until it is found by which way answers arrive, a second or so.
    fn end_with(&mut self, dead: Dead) {
        let begun = self.now;
        while self.ends.iter().any(|end| !end.sends.is_empty() || !end.receives.is_empty()) {
            assert!(self.now.since(begun) < MS(5_000), "{dead:?}: {:?}", self.ends[0].path_stats());
            self.step_with(dead, begun + MS(60_000));
        }
    }
}

/// Of so many paths, all but these are dead.
fn but(alive: [&[usize]; 2]) -> Dead {
    alive.map(|alive| core::array::from_fn(|path| !alive.contains(&path)))
}

// test of: mlt/gray-path
#[test]
fn a_card_that_dies_stops_nothing_though_no_path_is_left_that_works_both_ways() {
    for (paths, alive) in [
        (4, [&[1][..], &[0, 2, 3]]),
        (4, [&[1, 2], &[0, 3]]),
        (4, [&[3], &[2]]),
        (2, [&[0], &[1]]),
        (2, [&[1], &[0]]),
    ] {
        // Several transfers of a side are asked about at once.
        for senders in [&[0, 1][..], &[0], &[1], &[0, 0], &[0, 0, 0, 0, 1, 1, 1, 1]] {
            for spray in [Spray::Adaptive, Spray::RoundRobin] {
                let mut network = Network::with(paths, (spray, 4), 7);
                (0..5).for_each(|_| network.exchange(senders, [[false; PATHS]; 2]));
                (0..5).for_each(|_| network.exchange(senders, but(alive)));
            }
        }
    }
}

/// Questions take turns over the paths, and so do answers that did not arrive: not in step.
// test of: mlt/gray-path
#[test]
fn a_packet_that_is_lost_goes_again_though_answers_arrive_by_one_path_alone() {
    for (paths, alive) in [(2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3)] {
        let mut network = Network::with(paths, (Spray::Adaptive, 4), 7);
        network.exchange(&[0], [[false; PATHS]; 2]);
        let dead = but([&[0, 1, 2, 3], &[alive]]);
        for _ in 0..6 {
            network.post_from(0, 500);
            let data = |(to, datagram): &(usize, Vec<u8>)| {
                let kind = Header::decode(datagram).expect("it was encoded").0.kind;
                *to == 1 && kind == gradwire_wire::Kind::Data
            };
            let begun = network.now;
            loop {
                network.drain();
                if network.wire.values().any(data) {
                    break;
                }
                assert!(network.now.since(begun) < MS(2_000), "{paths} paths, {alive}: nothing leaves");
                network.step_with(dead, begun + MS(60_000));
            }
            network.wire.retain(|_, packet| !data(packet));
            network.end_with(dead);
        }
    }
}

/// Stamps wrap around after 71 minutes, and say after 36 which one is later no more.
// test of: mlt/gray-path
#[test]
fn a_card_that_dies_after_a_quiet_hour_stops_nothing_either() {
    for minutes in [40, 60, 75] {
        let mut network = Network::with(2, (Spray::Adaptive, 4), 7);
        (0..3).for_each(|_| network.exchange(&[0], [[false; PATHS]; 2]));
        network.run(MS(60_000 * minutes));
        (0..3).for_each(|_| network.exchange(&[0], but([&[0], &[1]])));
    }
}

/// The way by which answers arrive is kept for the longer, the more often it had to be found again.
// test of: mlt/gray-path
#[test]
fn to_find_the_way_back_again_costs_less_than_half_as_much_time_as_what_is_sent() {
    let time_of = |paths, dead| {
        let mut network = Network::with(paths, (Spray::Adaptive, 4), 7);
        network.paths.iter_mut().for_each(|path| path.delay = Duration::from_millis(30));
        (0..3).for_each(|_| network.exchange(&[0], [[false; PATHS]; 2]));
        (0..40).for_each(|_| network.exchange(&[0], dead));
        let begun = network.now;
        (0..120).for_each(|_| network.exchange(&[0], dead));
        network.now.since(begun)
    };
    for (paths, alive) in [(2, [&[0][..], &[1]]), (4, [&[1, 2], &[0, 3]])] {
        let (with, without) = (time_of(paths, but(alive)), time_of(paths, but([alive[0], &[0, 1, 2, 3]])));
        assert!(2 * with <= 3 * without, "{paths} paths: {with:?} in place of {without:?}");
    }
}
