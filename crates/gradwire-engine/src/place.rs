//! Where a process is, as its record says it.

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
        // Without a boot id nobody counts as local: the safe direction.
        let boot_id =
            read("/proc/sys/kernel/random/boot_id").unwrap_or_else(|_| format!("pid-{}", std::process::id()));
        let network_namespace = std::fs::metadata("/proc/self/ns/net")
            .map_or(0, |metadata| std::os::unix::fs::MetadataExt::ino(&metadata));
        Self { host, boot_id, network_namespace }
    }
}
