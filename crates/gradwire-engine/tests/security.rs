//! Sealed groups over real sockets, with an attacker on the way (common/relay.rs). What it does is done to a group in clear as
//! well, where it succeeds: so the attacks are attacks.

use crate::common::relay::{Meddler, Relay};
use crate::common::{
    all_reduce, check_all_reduce, cluster, config, engines, join, join_pending, Tensor, PATIENCE,
};
use gradwire_engine::core::wire::{Flags, Kind, PacketNumber, HEADER_BYTES};
use gradwire_engine::core::{ConnectionId, Header};
use gradwire_engine::{
    ChaosConfig, DedicatedServers, Engine, EngineConfig, GroupHandle, JobSecret, JoinError, Offload,
    OnPeerLoss, PendingGroup, Security,
};
use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn secure() -> EngineConfig {
    EngineConfig { security: Security::On, peer_timeout: Duration::from_secs(5), ..config() }
}

fn secret(byte: u8) -> Option<JobSecret> {
    Some(JobSecret::new(vec![byte; 32]).expect("long enough"))
}

/// Two ranks that meet through a relay.
fn relayed(config: &EngineConfig, meddler: Arc<Meddler>) -> (Vec<Engine>, Relay, Vec<GroupHandle>) {
    let engines = engines(2, config);
    let relay = Relay::new(&engines, meddler);
    let groups =
        relay.join(&engines, "attacked").into_iter().map(|group| group.expect("connected")).collect();
    (engines, relay, groups)
}

/// Datagrams that were not authentic, and that had come before, of both ranks.
fn refused(groups: &[GroupHandle]) -> (u64, u64) {
    let peers: Vec<_> = groups.iter().flat_map(|group| group.stats().expect("running").peers).collect();
    assert!(peers.iter().all(|peer| peer.seals_refused == 0), "a number was used twice");
    let sum = |of: fn(&gradwire_engine::PeerStats) -> u64| peers.iter().map(of).sum();
    (sum(|peer| peer.datagrams_not_authentic), sum(|peer| peer.datagrams_replayed))
}

#[test]
fn a_sealed_group_computes_the_same_whatever_carries_it() {
    let chaos = ChaosConfig { loss: 0.02, seed: 7, ..ChaosConfig::default() };
    for config in [
        secure(),
        EngineConfig { secret: secret(1), ..secure() },
        EngineConfig { offload: Offload::Off, ..secure() },
        EngineConfig { paths: 4, mtu: Some(1_500), ..secure() },
        EngineConfig { mtu: Some(576), ..secure() },
        EngineConfig { chaos: Some(chaos), ..secure() },
    ] {
        let engines = engines(3, &config);
        let groups: Vec<_> =
            join(&engines, "test").into_iter().map(|group| group.expect("connected")).collect();
        check_all_reduce(&groups, 100_003);
        let stats = groups[0].stats().expect("running");
        assert!(stats.security.cipher.is_some() && stats.security.all_local, "{config:?}");
        assert_eq!(stats.security.secret_configured, config.secret.is_some());
        assert_eq!(refused(&groups), (0, 0), "{config:?}");
        assert!(groups.iter().all(|group| group.leave(PATIENCE)), "goodbyes are understood");
    }
}

#[test]
fn local_ranks_are_sealed_only_when_that_is_asked_for() {
    for (security, sealed) in [(Security::Auto, false), (Security::Off, false), (Security::On, true)] {
        let engines = engines(2, &EngineConfig { security, secret: secret(1), ..config() });
        let groups: Vec<_> =
            join(&engines, "test").into_iter().map(|group| group.expect("connected")).collect();
        assert_eq!(groups[0].stats().expect("running").security.cipher.is_some(), sealed, "{security:?}");
    }
}

