//! How the association of two ranks begins, stays alive and ends (docs/protocol.md section 6).

use super::beats::{Beats, SILENT_BEATS};
use super::hellos::Hellos;
use super::Connection;
use crate::{Event, Timestamp, PATHS_MAX};
use core::time::Duration;
use gradwire_wire::{PathId, ABORT_RECORD_BYTES, POSITION_RECORD_BYTES};

/// Shortest pause between repeated goodbyes, questions to who says them, and aborts.
pub(super) const FAREWELL_MIN: Duration = Duration::from_millis(10);
/// How long a goodbye is repeated: the peer may be gone already.
pub(super) const GOODBYE_MAX: Duration = Duration::from_millis(500);

/// What is said at the end, again and again until it is confirmed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Farewell {
    Goodbye,
    Abort([u8; ABORT_RECORD_BYTES]),
}

/// A small control packet that is due.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Due {
    Hello {
        is_full: bool,
    },
    HelloReply,
    Ping,
    /// Asks on a path that was not heard yet.
    PathPing(PathId),
    /// Asks on a path, by another way than the one in use.
    Trial(PathId),
    PingReply(u32, PathId),
    Goodbye,
    GoodbyeReply,
    Abort([u8; ABORT_RECORD_BYTES]),
    AbortReply,
}

/// What an answer repeats of a hello.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Heard {
    pub(super) sent_at_us: u32,
    pub(super) path: PathId,
    /// Which of this rank's addresses it went to, as the peer counts them.
    pub(super) address: u32,
}

/// State of the association.
#[derive(Debug)]
pub(super) struct Liveness {
    connected: bool,
    pub(super) hellos: Hellos,
    /// The peer's hello that waits for an answer.
    hello_reply: Option<Heard>,
    beats: Beats,
    /// Time stamp of the latest ping on each path that waits for an answer.
    ping_replies: [Option<u32>; PATHS_MAX as usize],
    /// Paths that are still to be tried out, from the last one down.
    untried: u8,
    /// Paths, by bit, on which a way is to be tried out.
    trials: u16,
    connected_on: PathId,
    position: [u8; POSITION_RECORD_BYTES],
    peer_position: [u8; POSITION_RECORD_BYTES],
    heard_at: Timestamp,
    /// When this rank last looked at the clock for this connection.
    awake_at: Timestamp,
    farewell: Option<Farewell>,
    farewell_at: Timestamp,
    farewell_until: Timestamp,
    confirmed: bool,
    /// The peer itself has shown that it knows of the abort.
    is_told: bool,
    peer_left: bool,
    peer_aborted: bool,
    goodbye_reply: bool,
    abort_reply: bool,
    /// Silent for too long.
    lost: bool,
    /// Other settings were reported: once is enough, however often such a hello comes.
    mismatch_reported: bool,
}

impl Liveness {
    pub(super) fn new(now: Timestamp) -> Self {
        Self {
            connected: false,
            hellos: Hellos::new(now),
            hello_reply: None,
            beats: Beats::new(),
            ping_replies: [None; PATHS_MAX as usize],
            untried: 0,
            trials: 0,
            connected_on: PathId(0),
            position: [0; POSITION_RECORD_BYTES],
            peer_position: [0; POSITION_RECORD_BYTES],
            heard_at: now,
            awake_at: now,
            farewell: None,
            farewell_at: now,
            farewell_until: now,
            confirmed: false,
            is_told: false,
            peer_left: false,
            peer_aborted: false,
            goodbye_reply: false,
            abort_reply: false,
            lost: false,
            mismatch_reported: false,
        }
    }

    pub(super) fn peer_has_left(&self) -> bool {
        self.peer_left
    }

    /// It has left in good order, and nothing worse.
    pub(super) fn has_only_left(&self) -> bool {
        self.peer_left && !self.lost && !self.peer_aborted
    }

    /// No transfer can be posted any more.
    pub(super) fn is_over(&self) -> bool {
        self.lost || self.farewell.is_some()
    }

    /// Data may flow.
    pub(super) fn is_open(&self) -> bool {
        self.connected && !self.is_over() && !self.peer_left && !self.peer_aborted
    }

    /// One of the two leaves in good order, and the other may still ask how its transfers ended: also one that hears of it when
    /// the goodbye is repeated no more, because it stood still or nothing came through.
    pub(super) fn is_parting(&self) -> bool {
        let leaves = self.farewell == Some(Farewell::Goodbye);
        self.connected && !self.lost && !self.peer_aborted && (leaves || self.peer_left)
    }

