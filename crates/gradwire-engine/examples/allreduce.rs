//! All-reduce among processes of this machine over loopback: latency and bus bandwidth.
//!
//! `cargo run --release -p gradwire-engine --example allreduce -- [--ranks 2] [--bytes 1024,1048576,26214400] [--rounds 50]
//! [--no-offload] [--mtu 9000] [--clear] [--busy-poll 50] [--give-way|--no-give-way] [--threads 2] [--pause 50] [--tolerant] [--stats]`
//!
//! `--busy-poll` is in microseconds, `--pause`, before each round, in milliseconds. `--tolerant`: the mean under the policy of `auto`, exact
//! where nothing is lost.
//!
//! The process starts itself once for each rank; records travel through the children's pipes. A barrier precedes every
//! round, and every result is checked. Bus bandwidth is `2 (n - 1) / n * bytes / time`, as nccl-tests defines it; `cpu us`
//! is the processor time of rank 0 for one round.

use gradwire_engine::collectives::{Algorithm, Collective, Dtype, Policy, ReduceOp, Request, View};
use gradwire_engine::{Choice, Engine, EngineConfig, GroupHandle, Offload, Security};
use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Clone, Debug)]
struct Options {
    ranks: u32,
    rank: Option<u32>,
    bytes: Vec<usize>,
    rounds: usize,
    offload: Offload,
    mtu: Option<usize>,
    algorithm: Algorithm,
    stats: bool,
    security: Security,
    busy_poll: Duration,
    give_way: Choice,
    pause: Duration,
    threads: Option<u8>,
    tolerant: bool,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = parse(std::env::args().skip(1))?;
    match options.rank {
        Some(rank) => run_rank(&options, rank),
        None => run_all(&options),
    }
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options, Box<dyn Error>> {
    let mut options = Options {
        ranks: 2,
        rank: None,
        bytes: vec![1 << 10, 64 << 10, 1 << 20, 25 << 20],
        rounds: 50,
        offload: Offload::Auto,
        mtu: None,
        algorithm: Algorithm::Auto,
        stats: false,
        security: Security::Auto,
        busy_poll: Duration::ZERO,
        give_way: Choice::Auto,
        pause: Duration::ZERO,
        threads: None,
        tolerant: false,
    };
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--ranks" => options.ranks = value()?.parse()?,
            "--rank" => options.rank = Some(value()?.parse()?),
            "--bytes" => options.bytes = value()?.split(',').map(str::parse).collect::<Result<_, _>>()?,
            "--rounds" => options.rounds = value()?.parse()?,
            "--mtu" => options.mtu = Some(value()?.parse()?),
            "--no-offload" => options.offload = Offload::Off,
            "--ring" => options.algorithm = Algorithm::Ring,
            "--transpose" => options.algorithm = Algorithm::Transpose,
            "--one-shot" => options.algorithm = Algorithm::OneShot,
            "--clear" => options.security = Security::Off,
            "--busy-poll" => options.busy_poll = Duration::from_micros(value()?.parse()?),
            "--give-way" => options.give_way = Choice::On,
            "--no-give-way" => options.give_way = Choice::Off,
            "--threads" => options.threads = Some(value()?.parse()?),
            "--pause" => options.pause = Duration::from_millis(value()?.parse()?),
            "--tolerant" => options.tolerant = true,
            "--stats" => options.stats = true,
            _ => return Err(format!("unknown argument {argument}").into()),
        }
    }
    Ok(options)
}

/// Starts the ranks and passes every record to every rank.
fn run_all(options: &Options) -> Result<(), Box<dyn Error>> {
    let program = std::env::current_exe()?;
    let mut children: Vec<Child> = (0..options.ranks)
        .map(|rank| {
            Command::new(&program)
                .args(std::env::args().skip(1))
                .args(["--rank", &rank.to_string()])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
        })
        .collect::<Result<_, _>>()?;
    let mut readers = Vec::new();
    let mut records = String::new();
    for child in &mut children {
        let mut reader = BufReader::new(child.stdout.take().ok_or("no pipe")?);
        reader.read_line(&mut records)?;
        readers.push(reader);
    }
    for child in &mut children {
        child.stdin.take().ok_or("no pipe")?.write_all(records.as_bytes())?;
    }
    for reader in readers {
        for line in reader.lines() {
            println!("{}", line?);
        }
    }
    for mut child in children {
        if !child.wait()?.success() {
            return Err("a rank failed".into());
        }
    }
    Ok(())
}

