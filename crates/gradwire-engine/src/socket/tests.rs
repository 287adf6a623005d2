//! Both forms of the socket carry the same datagrams over loopback.

use super::*;
use crate::interfaces::Source;
use crate::{EngineError, Offload};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, RawFd};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::time::{Duration, Instant};

/// Longest that datagrams may take over loopback before they count as lost.
const PATIENCE: Duration = Duration::from_secs(30);

/// Any port of an address.
pub(super) fn at(address: IpAddr) -> BindOptions {
    BindOptions {
        address,
        home: None,
        port: 0,
        not_near: 0,
        sources: Vec::new(),
        dscp: 0,
        offload: Offload::Auto,
    }
}

fn bound(address: IpAddr, offload: Offload) -> (Box<dyn DatagramSocket>, SocketAddr) {
    let bound = bind(&BindOptions { dscp: 10, offload, ..at(address) }).unwrap();
    (bound.socket, SocketAddr::new(address, bound.port))
}

/// Heads and payload lengths that make runs of equal size, a shorter end, a longer next one, and a bare head.
fn datagrams() -> Vec<(Vec<u8>, usize)> {
    let mut list: Vec<(Vec<u8>, usize)> = (0..100).map(|i| (vec![i; 24], 1_408)).collect();
    list.push((vec![200; 24], 64));
    list.push((vec![201; 48], 1_408));
    list.push((vec![202; 72], 0));
    list.extend((0..10).map(|i| (vec![210 + i; 24], 8_896)));
    list
}

fn wait_readable(socket: &dyn DatagramSocket) {
    let mut fd = libc::pollfd { fd: socket.fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one live entry.
    unsafe { libc::poll(&mut fd, 1, 1_000) };
}

/// Sends the list from one socket to the other and returns what arrives.
fn exchange(from: Offload, to: Offload, address: IpAddr) -> (Vec<Vec<u8>>, SendCounts, EngineStats) {
    let tensor: Vec<u8> = (0..1 << 16).map(|i| (i % 251) as u8).collect();
    let (mut sender, sender_address) = bound(address, from);
    let (mut receiver, receiver_address) = bound(address, to);
    let (mut sent, mut received) = (SendCounts::default(), EngineStats::default());
    let mut batch = Batch::new();
    let mut arrived = Vec::new();
    let list = datagrams();
    for (head, payload) in &list {
        if !batch.has_room() {
            assert_eq!(sender.send(&mut batch, &mut sent), SendOutcome::Sent);
        }
        // SAFETY: `tensor` outlives the batch's last use.
        unsafe { batch.push((RawAddress::new(receiver_address), 40), head, &tensor[..*payload]) };
    }
    assert_eq!(sender.send(&mut batch, &mut sent), SendOutcome::Sent);
    let deadline = Instant::now() + PATIENCE;
    while arrived.len() < list.len() && Instant::now() < deadline {
        wait_readable(&*receiver);
        receiver.receive(&mut received, &mut |mut message| {
            assert_eq!(message.from.to_socket_addr(), Some(sender_address));
            arrived.extend(message.datagrams().map(|datagram| datagram.bytes.to_vec()));
        });
    }
    let expected: Vec<Vec<u8>> =
        list.iter().map(|(head, payload)| [head, &tensor[..*payload]].concat()).collect();
    assert!(arrived == expected, "{from:?} to {to:?}: {} of {} arrived", arrived.len(), expected.len());
    (arrived, sent, received)
}

#[test]
fn every_pair_of_forms_exchanges_the_same_datagrams() {
    for from in [Offload::Auto, Offload::Off] {
        for to in [Offload::Auto, Offload::Off] {
            let (arrived, sent, received) = exchange(from, to, Ipv4Addr::LOCALHOST.into());
            assert_eq!(sent.datagrams, arrived.len() as u64);
            assert_eq!(received.datagrams_received, arrived.len() as u64);
            assert_eq!(sent.bytes, received.bytes_received);
            assert_eq!((sent.refused, sent.blocked), (0, 0));
        }
    }
}

/// Sends datagrams of equal size with these octets in one batch; returns the octets that they arrived with, and how many
/// messages the kernel was handed.
fn classes_exchanged(address: IpAddr, octets: &[u8]) -> Option<(Vec<u8>, u64)> {
    let dscp = 10;
    let (mut sender, mut receiver) = {
        let options = BindOptions { dscp, ..at(address) };
        let (sender, receiver) = (bind(&options).unwrap(), bind(&options).unwrap());
        if !sender.traffic_class {
            return None;
        }
        (sender.socket, (receiver.socket, SocketAddr::new(address, receiver.port)))
    };
    let tensor = [7_u8; 1_000];
    let mut batch = Batch::new();
    for octet in octets {
        // SAFETY: `tensor` outlives the batch's last use.
        unsafe { batch.push((RawAddress::new(receiver.1), *octet), &[*octet], &tensor) };
    }
    let mut stats = SendCounts::default();
    assert_eq!(sender.send(&mut batch, &mut stats), SendOutcome::Sent);
    let mut arrived = Vec::new();
    while arrived.len() < octets.len() {
        wait_readable(&*receiver.0);
        receiver.0.receive(&mut EngineStats::default(), &mut |mut message| {
            for datagram in message.datagrams() {
                arrived.push(datagram.octet);
                assert_eq!(datagram.bytes[0], datagram.octet, "a datagram has the class of its own");
            }
        });
    }
    Some((arrived, stats.calls))
}

// test of: mlt/gradient-aware-queueing
#[test]
fn each_datagram_arrives_with_the_traffic_class_that_it_was_given() {
    // Runs of one class, a change at each datagram, the socket's own class, ECN bits.
    let octets: Vec<u8> =
        [[40; 20], [42; 20], [136; 20]].concat().into_iter().chain([0, 160, 2, 40, 42, 0]).collect();
    for address in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
        if std::net::UdpSocket::bind((address, 0)).is_err() {
            continue;
        }
        match classes_exchanged(address, &octets) {
            Some((arrived, calls)) => {
                assert_eq!(arrived, octets, "{address}");
                assert_eq!(calls, 1, "a change of class costs no system call");
            }
            None => eprintln!("skipped: the kernel takes no traffic class with a datagram"),
        }
    }
}

