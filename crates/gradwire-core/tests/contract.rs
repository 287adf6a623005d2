//! Properties of every contract, whatever its values: more data or more time never takes back that a transfer is over,
//! and a receiver that is told to wait is told the truth about how long.

use gradwire_core::{CloseReason, Contract, Early, Progress, Soft, Verdict};
use proptest::prelude::*;
use std::time::Duration;

const TOTAL: u64 = 10_000;

fn ms(range: std::ops::Range<u64>) -> impl Strategy<Value = Duration> {
    range.prop_map(Duration::from_millis)
}

prop_compose! {
    fn contract()(
        loss_bound in prop_oneof![Just(0.0_f32), 0.0_f32..=1.0],
        flags in any::<(bool, bool)>(),
        soft in prop::option::of((ms(0..200), 0.0_f32..=1.0)),
        deadline in prop::option::of(ms(0..300)),
        floor in 0.0_f32..=1.0,
        early in prop::option::of(ms(0..50)),
        reorder_slack in ms(0..20),
    ) -> Contract {
        let (after_first_pass, repairs) = flags;
        let soft = soft.map(|(after, min_fraction)| Soft { after, min_fraction });
        let early = early.map(|quiet| Early { quiet });
        let rules = Contract { loss_bound, after_first_pass, soft, deadline, floor, early, ..Contract::EXACT };
        Contract { reorder_slack, repairs, ..rules }
    }
}

prop_compose! {
    fn progress()(
        elapsed in ms(0..400),
        quiet in ms(0..400),
        received_bytes in prop_oneof![Just(TOTAL), 0..=TOTAL],
        critical_missing in prop_oneof![4 => Just(0_u32), 1 => 1_u32..5],
        seen in any::<(bool, bool)>(),
    ) -> Progress {
        let (last_percentile_seen, first_pass_over) = seen;
        let quiet = quiet.min(elapsed);
        let since_first_pass = if first_pass_over { (quiet + elapsed) / 2 } else { Duration::ZERO };
        Progress {
            elapsed, quiet, received_bytes, total_bytes: TOTAL, critical_missing, last_percentile_seen, first_pass_over,
            since_first_pass,
        }
    }
}

fn later(progress: Progress, time: Duration) -> Progress {
    let since_first_pass =
        progress.since_first_pass + if progress.first_pass_over { time } else { Duration::ZERO };
    Progress { elapsed: progress.elapsed + time, quiet: progress.quiet + time, since_first_pass, ..progress }
}

proptest! {
    #[test]
    fn what_is_over_stays_over_with_more_data_and_more_time(
        contract in contract(), progress in progress(), more in 0..=TOTAL, time in ms(0..500),
    ) {
        if let Verdict::Close(_) = contract.verdict(&progress) {
            let received_bytes = (progress.received_bytes + more).min(TOTAL);
            let with_more = Progress { received_bytes, ..later(progress, time) };
            let verdict = contract.verdict(&with_more);
            prop_assert!(matches!(verdict, Verdict::Close(_)), "{:?}", verdict);
        }
    }

    #[test]
    fn who_waits_as_long_as_told_sees_the_transfer_end(contract in contract(), progress in progress()) {
        let mut at = progress;
        let mut told = false;
        for _ in 0..10 {
            match contract.verdict(&at) {
                Verdict::Close(_) => return Ok(()),
                Verdict::Wait(None) => {
                    prop_assert!(!told, "told to wait, and then that time cannot help");
                    return Ok(());
                }
                Verdict::Wait(Some(left)) => {
                    prop_assert!(left > Duration::ZERO, "a timer that is due at once, for ever");
                    // Not a moment sooner.
                    let early = contract.verdict(&later(at, left - Duration::from_nanos(1)));
                    prop_assert!(matches!(early, Verdict::Wait(Some(_))));
                    (at, told) = (later(at, left), true);
                }
            }
        }
        prop_assert!(false, "it waits and waits");
    }

    #[test]
    fn nothing_closes_with_a_critical_packet_missing_or_an_exact_byte(contract in contract(), progress in progress()) {
        let all_in = progress.received_bytes == TOTAL;
        let verdict = contract.verdict(&progress);
        if all_in {
            prop_assert_eq!(verdict, Verdict::Close(CloseReason::AllArrived));
        } else if contract.is_exact() || progress.critical_missing > 0 {
            prop_assert_eq!(verdict, Verdict::Wait(None));
        }
    }

    #[test]
    fn needed_is_the_least_number_that_is_not_below_its_share(total in 0_u64..1_000_000, fraction in 0.0_f32..=1.0) {
        let needed = Contract::needed(total, fraction) as f64;
        let exact = total as f64 * f64::from(fraction);
        let rounding = 1e-6 * (total as f64).max(1.0);
        prop_assert!(needed >= exact - rounding && needed < exact + 1.0);
        prop_assert!(needed <= total as f64);
    }
}
