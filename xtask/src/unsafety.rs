//! Unsafe code is listed with its reasons: a crate without a row in the list has none.

use crate::tree::{File, Tree};

/// Where the list is: a table whose first column is the crate, in backquotes.
const LIST: &str = "docs/security.md";

/// Complaints about crates with unsafe code and no row, and about rows of crates that have none.
pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let listed = |name: &str| {
        let row = format!("| `{name}` |");
        tree.file(LIST).is_some_and(|list| list.text.lines().any(|line| line.starts_with(&row)))
    };
    let mut crates: Vec<&str> = tree.files.iter().filter_map(crate_of).collect();
    crates.dedup();
    let complaint = |name: &str| match (first_unsafe(tree, name), listed(name)) {
        (Some(path), false) => Some(format!("{path}: unsafe code, and {LIST} has no row for `{name}`")),
        (None, true) => Some(format!("{LIST}: `{name}` has no unsafe code any more")),
        _ => None,
    };
    crates.into_iter().filter_map(complaint).collect()
}

fn first_unsafe<'a>(tree: &'a Tree, name: &str) -> Option<&'a str> {
    let files = tree.files.iter().filter(|file| crate_of(file) == Some(name));
    files.filter(|file| has_unsafe(&file.text)).map(|file| file.path.as_str()).next()
}

/// The crate whose sources a file is part of.
fn crate_of(file: &File) -> Option<&str> {
    let (name, inside) = file.path.strip_prefix("crates/")?.split_once('/')?;
    (inside.starts_with("src/") && inside.ends_with(".rs")).then_some(name)
}

fn has_unsafe(text: &str) -> bool {
    let code = text.lines().map(|line| line.split("//").next().unwrap_or(""));
    let mut words = code.flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_'));
    words.any(|word| word == "unsafe")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTED: (&str, &str) = (LIST, "| crate | where |\n| `a` | everywhere |\n");

    #[test]
    fn unsafe_code_needs_a_row_and_a_row_needs_unsafe_code() {
        let code = "fn f() {\n    unsafe { g() }\n}\n";
        let fine = [("crates/a/src/lib.rs", code), ("crates/b/src/lib.rs", "// unsafe is a word\n"), LISTED];
        assert_eq!(check(&Tree::of(&fine)), Vec::<String>::new());
        let more = [("crates/a/src/lib.rs", code), ("crates/b/src/x.rs", code), LISTED];
        assert_eq!(
            check(&Tree::of(&more)),
            [format!("crates/b/src/x.rs: unsafe code, and {LIST} has no row for `b`")]
        );
        let less = [("crates/a/src/lib.rs", "#![forbid(unsafe_code)]\n"), LISTED];
        assert_eq!(check(&Tree::of(&less)), [format!("{LIST}: `a` has no unsafe code any more")]);
    }
}
