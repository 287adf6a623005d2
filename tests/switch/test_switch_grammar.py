"""What is written for each vendor keeps to the forms and ranges of its published reference; docs/switch.md names them.

The forms below are the vendors' command syntax in our notation, not their examples. SONiC's tables are also checked by
its own YANG models where those are at hand: GRADWIRE_TEST_SONIC_YANG names their folder (`src/sonic-yang-models/yang-models`
of sonic-buildimage, with the four templates beside it rendered), and `yanglint` is installed.
"""

import copy
import json
import os
import re
import shutil
import subprocess

import pytest
from gradwire.config import Config
from gradwire.switch import arista, linux, make_plan, nvidia, sonic
from gradwire.switch.plan import Wish

PLANS = [
    make_plan(rate, buffer, Config.mlt(classes=classes), wish=Wish(step=step))
    for rate, buffer, classes, step in [
        (100, 64_000, 1, 0.5),
        (25_000, 512_000, 7, 0.25),
        (400_000, 16_000_000, 4, 2.0),
    ]
]
# Code points of one's own, whose order is not that of their numbers.
PLANS.append(make_plan(1_000, 256_000, Config(classes=3, dscp_classes="12,46,8", dscp_control=34)))

PORT = r"(?P<port>\S+)"
ONYX = [  # Onyx user manual 3.10, "Quality of Service" and "Congestion control"; thresholds in KB
    r"interface ethernet {p} qos trust L3",
    r"interface ethernet {p} qos map dscp (?P<dscp>\d+) to switch-priority (?P<level>\d+)",
    r"interface ethernet {p} traffic-class (?P<level>\d+) bind switch-priority (?P<level2>\d+)",
    r"interface ethernet {p} traffic-class (?P<level>\d+) dcb ets strict",
    (
        r"interface ethernet {p} traffic-class (?P<level>\d+) congestion-control (red|ecn|both)"
        r" minimum-absolute (?P<low>\d+) maximum-absolute (?P<high>\d+)"
    ),
]
NVUE = [  # NVUE command reference, "QoS" (Cumulus Linux 5.4 and newer); thresholds in bytes
    r"nv set qos mapping {n} trust (l2|l3|port|both)",
    r"nv set qos mapping {n} dscp (?P<dscp>\d+) switch-priority (?P<level>\d+)",
    r"nv set qos egress-queue-mapping {n} switch-priority (?P<level>\d+) traffic-class (?P<level2>\d+)",
    r"nv set qos egress-scheduler {n} traffic-class (?P<level>\d+) mode (dwrr|strict)",
    r"nv set qos congestion-control {n} traffic-class (?P<level>\d+) (min|max)-threshold (?P<bytes>\d+)",
    r"nv set qos congestion-control {n} traffic-class (?P<level>\d+) probability (?P<percent>\d+)",
    r"nv set qos congestion-control {n} traffic-class (?P<level>\d+) (ecn|red) (enable|disable)",
    r"nv set interface {p} qos (mapping|egress-scheduler|congestion-control) profile {n}",
    r"nv config apply",
]
EOS = [  # EOS user manual, "Quality of Service", and the value ranges of Arista's own data model (AVD, eos_cli_config_gen)
    r"no qos random-detect ecn allow non-ect",
    r"qos map dscp (?P<dscps>\d+( \d+)*) to traffic-class (?P<level>\d+)",
    r"qos map traffic-class (?P<level>\d+) to tx-queue (?P<level2>\d+)",
    r"qos profile {n}",
    r"   qos trust dscp",
    r"   (uc-)?tx-queue (?P<level>\d+)",
    r"      priority strict",
    (
        r"      random-detect ecn minimum-threshold (?P<low>\d+) bytes maximum-threshold (?P<high>\d+) bytes"
        r" max-mark-probability (?P<percent>\d+) weight (?P<weight>\d+)"
    ),
    r"interface {p}",
    r"   service-profile {n}",
    r"!.*",
]
RANGES = {"level": (0, 7), "level2": (0, 7), "dscp": (0, 63), "percent": (1, 100), "weight": (0, 15)}


def parsed(lines, forms):
    """The named parts of each line; fails on a line that has none of the forms, or a value out of range."""
    patterns = [re.compile(form.replace("{p}", PORT).replace("{n}", r"[A-Za-z0-9][\w-]{0,31}")) for form in forms]
    found = []
    for line in lines:
        match = next(filter(None, (pattern.fullmatch(line) for pattern in patterns)), None)
        assert match, f"no form for: {line}"
        parts = {name: value for name, value in match.groupdict().items() if value is not None}
        for name, (low, high) in RANGES.items():
            if name in parts:
                assert low <= int(parts[name]) <= high, line
        if "low" in parts:
            assert 1 <= int(parts["low"]) <= int(parts["high"]) <= 256_000_000, line
        found.append(parts)
    return found


def mapped(rows, name="dscp"):
    return {int(row[name]): int(row["level"]) for row in rows if name in row}


