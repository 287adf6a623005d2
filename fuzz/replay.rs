// Replays the corpus of one target; included by the tests of the crates that hold the bodies.

/// Runs `body` on every file of `corpus/target`, in the order of their names.
///
/// # Panics
/// When `body` does, after naming the file; when there is no corpus.
pub(crate) fn replay(target: &str, body: impl Fn(&[u8])) {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let listed = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> = listed.map(|entry| entry.expect("a corpus can be listed").path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{target} has no corpus");
    for file in files {
        println!("{}", file.display());
        body(&std::fs::read(&file).expect("a corpus can be read"));
    }
}
