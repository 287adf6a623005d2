//! What a packet costs on real sockets: two engines in one process send each other long exact transfers over loopback, one
//! way, and the processor time of each network thread is divided by the data packets that it sent or received.
//!
//! `cargo bench -p gradwire-engine --bench packets [-- --quick]`; `--case N` runs only the N-th row, for a profiler:
//! `perf record -e cpu-clock -g target/release/deps/packets-<hash> --case 0`.
//!
//! A thread's time includes everything that a data packet brings with it: acknowledgements, statuses, timers, waking up. The
//! kernel's part of a receiver is done by the sender: loopback delivers within the system call that sends.

#[path = "../tests/common/mod.rs"]
mod common;

use common::{all_reduce, cluster, config, Tensor};
use gradwire_engine::collectives::{Collective, Request, View};
use gradwire_engine::{Choice, Engine, EngineConfig, EngineStats, GroupHandle, Offload};
use std::time::{Duration, Instant};

/// Elements of one transfer: 16 MiB, more than a cache holds.
const ELEMS: usize = 4 << 20;
/// Name of the engine's threads, as the kernel shows it.
const THREAD_NAME: &str = "gradwire-net";

/// One row of the table.
struct Case {
    offload: Offload,
    /// Largest IP packet.
    mtu: usize,
    paths: u8,
}

const CASES: [Case; 5] = [
    Case { offload: Offload::Auto, mtu: 1_500, paths: 1 },
    Case { offload: Offload::Auto, mtu: 1_500, paths: 4 },
    Case { offload: Offload::Auto, mtu: 9_000, paths: 1 },
    Case { offload: Offload::Off, mtu: 1_500, paths: 1 },
    Case { offload: Offload::Off, mtu: 9_000, paths: 1 },
];

/// What a network thread and its socket have done so far, or in a time.
#[derive(Clone, Copy, Default)]
struct Work {
    user_seconds: f64,
    kernel_seconds: f64,
    /// Data packets to or from the other rank.
    packets: u64,
    engine: EngineStats,
}

impl Work {
    /// What was done between `before` and this.
    fn since(&self, before: &Self) -> Self {
        let (now, then) = (&self.engine, &before.engine);
        Self {
            user_seconds: self.user_seconds - before.user_seconds,
            kernel_seconds: self.kernel_seconds - before.kernel_seconds,
            packets: self.packets - before.packets,
            engine: EngineStats {
                send_calls: now.send_calls - then.send_calls,
                receive_calls: now.receive_calls - then.receive_calls,
                sleeps: now.sleeps - then.sleeps,
                datagrams_sent: now.datagrams_sent - then.datagrams_sent,
                receive_overflows: now.receive_overflows - then.receive_overflows,
                ..EngineStats::default()
            },
        }
    }

