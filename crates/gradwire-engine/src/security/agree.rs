//! What all ranks of a group decide alike about security, each from the records of all.

use super::keys::{Cipher, Direction, PairContext, PairEnd, PairSecret};
use super::{Channel, JobSecret, Security};
use crate::rendezvous::{Record, Roster};
use crate::JoinError;
use gradwire_core::HelloWords;

/// How a group's datagrams travel.
#[derive(Clone, Debug)]
pub(crate) enum Agreed {
    /// As they are, but for hellos: these prove the configured secret, if there is one. Records alone do not show that a peer lives which knows
    /// it: one of an earlier run opens as well.
    Clear { proves: Option<JobSecret> },
    /// Sealed.
    Sealed { cipher: Cipher, secret: JobSecret },
}

/// Decides. With mode `auto`, ranks that meet over loopback need no cipher: whoever can read that can read their memory. No
/// round trip is needed for it: the secret of rank 0 is in its record whether it will be used or not.
///
/// # Errors
/// [`JoinError::RecordInvalid`] when rank 0 published no secret although nobody configured one.
pub(crate) fn agree(
    mode: Security,
    configured: Option<&JobSecret>,
    roster: &Roster,
) -> Result<Agreed, JoinError> {
    match mode {
        Security::Off => return Ok(Agreed::Clear { proves: None }),
        Security::Auto if roster.is_local() => return Ok(Agreed::Clear { proves: configured.cloned() }),
        Security::Auto | Security::On => {}
    }
    let published = || roster.records[0].secret.as_ref().map(|published| &published.0);
    let Some(secret) = configured.or_else(published) else {
        let problem = "rank 0 published no secret, and none is configured".to_owned();
        return Err(JoinError::RecordInvalid { position: 0, problem });
    };
    let has_aes = roster.records.iter().all(|record| record.aes);
    let cipher = if has_aes { Cipher::Aes256Gcm } else { Cipher::ChaCha20Poly1305 };
    Ok(Agreed::Sealed { cipher, secret: secret.clone() })
}

impl Agreed {
    /// The channel between two ranks; for `numbers` see [`Channel::new`].
    pub(crate) fn channel(&self, ours: &Record, theirs: &Record, numbers: (u8, u32)) -> Option<Channel> {
        let Self::Sealed { cipher, secret } = self else { return None };
        let pair = pair_secret(secret, ours, theirs);
        Some(Channel::new(pair, *cipher, (ours.rank, theirs.rank), numbers))
    }

    /// What two ranks say to each other first, in a group with this fingerprint. What is sealed proves the secret by itself.
    pub(crate) fn hello(&self, ours: &Record, theirs: &Record, fingerprint: u64) -> HelloWords {
        let Self::Clear { proves: Some(secret) } = self else { return HelloWords::both(fingerprint) };
        let pair = pair_secret(secret, ours, theirs);
        let word =
            |from: &Record, to: &Record| pair.hello_word(Direction::from_to(from.rank, to.rank), fingerprint);
        HelloWords { says: word(ours, theirs), expects: word(theirs, ours) }
    }

    /// Name of the cipher.
    pub(crate) fn cipher_name(&self) -> Option<&'static str> {
        match self {
            Self::Clear { .. } => None,
            Self::Sealed { cipher, .. } => Some(cipher.name()),
        }
    }
}

fn pair_secret(secret: &JobSecret, ours: &Record, theirs: &Record) -> PairSecret {
    let (low, high) = if ours.rank < theirs.rank { (ours, theirs) } else { (theirs, ours) };
    let end = |of: &Record, other: &Record| PairEnd {
        rank: of.rank,
        connection: of.connections.get(other.rank as usize).copied().unwrap_or(0),
        random: of.random.0,
    };
    let ends = [end(low, high), end(high, low)];
    PairSecret::derive(secret, &PairContext { protocol: ours.protocol, group: &ours.group, ends })
}

#[cfg(test)]
mod tests {
    use super::super::keys::tests::secret;
    use super::super::PublishedSecret;
    use super::*;
    use crate::handle::lock;
    use crate::rendezvous::tests::records;
    use gradwire_core::Timestamp;

    fn decide(mode: Security, configured: Option<&JobSecret>, all: &[Record]) -> Result<Agreed, JoinError> {
        let published: Vec<String> = all.iter().map(Record::to_json).collect();
        agree(mode, configured, &Roster::new(&all[0], &published).unwrap())
    }

