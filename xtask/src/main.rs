//! The repository's checks of itself: `cargo xtask check`, which `make check` calls.
//!
//! What is only asked for in prose drifts, so the rules of CONTRIBUTING.md that no lint knows are tested here:
//! claims of papers have code and a test ([`claims`]), the sans-IO crates have no std and files stay readable
//! ([`layout`]), links between documents lead somewhere ([`links`]), versions agree ([`versions`]). Every check
//! returns its complaints as lines of `path: what is wrong`; none stops at the first.

mod claims;
mod layout;
mod links;
mod tree;
mod unsafety;
mod versions;

use std::process::ExitCode;

use tree::Tree;

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() != Some("check") {
        eprintln!("usage: cargo xtask check");
        return ExitCode::from(2);
    }
    let tree = match Tree::read(&root()) {
        Ok(tree) => tree,
        Err(error) => {
            eprintln!("cannot read the repository: {error}");
            return ExitCode::from(2);
        }
    };
    let complaints = check(&tree);
    for complaint in &complaints {
        eprintln!("{complaint}");
    }
    println!("xtask: {} files, {} complaints", tree.files.len(), complaints.len());
    if complaints.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// All complaints about `tree`, in the order of the checks.
fn check(tree: &Tree) -> Vec<String> {
    [
        claims::check(tree),
        layout::check(tree),
        links::check(tree),
        unsafety::check(tree),
        versions::check(tree),
    ]
    .concat()
}

/// The repository's root: the parent of this crate's folder.
fn root() -> std::path::PathBuf {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}
