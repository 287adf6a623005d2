//! One long transfer between two processes, watched while it runs: for `bench/transport`, which starts both ends on hosts
//! of their own.
//!
//! `stream --rank 0|1 [--bytes 100000000] [--seconds 20] [--every-ms 100]`
//!
//! Rank 0 sends, rank 1 receives. Each prints its record; both records go to the standard input of both, which is then
//! closed. After that each prints lines of JSON: `{"at", ..counters of the connection}` every so many milliseconds, and
//! last `{"begun", "ended", "bytes", "wrong", "cpu_s", ..counters}`. All times are seconds of the machine's monotonic clock,
//! which the two ends share when they are on one machine. After `--seconds` both ends give up; `bytes` says how far the
//! transfer came (rank 1) and `wrong` counts 32-bit words of a complete transfer that are not what was sent.

use gradwire_engine::collectives::{Collective, Dtype, Request, View};
use gradwire_engine::{Engine, EngineConfig, EngineStats, GroupHandle, OpHandle, PeerStats};
use serde::Serialize;
use std::error::Error;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(600);

#[derive(Clone, Debug)]
struct Options {
    rank: u32,
    bytes: usize,
    seconds: f64,
    every: Duration,
}

/// A line about the transfer while it runs.
#[derive(Serialize)]
struct Progress {
    at: f64,
    #[serde(flatten)]
    peer: PeerStats,
}

/// The last line.
#[derive(Serialize)]
struct Ended {
    begun: f64,
    ended: f64,
    complete: bool,
    bytes: u64,
    wrong: usize,
    cpu_s: f64,
    engine: EngineStats,
    #[serde(flatten)]
    peer: PeerStats,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = parse(std::env::args().skip(1))?;
    let mut memory = pattern(&options); // outlives the engine, which may write to it until it has stopped
    let engine = Engine::start(EngineConfig::default())?;
    let pending = engine.new_group(options.rank, 2, "stream")?;
    println!("{}", pending.record());
    let records: Vec<String> = std::io::stdin().lines().collect::<Result<_, _>>()?;
    let group = pending.join(&records, Some(Duration::from_secs(20)))?;
    let (begun, cpu) = (now(), cpu_seconds());
    let op = start(&options, &group, &mut memory)?;
    watch(&options, &group, &op, begun)?;
    let (ended, cpu_s) = (now(), cpu_seconds() - cpu);
    let complete = match op.outcome() {
        Some(Ok(_)) => true,
        // The other end's time was over a little earlier.
        Some(Err(_)) if ended + 1.0 > begun + options.seconds => false,
        Some(Err(error)) => return Err(error.to_string().into()),
        None => false,
    };
    let (peer, engine_stats) = (peer_stats(&group)?, engine.stats()?);
    if complete {
        group.leave(Duration::from_secs(2));
    } else if options.rank == 0 {
        op.wait(Some(Duration::from_secs(2))); // the receiver counts what arrives, so it ends the transfer
    }
    engine.stop(); // whatever is left of the operation is over: nobody touches the memory any more
    let wrong = if complete { count_wrong(&memory) } else { 0 };
    let bytes = if options.rank == 0 { peer.bytes_sent } else { peer.bytes_received };
    let last = Ended { begun, ended, complete, bytes, wrong, cpu_s, engine: engine_stats, peer };
    println!("{}", serde_json::to_string(&last)?);
    Ok(())
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options, Box<dyn Error>> {
    let mut options =
        Options { rank: 0, bytes: 100_000_000, seconds: 20.0, every: Duration::from_millis(100) };
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--rank" => options.rank = value()?.parse()?,
            "--bytes" => options.bytes = value()?.parse()?,
            "--seconds" => options.seconds = value()?.parse()?,
            "--every-ms" => options.every = Duration::from_millis(value()?.parse()?),
            _ => return Err(format!("unknown argument {argument}").into()),
        }
    }
    if options.rank > 1 || options.every.is_zero() || options.bytes < 4 {
        return Err("rank is 0 or 1, every-ms at least 1, bytes at least 4".into());
    }
    Ok(options)
}

/// `[bytes / 4] u32`: what is sent, or zeros to receive into. Written to in any case, so that no page is touched for the
/// first time while the clock runs.
fn pattern(options: &Options) -> Vec<u32> {
    let words = 0..options.bytes / 4;
    words.map(|word| if options.rank == 0 { expected(word) } else { 0 }).collect()
}

/// Each word tells its place, so that a packet in a wrong place shows.
fn expected(word: usize) -> u32 {
    (word as u32 + 1).wrapping_mul(2_654_435_761)
}

fn count_wrong(memory: &[u32]) -> usize {
    memory.iter().enumerate().filter(|(word, value)| **value != expected(*word)).count()
}

fn start(options: &Options, group: &GroupHandle, memory: &mut [u32]) -> Result<OpHandle, Box<dyn Error>> {
    // SAFETY: `main` keeps the memory until the operation has ended or the engine has stopped.
    let view = unsafe { View::new(memory.as_mut_ptr().cast(), size_of_val(memory)) };
    let (collective, input, output) = match options.rank {
        0 => (Collective::Send { to: 1, tag: 0 }, view, View::EMPTY),
        _ => (Collective::Receive { from: Some(0), tag: 0 }, View::EMPTY, view),
    };
    let request = Request { input, output, ..Request::exact(collective, Dtype::F32, TIMEOUT) };
    Ok(group.submit(request, Box::new(()))?)
}

/// Prints a line about the connection every so often, until the transfer or the time is over.
fn watch(options: &Options, group: &GroupHandle, op: &OpHandle, begun: f64) -> Result<(), Box<dyn Error>> {
    let until = begun + options.seconds;
    loop {
        let left = Duration::try_from_secs_f64(until - now()).unwrap_or_default();
        if op.wait(Some(left.min(options.every))).is_some() || now() >= until {
            return Ok(());
        }
        println!("{}", serde_json::to_string(&Progress { at: now(), peer: peer_stats(group)? })?);
    }
}

fn peer_stats(group: &GroupHandle) -> Result<PeerStats, Box<dyn Error>> {
    group.stats()?.peers.into_iter().next().ok_or_else(|| "there is no peer".into())
}

/// Seconds of the monotonic clock.
fn now() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is live; the call fills it in.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Processor time of this process.
fn cpu_seconds() -> f64 {
    // SAFETY: an all-zero `rusage` is valid, and the call fills it in.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let of = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    of(usage.ru_utime) + of(usage.ru_stime)
}