#[test]
fn a_code_point_that_the_kernel_refuses_is_found_out_and_breaks_no_sending() {
    let address = IpAddr::from(Ipv6Addr::LOCALHOST);
    if std::net::UdpSocket::bind((address, 0)).is_err() {
        return eprintln!("skipped: no IPv6");
    }
    let options = |dscp| BindOptions { dscp, ..at(address) };
    // A traffic class has eight bits.
    let (mut sender, mut receiver) = (bind(&options(64)).unwrap(), bind(&options(63)).unwrap());
    assert!(!sender.traffic_class);
    let mut batch = Batch::new();
    let to = RawAddress::new(SocketAddr::new(address, receiver.port));
    // SAFETY: no payload.
    unsafe { batch.push((to, 40), &[1, 2, 3], &[]) };
    assert_eq!(sender.socket.send(&mut batch, &mut SendCounts::default()), SendOutcome::Sent);
    let (mut arrived, deadline) = (0, Instant::now() + PATIENCE);
    while arrived == 0 && Instant::now() < deadline {
        wait_readable(&*receiver.socket);
        receiver.socket.receive(&mut EngineStats::default(), &mut |message| arrived += message.bytes.len());
    }
    assert_eq!(arrived, 3);
}

#[test]
fn offload_sends_many_datagrams_with_one_call() {
    let probe = bind(&at(Ipv4Addr::LOCALHOST.into())).unwrap();
    let (_, sent, _) = exchange(Offload::Auto, Offload::Auto, Ipv4Addr::LOCALHOST.into());
    let (_, plain, _) = exchange(Offload::Off, Offload::Off, Ipv4Addr::LOCALHOST.into());
    assert_eq!(plain.calls, plain.datagrams);
    if probe.gso {
        assert!(sent.calls <= 3, "{} calls", sent.calls);
    }
}

#[test]
fn ipv6_works_where_the_host_has_it() {
    let address = IpAddr::from(Ipv6Addr::LOCALHOST);
    if std::net::UdpSocket::bind((address, 0)).is_ok() {
        exchange(Offload::Auto, Offload::Off, address);
        exchange(Offload::Off, Offload::Auto, address);
    }
}

#[test]
fn a_refusing_port_and_a_missing_route_are_lost_packets_not_errors() {
    for offload in [Offload::Auto, Offload::Off] {
        let (mut socket, address) = bound(Ipv4Addr::LOCALHOST.into(), offload);
        let closed = {
            let other = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            other.local_addr().unwrap()
        };
        let mut stats = SendCounts::default();
        let mut batch = Batch::new();
        // A socket bound to loopback cannot reach another network.
        let elsewhere: SocketAddr = "192.0.2.1:9".parse().unwrap();
        for to in [closed, elsewhere, closed, address] {
            // SAFETY: no payload.
            unsafe { batch.push((RawAddress::new(to), 0), &[1; 24], &[]) };
        }
        assert_eq!(socket.send(&mut batch, &mut stats), SendOutcome::Sent);
        assert_eq!(stats.datagrams + stats.refused, 4, "{offload:?}: {stats:?}");
        let mut arrived = 0;
        while arrived == 0 {
            wait_readable(&*socket);
            socket.receive(&mut EngineStats::default(), &mut |mut message| {
                arrived += message.datagrams().count()
            });
        }
    }
}