    /// The peer says goodbye; `true` for the first time.
    pub(super) fn on_peer_leaves(&mut self) -> bool {
        // Both leaving: each has heard the other, nobody needs a reply any more.
        self.confirmed |= self.farewell == Some(Farewell::Goodbye);
        !core::mem::replace(&mut self.peer_left, true)
    }

    /// The peer confirms our goodbye.
    pub(super) fn on_goodbye_reply(&mut self) {
        self.confirmed |= self.farewell == Some(Farewell::Goodbye);
    }

    /// The peer's goodbye is to be confirmed.
    pub(super) fn confirm_goodbye(&mut self) {
        self.goodbye_reply = true;
    }

    /// Whether this is the first hello with other settings.
    pub(super) fn is_first_mismatch(&mut self) -> bool {
        !core::mem::replace(&mut self.mismatch_reported, true)
    }

    pub(super) fn is_aborting(&self) -> bool {
        matches!(self.farewell, Some(Farewell::Abort(_)))
    }

    pub(super) fn position(&self) -> &[u8; POSITION_RECORD_BYTES] {
        &self.position
    }

    /// What a hello reply must repeat.
    pub(super) fn take_hello_reply(&mut self) -> Heard {
        self.hello_reply.take().unwrap_or_default()
    }

    pub(super) fn on_hello(&mut self, heard: Heard) {
        // Of its copies to several addresses the first to come is answered: it took the best way.
        let is_copy = self.hello_reply.is_some_and(|waiting| waiting.sent_at_us == heard.sent_at_us);
        if !is_copy {
            self.hello_reply = Some(heard);
        }
    }

    /// What is due now, taken off the list.
    pub(super) fn next_due(&mut self, now: Timestamp, heartbeat: Duration, pause: Duration) -> Option<Due> {
        if self.hello_reply.is_some() {
            return Some(Due::HelloReply);
        }
        if core::mem::take(&mut self.goodbye_reply) {
            return Some(Due::GoodbyeReply);
        }
        if core::mem::take(&mut self.abort_reply) {
            return Some(Due::AbortReply);
        }
        if let Some(farewell) = self.farewell {
            return self.next_farewell(now, farewell, pause);
        }
        if self.lost || self.peer_left {
            return None;
        }
        if let Some(path) = self.ping_replies.iter().position(Option::is_some) {
            let sent_at_us = self.ping_replies[path].take().unwrap_or_default();
            return Some(Due::PingReply(sent_at_us, PathId(path as u8)));
        }
        if let Some(path) = self.next_untried() {
            return Some(Due::PathPing(path));
        }
        if self.trials != 0 {
            let path = self.trials.trailing_zeros() as u8;
            self.trials &= self.trials - 1;
            return Some(Due::Trial(PathId(path)));
        }
        if !self.connected && now >= self.hellos.at() {
            return Some(Due::Hello { is_full: self.hellos.on_sent(now) });
        }
        let silence = now.since(self.heard_at);
        self.beats.is_due(now, heartbeat, silence).then_some(Due::Ping)
    }

    /// Another way is to be asked for an answer on this path.
    pub(super) fn ask(&mut self, path: PathId) {
        self.trials |= 1 << (path.0 % 16);
    }

    fn next_untried(&mut self) -> Option<PathId> {
        while self.untried > 0 {
            self.untried -= 1;
            if self.untried != self.connected_on.0 {
                return Some(PathId(self.untried));
            }
        }
        None
    }

    fn next_farewell(&mut self, now: Timestamp, farewell: Farewell, pause: Duration) -> Option<Due> {
        if self.confirmed || self.lost || now < self.farewell_at || now >= self.farewell_until {
            return None;
        }
        self.farewell_at = now + pause.max(FAREWELL_MIN);
        Some(match farewell {
            Farewell::Goodbye => Due::Goodbye,
            Farewell::Abort(record) => Due::Abort(record),
        })
    }

    /// When something will be due.
    pub(super) fn due_at(&self) -> Option<Timestamp> {
        if self.farewell.is_some() {
            let waiting = !self.confirmed && !self.lost;
            return waiting.then_some(self.farewell_at.min(self.farewell_until));
        }
        if self.lost || self.peer_left {
            None
        } else if self.connected {
            self.beats.at()
        } else {
            Some(self.hellos.at())
        }
    }

