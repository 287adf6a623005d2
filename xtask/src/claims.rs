//! Paper claims: a mark beside the code, a mark beside the test, and a row of `docs/papers.md` agree.
//!
//! Code that fulfils a paper's claim carries the comment `claim: id`, its test `test of: id`; both may stand behind
//! `//`, `///`, `//!` or `#`. A row of the table starts with `` | `id` | `` and has a state in its third cell:
//! `yes` promises code and test, `planned` neither.

use std::collections::BTreeMap;

use crate::tree::Tree;

/// Where the table is.
const TABLE: &str = "docs/papers.md";

/// Complaints about rows without marks and marks without rows.
pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let Some(table) = tree.file(TABLE) else {
        return vec![format!("{TABLE}: missing")];
    };
    let states: BTreeMap<&str, &str> = table.text.lines().filter_map(row).collect();
    let code = marks(tree, "claim: ");
    let tests = marks(tree, "test of: ");
    let mut complaints = Vec::new();
    for (id, path) in code.iter().chain(&tests) {
        if !states.contains_key(id) {
            complaints.push(format!("{path}: claim `{id}` has no row in {TABLE}"));
        }
    }
    for (id, state) in &states {
        complaints.extend(row_complaint(id, state, code.contains_key(id), tests.contains_key(id)));
    }
    complaints
}

/// What is wrong with one row, given whether its code and its test are marked.
fn row_complaint(id: &str, state: &str, has_code: bool, has_test: bool) -> Option<String> {
    let wrong = match (state, has_code, has_test) {
        ("yes", true, true) | ("planned", false, false) => return None,
        ("yes", false, _) => "is said to be done, but no code carries its mark",
        ("yes", true, false) => "is said to be done, but no test carries its mark",
        ("planned", _, _) => "is said to be planned, but has marks already",
        _ => "needs the state `yes` or `planned`",
    };
    Some(format!("{TABLE}: claim `{id}` {wrong}"))
}

/// Id and state of a row of the claim table.
fn row(line: &str) -> Option<(&str, &str)> {
    let mut cells = line.strip_prefix("| `")?.split(" | ");
    let id = cells.next()?.strip_suffix('`')?;
    let _section = cells.next()?;
    Some((id, cells.next()?.trim()))
}

/// Ids behind `keyword` at the start of a comment, each with the first file that has it.
fn marks<'a>(tree: &'a Tree, keyword: &str) -> BTreeMap<&'a str, &'a str> {
    let mut found = BTreeMap::new();
    for file in tree.with_extension(".rs").chain(tree.with_extension(".py")) {
        for line in file.text.lines() {
            let comment = line.trim_start().trim_start_matches(['/', '!', '#']).trim_start();
            let is_comment = comment.len() < line.trim_start().len();
            if let Some(ids) = comment.strip_prefix(keyword).filter(|_| is_comment) {
                for id in ids.split(',').map(str::trim).filter(|id| !id.is_empty()) {
                    found.entry(id).or_insert(file.path.as_str());
                }
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE_HEAD: &str = "| id | section | state | words |\n| --- | --- | --- | --- |\n";

    fn complaints(rows: &str, code: &str) -> Vec<String> {
        check(&Tree::of(&[(TABLE, &format!("{TABLE_HEAD}{rows}")), ("a.rs", code)]))
    }

    #[test]
    fn a_row_with_code_and_test_is_fine() {
        let code =
            "// claim: mlt/stop\nfn f() {}\n    // test of: mlt/stop, mlt/probe\n/// claim: mlt/probe\n";
        let rows = "| `mlt/stop` | 4.2.3 | yes | words |\n| `mlt/probe` | 4.2.3 | yes | words |\n";
        assert_eq!(complaints(rows, code), Vec::<String>::new());
    }

    #[test]
    fn a_claim_without_its_test_is_found() {
        let found = complaints("| `mlt/stop` | 4.2.3 | yes | words |\n", "// claim: mlt/stop\n");
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
        let found = complaints("| `mlt/stop` | 4.2.3 | planned | words |\n", "// test of: mlt/stop\n");
        assert_eq!(found, ["docs/papers.md: claim `mlt/stop` is said to be planned, but has marks already"]);
    }

    #[test]
    fn text_that_is_no_comment_is_no_mark() {
        assert_eq!(complaints("", "claim: mlt/stop\nlet s = \"claim: mlt/stop\";\n"), Vec::<String>::new());
    }
}
