"""The study of the papers' large simulations: its networks are the real ones, and every command of it runs in its quick mode."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "bench" / "simulation"
OURS = ["--only", "auto", "--only", "mlt"]


@pytest.fixture
def study(tmp_path):
    """Runs a command's quick mode without ns-3; returns what it printed and the rows that it wrote."""

    def run(command, *options):
        numbers = tmp_path / f"{command}.json"
        files = ["--ns3", tmp_path / "none", "--json", numbers, "--out", tmp_path, "--store", tmp_path / "store.jsonl"]
        line = [sys.executable, FOLDER / "study.py", command, "--quick", *files, *options]
        done = subprocess.run([*map(str, line)], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done, [row for row in json.loads(numbers.read_text())["rows"] if row["result"] is not None]

    return run


def test_the_networks_have_the_sizes_that_are_known_of_them():
    spec = importlib.util.spec_from_file_location("study_models", FOLDER / "models.py")
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    networks = {name: make() for name, make in models.MODELS.items()}
    # 25.557 million parameters and 4.09 billion multiplications of ResNet50 are what everybody counts.
    assert (len(networks["resnet50"]), sum(layer.elems for layer in networks["resnet50"])) == (161, 25_557_032)
    assert sum(layer.multiplications for layer in networks["resnet50"]) == 4_089_184_256
    # Table 1 of its paper: seven million, and 1.5 billion operations.
    assert (len(networks["googlenet"]), sum(layer.elems for layer in networks["googlenet"])) == (173, 7_005_832)
    assert 1.5e9 < sum(layer.multiplications for layer in networks["googlenet"]) < 1.6e9
    assert all(len({layer.name for layer in layers}) == len(layers) for layers in networks.values())


def test_scale_gives_every_network_to_every_preset_and_draws(study, tmp_path):
    done, rows = study("scale", *OURS, "--only", "dctcp")
    got = {(row["case"]["traffic"], row["case"]["transport"]) for row in rows}
    assert got == {(model, preset) for model in ("resnet50", "googlenet") for preset in ("auto", "mlt")}
    assert "without dctcp" in done.stderr
    for row in rows:
        case, result = row["case"], row["result"]
        # Eighteen workers and six servers: each bucket is a push and a pull of each pair.
        buckets = {"resnet50": 5, "googlenet": 2}[case["traffic"]]
        assert (result["buckets"], result["flows"]["count"]) == (buckets, 2 * 18 * 6 * buckets)
        assert (result["lost_share"] == 0) == (case["transport"] == "auto")
    assert (tmp_path / "simulation-scale.png").stat().st_size > 10_000


def test_components_are_switched_on_one_by_one(study):
    _, rows = study("components")
    by_parts = {
        (case["tolerates"], case["tells"], case["classes"], case["spread"]): row["result"]
        for row in rows
        if (case := row["case"])
    }
    assert len(by_parts) == 7
    exact = [result for (tolerates, *_), result in by_parts.items() if not tolerates]
    assert [result["lost_share"] for result in exact] == [0, 0, 0]
    assert by_parts[True, False, 1, "flow"]["lost_share"] > 0
    # What is not told is not counted as important or not.
    assert all((result["important"]["elems"] > 0) == tells for (_, tells, *_), result in by_parts.items())
    assert by_parts[False, False, 1, "flow"]["flows"] != by_parts[False, False, 1, "packet"]["flows"]


@pytest.mark.parametrize("command", ["timeout", "pfabric", "compression", "jitter", "oversubscription", "shards"])
def test_the_other_figures_run(study, command):
    done, rows = study(command, *OURS)
    assert {row["case"]["transport"] for row in rows} == {"auto", "mlt"}
    assert done.stdout.startswith("| ")


def of_cases(script, *arguments):
    """Runs a program that has the study's cases, and one of them that is small."""
    # Not quick, so that results are kept; of two hosts, so that it is.
    head = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import cases; file = Path(sys.argv[2])\n"
        "case, told = cases.Case(transport='auto', hosts=2, compression=100), []\n"
    )
    command = [sys.executable, "-c", head + script, str(FOLDER), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_line_that_was_cut_short_is_no_result_and_goes_when_the_next_is_kept(tmp_path):
    file = tmp_path / "store.jsonl"
    script = "store = cases.Store(file); assert store.get(case) is None\nstore.keep(case, {'n': 1}); store.keep(case, {'n': 2})"
    for before in ("", '{"case": "other", "result": {}}\n'):
        file.write_text(before + '{"case": "cut", "resu')
        done = of_cases(script, file)
        assert done.returncode == 0, done.stderr
        kept = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line["result"] for line in kept] == [{}, {"n": 1}, {"n": 2}][not before :]


def test_two_studies_keep_their_results_in_one_file(tmp_path):
    script = (
        "stores = cases.Store(file), cases.Store(file)\n"
        "kept = [cases.Case(transport='mlt', hosts=hosts) for hosts in range(2, 8)]\n"
        "for one in kept: stores[one.hosts % 2].keep(one, {'hosts': one.hosts})\n"
        "assert [cases.Store(file).get(one) for one in kept] == [{'hosts': one.hosts} for one in kept], file.read_bytes()"
    )
    done = of_cases(script, tmp_path / "store.jsonl")
    assert done.returncode == 0, done.stderr


def test_results_are_of_the_commits_that_they_were_kept_with(tmp_path):
    file = tmp_path / "store.jsonl"
    script = (
        "keys = [cases.Case(transport='mlt', hosts=2), cases.Case(transport='dlcp', hosts=2)]\n"
        "lines = [{'case': keys[0].key, 'result': {}}, {'case': keys[1].key, 'commit': 'abc1234', 'result': {}}]\n"
        "file.write_text(''.join(json.dumps(line) + chr(10) for line in lines))\n"
        "store = cases.Store(file); store.keep(case, {})\n"
        "for one in (store, cases.Store(file)):\n"
        "    print(one.commits_of([case, keys[0]]) == ['unknown', store.commit], one.commits_of(keys) == ['unknown', 'abc1234'])"
    )
    done = of_cases(script, file)
    assert done.stdout.split() == ["True"] * 4, done.stderr


def test_what_is_printed_and_written_names_the_commits_of_the_results(study, tmp_path):
    done, rows = study("jitter", "--only", "auto")
    commit = rows[0]["commit"]
    assert f"results of commit {commit}\n" in done.stdout
    assert json.loads((tmp_path / "jitter.json").read_text())["commits"] == {"oldest": commit, "newest": commit}


def test_where_nothing_was_judged_no_target_is_reached(tmp_path):
    command = [sys.executable, FOLDER / "study.py", "scale", "--kept", "--store", tmp_path / "none", "--out", tmp_path]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no target was judged" in done.stdout


def test_what_is_kept_is_not_run_again(tmp_path):
    script = (
        "for again in range(2):\n"
        "    store = cases.Store(file); cases.run_all([case], store, Path('none'), 1, told.append)\n"
        "assert len(told) == 1 and store.get(case)['flows']['count'] == 2, told\n"
    )
    done = of_cases(script, tmp_path / "store.jsonl")
    assert done.returncode == 0, done.stderr
