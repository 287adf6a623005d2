//! Paper claims: a mark beside the code, a mark beside the test, and a row of `docs/papers.md` agree.
//!
//! Code that fulfils a paper's claim carries the comment `claim: id`, its test `test of: id`; both may stand behind
//! `//`, `///`, `//!` or `#`, name several ids, and go on with other words. A row of the table starts with
//! `` | `id` | `` and has a state in its third cell: `yes` promises code and test, `planned` neither; then the fifth and
//! sixth cell name the files. Below [`MISTAKES`] the last cell of each row names tests by their functions.

use std::collections::BTreeMap;

use crate::tree::Tree;

/// Where the table is.
const TABLE: &str = "docs/papers.md";
/// Title of the section that names mistakes and the tests that keep them out.
const MISTAKES: &str = "\n## Mistakes that tests keep out\n";

/// Complaints about rows without marks and marks without rows.
pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let Some(table) = tree.file(TABLE) else {
        return vec![format!("{TABLE}: missing")];
    };
    let rows: Vec<Row<'_>> = table.text.lines().filter_map(row).collect();
    let code = marks(tree, "claim: ");
    let tests = marks(tree, "test of: ");
    let mut complaints = Vec::new();
    for (id, paths) in code.iter().chain(&tests) {
        if !rows.iter().any(|row| row.id == *id) {
            complaints.push(format!("{}: claim `{id}` has no row in {TABLE}", paths[0]));
        }
    }
    let none = Vec::new();
    for row in &rows {
        let (code, tests) = (code.get(row.id).unwrap_or(&none), tests.get(row.id).unwrap_or(&none));
        let wrong = row_complaint(row, code, tests);
        complaints.extend(wrong.map(|wrong| format!("{TABLE}: claim `{}` {wrong}", row.id)));
    }
    complaints.extend(missing_tests(tree, &table.text));
    complaints
}

/// Rows of mistakes without a test, and the tests that they name and nobody has written.
fn missing_tests(tree: &Tree, table: &str) -> Vec<String> {
    let section = table.split_once(MISTAKES).map_or("", |(_, rest)| rest);
    let section = section.split_once("\n## ").map_or(section, |(section, _)| section);
    let rows = section.lines().filter(|line| line.starts_with('|')).skip(2);
    let mut complaints = Vec::new();
    for row in rows {
        let cell = row.trim_end_matches(['|', ' ']).rsplit('|').next().unwrap_or_default();
        let names: Vec<&str> = cell.split('`').skip(1).step_by(2).collect();
        if names.is_empty() {
            complaints.push(format!("{TABLE}: no test is named in: {row}"));
        }
        let missing = names.iter().filter(|name| !has_test(tree, name));
        complaints.extend(missing.map(|name| format!("{TABLE}: there is no test {name}")));
    }
    complaints
}

fn has_test(tree: &Tree, name: &str) -> bool {
    let defined = |extension, keyword: &str| {
        let definition = format!("{keyword} {name}(");
        tree.with_extension(extension).any(|file| file.text.contains(&definition))
    };
    defined(".rs", "fn") || defined(".py", "def")
}

/// One row of the claim table.
struct Row<'a> {
    id: &'a str,
    state: &'a str,
    file: &'a str,
    test: &'a str,
}

fn row(line: &str) -> Option<Row<'_>> {
    let mut cells = line.strip_prefix("| `")?.split('|').map(str::trim);
    let id = cells.next()?.strip_suffix('`')?;
    let (_section, state, _words) = (cells.next()?, cells.next()?, cells.next()?);
    Some(Row { id, state, file: cells.next()?, test: cells.next()? })
}

/// What is wrong with one row, given the files with its code and with its tests.
fn row_complaint(row: &Row<'_>, code: &[&str], tests: &[&str]) -> Option<String> {
    let wrong = match row.state {
        "planned" if code.is_empty() && tests.is_empty() => return None,
        "planned" => "is said to be planned, but has marks already",
        "yes" if code.is_empty() => "is said to be done, but no code carries its mark",
        "yes" if tests.is_empty() => "is said to be done, but no test carries its mark",
        "yes" => {
            return cell_complaint("code", row.file, code).or_else(|| cell_complaint("test", row.test, tests))
        }
        _ => "needs the state `yes` or `planned`",
    };
    Some(wrong.to_owned())
}

/// Every marked file is named, and every named file is marked: the reader of a row finds all there is and nothing else.
fn cell_complaint(what: &str, cell: &str, marked: &[&str]) -> Option<String> {
    let named: Vec<&str> = cell.split('`').skip(1).step_by(2).collect();
    let marked: Vec<String> = marked.iter().map(|path| short(path)).collect();
    if let Some(unnamed) = marked.iter().find(|path| !named.contains(&path.as_str())) {
        return Some(format!("does not name its {what}, {unnamed}"));
    }
    let unmarked = named.iter().find(|path| !marked.iter().any(|marked| marked == *path))?;
    Some(format!("names {unmarked}, whose {what} does not carry its mark"))
}

/// A source file as the table names it: `core/contract.rs` for `crates/gradwire-core/src/contract.rs`.
fn short(path: &str) -> String {
    let path =
        path.strip_prefix("crates/gradwire-").or(path.strip_prefix("python/gradwire/")).unwrap_or(path);
    path.replacen("/src/", "/", 1)
}

