//! Facts that stand in several files: the version of the package, and the ranges of what it needs.

use crate::tree::Tree;

/// Complaints about versions and requirement ranges that differ between files.
pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let text = |path| tree.file(path).map_or("", |file| file.text.as_str());
    let version = quoted_after(text(CARGO), "version = ");
    let mut complaints = Vec::new();
    for (path, key) in [(PYPROJECT, "version = "), (INIT, "__version__ = ")] {
        let found = quoted_after(text(path), key);
        if found != version {
            complaints.push(format!("{path}: version {found:?}, but {CARGO} has {version:?}"));
        }
    }
    let installed: Vec<&str> = text(REQUIREMENTS).lines().collect();
    for range in runtime_ranges(text(PYPROJECT)) {
        if !installed.contains(&range) {
            complaints.push(format!("{REQUIREMENTS}: {range} of {PYPROJECT} is not among them"));
        }
    }
    complaints
}

/// What is in quotes on the first line of `text` that starts with `key`.
fn quoted_after<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
    rest.split('"').nth(1)
}

/// Requirements in `[project]` and its optional parts: what is quoted and has a lower end. The build system's own are in
/// the table before it.
fn runtime_ranges(pyproject: &str) -> impl Iterator<Item = &str> {
    let project = pyproject.split_once("\n[project]\n").map_or("", |(_, project)| project);
    let lists = project.lines().filter(|line| line.contains(" = ["));
    lists.flat_map(|line| line.split('"').skip(1).step_by(2)).filter(|text| text.contains(">="))
}

const CARGO: &str = "Cargo.toml";
const PYPROJECT: &str = "pyproject.toml";
const INIT: &str = "python/gradwire/__init__.py";
const REQUIREMENTS: &str = "requirements-dev.txt";

#[cfg(test)]
mod tests {
    use super::*;

    const BUILD: &str = "[build-system]\nrequires = [\"maturin>=1.7,<2\"]\n\n";

    fn complaints(pyproject: &str, requirements: &str) -> Vec<String> {
        check(&Tree::of(&[
            (CARGO, "[workspace.package]\nversion = \"0.1.0\"\n"),
            (PYPROJECT, &format!("{BUILD}[project]\n{pyproject}")),
            (INIT, "__version__ = \"0.1.0\"\n"),
            (REQUIREMENTS, requirements),
        ]))
    }

    #[test]
    fn equal_versions_and_ranges_are_fine() {
        let found =
            complaints("version = \"0.1.0\"\ndependencies = [\"click>=8.1,<9\"]\n", "# why\nclick>=8.1,<9\n");
        assert_eq!(found, Vec::<String>::new());
    }

    #[test]
    fn another_version_is_found() {
        let found = complaints("version = \"0.2.0\"\n", "");
        assert_eq!(found, ["pyproject.toml: version Some(\"0.2.0\"), but Cargo.toml has Some(\"0.1.0\")"]);
    }

    #[test]
    fn a_range_that_is_not_installed_is_found() {
        let found = complaints(
            "version = \"0.1.0\"\ntorch = [\"torch>=2.9,<3\", \"gradwire[x]\"]\n",
            "torch>=2.10\n",
        );
        assert_eq!(found, ["requirements-dev.txt: torch>=2.9,<3 of pyproject.toml is not among them"]);
    }
}
