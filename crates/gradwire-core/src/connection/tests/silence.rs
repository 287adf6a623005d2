//! When a peer counts as silent.

use super::*;

/// The tail of the first transfer and all questions about it never come.
fn lose_tail(header: &Header, _: u64) -> bool {
    let tail = header.transfer == TransferId(1) && header.offset >= 1408 * 140;
    header.kind == Kind::Probe || header.kind == Kind::Data && tail
}

#[test]
fn what_came_early_and_is_handed_out_later_does_not_prove_that_the_peer_still_sends() {
    let mut pair = Pair::connected(lose_tail);
    let deadline = Duration::from_millis(4);
    pair.receive(1, 1, 1408 * 200, Contract { deadline: Some(deadline), ..AUTO });
    pair.send(0, 2, pattern(100), Reliability::Exact);
    pair.send(0, 1, pattern(1408 * 200), Reliability::Tolerant);
    let half = deadline / 8;
    pair.run_until(Duration::from_secs(1), |pair| {
        pair.latest_data_at > Timestamp::ZERO
            && pair.now.since(pair.latest_data_at) >= half
            && pair.ends[1].incoming[&TransferId(1)][1408 * 139] != 0
    });
    assert!(pair.receipt(1, 1).is_none(), "it is still waiting");
    pair.receive(1, 2, 100, Contract::EXACT);
    pair.run_until(Duration::from_secs(1), |pair| pair.receipt(1, 1).is_some());
    assert_eq!(pair.receipt(1, 1).expect("just seen").reason, CloseReason::Deadline);
    let waited = pair.now.since(pair.latest_data_at);
    // A quarter of its deadline, and what a step of the link takes.
    assert!(waited <= deadline / 4 + half / 2, "it waited {waited:?}");
}

const PEER_TIMEOUT: Duration = Duration::from_secs(20);

/// Two that have heard each other for a minute and a peer timeout of 20 s, whose heartbeats are a second apart.
fn watched(lose: Lose) -> Pair {
    let mut pair = Pair::connected(lose);
    for end in &mut pair.ends {
        end.connection.config.peer_timeout = PEER_TIMEOUT;
    }
    pair.run_for(Duration::from_secs(60));
    pair
}

impl Pair {
    fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        self.run_until(time + PEER_TIMEOUT, |pair| pair.now >= end);
    }

    /// The second one is heard no more; how long the first one waits for it.
    fn fall_silent(&mut self) -> Duration {
        self.lose = |header, _| header.connection.value() == 1;
        let since = self.now;
        self.run_until(PEER_TIMEOUT * 2, |pair| {
            pair.has(0, |event| matches!(event, Event::PeerSilent { .. }))
        });
        self.now.since(since)
    }
}

// test of: faults/adaptive-peer-timeout
#[test]
fn a_peer_that_was_always_punctual_is_missed_after_half_of_the_peer_timeout() {
    let mut pair = watched(never);
    let waited = pair.fall_silent();
    // What was heard last may be one heartbeat old.
    assert!((9_000..10_100).contains(&waited.as_millis()), "{waited:?}");
}

#[test]
fn a_peer_that_was_late_before_is_given_more_time_but_never_more_than_the_peer_timeout() {
    // From the 30th second on for 3 or 8: a pause of at most 6, or 10.
    let late: [Lose; 2] = [
        |header, _| (30_000_000..33_000_000).contains(&header.sent_at_us),
        |header, _| (30_000_000..38_000_000).contains(&header.sent_at_us),
    ];
    let [short, long] = late.map(|lose| watched(lose).fall_silent());
    assert!((16_000..20_100).contains(&short.as_millis()), "{short:?}");
    assert!((18_000..20_100).contains(&long.as_millis()), "{long:?}");
}

#[test]
fn lateness_is_forgotten_after_two_windows() {
    let mut pair = watched(|header, _| (30_000_000..33_000_000).contains(&header.sent_at_us));
    assert!(pair.ends[0].connection.silence_max() > PEER_TIMEOUT * 7 / 10);
    pair.run_for(PEER_TIMEOUT * 62);
    let longest = pair.ends[0].connection.silence_max();
    assert!((10_000..10_100).contains(&longest.as_millis()), "{longest:?}");
}

#[test]
fn a_short_peer_timeout_is_taken_as_it_is() {
    let mut pair = Pair::connected(never);
    for end in &mut pair.ends {
        end.connection.config.peer_timeout = Duration::from_secs(2);
    }
    pair.run_for(Duration::from_secs(30));
    assert_eq!(pair.ends[0].connection.silence_max(), Duration::from_secs(2));
}

#[test]
fn an_idle_pair_of_which_a_third_of_all_packets_is_lost_stays_connected() {
    for seed in 0..20 {
        let mut pair = watched(|_, dice| dice % 10 < 3);
        pair.seed = seed;
        pair.run_for(Duration::from_secs(3_600));
        assert!(!pair.has(0, |event| matches!(event, Event::PeerSilent { .. })), "seed {seed}");
    }
}
