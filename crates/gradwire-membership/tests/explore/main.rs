//! The protocol explored in virtual time: crashes at every message, torn networks, restarts, loss, and a checker outside it.

mod canaries;
mod checker;
mod every_step;
mod goodbye;
mod missed;
mod one_suspect;
mod rng;
mod source;
mod swarm;
mod world;