#[test]
fn dedicated_servers_are_sealed_as_well_or_prove_the_secret_in_clear() {
    for (security, sealed) in [(Security::On, true), (Security::Auto, false)] {
        let engines = engines(3, &EngineConfig { secret: secret(1), security, ..secure() });
        let servers = DedicatedServers { count: 1, buffer_bytes: 1 << 30 };
        let pending = engines
            .iter()
            .zip(0..)
            .map(|(engine, rank)| engine.new_served_group(rank, 2, servers, "served").expect("valid rank"));
        let groups: Vec<_> = join_pending(pending.collect(), PATIENCE)
            .into_iter()
            .map(|group| group.expect("connected"))
            .collect();
        check_all_reduce(&groups[..2], 10_000);
        let is_sealed = |group: &GroupHandle| group.stats().expect("running").security.cipher.is_some();
        assert!(groups.iter().all(|group| is_sealed(group) == sealed), "{security:?}");
    }
}

/// Something to look for: repeated, so that wherever packets are cut it is in each of them.
const MARKER: [f32; 4] = [1234.5, -77.25, 3.0e9, 0.125];

/// How many datagrams on the way show the values of a rank.
fn legible(security: Security) -> (usize, usize) {
    let seen = Arc::new(Mutex::new((0, 0)));
    let marker: Vec<u8> = MARKER.iter().flat_map(|value| value.to_le_bytes()).collect();
    let meddler = {
        let seen = Arc::clone(&seen);
        move |_: usize, datagram: &[u8]| {
            let mut seen = seen.lock().expect("no panic");
            seen.0 += 1;
            seen.1 += usize::from(datagram.windows(marker.len()).any(|bytes| bytes == marker));
            (vec![datagram.to_vec()], Vec::new())
        }
    };
    let (_engines, _relay, groups) = relayed(&EngineConfig { security, ..secure() }, Arc::new(meddler));
    let mut tensors: Vec<Tensor> = (0..2).map(|_| Tensor(MARKER.repeat(10_000))).collect();
    let submit = |(group, tensor): (&GroupHandle, &mut Tensor)| {
        group.submit(all_reduce(tensor.view()), Box::new(())).expect("running")
    };
    let ops: Vec<_> = groups.iter().zip(&mut tensors).map(submit).collect();
    assert!(ops.iter().all(|op| op.wait(Some(PATIENCE)).is_some_and(Result::is_ok)));
    let seen = *seen.lock().expect("no panic");
    seen
}

#[test]
fn nobody_on_the_way_reads_a_value() {
    let (all, legible_in_clear) = legible(Security::Off);
    assert!(all > 10 && legible_in_clear > 5, "{legible_in_clear} of {all} in clear");
    let (all, legible_sealed) = legible(Security::On);
    assert!(all > 10, "{all}");
    assert_eq!(legible_sealed, 0, "of {all}");
}

/// One thing that an attacker on the way can do with a datagram: what goes to its receiver besides, and back to its sender.
type Attack = fn(&[u8]) -> (Option<Vec<u8>>, Option<Vec<u8>>);

fn changed(datagram: &[u8], change: impl FnOnce(&mut Vec<u8>)) -> (Option<Vec<u8>>, Option<Vec<u8>>) {
    let mut copy = datagram.to_vec();
    change(&mut copy);
    (Some(copy), None)
}

/// A control packet of the attacker's own, with the connection's id and whatever a body may hold.
fn forged(datagram: &[u8], kind: Kind) -> (Option<Vec<u8>>, Option<Vec<u8>>) {
    let (theirs, _) = Header::decode(datagram).expect("a datagram of ours");
    let mut header = Header::control(kind, theirs.connection);
    // One that has not been there: a number that has would be dropped before anybody asks who made it.
    (header.flags, header.packet_number) = (Flags::NONE, PacketNumber(1_000_000));
    (Some([&header.encode()[..], &[0; 80]].concat()), None)
}

/// As much as UDP over IPv4 carries.
const UDP_BYTES_MAX: usize = 65_507;

