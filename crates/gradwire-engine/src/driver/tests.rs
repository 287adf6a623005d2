//! Turns of a network thread, taken by the test.

use super::*;
use crate::group::GroupSetup;
use crate::lanes::{Connecting, Lane};
use crate::socket::{BindOptions, BoundPaths};
use crate::{Engine, EngineConfig, PendingGroup};
use std::net::Ipv4Addr;
use std::sync::mpsc::channel;

/// Of the first of so many ranks on this host.
fn setup(engine: &Engine, ranks: u32) -> (GroupSetup, Arc<Shared>) {
    let begin = |rank| engine.new_group(rank, ranks, "test").expect("valid");
    let mut pending: Vec<PendingGroup> = (0..ranks).map(begin).collect();
    let records: Vec<String> = pending.iter().skip(1).map(PendingGroup::record).collect();
    let first = pending.swap_remove(0);
    let shared = Arc::clone(first.shared());
    (first.into_setup_of(&records).expect("they agree"), shared)
}

fn add(driver: &mut Driver, setup: GroupSetup) -> usize {
    let group = ActiveGroup::new(setup, channel().0, driver.now);
    driver.groups.insert(group.key(), group).0
}

#[test]
fn a_group_whose_turn_comes_before_that_of_a_larger_one_is_told_of_it_in_the_same_turn() {
    let config = EngineConfig { network_threads: Some(1), ..EngineConfig::default() };
    let engine = Engine::start(config.clone()).expect("it starts");
    let (mut small, shared) = setup(&engine, 1);
    small.lanes.connecting = vec![Connecting::connected(Lane::new(&shared, small.key))];
    small.lanes.insists = false;
    let (address, sources) = (Ipv4Addr::LOCALHOST.into(), Vec::new());
    let (dscp, offload) = (config.dscp, config.offload);
    let options = BindOptions { address, home: None, port: 0, not_near: 0, sources, dscp, offload };
    let BoundPaths { first, further, .. } = PathSockets::bind(&options, 1).expect("loopback exists");
    let mut driver = Driver::new(&shared, first.socket, further);
    driver.cores = Cores::of(4);
    let place = add(&mut driver, small);
    for _ in 0..2 {
        driver.groups.touch_all();
        driver.handle_timeouts();
        driver.drain();
    }
    let threads = |driver: &Driver| driver.groups.at(place).expect("it is there").host().threads;
    assert_eq!(threads(&driver), 2, "each has cores enough");
    driver.groups.touch_all();
    add(&mut driver, setup(&engine, 3).0);
    driver.handle_timeouts();
    assert_eq!(threads(&driver), 1, "three ranks share four cores");
}
