//! The sending end: segmentation offload (one system call, up to 64 datagrams, straight from the tensors) and batched calls.
//!
//! A run of datagrams to one peer of equal size (the last may be shorter, and be an acknowledgement that preceded them) is one kernel message; several messages go
//! out in one `sendmmsg`. All arrays are allocated once; pointers into them are written anew before each call.

use super::super::batch::{Batch, Slot, DATAGRAMS_MAX, DATAGRAM_BYTES_MAX, SEGMENTS_MAX};
use super::super::{is_would_block, Outlet, SendCounts, SendOutcome};
use crate::interfaces::Source;
use crate::OsError;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

/// Room for the control messages of one sent message: segment size and traffic class, 24 bytes each, and the source.
const SEND_CONTROL_WORDS: usize = 6 + SOURCE_WORDS;
/// Room for the control message that names a source: 40 bytes for IPv6, 32 for IPv4.
const SOURCE_WORDS: usize = 5;

/// See the module's documentation.
pub(super) struct LinuxOutlet {
    socket: Arc<UdpSocket>,
    /// Segmentation offload is in use.
    pub(super) gso: bool,
    /// Datagrams may have a traffic class other than the socket's.
    pub(super) traffic_class: bool,
    /// The socket's.
    octet: u8,
    arrays: SendArrays,
}

/// A control message that names the local address and the interface, and its words.
///
/// It works without privilege, for each datagram, on the one socket, and together with segmentation. A socket for each
/// interface (`SO_BINDTODEVICE`) lost: which one leads to a peer is found out for each peer, and a socket that is bound to
/// an interface cannot be taken off it again without privilege.
type SourceControl = ([u64; SOURCE_WORDS], usize);

// SAFETY: the raw pointers inside point into this value's own heap memory, are written anew before each system call,
// and are not used between calls.
unsafe impl Send for LinuxOutlet {}

struct SendArrays {
    pieces: Vec<libc::iovec>,
    messages: Vec<libc::mmsghdr>,
    /// Datagrams in each message.
    counts: Vec<usize>,
    controls: Vec<[u64; SEND_CONTROL_WORDS]>,
    sources: Vec<SourceControl>,
    /// Of what has none of them and does not stay on this host.
    home: Option<SourceControl>,
}

impl LinuxOutlet {
    pub(super) fn new(
        socket: &Arc<UdpSocket>,
        (gso, traffic_class): (bool, bool),
        octet: u8,
        (sources, home): (&[Source], Option<IpAddr>),
    ) -> Self {
        let sources = sources.iter().map(source_control).collect();
        // The kernel routes, by the address if its rules say so.
        let home = home.map(|address| source_control(&Source { address, bits: 0, interface: 0 }));
        Self { socket: Arc::clone(socket), gso, traffic_class, octet, arrays: SendArrays::new(sources, home) }
    }

    /// Another one of the same socket, with arrays of its own.
    pub(super) fn another(&self) -> Self {
        let arrays = SendArrays::new(self.arrays.sources.clone(), self.arrays.home);
        Self { socket: Arc::clone(&self.socket), arrays, ..*self }
    }

    /// Describes the batch from datagram `from` on to the kernel.
    pub(super) fn build(&mut self, batch: &Batch, from: usize) {
        let octet = self.traffic_class.then_some(self.octet);
        self.arrays.build(batch, from, self.gso, octet);
    }

    /// Hands over `messages[from..]`; returns how many the kernel took.
    pub(super) fn send_messages(&mut self, from: usize) -> Result<usize, i32> {
        let messages = &mut self.arrays.messages[from..];
        // SAFETY: every message points to live arrays of `self.arrays` and to parts of the batch, which lives on.
        let sent = unsafe {
            libc::sendmmsg(
                self.socket.as_raw_fd(),
                messages.as_mut_ptr(),
                messages.len() as u32,
                libc::MSG_DONTWAIT,
            )
        };
        usize::try_from(sent).map_err(|_| OsError::last().0)
    }
}