const ATTACKS: [(&str, Attack); 11] = [
    ("a bit of the body is flipped", |datagram| changed(datagram, |d| d[HEADER_BYTES] ^= 1)),
    ("a bit of the tag is flipped", |datagram| {
        changed(datagram, |d| *d.last_mut().expect("not empty") ^= 0x80)
    }),
    ("a flag is set", |datagram| changed(datagram, |d| d[1] ^= 1)),
    ("it is moved to another transfer", |datagram| changed(datagram, |d| d[12] ^= 1)),
    ("it is cut", |datagram| changed(datagram, |d| d.truncate(d.len() - 1))),
    ("it is cut to the header", |datagram| changed(datagram, |d| d.truncate(HEADER_BYTES))),
    ("it is made longer", |datagram| changed(datagram, |d| d.extend([0; 64]))),
    ("it is as long as can be", |datagram| changed(datagram, |d| d.resize(UDP_BYTES_MAX, 0))),
    ("it is of another version", |datagram| changed(datagram, |d| d[0] ^= 0x30)),
    ("somebody says goodbye", |datagram| forged(datagram, Kind::Goodbye)),
    ("somebody aborts", |datagram| forged(datagram, Kind::Abort)),
];

#[test]
fn what_is_changed_or_forged_on_the_way_changes_nothing_but_a_counter() {
    let attack: Arc<Mutex<Option<Attack>>> = Arc::default();
    let meddler = {
        let attack = Arc::clone(&attack);
        move |_: usize, datagram: &[u8]| {
            let Some(attack) = *attack.lock().expect("no panic") else {
                return (vec![datagram.to_vec()], Vec::new());
            };
            let (before, back) = attack(datagram);
            // The forgery comes first: a receiver that took it would have no use for the real one.
            (before.into_iter().chain([datagram.to_vec()]).collect(), back.into_iter().collect())
        }
    };
    let (_engines, _relay, groups) = relayed(&secure(), Arc::new(meddler));
    for (what, act) in ATTACKS {
        let before = refused(&groups);
        *attack.lock().expect("no panic") = Some(act);
        check_all_reduce(&groups, 50_000);
        *attack.lock().expect("no panic") = None;
        let after = refused(&groups);
        assert!(after.0 > before.0, "{what}: {before:?}, {after:?}");
    }
}

#[test]
fn what_is_shorter_than_a_header_is_nobodys_sealed_or_not() {
    for security in [Security::On, Security::Off] {
        let (engines, groups) = cluster(2, &EngineConfig { security, ..secure() });
        let stranger = stranger_of(&engines[0]);
        let (begun, before) = (Instant::now(), unknown(&engines[0]));
        // An empty one is handed to nobody, and not counted.
        for bytes in 0..HEADER_BYTES {
            stranger.send(&vec![0x10; bytes]).expect("loopback");
        }
        while unknown(&engines[0]) < before + HEADER_BYTES as u64 - 1 {
            assert!(begun.elapsed() < PATIENCE, "{} of {HEADER_BYTES}", unknown(&engines[0]) - before);
        }
        check_all_reduce(&groups, 1_000);
    }
}

/// The same forgery ends a group that travels in clear.
#[test]
fn a_forged_abort_is_an_attack_where_nothing_is_sealed() {
    let armed = Arc::new(Mutex::new(false));
    let meddler = {
        let armed = Arc::clone(&armed);
        move |_: usize, datagram: &[u8]| {
            let forged = armed.lock().expect("no panic").then(|| forged(datagram, Kind::Abort).0).flatten();
            (forged.into_iter().chain([datagram.to_vec()]).collect(), Vec::new())
        }
    };
    let (_engines, _relay, groups) =
        relayed(&EngineConfig { security: Security::Off, ..secure() }, Arc::new(meddler));
    check_all_reduce(&groups, 1_000);
    *armed.lock().expect("no panic") = true;
    let mut tensors: Vec<Tensor> = (0..2).map(|_| Tensor(vec![1.0; 1_000])).collect();
    let submit = |(group, tensor): (&GroupHandle, &mut Tensor)| {
        group.submit(all_reduce(tensor.view()), Box::new(())).expect("running")
    };
    let ops: Vec<_> = groups.iter().zip(&mut tensors).map(submit).collect();
    assert!(ops.iter().any(|op| op.wait(Some(PATIENCE)).expect("ends in time").is_err()));
}