    /// When the peer counts as lost, unless it is heard.
    fn lost_at(&self, silence_max: Duration) -> Option<Timestamp> {
        let watched = self.connected && !self.lost && !self.peer_left && self.farewell.is_none();
        watched.then_some(self.heard_at + silence_max)
    }
}

impl Connection {
    /// This rank looked at the clock until `at`, though it had no reason to call this connection.
    pub fn awake_until(&mut self, at: Timestamp) {
        self.run = None;
        self.liveness.awake_at = self.liveness.awake_at.max(at);
    }

    /// What the heartbeats say about where this rank is.
    pub fn set_position(&mut self, now: Timestamp, record: [u8; POSITION_RECORD_BYTES]) {
        self.run = None;
        if self.liveness.position != record {
            self.liveness.position = record;
            self.liveness.beats.on_moved(now);
        }
    }

    /// Tells the peer that the group failed, until it confirms or the peer timeout ends; every transfer is dropped. A peer
    /// that fell silent, or is about to, is told for half a second: it may hear although it is not heard, and would wait for a timeout
    /// of its own. One that has said so itself needs no more than an answer.
    pub fn abort(&mut self, now: Timestamp, record: [u8; ABORT_RECORD_BYTES]) {
        self.run = None;
        if self.liveness.is_aborting() {
            return;
        }
        let was_lost = core::mem::take(&mut self.liveness.lost);
        // Whoever told this rank may have missed it already, for longer.
        let is_quiet = was_lost || self.silence(now) > self.config.heartbeat() * SILENT_BEATS;
        let patience = if is_quiet { GOODBYE_MAX } else { self.config.peer_timeout };
        self.say_farewell(now, Farewell::Abort(record), patience);
        self.liveness.is_told = self.liveness.peer_aborted;
        self.liveness.confirmed = self.liveness.peer_left || self.liveness.is_told;
    }

    /// Says goodbye, until the peer confirms or half a second is over. See [`Connection::is_drained`].
    pub fn leave(&mut self, now: Timestamp) {
        self.run = None;
        if self.liveness.farewell.is_some() {
            return;
        }
        self.say_farewell(now, Farewell::Goodbye, GOODBYE_MAX);
        // Who left, failed or never came needs no goodbye; who left had to hear ours only to stop waiting for it.
        self.liveness.confirmed = self.liveness.lost || self.liveness.peer_left || !self.liveness.connected;
    }

    fn say_farewell(&mut self, now: Timestamp, farewell: Farewell, patience: Duration) {
        self.liveness.farewell = Some(farewell);
        self.liveness.farewell_at = now;
        self.liveness.farewell_until = now + patience;
        self.drop_transfers();
    }

    fn drop_transfers(&mut self) {
        for send in self.sends.drain(..) {
            self.paths.forget(send.request.transfer);
        }
        self.receives.clear();
        self.status_due.clear();
        self.probe_due.clear();
        self.eager_used = 0;
    }

    /// Whether nothing more has to be said to the peer (after `leave` or `abort`).
    #[must_use]
    pub fn is_drained(&self) -> bool {
        let said = self.liveness.confirmed || self.liveness.lost;
        self.liveness.farewell.is_some() && said && !self.liveness.goodbye_reply && !self.liveness.abort_reply
    }

    /// How long nothing has been heard from the peer; from the start on, where nothing was heard yet.
    #[must_use]
    pub fn silence(&self, now: Timestamp) -> Duration {
        now.since(self.liveness.heard_at)
    }

