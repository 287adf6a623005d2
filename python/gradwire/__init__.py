"""gradwire moves gradients between the ranks of a data-parallel training job, and does not wait for the slowest packet.

`import gradwire.torch` registers the `torch.distributed` backend; `gradwire.Communicator` has the same collectives on NumPy
arrays, without torch. Importing this package starts nothing and imports neither torch nor NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradwire.config import Config
from gradwire.errors import GradwireError
from gradwire.report import Contributions, DeliveryReport, PeerDelivery, Straggler

if TYPE_CHECKING:
    from gradwire.communicator import Communicator, Operation

__all__ = [
    "Communicator",
    "Config",
    "Contributions",
    "DeliveryReport",
    "GradwireError",
    "Operation",
    "PeerDelivery",
    "Straggler",
    "__version__",
    "stats",
]
__version__ = "0.1.0"


def stats() -> dict[str, Any]:
    """Everything that this process counts, copied at one moment: docs/metrics.md has the names and units. A signal handler may ask, too.

    Returns:
        `engine`: counters of the socket and its thread. `groups`: for each process group counters, estimates and histograms by
        peer, path, collective, preset and stage. `stragglers`: which rank each group waits for. `job`, `rank`, `host`, `pid`,
        `port`, `preset`, `time_s`: who and when. Before the first group is formed there are no groups and no engine.
    """
    from gradwire import _runtime

    owner = _runtime.current()
    return {"engine": {}, "groups": [], "stragglers": []} if owner is None else owner.observer.stats()


def __dir__() -> list[str]:
    """With what is imported when it is first asked for, so that completion knows it."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in ("Communicator", "Operation"):
        from gradwire import _extras

        _extras.require("numpy", "numpy", f"gradwire.{name}")
        from gradwire import communicator

        return getattr(communicator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
