//! When heartbeats go, and what they are needed for.

use super::*;
use gradwire_wire::POSITION_RECORD_BYTES;
use std::cell::Cell;

std::thread_local! {
    /// Heartbeats of each end, without the answers to them.
    static BEATS: Cell<[u32; 2]> = const { Cell::new([0; 2]) };
    /// Of these, how many more get lost.
    static LOSING: Cell<u32> = const { Cell::new(0) };
}

fn count(header: &Header, _: u64) -> bool {
    if header.kind != Kind::Ping || header.flags.contains(Flags::REPLY) {
        return false;
    }
    let mut beats = BEATS.get();
    // The first end sends to the second one, whose id is 2.
    beats[usize::from(header.connection.value() == 1)] += 1;
    BEATS.set(beats);
    let is_lost = LOSING.get() > 0;
    LOSING.set(LOSING.get().saturating_sub(1));
    is_lost
}

/// Nothing of the first end arrives any more.
fn cut(header: &Header, dice: u64) -> bool {
    count(header, dice);
    header.connection.value() == 2
}

/// Of half a second each.
const INTERVALS: u32 = 40;
/// Steps of a job in each interval.
const STEPS: u32 = 4;

/// Two that have met, with a peer timeout of 5 s.
fn pair() -> Pair {
    let pair = Pair::connected(count);
    assert_eq!(pair.ends[0].connection.config.heartbeat(), Duration::from_millis(500));
    BEATS.set([0; 2]);
    pair
}

impl Pair {
    /// Lets `time` pass and no more, whatever comes next.
    fn wait(&mut self, time: Duration) {
        let end = self.now + time;
        self.drain();
        while self.now < end {
            self.go_to(self.next_at().min(end));
            self.drain();
        }
    }

    /// In each step so many bytes go each way; what happens in it besides is up to `each`.
    fn work(&mut self, intervals: u32, bytes: [usize; 2], mut each: impl FnMut(&mut Self, u32)) {
        let heartbeat = self.ends[0].connection.config.heartbeat();
        let first = self.sent as u32;
        for step in 0..intervals * STEPS {
            for from in [0, 1].into_iter().filter(|from| bytes[*from] > 0) {
                let transfer = first * 1_000 + step * 2 + from as u32;
                self.receive(1 - from, transfer, bytes[from], Contract::EXACT);
                self.send(from, transfer, pattern(bytes[from]), Reliability::Exact);
            }
            each(self, step);
            self.wait(heartbeat / STEPS);
        }
    }

    /// What is longest heard of nobody while `time` passes, looked at every millisecond.
    fn longest_silence(&mut self, time: Duration) -> Duration {
        let mut longest = Duration::ZERO;
        for _ in 0..time.as_millis() {
            self.wait(Duration::from_millis(1));
            let silences = self.ends.iter().map(|end| end.connection.silence(self.now));
            longest = longest.max(silences.max().expect("there are two"));
        }
        longest
    }
}

// test of: faults/free-heartbeats
#[test]
fn while_data_flows_both_ways_there_are_no_heartbeats() {
    // So few bytes that the end of a transfer comes before any acknowledgement, and so many that they take hundreds.
    for bytes in [100, 400_000] {
        let mut pair = pair();
        pair.work(INTERVALS, [bytes; 2], |_, _| {});
        assert_eq!(BEATS.get(), [0, 0], "{bytes} bytes");
        assert!(pair
            .ends
            .iter()
            .all(|end| !end.events.iter().any(|e| matches!(e, Event::PeerSilent { .. }))));
    }
}

// test of: faults/free-heartbeats
#[test]
fn where_data_flows_one_way_only_those_send_heartbeats_of_whom_nothing_is_known_to_arrive() {
    // What fits into the eager window comes whether or not its receiver is heard.
    let mut small = pair();
    small.work(INTERVALS, [100, 0], |_, _| {});
    assert_eq!(BEATS.get()[0], 0);
    assert!((INTERVALS - 1..=INTERVALS).contains(&BEATS.get()[1]), "{:?}", BEATS.get());
    // What does not comes only because its receiver is.
    let mut large = pair();
    large.work(INTERVALS, [400_000, 0], |_, _| {});
    assert_eq!(BEATS.get(), [0, 0]);
}

#[test]
fn what_is_acknowledged_shows_as_much_though_its_receiver_has_not_called_yet() {
    let mut pair = pair();
    let heartbeat = pair.ends[0].connection.config.heartbeat();
    for step in 0..8 * STEPS {
        for from in [0, 1] {
            pair.send(from, step * 2 + from as u32, pattern(100), Reliability::Exact);
        }
        pair.wait(heartbeat / STEPS);
    }
    assert_eq!(BEATS.get(), [0, 0]);
}

#[test]
fn an_idle_pair_stays_connected() {
    let mut pair = Pair::connected(never);
    pair.run_until(Duration::from_secs(60), |pair| pair.now > Timestamp::from_nanos(30_000_000_000));
    assert!(!pair.has(0, |event| matches!(event, Event::PeerSilent { .. })));
    assert!(pair.sent < 1000, "{} datagrams for half a minute of nothing", pair.sent);
}

#[test]
fn idle_ranks_send_a_heartbeat_in_each_interval() {
    let mut pair = pair();
    let heartbeat = pair.ends[0].connection.config.heartbeat();
    pair.wait(heartbeat * INTERVALS);
    assert_eq!(BEATS.get(), [INTERVALS; 2]);
}