    /// Whether the peer has answered.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.liveness.connected
    }

    /// Whether the peer answers small datagrams, and has not answered a full one that left before one of them.
    #[must_use]
    pub fn answers_small_ones_only(&self) -> bool {
        !self.liveness.connected && self.liveness.hellos.is_peer_there()
    }

    /// The peer has heard something that was sent at `sent_at`, or later. On several paths heartbeats go all the same: each takes the
    /// next path, and shows how that one is.
    pub(super) fn on_reached(&mut self, sent_at: Timestamp) {
        if self.paths.len() == 1 {
            self.liveness.beats.on_reached(sent_at);
        }
    }

    /// An authentic packet came: the peer lives.
    pub(super) fn on_heard(&mut self, now: Timestamp) {
        // Of packets that come at once the first tells everything.
        if self.liveness.heard_at == now {
            return;
        }
        if self.liveness.connected {
            let pause = now.since(self.liveness.heard_at);
            self.silence.on_pause(now, pause, self.config.peer_timeout);
        }
        self.liveness.heard_at = now;
    }

    /// This rank looks at the clock. A heartbeat is due several times in half the longest silence: a rank that looks so late
    /// stood still itself, and cannot know what was sent to it meanwhile, so the silence of its peer is counted from now on.
    pub(super) fn on_awake(&mut self, now: Timestamp) {
        if self.liveness.awake_at == now {
            return;
        }
        let asleep = now.since(self.liveness.awake_at);
        // The longest silence is several heartbeats, and takes longer to find than one packet should.
        if asleep > self.config.heartbeat() && asleep > self.silence_max() / 2 {
            self.liveness.heard_at = now;
        }
        self.liveness.awake_at = now;
    }

    /// When the peer counts as lost, unless it is heard.
    pub(super) fn lost_at(&self) -> Option<Timestamp> {
        self.liveness.lost_at(self.silence_max())
    }

    /// The peer answered: full datagrams pass in both directions.
    pub(super) fn on_connected(&mut self, now: Timestamp, rtt: Duration, path: PathId) {
        if self.liveness.connected {
            return;
        }
        self.liveness.connected = true;
        // A first round trip of each other path, before data needs it.
        self.liveness.untried = self.paths.len() as u8;
        self.liveness.connected_on = path;
        self.liveness.beats.begin(now, self.config.heartbeat());
        self.note_progress(now);
        self.events.push_back(Event::Connected { rtt });
    }

    pub(super) fn on_ping(&mut self, sent_at_us: u32, path: PathId, record: [u8; POSITION_RECORD_BYTES]) {
        if let Some(waiting) = self.liveness.ping_replies.get_mut(usize::from(path.0)) {
            *waiting = Some(sent_at_us);
        }
        self.on_position(record);
    }

    /// The peer answers the ping of this stamp, which has said where this rank was.
    pub(super) fn on_ping_reply(&mut self, now: Timestamp, stamp: u32, record: [u8; POSITION_RECORD_BYTES]) {
        if let Some(sent_at) = now.of_wire_us(stamp) {
            self.liveness.beats.on_told(sent_at);
        }
        self.on_position(record);
    }

    fn on_position(&mut self, record: [u8; POSITION_RECORD_BYTES]) {
        if self.liveness.peer_position != record {
            self.liveness.peer_position = record;
            self.events.push_back(Event::Position(record));
        }
    }

    pub(super) fn on_abort(&mut self, is_reply: bool, record: [u8; ABORT_RECORD_BYTES]) {
        self.liveness.is_told |= self.liveness.is_aborting();
        self.liveness.confirmed |= self.liveness.is_told;
        if is_reply {
            return;
        }
        // Two ranks that abort at once have told each other.
        self.liveness.abort_reply = true;
        if !core::mem::replace(&mut self.liveness.peer_aborted, true) {
            self.events.push_back(Event::Aborted(record));
        }
    }

    /// Something arrived although this side has aborted: the peer has not heard it yet. Also one that was given up or
    /// taken for lost, and stood still all the time: it would wait for an answer that nobody gives.
    pub(super) fn repeat_abort(&mut self, now: Timestamp) {
        if self.liveness.is_aborting() && !self.liveness.is_told {
            (self.liveness.confirmed, self.liveness.lost) = (false, false);
            self.liveness.farewell_until = self.liveness.farewell_until.max(now + FAREWELL_MIN);
        }
    }

    /// When something authentic last came from the peer; before anything did, when watching began.
    #[must_use]
    pub fn heard_at(&self) -> Timestamp {
        self.liveness.heard_at
    }

    pub(super) fn check_silence(&mut self, now: Timestamp) {
        self.on_awake(now);
        if self.lost_at().is_some_and(|at| now >= at) {
            self.liveness.lost = true;
            let silent = now.since(self.liveness.heard_at);
            self.drop_transfers();
            self.events.push_back(Event::PeerSilent { silent });
        }
        let waiting = self.liveness.farewell.is_some() && !self.liveness.confirmed;
        if waiting && now >= self.liveness.farewell_until {
            self.liveness.confirmed = true;
        }
    }
}