impl Outlet for LinuxOutlet {
    fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    fn send(&mut self, batch: &mut Batch, counts: &mut SendCounts) -> SendOutcome {
        self.build(batch, 0);
        let had_gso = self.gso;
        let mut message = 0;
        let mut datagram = 0;
        while message < self.arrays.messages.len() {
            counts.calls += 1;
            match self.send_messages(message) {
                Ok(taken) => {
                    for _ in 0..taken {
                        let count = self.arrays.counts[message];
                        let slots = &batch.slots()[datagram..datagram + count];
                        counts.bytes += slots.iter().map(|slot| slot.bytes() as u64).sum::<u64>();
                        counts.datagrams += count as u64;
                        datagram += count;
                        message += 1;
                    }
                }
                Err(libc::EINTR) => {}
                Err(errno) if is_would_block(errno) => {
                    counts.blocked += 1;
                    batch.keep_from(datagram);
                    return SendOutcome::Blocked;
                }
                // A device without checksum offload, or a datagram larger than the path: without segmentation offload
                // the kernel either takes it or says why.
                Err(errno @ (libc::EIO | libc::EINVAL | libc::EMSGSIZE))
                    if self.gso
                        && self.arrays.counts[message] > 1
                        && !names_source(batch, datagram, errno) =>
                {
                    self.gso = false;
                    self.build(batch, datagram);
                    message = 0;
                }
                Err(errno) => {
                    // Whatever it is, the datagrams did not leave: lost packets. Where one alone is refused too, as it does not fit the device
                    // or the address that it leaves by has gone, segmentation offload was not what the kernel refused.
                    self.gso |= had_gso && matches!(errno, libc::EMSGSIZE | libc::EINVAL);
                    let count = self.arrays.counts[message];
                    counts.refuse(count, errno);
                    datagram += count;
                    message += 1;
                }
            }
        }
        batch.clear();
        SendOutcome::Sent
    }
}

impl SendArrays {
    fn new(sources: Vec<SourceControl>, home: Option<SourceControl>) -> Self {
        Self {
            sources,
            home,
            pieces: Vec::with_capacity(2 * DATAGRAMS_MAX),
            messages: Vec::with_capacity(DATAGRAMS_MAX),
            counts: Vec::with_capacity(DATAGRAMS_MAX),
            controls: Vec::with_capacity(DATAGRAMS_MAX),
        }
    }

    /// Describes the batch from datagram `from` on. Datagrams whose traffic class is not `octet` get their own; `None`:
    /// none does.
    fn build(&mut self, batch: &Batch, from: usize, gso: bool, octet: Option<u8>) {
        self.pieces.clear();
        self.messages.clear();
        self.counts.clear();
        self.controls.clear();
        let mut start = from;
        while start < batch.slots().len() {
            let (count, rides) = if gso { message_at(batch, start) } else { (1, false) };
            let (small, run) = batch.slots()[start..start + count].split_at(usize::from(rides));
            self.add_message(batch, (run, small), octet);
            start += count;
        }
    }

    /// Adds a run of datagrams, and behind it a small one, as one message. The arrays have their full capacity from the start and a
    /// batch is bounded, so nothing moves and pointers into them hold until the next `build`.
    fn add_message(&mut self, batch: &Batch, (slots, small): (&[Slot], &[Slot]), octet: Option<u8>) {
        let count = slots.len() + small.len();
        let first_piece = self.pieces.len();
        for slot in slots.iter().chain(small) {
            let (head, payload) = batch.parts(slot);
            for part in [head, payload] {
                if !part.is_empty() {
                    add_piece(&mut self.pieces, first_piece, part);
                }
            }
        }
        let own_class = octet.is_some_and(|octet| octet != slots[0].octet);
        let source = match slots[0].to.source() {
            Some(place) => self.sources.get(place),
            None => self.home.as_ref().filter(|_| !slots[0].to.is_loopback()),
        };
        let (control, control_bytes) = control(&slots[0], count > 1, own_class, source);
        self.controls.push(control);
        // SAFETY: an all-zero `mmsghdr` is a valid value (null pointers, zero lengths).
        let mut message: libc::mmsghdr = unsafe { std::mem::zeroed() };
        message.msg_hdr.msg_name = slots[0].to.as_ptr().cast_mut().cast();
        message.msg_hdr.msg_namelen = slots[0].to.len();
        message.msg_hdr.msg_iov = self.pieces[first_piece..].as_mut_ptr();
        message.msg_hdr.msg_iovlen = self.pieces.len() - first_piece;
        if control_bytes > 0 {
            let control = self.controls.last_mut().map_or(std::ptr::null_mut(), |c| c.as_mut_ptr());
            message.msg_hdr.msg_control = control.cast();
            message.msg_hdr.msg_controllen = control_bytes;
        }
        self.messages.push(message);
        self.counts.push(count);
    }
}

