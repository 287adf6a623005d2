//! The secret that all ranks of a job share, and nobody else.

use crate::EngineError;
use std::sync::Arc;
use zeroize::Zeroizing;

/// Least bytes of a job secret: 128 bits, if each of them is random.
pub const SECRET_BYTES_MIN: usize = 16;

/// A job secret. Clones share one copy, which is overwritten when the last one is dropped; it is never printed.
#[derive(Clone)]
pub struct JobSecret(Arc<Zeroizing<Vec<u8>>>);

impl JobSecret {
    /// Takes the secret's bytes.
    ///
    /// # Errors
    /// [`EngineError::ConfigInvalid`] when there are fewer than [`SECRET_BYTES_MIN`].
    pub fn new(bytes: Vec<u8>) -> Result<Self, EngineError> {
        let bytes = Zeroizing::new(bytes);
        if bytes.len() < SECRET_BYTES_MIN {
            let value = format!("{} bytes", bytes.len());
            let allowed = "at least 16 random bytes, such as those of `openssl rand -hex 32`";
            return Err(EngineError::ConfigInvalid { field: "secret", value, allowed });
        }
        Ok(Self(Arc::new(bytes)))
    }

    /// A fresh one.
    pub(crate) fn generate() -> Self {
        let bytes = Zeroizing::new(super::random_bytes::<32>());
        Self(Arc::new(Zeroizing::new(bytes.to_vec())))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl std::fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JobSecret(..)")
    }
}

/// For settings that are compared as a whole; nothing that comes from the network is compared with it.
impl PartialEq for JobSecret {
    fn eq(&self, other: &Self) -> bool {
        self.bytes() == other.bytes()
    }
}

impl Eq for JobSecret {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_secret_is_refused_and_none_is_printed() {
        let error = JobSecret::new(b"fifteen bytes!!".to_vec()).unwrap_err().to_string();
        assert!(error.contains("15 bytes") && error.contains("openssl rand"), "{error}");
        assert!(!error.contains("fifteen"), "{error}");
        let secret = JobSecret::new(b"sixteen bytes!!!".to_vec()).unwrap();
        assert!(!format!("{secret:?}").contains("sixteen"));
        assert_ne!(JobSecret::generate(), JobSecret::generate());
    }
}
