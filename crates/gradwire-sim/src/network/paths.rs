//! The paths between two ranks: what is wrong with one of them, on top of what goes wrong everywhere.

use super::{Channel, Impairments};
use crate::Rng;
use std::time::Duration;

/// Most paths of a connection.
const PATHS_MAX: usize = gradwire_core::PATHS_MAX as usize;

/// What is wrong with one path, in both directions. The default is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PathTrouble {
    /// Probability that a datagram is lost; 1: the path is dead.
    pub loss: f64,
    /// Additional one-way delay.
    pub delay: Duration,
}

impl PathTrouble {
    /// A path that loses everything.
    pub const DEAD: Self = Self { loss: 1.0, delay: Duration::ZERO };

    /// Adds this to what goes wrong between the two ranks. Losses are independent.
    pub(super) fn worsen(self, impairments: &mut Impairments, delay: &mut Duration) {
        impairments.loss = 1.0 - (1.0 - impairments.loss) * (1.0 - self.loss);
        *delay += self.delay;
    }
}

/// One way from one rank to another over one path.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) channel: Channel,
    pub(super) trouble: Option<PathTrouble>,
}

/// Every path of every ordered pair of ranks.
#[derive(Debug)]
pub(super) struct Lanes {
    world_size: usize,
    lanes: Vec<Lane>,
}

impl Lanes {
    /// `troubles`: of each path between any two ranks; paths beyond its end have none. The chance of path 0 does not
    /// depend on the number of paths.
    pub(super) fn new(world_size: usize, troubles: &[PathTrouble], rng: &Rng) -> Self {
        let pairs = world_size * world_size;
        let lane = |number: usize| Lane {
            channel: Channel::new(rng.fork(number as u64)),
            trouble: troubles.get(number / pairs.max(1)).copied(),
        };
        Self { world_size, lanes: (0..pairs * PATHS_MAX).map(lane).collect() }
    }

    /// The way of a datagram.
    pub(super) fn between(&mut self, from: usize, to: usize, path: usize) -> &mut Lane {
        let pairs = self.world_size * self.world_size;
        &mut self.lanes[path.min(PATHS_MAX - 1) * pairs + from * self.world_size + to]
    }

    /// Changes all paths of one direction between two ranks.
    pub(super) fn set_cut(&mut self, from: usize, to: usize, cut: bool) {
        (0..PATHS_MAX).for_each(|path| self.between(from, to, path).channel.set_cut(cut));
    }

    /// Changes one path between any two ranks.
    pub(super) fn set_trouble(&mut self, path: usize, trouble: PathTrouble) {
        let pairs = self.world_size * self.world_size;
        let lanes = self.lanes.iter_mut().skip(path * pairs).take(pairs);
        lanes.for_each(|lane| lane.trouble = Some(trouble));
    }

    /// Nothing is wrong any more.
    pub(super) fn heal(&mut self) {
        for lane in &mut self.lanes {
            lane.channel.set_cut(false);
            lane.trouble = None;
        }
    }
}
