//! Bodies of the fuzz targets, shared with the test that replays their corpus. Not part of the interface.

use crate::cores::Cores;
use crate::handle::lock;
use crate::interfaces::{self, Interface};
use crate::lineage::Running;
use crate::place::Place;
use crate::rendezvous::{read_one, Local, Record, Roster};
use crate::security::{agree, open_records, seal_record, Channel};
use crate::succession::{Calls, Note, Sync};
use crate::{EngineConfig, JobSecret, Security};
use gradwire_core::wire::TAG_BYTES;
use gradwire_core::Timestamp;
use gradwire_membership::{Epoch, Member, Membership, Message, Settings};
use std::net::IpAddr;
use std::time::Duration;

/// Reads `text` as the record that another rank published, in a group of two.
///
/// # Panics
/// When what was read is not what would be published.
pub fn read_record(text: &str) {
    let ours = own_record();
    let Ok(roster) = Roster::new(&ours, &[of_this_build(text)]) else { return };
    assert_eq!(roster.records.len(), 2);
    for record in &roster.records {
        let again = Roster::new(&ours, &[record.to_json(), ours.to_json()]);
        assert!(record.rank == ours.rank || again.is_ok_and(|again| again.records == roster.records));
        _ = ours.candidates(record, false);
    }
    _ = roster.fingerprint();
}

