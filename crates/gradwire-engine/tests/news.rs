//! What the engine writes to the program's logger: a line for each change, none for packets and calls.

mod common;

use common::{all_reduce, check_all_reduce, config, engines, impatient, join, Tensor, PATIENCE};
use gradwire_engine::{ChaosConfig, Engine, EngineConfig, GroupHandle, OnPeerLoss, OpHandle, Security};
use log::{Level, Log, Metadata, Record};
use std::net::UdpSocket;
use std::sync::{Mutex, Once};
use std::time::Instant;

/// Keeps every line, of all tests of this file.
struct Capture(Mutex<Vec<(Level, String)>>);

impl Log for Capture {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        if record.target() == "gradwire" {
            self.0.lock().expect("no panic").push((record.level(), record.args().to_string()));
        }
    }

    fn flush(&self) {}
}

static CAPTURE: Capture = Capture(Mutex::new(Vec::new()));
static INSTALLED: Once = Once::new();

fn install() {
    INSTALLED.call_once(|| {
        log::set_logger(&CAPTURE).expect("the first logger");
        log::set_max_level(log::LevelFilter::Trace);
    });
}

/// The lines that have this in them.
fn lines(about: &str) -> Vec<(Level, String)> {
    let all = CAPTURE.0.lock().expect("no panic");
    all.iter().filter(|(_, line)| line.contains(about)).cloned().collect()
}

fn cluster(name: &str, world_size: u32, config: &EngineConfig) -> (Vec<Engine>, Vec<GroupHandle>) {
    install();
    let engines = engines(world_size, config);
    let groups = join(&engines, name).into_iter().map(|group| group.expect("all are there")).collect();
    (engines, groups)
}

#[test]
fn a_group_that_forms_and_a_peer_that_is_lost_are_a_line_each_and_calls_are_none() {
    let (engines, groups) = cluster("plain", 2, &impatient());
    check_all_reduce(&groups, 1_000);
    let formed = lines("group plain");
    let expected = |rank| {
        let text =
            format!("group plain: rank {rank} is connected to 1 others, in clear: all are on this host");
        (Level::Info, text)
    };
    assert_eq!(formed.len(), 2, "{formed:?}");
    assert!(formed.contains(&expected(0)) && formed.contains(&expected(1)), "{formed:?}");
    for _ in 0..10 {
        check_all_reduce(&groups, 100_000);
    }
    assert_eq!(lines("group plain"), formed);
    engines[1].crash();
    let mut tensor = Tensor(vec![1.0; 1_000]);
    let op = groups[0].submit(all_reduce(tensor.view()), Box::new(())).expect("running");
    assert!(op.wait(Some(PATIENCE)).expect("ends in time").is_err());
    let news = lines("group plain").split_off(2);
    let [(Level::Error, lost)] = &news[..] else { panic!("{news:?}") };
    assert!(lost.starts_with("group plain has failed on rank 0: rank 1 ("), "{lost}");
    assert!(lost.contains(") is lost: silent for ") && lost.contains("during all_reduce"), "{lost}");
}

#[test]
fn a_loss_is_a_line_for_who_notices_it_and_the_next_epoch_is_one_on_every_survivor() {
    let config = EngineConfig { on_peer_loss: OnPeerLoss::Continue, ..impatient() };
    let (engines, groups) = cluster("kept", 3, &config);
    check_all_reduce(&groups, 1_000);
    assert_eq!(lines("group kept").len(), 3);
    engines[2].crash();
    let mut tensors = [Tensor(vec![1.0; 1_000]), Tensor(vec![1.0; 1_000])];
    let submit = |(group, tensor): (&GroupHandle, &mut Tensor)| {
        group.submit(all_reduce(tensor.view()), Box::new(())).expect("running")
    };
    let ops: Vec<OpHandle> = groups.iter().zip(&mut tensors).map(submit).collect();
    for op in &ops {
        // A sum of all ranks cannot be finished: that is known once the next epoch has begun.
        assert!(op.wait(Some(PATIENCE)).expect("ends in time").is_err());
    }
    let news = lines("group kept").split_off(3);
    let of = |text: &str| {
        let is_of = |(level, line): &&(Level, String)| *level == Level::Warn && line.starts_with(text);
        news.iter().filter(is_of).map(|(_, line)| line.as_str()).collect::<Vec<&str>>()
    };
    let losses: Vec<usize> =
        (0..2).map(|rank| of(&format!("group kept, on rank {rank}: rank 2 (")).len()).collect();
    // Who is told to stop before it has noticed the loss itself hears who was lost with the epoch.
    assert!(losses.iter().max() == Some(&1), "{news:?}");
    let mut epochs = of("group kept, epoch 1: ranks 0, 1 go on without rank 2 (");
    epochs.sort_unstable_by_key(|line| line.chars().last());
    let seen_by = |rank: usize| epochs[rank].ends_with(&format!(", seen by rank {rank}"));
    assert!(epochs.len() == 2 && seen_by(0) && seen_by(1), "{news:?}");
    assert_eq!(news.len(), losses.iter().sum::<usize>() + 2, "{news:?}");
}

#[test]
fn faults_on_purpose_are_a_warning_and_sealed_groups_say_with_what() {
    let chaos = Some(ChaosConfig { loss: 0.01, seed: 3, ..ChaosConfig::default() });
    let (engines, groups) = cluster("sealed", 2, &EngineConfig { chaos, security: Security::On, ..config() });
    let port = engines[0].local_port();
    let said = lines(&format!("FAULT INJECTION IS ON at UDP port {port}: chaos = loss=1%"));
    assert!(matches!(said[..], [(Level::Warn, _)]), "{said:?}");
    let formed = lines("group sealed: rank 0 is connected to 1 others, sealed with ");
    assert!(matches!(formed[..], [(Level::Info, _)]), "{formed:?}");
    let mut tensor = Tensor(vec![1.0; 1_000]);
    let op = groups[0].submit(all_reduce(tensor.view()), Box::new(())).expect("running");
    assert!(groups[0].leave(PATIENCE));
    assert!(op.wait(Some(PATIENCE)).expect("ends in time").is_err());
    assert_eq!(lines("group sealed: rank 0 leaves").len(), 1);
    assert_eq!(lines("group sealed has failed on rank 0"), [], "who leaves has said so");
}

#[test]
fn a_flood_is_a_line_when_it_begins_and_one_when_it_is_over() {
    let (engines, groups) = cluster("flooded", 2, &config());
    let port = engines[0].local_port();
    let stranger = UdpSocket::bind("127.0.0.1:0").expect("loopback exists");
    stranger.connect(("127.0.0.1", port)).expect("loopback exists");
    let (begun, over) =
        (format!("what is nobody's floods UDP port {port}"), format!("the flood of UDP port {port} is over"));
    let start = Instant::now();
    while lines(&begun).is_empty() && start.elapsed() < PATIENCE {
        // A full buffer of the kernel is the flood's own loss.
        _ = stranger.send(&[0; 8_000]);
    }
    let start = Instant::now();
    while lines(&over).is_empty() && start.elapsed() < PATIENCE {
        check_all_reduce(&groups, 10_000);
    }
    let news = lines(&format!("UDP port {port}")).split_off(1);
    assert!(matches!(&news[..], [(Level::Warn, _), (Level::Info, _)]), "{news:?}");
}