/// Ids behind `keyword` at the start of a comment, each with the files that have it.
fn marks<'a>(tree: &'a Tree, keyword: &str) -> BTreeMap<&'a str, Vec<&'a str>> {
    let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for file in tree.with_extension(".rs").chain(tree.with_extension(".py")) {
        for line in file.text.lines() {
            let comment = line.trim_start().trim_start_matches(['/', '!', '#']).trim_start();
            let is_comment = comment.len() < line.trim_start().len();
            if let Some(ids) = comment.strip_prefix(keyword).filter(|_| is_comment) {
                for id in leading_ids(ids) {
                    found.entry(id).or_default().push(file.path.as_str());
                }
            }
        }
    }
    found
}

/// The words at the start of `text` that are ids: two parts of small letters, digits and hyphens around a slash.
fn leading_ids(text: &str) -> impl Iterator<Item = &str> {
    let part = |part: &str| {
        !part.is_empty() && part.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
    };
    let words = text.split_whitespace().map(|word| word.trim_end_matches([',', '.', ':', ';']));
    words
        .take_while(move |word| word.split_once('/').is_some_and(|(paper, claim)| part(paper) && part(claim)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE_HEAD: &str = "| id | section | state | words | file | test | deviation |\n";

    fn complaints(rows: &str, code: &str) -> Vec<String> {
        check(&Tree::of(&[(TABLE, &format!("{TABLE_HEAD}{rows}")), ("a.rs", code)]))
    }

    #[test]
    fn a_row_with_code_and_test_is_fine() {
        let code =
            "// claim: mlt/stop\nfn f() {}\n    // test of: mlt/stop, mlt/probe\n/// claim: mlt/probe\n";
        let rows = "| `mlt/stop` | 4.2.3 | yes | words | `a.rs` | `a.rs` | |\n| `mlt/probe` | 4.2.3 | yes | words | `a.rs` | `a.rs` | |\n";
        assert_eq!(complaints(rows, code), Vec::<String>::new());
    }

    #[test]
    fn a_claim_without_its_test_is_found() {
        let found =
            complaints("| `mlt/stop` | 4.2.3 | yes | words | `a.rs` | `a.rs` | |\n", "// claim: mlt/stop\n");
        assert_eq!(
            found,
            ["docs/papers.md: claim `mlt/stop` is said to be done, but no test carries its mark"]
        );
    }

    #[test]
    fn a_mark_without_a_row_is_found() {
        let found = complaints("", "// claim: mlt/stop\n");
        assert_eq!(found, ["a.rs: claim `mlt/stop` has no row in docs/papers.md"]);
    }

    #[test]
    fn a_planned_claim_with_marks_is_found() {
        let found = complaints("| `mlt/stop` | 4.2.3 | planned | words | | | |\n", "// test of: mlt/stop\n");
        assert_eq!(found, ["docs/papers.md: claim `mlt/stop` is said to be planned, but has marks already"]);
    }

    #[test]
    fn a_row_that_names_another_file_is_found() {
        let code = "// claim: mlt/stop\n// test of: mlt/stop\n";
        let found = complaints("| `mlt/stop` | 4.2.3 | yes | words | `a.rs` | `b.rs` | |\n", code);
        assert_eq!(found, ["docs/papers.md: claim `mlt/stop` does not name its test, a.rs"]);
        assert_eq!(short("crates/gradwire-core/src/transfer/send.rs"), "core/transfer/send.rs");
    }

    #[test]
    fn every_file_of_a_row_is_marked_and_every_marked_file_is_in_its_row() {
        let both = "// claim: mlt/stop\n// test of: mlt/stop\n";
        let of = |test: &str| {
            let row = format!("{TABLE_HEAD}| `mlt/stop` | 4.2.3 | yes | words | `a.rs` | {test} | |\n");
            check(&Tree::of(&[(TABLE, &row), ("a.rs", both), ("b.rs", "// test of: mlt/stop\n")]))
        };
        assert_eq!(of("`a.rs`, `b.rs`"), Vec::<String>::new());
        assert_eq!(of("`a.rs`"), ["docs/papers.md: claim `mlt/stop` does not name its test, b.rs"]);
        let found = of("`a.rs`, `b.rs`, `c.rs`");
        assert_eq!(
            found,
            ["docs/papers.md: claim `mlt/stop` names c.rs, whose test does not carry its mark"]
        );
    }

    #[test]
    fn every_mistake_has_a_test_and_every_test_that_is_named_exists() {
        let of = |cell: &str| {
            let text = format!("{MISTAKES}\n| mistake | test |\n| --- | --- |\n| counted twice | {cell} |\n\n## More\n\n| a | b |\n");
            let tests =
                [("a.rs", "    fn counted_once() {\n"), ("b.py", "def test_once(count: int) -> None:\n")];
            check(&Tree::of(&[&[(TABLE, text.as_str())][..], &tests].concat()))
        };
        assert_eq!(of("`counted_once`, `test_once`"), Vec::<String>::new());
        assert_eq!(of("`counted_onc`"), ["docs/papers.md: there is no test counted_onc"]);
        assert_eq!(of(""), ["docs/papers.md: no test is named in: | counted twice |  |"]);
    }

    #[test]
    fn words_around_a_mark_are_no_ids() {
        let code =
            "// claim: mlt/stop (section 4.2.3): early\n// test of: mlt/stop.\n// claim: because of that\n";
        assert_eq!(
            complaints("| `mlt/stop` | 4.2.3 | yes | words | `a.rs` | `a.rs` | |\n", code),
            Vec::<String>::new()
        );
    }

    #[test]
    fn text_that_is_no_comment_is_no_mark() {
        assert_eq!(complaints("", "claim: mlt/stop\nlet s = \"claim: mlt/stop\";\n"), Vec::<String>::new());
    }
}
