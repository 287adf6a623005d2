"""What can be seen of a running process: who is waited for, the status socket, metrics.

`Observer` belongs to the process's runtime. It asks the engine for copies of its counters, once a second for the stragglers and else
when somebody looks; nothing here is on the way of a collective.
"""

from gradwire.observe.observer import Observer

__all__ = ["Observer"]