#[test]
fn what_was_recorded_and_comes_again_is_counted_and_dropped() {
    let recorded = Arc::new(Mutex::new(Vec::<(usize, Vec<u8>)>::new()));
    let meddler = {
        let recorded = Arc::clone(&recorded);
        move |from: usize, datagram: &[u8]| {
            let mut recorded = recorded.lock().expect("no panic");
            // Something old to the receiver, something to the sender that once came from it, then the real one, twice.
            let old = recorded.iter().find(|(by, _)| *by == from).map(|(_, old)| old.clone());
            let own = old.clone();
            recorded.push((from, datagram.to_vec()));
            let on = old.into_iter().chain([datagram.to_vec(), datagram.to_vec()]);
            (on.collect(), own.into_iter().collect())
        }
    };
    let (_engines, _relay, groups) = relayed(&secure(), Arc::new(meddler));
    for _ in 0..3 {
        check_all_reduce(&groups, 50_000);
    }
    let datagrams = recorded.lock().expect("no panic").len() as u64;
    let (_, replayed) = refused(&groups);
    assert!(replayed > datagrams / 2, "{replayed} of {datagrams}");
}

/// On a switch with strict priorities a packet waits in its queue while more urgent ones pass.
#[test]
fn a_packet_that_thousands_have_overtaken_is_no_replay_where_classes_have_queues() {
    const OVERTAKE: usize = 20_000;
    // The packet that waits, and how many have overtaken it.
    let held = Arc::new(Mutex::new((None::<Vec<u8>>, 0)));
    let meddler = {
        let held = Arc::clone(&held);
        move |from: usize, datagram: &[u8]| {
            let is_data = Header::decode(datagram).is_ok_and(|(header, _)| header.kind == Kind::Data);
            let (waits, overtook) = &mut *held.lock().expect("no panic");
            if from > 0 || !is_data {
                return (vec![datagram.to_vec()], Vec::new());
            }
            *overtook += 1;
            if *overtook == 1 {
                *waits = Some(datagram.to_vec());
                return (Vec::new(), Vec::new());
            }
            let late = if *overtook > OVERTAKE { waits.take() } else { None };
            (std::iter::once(datagram.to_vec()).chain(late).collect(), Vec::new())
        }
    };
    let config =
        EngineConfig { dscp_classes: vec![34, 26], class_queues: 2, mtu: Some(576), paths: 1, ..secure() };
    let (_engines, _relay, groups) = relayed(&config, Arc::new(meddler));
    while held.lock().expect("no panic").1 <= OVERTAKE {
        check_all_reduce(&groups, 1_000_003);
    }
    // Its own come behind it.
    check_all_reduce(&groups, 1_000);
    assert_eq!(refused(&groups), (0, 0));
}

/// A datagram of one group, sent to the other group of the same two ranks.
#[test]
fn a_packet_of_another_group_does_not_open() {
    let stolen: Arc<Mutex<Option<Vec<u8>>>> = Arc::default();
    let stealing = Arc::new(Mutex::new(true));
    let meddler = {
        let (stolen, stealing) = (Arc::clone(&stolen), Arc::clone(&stealing));
        move |from: usize, datagram: &[u8]| {
            let mut stolen = stolen.lock().expect("no panic");
            let mut on = Vec::new();
            match (&mut *stolen, *stealing.lock().expect("no panic")) {
                (stolen, true) if from == 0 => *stolen = Some(datagram.to_vec()),
                (Some(stolen), false) if from == 0 => {
                    stolen[4..7].copy_from_slice(&datagram[4..7]);
                    on.push(stolen.clone());
                }
                _ => {}
            }
            on.push(datagram.to_vec());
            (on, Vec::new())
        }
    };
    let (engines, relay, first) = relayed(&secure(), Arc::new(meddler));
    check_all_reduce(&first, 1_000);
    *stealing.lock().expect("no panic") = false;
    let second: Vec<_> =
        relay.join(&engines, "other").into_iter().map(|group| group.expect("connected")).collect();
    check_all_reduce(&second, 1_000);
    assert!(refused(&second).0 > 0);
}

