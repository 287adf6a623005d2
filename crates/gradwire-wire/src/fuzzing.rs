//! Bodies of the fuzz targets, shared with the tests that replay the seed corpus. Not part of the interface.

use crate::{
    AckBody, AckPath, DecodeError, Header, HelloBody, Kind, Opening, Reader, StatusBody, Writer, HEADER_BYTES,
};

/// Parses `datagram` as a receiver would and writes every part again.
///
/// # Panics
/// When what was parsed is not what would be sent: two forms of the same packet would let a forger vary bytes
/// that nobody looks at.
pub fn parse_and_write_again(datagram: &[u8]) {
    let Ok((header, body)) = Header::decode(datagram) else { return };
    assert_eq!(&header.encode()[..], &datagram[..HEADER_BYTES]);
    // A body that does not parse is what the receiver drops; it must only not panic.
    let _ = body_again(header.kind, body);
}

/// Parses `bytes` behind their first one, which names the kind, as the body of a packet, and writes it again.
///
/// # Panics
/// As [`parse_and_write_again`].
pub fn parse_body(bytes: &[u8]) {
    let kinds = [Kind::Ack, Kind::Status, Kind::Probe, Kind::Hello];
    if let [kind, body @ ..] = bytes {
        _ = body_again(kinds[usize::from(kind % 4)], body);
    }
}

fn body_again(kind: Kind, body: &[u8]) -> Result<(), DecodeError> {
    let mut reader = Reader::new(body);
    let mut out = [0; 2_048];
    let mut writer = Writer::new(&mut out);
    match kind {
        Kind::Ack => return acks_again(body),
        Kind::Status => StatusBody::decode(&mut reader)?.encode(&mut writer),
        Kind::Probe | Kind::Data => Opening::decode(&mut reader)?.encode(&mut writer),
        Kind::Hello => HelloBody::decode(&mut reader)?.encode(&mut writer),
        Kind::Ping | Kind::Goodbye | Kind::Abort | Kind::Members => return Ok(()),
    }
    check(&mut writer, body, reader)
}

/// Each path is written alone: an acknowledgement may name up to 255 of them.
fn acks_again(body: &[u8]) -> Result<(), DecodeError> {
    let mut reader = Reader::new(body);
    let ack = AckBody::decode(&mut reader)?;
    let mut out = [0; 256];
    let mut writer = Writer::new(&mut out);
    ack.encode(&mut writer);
    check(&mut writer, body, reader)?;
    for _ in 0..ack.paths {
        let before = reader.rest();
        let path = AckPath::decode(&mut reader)?;
        let mut writer = Writer::new(&mut out);
        path.encode(&mut writer);
        check(&mut writer, before, reader)?;
    }
    Ok(())
}

/// What was written must be what was read: `before` without what `after` has left.
fn check(writer: &mut Writer<'_>, before: &[u8], after: Reader<'_>) -> Result<(), DecodeError> {
    let read = &before[..before.len() - after.rest().len()];
    assert_eq!(writer.written(), Some(read));
    Ok(())
}