fn run_rank(options: &Options, rank: u32) -> Result<(), Box<dyn Error>> {
    let engine = Engine::start(EngineConfig {
        offload: options.offload,
        mtu: options.mtu,
        security: options.security,
        busy_poll: options.busy_poll,
        give_way: options.give_way,
        network_threads: options.threads,
        ..EngineConfig::default()
    })?;
    let pending = engine.new_group(rank, options.ranks, "bench")?;
    println!("{}", pending.record());
    let records: Vec<String> = std::io::stdin().lines().collect::<Result<_, _>>()?;
    let group = pending.join(&records, Some(TIMEOUT))?;
    if rank == 0 {
        println!(
            "{:>10} {:>10} {:>10} {:>10} {:>10} {:>12} {:>6}",
            "bytes", "p50 us", "p99 us", "min us", "cpu us", "busbw MB/s", "wrong"
        );
    }
    for bytes in &options.bytes {
        measure(options, &group, *bytes)?;
    }
    if options.stats {
        println!("rank {rank} {}", serde_json::to_string(&group.stats()?)?);
        println!("rank {rank} {}", serde_json::to_string(&engine.stats()?)?);
    }
    group.leave(Duration::from_secs(1));
    engine.stop();
    Ok(())
}

fn measure(options: &Options, group: &GroupHandle, bytes: usize) -> Result<(), Box<dyn Error>> {
    let elems = bytes / 4;
    let mut tensor = vec![0.0_f32; elems];
    let mut times = Vec::new();
    let mut cpu = Duration::ZERO;
    let mut wrong = 0;
    let warm_up = options.rounds / 10 + 2;
    for round in 0..options.rounds + warm_up {
        tensor.fill((group.rank() + 1) as f32);
        // As long as a training step computes: what happens after it is the subject.
        std::thread::sleep(options.pause);
        // SAFETY: the operation is waited for before the tensor is touched again.
        let view = unsafe { View::new(tensor.as_mut_ptr().cast(), elems * 4) };
        run(group, request(Collective::Barrier, View::EMPTY))?;
        let (start, cpu_before) = (Instant::now(), cpu_time());
        run(group, reduction(options, view))?;
        if round >= warm_up {
            times.push(start.elapsed());
            cpu += cpu_time().saturating_sub(cpu_before);
        }
        let sum = (options.ranks * (options.ranks + 1) / 2) as f32;
        let result = if options.tolerant { sum / options.ranks as f32 } else { sum };
        wrong += tensor.iter().filter(|value| **value != result).count();
    }
    times.sort();
    let micros = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
    let ranks = f64::from(options.ranks);
    let busbw = 2.0 * (ranks - 1.0) / ranks * bytes as f64 / micros(0.5);
    if group.rank() == 0 {
        println!(
            "{bytes:>10} {:>10.0} {:>10.0} {:>10.0} {:>10.0} {busbw:>12.1} {wrong:>6}",
            micros(0.5),
            micros(0.99),
            micros(0.0),
            cpu.as_secs_f64() * 1e6 / times.len() as f64
        );
    }
    if wrong == 0 {
        Ok(())
    } else {
        Err(format!("{wrong} wrong values on rank {}", group.rank()).into())
    }
}

fn request(collective: Collective, view: View) -> Request {
    Request { input: view, output: view, ..Request::exact(collective, Dtype::F32, TIMEOUT) }
}

fn reduction(options: &Options, view: View) -> Request {
    let exact = request(Collective::AllReduce { algorithm: options.algorithm }, view);
    if options.tolerant {
        Request { policy: Policy::AUTO, reduce: ReduceOp::Avg, ..exact }
    } else {
        exact
    }
}

/// One collective from submission to its end.
fn run(group: &GroupHandle, request: Request) -> Result<(), Box<dyn Error>> {
    let op = group.submit(request, Box::new(()))?;
    match op.wait(Some(TIMEOUT)).ok_or("timed out")? {
        Ok(_) => Ok(()),
        Err(error) => Err(error.to_string().into()),
    }
}

/// Processor time of this process.
fn cpu_time() -> Duration {
    // SAFETY: an all-zero `rusage` is valid, and the call fills it in.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let of = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
    };
    of(usage.ru_utime) + of(usage.ru_stime)
}
