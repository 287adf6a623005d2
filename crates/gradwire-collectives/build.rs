//! Tells the code whether the compiler can make functions for AVX-512, which stable Rust can from 1.89 on. Older ones, down to
//! the least supported version, leave that variant of a kernel out.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(has_avx512)");
    if minor_version().is_some_and(|minor| minor >= 89) {
        println!("cargo::rustc-cfg=has_avx512");
    }
}

/// The `89` of `rustc 1.89.0 (...)`.
#[allow(clippy::disallowed_methods)] // Cargo names the compiler so.
fn minor_version() -> Option<u32> {
    let output = Command::new(std::env::var_os("RUSTC")?).arg("--version").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.strip_prefix("rustc 1.")?.split('.').next()?.parse().ok()
}
