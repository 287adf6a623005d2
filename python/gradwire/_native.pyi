"""Types of the Rust binding (crates/gradwire-py). Every error is raised as its class of `gradwire.errors`."""

from typing import Any, TypedDict, final

__version__: str
BUILD: str
"""A digest of the sources of this module, eight hexadecimal digits."""
VERSION: str
"""Both: what must be the same on all ranks."""
PROTOCOL_VERSION: int
PORT_BASE: int
PORTS_APART: int
THREADS_UNASKED_MAX: int
RANKS_MAX: int
LANE_RANKS_MAX: int
MEASURED_RATE_MAX: int
RECEIVE_BUFFER_BYTES: int
SEND_BUFFER_BYTES: int
SECRET_BYTES_MIN: int
UNKNOWN_BOOT: str
BRIDGES: tuple[str, ...]
# At the place of their codes.
ALGORITHMS: tuple[str, ...]
REDUCTIONS: tuple[str, ...]
DTYPES: tuple[str, ...]
CONTROLLERS: tuple[str, ...]
FILLS: tuple[str, ...]
DIVISORS: tuple[str, ...]
ROTATIONS: tuple[str, ...]

Memory = tuple[int, int]
"""Address and length in bytes."""

class PolicyNumbers(TypedDict):
    """What a reduction may leave behind; see the presets in docs/config.md.

    Of the rules of the deadline (fixed, measured, slowest link, warm-up) the first that is not None counts.
    """

    loss_bound: float
    after_first_pass: bool
    deadline_s: float | None
    deadline_factor: float | None
    deadline_margin_s: float | None
    warm_up_rounds: int | None
    warm_up_percentile: float
    deadline_max_s: float | None
    floor: float
    data_share: float | None
    epoch_transfers: int
    quiet_share: float | None
    recovery: str
    critical_packets: int
    gather_loss_bound: float
    gather_recovery: str
    gather_fill: str
    divide_by: str
    hadamard: str
    preset: str

class _CallRequired(TypedDict):
    kind: str
    input: Memory
    output: Memory
    timeout_s: float
    keep: list[Any]

class Call(_CallRequired, total=False):
    """One call of a collective. `keep` owns the memory behind the addresses and is released when it has ended."""

    dtype: int
    reduce: int
    factor: float
    peer: int | None
    tag: int
    splits: tuple[list[int], list[int]]
    algorithm: int
    policy: PolicyNumbers
    residual: Memory
    priority: int
    traffic_class: int
    sample_rate: float
    important: list[bool]
    contributions: bool

def fingerprints(memory: Memory, block_bytes: int) -> list[int]: ...
def hadamard_shape(elems: int) -> tuple[int, int] | None: ...
def hadamard(dtype: int, seed: int, source: Memory, target: Memory, inverse: bool) -> None: ...
def hadamard_in_place(dtype: int, seed: int, bucket: Memory, inverse: bool) -> None: ...
def layer_class(layer: int, layers: int, classes: int) -> int: ...
def preset_defaults(name: str) -> PolicyNumbers | None: ...
def preset_names() -> list[str]: ...
def histogram_bounds() -> dict[str, list[float]]: ...
def simulate(plan: str) -> str: ...
def policy_problem(numbers: PolicyNumbers) -> str | None: ...

@final
class Engine:
    def __new__(cls, settings: dict[str, Any]) -> Engine: ...
    def new_group(self, rank: int, world_size: int, name: str) -> PendingGroup: ...
    def new_served_group(self, rank: int, world_size: int, servers: tuple[int, int], name: str) -> PendingGroup: ...
    @property
    def port(self) -> int: ...
    @property
    def thread_ports(self) -> list[int]: ...
    @property
    def cores(self) -> tuple[int, int]: ...
    def features(self) -> dict[str, Any]: ...
    def stats(self) -> dict[str, Any]: ...
    def next_completions(self) -> list[Op] | None: ...
    def let_go_in_child(self) -> None: ...
    def stop(self) -> None: ...

@final
class PendingGroup:
    def record(self) -> str: ...
    def live_again(self, incarnation: int) -> None: ...
    def join_running(self, formed: list[str], running: str, timeout_s: float) -> Group: ...
    def join(self, records: list[str], timeout_s: float) -> Group: ...

@final
class Group:
    def submit(self, call: Call) -> Op: ...
    def admit(self, record: str) -> str: ...
    def abort(self) -> None: ...
    def leave(self, timeout_s: float) -> bool: ...
    def wait_for_workers(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def watch(self) -> dict[str, Any]: ...
    def watch_news(self) -> dict[str, Any]: ...
    def timeline(self, calls: int | None = None) -> str: ...

@final
class Op:
    @property
    def id(self) -> int: ...
    def wait(self, timeout_s: float | None = None) -> bool: ...
    def is_done(self) -> bool: ...
    def notify(self) -> None: ...
    def error(self) -> Exception | None: ...
    def choice(self) -> str | None: ...
    def report(self) -> dict[str, Any] | None: ...
    def totals(self) -> dict[str, Any] | None: ...
