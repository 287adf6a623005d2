//! Records of ranks that have a job secret: what the store holds of them can be neither read nor made by others.

use super::keys::{record_key, PacketKey};
use super::{random_bytes, JobSecret, RANDOM_BYTES};
use crate::rendezvous::{Record, Version, FORMAT};
use crate::JoinError;
use gradwire_core::wire::VERSION;
use ring::aead::NONCE_LEN;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zeroize::Zeroizing;

/// What a rank with a job secret publishes. Versions, rank and mode are in clear, for errors that name them, and are believed only when
/// the rest opens, which has them too.
#[derive(Debug, Serialize, Deserialize)]
struct Envelope {
    format: u32,
    gradwire: String,
    protocol: u8,
    rank: u32,
    security: String,
    nonce: Hex<NONCE_LEN>,
    /// The record and the tag, hexadecimal.
    sealed: String,
}

/// What is looked at in a text before it is known which of the two it is.
#[derive(Deserialize)]
struct Glance {
    rank: Option<u32>,
    security: Option<String>,
    sealed: Option<String>,
}

/// The published form of a record.
pub(crate) fn seal_record(secret: &JobSecret, record: &Record) -> String {
    let nonce = random_bytes();
    let mut body = Zeroizing::new(record.to_json().into_bytes());
    let key = record_key(secret, VERSION, &record.group);
    let tag = key.seal_with(nonce, &header(&record.group, record.rank), &mut body);
    let sealed = to_hex(&body) + &to_hex(&tag);
    let security = record.security.clone();
    let envelope = Envelope {
        format: FORMAT,
        gradwire: record.gradwire.clone(),
        protocol: record.protocol,
        rank: record.rank,
        security,
        nonce: Hex(nonce),
        sealed,
    };
    serde_json::to_string(&envelope).expect("an envelope is plain data")
}

/// The records behind what ranks published, for a rank with the record `ours` and this secret, if it has one.
///
/// # Errors
/// [`JoinError::SettingsMismatch`] when the other rank has another version or mode, [`JoinError::SecretMismatch`] when a record does not
/// open or should be sealed, [`JoinError::RecordInvalid`].
pub(crate) fn open_records(
    ours: &Record,
    secret: Option<&JobSecret>,
    published: &[String],
) -> Result<Vec<String>, JoinError> {
    let key = secret.map(|secret| record_key(secret, VERSION, &ours.group));
    let open = |(position, text): (usize, &String)| open_record(ours, key.as_ref(), (position, text));
    published.iter().enumerate().map(open).collect()
}

fn open_record(
    ours: &Record,
    key: Option<&PacketKey>,
    (position, text): (usize, &String),
) -> Result<String, JoinError> {
    let invalid = |problem: String| JoinError::RecordInvalid { position, problem };
    // The key depends on the version: another one's record would seem to have another secret.
    Version::check(position, text)?;
    let glance: Glance = serde_json::from_str(text).map_err(|error| invalid(error.to_string()))?;
    let rank = glance.rank.unwrap_or(position as u32);
    let mismatch = |problem| JoinError::SecretMismatch { rank, problem };
    if let Some(theirs) = glance.security.filter(|theirs| *theirs != ours.security) {
        let ours = ours.security.clone();
        return Err(JoinError::SettingsMismatch { rank, field: "security", theirs, ours });
    }
    match (key, glance.sealed) {
        (None, None) => Ok(text.clone()),
        (None, Some(_)) => Err(mismatch("it has a job secret, and this rank has none")),
        (Some(_), None) => Err(mismatch("it has no job secret, and this rank has one")),
        (Some(key), Some(sealed)) => {
            let envelope: Envelope =
                serde_json::from_str(text).map_err(|error| invalid(error.to_string()))?;
            let mut sealed =
                from_hex(&sealed).ok_or_else(|| invalid("sealed is not hexadecimal".to_owned()))?;
            let opened = key.open_with(envelope.nonce.0, &header(&ours.group, rank), &mut sealed);
            let opened = opened.and_then(|record| String::from_utf8(record.to_vec()).ok());
            opened.ok_or_else(|| mismatch("it has another job secret, or another group, than this rank"))
        }
    }
}

/// What a sealed record is bound to, so that it cannot pass for another rank's.
fn header(group: &str, rank: u32) -> Vec<u8> {
    [&rank.to_le_bytes(), group.as_bytes()].concat()
}

/// Bytes as a hexadecimal text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hex<const N: usize>(pub(crate) [u8; N]);

impl<const N: usize> Serialize for Hex<N> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&to_hex(&self.0))
    }
}

impl<'de, const N: usize> Deserialize<'de> for Hex<N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = from_hex(&text).and_then(|bytes| bytes.try_into().ok());
        bytes
            .map(Self)
            .ok_or_else(|| serde::de::Error::custom(format!("{N} bytes in hexadecimal are expected")))
    }
}

