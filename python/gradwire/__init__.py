"""gradwire moves gradients between the ranks of a data-parallel training job, and does not wait for the slowest packet.

`import gradwire.torch` registers the `torch.distributed` backend; `gradwire.Communicator` has the same collectives on NumPy
arrays, without torch. Importing this package starts nothing and imports neither torch nor NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradwire.config import Config
from gradwire.errors import GradwireError
from gradwire.report import Contributions, DeliveryReport, PeerDelivery

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
    "__version__",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("Communicator", "Operation"):  # they need NumPy
        from gradwire import communicator

        return getattr(communicator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
