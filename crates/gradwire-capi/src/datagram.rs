//! What a datagram is, for whoever looks at it from outside.

use crate::{GRADWIRE_INVALID, GRADWIRE_NULL, GRADWIRE_OK};
use gradwire_core::wire::{Header, Kind, Reader, StatusBody, TransferState};
use gradwire_core::Flags;

/// See `include/gradwire.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GradwireDatagram {
    /// Its transfer: a name that is unique between two ranks and two directions.
    pub transfer: u32,
    /// The number of its call.
    pub call: u32,
    /// Which of the call's transfers between the two; over parameter servers 0 is a push and 1 a pull.
    pub index: u32,
    /// The path that its sender chose.
    pub path: u32,
    /// 1: it may be the first of its transfer and says what that is.
    pub opens: u32,
    /// 1: the receiver says that the transfer is over.
    pub closes: u32,
}

impl GradwireDatagram {
    fn of(bytes: &[u8]) -> Option<Self> {
        let (header, body) = Header::decode(bytes).ok()?;
        let opens = header.kind == Kind::Data && header.flags.contains(Flags::OPENING);
        let closes = header.kind == Kind::Status
            && StatusBody::decode(&mut Reader::new(body))
                .is_ok_and(|body| body.state == TransferState::Closed);
        Some(Self {
            transfer: header.transfer.0,
            call: header.transfer.op(),
            index: header.transfer.index(),
            path: u32::from(header.path.0),
            opens: opens.into(),
            closes: closes.into(),
        })
    }
}

/// Reads a datagram's header. `GRADWIRE_INVALID`: it is none.
///
/// # Safety
/// `bytes` are `length` bytes to read, and `datagram` can be written; either may be null.
#[no_mangle]
pub unsafe extern "C" fn gradwire_describe(
    bytes: *const u8,
    length: usize,
    datagram: *mut GradwireDatagram,
) -> i32 {
    if bytes.is_null() || datagram.is_null() {
        return GRADWIRE_NULL;
    }
    // SAFETY: not null, and the caller promises the length.
    let found = GradwireDatagram::of(unsafe { std::slice::from_raw_parts(bytes, length) });
    let Some(found) = found else { return GRADWIRE_INVALID };
    // SAFETY: not null, and the caller promises that it can be written.
    unsafe { datagram.write(found) };
    GRADWIRE_OK
}