/// Takes the version of a record for this build's: else every change of a source would make a corpus one of another build, of which
/// nothing more is read.
fn of_this_build(text: &str) -> String {
    let said = |text: &str| {
        let (before, rest) = text.split_once(r#""gradwire":""#)?;
        let (_, after) = rest.split_once('"')?;
        Some(format!(r#"{before}"gradwire":"{}"{after}"#, crate::VERSION))
    };
    said(text).unwrap_or_else(|| text.to_owned())
}

/// Hands `bytes` to a channel as they are, which must refuse them; then seals them at one end, as far as they are a datagram,
/// and expects the other end to open them once, and not at all when a bit was changed.
///
/// # Panics
/// When a datagram opens that should not, or the other way round.
pub fn open_sealed(bytes: &[u8]) {
    let (mut ours, theirs) = channels();
    assert!(ours.open(Timestamp::ZERO, &mut bytes.to_vec()).is_err(), "nobody has sealed it");
    let mut sealed = [bytes, &[0; TAG_BYTES]].concat();
    if !lock(theirs.sealer()).seal(&mut sealed) {
        return;
    }
    let mut changed = sealed.clone();
    let at = bytes.len() / 2;
    changed[at] ^= 1;
    assert!(ours.open(Timestamp::ZERO, &mut changed).is_err(), "byte {at} was changed");
    // A number too far from the last one is refused although it is authentic.
    let opened = ours.open(Timestamp::ZERO, &mut sealed.clone()).map(|opened| opened.len());
    assert!(opened.is_err() || opened == Ok(bytes.len()));
    assert!(ours.open(Timestamp::ZERO, &mut sealed).is_err(), "it came twice");
}

/// Reads `text` as what another rank with the job secret published.
///
/// # Panics
/// When what it holds is read as something else afterwards.
pub fn read_sealed_record(text: &str) {
    let ours = own_record();
    if let Ok(opened) = open_records(&ours, Some(&job_secret()), &[of_this_build(text)]) {
        opened.iter().for_each(|record| read_record(record));
    }
}

/// What [`read_sealed_record`] can open; the beginning of a corpus.
#[must_use]
pub fn sealed_peer_record() -> String {
    seal_record(&job_secret(), &Record { rank: 1, ..own_record() })
}

/// Reads `bytes` as notes of a group of three that goes on without lost ranks, each behind its sender's rank and its length, and hands
/// what they say about epochs to a member.
///
/// # Panics
/// When a note is not written as it was read, when the member says what nobody could read, or when its epochs go backwards.
pub fn take_notes(mut bytes: &[u8]) {
    let members = [0, 1, 2].map(|rank| Member { rank, incarnation: 0 });
    let mut member = Membership::founder(members[0], Epoch::first(members.to_vec()), PATIENT);
    let mut now = Timestamp::from_nanos(0);
    while let [rank, length, rest @ ..] = bytes {
        let (note, behind) = rest.split_at(rest.len().min(usize::from(*length)));
        bytes = behind;
        now = now + PATIENT.repeat;
        let before = member.epoch().number;
        if let Ok(read) = Note::decode(note) {
            assert_eq!(read.encode(), note);
            if let Note::Membership(message) = read {
                member.handle_message(now, members[usize::from(*rank) % members.len()], message);
            }
        } else {
            member.suspect(now, Member { rank: u32::from(*rank), incarnation: 0 });
        }
        member.handle_timeout(now);
        while member.poll_event().is_some() {}
        while let Some(transmit) = member.poll_transmit() {
            let said = Note::Membership(transmit.message);
            assert_eq!(Note::decode(&said.encode()), Ok(said));
        }
        assert!(member.epoch().number >= before);
    }
}

const PATIENT: Settings = Settings {
    repeat: Duration::from_millis(1),
    attempt: Duration::from_millis(20),
    patience: Duration::from_millis(200),
    unheard: 3,
    silent: Duration::from_millis(4),
};

/// Notes that [`take_notes`] can read; the beginning of a corpus.
#[must_use]
pub fn some_notes() -> Vec<u8> {
    let members = [0, 1, 2].map(|rank| Member { rank, incarnation: 0 });
    let mut member = Membership::founder(members[1], Epoch::first(members.to_vec()), PATIENT);
    let mut notes = vec![2, 0];
    member.suspect(Timestamp::from_nanos(0), members[2]);
    while let Some(transmit) = member.poll_transmit() {
        let note = Note::Membership(transmit.message).encode();
        notes.extend([1, u8::try_from(note.len()).unwrap_or(u8::MAX)]);
        notes.extend(note);
    }
    notes
}

/// Reads `text` as what a member of a group that runs tells a rank that wants to join it, and begins to join; whether there is
/// somebody to ask.
///
/// # Panics
/// When it would ask anybody whose record it does not have, or what no member could read.
pub fn read_running(text: &str) -> bool {
    let ours = Record { doors: vec![0, 6], ..own_record() };
    let Ok(running) = Running::read(text) else { return false };
    let later = running.records.iter().filter_map(|text| read_one(&ours, text).ok());
    let mut lives = [ours.member(), Record { rank: 1, ..own_record() }.member()];
    later.for_each(|record| lives[record.rank as usize] = record.member());
    let member_of = |rank: u32| lives.get(rank as usize).copied();
    let Ok(contacts) = running.epoch(ours.rank, member_of) else { return false };
    assert_eq!(contacts.members, [lives[1]], "there is one other rank");
    let asked = Note::Membership(Message::Ask { epoch: contacts.number });
    assert_eq!(Note::decode(&asked.encode()), Ok(asked));
    let start = Timestamp::from_nanos(0);
    let mut joiner = Membership::joiner(ours.member(), contacts, PATIENT, start);
    joiner.handle_timeout(start + PATIENT.repeat);
    let asks = joiner.poll_transmit().map(|transmit| transmit.to);
    assert_eq!((asks, joiner.poll_transmit()), (Some(lives[1]), None));
    true
}

/// What [`read_running`] can read; the beginning of a corpus.
///
/// # Panics
/// Never: it is plain data.
#[must_use]
pub fn some_running() -> String {
    let later = Record { rank: 1, incarnation: 3, doors: vec![7, 0], ..own_record() };
    let running = Running { epoch: 4, members: vec![(1, 3)], records: vec![later.to_json()] };
    serde_json::to_string(&running).unwrap_or_else(|error| unreachable!("{error}"))
}

/// Reads `bytes` behind the first two as what the members of a new epoch have told each other about calls that may have ended on some
/// of them; those say how many members and calls there are.
///
/// # Panics
/// When a call is to be sent and is given up, or more would be sent than a transfer holds.
pub fn read_tables(bytes: &[u8]) {
    let [members, calls, told @ ..] = bytes else { return };
    let (members, calls) = (usize::from(members % 5) + 1, u64::from(calls % 9));
    let unsure = 100..100 + calls;
    let mut sync =
        Sync::new(unsure.clone(), members, &Calls::default(), Duration::from_secs(1)).expect("it is small");
    for (place, byte) in sync.gathered().iter_mut().zip(told) {
        *place = *byte;
    }
    let Ok(told) = sync.read() else { return };
    let orphans = told.orphans;
    assert!(orphans.iter().all(|number| unsure.contains(number)));
    for (number, root, bytes) in sync.to_send() {
        assert!(unsure.contains(&number) && (root as usize) < members && !orphans.contains(&number));
        assert!(bytes <= u32::MAX as usize, "{bytes} bytes of call {number}");
    }
    if sync.to_send().all(|(_, _, bytes)| bytes < 1 << 16) {
        while let Ok(Some(request)) = sync.broadcast(&Calls::default()) {
            let taken = sync.take().map(|(_, held)| held.bytes.len());
            assert_eq!(taken, Some(request.output.len()));
        }
    }
}

fn job_secret() -> JobSecret {
    JobSecret::new(b"the secret of the fuzzers".to_vec())
        .unwrap_or_else(|_| unreachable!("it is long enough"))
}

/// Both ends of what two ranks seal with.
fn channels() -> (Channel, Channel) {
    let ours = own_record();
    let theirs = Record { rank: 1, ..own_record() };
    let roster = Roster::new(&ours, &[theirs.to_json()]).unwrap_or_else(|error| unreachable!("{error}"));
    let agreed =
        agree(Security::On, Some(&job_secret()), &roster).unwrap_or_else(|error| unreachable!("{error}"));
    let channel =
        |ours, theirs| agreed.channel(ours, theirs, (2, 0)).unwrap_or_else(|| unreachable!("it is on"));
    (channel(&ours, &theirs), channel(&theirs, &ours))
}

/// What [`read_record`] compares with; published, it is the beginning of a corpus.
#[must_use]
pub fn peer_record_json() -> String {
    Record { rank: 1, ..own_record() }.to_json()
}

fn own_record() -> Record {
    let local = Local {
        place: Place { host: "a".into(), boot_id: "b".into(), network_namespace: 1 },
        port: 47_400,
        source_ports: vec![47_400],
        bind: IpAddr::from([0, 0, 0, 0]),
        addresses: vec![IpAddr::from([10, 0, 0, 1])],
        loopback: true,
        datagram_bytes: 1_472,
        datagram_bytes_local: 8_972,
        sources: Vec::new(),
        receive_buffer_bytes: 1 << 20,
        cores: Cores::read(),
        config: EngineConfig::default(),
    };
    local.record("g", 0, vec![0, 5])
}

/// Chooses among the interfaces of an imagined machine by the list `asked`.
///
/// # Panics
/// When an address is chosen that no peer could use, or that the machine does not have.
pub fn choose_interfaces(asked: &str) {
    let found = machine();
    let Ok(chosen) = interfaces::select(asked, &found) else { return };
    let is_ipv4 = chosen.bind.is_ipv4();
    for address in &chosen.addresses {
        let known = found.iter().find(|interface| interface.address == *address);
        assert!(
            known.is_some_and(|interface| !interface.address.is_loopback() && interface.mtu >= chosen.mtu)
        );
        assert!(address.is_ipv4() == is_ipv4 && !address.to_string().starts_with("fe80"));
    }
    assert!(chosen.loopback || !chosen.addresses.is_empty(), "nobody can reach this rank");
    assert!((1..=9_000).contains(&chosen.mtu));
    if asked.trim().is_empty() {
        assert!(chosen.addresses.iter().all(|address| *address != IpAddr::from([172, 17, 0, 1])));
    }
}

fn machine() -> Vec<Interface> {
    let interface = |name: &str, address: &str, mtu| {
        let address: IpAddr = address.parse().unwrap_or_else(|_| unreachable!("{address} is an address"));
        Interface {
            name: name.to_owned(),
            address,
            bits: 24,
            index: 1,
            loopback: address.is_loopback(),
            mtu,
            passes: name == "eth0" && address.is_ipv6(),
        }
    };
    vec![
        interface("lo", "127.0.0.1", 65_536),
        interface("lo", "::1", 65_536),
        interface("eth0", "10.0.0.1", 1_500),
        interface("eth0", "fe80::1", 1_500),
        interface("eth0", "2001:db8::1", 1_500),
        interface("eth1", "10.1.0.1", 9_000),
        interface("eth10", "10.2.0.1", 65_000),
        interface("docker0", "172.17.0.1", 1_500),
    ]
}
