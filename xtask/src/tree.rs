//! The repository's text files in memory, so that every check is a pure function of them.

use std::io;
use std::path::Path;

/// One text file.
pub(crate) struct File {
    /// Relative to the root, with `/`.
    pub(crate) path: String,
    /// Its whole content.
    pub(crate) text: String,
}

/// The text files of a repository, sorted by path.
pub(crate) struct Tree {
    /// Rust, Python, TOML, Markdown and plain text files.
    pub(crate) files: Vec<File>,
}

impl Tree {
    /// Reads every file with one of [`EXTENSIONS`] below `root`, except in [`SKIPPED_FOLDERS`].
    ///
    /// # Errors
    /// The first folder or file that cannot be read.
    pub(crate) fn read(root: &Path) -> io::Result<Self> {
        let mut tree = Self { files: Vec::new() };
        tree.read_folder(root, "")?;
        tree.files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(tree)
    }

    /// Files whose path ends in `extension`, which includes the dot.
    pub(crate) fn with_extension<'a>(&'a self, extension: &'a str) -> impl Iterator<Item = &'a File> {
        self.files.iter().filter(move |file| file.path.ends_with(extension))
    }

    /// The file at `path`.
    pub(crate) fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }

    fn read_folder(&mut self, folder: &Path, prefix: &str) -> io::Result<()> {
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}/{name}") };
            if entry.file_type()?.is_dir() {
                if !name.starts_with('.') && !SKIPPED_FOLDERS.contains(&name.as_str()) {
                    self.read_folder(&entry.path(), &path)?;
                }
            } else if EXTENSIONS.iter().any(|extension| name.ends_with(extension)) {
                self.files.push(File { path, text: std::fs::read_to_string(entry.path())? });
            }
        }
        Ok(())
    }
}

/// Files that checks look at.
const EXTENSIONS: [&str; 6] = [".rs", ".py", ".pyi", ".md", ".toml", ".txt"];

/// What builds and runs leave behind; hidden folders are skipped as well.
const SKIPPED_FOLDERS: [&str; 6] = ["target", "demo-out", "bench-out", "__pycache__", "corpus", "artifacts"];

#[cfg(test)]
impl Tree {
    /// A repository made of `(path, text)` pairs.
    pub(crate) fn of(files: &[(&str, &str)]) -> Self {
        let file = |&(path, text): &(&str, &str)| File { path: path.to_owned(), text: text.to_owned() };
        Self { files: files.iter().map(file).collect() }
    }
}
