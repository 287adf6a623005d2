//! A dedicated server's part of a call: an operation that nobody on this rank has called, in memory of the group's.

use super::{Name, Op, PRIORITY_IN_ORDER};
use crate::call::Call;
use crate::memory::Pool;
use crate::schedules::{schedule_of_server, shard_bytes_of_server, Place, Target};
use crate::settings::CallSettings;
use crate::{Algorithm, Collective, ReduceOp, Request, View};
use gradwire_core::{Timestamp, TransferId};
use std::time::Duration;

impl Op {
    /// A dedicated server's part of a call of its workers, in a buffer that is at least as long as the shard.
    pub(crate) fn serving(
        call: Call,
        mut buffer: Vec<u8>,
        place: Place,
        name: Name,
        pool: &mut Pool,
    ) -> Self {
        let (bytes, schedule) = (shard_bytes_of_server(&call, place), schedule_of_server(&call, place));
        // SAFETY: the buffer is kept with the operation, is at least so long, and nobody else touches it.
        let output = unsafe { View::new(buffer.as_mut_ptr(), bytes) };
        let algorithm = Algorithm::ParameterServer;
        let request = Request {
            collective: Collective::AllReduce { algorithm },
            dtype: call.dtype(),
            reduce: call.reduce_op().unwrap_or(ReduceOp::Sum),
            output,
            timeout: SERVING_MAX,
            ..Request::nothing()
        };
        let op = Self::new(request, algorithm, place, name, pool);
        Self { call, schedule, buffer, called_at: Timestamp::ZERO, ..op }
    }

    /// Bytes of the buffer that [`Op::serving`] needs, and of what sums of halves may take beside it ([`crate::halves`]).
    pub(crate) fn bytes_of_serving(call: &Call, place: Place) -> (usize, usize) {
        let bytes = shard_bytes_of_server(call, place);
        (bytes, if call.dtype().is_half() { bytes } else { 0 })
    }

    /// Whether `transfer` brings the settings of the call, and is the first to do so.
    pub(crate) fn awaits_settings(&mut self, from: u32, transfer: TransferId) -> bool {
        let index = self.index(transfer);
        let is_settings =
            self.receives.at(from, index).is_some_and(|receive| receive.target == Target::Settings);
        is_settings && !std::mem::replace(&mut self.has_settings, true)
    }

    /// From now on the call is what its workers say that it is.
    pub(crate) fn follow(&mut self, settings: &CallSettings) {
        (self.policy, self.warms_up, self.class) = (settings.policy, settings.warms_up, settings.class);
        self.priority = if self.policy.keeps_order() { PRIORITY_IN_ORDER } else { self.priority };
        self.stages_up_to.follow(&self.policy);
        self.memory.follow(settings.factor, settings.policy.divide_by);
    }

    /// The buffer that it was made with, and the bytes of sums of halves beside it.
    pub(crate) fn take_buffer(&mut self) -> (Vec<u8>, usize) {
        let wide_bytes = if self.call.dtype().is_half() { self.bytes() } else { 0 };
        (std::mem::take(&mut self.buffer), wide_bytes)
    }
}

/// A server has no time of its own: the workers' calls time out, and that ends the server's part too. 30 years.
const SERVING_MAX: Duration = Duration::from_secs(1_000_000_000);
