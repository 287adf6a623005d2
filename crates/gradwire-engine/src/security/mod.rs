//! Authenticated encryption of everything that ranks tell each other (docs/security.md).
//!
//! It stands between the group's state machine and the sockets: a datagram is sealed while it is copied into the batch, or by the
//! thread that sends, and opened in the receive buffer before anything else looks at it. What does not open changes nothing but a counter.
//! The layers below and above know only that 16 bytes of each datagram stay free.

mod agree;
mod channel;
mod keys;
mod numbers;
mod open;
mod record;
mod replay;
mod seal;
mod secret;

pub(crate) use agree::{agree, Agreed};
pub(crate) use channel::Channel;
pub(crate) use keys::Cipher;
pub(crate) use open::Refusal;
pub(crate) use record::{open_records, seal_record, Hex, PublishedSecret};
pub use secret::{JobSecret, SECRET_BYTES_MIN};

/// Whether datagrams are sealed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Security {
    /// Unless all ranks of the group are in one network namespace and meet over loopback.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

impl Security {
    /// As records and settings write it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::On => "on",
            Self::Off => "off",
        }
    }
}

/// Bytes that a rank draws for each of its groups: with them no two groups ever have a key in common.
pub(crate) const RANDOM_BYTES: usize = 32;

/// Fills bytes that nobody can guess.
pub(crate) fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let random = ring::rand::SystemRandom::new();
    // The kernel's generator fails only where it does not exist, and then nothing here could be kept secret.
    ring::rand::SecureRandom::fill(&random, &mut bytes).expect("the kernel has a random number generator");
    bytes
}
