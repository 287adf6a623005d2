//! Where a process is, as its record says it.

use crate::security::random_bytes;
use std::sync::OnceLock;

/// Where a process is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) host: String,
    pub(crate) boot_id: String,
    pub(crate) network_namespace: u64,
}

impl Place {
    /// This process's.
    pub(crate) fn here() -> Self {
        let read = |path| std::fs::read_to_string(path).map(|s: String| s.trim().to_owned());
        let host = read("/proc/sys/kernel/hostname").unwrap_or_else(|_| "unknown".to_owned());
        let boot_id = read("/proc/sys/kernel/random/boot_id").unwrap_or_else(|_| unknown_boot());
        let network_namespace = std::fs::metadata("/proc/self/ns/net")
            .map_or(0, |metadata| std::os::unix::fs::MetadataExt::ino(&metadata));
        Self { host, boot_id, network_namespace }
    }
}

/// Whether a record's boot id is one that was made for want of the kernel's.
pub(crate) fn is_unknown_boot(boot_id: &str) -> bool {
    boot_id.starts_with(UNKNOWN_BOOT)
}

/// Without a boot id nobody counts as local: the safe direction. Process ids repeat, on other hosts and in other containers.
fn unknown_boot() -> String {
    static RANDOM: OnceLock<u128> = OnceLock::new();
    let random = RANDOM.get_or_init(|| u128::from_ne_bytes(random_bytes()));
    format!("{UNKNOWN_BOOT}{}-{random:032x}", std::process::id())
}

/// No kernel's boot id begins so: they are of hexadecimal digits. `gradwire doctor` looks for it, too.
pub const UNKNOWN_BOOT: &str = "pid-";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_a_boot_id_is_like_no_other_and_the_same_for_all_threads() {
        assert_eq!(unknown_boot(), unknown_boot());
        assert!(unknown_boot().len() > 36);
        assert!(is_unknown_boot(&unknown_boot()) && !is_unknown_boot(&Place::here().boot_id));
    }
}
