"""The one typed configuration object.

Precedence, lowest first: default, preset, argument, environment variable `GRADWIRE_<FIELD>` (the operator wins). A value
is checked the moment it is set, and a `GRADWIRE_*` name that does not exist is an error, so that a misspelt variable
cannot silently do nothing. `docs/config.md` is generated from the fields below by `scripts/config_docs.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from gradwire._numbers import plain, written
from gradwire._urls import is_url, without_user
from gradwire.chaos import ALLOWED as CHAOS_ALLOWED
from gradwire.chaos import Chaos
from gradwire.errors import ConfigError

ENV_PREFIX = "GRADWIRE_"
PORT_BASE = 47400
PRESETS = ("auto", "mlt", "dlcp", "ltp", "ultima", "reliable")
FILLS = ("zero", "previous", "local")
DIVISORS = ("contributions", "world")
ROTATIONS = ("auto", "on", "off")
ALGORITHMS = (
    "auto",
    "ring",
    "transpose",
    "halving_doubling",
    "parameter_server",
    "weighted_transpose",
    "one_shot",
)
CONTROLLERS = ("auto", "bottleneck", "timely", "receiving_rate")
# The papers of these presets describe their own rate control; the others have the bottleneck model of LTP.
PRESET_CONTROLLERS = {"mlt": "timely", "dlcp": "receiving_rate"}
# The presets whose papers tell the network what matters, by code point and by ECN. Sample rates: MLT 4.2.2, DLCP 3.2.2.
TAGGING_PRESETS = ("mlt", "dlcp")
SAMPLE_RATES = {"mlt": 0.05, "dlcp": 0.001}
SERVER_MODES = ("colocated", "dedicated")
SPRAYS = ("adaptive", "random", "round_robin")
# AF41, AF31, AF21 and AF11, of which switches commonly make a queue each (RFC 4594), for 1 to 4 classes; with more
# classes, their next drop precedence between them.
_FOUR = (34, 26, 18, 10)
_EIGHT = (34, 36, 26, 28, 18, 20, 10, 12)
CODE_POINTS = tuple(_FOUR[:n] if n <= len(_FOUR) else _EIGHT[:n] for n in range(1, 9))
CODE_POINT_CONTROL = 40  # CS5, signalling: above all of them, below what routers need
# With these values nothing may be missing.
_WHOLE = {"loss_bound": 0.0, "floor": 1.0}
SECURITY_MODES = ("auto", "on", "off")
PEER_LOSS = ("raise", "continue")
LOG_LEVELS = ("debug", "info", "warning", "error")
# Read by gradwire.secret and never kept here: settings are printed and published.
SECRET_VARIABLE = "GRADWIRE_SECRET"  # noqa: S105  its name
# Variables that other parts of the package read (command line, lab, tests); never settings of the transport.
ENV_PREFIXES_ELSEWHERE = ("GRADWIRE_LAB_", "GRADWIRE_DEMO_", "GRADWIRE_BENCH_", "GRADWIRE_TEST_")
# What Kubernetes puts into the environment of every pod for a Service, by whose name they begin ("service links"): one that is called
# gradwire-metrics makes GRADWIRE_METRICS_PORT=tcp://10.0.0.7:9400, GRADWIRE_METRICS_SERVICE_HOST, GRADWIRE_METRICS_PORT_9400_TCP_ADDR, ...
_SERVICE_NAME = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_SERVICE_VALUES = ("tcp://", "udp://", "sctp://")


def _setting(default: Any, kind: type, doc: str, **limits: Any) -> Any:
    """Declares a field. `limits`: low, high, choices, optional (None allowed), unit, everywhere (ranks must agree), url."""
    has_secrets = bool(limits.get("url"))  # user and password before the host
    return dataclasses.field(default=default, repr=not has_secrets, metadata={"kind": kind, "doc": doc, **limits})


@dataclass(frozen=True)
class Config:
    """Settings of gradwire in one process. Immutable; every constructor checks every field.

    Raises:
        ConfigError: a value is of the wrong type or out of range; names the field, the value and what is allowed.
    """

    # fmt: off
    port: int | None = _setting(None, int, "UDP port. Rank with LOCAL_RANK r on its host (or as MPI or Slurm number it) binds `port + r`; "
        "0 lets the kernel choose. Unset: 47400 + LOCAL_RANK, or where another process has that port, one that no rank of the host is "
        "about to bind, which a warning names: up to 47463 behind theirs where the launcher says how many they are, or 47144 to 47207. "
        "Where no launcher set LOCAL_RANK: the first free one from 47400.",
        low=0, high=65535, optional=True)
    interface: str = _setting("", str, "Interfaces or addresses to use: names, addresses or networks (10.0.0.0/8), "
        "separated by commas; `^name,...` leaves out all in the list. Empty or with `^`: every other one that is up, but for loopback, "
        "link-local addresses, and bridges of containers (docker and its networks `br-<12 hex digits>`, virbr, podman), whose addresses "
        "are the same on every host. Those, and what is on `lo`, may be named, but for link-local addresses of IPv6, which are never used. "
        "The port is open at all addresses of the host, so that its ranks meet over loopback; at one alone where the list leaves one, "
        "named as an address or on `lo`: ranks of one host then do not meet over loopback, unless it is such an address.")
    mtu: int | None = _setting(None, int, "Largest IP packet to send. Unset: what the interface says, at most 9000, and "
        "between ranks of one host 32768 (9000 with fault injection). The smallest one of all ranks counts, of several interfaces too; "
        "a warning names one that is narrower than half of another, where neither this nor `interface` is set.",
        unit="bytes", low=576, high=65535, optional=True)
    preset: str = _setting("auto", str, "What an opted-in gradient reduction may leave behind. Nothing else is ever lossy. A call that "
        "names another one takes only its rules of what may be missing; rate control, code points and importance stay those of this "
        "setting.", choices=PRESETS, everywhere=True)
    loss_bound: float | None = _setting(None, float, "Share of each transfer of the reduce stage that may be missing; in a ring of N > 4 "
        "ranks, which hands on several ranks' values, 4 / N of it. Whole packets are missing or none: in a transfer of less than 1 / "
        "`loss_bound` packets (at 0.05 of 20, some 28 KB with an `mtu` of 1500, 178 KB with 9000) none may be but a last one that is "
        "shorter than that share of the transfer, and only a deadline ends the wait before the others have come. Between hosts a warning "
        "says so once, of a call that gives the engine 4 MiB or more at a time; it knows nothing of rings, `network_threads` and "
        "parameter servers. A transfer is a tensor, or what `gpu_chunk_mb` and `network_threads` make of it, divided by the ranks. "
        "`reliable` refuses more than 0 (see above). Unset: the preset's.", low=0.0, high=0.9, optional=True, everywhere=True)
    deadline_ms: float | None = _setting(None, float, "Time after which a transfer is closed with what has arrived, if that is at "
        "least `floor`; 0 means never, which `ultima` refuses. Unset: the preset's.", unit="ms", low=0.0, high=3.6e6,
        optional=True, everywhere=True)
    floor: float | None = _setting(None, float, "Least share that a deadline may accept. Unset: the preset's; in `mlt` and `dlcp` that is "
        "what `loss_bound` asks for anyway, so that deadlines, also `step_delay_max_ms`, shorten nothing there. `reliable` refuses less "
        "than 1 as it refuses a `loss_bound`, and `ultima` more than 0.", low=0.0, high=1.0, optional=True, everywhere=True)
    step_delay_max_ms: float | None = _setting(None, float, "The most that waiting for retransmissions may delay a training step: an upper "
        "bound of its deadlines, however they are derived. The buckets that `tolerate_loss` sends share it, and so do the stages of one "
        "reduction that wait for each other (the steps of a ring). What still flows is not cut by it in preset `auto`: a first pass that "
        "nothing has come of for a quarter of the deadline, or for as long as packets overtake each other where that is more, is taken for "
        "one that does not. Unset: what was measured alone.", unit="ms", low=0.1, high=3.6e6, optional=True, everywhere=True)
    data_percentage: float | None = _setting(None, float, "LTP: share of a transfer that is enough once its link's threshold has "
        "passed (section III-B). Unset: 80.", unit="%", low=0.0, high=100.0, optional=True, everywhere=True)
    deadline_margin_ms: float | None = _setting(None, float, "LTP's constant C: the deadline is so much later than the slowest "
        "link's threshold. The paper takes 30 in a data centre and 100 over long distances. Unset: 30.", unit="ms", low=0.0,
        high=3.6e6, optional=True, everywhere=True)
    epoch_transfers: int | None = _setting(None, int, "LTP: transfers of one size on one link after which its threshold is learned "
        "anew: steps for a model whose buckets all differ in size, while k of one size (25 MB) get through it k times as fast. "
        "Unset: 1000.", unit="transfers", low=1, high=1 << 31, optional=True, everywhere=True)
    critical_packets: int | None = _setting(None, int, "LTP: packets at each end of a transfer that always arrive, whatever else "
        "is lost (section III-E). Unset: 1.", unit="packets", low=0, high=1000, optional=True, everywhere=True)
    quiet_percentage: float | None = _setting(None, float, "ULTIMA: share of a stage's usual time that is waited when nothing "
        "arrives any more (section 3.3.2; the paper tries 1, 5, 10 and 20). Unset: 10.", unit="%", low=0.1, high=100.0,
        optional=True, everywhere=True)
    warm_up_rounds: int | None = _setting(None, int, "ULTIMA: exact reductions of the largest bucket from whose times the limit of a "
        "stage is learned (section 3.3.1). Unset: 20.", unit="rounds", low=1, high=10_000, optional=True, everywhere=True)
    gather_loss_bound: float | None = _setting(None, float, "Share of each transfer of the gather stage, which sends results back, "
        "that may be missing. Above 0 the ranks' results may differ from each other; a model's parameters until `resynchronize`. "
        "Only for `mlt`, `dlcp` and `ultima`, whose papers lose results too; with the others, which keep replicas identical, more than "
        "0 is refused, and what the program says is left out where `GRADWIRE_PRESET` chooses one of them. 0: replicas stay "
        "identical under these as well. In `mlt` and `dlcp` no more than `loss_bound` counts. Unset: the preset's, which is `loss_bound` "
        "for `mlt`, for `dlcp` 0.01 and at most a tenth of `loss_bound`, and for `ultima` whatever its timeouts leave, with nothing sent "
        "again.",
        low=0.0, high=0.5, optional=True, everywhere=True)
    gather_fill: str = _setting("zero", str, "What a result holds where the gather stage lost it, or where no rank's values reached a "
        "dedicated server: zero (under SGD without momentum and weight decay the parameter keeps its value of the iteration before, as in "
        "the papers; other optimizers move it by what they remember), the previous result, or what this rank's contribution alone would "
        "give. `previous` with DDP keeps the latest average of each bucket, one more copy of the gradients; with one tensor it needs "
        "`output`; it is sent unrotated.", choices=FILLS, everywhere=True)
    divide_by: str = _setting("contributions", str, "What the mean of an opted-in reduction divides by where something did not "
        "arrive: the ranks whose values did (their mean stands in for the others, MLT appendix A), or all of them (zero stands in, "
        "LTP's bubble, section III-C: such elements come out smaller until error feedback has caught up).", choices=DIVISORS,
        everywhere=True)
    hadamard: str = _setting("auto", str, "Whether gradients that tolerate loss are sent rotated (randomised Hadamard transform, ULTIMA "
        "section 3.4), so that a lost packet, or a cut-off tail, takes a little of every gradient and not all of a few. `auto`: from 5 % "
        "loss on, as measured and agreed by all ranks, but not with `importance`: rotated, no packet matters more than another; nor under "
        "`mlt` and `dlcp`, what they cut counts as loss, unless `importance` is `off`; nor for a DDP model with "
        "`find_unused_parameters=True` and error feedback, where `on` is refused (error-feedback.md). Rotated gradients are rounded: one "
        "that is exactly zero (a row of an embedding that no batch used) comes back as some 1e-3 of the others in bfloat16, 1e-4 in "
        "float16, without any loss, and Adam makes steps of that. Padding: at most an eighth, none from 2^17 elements on; tensors of fewer "
        "than 2048 elements are sent as they are.", choices=ROTATIONS, everywhere=True)
    algorithm: str = _setting("auto", str, "Schedule of every all-reduce, also of an exact one. `halving_doubling` is for small sizes "
        "and always exact; a reduction that may lose something is a transpose instead. Neither it nor `ring` takes float16 and "
        "bfloat16, whose partial sums it would round at every step: a transpose does, which sums in float32 and rounds once. "
        "`parameter_server`: see `servers`. `weighted_transpose`: ranks whose link is much slower than most, by what all have "
        "measured, sum less, or nothing; `auto` takes it where that is the case. `one_shot`: every rank sends all of its values to every "
        "other one, in half a round trip; exact, for at most 64 KiB, and 1 MiB of all ranks together, else a transpose. `auto` also takes "
        "the ring for large sums where ranks share the cores of a host.",
        choices=ALGORITHMS, everywhere=True)
    servers: int | None = _setting(None, int, "Parameter servers, where `algorithm` is `parameter_server`: each sums a part of "
        "every tensor. Unset: every rank (MLT's testbed), or one where they are dedicated (LTP's testbed).",
        low=1, high=16384, optional=True, everywhere=True)
    server_mode: str = _setting("colocated", str, "`colocated`: the servers are so many ranks of each group, spread evenly. "
        "`dedicated`: they are processes of their own (`gradwire serve`), without a GPU or a model, which serve the default group; "
        "other groups go on with colocated ones, every rank.", choices=SERVER_MODES, everywhere=True)
    incast: int | None = _setting(None, int, "Most ranks that send to one receiver at once in a transpose all-reduce (ULTIMA's "
        "incast factor, section 3.2.2). 1: as many rounds as a ring has steps, the least load on a receiver. Unset: all at once, "
        "the fewest round trips.", unit="ranks", low=1, high=16384, optional=True, everywhere=True)
    eager_bytes: int = _setting(262144, int, "Bytes that may be sent to a peer before it has asked for them; the memory "
        "that an early peer can cost.", unit="bytes", low=4096, high=1 << 28, everywhere=True)
    ack_every: int = _setting(10, int, "Data packets for each acknowledgement (MLT section 4.2.3). Those that left at one moment, up to "
        "nine times as many, wait for one that left later: where rates are high an acknowledgement costs as much as 64 KB do.",
        unit="packets", low=1, high=256, everywhere=True)
    ack_delay_us: int = _setting(250, int, "Longest that an acknowledgement is held back where packets come fast. Where those of a peer "
        "are further apart it waits for three of them, at most eight times this and 2 ms. More saves processor time on slow links; the "
        "sender's rate control and repairs may learn of what came later by as much.",
        unit="microseconds", low=0, high=50_000, everywhere=True)
    controller: str = _setting("auto", str, "Rate controller of every connection. `auto`: the preset's, which is `timely` "
        "for `mlt`, `receiving_rate` for `dlcp` and `bottleneck` for the others.", choices=CONTROLLERS, everywhere=True)
    initial_rate_mbps: float = _setting(1000.0, float, "Rate at which a connection starts, before anything was measured.",
        unit="Mbit/s", low=0.1, high=1e6)
    peer_timeout_s: float = _setting(10.0, float, "Longest silence after which a rank counts as lost. Every rank sends at least ten "
        "packets in this time. Once a rank was watched for as long, five times the longest pause between its packets in the last "
        "minutes is enough, but 3 s where that is more: with timeouts below 6 s (docs/membership.md).", unit="s", low=0.5,
        high=3600.0, everywhere=True)
    on_peer_loss: str = _setting("raise", str, "What a lost rank means for the others: `raise`, the same typed error on all of them; "
        "`continue`, more than half of the ranks go on without it, means and barriers in flight are finished among them, and what "
        "an all-reduce needs to be made again is copied (docs/membership.md). At most 64 ranks.", choices=PEER_LOSS, everywhere=True)
    connect_timeout_s: float = _setting(30.0, float, "Longest wait for packets of the other ranks once all have read each other's "
        "records in the Store; a shorter timeout of the group counts.", unit="s", low=0.1, high=86400.0)
    dscp: int = _setting(0, int, "Differentiated services code point of every packet, unless the next two say otherwise.",
        low=0, high=63)
    dscp_classes: str | None = _setting(None, str, "Code point of each traffic class, the most urgent first, separated by commas; "
        "`auto`: 34, 26, 18, 10 (AF41 to AF11) and their like; `off`: none. Clouds may clear or police code points; they help where "
        "the switches have a queue for each (MLT section 4.2.2). A list, as `gradwire switch` prints it, says that they have, served by "
        "strict priority: packets that more urgent ones have overtaken do not count as lost then. About that ranks must agree: one "
        "list of different code points on all of them; `auto` on some and `off` on others is no difference. "
        "Unset: the preset's, which is `auto` for `mlt` and `dlcp` and `off` for the others.", optional=True, everywhere=True)
    dscp_control: int | None = _setting(None, int, "Code point of acknowledgements and other control packets. Unset: 40 (CS5) where "
        "`dscp_classes` is `auto`, else `dscp`.", low=0, high=63, optional=True)
    classes: int = _setting(4, int, "Traffic classes that the layers of a model are spread over.", low=1, high=8, everywhere=True)
    importance: str | None = _setting(None, str, "`magnitude`: packets of an opted-in gradient reduction whose mean magnitude reaches "
        "the median are ECN-capable, so that a switch with RED and ECN drops the others first. No rate reacts to congestion "
        "marks: it helps on switches of one's own. Unset: the preset's, which is `magnitude` for `mlt` and `dlcp` and `off` for the "
        "others, because it reads every gradient once more.", choices=("off", "magnitude"), optional=True, everywhere=True)
    importance_sample_rate: float | None = _setting(None, float, "Share of the gradients from which that median is estimated. "
        "Unset: 0.001 for `dlcp`, as in its paper, and 0.05 for the others, as in MLT's.", low=0.0, high=1.0, optional=True)
    offload: str = _setting("auto", str, "Segmentation and receive offload and batched system calls of the kernel: used where it, and the "
        "filter of a sandbox, has them, or never. Without batched calls the kernel chooses the address that datagrams leave from, and the "
        "card, also where `interface` names others, unless that leaves one address alone at which the port is open.",
        choices=("auto", "off"))
    urgency: int = _setting(5, int, "How many steps of niceness the network thread is more urgent than the process, where the system "
        "allows it (root, CAP_SYS_NICE, or a RLIMIT_NICE that reaches so far; elsewhere nothing happens). Where every core computes, "
        "each packet would wait for one. More than 5 helps ranks whose cores are their own, and slows those that share.", low=0, high=39)
    busy_poll_us: int = _setting(0, int, "Longest time for which the network thread looks for packets again instead of sleeping, where "
        "they have come at shorter intervals. Small collectives between ranks whose cores are their own get faster by what waking a thread "
        "takes; the looking is processor time. 0: it always sleeps.", unit="microseconds", low=0, high=1000)
    give_way: str = _setting("auto", str, "Whether the network thread lets other threads of its core go first, and looks for packets "
        "again, before it sleeps, and looks instead of sleeping for less than 20 microseconds. Ranks that share cores save the change of "
        "threads for each message, about a fifth of their processor time in large calls. `auto`: where a group has more ranks on this "
        "host than this process may use cores.",
        choices=("auto", "on", "off"))
    own_core: str = _setting("auto", str, "Whether the network thread stays on one core: the n-th of those that it may use for the n-th "
        "rank on this host. Threads that wake each other by packets gather on one core otherwise. `auto`: where the ranks of a group on "
        "this host are as many as its cores, all of which this process may use, unless `send_thread` is on. The "
        "largest group on the host decides.",
        choices=("auto", "on", "off"))
    send_thread: str = _setting("auto", str, "Whether a second thread hands data to the kernel, where much of it leaves, while the "
        "network thread receives and adds. It lets one rank use two cores where links are faster than one core. `auto`: where the host "
        "has two cores for each rank that is on it, and this process may use two; where there are several `network_threads`, only once it "
        "shows that few large calls are divided between them. Without `offload` there is none.",
        choices=("auto", "on", "off"))
    network_threads: int | None = _setting(None, int, "Network threads, each with a UDP port of its own (64, 128 ... behind the "
        "first's, or a free one), between which all-reduces, all-gathers, reduce-scatters and broadcasts of 2 MiB and more (the rows of "
        "all ranks together) are divided. A group uses the least of its ranks, and only those that reach their peers. Set on all ranks, "
        "they are used on every link. Unset: one for each two cores that this process may use, at most four; used on links faster than "
        "2.5 Gbit/s, no more than there are cores for each rank on a host, and in groups of at most 128 ranks. 1: calls are not divided. "
        "Never divided are other collectives, all-reduces whose results may be lost (`mlt` and `dlcp`), calls that learn from those "
        "before (`ltp`, `ultima`), and groups with `on_peer_loss=continue` or dedicated servers.",
        low=1, high=8, optional=True)
    paths: int = _setting(1, int, "Paths to each peer: UDP source ports, which switches hash to choose among equal ways, and "
        "local addresses in turn where there are several. All end at the peer's one port. Each network card that leads to the "
        "peer carries its part, whatever the host's routes; one that leads nowhere is found out and costs nothing. A group "
        "uses the least of its ranks.", low=1, high=16)
    spray: str = _setting("adaptive", str, "How packets are spread over the paths. `adaptive`: the better of two random ones; "
        "a path that loses or lags more than the others gets nothing until it has healed.", choices=SPRAYS)
    security: str = _setting("auto", str, "Authenticated encryption of every datagram (AES-256-GCM, or ChaCha20-Poly1305 where a "
        "processor lacks AES). `auto`: unless all ranks of the group are in one network namespace and meet over loopback. Keys come "
        "from the job secret: the variable GRADWIRE_SECRET or `secret_file`, the same on all ranks. With neither, rank 0 makes one and "
        "hands it over through the Store: then whoever reads the Store can join. See docs/security.md.",
        choices=SECURITY_MODES, everywhere=True)
    secret_file: str | None = _setting(None, str, "File with the job secret, at least 16 bytes, which only its owner may read. Instead of "
        "the variable GRADWIRE_SECRET, which is inherited by every child and is no setting: it is never printed.", optional=True)
    rendezvous: str | None = _setting(None, str, "Where the ranks of a `gradwire.Communicator` meet, `host:port`: a TCP address of rank "
        "0's host, the same on all ranks. An argument of the constructor goes first. With PyTorch ranks meet in its Store.",
        optional=True)
    chaos: str | None = _setting(None, str, "Faults done to the datagrams that this process receives, before the protocol sees them, "
        "to test what is built on it: `loss=1%,tail=10%,corrupt=1%,duplicate=1%,delay=2ms,seed=7`, each part if wanted. `loss`: lost at "
        "random. `corrupt`: a bit is flipped. `duplicate`: comes twice. `tail`: the "
        "data packets in the last part of each transfer that may lose something, when they come for the first time (a burst). "
        "`delay`: held back. The seed decides which packets. Never in production: every process warns that it is on.",
        optional=True)
    job: str | None = _setting(None, str, "Name of the job, by which `gradwire monitor` finds its ranks. Unset: the launcher's "
        "(TORCHELASTIC_RUN_ID, SLURM_JOB_ID), or the address where the ranks meet.", optional=True)
    straggler_warning_s: float = _setting(3.0, float, "How long a rank is waited for before one warning names it and the cause: in one "
        "collective, or in many short waits that are a fifth of twice, or of twenty times, this time. 0: never, and nothing is said of "
        "a flood, of network threads that others do not answer or of a kernel that refuses to send either.", unit="s", low=0.0, high=3600.0)
    status_socket: bool = _setting(True, bool, "Whether `gradwire monitor` and `gradwire trace` can look into this process: a Unix socket "
        "that only its own user can open and that only answers (docs/observability.md).")
    metrics_port: int | None = _setting(None, int, "TCP port of a Prometheus endpoint; rank with LOCAL_RANK r on its host has "
        "`metrics_port + r`, 0 lets the kernel choose. Needs `gradwire[metrics]`. Unset: none.", low=0, high=65535, optional=True)
    metrics_host: str = _setting("127.0.0.1", str, "Address at which that endpoint listens. Whoever reaches it can read the metrics; "
        "it answers eight at a time.")
    otlp_endpoint: str | None = _setting(None, str, "URL to which OpenTelemetry metrics are sent by OTLP over HTTP, such as "
        "`http://localhost:4318/v1/metrics`. Needs `gradwire[otel]`. User and password in it are sent and never shown; "
        "headers for a collector are what `OTEL_EXPORTER_OTLP_HEADERS` has. Unset or empty: none.", optional=True, url=True)
    otlp_every_s: float = _setting(10.0, float, "Pause between two of these exports.", unit="s", low=0.1, high=3600.0)
    pinned_mb: int = _setting(1024, int, "The most host memory that is page-locked for copies from and to GPUs, in use and kept for "
        "the next step. Twice the bytes of all gradients never has to wait for the system; what would exceed it gets ordinary memory, "
        "whose copies block the caller. 0: always so.", unit="MiB", low=0, high=1 << 20)
    gpu_chunk_mb: int = _setting(8, int, "An all-reduce, reduce, broadcast, all-gather or reduce-scatter of a GPU's tensors that is "
        "larger goes in equal pieces of at most this: the first is sent while the next is still copied to the host, and its result "
        "goes back while the next one comes. Each piece is a transfer of its own for deadlines and bounds of loss. 0: in one piece.",
        unit="MiB", low=0, high=1 << 20, everywhere=True)
    sync_futures: bool = _setting(False, bool, "`Work.get_future()` waits for the collective, so that callbacks run on the "
        "caller in issue order. For hooks of your own that start collectives in callbacks; for torch's it is so anyway. Where only "
        "some ranks waited, they would start such collectives in another order than the others.", everywhere=True)
    log_level: str = _setting("warning", str, "Least severe message of the logger `gradwire` that is shown, on standard error where "
        "the program has not set logging up. Unset, it is what the program sets for that logger or for all.", choices=LOG_LEVELS)
    # fmt: on

    # Of what the environment has set: the variable, and the value that it gave.
    _origins: Mapping[str, tuple[str, Any]] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for field in settings():
            value = _checked(field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        # `dataclasses.replace` hands them on with other values.
        kept = {name: found for name, found in self._origins.items() if getattr(self, name) == found[1]}
        object.__setattr__(self, "_origins", kept)
        self.code_points()
        self.faults()
        self._check_that_all_may_arrive()

    def _check_that_all_may_arrive(self) -> None:
        """`reliable` and a share that may be missing contradict each other, unless one is the operator's and the other the program's."""
        for name, whole in _WHOLE.items() if self.preset == "reliable" else ():
            value = getattr(self, name)
            if value not in (None, whole) and self.pinned(name) == self.pinned("preset"):
                raise ConfigError(contradicts_reliable(name, value), field=name, value=value)

    def code_points(self) -> list[int]:
        """Code point of each traffic class; empty: none has its own.

        Raises:
            ConfigError: `dscp_classes` is not a list of `classes` code points.
        """
        chosen = self._chosen_code_points()
        if chosen == "off":
            return []
        if chosen == "auto":
            return list(CODE_POINTS[self.classes - 1])
        words = chosen.split(",")
        points = [int(word) if word.strip().isdecimal() else 64 for word in words]
        if max(points) > 63 or len(points) != self.classes:
            allowed = f"off | auto | {self.classes} values of 0 to 63 (one for each of `classes`), separated by commas"
            text = f"dscp_classes = {chosen!r} is not allowed: {allowed}"
            raise ConfigError(text, field="dscp_classes", value=chosen, allowed=allowed)
        return points

    def class_queues(self) -> int:
        """Queues for traffic classes that the network has; 0: they overtake each other nowhere, as far as anybody has said."""
        points = self.code_points()
        is_listed = self._chosen_code_points() != "auto"
        return len(points) if is_listed and len(set(points)) == len(points) else 0

    def faults(self) -> Chaos | None:
        """The faults of `chaos`; None: none.

        Raises:
            ConfigError: it is not written as it should be.
        """
        if self.chaos is None:
            return None
        try:
            return Chaos.parse(self.chaos)
        except ValueError as error:
            text = f"chaos = {self.chaos!r} is not allowed: {error}. Allowed: {CHAOS_ALLOWED}"
            raise ConfigError(text, field="chaos", value=self.chaos, allowed=CHAOS_ALLOWED) from None

    def control_code_point(self) -> int:
        """Code point of control packets."""
        if self.dscp_control is not None:
            return self.dscp_control
        return CODE_POINT_CONTROL if self._chosen_code_points() == "auto" else self.dscp

    def _chosen_code_points(self) -> str:
        default = "auto" if self.preset in TAGGING_PRESETS else "off"
        return default if self.dscp_classes is None else self.dscp_classes

    def dedicated_servers(self) -> int:
        """Parameter servers that are processes of their own; 0: none."""
        return (self.servers or 1) if self.server_mode == "dedicated" else 0

    def marks_importance(self) -> bool:
        """Whether packets of large gradients are told from those of small ones: the field, or what the preset's paper does."""
        if self.importance is None:
            return self.preset in TAGGING_PRESETS
        return self.importance == "magnitude"

    def sample_rate(self) -> float:
        """Share of the gradients from which their median magnitude is estimated: the field, or the preset's paper's."""
        if self.importance_sample_rate is None:
            return SAMPLE_RATES.get(self.preset, SAMPLE_RATES["mlt"])
        return self.importance_sample_rate

    @classmethod
    def auto(cls, **settings: Any) -> Config:
        """Preset `auto`: never cuts what still flows, waits for no retransmission beyond the bound."""
        return cls(**{**settings, "preset": "auto"})

    @classmethod
    def mlt(cls, **settings: Any) -> Config:
        """Preset `mlt` (NSDI'24): the receiver stops a transfer as soon as the bound is met."""
        return cls(**{**settings, "preset": "mlt"})

    @classmethod
    def dlcp(cls, **settings: Any) -> Config:
        """Preset `dlcp` (arXiv 2008.08445): as `mlt`, and results may be lost within a smaller bound: replicas may differ."""
        return cls(**{**settings, "preset": "dlcp"})

    @classmethod
    def ltp(cls, **settings: Any) -> Config:
        """Preset `ltp` (IWQoS'23): 80 % are enough after a threshold that each link learns."""
        return cls(**{**settings, "preset": "ltp"})

    @classmethod
    def ultima(cls, **settings: Any) -> Config:
        """Preset `ultima` (NSDI'25): nothing is sent again, stages end in a time learned from exact rounds."""
        return cls(**{**settings, "preset": "ultima"})

    @classmethod
    def reliable(cls, **settings: Any) -> Config:
        """Preset `reliable`: everything arrives."""
        return cls(**{**settings, "preset": "reliable"})

    @classmethod
    def from_env(cls, base: Config | None = None, environ: Mapping[str, str] | None = None) -> Config:
        """`base` with every `GRADWIRE_<FIELD>` of the environment on top.

        Args:
            base: arguments of the program; None means the defaults.
            environ: None means `os.environ`.

        Raises:
            ConfigError: a variable does not exist (the message has the nearest name that does) or its value is wrong. Those that
                Kubernetes makes of a Service are ignored.
        """
        base = cls() if base is None else base
        values = {f.name: getattr(base, f.name) for f in settings()}
        origins = dict(base._origins)
        for name, text in sorted((os.environ if environ is None else environ).items()):
            if not _is_setting(name, text):
                continue
            field = _field_of_variable(name)
            values[field.name] = _parsed(field, name, text)
            origins[field.name] = (f"environment {name}", values[field.name])
        return cls(**values, _origins=origins)

    def origin(self, name: str) -> str:
        """Where the value of a field comes from: `default`, `argument` or `environment GRADWIRE_...`."""
        if name in self._origins:
            return self._origins[name][0]
        default = _by_name()[name].default
        return "default" if getattr(self, name) == default else "argument"

    def explain(self, environ: Mapping[str, str] | None = None) -> str:
        """One line for each field: name, the value that a process with this configuration has, and where it comes from.

        Args:
            environ: whose `GRADWIRE_*` variables go first, as when a process starts. None means `os.environ`; empty: this object alone.

        Raises:
            ConfigError: as of `from_env`.
        """
        used = Config.from_env(self, environ)
        rows = [(f.name, str(_shown(f, getattr(used, f.name))), used.origin(f.name)) for f in settings()]
        width, column = max(len(r[0]) for r in rows), max(len(r[1]) for r in rows)
        return "\n".join(f"{name:<{width}}  {value:<{column}}  {origin}" for name, value, origin in rows)

    def controller_name(self) -> str:
        """The rate controller that connections use: the field, or what the preset's paper describes."""
        return PRESET_CONTROLLERS.get(self.preset, "bottleneck") if self.controller == "auto" else self.controller

    @cached_property
    def policies(self) -> dict[Any, Any]:
        """What calls asked for of these settings, with the numbers that they got."""
        return {}

    def pinned(self, name: str) -> bool:
        """Whether the operator set this field, so that arguments of single calls must not override it."""
        return self.origin(name).startswith("environment")