/// Adds bytes to the pieces of a message, which begin with `first`. Copied datagrams, sealed or not, lie behind each other, and the kernel
/// copies them as one piece.
fn add_piece(pieces: &mut Vec<libc::iovec>, first: usize, part: &[u8]) {
    match pieces[first..].last_mut() {
        Some(last) if last.iov_base.cast::<u8>().wrapping_add(last.iov_len).cast_const() == part.as_ptr() => {
            last.iov_len += part.len();
        }
        _ => pieces.push(libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() }),
    }
}

/// Whether a refusal is about the source: its address is gone from the host.
fn names_source(batch: &Batch, datagram: usize, errno: i32) -> bool {
    errno == libc::EINVAL && batch.slots()[datagram].to.source().is_some()
}

/// What the message that begins at `start` holds: how many datagrams, and whether the first of them is a small one that may go behind the
/// others and does: crossing the layers and devices alone an acknowledgement costs them as much as the data of its turn.
fn message_at(batch: &Batch, start: usize) -> (usize, bool) {
    let alone = run_length(batch, start);
    let slots = &batch.slots()[start..];
    let (small, Some(first)) = (&slots[0], slots.get(1)) else { return (alone, false) };
    if alone > 1
        || !small.may_follow
        || small.bytes() >= first.bytes()
        || small.to != first.to
        || small.octet != first.octet
    {
        return (alone, false);
    }
    let run = run_length(batch, start + 1);
    let bytes = run * first.bytes();
    let is_whole = slots[run].bytes() == first.bytes();
    let fits = run < SEGMENTS_MAX && bytes + small.bytes() <= DATAGRAM_BYTES_MAX;
    match run > 1 && is_whole && fits && bytes > DATAGRAM_BYTES_MAX / 2 {
        true => (run + 1, true),
        false => (alone, false),
    }
}

/// Number of datagrams from `start` on that one message can hold: one peer, one traffic class, one size, a shorter one
/// ends it.
fn run_length(batch: &Batch, start: usize) -> usize {
    let slots = &batch.slots()[start..];
    let size = slots[0].bytes();
    let mut total = size;
    let mut count = 1;
    for slot in &slots[1..slots.len().min(SEGMENTS_MAX)] {
        let bytes = slot.bytes();
        let is_alike = slot.to == slots[0].to && slot.octet == slots[0].octet;
        if bytes > size || bytes == 0 || total + bytes > DATAGRAM_BYTES_MAX || !is_alike {
            break;
        }
        total += bytes;
        count += 1;
        if bytes < size {
            break;
        }
    }
    count
}

/// The control messages of a message of datagrams like `slot`: their size if they are several, their traffic class if it is
/// not the socket's, their source if they have one. Returns how many bytes of it count.
fn control(
    slot: &Slot,
    several: bool,
    own_class: bool,
    source: Option<&SourceControl>,
) -> ([u64; SEND_CONTROL_WORDS], usize) {
    let mut control = [0_u64; SEND_CONTROL_WORDS];
    let mut words = 0;
    if several {
        let bytes = slot.bytes() as u16;
        // SAFETY: three words are aligned and as large as the header and an aligned u16 (CMSG_SPACE(2) = 24 on 64 bit).
        unsafe { put(control.as_mut_ptr(), (libc::SOL_UDP, libc::UDP_SEGMENT), bytes) };
        words += 3;
    }
    if own_class {
        let kind = match slot.to.is_ipv4() {
            true => (libc::IPPROTO_IP, libc::IP_TOS),
            false => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
        };
        // SAFETY: as above, behind what is there already (CMSG_SPACE(4) = 24), so at most at word three of eleven.
        unsafe { put(control.as_mut_ptr().add(words), kind, i32::from(slot.octet)) };
        words += 3;
    }
    if let Some((source, length)) = source {
        control[words..words + length].copy_from_slice(&source[..*length]);
        words += length;
    }
    (control, words * size_of::<u64>())
}

