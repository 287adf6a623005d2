"""What the tests of the lab's clusters share: a sandbox around a test's body, and what every kind of cluster must do."""

import json
import time

import pytest
from gradwire.lab import NamespacesUnavailable, netem, sandbox
from gradwire.lab.probe import LossProbe, probe_loss


def in_sandbox(tmp_path, main):
    """Runs `main` in a sandbox and returns its result; an exception in it fails the test with its text."""
    result = tmp_path / "result.json"

    def wrapped() -> int:
        result.write_text(json.dumps(main()))
        return 0

    try:
        status = sandbox.run(wrapped)
    except NamespacesUnavailable as error:
        pytest.skip(str(error))
    assert status == 0, "see the error above"
    return json.loads(result.read_text())


def until_below(limit, measure, seconds=60.0):
    """All that was measured until something was below the limit: a busy machine makes times longer, but not each of them."""
    end = time.monotonic() + seconds
    found = [measure()]
    while found[-1] >= limit and time.monotonic() < end:
        found.append(measure())
    return found


def has_netem():
    """Whether this kernel has it; asked on the loopback device of a network namespace that is gone afterwards."""
    try:
        return sandbox.run(lambda: int(not netem.available())) == 0
    except NamespacesUnavailable:
        return False


def check_losses_are_as_set_and_of_single_packets(tmp_path, cluster_of, loss):
    """`cluster_of(hosts, loss=..)` makes the cluster."""

    def main():
        with cluster_of(2, loss=loss) as cluster:
            probe = probe_loss(cluster)
            counters = cluster.loss_counters()
            return [probe.sent, probe.lost, probe.longest_run, counters.seen, counters.dropped]

    sent, lost, longest_run, seen, dropped = in_sandbox(tmp_path, main)
    assert LossProbe(sent, lost, longest_run).agrees_with(loss), (sent, lost, longest_run)
    assert (seen, dropped) == (sent, lost)


def check_a_loss_that_is_no_probability_is_refused(tmp_path, cluster_of, share):
    """`cluster_of(hosts)` makes the cluster."""

    def main():
        with cluster_of(2) as cluster:
            try:
                cluster.set_loss(share)
            except ValueError as error:
                return str(error)

    assert "between 0 and 1" in in_sandbox(tmp_path, main)
