//! Bounds-checked little-endian cursors.

use thiserror::Error;

/// Why bytes are not a packet of this protocol. Counted by the receiver, never fatal.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// Fewer bytes than the layout needs.
    #[error("truncated: {needed} bytes needed, {have} left")]
    Truncated {
        /// Bytes that the next field needs.
        needed: usize,
        /// Bytes that were left.
        have: usize,
    },
    /// Another protocol version.
    #[error("version {0} is not spoken here")]
    Version(u8),
    /// Unknown packet kind.
    #[error("unknown packet kind {0}")]
    Kind(u8),
    /// A field holds a value outside its range.
    #[error("field {0} out of range")]
    Field(&'static str),
}

/// Reads little-endian fields from the front of a slice.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Starts at the front of `bytes`.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    /// What has not been read yet.
    #[must_use]
    pub const fn rest(self) -> &'a [u8] {
        self.bytes
    }

    /// Takes `count` bytes.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`] when fewer are left.
    pub fn take(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        let truncated = DecodeError::Truncated { needed: count, have: self.bytes.len() };
        let (head, tail) = self.bytes.split_at_checked(count).ok_or(truncated)?;
        self.bytes = tail;
        Ok(head)
    }

    /// Takes a fixed number of bytes.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`] when fewer are left.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    /// Takes a `u8`.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`].
    pub fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    /// Takes a `u16`.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`].
    pub fn u16(&mut self) -> Result<u16, DecodeError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    /// Takes a `u32`.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`].
    pub fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Takes a `u64`.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`].
    pub fn u64(&mut self) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array()?))
    }
}

/// Writes little-endian fields to the front of a slice. Writing past the end is remembered, not fatal:
/// [`Writer::finish`] then returns `None`, so that encoders need no check for each field.
#[derive(Debug)]
pub struct Writer<'a> {
    bytes: &'a mut [u8],
    at: usize,
    overflow: bool,
}

impl<'a> Writer<'a> {
    /// Starts at the front of `bytes`.
    #[must_use]
    pub fn new(bytes: &'a mut [u8]) -> Self {
        Self { bytes, at: 0, overflow: false }
    }

    /// Appends raw bytes.
    pub fn put(&mut self, src: &[u8]) -> &mut Self {
        match self.at.checked_add(src.len()).and_then(|end| self.bytes.get_mut(self.at..end)) {
            Some(dst) => {
                dst.copy_from_slice(src);
                self.at += src.len();
            }
            None => self.overflow = true,
        }
        self
    }

    /// Appends a `u8`.
    pub fn u8(&mut self, value: u8) -> &mut Self {
        self.put(&value.to_le_bytes())
    }

    /// Appends a `u16`.
    pub fn u16(&mut self, value: u16) -> &mut Self {
        self.put(&value.to_le_bytes())
    }

    /// Appends a `u32`.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.put(&value.to_le_bytes())
    }

    /// Appends a `u64`.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.put(&value.to_le_bytes())
    }

    /// The bytes written, or `None` when the slice was too short.
    #[must_use]
    pub fn written(&self) -> Option<&[u8]> {
        self.bytes.get(..self.finish()?)
    }

    /// Number of bytes written, or `None` when the slice was too short.
    #[must_use]
    pub fn finish(&self) -> Option<usize> {
        (!self.overflow).then_some(self.at)
    }
}