/// A secret that rank 0 made because nobody configured one. Published in clear: whoever reads the store has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PublishedSecret(pub(crate) JobSecret);

impl Serialize for PublishedSecret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&Zeroizing::new(to_hex(self.0.bytes())))
    }
}

impl<'de> Deserialize<'de> for PublishedSecret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = Hex::<RANDOM_BYTES>::deserialize(deserializer)?;
        JobSecret::new(bytes.0.to_vec()).map(Self).map_err(serde::de::Error::custom)
    }
}

fn to_hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.map(|digit| char::from(DIGITS[usize::from(digit)])).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|pair| Some(digit(pair[0])? << 4 | digit(*pair.get(1)?)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::keys::tests::secret;
    use super::*;
    use crate::rendezvous::read_one;
    use crate::rendezvous::tests::records;

    fn problem(ours: &Record, key: Option<u8>, text: &str) -> JoinError {
        let key = key.map(secret);
        open_records(ours, key.as_ref(), &[text.to_owned()]).unwrap_err()
    }

    #[test]
    fn a_sealed_record_opens_with_its_secret_and_hides_everything_but_versions_rank_and_mode() {
        let all = records(2);
        let text = seal_record(&secret(1), &all[1]);
        let opened = open_records(&all[0], Some(&secret(1)), std::slice::from_ref(&text)).unwrap();
        assert_eq!(opened, [all[1].to_json()]);
        for hidden in ["10.0.0.1", "host", "connections", "random"] {
            assert!(!text.contains(hidden), "{hidden} in {text}");
        }
        assert_ne!(text, seal_record(&secret(1), &all[1]), "a fresh nonce each time");
    }

    #[test]
    fn what_does_not_open_names_the_rank() {
        let all = records(2);
        let text = seal_record(&secret(1), &all[1]);
        let clear = all[1].to_json();
        for (key, text, words) in [
            (Some(2), &text, "another job secret"),
            (None, &text, "this rank has none"),
            (Some(1), &clear, "it has no job secret"),
            (Some(1), &text.replace("\"rank\":1", "\"rank\":0"), "another job secret"),
        ] {
            let error = problem(&all[0], key, text);
            assert!(matches!(error, JoinError::SecretMismatch { .. }), "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
        let mut other = all[0].clone();
        other.group = "h".to_owned();
        assert!(matches!(problem(&other, Some(1), &text), JoinError::SecretMismatch { rank: 1, .. }));
    }

    #[test]
    fn no_changed_letter_passes() {
        let all = records(2);
        let text = seal_record(&secret(1), &all[1]);
        let at = text.find("sealed\":\"").unwrap() + 9;
        for place in (at..text.len() - 2).step_by(7) {
            let mut changed = text.clone().into_bytes();
            changed[place] = if changed[place] == b'0' { b'1' } else { b'0' };
            problem(&all[0], Some(1), &String::from_utf8(changed).unwrap());
        }
    }

    #[test]
    fn another_version_is_said_before_another_secret_and_is_not_believed_in_clear() {
        let all = records(2);
        let newer = Record { protocol: 2, ..all[1].clone() };
        for key in [Some(1), Some(2), None] {
            let error = problem(&all[0], key, &seal_record(&secret(1), &newer));
            let JoinError::SettingsMismatch { rank: 1, field: "protocol version", theirs, .. } = &error
            else {
                panic!("{error}");
            };
            assert_eq!(theirs, "2");
        }
        let claims = seal_record(&secret(1), &newer).replace("\"protocol\":2", "\"protocol\":1");
        let opened = open_records(&all[0], Some(&secret(1)), &[claims]).unwrap();
        let refused = read_one(&all[0], &opened[0]).unwrap_err();
        assert!(refused.to_string().contains("protocol version"), "{refused}");
    }

    #[test]
    fn another_mode_is_said_before_another_secret() {
        let mut all = records(2);
        all[1].security = "off".to_owned();
        for (key, text) in [(None, all[1].to_json()), (Some(1), all[1].to_json())] {
            let error = problem(&all[0], key, &text);
            assert!(
                matches!(error, JoinError::SettingsMismatch { rank: 1, field: "security", .. }),
                "{error}"
            );
        }
    }

    #[test]
    fn a_generated_secret_is_published_and_never_printed() {
        let published = PublishedSecret(secret(7));
        let text = serde_json::to_string(&published).unwrap();
        assert_eq!(text, format!("\"{}\"", "07".repeat(32)));
        assert_eq!(serde_json::from_str::<PublishedSecret>(&text).unwrap(), published);
        assert_eq!(format!("{published:?}"), "PublishedSecret(JobSecret(..))");
        for wrong in ["\"07\"", "\"\"", "7", &text.replace("0707", "07z7"), &text.replace("0707", "070")] {
            assert!(serde_json::from_str::<PublishedSecret>(wrong).is_err(), "{wrong}");
        }
    }
}
