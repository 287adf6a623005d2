//! Unsafe code is listed with its reasons: a file that is not in the list has none, be it a library's, a test's or an example's.

use crate::tree::{File, Tree};

/// Where the list is: a table whose first column is the crate and whose second has its files, below the crate's folder, all in backquotes.
const LIST: &str = "docs/security.md";

/// What may follow the word where it is no other word: a block, an item, or an attribute's content.
const FOLLOWERS: [&str; 6] = ["{", "fn", "impl", "extern", "trait", "("];

/// Complaints about files with unsafe code that are not listed, and about listed ones that have none.
pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let listed: Vec<(&str, &str)> = tree.file(LIST).map(|list| entries(&list.text)).unwrap_or_default();
    let found: Vec<(&str, &str, &File)> = tree
        .with_extension(".rs")
        .filter(|file| has_unsafe(&file.text))
        .filter_map(|file| split(&file.path).map(|(name, inside)| (name, inside, file)))
        .collect();
    let unlisted = found.iter().filter(|(name, inside, _)| !listed.contains(&(name, inside)));
    let stale =
        listed.iter().filter(|(name, inside)| !found.iter().any(|(n, i, _)| (n, i) == (name, inside)));
    unlisted
        .map(|(name, inside, file)| {
            format!("{}: unsafe code, and {LIST} does not list `{inside}` of `{name}`", file.path)
        })
        .chain(stale.map(|(name, inside)| format!("{LIST}: `{inside}` of `{name}` has no unsafe code")))
        .collect()
}

/// The crate of a file and its place below the crate's folder.
fn split(path: &str) -> Option<(&str, &str)> {
    path.strip_prefix("crates/").unwrap_or(path).split_once('/')
}

/// Crates and files of the table's rows.
fn entries(list: &str) -> Vec<(&str, &str)> {
    let rows = list.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    rows.flat_map(|(name, rest)| {
        let cell = rest.split(" | ").next().unwrap_or("");
        let quoted = cell.split('`').skip(1).step_by(2);
        quoted.filter(|file| file.ends_with(".rs")).map(move |file| (name, file))
    })
    .collect()
}

fn has_unsafe(text: &str) -> bool {
    let code: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap_or("")).collect();
    let code = code.join("\n");
    let mut rest = code.as_str();
    while let Some(at) = rest.find("unsafe") {
        let (before, after) = (&rest[..at], &rest[at + "unsafe".len()..]);
        let is_word = !before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        if is_word && FOLLOWERS.iter().any(|follower| after.trim_start().starts_with(follower)) {
            return true;
        }
        rest = after;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTED: (&str, &str) =
        (LIST, "| crate | where | why |\n| `a` | `src/lib.rs`, `tests/t.rs` | so |\n");
    /// In parts, so that this file has none.
    const CODE: &str = concat!("fn f() {\n    uns", "afe { g() }\n}\n");
    const FORBIDS: &str = "#![forbid(unsafe_code)]\n// unsafe { is a comment\nlet text = \"unsafe code\";\n";

    #[test]
    fn a_file_with_unsafe_code_is_listed_and_a_listed_file_has_some() {
        let fine = [
            ("crates/a/src/lib.rs", CODE),
            ("crates/a/tests/t.rs", CODE),
            ("crates/b/src/lib.rs", FORBIDS),
            LISTED,
        ];
        assert_eq!(check(&Tree::of(&fine)), Vec::<String>::new());
        for place in ["crates/a/src/x.rs", "crates/a/examples/e.rs", "crates/b/tests/t.rs", "fuzz/f.rs"] {
            let more = [("crates/a/src/lib.rs", CODE), ("crates/a/tests/t.rs", CODE), (place, CODE), LISTED];
            let (name, inside) = split(place).expect("below a folder");
            let expected = format!("{place}: unsafe code, and {LIST} does not list `{inside}` of `{name}`");
            assert_eq!(check(&Tree::of(&more)), [expected]);
        }
        let less = [("crates/a/src/lib.rs", CODE), ("crates/a/tests/t.rs", FORBIDS), LISTED];
        assert_eq!(check(&Tree::of(&less)), [format!("{LIST}: `tests/t.rs` of `a` has no unsafe code")]);
    }

    #[test]
    fn every_kind_of_unsafe_code_is_seen() {
        for kind in FOLLOWERS {
            assert!(has_unsafe(&format!("un{}\n    {kind}", "safe")), "{kind}");
        }
        assert!(!has_unsafe(&format!("not_un{} {{", "safe")));
    }
}