fn source_control(source: &Source) -> SourceControl {
    let mut control = [0_u64; SOURCE_WORDS];
    match source.address {
        IpAddr::V4(address) => {
            let ipi_spec_dst = libc::in_addr { s_addr: u32::from(address).to_be() };
            let ipi_ifindex = source.interface as i32;
            let value = libc::in_pktinfo { ipi_ifindex, ipi_spec_dst, ipi_addr: libc::in_addr { s_addr: 0 } };
            // SAFETY: five words are aligned and hold the header and twelve bytes (CMSG_SPACE(12) = 32).
            unsafe { put(control.as_mut_ptr(), (libc::IPPROTO_IP, libc::IP_PKTINFO), value) };
            (control, 4)
        }
        IpAddr::V6(address) => {
            let ipi6_addr = libc::in6_addr { s6_addr: address.octets() };
            let value = libc::in6_pktinfo { ipi6_addr, ipi6_ifindex: source.interface };
            // SAFETY: five words are aligned and hold the header and twenty bytes (CMSG_SPACE(20) = 40).
            unsafe { put(control.as_mut_ptr(), (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO), value) };
            (control, 5)
        }
    }
}

/// Writes one control message.
///
/// # Safety
/// `at` is aligned for a header and has room for it and the value.
unsafe fn put<T>(at: *mut u64, (level, kind): (i32, i32), value: T) {
    // SAFETY: the caller's promise.
    unsafe {
        let header = at.cast::<libc::cmsghdr>();
        (*header).cmsg_level = level;
        (*header).cmsg_type = kind;
        (*header).cmsg_len = libc::CMSG_LEN(size_of::<T>() as u32) as usize;
        libc::CMSG_DATA(header).cast::<T>().write_unaligned(value);
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::RawAddress;
    use super::*;

    #[test]
    fn an_acknowledgement_goes_behind_the_full_message_that_follows_it_to_the_same_peer() {
        let payload = [7; 1_384];
        let (to, other) = ((RawAddress::EMPTY, 0), (RawAddress::EMPTY, 4));
        let batch_of = |ack: (RawAddress, u8), data: usize, may_follow: bool| {
            let mut batch = Batch::new();
            // SAFETY: `payload` outlives the batch's last use.
            unsafe {
                batch.push(ack, &[1; 90], &[]);
                if may_follow {
                    batch.let_last_follow();
                }
                (0..data).for_each(|_| batch.push(to, &[2; 24], &payload));
            }
            batch
        };
        let mut arrays = SendArrays::new(Vec::new(), None);
        let mut built = |batch: &Batch, gso: bool| {
            arrays.build(batch, 0, gso, None);
            let first = arrays.pieces.first().map(|piece| piece.iov_len);
            (arrays.counts.clone(), first, arrays.pieces.last().map(|piece| piece.iov_len))
        };
        assert_eq!(built(&batch_of(to, 45, true), true), (vec![46], Some(24), Some(90)), "behind 45");
        assert_eq!(
            built(&batch_of(to, 50, true), true),
            (vec![47, 4], Some(24), Some(1_384)),
            "behind 46 of 50"
        );
        assert_eq!(
            built(&batch_of(to, 12, true), true),
            (vec![1, 12], Some(90), Some(1_384)),
            "no full message"
        );
        assert_eq!(
            built(&batch_of(other, 45, true), true),
            (vec![1, 45], Some(90), Some(1_384)),
            "another class"
        );
        assert_eq!(
            built(&batch_of(to, 45, false), true).0,
            [1, 45],
            "what may not follow, such as the end of a transfer"
        );
        assert_eq!(built(&batch_of(to, 0, true), true), (vec![1], Some(90), Some(90)));
        assert_eq!(built(&batch_of(to, 45, true), false).0.len(), 46, "without segmentation");
    }

    #[test]
    fn a_message_of_copied_datagrams_is_one_piece_and_of_others_two_for_each() {
        let payload = [7; 100];
        let to = (RawAddress::EMPTY, 0);
        let (mut copied, mut others) = (Batch::copying(), Batch::new());
        for number in 0..3 {
            for batch in [&mut copied, &mut others] {
                // SAFETY: `payload` outlives the batches' last use.
                unsafe { batch.push(to, &[number; 24], &payload) };
            }
        }
        let mut arrays = SendArrays::new(Vec::new(), None);
        for (batch, pieces) in [(&copied, 1), (&others, 6)] {
            arrays.build(batch, 0, true, None);
            let bytes: usize = arrays.pieces.iter().map(|piece| piece.iov_len).sum();
            let sent: usize = batch.slots().iter().map(Slot::bytes).sum();
            assert_eq!((arrays.counts.as_slice(), arrays.pieces.len(), bytes), (&[3][..], pieces, sent));
            arrays.build(batch, 0, false, None);
            assert_eq!((arrays.messages.len(), arrays.pieces.len()), (3, 3 * pieces.div_ceil(3)));
        }
    }
}
