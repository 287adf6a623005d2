//! Paths whose two directions are two cards, as each side numbers its ways by itself.

use super::*;

const BYTES: u64 = 1 << 20;

/// For each side, over which of its paths nothing arrives.
type Dead = [[bool; PATHS]; 2];

impl Network {
    fn post_from(&mut self, from: usize) {
        let transfer = TransferId(self.next_transfer);
        self.next_transfer += 1;
        let send = SendTransfer::exact(transfer, BYTES, [1; 16]);
        self.ends[from].send(self.now, send).expect("a fresh transfer");
        let receive = ReceiveTransfer::new(transfer, BYTES, [1; 16], Contract::EXACT);
        self.ends[1 - from].receive(self.now, receive).expect("a fresh transfer");
    }

    fn step_with(&mut self, dead: Dead, end: Timestamp) {
        self.step(end);
        // What has just left is still on its way.
        self.wire.retain(|_, (to, datagram)| {
            let path = Header::decode(datagram).expect("it was encoded").0.path;
            !dead[1 - *to][usize::from(path.0)]
        });
    }

    /// A transfer from each of these sides at once; it takes some hundred milliseconds at most.
    fn exchange(&mut self, senders: &[usize], dead: Dead) {
        let begun = self.now;
        senders.iter().for_each(|from| self.post_from(*from));
        while self.ends.iter().any(|end| !end.sends.is_empty() || !end.receives.is_empty()) {
            assert!(
                self.now.since(begun) < MS(2_000),
                "{senders:?} {dead:?}: {:?}",
                self.ends[0].path_stats()
            );
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
        for senders in [&[0, 1][..], &[0], &[1]] {
            for spray in [Spray::Adaptive, Spray::RoundRobin] {
                let mut network = Network::with(paths, (spray, 4), 7);
                (0..5).for_each(|_| network.exchange(senders, [[false; PATHS]; 2]));
                (0..5).for_each(|_| network.exchange(senders, but(alive)));
            }
        }
    }
}