@pytest.mark.parametrize("plan", PLANS)
def test_onyx_lines_have_the_forms_of_its_manual_and_say_the_plan(plan):
    rows = parsed(nvidia.onyx(plan, ["1/1"]), ONYX)
    assert mapped(rows) == plan.queue_of_code_points()
    lows = {int(row["level"]): int(row["low"]) for row in rows if "low" in row}
    for number, queue in plan.numbered():
        if queue.threshold_bytes is not None:
            assert abs(lows[number] * 1000 - queue.threshold_bytes) <= 1000
    assert 7 not in lows, "control is not dropped selectively"


@pytest.mark.parametrize("plan", PLANS)
def test_cumulus_lines_have_the_forms_of_its_reference_and_say_the_plan(plan):
    rows = parsed(nvidia.cumulus(plan, ["swp1", "swp2"]), NVUE)
    assert mapped(rows) == plan.queue_of_code_points()
    lows = [int(row["bytes"]) for row in rows if "bytes" in row][::2]
    assert lows == [queue.threshold_bytes for queue in plan.queues if queue.threshold_bytes is not None]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("word", ["uc-tx-queue", "tx-queue"])
def test_eos_lines_have_the_forms_of_its_manual_and_say_the_plan(plan, word):
    rows = parsed(arista.commands(plan, ["Ethernet1"], word), EOS)
    points = {int(point): int(row["level"]) for row in rows if "dscps" in row for point in row["dscps"].split()}
    assert points == plan.queue_of_code_points()
    queues = {int(row["level"]): int(row["level2"]) for row in rows if "level2" in row}
    assert queues == {number: number for number, _ in plan.numbered() if number != 7}, "class 7 has its queue already"
    lows = [int(row["low"]) for row in rows if "low" in row]
    assert lows == [queue.threshold_bytes for queue in plan.queues if queue.threshold_bytes is not None]


def test_eos_output_says_before_the_first_of_them_which_lines_are_of_the_whole_switch():
    lines = arista.commands(PLANS[0], ["Ethernet1"])
    told = next(number for number, line in enumerate(lines) if line.startswith("!") and "the whole switch" in line)
    first, profile = (lines.index(line) for line in ("no qos random-detect ecn allow non-ect", "qos profile gradwire"))
    maps = [number for number, line in enumerate(lines) if line.startswith("qos map")]
    assert told < first
    assert first < min(maps)
    assert max(maps) < profile


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "words",
    [
        "protocol ip prio 1 u32 match ip dsfield",
        "protocol ipv6 prio 2 u32 match ip6 priority",
        "protocol 802.1Q prio 3 u32 match u8 0x40 0xf0 at 0 match ip dsfield",
        "protocol 802.1Q prio 3 u32 match u8 0x60 0xf0 at 0 match ip6 priority",
    ],
)
def test_tc_filters_and_the_band_of_all_others_say_the_plan(plan, words):
    text = "\n".join(linux.commands(plan, "eth1"))
    filters = re.findall(words + r" (0x\w+) 0xfc flowid 10:(\w+)", text)
    (unnamed,) = {*re.search(r"priomap ([\d ]+)", text)[1].split()} - {"0"}
    bands = {
        **dict.fromkeys(range(64), int(unnamed)),
        **{int(octet, 16) >> 2: int(band, 16) - 1 for octet, band in filters},
    }
    assert {point: 7 - band for point, band in bands.items()} == plan.queue_of_code_points()


@pytest.mark.parametrize("plan", PLANS)
def test_best_effort_has_the_last_queue_and_control_the_first_alone(plan):
    table = plan.queue_of_code_points()
    assert table[0] == min(table.values())
    assert [point for point, number in table.items() if number == 7] == sorted(plan.queues[0].code_points)


def test_a_wrong_line_is_noticed():
    with pytest.raises(AssertionError, match="no form"):
        parsed(["interface ethernet 1/1 traffic-class 1 ecn 5"], ONYX)
    with pytest.raises(AssertionError):
        parsed(["nv set qos mapping x dscp 64 switch-priority 1"], NVUE)


@pytest.mark.parametrize("plan", PLANS)
def test_sonic_tables_refer_to_each_other_and_say_the_plan(plan):
    tables = sonic.config_db(plan, ["Ethernet0", "Ethernet4"])
    assert {int(p): int(q) for p, q in tables["DSCP_TO_TC_MAP"]["gradwire"].items()} == plan.queue_of_code_points()
    for key, queue in tables["QUEUE"].items():
        port, number = key.split("|")
        assert port in tables["PORT_QOS_MAP"]
        assert tables["SCHEDULER"][queue["scheduler"]] == {"type": "STRICT"}
        profile = tables["WRED_PROFILE"][queue["wred_profile"]] if "wred_profile" in queue else {}
        expected = dict(plan.numbered())[int(number)].threshold_bytes
        assert profile.get("green_min_threshold") == (None if expected is None else str(expected))


