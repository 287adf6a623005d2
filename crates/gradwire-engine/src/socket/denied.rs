//! Under the filter of a sandbox that refuses a system call, as custom profiles of containers do: everything works by other calls, and sleeps.

use super::options::{bind, BindOptions};
use super::{PathSockets, RawAddress};
use crate::{Engine, EngineConfig, JoinError, PendingGroup};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);

/// A system call, and the error number that it fails with.
type Denied = (libc::c_long, i32);
/// Where the filter finds the third argument: behind call, architecture, instruction pointer and two arguments.
const COUNT_OF_MESSAGES: u32 = 32;

/// Runs `work` on a thread for which, and for those that it starts, the calls fail. `but_none`: the last one works with no messages.
fn without<T: Send>(calls: &[Denied], but_none: bool, work: impl FnOnce() -> T + Send) -> T {
    let filter = |code: u32, (jt, jf): (u8, u8), k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let (load, compare) =
        (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K);
    let mut program = vec![filter(load, (0, 0), 0)];
    for (place, (call, errno)) in calls.iter().enumerate() {
        let looks = but_none && place + 1 == calls.len();
        program.push(filter(compare, (0, if looks { 3 } else { 1 }), *call as u32));
        if looks {
            program.push(filter(load, (0, 0), COUNT_OF_MESSAGES));
            program.push(filter(compare, (1, 0), 0));
        }
        program.push(filter(libc::BPF_RET | libc::BPF_K, (0, 0), libc::SECCOMP_RET_ERRNO | *errno as u32));
    }
    program.push(filter(libc::BPF_RET | libc::BPF_K, (0, 0), libc::SECCOMP_RET_ALLOW));
    let filtered = move || {
        let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        // SAFETY: the program is live; both hold for this thread and its children alone.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            let mode = libc::SECCOMP_MODE_FILTER;
            assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, std::ptr::from_ref(&filter)), 0);
        }
        work()
    };
    std::thread::scope(|scope| scope.spawn(filtered).join().expect("it works without"))
}

/// Two engines that are started here try to meet.
fn meet(timeout: Duration) -> (bool, Vec<Result<(), JoinError>>) {
    let config = EngineConfig { network_threads: Some(1), ..EngineConfig::default() };
    let engines = [0, 1].map(|_| Engine::start(config.clone()).expect("it starts"));
    let pending = [0, 1].map(|rank| engines[rank as usize].new_group(rank, 2, "g").expect("valid"));
    let records: Vec<String> = pending.iter().map(PendingGroup::record).collect();
    let joined = std::thread::scope(|scope| {
        let join = |group: PendingGroup| {
            let records = &records;
            scope.spawn(move || group.join(records, Some(timeout)))
        };
        // Held until both have it, or the other would see this one leave.
        let joined = pending.map(join).map(|thread| thread.join().expect("no panic"));
        joined.map(|outcome| outcome.map(drop))
    });
    (engines[0].features().batched_calls, joined.into())
}

#[test]
fn ranks_meet_where_calls_for_several_messages_are_refused() {
    for call in [(libc::SYS_recvmmsg, libc::ENOSYS), (libc::SYS_sendmmsg, libc::EPERM)] {
        let (is_batched, joined) = without(&[call], false, || meet(PATIENCE));
        assert!(!is_batched, "{call:?}");
        assert_eq!(joined, [Ok(()), Ok(())], "{call:?}");
    }
    assert!(meet(PATIENCE).0, "where nothing refuses them they are used");
}

#[test]
fn who_is_let_send_nothing_is_told_so() {
    let call = (libc::SYS_sendmmsg, libc::EPERM);
    let (is_batched, joined) = without(&[call], true, || meet(Duration::from_millis(300)));
    assert!(is_batched, "of no messages it works, as where a firewall refuses each");
    for outcome in joined {
        let text = outcome.expect_err("nothing is sent").to_string();
        assert!(
            text.contains("the system refused all that was to be sent to them: Operation not permitted"),
            "{text}"
        );
    }
}

#[test]
fn a_thread_sleeps_where_the_exact_call_to_wait_is_refused() {
    let pause = Duration::from_millis(50);
    let slept = without(&[(libc::SYS_ppoll, libc::ENOSYS)], false, || {
        let address: IpAddr = Ipv4Addr::LOCALHOST.into();
        let options = super::tests::at(address);
        let bound = PathSockets::bind(&options, 1).expect("loopback exists");
        let mut sockets = PathSockets::new(bound.first.socket, bound.further, &[]);
        let begun = Instant::now();
        assert!(!sockets.poll(-1, Some(pause)));
        begun.elapsed()
    });
    assert!(slept >= pause, "{slept:?}");
}

#[test]
fn what_leaves_a_socket_of_all_addresses_has_the_one_that_was_chosen() {
    // A further address of the loopback interface stands for a card's; what goes to an address that is not on that interface has it.
    let found = crate::interfaces::list().expect("there are interfaces");
    let Some(card) = found.iter().find(|i| !i.loopback && i.address.is_ipv4()) else { return };
    let options = |home| BindOptions { home, ..super::tests::at(Ipv4Addr::UNSPECIFIED.into()) };
    let other: IpAddr = "127.0.0.2".parse().expect("an address");
    let mut receiver = bind(&options(None)).expect("a port is free");
    let mut sender = bind(&options(Some(other))).expect("a port is free");
    let mut counts = super::SendCounts::default();
    let mut batch = super::Batch::new();
    for to in [card.address, Ipv4Addr::LOCALHOST.into()] {
        let to = RawAddress::new(SocketAddr::new(to, receiver.port));
        // SAFETY: no payload.
        unsafe { batch.push((to, 0), &[1; 24], &[]) };
    }
    assert_eq!(sender.socket.send(&mut batch, &mut counts), super::SendOutcome::Sent);
    let (mut from, mut stats, begun) = (Vec::new(), crate::EngineStats::default(), Instant::now());
    while from.len() < 2 && begun.elapsed() < PATIENCE {
        receiver.socket.receive(&mut stats, &mut |mut message| {
            from.extend(message.datagrams().filter_map(|datagram| datagram.from.to_socket_addr()));
        });
    }
    let ips: Vec<IpAddr> = from.iter().map(SocketAddr::ip).collect();
    assert_eq!(ips, [other, Ipv4Addr::LOCALHOST.into()], "{counts:?}");
}
