//! Relative links of the Markdown files lead to files that exist.

use std::path::{Component, Path, PathBuf};

use crate::tree::{File, Tree};

/// Complaints about links that lead nowhere.
pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let root = crate::root();
    check_with(tree, |path| root.join(path).exists())
}

fn check_with(tree: &Tree, exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let mut complaints = Vec::new();
    for file in tree.with_extension(".md") {
        for target in targets(file) {
            let folder = Path::new(&file.path).parent().unwrap_or(Path::new(""));
            if !exists(&normal(&folder.join(target))) {
                complaints.push(format!("{}: the link to {target} leads nowhere", file.path));
            }
        }
    }
    complaints
}

/// Targets of `[text](target)` that are paths, without their `#anchor`.
fn targets(file: &File) -> Vec<&str> {
    let after = file.text.split("](").skip(1);
    let inside = after.filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
    let paths = inside.filter(|target| !target.contains("://") && !target.contains(char::is_whitespace));
    paths.filter_map(|target| target.split('#').next()).filter(|target| !target.is_empty()).collect()
}

/// `a/b/../c` as `a/c`, without asking the file system.
fn normal(path: &Path) -> PathBuf {
    let mut result = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                result.pop();
            }
            Component::CurDir => {}
            other => result.push(other),
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_leads_nowhere_is_found() {
        let text = "[a](../README.md) [b](gone.md#part) [c](https://example.org/x) [d](#here)";
        let tree = Tree::of(&[("docs/a.md", text)]);
        let found = check_with(&tree, |path| path == Path::new("README.md"));
        assert_eq!(found, ["docs/a.md: the link to gone.md leads nowhere"]);
    }
}