/// Errors of every rank when each has its own settings.
fn errors(configs: &[EngineConfig]) -> Vec<JoinError> {
    let engines: Vec<Engine> =
        configs.iter().map(|config| Engine::start(config.clone()).expect("loopback exists")).collect();
    join(&engines, "test").into_iter().map(|group| group.expect_err("it must not form")).collect()
}

#[test]
fn another_secret_or_none_on_one_rank_is_named_on_every_rank() {
    let with = |secret| EngineConfig { secret, ..secure() };
    for odd in [secret(2), None] {
        let found = errors(&[with(secret(1)), with(odd), with(secret(1))]);
        let named: Vec<Option<u32>> = found
            .iter()
            .map(|error| match error {
                JoinError::SecretMismatch { rank, .. } => Some(*rank),
                _ => None,
            })
            .collect();
        assert_eq!(named, [Some(1), Some(0), Some(1)], "{found:?}");
        assert!(found.iter().all(|error| error.to_string().contains("GRADWIRE_SECRET")), "{found:?}");
    }
}

#[test]
fn another_mode_on_one_rank_is_named_on_every_rank() {
    for secret in [secret(1), None] {
        let with = |security| EngineConfig { security, secret: secret.clone(), ..config() };
        for (found, odd) in errors(&[with(Security::On), with(Security::Off)]).iter().zip([1, 0]) {
            let named =
                matches!(found, JoinError::SettingsMismatch { rank, field: "security", .. } if *rank == odd);
            assert!(named, "{found}");
        }
    }
}

#[test]
fn no_secret_is_in_a_record_or_in_what_is_printed() {
    let config = EngineConfig {
        secret: Some(JobSecret::new(b"a secret of the job".to_vec()).expect("long")),
        ..secure()
    };
    let engine = Engine::start(config.clone()).expect("loopback exists");
    let pending = engine.new_group(0, 1, "test").expect("valid rank");
    let hex: String = b"a secret".iter().map(|byte| format!("{byte:02x}")).collect();
    for text in [format!("{config:?} {pending:?} {engine:?}"), pending.record()] {
        assert!(!text.contains("a secret") && !text.contains(&hex), "{text}");
    }
    let engine = Engine::start(secure()).expect("loopback exists");
    let pending = engine.new_group(0, 1, "test").expect("valid rank");
    let record: serde_json::Value = serde_json::from_str(&pending.record()).expect("JSON");
    let published = record["secret"].as_str().expect("rank 0 publishes what it made").to_owned();
    assert!(!format!("{pending:?}").contains(&published));
}

#[test]
fn what_comes_for_a_rank_that_nobody_has_let_in_is_refused_and_counted() {
    let config = EngineConfig {
        security: Security::On,
        on_peer_loss: OnPeerLoss::Continue,
        peer_timeout: Duration::from_secs(10),
        ..config()
    };
    let (engines, _groups) = cluster(2, &config);
    let stranger = stranger_of(&engines[0]);
    let refused = || {
        let stats = engines[0].stats().expect("running");
        stats.datagrams_unknown + stats.datagrams_not_authentic + stats.datagrams_replayed
    };
    let mut sent = refused();
    for high in 0..=0xFF {
        let begun = Instant::now();
        // For the peer, for each rank that may come anew, and some that nobody has.
        for slot in 0..8 {
            let Some(id) = ConnectionId::new(high << 16 | slot) else { continue };
            let mut datagram = [0; 100];
            datagram[..24].copy_from_slice(&Header::control(Kind::Members, id).encode());
            stranger.send(&datagram).expect("loopback");
            sent += 1;
        }
        // No more at once than the kernel keeps.
        while refused() < sent {
            assert!(
                begun.elapsed() < PATIENCE,
                "{} of {sent} were neither refused nor counted",
                sent - refused()
            );
        }
    }
}

/// A socket of nobody's that sends to an engine.
pub(crate) fn stranger_of(engine: &Engine) -> UdpSocket {
    let stranger = UdpSocket::bind("127.0.0.1:0").expect("loopback exists");
    stranger.connect(("127.0.0.1", engine.local_port())).expect("loopback exists");
    stranger
}