#[test]
fn with_a_long_peer_timeout_a_heartbeat_comes_each_second_all_the_same() {
    let mut pair = pair();
    for end in &mut pair.ends {
        end.connection.config.peer_timeout = Duration::from_secs(300);
    }
    pair.wait(Duration::from_secs(1));
    BEATS.set([0; 2]);
    pair.wait(Duration::from_secs(20));
    assert_eq!(BEATS.get(), [20; 2]);
}

#[test]
fn when_data_stops_the_ranks_hear_each_other_as_soon_as_if_there_had_been_none() {
    let mut pair = pair();
    let heartbeat = pair.ends[0].connection.config.heartbeat();
    pair.work(4, [2_000; 2], |_, _| {});
    let longest = pair.longest_silence(heartbeat * 4);
    assert!(longest <= heartbeat + DELAY * 2, "{longest:?}");
}

#[test]
fn a_way_that_is_cut_in_one_direction_while_data_flows_is_found_within_the_peer_timeout() {
    let mut pair = pair();
    pair.work(INTERVALS, [50_000; 2], |_, _| {});
    assert_eq!(BEATS.get(), [0, 0]);
    pair.lose = cut;
    let (since, longest) = (pair.now, pair.ends[1].connection.silence_max());
    // The second one goes on: what it sends arrives, and nothing of the first one does.
    let mut heard = 0;
    pair.work(4, [0, 500], |pair, _| {
        heard += u32::from(pair.ends[0].connection.silence(pair.now) < Duration::from_millis(200));
    });
    assert!(heard > 3 * STEPS, "the first one hears data: {heard}");
    assert!(BEATS.get()[0] >= 3, "nothing of it is acknowledged, so its heartbeats go: {:?}", BEATS.get());
    let is_found = |pair: &Pair| pair.has(1, |event| matches!(event, Event::PeerSilent { .. }));
    pair.run_until(longest * 2, is_found);
    assert!(pair.now.since(since) <= longest, "{:?}", pair.now.since(since));
}

fn place(step: u32) -> [u8; POSITION_RECORD_BYTES] {
    [1 + (step % 250) as u8; POSITION_RECORD_BYTES]
}

impl Pair {
    fn said(&self, place: [u8; POSITION_RECORD_BYTES]) -> bool {
        self.has(1, |event| *event == Event::Position(place))
    }
}

#[test]
fn a_place_where_a_rank_stays_is_told_once_although_data_flows() {
    let mut pair = pair();
    pair.ends[0].connection.set_position(pair.now, place(1));
    pair.work(1, [2_000; 2], |_, _| {});
    pair.wait(DELAY * 2);
    assert!(pair.said(place(1)), "within an interval");
    pair.work(INTERVALS, [2_000; 2], |_, _| {});
    assert_eq!(BEATS.get(), [1, 0]);
}

#[test]
fn a_heartbeat_that_tells_a_place_and_is_lost_is_repeated() {
    let mut pair = pair();
    LOSING.set(2);
    pair.ends[0].connection.set_position(pair.now, place(1));
    pair.work(4, [2_000; 2], |_, _| {});
    assert!(pair.said(place(1)));
    pair.work(INTERVALS, [2_000; 2], |_, _| {});
    assert_eq!(BEATS.get(), [3, 0]);
}

#[test]
fn places_that_change_in_each_step_are_not_told_until_the_rank_stays() {
    let mut pair = pair();
    pair.work(INTERVALS, [2_000; 2], |pair, step| {
        let now = pair.now;
        pair.ends[0].connection.set_position(now, place(step));
    });
    assert_eq!(BEATS.get(), [0, 0]);
    pair.work(2, [2_000; 2], |_, _| {});
    assert!(pair.said(place(INTERVALS * STEPS - 1)));
    assert_eq!(BEATS.get(), [1, 0]);
}

#[test]
fn over_several_paths_heartbeats_go_also_while_data_flows() {
    let mut pair = Pair::new(count);
    for (index, end) in pair.ends.iter_mut().enumerate() {
        let mut config = end.connection.config.clone();
        config.paths = 2;
        end.connection = Connection::new(config, Timestamp::ZERO);
        assert_eq!(end.connection.config.local.value() as usize, index + 1);
    }
    pair.run_until(Duration::from_secs(5), |pair| pair.ends.iter().all(|end| end.connection.is_connected()));
    BEATS.set([0; 2]);
    pair.work(INTERVALS, [50_000; 2], |_, _| {});
    assert!(BEATS.get().iter().all(|beats| *beats >= INTERVALS - 1), "{:?}", BEATS.get());
}

#[test]
fn a_peer_that_is_not_heard_is_asked_four_times_as_often_until_it_is() {
    let mut pair = pair();
    let heartbeat = pair.ends[0].connection.config.heartbeat();
    pair.wait(heartbeat * 20);
    let calm = BEATS.get();
    assert!(calm.iter().all(|beats| (19..=21).contains(beats)), "{calm:?}");
    // The second one is not heard any more, and hears the first one's.
    pair.lose = |header, dice| {
        count(header, dice);
        header.connection.value() == 1
    };
    BEATS.set([0; 2]);
    pair.wait(heartbeat * 5);
    let [asking, answering] = BEATS.get();
    assert!((10..=15).contains(&asking) && (4..=6).contains(&answering), "{:?}", BEATS.get());
    pair.lose = count;
    pair.wait(heartbeat);
    BEATS.set([0; 2]);
    pair.wait(heartbeat * 10);
    assert!(BEATS.get().iter().all(|beats| (9..=11).contains(beats)), "{:?}", BEATS.get());
}