def contradicts_reliable(name: str, value: float | None) -> str:
    """What is wrong with a setting by which something could be missing, beside the preset under which nothing may be."""
    text = f"{name} = {value:g} is not allowed with preset reliable, under which everything is waited for"
    return f"{text}: leave {name} unset, or choose auto"


def settings() -> Collection[dataclasses.Field[Any]]:
    """The public fields, in order."""
    return _by_name().values()


@cache
def _by_name() -> dict[str, dataclasses.Field[Any]]:
    """Each call that tolerates loss looks a dozen of them up."""
    return {f.name: f for f in dataclasses.fields(Config) if not f.name.startswith("_")}


def check(name: str, value: Any) -> Any:
    """`value` as field `name` would take it.

    Raises:
        ConfigError: it would not.
    """
    field = _by_name().get(name)
    if field is None:
        raise ConfigError(f"there is no setting {name!r}", field=name)
    return _checked(field, value)


def service_links(environ: Mapping[str, str]) -> list[str]:
    """Variables that look like settings and that Kubernetes made of a Service; `Config.from_env` ignores them."""
    return sorted(
        name for name, text in environ.items() if name.startswith(ENV_PREFIX) and _is_service_link(name, text)
    )


def allowed(field: dataclasses.Field[Any]) -> str:
    """What a field accepts, for people."""
    limits = field.metadata
    if "choices" in limits:
        text = " | ".join(limits["choices"])
    elif limits["kind"] is bool:
        text = "true | false"
    elif "url" in limits:
        text = "http://HOST... | https://HOST..."
    elif "low" in limits:
        text = (
            f"{limits['low']:g} to {limits['high']:g}"
            if limits["kind"] is float
            else f"{limits['low']} to {limits['high']}"
        )
    else:
        text = "text"
    return f"{text}, or unset" if limits.get("optional") else text


