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
