//! The shape of the sources: which crates may use std, and how long a file may grow.

use crate::tree::{File, Tree};

/// Crates in which std's sockets, clocks, threads and hash maps must not exist.
const NO_STD: [&str; 3] = ["crates/gradwire-wire", "crates/gradwire-core", "crates/gradwire-membership"];

/// A file that is longer is split.
const FILE_LINES_MAX: usize = 600;

/// Complaints about std in the lower layers and about files that nobody reads to the end.
pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let mut complaints: Vec<String> =
        NO_STD.iter().filter_map(|krate| no_std_complaint(tree, krate)).collect();
    let sources = tree.with_extension(".rs").chain(tree.with_extension(".py"));
    complaints.extend(sources.filter_map(length_complaint));
    complaints
}

/// The compiler keeps std out as long as the root says `#![no_std]` and brings std back for tests alone.
fn no_std_complaint(tree: &Tree, krate: &str) -> Option<String> {
    let path = format!("{krate}/src/lib.rs");
    let Some(file) = tree.file(&path) else {
        return Some(format!("{path}: missing"));
    };
    if !file.text.lines().any(|line| line == "#![no_std]") {
        return Some(format!("{path}: needs `#![no_std]`"));
    }
    let inside = format!("{krate}/src/");
    tree.with_extension(".rs").filter(|file| file.path.starts_with(&inside)).find_map(extern_std_complaint)
}

/// `extern crate std` outside of tests would undo `no_std`.
fn extern_std_complaint(file: &File) -> Option<String> {
    let mut before = "";
    for line in file.text.lines().map(str::trim) {
        if line.starts_with("extern crate std") && before != "#[cfg(test)]" {
            return Some(format!("{}: `extern crate std` needs `#[cfg(test)]` above it", file.path));
        }
        before = line;
    }
    None
}

fn length_complaint(file: &File) -> Option<String> {
    let lines = file.text.lines().count();
    (lines > FILE_LINES_MAX)
        .then(|| format!("{}: {lines} lines, split it (at most {FILE_LINES_MAX})", file.path))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIRE: &str = "crates/gradwire-wire/src/lib.rs";
    const CORE: &str = "crates/gradwire-core/src/lib.rs";
    const FINE: (&str, &str) = ("crates/gradwire-membership/src/lib.rs", "#![no_std]\n");

    #[test]
    fn no_std_with_std_for_tests_is_fine() {
        let text = "#![no_std]\n#[cfg(test)]\nextern crate std;\n";
        assert_eq!(check(&Tree::of(&[FINE, (WIRE, text), (CORE, text)])), Vec::<String>::new());
    }

    #[test]
    fn std_in_the_core_is_found() {
        let tree = Tree::of(&[FINE, (WIRE, "#![no_std]\n"), (CORE, "#![no_std]\nextern crate std;\n")]);
        assert_eq!(check(&tree), [format!("{CORE}: `extern crate std` needs `#[cfg(test)]` above it")]);
        let tree = Tree::of(&[FINE, (WIRE, "#![no_std]\n"), (CORE, "use std::time::Instant;\n")]);
        assert_eq!(check(&tree), [format!("{CORE}: needs `#![no_std]`")]);
    }

    #[test]
    fn a_file_of_601_lines_is_found() {
        let (fits, long) = ("#\n".repeat(600), "#\n".repeat(601));
        let lib = "#![no_std]\n";
        let tree = Tree::of(&[FINE, (WIRE, lib), (CORE, lib), ("a.py", &fits), ("b.py", &long)]);
        assert_eq!(check(&tree), ["b.py: 601 lines, split it (at most 600)"]);
    }
}
