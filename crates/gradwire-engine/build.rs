//! Names the build: `GRADWIRE_BUILD` is a digest of the sources that a process of a group is made of, so that ranks can tell builds of
//! one version apart. It is of what the files say, and of no place, time or machine: the same in every checkout and source package.

#[path = "src/digest.rs"]
mod digest;

use std::path::{Path, PathBuf};
use std::{fs, io};

/// What is linked into the Python module and decides what it says or computes.
const CRATES: [&str; 6] = [
    "gradwire-collectives",
    "gradwire-core",
    "gradwire-engine",
    "gradwire-membership",
    "gradwire-py",
    "gradwire-wire",
];
/// Of a crate: tests and benches change nothing that runs.
const PARTS: [&str; 3] = ["Cargo.toml", "build.rs", "src"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let crates = Path::new("..");
    for folder in CRATES {
        // Of a file that is missing Cargo would say that it has changed, at every build.
        for part in PARTS.map(|part| crates.join(folder).join(part)).iter().filter(|part| part.exists()) {
            println!("cargo::rerun-if-changed={}", part.display());
        }
    }
    match build_of(crates) {
        Ok(build) => println!("cargo::rustc-env=GRADWIRE_BUILD={build}"),
        Err(error) => panic!(
            "the sources of gradwire cannot be read: {error}. Build in a whole checkout or source package"
        ),
    }
}

/// The name of the build of the crates in a folder: eight hexadecimal digits.
///
/// # Errors
/// A crate is missing, or a file cannot be read.
pub(crate) fn build_of(crates: &Path) -> io::Result<String> {
    let mut digest = digest::Fnv::new();
    for folder in CRATES {
        let mut files = Vec::new();
        let root = crates.join(folder);
        fs::metadata(root.join("src")).map_err(|error| named(&root, &error))?;
        for part in PARTS {
            collect(&root.join(part), &mut files)?;
        }
        files.sort();
        for file in files {
            let content = fs::read(&file).map_err(|error| named(&file, &error))?;
            let name = file.strip_prefix(crates).expect("it was found there");
            digest.add(name.as_os_str().as_encoded_bytes());
            digest.add(&content);
        }
    }
    Ok(format!("{:08x}", (digest.0 >> 32) ^ (digest.0 & 0xffff_ffff)))
}

/// The sources at or below a path; what an editor leaves beside them is none.
fn collect(path: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    if path.is_dir() {
        for entry in fs::read_dir(path).map_err(|error| named(path, &error))? {
            collect(&entry?.path(), files)?;
        }
    } else if path.is_file() && path.extension().is_some_and(|end| end == "rs" || end == "toml") {
        files.push(path.to_owned());
    }
    Ok(())
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
