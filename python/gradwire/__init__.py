"""gradwire moves gradients between the ranks of a data-parallel training job, and does not wait for the slowest packet.

`import gradwire.torch` registers the `torch.distributed` backend. Importing this package starts nothing and does not
import torch.
"""

from gradwire.config import Config
from gradwire.errors import GradwireError
from gradwire.report import Contributions, DeliveryReport, PeerDelivery

__all__ = ["Config", "Contributions", "DeliveryReport", "GradwireError", "PeerDelivery", "__version__"]
__version__ = "0.1.0"
