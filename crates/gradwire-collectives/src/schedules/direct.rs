//! Collectives of one stage: everybody sends its parts straight to whom they belong.
//!
//! All-gather, gather, scatter, all-to-all, reduce, barrier (bare signals between all pairs: half a round trip) and both
//! ends of a point-to-point transfer. All of them are exact. A large reduce goes another way ([`super::gathered`]).

use super::{Loss, Place, Post, Schedule, Target};
use crate::memory::{Memory, Pool, Side};
use crate::{Collective, Request};
use std::ops::Range;

/// See the module.
#[derive(Debug)]
pub(super) struct Direct {
    place: Place,
    collective: Collective,
    /// Bytes of one row, where the collective has rows.
    row: usize,
    receives_open: usize,
    reduces: bool,
}

impl Direct {
    pub(super) fn new(request: &Request, place: Place) -> Self {
        let row = match request.collective {
            Collective::AllGather | Collective::Gather { .. } | Collective::Reduce { .. } => {
                request.input.len()
            }
            Collective::Send { .. } => request.input.len(),
            _ => request.output.len(),
        };
        Self { place, collective: request.collective.clone(), row, receives_open: 0, reduces: false }
    }

    /// A barrier, whatever was called.
    pub(super) fn barrier(place: Place) -> Self {
        Self { place, collective: Collective::Barrier, row: 0, receives_open: 0, reduces: false }
    }

    fn row(&self, rank: u32) -> Range<usize> {
        let start = rank as usize * self.row;
        start..start + self.row
    }

    fn send(&self, to: u32, range: Range<usize>, posts: &mut Vec<Post>) {
        posts.push(Post::Send { to, index: 0, side: Side::Input, range, weights: None, loss: Loss::Never });
    }

    fn receive(&mut self, from: u32, target: Target, bytes: usize, posts: &mut Vec<Post>) {
        self.receives_open += 1;
        posts.push(Post::Receive { from, index: 0, target, bytes, loss: Loss::Never });
    }

    /// Adds the rows of all other ranks to this one's.
    fn reduce(&mut self, memory: &mut Memory, pool: &mut Pool, posts: &mut Vec<Post>) {
        let area = 0..self.row;
        let chunks = self.row.div_ceil(self.place.chunk_bytes).max(1);
        memory.accumulate_in(area.clone(), &area, chunks, true, pool);
        self.reduces = true;
        for from in self.place.others() {
            self.receive(from, Target::Add { at: 0, chunk: 0 }, self.row, posts);
        }
        if self.receives_open == 0 {
            memory.finish(&area, 0);
        }
    }

    fn start_rows(&mut self, memory: &mut Memory, posts: &mut Vec<Post>) {
        let Place { rank, .. } = self.place;
        match self.collective {
            Collective::AllGather => {
                memory.copy(&(0..self.row), &self.row(rank));
                for other in self.place.others() {
                    self.send(other, 0..self.row, posts);
                    self.receive(other, Target::Place(self.row(other).start), self.row, posts);
                }
            }
            Collective::Gather { root } if root == rank => {
                memory.copy(&(0..self.row), &self.row(rank));
                for other in self.place.others() {
                    self.receive(other, Target::Place(self.row(other).start), self.row, posts);
                }
            }
            Collective::Scatter { root } if root == rank => {
                memory.copy(&self.row(rank), &(0..self.row));
                self.place.others().for_each(|other| self.send(other, self.row(other), posts));
            }
            Collective::Gather { root } => self.send(root, 0..self.row, posts),
            Collective::Scatter { root } => self.receive(root, Target::Place(0), self.row, posts),
            _ => {}
        }
    }

    fn start_all_to_all(
        &mut self,
        input_splits: &[usize],
        output_splits: &[usize],
        memory: &mut Memory,
        posts: &mut Vec<Post>,
    ) {
        let part = |splits: &[usize], rank: u32| {
            let start: usize = splits[..rank as usize].iter().sum();
            start..start + splits[rank as usize]
        };
        let own = self.place.rank;
        memory.copy(&part(input_splits, own), &part(output_splits, own));
        for other in self.place.others() {
            let (give, take) = (part(input_splits, other), part(output_splits, other));
            // Empty parts are announced too: only so can the two ends find that they disagree about one.
            self.send(other, give, posts);
            self.receive(other, Target::Place(take.start), take.len(), posts);
        }
    }
}

impl Schedule for Direct {
    fn start(&mut self, memory: &mut Memory, pool: &mut Pool, posts: &mut Vec<Post>) {
        let rank = self.place.rank;
        match self.collective.clone() {
            Collective::Reduce { root } if root == rank => self.reduce(memory, pool, posts),
            Collective::Reduce { root } => self.send(root, 0..self.row, posts),
            Collective::AllToAll { input_split_bytes, output_split_bytes } => {
                self.start_all_to_all(&input_split_bytes, &output_split_bytes, memory, posts);
            }
            Collective::Barrier => {
                for other in self.place.others() {
                    self.send(other, 0..0, posts);
                    self.receive(other, Target::Place(0), 0, posts);
                }
            }
            Collective::Send { to, .. } => self.send(to, 0..self.row, posts),
            Collective::Receive { from, .. } => {
                // From whom is known by the time that this starts: the transfer has been offered.
                self.receive(from.unwrap_or(rank), Target::Place(0), self.row, posts);
            }
            _ => self.start_rows(memory, posts),
        }
    }

    fn on_received(&mut self, _from: u32, _index: u32, memory: &mut Memory, _posts: &mut Vec<Post>) {
        self.receives_open -= 1;
        if self.receives_open == 0 && self.reduces {
            memory.finish(&(0..self.row), 0);
        }
    }

    fn on_sent(&mut self, _to: u32, _index: u32, _posts: &mut Vec<Post>) {}
}