    fn used(agreed: Result<Agreed, JoinError>) -> Option<(Cipher, JobSecret)> {
        match agreed.unwrap() {
            Agreed::Clear { .. } => None,
            Agreed::Sealed { cipher, secret } => Some((cipher, secret)),
        }
    }

    #[test]
    fn auto_seals_exactly_when_somebody_is_remote() {
        let mut all = records(3);
        assert_eq!(used(decide(Security::Auto, Some(&secret(1)), &all)), None);
        assert!(used(decide(Security::On, Some(&secret(1)), &all)).is_some());
        all[1].network_namespace += 1;
        assert!(used(decide(Security::Auto, Some(&secret(1)), &all)).is_some());
        assert_eq!(used(decide(Security::Off, Some(&secret(1)), &all)), None);
        all[1].network_namespace -= 1;
        all[2].loopback = false;
        assert!(used(decide(Security::Auto, Some(&secret(1)), &all)).is_some(), "it meets no loopback");
    }

    #[test]
    fn the_configured_secret_goes_before_that_of_rank_0() {
        let mut all = records(2);
        assert!(decide(Security::On, None, &all).is_err());
        all[0].secret = Some(PublishedSecret(secret(9)));
        assert_eq!(used(decide(Security::On, None, &all)).unwrap().1, secret(9));
        assert_eq!(used(decide(Security::On, Some(&secret(1)), &all)).unwrap().1, secret(1));
    }

    #[test]
    fn one_rank_without_aes_decides_for_all() {
        let mut all = records(3);
        let cipher = |all: &[Record]| used(decide(Security::On, Some(&secret(1)), all)).unwrap().0;
        assert_eq!(cipher(&all), Cipher::Aes256Gcm);
        all[1].aes = false;
        assert_eq!(cipher(&all), Cipher::ChaCha20Poly1305);
    }

    #[test]
    fn hellos_of_a_local_group_prove_its_secret_by_words_that_neither_end_can_say_back() {
        let all = records(3);
        let words = |key: Option<u8>, (ours, theirs): (&Record, &Record), fingerprint| {
            let agreed = decide(Security::Auto, key.map(secret).as_ref(), &all).unwrap();
            agreed.hello(ours, theirs, fingerprint)
        };
        let of = |key, ours: usize, theirs: usize| words(Some(key), (&all[ours], &all[theirs]), 7);
        let (up, down) = (of(1, 0, 2), of(1, 2, 0));
        assert_eq!((up.says, up.expects), (down.expects, down.says));
        let changed = |change: fn(&mut Record)| {
            let mut later = all[2].clone();
            change(&mut later);
            words(Some(1), (&all[0], &later), 7)
        };
        let others = [
            of(2, 0, 2),
            of(1, 0, 1),
            of(1, 1, 2),
            words(Some(1), (&all[0], &all[2]), 8),
            changed(|record| record.random.0[0] ^= 1),
            changed(|record| record.connections[0] += 1),
            HelloWords::both(7),
        ];
        let mut distinct: Vec<u64> =
            others.iter().chain([&up]).flat_map(|words| [words.says, words.expects]).collect();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), 15, "of the last both are one");
        assert_eq!(words(None, (&all[0], &all[2]), 7), HelloWords::both(7), "nothing is configured");
        for mode in [Security::On, Security::Off] {
            let agreed = decide(mode, Some(&secret(1)), &all).unwrap();
            assert_eq!(agreed.hello(&all[0], &all[2], 7), HelloWords::both(7), "{mode:?}");
        }
        assert!(!format!("{up:?}").contains(&up.says.to_string()));
    }

    #[test]
    fn two_ranks_make_channels_that_understand_each_other() {
        let all = records(3);
        let agreed = decide(Security::On, Some(&secret(1)), &all).unwrap();
        let (up, mut down) =
            (agreed.channel(&all[0], &all[2], (1, 0)), agreed.channel(&all[2], &all[0], (1, 0)));
        let mut datagram = [0; 60];
        assert!(lock(up.as_ref().unwrap().sealer()).seal(&mut datagram));
        assert_eq!(
            down.as_mut().unwrap().open(Timestamp::ZERO, &mut datagram).map(|opened| opened.len()),
            Ok(44)
        );
        let other = agreed.channel(&all[1], &all[2], (1, 0)).unwrap();
        let mut datagram = [0; 60];
        assert!(lock(other.sealer()).seal(&mut datagram));
        assert!(down.unwrap().open(Timestamp::ZERO, &mut datagram).is_err());
    }
}