    fn print(&self, case: &Case, end: &str, mbyte_per_second: f64) {
        let each = |count: u64| count as f64 / self.packets as f64;
        let nanos = |seconds: f64| seconds * 1e9 / self.packets as f64;
        println!(
            "| {} | {} | {} | {end} | {:.0} | {:.0} | {:.0} | {:.3} | {:.3} | {:.3} | {:.2} | {:.0} |",
            if case.offload == Offload::Auto { "on" } else { "off" },
            case.mtu,
            case.paths,
            nanos(self.user_seconds + self.kernel_seconds),
            nanos(self.user_seconds),
            nanos(self.kernel_seconds),
            each(self.engine.send_calls),
            each(self.engine.receive_calls),
            each(self.engine.sleeps),
            if end == "send" {
                each(self.engine.datagrams_sent)
            } else {
                1.0 + each(self.engine.datagrams_sent)
            },
            mbyte_per_second,
        );
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    // `cargo test --benches` calls without `--bench`: a look whether it works.
    let quick = !arguments.iter().any(|a| a == "--bench" || a == "--case")
        || arguments.iter().any(|a| a == "--quick");
    let case =
        arguments.iter().position(|a| a == "--case").and_then(|at| arguments.get(at + 1)?.parse().ok());
    let time = if quick { Duration::from_millis(200) } else { Duration::from_secs(3) };
    println!("| offload | MTU | paths | end | ns | in user mode | in the kernel | send calls | receive calls | sleeps | datagrams | MB/s |");
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for (_, case) in CASES.iter().enumerate().filter(|(at, _)| case.is_none_or(|only: usize| only == *at)) {
        measure(case, time);
    }
    println!("All but MB/s for each data packet; datagrams: handled in all, acknowledgements included.");
}

/// Sends for about `time` and prints a row for each end.
fn measure(case: &Case, time: Duration) {
    // What a packet costs one thread that does all of it.
    let send_thread = Choice::Off;
    let config = EngineConfig {
        offload: case.offload,
        mtu: Some(case.mtu),
        paths: case.paths,
        send_thread,
        ..config()
    };
    let known = network_threads();
    let (engines, groups) = cluster(2, &config);
    // In the order of their start: the kernel numbers threads upwards.
    let threads: Vec<u32> = network_threads().into_iter().filter(|thread| !known.contains(thread)).collect();
    assert_eq!(threads.len(), 2, "a network thread for each engine");
    let mut tensors = [0, 1].map(|_| Tensor(vec![1.0; ELEMS]));
    let read = || [0, 1].map(|rank| work(&engines[rank], &groups[rank], threads[rank]));
    (0..2).for_each(|tag| transfer(&groups, &mut tensors, tag));
    let (before, start, mut count) = (read(), Instant::now(), 0);
    while start.elapsed() < time {
        transfer(&groups, &mut tensors, 2 + count);
        count += 1;
    }
    let speed = f64::from(count) * (ELEMS * 4) as f64 / 1e6 / start.elapsed().as_secs_f64();
    let after = read();
    for (rank, end) in ["send", "receive"].into_iter().enumerate() {
        after[rank].since(&before[rank]).print(case, end, speed);
    }
}

/// One transfer from rank 0 to rank 1, until both know that it has ended.
fn transfer(groups: &[GroupHandle], tensors: &mut [Tensor; 2], tag: u32) {
    let [from, to] = tensors;
    let send = Request {
        collective: Collective::Send { to: 1, tag },
        output: View::EMPTY,
        ..all_reduce(from.view())
    };
    let receive = Request {
        collective: Collective::Receive { from: Some(0), tag },
        input: View::EMPTY,
        ..all_reduce(to.view())
    };
    let ops = [(&groups[0], send), (&groups[1], receive)]
        .map(|(group, request)| group.submit(request, Box::new(())).expect("the engine runs"));
    for op in &ops {
        let outcome = op.wait(Some(common::PATIENCE)).expect("ends in time");
        assert!(outcome.is_ok(), "{outcome:?}");
    }
}

fn work(engine: &Engine, group: &GroupHandle, thread: u32) -> Work {
    let peers = group.stats().expect("the engine runs").peers;
    let packets = peers[0].packets_sent + peers[0].packets_received;
    let [user_seconds, kernel_seconds] = processor_seconds(thread);
    Work { user_seconds, kernel_seconds, packets, engine: engine.stats().expect("the engine runs") }
}

/// Kernel numbers of the network threads of this process, in order.
fn network_threads() -> Vec<u32> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux shows the threads of a process");
    let mut threads: Vec<u32> = tasks
        .filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok())
        .filter(|thread| {
            let name = std::fs::read_to_string(format!("/proc/self/task/{thread}/comm")).unwrap_or_default();
            name.trim() == THREAD_NAME
        })
        .collect();
    threads.sort_unstable();
    threads
}

/// Processor time of a thread: `[user, kernel]` seconds. The sum is exact, how it is divided is sampled.
fn processor_seconds(thread: u32) -> [f64; 2] {
    let read =
        |file: &str| std::fs::read_to_string(format!("/proc/self/task/{thread}/{file}")).unwrap_or_default();
    let exact = read("schedstat").split_whitespace().next().and_then(|nanos| nanos.parse::<f64>().ok());
    let stat = read("stat");
    // After the name, which may hold spaces: the fields from the third on; the times are the 14th and 15th.
    let fields = stat.rsplit(')').next().unwrap_or_default();
    let mut ticks = fields.split_whitespace().skip(11).map(|field| field.parse::<f64>().unwrap_or(0.0));
    let (user, kernel) = (ticks.next().unwrap_or(0.0), ticks.next().unwrap_or(0.0));
    let seconds = exact.unwrap_or(0.0) * 1e-9;
    [user, kernel].map(|part| if user + kernel > 0.0 { seconds * part / (user + kernel) } else { 0.0 })
}