@pytest.mark.parametrize(("classes", "number"), [(2, "4"), (3, "3")])
def test_sonic_drops_nothing_early_of_other_traffic_where_its_template_does(classes, number):
    """By `wred_profile` of the queues 3 and 4, which a merge leaves where nothing is written in its place."""
    tables = sonic.config_db(make_plan(1000, 256_000, Config(classes=classes)), ["Ethernet0"])
    profile = tables["WRED_PROFILE"][tables["QUEUE"][f"Ethernet0|{number}"]["wred_profile"]]
    assert {name: value for name, value in profile.items() if value != "false"} == {"ecn": "ecn_none"}
    assert {name for name, value in profile.items() if value == "false"} == {
        f"wred_{color}_enable" for color in ("green", "yellow", "red")
    }


@pytest.mark.parametrize("plan", PLANS)
def test_sonic_ports_have_no_pfc_and_every_class_is_in_the_lossy_priority_group(plan):
    """SONiC's templates have PFC for the priorities 3 and 4, and lossless groups of these numbers, which are classes of gradients here."""
    tables = sonic.config_db(plan, ["Ethernet0", "Ethernet4"])
    for port in ("Ethernet0", "Ethernet4"):
        port_maps = tables["PORT_QOS_MAP"][port]
        assert port_maps["pfc_enable"] == ""
        groups = tables["TC_TO_PRIORITY_GROUP_MAP"][port_maps["tc_to_pg_map"]]
        assert groups == {str(number): "0" for number in range(8)}
        assert set(tables["TC_TO_QUEUE_MAP"][port_maps["tc_to_queue_map"]]) <= set(groups)


# What the YANG models call the lists, with their keys; config_db has the key before the values instead.
LISTS = {
    "DSCP_TO_TC_MAP": ("sonic-dscp-tc-map", ("name",), ("dscp", "tc")),
    "TC_TO_QUEUE_MAP": ("sonic-tc-queue-map", ("name",), ("tc", "qindex")),
    "TC_TO_PRIORITY_GROUP_MAP": ("sonic-tc-priority-group-map", ("name",), ("tc", "pg")),
    "SCHEDULER": ("sonic-scheduler", ("name",), None),
    "WRED_PROFILE": ("sonic-wred-profile", ("name",), None),
    "QUEUE": ("sonic-queue", ("ifname", "qindex"), None),
    "PORT_QOS_MAP": ("sonic-port-qos-map", ("ifname",), None),
}
NUMBERS = {"tc"}  # of 8 bits, which JSON writes without quotes; those of 64 bits keep them (RFC 7951)


def as_yang(tables, ports):
    """config_db as an instance of the models, which is what SONiC's own translation makes of it."""
    port_list = [{"name": port, "lanes": str(number), "speed": 25_000} for number, port in enumerate(ports)]
    document = {"sonic-port:sonic-port": {"PORT": {"PORT_LIST": port_list}}}
    for table, rows in tables.items():
        module, keys, inner = LISTS[table]
        entries = []
        for key, row in rows.items():
            entry = dict(zip(keys, key.split("|"), strict=True))
            if inner:
                pairs = [dict(zip(inner, pair, strict=True)) for pair in row.items()]
                entry[table] = [{n: int(v) if n in NUMBERS else v for n, v in pair.items()} for pair in pairs]
            else:
                entry.update(
                    {name: value == "true" if value in ("true", "false") else value for name, value in row.items()}
                )
            entries.append(entry)
        document[f"{module}:{module}"] = {table: {f"{table}_LIST": entries}}
    return document


def yanglint(document, tmp_path):
    folder = os.environ["GRADWIRE_TEST_SONIC_YANG"]
    data = tmp_path / "data.json"
    data.write_text(json.dumps(document))
    modules = ["sonic-device_metadata", "sonic-port", *(module for module, _, _ in LISTS.values())]
    command = ["yanglint", "-p", folder, "-t", "config", *(f"{folder}/{module}.yang" for module in modules), str(data)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(
    "GRADWIRE_TEST_SONIC_YANG" not in os.environ or shutil.which("yanglint") is None,
    reason="GRADWIRE_TEST_SONIC_YANG or yanglint is missing",
)
@pytest.mark.parametrize("plan", PLANS)
def test_sonic_tables_are_valid_by_its_own_models(plan, tmp_path):
    ports = ["Ethernet0", "Ethernet4"]
    tables = sonic.config_db(plan, ports)
    result = yanglint(as_yang(tables, ports), tmp_path)
    assert result.returncode == 0, result.stderr
    for table, key, name, value in [
        ("WRED_PROFILE", "gradwire_queue6", "green_max_threshold", "1"),
        ("WRED_PROFILE", "gradwire_queue6", "ecn", "ecn_blue"),
        ("QUEUE", "Ethernet0|7", "scheduler", "nobody"),
        ("DSCP_TO_TC_MAP", "gradwire", "64", "1"),
        ("TC_TO_PRIORITY_GROUP_MAP", "gradwire", "3", "8"),
        ("PORT_QOS_MAP", "Ethernet0", "tc_to_pg_map", "nobody"),
        ("PORT_QOS_MAP", "Ethernet0", "pfc_enable", "none"),
    ]:
        broken = copy.deepcopy(tables)
        broken[table][key][name] = value
        assert yanglint(as_yang(broken, ports), tmp_path).returncode != 0, (table, key, name, value)