def _checked(field: dataclasses.Field[Any], value: Any) -> Any:
    limits = field.metadata
    kind = limits["kind"]
    if value is None and limits.get("optional"):
        return None
    if "url" in limits and value == "":
        return None
    value = plain(kind, value)
    valid = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    if valid and "choices" in limits:
        valid = value in limits["choices"]
    if valid and "low" in limits:
        valid = limits["low"] <= value <= limits["high"]  # False for NaN
    if valid and "url" in limits:
        valid = is_url(value)
    if not valid:
        raise _bad_value(field, field.name, value)
    return value


def _shown(field: dataclasses.Field[Any], value: Any) -> Any:
    """As others may see it: what stands before a host may be a password."""
    return without_user(value) if "url" in field.metadata and isinstance(value, str) else value


def _parsed(field: dataclasses.Field[Any], variable: str, text: str) -> Any:
    kind = field.metadata["kind"]
    try:
        if kind is bool:
            value: Any = _BOOLEANS[text.strip().lower()]
        else:
            value = kind(text.strip())
        return _checked(field, value)
    except (ConfigError, KeyError, ValueError):
        raise _bad_value(field, variable, text) from None


def _bad_value(field: dataclasses.Field[Any], name: str, value: Any) -> ConfigError:
    value = _shown(field, value)
    return ConfigError(
        f"{name} = {written(value)} is not allowed: {allowed(field)}",
        field=field.name,
        value=value,
        allowed=allowed(field),
    )


def _is_setting(variable: str, text: str) -> bool:
    if not variable.startswith(ENV_PREFIX) or variable.startswith(ENV_PREFIXES_ELSEWHERE):
        return False
    return variable != SECRET_VARIABLE and not _is_service_link(variable, text)


def _is_service_link(variable: str, text: str) -> bool:
    is_port_of_service = variable.endswith("_PORT") and text.startswith(_SERVICE_VALUES)
    return is_port_of_service or _SERVICE_NAME.search(variable) is not None


def _field_of_variable(variable: str) -> dataclasses.Field[Any]:
    known = {ENV_PREFIX + f.name.upper(): f for f in settings()}
    if variable in known:
        return known[variable]
    nearest = difflib.get_close_matches(variable, known, n=1, cutoff=0.0)[0]
    raise ConfigError(f"there is no setting {variable}; the nearest one is {nearest}", field=variable, nearest=nearest)


_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
