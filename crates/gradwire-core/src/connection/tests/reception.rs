//! At what rate data comes, as its receiver knows it.

use super::{never, pattern, Pair, AUTO};
use crate::Reliability;
use core::time::Duration;

#[test]
fn how_fast_data_comes_is_known_where_it_comes_and_not_from_what_was_buffered() {
    let rate = |early: bool, bytes: usize| {
        let mut pair = Pair::connected(never);
        let data = pattern(bytes);
        if early {
            pair.send(0, 1, data.clone(), Reliability::Tolerant);
            let limit = pair.now + Duration::from_millis(20);
            pair.run_until(Duration::from_secs(1), |pair| pair.now >= limit);
        }
        pair.receive(1, 1, data.len(), AUTO);
        if !early {
            pair.send(0, 1, data, Reliability::Tolerant);
        }
        pair.run_until(Duration::from_secs(1), |pair| pair.missing(0, 1).is_some());
        pair.ends.map(|end| end.connection.stats().reception_rate)
    };
    let [sender, receiver] = rate(false, 200_000);
    assert_eq!(sender, 0);
    // 200 KB in no less than a tenth of a millisecond and no more than the second that the test allows.
    assert!((200_000..2_000_000_000).contains(&receiver), "{receiver} bytes per second");
    assert_eq!(rate(true, 50_000), [0, 0]);
}