fn unknown(engine: &Engine) -> u64 {
    engine.stats().expect("running").datagrams_unknown
}

/// What has come back to a stranger, in bytes.
fn answered(stranger: &UdpSocket) -> usize {
    stranger.set_nonblocking(true).expect("a setting of ours");
    let mut buffer = vec![0; 1 << 16];
    std::iter::from_fn(|| stranger.recv(&mut buffer).ok()).sum()
}

/// Sends what a connection in clear takes for its peer's, by whoever has read or guessed its id, and waits until the engine has
/// looked at all of it.
fn speak_as_peer(stranger: &UdpSocket, engine: &Engine, id: ConnectionId, kinds: &[Kind]) {
    for flags in [Flags::NONE, Flags::REPLY] {
        for kind in kinds {
            let header = Header { flags, ..Header::control(*kind, id) };
            stranger.send(&[&header.encode()[..], &[0; 80]].concat()).expect("loopback");
        }
    }
    until_all_are_seen(stranger, engine);
}

/// Waits until an engine has looked at all that a stranger has sent.
pub(crate) fn until_all_are_seen(stranger: &UdpSocket, engine: &Engine) {
    let (begun, before) = (Instant::now(), unknown(engine));
    stranger.send(&[0]).expect("loopback");
    while unknown(engine) == before {
        assert!(begun.elapsed() < PATIENCE, "the last datagram is not counted");
    }
    // Asked once more: by then what the others made due has been sent.
    engine.stats().expect("running");
}

/// Two ranks in clear that know each other's records and have not joined, and the id by which rank 0 hears rank 1.
fn strangers_in_clear() -> (Vec<Engine>, Vec<PendingGroup>, ConnectionId) {
    let engines = engines(2, &EngineConfig { security: Security::Off, ..secure() });
    let new = |(engine, rank): (&Engine, u32)| engine.new_group(rank, 2, "test").expect("valid rank");
    let pending: Vec<PendingGroup> = engines.iter().zip(0..).map(new).collect();
    let record: serde_json::Value = serde_json::from_str(&pending[0].record()).expect("JSON");
    let id = record["connections"][1].as_u64().expect("a number");
    (engines, pending, ConnectionId::new(id as u32).expect("an id"))
}

#[test]
fn a_stranger_is_answered_nothing_by_a_group_in_clear() {
    let (engines, pending, id) = strangers_in_clear();
    let groups = join_pending(pending, PATIENCE);
    assert!(groups.iter().all(Result::is_ok), "{groups:?}");
    let stranger = stranger_of(&engines[0]);
    speak_as_peer(&stranger, &engines[0], id, &Kind::ALL);
    assert_eq!(answered(&stranger), 0);
}

/// Where no peer has been heard yet, hellos of full size are due again and again: they must not go to whoever speaks first.
#[test]
fn a_stranger_who_speaks_before_the_peer_is_sent_nothing_in_clear() {
    for kinds in [&Kind::ALL[..4], &[Kind::Hello], &[Kind::Ping], &[Kind::Members]] {
        let (engines, mut pending, id) = strangers_in_clear();
        let records: Vec<String> = pending.iter().map(PendingGroup::record).collect();
        let (_absent, first) = (pending.pop().expect("two"), pending.pop().expect("two"));
        let stranger = stranger_of(&engines[0]);
        std::thread::scope(|scope| {
            let joining = scope.spawn(|| first.join(&records, Some(PATIENCE)));
            let begun = Instant::now();
            // Rank 1 has not joined: the hellos that it gets are nobody's.
            let hello_after = |count| {
                while unknown(&engines[1]) <= count && !joining.is_finished() {
                    assert_eq!(answered(&stranger), 0, "{kinds:?}");
                    assert!(begun.elapsed() < PATIENCE, "no hello goes anywhere");
                }
            };
            hello_after(0);
            speak_as_peer(&stranger, &engines[0], id, kinds);
            hello_after(unknown(&engines[1]));
            assert_eq!(answered(&stranger), 0, "{kinds:?}");
            engines[0].stop();
            assert!(joining.join().expect("join does not panic").is_err());
        });
    }
}

