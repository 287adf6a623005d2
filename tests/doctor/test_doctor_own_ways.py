"""What the doctor tells of a host whose ranks could not meet on it, in namespaces where that is so."""

import json
import subprocess

import pytest
from gradwire.config import Config
from gradwire.doctor import host
from gradwire.lab import NamespacesUnavailable, sandbox

LACKS_LOOPBACK, NO_BOOT_ID = "ip link set lo down", "mount -t tmpfs none /proc/sys"
NETWORK = "ip link add eth0 type veth peer name bare0; ip addr add 10.5.0.1/24 dev eth0; ip link set eth0 up; ip link set bare0 up"


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        ([], {("warning", "only loopback")}),
        ([LACKS_LOOPBACK], {("problem", "lo is down")}),  # the engine does not start
        ([NETWORK, LACKS_LOOPBACK], {("warning", "lo is down")}),
        ([NO_BOOT_ID], {("problem", "/proc/sys/kernel/random/boot_id cannot be read"), ("warning", "only loopback")}),
        ([NETWORK, NO_BOOT_ID], {("note", "/proc/sys/kernel/random/boot_id cannot be read")}),
    ],
)
def test_what_keeps_ranks_of_one_host_apart_is_told(tmp_path, commands, expected):
    told = tmp_path / "told"

    def main():
        for command in ["ip link set lo up", *commands]:
            subprocess.run(command, shell=True, check=True)
        found = [finding for finding in host.judge(host.examine(Config(port=0))) if finding.check == "interface"]
        told.write_text(json.dumps([[finding.level, finding.text.partition(":")[0]] for finding in found]))
        return 0

    try:
        assert sandbox.run(main) == 0
    except NamespacesUnavailable as error:
        pytest.skip(str(error))
    found = {
        (level, text)
        for level, text in json.loads(told.read_text())
        if not text.startswith(("lo 127", "lo  ", "eth0", "bare0"))
    }
    assert found == expected
