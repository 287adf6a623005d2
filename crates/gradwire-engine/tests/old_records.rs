//! Records of an earlier run with the same secret, shown to a rank in place of the present ones by who can write to the store. All ranks seem
//! to be on one host then, and the group to need no cipher: a stranger who has taken the port of such a record must not pass for its rank.

use crate::common::{config, engines, PATIENCE};
use gradwire_engine::collectives::OpError;
use gradwire_engine::core::wire::{Flags, HelloBody, Kind, Reader, Writer, HEADER_BYTES};
use gradwire_engine::core::{ConnectionId, Header};
use gradwire_engine::{Engine, EngineConfig, JobSecret, JoinError, PendingGroup};
use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

fn with(secret: Option<JobSecret>) -> EngineConfig {
    EngineConfig { secret, network_threads: Some(1), ..config() }
}

fn secret() -> Option<JobSecret> {
    Some(JobSecret::new(vec![1; 32]).expect("long enough"))
}

/// The record of rank 1 of a run that has ended, and a socket of a stranger's at its port.
fn of_earlier_run(config: &EngineConfig) -> (String, UdpSocket) {
    let engines = engines(2, config);
    let record = engines[1].new_group(1, 2, "0").expect("valid rank").record();
    let port = engines[1].local_port();
    engines.iter().for_each(Engine::stop);
    drop(engines);
    (record, UdpSocket::bind(("127.0.0.1", port)).expect("it has become free"))
}

/// Answers all hellos with what `word` makes of theirs, by each connection id that may be meant: 255 for each place.
fn answer(stranger: &UdpSocket, to: &Engine, word: fn(u64) -> u64, is_over: &AtomicBool) {
    stranger.set_read_timeout(Some(Duration::from_millis(50))).expect("a setting of ours");
    let mut buffer = vec![0; 1 << 16];
    while !is_over.load(Ordering::SeqCst) {
        let Ok(bytes) = stranger.recv(&mut buffer) else { continue };
        let (heard, body) = Header::decode(&buffer[..bytes]).expect("a datagram of ours");
        if heard.kind != Kind::Hello || heard.flags.contains(Flags::REPLY) {
            continue;
        }
        let heard_word = HelloBody::decode(&mut Reader::new(body)).expect("a hello").word;
        let mut answer = [0; 40];
        let mut out = Writer::new(&mut answer[HEADER_BYTES..]);
        HelloBody { word: word(heard_word), echo_us: heard.sent_at_us }.encode(&mut out);
        let end = HEADER_BYTES + out.finish().expect("it fits");
        for id in (1..256).flat_map(|high| [high << 16, high << 16 | 1]) {
            let id = ConnectionId::new(id).expect("of 24 bits");
            let header =
                Header { flags: Flags::REPLY, offset: heard.offset, ..Header::control(Kind::Hello, id) };
            answer[..HEADER_BYTES].copy_from_slice(&header.encode());
            stranger.send_to(&answer[..end], ("127.0.0.1", to.local_port())).expect("loopback");
        }
    }
}

/// Joins as rank 0 of two with an old record of the other rank, whose port the stranger has; what seals the group then.
fn join_stranger(config: &EngineConfig, word: fn(u64) -> u64) -> Result<Option<&'static str>, JoinError> {
    let (old, stranger) = of_earlier_run(config);
    let engine = Engine::start(config.clone()).expect("loopback exists");
    let pending: PendingGroup = engine.new_group(0, 2, "0").expect("valid rank");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| answer(&stranger, &engine, word, &is_over));
        let records = [pending.record(), old];
        let joined = pending.join(&records, Some(PATIENCE));
        is_over.store(true, Ordering::SeqCst);
        joined.map(|group| group.stats().expect("running").security.cipher)
    })
}

#[test]
fn a_stranger_at_the_port_of_an_old_record_is_no_rank_of_a_job_with_a_secret() {
    // He has nothing to prove where there is no secret: so what he does is an attack.
    let joined = join_stranger(&with(None), |word| word);
    assert_eq!(joined.expect("nothing tells him from a rank"), None);
    for word in [|word| word, |word: u64| !word] {
        let refused = join_stranger(&with(secret()), word).expect_err("he does not know the secret");
        assert!(matches!(refused, JoinError::Failed(OpError::Settings { rank: 1, .. })), "{refused}");
        assert!(refused.to_string().contains("job secret"), "{refused}");
    }
}
