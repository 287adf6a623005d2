//! Everything that is tested in virtual time, as one program: its tests share the machine's cores to the last of them, and what they
//! have in common is compiled once.

mod agreement;
mod canaries;
mod cluster;
mod conformance;
mod cost;
mod faults;
mod hierarchy;
mod pairs;
mod paths;
mod presets;
mod promises;
mod reduce_scatter;
mod schedules;
mod swarm;
mod two_way;

/// Cargo is told of this program alone.
#[test]
fn every_file_of_this_folder_is_part_of_it() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests");
    let main = include_str!("main.rs");
    for entry in std::fs::read_dir(folder).expect("the folder of this file") {
        let path = entry.expect("its entries").path();
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        assert!(name == "main" || main.contains(&format!("\nmod {name};\n")), "{name} is not compiled");
    }
}
