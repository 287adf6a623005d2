"""Small clusters on one machine, for demonstrations, benchmarks and tests: real Linux hosts, links and losses.

from gradwire.lab import Cluster, Link, sandbox

def main() -> int:
with Cluster(hosts=4, link=Link(rate_mbit=100), loss=0.01) as cluster:
return cluster.spawn(0, ["ping", "-c", "3", cluster.address(1)]).wait()

sandbox.run(main)
"""

from gradwire.lab import sandbox
from gradwire.lab.cluster import DEVICE, Cluster, Link
from gradwire.lab.errors import LabError, NamespacesUnavailable, ToolMissing
from gradwire.lab.loss_filter import LossCounters

__all__ = [
    "DEVICE",
    "Cluster",
    "LabError",
    "Link",
    "LossCounters",
    "NamespacesUnavailable",
    "ToolMissing",
    "sandbox",
]