#[test]
fn a_port_in_use_and_a_foreign_address_are_named() {
    let holder = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = holder.local_addr().unwrap().port();
    let bind_to = |address: &str, port| {
        let address = address.parse().unwrap();
        bind(&BindOptions { port, ..at(address) }).err()
    };
    assert_eq!(bind_to("127.0.0.1", port), Some(EngineError::PortInUse { port }));
    let unavailable = EngineError::AddressUnavailable { address: "192.0.2.77".to_owned() };
    assert_eq!(bind_to("192.0.2.77", 0), Some(unavailable));
}

/// A stranger's message to `from` that what it sent to `to` was too large for a router; `false`: this process may send none.
#[cfg(target_os = "linux")]
fn forge_fragmentation_needed(from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), mtu: u16) -> bool {
    let mut message = vec![3, 4, 0, 0, 0, 0];
    message.extend(mtu.to_be_bytes());
    // The datagram that it is about: an IP header and a UDP header.
    message.extend([0x45, 0, 5, 0xA0, 0, 1, 0x40, 0, 64, 17, 0, 0]);
    message.extend(from.0.octets().into_iter().chain(to.0.octets()));
    message.extend([from.1.to_be_bytes(), to.1.to_be_bytes(), 1_420_u16.to_be_bytes(), [0, 0]].concat());
    let sum: u32 = message.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let sum = (sum >> 16) + (sum & 0xFFFF);
    message[2..4].copy_from_slice(&(!((sum >> 16) + sum) as u16).to_be_bytes());
    let to = RawAddress::new((from.0, 0).into());
    // SAFETY: system calls with a live buffer and address; the socket is closed again.
    unsafe {
        let raw = libc::socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP);
        let sent = libc::sendto(raw, message.as_ptr().cast(), message.len(), 0, to.as_ptr().cast(), to.len());
        libc::close(raw);
        sent == message.len() as isize
    }
}

