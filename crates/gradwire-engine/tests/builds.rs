//! Two builds of one version are told apart: by their sources, and by nothing else.

#[path = "../build.rs"]
#[allow(dead_code)]
mod script;

use crate::common::{config, engines, PATIENCE};
use gradwire_engine::{Engine, JoinError, BUILD, VERSION};
use std::fs;
use std::path::{Path, PathBuf};

/// What is built, from the folder of this package.
const CRATES: &str = "..";

/// A copy of the crates' sources that is gone with it.
struct Copied(PathBuf);

impl Copied {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("gradwire-builds-{name}-{}", std::process::id()));
        fs::create_dir(&folder).expect("a folder of our own");
        for entry in fs::read_dir(CRATES).expect("the crates") {
            let krate = entry.expect("an entry").path();
            for part in ["Cargo.toml", "build.rs", "src"] {
                copy(&krate.join(part), &folder.join(krate.file_name().expect("a name")).join(part));
            }
        }
        Self(folder)
    }

    fn build(&self) -> String {
        script::build_of(&self.0).expect("all of it is there")
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

fn copy(from: &Path, to: &Path) {
    if from.is_dir() {
        for entry in fs::read_dir(from).expect("a folder") {
            let name = entry.expect("an entry").file_name();
            copy(&from.join(&name), &to.join(&name));
        }
    } else if from.is_file() {
        fs::create_dir_all(to.parent().expect("below a folder")).expect("a folder of our own");
        fs::write(to, fs::read(from).expect("a file")).expect("a file of our own");
    }
}

#[test]
fn the_build_is_named_after_its_sources_wherever_they_are() {
    let copied = Copied::new("same");
    assert_eq!(
        (copied.build().as_str(), script::build_of(Path::new(CRATES)).ok().as_deref()),
        (BUILD, Some(BUILD))
    );
    assert!(BUILD.len() == 8 && VERSION.ends_with(&format!(" (build {BUILD})")), "{VERSION}");
    for beside in ["gradwire-core/src/.lib.rs.swp", "gradwire-core/benches/new.rs", "gradwire-sim/src/lib.rs"]
    {
        let path = copied.0.join(beside);
        fs::create_dir_all(path.parent().expect("below a folder")).expect("a folder of our own");
        fs::write(path, "what is no part of it").expect("a file of our own");
    }
    assert_eq!(copied.build(), BUILD);
}

#[test]
fn a_change_of_any_crate_is_another_build() {
    let copied = Copied::new("changed");
    let mut seen = vec![BUILD.to_owned()];
    for krate in ["wire", "core", "collectives", "membership", "engine", "py"] {
        for file in ["src/lib.rs", "Cargo.toml"] {
            let path = copied.0.join(format!("gradwire-{krate}")).join(file);
            fs::write(&path, [fs::read(&path).expect("a file"), b"\n".to_vec()].concat()).expect("ours");
            seen.push(copied.build());
        }
    }
    let folder = copied.0.join("gradwire-wire/src");
    fs::rename(folder.join("lib.rs"), folder.join("other.rs")).expect("a file of our own");
    seen.push(copied.build());
    let all = seen.len();
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), all);
    fs::remove_dir_all(copied.0.join("gradwire-wire")).expect("a folder of our own");
    assert!(script::build_of(&copied.0).is_err_and(|error| error.to_string().contains("gradwire-wire")));
}

#[test]
fn ranks_of_two_builds_of_one_version_form_no_group_and_say_what_to_do() {
    let engines = engines(2, &config());
    let theirs = engines[1].new_group(1, 2, "0").expect("valid rank").record();
    let version = env!("CARGO_PKG_VERSION");
    for other in [format!("{version} (build 00000000)"), version.to_owned()] {
        let pending = engines[0].new_group(0, 2, "0").expect("valid rank");
        let records = [pending.record(), theirs.replace(VERSION, &other)];
        let Err(error) = pending.join(&records, Some(PATIENCE)) else { panic!("{other}") };
        let JoinError::SettingsMismatch { rank: 1, field: "gradwire version", .. } = &error else {
            panic!("{error}");
        };
        let said = error.to_string();
        assert!(
            [VERSION, &other, "built of the same sources"].iter().all(|text| said.contains(text)),
            "{said}"
        );
    }
    engines.iter().for_each(Engine::stop);
}
