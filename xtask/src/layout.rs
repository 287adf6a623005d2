//! The shape of the sources: which crates may use std, how long a file may grow, and that every file of tests is compiled.

use crate::tree::{File, Tree};

/// Crates in which std's sockets, clocks, threads and hash maps must not exist.
const NO_STD: [&str; 3] = ["crates/gradwire-wire", "crates/gradwire-core", "crates/gradwire-membership"];

/// What a rank does depends on its events and on `now` alone: see CONTRIBUTING.md, "Layers".
const BANNED: [&str; 8] = [
    "std::time::Instant::now",
    "std::time::SystemTime::now",
    "std::thread::spawn",
    "std::env::var",
    "std::collections::HashMap",
    "std::collections::HashSet",
    "std::net::UdpSocket",
    "std::net::TcpStream",
];
const CLIPPY: &str = "clippy.toml";
const CLIPPY_OF_COLLECTIVES: &str = "crates/gradwire-collectives/clippy.toml";

/// A file that is longer is split.
const FILE_LINES_MAX: usize = 600;

/// Complaints about std in the lower layers, about files that nobody reads to the end, and about tests that never run.
pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let mut complaints: Vec<String> =
        NO_STD.iter().filter_map(|krate| no_std_complaint(tree, krate)).collect();
    let sources = tree.with_extension(".rs").chain(tree.with_extension(".py"));
    complaints.extend(sources.filter_map(length_complaint));
    complaints.extend(tree.with_extension(".rs").filter_map(|file| forgotten_complaint(tree, file)));
    complaints.extend(ban_complaints(tree));
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

/// A crate with std for one purpose bans the rest by a file of its own, which clippy reads in place of the workspace's.
fn ban_complaints(tree: &Tree) -> Vec<String> {
    let Some(common) = tree.file(CLIPPY) else { return Vec::new() };
    let own = tree.file(CLIPPY_OF_COLLECTIVES).map_or("", |file| file.text.as_str());
    let thresholds = common.text.lines().filter(|line| !own.lines().any(|found| found == *line));
    let bans = BANNED.iter().filter(|path| !own.contains(&format!("path = \"{path}\"")));
    thresholds
        .map(|line| format!("{CLIPPY_OF_COLLECTIVES}: lacks `{line}` of {CLIPPY}, in whose place it is read"))
        .chain(bans.map(|path| format!("{CLIPPY_OF_COLLECTIVES}: `{path}` must be disallowed")))
        .collect()
}

fn length_complaint(file: &File) -> Option<String> {
    let lines = file.text.lines().count();
    (lines > FILE_LINES_MAX)
        .then(|| format!("{}: {lines} lines, split it (at most {FILE_LINES_MAX})", file.path))
}

/// Where a crate's tests are one program, cargo compiles no file that its `main.rs` or the manifest does not name.
fn forgotten_complaint(tree: &Tree, file: &File) -> Option<String> {
    let (krate, name) = file.path.split_once("/tests/")?;
    let name = name.strip_suffix(".rs").filter(|name| !name.contains('/') && *name != "main")?;
    let main = tree.file(&format!("{krate}/tests/main.rs"))?;
    let manifest = tree.file(&format!("{krate}/Cargo.toml"))?;
    let is_part = main.text.lines().any(|line| line == format!("mod {name};"));
    let is_program = manifest.text.contains(&format!("path = \"tests/{name}.rs\""));
    (!is_part && !is_program)
        .then(|| format!("{}: is never compiled, add `mod {name};` to {krate}/tests/main.rs", file.path))
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
    fn std_that_the_collectives_do_not_ban_is_found() {
        let common = (CLIPPY, "too-many-lines-threshold = 70\n");
        let bans: String = BANNED.iter().map(|path| format!("    {{ path = \"{path}\" }},\n")).collect();
        let whole = format!("{}disallowed-types = [\n{bans}]\n", common.1);
        let lib = "#![no_std]\n";
        let of = |own: &str| {
            check(&Tree::of(&[FINE, (WIRE, lib), (CORE, lib), common, (CLIPPY_OF_COLLECTIVES, own)]))
        };
        assert_eq!(of(&whole), Vec::<String>::new());
        let lacks = format!("{CLIPPY_OF_COLLECTIVES}: `std::collections::HashMap` must be disallowed");
        assert_eq!(of(&whole.replace("std::collections::HashMap", "std::vec::Vec")), [lacks]);
        assert_eq!(of(&bans).len(), 1, "the threshold of the workspace");
    }

    #[test]
    fn a_file_of_601_lines_is_found() {
        let (fits, long) = ("#\n".repeat(600), "#\n".repeat(601));
        let lib = "#![no_std]\n";
        let tree = Tree::of(&[FINE, (WIRE, lib), (CORE, lib), ("a.py", &fits), ("b.py", &long)]);
        assert_eq!(check(&tree), ["b.py: 601 lines, split it (at most 600)"]);
    }

    #[test]
    fn a_file_of_tests_that_nothing_names_is_found() {
        let lib = "#![no_std]\n";
        let main = ("crates/x/tests/main.rs", "mod common;\nmod named;\n");
        let manifest = ("crates/x/Cargo.toml", "[[test]]\nname = \"own\"\npath = \"tests/own.rs\"\n");
        let tests = [
            ("crates/x/tests/common/mod.rs", ""),
            ("crates/x/tests/forgotten.rs", ""),
            ("crates/x/tests/named.rs", ""),
            ("crates/x/tests/own.rs", ""),
            ("crates/y/tests/each_is_a_program.rs", ""),
        ];
        let tree = Tree::of(&[&[FINE, (WIRE, lib), (CORE, lib), main, manifest], tests.as_slice()].concat());
        let forgotten =
            "crates/x/tests/forgotten.rs: is never compiled, add `mod forgotten;` to crates/x/tests/main.rs";
        assert_eq!(check(&tree), [forgotten]);
    }
}