/// A peer's hellos that have not arrived, sent on from elsewhere: the first that is heard of it is authentic, and does not say where it is.
#[test]
fn who_sends_on_what_a_peer_has_sealed_does_not_take_its_place() {
    let (captured, is_open) =
        (Arc::new(Mutex::new([Vec::new(), Vec::new()])), Arc::new(AtomicBool::new(false)));
    let meddler = {
        let (captured, is_open) = (Arc::clone(&captured), Arc::clone(&is_open));
        move |from: usize, datagram: &[u8]| {
            if is_open.load(Ordering::SeqCst) {
                return (vec![datagram.to_vec()], Vec::new());
            }
            captured.lock().expect("no panic")[from].push(datagram.to_vec());
            (Vec::new(), Vec::new())
        }
    };
    let engines = engines(2, &secure());
    let relay = Relay::new(&engines, Arc::new(meddler));
    let stranger = stranger_of(&engines[0]);
    let groups = std::thread::scope(|scope| {
        let joining = scope.spawn(|| relay.join(&engines, "attacked"));
        let begun = Instant::now();
        // Rank 0 has joined as well, or it would hear nothing yet.
        while captured.lock().expect("no panic").iter().any(Vec::is_empty) {
            assert!(begun.elapsed() < PATIENCE, "no hello goes anywhere");
        }
        let copies = captured.lock().expect("no panic")[1].clone();
        copies.iter().for_each(|copy| _ = stranger.send(copy).expect("loopback"));
        until_all_are_seen(&stranger, &engines[0]);
        assert_ne!(answered(&stranger), 0, "it was heard first");
        is_open.store(true, Ordering::SeqCst);
        joining.join().expect("join does not panic")
    });
    let groups: Vec<GroupHandle> = groups.into_iter().map(|group| group.expect("connected")).collect();
    let address = &groups[0].stats().expect("running").peers[0].address;
    assert_ne!(*address, stranger.local_addr().expect("bound").to_string());
    check_all_reduce(&groups, 100_003);
}

/// A peer's answer that has not arrived, sent on from elsewhere: it is authentic, and says where the hello went that it answers.
#[test]
fn who_sends_on_an_answer_of_a_peer_does_not_take_its_place() {
    let (captured, is_open) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
    let meddler = {
        let (captured, is_open) = (Arc::clone(&captured), Arc::clone(&is_open));
        move |from: usize, datagram: &[u8]| {
            if from == 0 || is_open.load(Ordering::SeqCst) {
                return (vec![datagram.to_vec()], Vec::new());
            }
            let is_answer = Header::decode(datagram)
                .is_ok_and(|(header, _)| header.kind == Kind::Hello && header.flags.contains(Flags::REPLY));
            if is_answer {
                captured.lock().expect("no panic").push(datagram.to_vec());
            }
            (Vec::new(), Vec::new())
        }
    };
    let engines = engines(2, &secure());
    let relay = Relay::new(&engines, Arc::new(meddler));
    let stranger = stranger_of(&engines[0]);
    let groups = std::thread::scope(|scope| {
        let joining = scope.spawn(|| relay.join(&engines, "attacked"));
        let begun = Instant::now();
        while captured.lock().expect("no panic").is_empty() {
            assert!(begun.elapsed() < PATIENCE, "no hello is answered");
        }
        let copies = captured.lock().expect("no panic").clone();
        copies.iter().for_each(|copy| _ = stranger.send(copy).expect("loopback"));
        until_all_are_seen(&stranger, &engines[0]);
        is_open.store(true, Ordering::SeqCst);
        joining.join().expect("join does not panic")
    });
    let groups: Vec<GroupHandle> = groups.into_iter().map(|group| group.expect("connected")).collect();
    let address = &groups[0].stats().expect("running").peers[0].address;
    assert_ne!(*address, stranger.local_addr().expect("bound").to_string());
    check_all_reduce(&groups, 100_003);
}