#[test]
#[cfg(target_os = "linux")]
fn what_a_stranger_says_of_the_way_by_icmp_makes_no_datagram_too_large() {
    // An address that nothing else uses: the kernel remembers for ten minutes.
    let (here, there) = (Ipv4Addr::LOCALHOST, Ipv4Addr::new(127, 77, 1, 2));
    for offload in [Offload::Auto, Offload::Off] {
        let (mut sender, from) = bound(here.into(), offload);
        let (_receiver, to) = bound(there.into(), offload);
        if !forge_fragmentation_needed((here, from.port()), (there, to.port()), 600) {
            return eprintln!("skipped: only root may send ICMP");
        }
        let (mut batch, mut counts, payload) = (Batch::new(), SendCounts::default(), [7; 1_408]);
        for _ in 0..10 {
            // SAFETY: `payload` outlives the batch's last use.
            unsafe { batch.push((RawAddress::new(to), 40), &[1; 24], &payload) };
        }
        assert_eq!(sender.send(&mut batch, &mut counts), SendOutcome::Sent);
        assert_eq!((counts.datagrams, counts.refused), (10, 0), "{offload:?}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn datagrams_are_never_fragmented_and_only_the_device_says_what_is_too_large() {
    let families = [
        (
            IpAddr::from(Ipv4Addr::LOCALHOST),
            (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
            libc::IP_PMTUDISC_PROBE,
        ),
        (
            Ipv6Addr::LOCALHOST.into(),
            (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
            libc::IPV6_PMTUDISC_PROBE,
        ),
    ];
    for (address, (level, option), expected) in families {
        if std::net::UdpSocket::bind((address, 0)).is_ok() {
            let bound = bind(&at(address)).unwrap();
            assert_eq!(options::get(bound.socket.fd(), level, option), Some(expected), "{address}");
        }
    }
}

/// Sends runs of datagrams from the sources of the list in turn, and returns the addresses from which they came.
fn arrive_from(sources: &[Source], gso: &mut bool) -> (Vec<IpAddr>, SendCounts) {
    let bind_with = |sources: &[Source]| {
        let address = Ipv4Addr::UNSPECIFIED.into();
        bind(&BindOptions { sources: sources.to_vec(), ..at(address) }).unwrap()
    };
    let (mut sender, mut receiver) = (bind_with(sources), bind_with(&[]));
    *gso = sender.gso;
    let to = RawAddress::new(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), receiver.port));
    let (mut batch, mut stats, payload) = (Batch::new(), SendCounts::default(), [7; 1_408]);
    for place in 0..sources.len() {
        // SAFETY: `payload` outlives the batch's last use.
        (0..3).for_each(|_| unsafe { batch.push((to.by_source(place), 40), &[1; 24], &payload) });
    }
    assert_eq!(sender.socket.send(&mut batch, &mut stats), SendOutcome::Sent);
    let (mut from, mut received) = (Vec::new(), EngineStats::default());
    while from.len() as u64 + stats.refused < 3 * sources.len() as u64 {
        wait_readable(&*receiver.socket);
        receiver.socket.receive(&mut received, &mut |mut message| {
            from.extend(message.datagrams().map(|datagram| datagram.from.to_socket_addr().unwrap().ip()));
        });
    }
    (from, stats)
}

#[test]
#[cfg(target_os = "linux")]
fn a_datagram_leaves_from_its_source_and_one_whose_address_is_gone_costs_nothing_but_itself() {
    let loopback =
        crate::interfaces::list().unwrap().into_iter().find(|interface| interface.loopback).unwrap();
    let source =
        |address: &str| Source { address: address.parse().unwrap(), bits: 8, interface: loopback.index };
    let mut gso = false;
    let (from, stats) =
        arrive_from(&[source("127.0.0.2"), source("192.0.2.9"), source("127.0.0.3")], &mut gso);
    let [second, third]: [IpAddr; 2] = ["127.0.0.2", "127.0.0.3"].map(|text| text.parse().unwrap());
    assert_eq!(from, [second, second, second, third, third, third]);
    assert_eq!(stats.refused, 3);
    // Which one depends on the routes of the machine.
    assert_ne!(stats.refused_errno, 0, "{stats:?}");
    if gso {
        assert!(stats.calls <= 3, "offload was given up: {stats:?}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn an_interface_without_its_address_ends_no_segmentation_offload() {
    let [home, elsewhere]: [IpAddr; 2] = ["2001:db8::1", "2001:db8::2"].map(|text| text.parse().unwrap());
    let options = BindOptions { home: Some(home), ..at(Ipv6Addr::UNSPECIFIED.into()) };
    let Ok(mut sender) = bind(&options) else { return }; // no IPv6
    let Ok(mut receiver) = bind(&at(Ipv6Addr::LOCALHOST.into())) else { return };
    let (mut batch, payload) = (Batch::new(), [7; 1_408]);
    let mut send = |to: SocketAddr| {
        let mut stats = SendCounts::default();
        // SAFETY: `payload` outlives the batch's last use.
        (0..4).for_each(|_| unsafe { batch.push((RawAddress::new(to), 40), &[1; 24], &payload) });
        assert_eq!(sender.socket.send(&mut batch, &mut stats), SendOutcome::Sent);
        stats
    };
    // Before it looks for a route the kernel refuses a source that is not this host's, of one datagram as of four.
    let refused = send((elsewhere, 9).into());
    assert_eq!((refused.refused, refused.refused_errno), (4, libc::EINVAL));
    assert_eq!(send((Ipv6Addr::LOCALHOST, receiver.port).into()).datagrams, 4);
    let (mut arrived, mut together, mut received) = (0, 0, EngineStats::default());
    while arrived < 4 {
        wait_readable(&*receiver.socket);
        receiver.socket.receive(&mut received, &mut |mut message| {
            let count = message.datagrams().count();
            (arrived, together) = (arrived + count, together.max(count));
        });
    }
    assert!(
        together == 4 || !sender.gso || !receiver.gro,
        "each came alone: segmentation offload was given up"
    );
}

#[test]
#[cfg(target_os = "linux")]
fn what_is_sent_apart_arrives_as_it_was_pushed_and_in_order() {
    let local = Ipv4Addr::LOCALHOST.into();
    let options = at(local);
    let BoundPaths { first, further, .. } = PathSockets::bind(&options, 1).unwrap();
    let mut sockets = PathSockets::new(first.socket, further, &[]);
    let (wake, woken) = std::sync::mpsc::channel();
    assert!(sockets.send_apart(Box::new(move || _ = wake.send(()))));
    let (mut receiver, address) = bound(local, Offload::Auto);
    let to = (RawAddress::new(address), 0);
    let deadline = Instant::now() + Duration::from_secs(30);
    let (mut pushed, mut arrived, mut counts) = (0_u32, 0_u32, SendCounts::default());
    let mut tensor = vec![0_u8; 1_408];
    // A whole batch, which wakes the thread, and a little one behind it, until the thread has sent many. No more than the
    // smallest receive buffer holds is under way.
    while counts.batches_apart < 40 {
        for datagrams in [usize::MAX, 3] {
            while sockets.is_blocked() {
                if sockets.stays_blocked() {
                    woken.recv_timeout(Duration::from_secs(30)).expect("a batch comes back");
                }
            }
            for _ in 0..datagrams {
                if !sockets.has_room() {
                    break;
                }
                tensor.fill(pushed as u8);
                let mut head = [0; 24];
                head[..4].copy_from_slice(&pushed.to_le_bytes());
                // SAFETY: batches for another thread copy.
                unsafe { sockets.push(0, to, &head, &tensor) };
                pushed += 1;
            }
            sockets.send();
        }
        while arrived < pushed {
            assert!(Instant::now() < deadline, "{arrived} of {pushed}");
            wait_readable(&*receiver);
            receiver.receive(&mut EngineStats::default(), &mut |mut message| {
                for datagram in message.datagrams() {
                    assert_eq!(datagram.bytes[..4], arrived.to_le_bytes());
                    assert!(datagram.bytes[24..].iter().all(|byte| *byte == arrived as u8));
                    arrived += 1;
                }
            });
        }
        counts.add(&sockets.take_counts());
    }
    while counts.datagrams < u64::from(pushed) {
        assert!(Instant::now() < deadline, "{counts:?}");
        counts.add(&sockets.take_counts());
    }
    let expected = (u64::from(pushed), u64::from(pushed) * 1_432, 0, 0);
    assert_eq!((counts.datagrams, counts.bytes, counts.refused, counts.seals_refused), expected);
}

/// Brings nothing; says as often as it is told that more may be waiting.
struct Full {
    turns: usize,
}

impl Outlet for Full {
    fn fd(&self) -> RawFd {
        -1
    }

    fn send(&mut self, batch: &mut Batch, _: &mut SendCounts) -> SendOutcome {
        batch.clear();
        SendOutcome::Sent
    }
}

impl DatagramSocket for Full {
    fn another_outlet(&self) -> Option<Box<dyn Outlet>> {
        None
    }

    fn receive(&mut self, stats: &mut EngineStats, _: &mut dyn FnMut(Message<'_>)) -> bool {
        stats.receive_calls += 1;
        self.turns = self.turns.saturating_sub(1);
        self.turns > 0
    }
}

#[test]
fn while_calls_are_full_two_of_them_come_before_anything_is_sent() {
    for (turns, calls, more) in [(1, 1, false), (2, 2, false), (3, 2, true), (9, 2, true)] {
        let mut sockets = PathSockets::new(Box::new(Full { turns }), Vec::new(), &[]);
        let mut stats = EngineStats::default();
        let says = sockets.receive(&mut stats, &mut |_| {});
        assert_eq!((stats.receive_calls, says), (calls, more), "{turns}");
    }
}

/// As if the program had closed a file that is not its own, and opened another one: the next file has the number of the closed one.
fn replace(socket: &dyn DatagramSocket) {
    let other = std::fs::File::open("/dev/null").unwrap();
    // SAFETY: both are open; the socket's owner closes what it then has.
    assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), socket.fd()) }, socket.fd());
}

fn panic_of(what: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(what)).expect_err("it goes on");
    *panic.downcast().expect("a text")
}

#[test]
fn a_socket_that_the_program_has_closed_ends_the_thread_and_keeps_it_from_its_sleep_no_longer() {
    for offload in [Offload::Auto, Offload::Off] {
        let (mut socket, _) = bound(Ipv4Addr::LOCALHOST.into(), offload);
        replace(&*socket);
        let text = panic_of(|| _ = socket.receive(&mut EngineStats::default(), &mut |_| {}));
        assert!(text.contains("has closed"), "{text}");
    }
}

#[test]
fn a_bell_that_the_program_has_closed_ends_the_thread() {
    let first = PathSockets::bind(&at(Ipv4Addr::LOCALHOST.into()), 1).unwrap().first;
    let mut sockets = PathSockets::new(first.socket, Vec::new(), &[]);
    // A number that no file has.
    let text = panic_of(|| _ = sockets.poll(RawFd::MAX, Some(Duration::ZERO)));
    assert!(text.contains("has closed"), "{text}");
}
