"""`gradwire bench`: options of the benchmarks of collectives and of training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from gradwire import _files
from gradwire._extras import require
from gradwire.bench import plan, results, run, training
from gradwire.bench.collectives import COLLECTIVES
from gradwire.bench.ground import FRAME_BYTES
from gradwire.bench.plan import Condition, NetworkPlan, Plan, Variant
from gradwire.bench.training import TrainingPlan
from gradwire.cli.types import FiniteFloat, OwnFile, check_stdout
from gradwire.config import ALGORITHMS
from gradwire.errors import MissingExtraError
from gradwire.lab import LabError

_SOURCE_TREE = Path(__file__).resolve().parents[3]  # python/gradwire/cli -> the checkout
_FILE = OwnFile()
_FOLDER = click.Path(file_okay=False, path_type=Path)
_SHARE, _MS, _SIZE = FiniteFloat(0, 0.5), FiniteFloat(0, 1000), FiniteFloat(0, 1_000_000, min_open=True)
_PRESETS = click.Choice([*plan.PRESETS, plan.EXACT])
_TCP = click.Choice([*plan.TCP, "none"])
_OF_LINKS = ("rate", "buffer", "bucket", "rails")
# What only the other benchmark has, by whether it is a training.
_OF_OTHERS = {False: ("steps", "target", "seed", "examples"), True: ("sizes", "samples", "settle")}
_EPILOG = """
\b
Examples:
  gradwire bench --quick                                  seconds: shows that it works here
  gradwire bench --loss 0 --loss 0.001 --loss 0.01        4 ranks, 100 Mbit/s, gloo over cubic and bbr beside
  gradwire bench --network loopback --ranks 2 --ranks 4 --size 0.0625 --size 25 --require busbw=1
  gradwire bench --collective all_gather --collective broadcast --preset exact
  gradwire bench --scenario gray --require healthy=1.5    one of four rails loses 10 % of its packets
  gradwire bench --training                               time to accuracy of the example, at five rates of loss

\b
Networks: loopback; bridge (a namespace for each rank, MTU 1500, offloads on, no shaping); lab (shaped by netem, uml, soft or nft,
the first that is there), or one of netem, uml, nft, soft by name. Nothing needs root where users may create namespaces.

\b
--require takes NAME=FACTOR:
{requirements}
with --training: calm and speedup, of the time to accuracy. docs/bench.md explains all.

\b
Exit status: 0 done, 1 a result was wrong or something required was missed, 2 it could not run or be written, or a worker failed,
130 interrupted, 143 terminated, 129 hung up (the terminal has gone). What all have measured until then is kept.
""".format(requirements="\n".join(f"  {name:<8} {what}" for name, what in results.REQUIREMENTS.items()))


# fmt: off
@click.command(name="bench", epilog=_EPILOG, context_settings={"show_default": True})
@click.option("--network", default="lab", type=click.Choice(plan.NETWORKS), help="What joins the ranks.")
@click.option("--collective", "collectives", multiple=True, type=click.Choice(list(COLLECTIVES)), default=("all_reduce",))
@click.option("--ranks", multiple=True, type=click.IntRange(2, 8), default=(4,), show_default="4; incast: 8", help="Repeatable.")
@click.option("--size", "sizes", multiple=True, type=_SIZE, default=(1.0,), help="MB of 1024 * 1024 bytes; repeatable.")
@click.option("--loss", "losses", multiple=True, type=_SHARE, default=(0.0,), show_default="0; training: 0 to 0.01",
              help="Share of the packets that ports lose; repeatable.")
@click.option("--rtt", "rtts", multiple=True, type=_MS, default=(0.0,), help="Round trip in ms that links add; repeatable.")
@click.option("--preset", "presets", multiple=True, type=_PRESETS, default=("auto", plan.EXACT),
              help="gradwire's rule for an opted-in all-reduce or reduce-scatter; exact: the plain collective. Repeatable.")
@click.option("--algorithm", "algorithms", multiple=True, type=click.Choice(ALGORITHMS), default=("auto",),
              help="Schedule of an opted-in all-reduce; repeatable.")
@click.option("--rotated", is_flag=True, help="Each preset also with the Hadamard transform.")
@click.option("--tcp", "peers", multiple=True, type=_TCP, default=("cubic", "bbr"), show_default="cubic, bbr, where the kernel has it",
              help="gloo's TCP; repeatable.")
@click.option("--scenario", type=click.Choice(plan.SCENARIOS), help="By turns with the healthy network.")
@click.option("--rails", default=1, type=click.IntRange(1, 8), help="Links of each host.", show_default="1; gray: 4")
@click.option("--rate", default=100.0, type=FiniteFloat(1, 100_000), help="Mbit/s of each link.",
              show_default="100; gray, incast: 25; slow-host: 50")
@click.option("--buffer", default=256, type=click.IntRange(8, 65_536), help="KB that a switch holds for each port.")
@click.option("--bucket", type=click.IntRange(6, 65_536), show_default="four packets",
              help="KB that a link lets go at once after it was idle, as clouds' shapers do.")
@click.option("--mtu", default=1500, type=click.IntRange(576, 9000), help="Bytes; not of loopback.")
@click.option("--samples", default=100, type=click.IntRange(1),
              help="Of each cell, up to 64 KB of 20 timed calls each; p95 needs 20 calls, p99 100, p99.9 1000.")
@click.option("--block", default=10, type=click.IntRange(1), show_default="10; slow-host: all",
              help="Samples, or training steps, of one variant in a row.")
@click.option("--settle", default=1, type=click.IntRange(1), show_default=f"1; slow-host: {plan.SETTLE_CALLS}",
              help="Samples of gradwire before each block that are not counted; of gloo one.")
@click.option("--minutes", default=9.0, type=FiniteFloat(0.1), show_default="9; incast: 20; training: 60",
              help="Stop early, with equally many samples for all, after about so long.")
@click.option("--require", "required", multiple=True, metavar="NAME=FACTOR", help="Exit with 1 if missed; repeatable.")
@click.option("--training", "trains", is_flag=True, help="Time to accuracy of the example transformer instead.")
@click.option("--steps", default=120, type=click.IntRange(1), help="Of each training.")
@click.option("--target", type=FiniteFloat(0, min_open=True), show_default="gloo's at 80 % of the steps",
              help="Mean of three validation losses to reach.")
@click.option("--seed", default=1, help="Decides weights and batches of training.")
@click.option("--examples", default=_SOURCE_TREE / "examples", type=_FOLDER, show_default="of the source tree",
              help="Folder with train_gpt.py, which is what is trained.")
@click.option("--quick", is_flag=True, help="Two ranks, small, seconds: only to see that it works.")
@click.option("--json", "json_file", type=_FILE, help="Write everything that repeating it needs, and each sample.")
@click.option("--html", "html_file", type=_FILE, help="Write the report here.", show_default="in the folder of --out")
@click.option("--out", default=Path("bench-out"), type=_FOLDER, help="Folder for report, pictures and logs.")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Measure gradwire beside gloo over TCP, on this machine.

    All variants take turns in one run over one network, and every result is verified.
    """
    check_stdout()
    chosen = _with_defaults(ctx, options)
    try:
        _check_given(chosen)
        for package in ("torch", "numpy"):
            require(package, "bench", "gradwire bench")
        required = results.parse_requirements(chosen["required"])
        names = {name: chosen[name] for name in ("out", "json_file", "html_file", "quick")}
        outcome = run.Outcome(required=required, **names)
        whole = training_plan_of(chosen) if chosen["trains"] else plan_of(chosen)
        if isinstance(whole, Plan):
            results.check_samples(required, whole.least_times)
        outcome.make_folders()
        ctx.with_resource(_files.held(outcome.out))
    except (ValueError, OSError, MissingExtraError) as error:
        raise click.UsageError(str(error)) from error
    try:
        sys.exit(run.run_collectives(whole, outcome) if isinstance(whole, Plan) else run.run_training(whole, outcome))
    except LabError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(run.NOT_RUN)


# fmt: on
def _check_given(chosen: dict[str, Any]) -> None:
    """Raises ValueError where an option is given that would change nothing: who gave it means another run than this one."""
    given = [name for name in _OF_OTHERS[chosen["trains"]] if name in chosen["given"]]
    if given:
        options = ", ".join(f"--{name.removesuffix('s') if name == 'sizes' else name}" for name in given)
        raise ValueError(f"{options}: not of {'a training' if chosen['trains'] else 'collectives, but of --training'}")
    if "none" in chosen["peers"] and len(set(chosen["peers"])) > 1:
        raise ValueError("--tcp none leaves gloo out: it is given alone")
    if set(chosen["presets"]) == {plan.EXACT} and (chosen["algorithms"] != ("auto",) or chosen["rotated"]):
        raise ValueError(
            "--algorithm and --rotated are of presets that tolerate loss: exact has the schedule of exact calls, GRADWIRE_ALGORITHM"
        )
    if chosen["scenario"] == "gray" and "rails" in chosen["given"] and chosen["rails"] == 1:
        raise ValueError("--scenario gray: one of several rails fails, of one there is no other")


def plan_of(chosen: dict[str, Any]) -> Plan:
    """The plan that the options ask for.

    Raises:
        ValueError: they contradict each other.
    """
    scenario = chosen["scenario"]
    if scenario == "incast" and chosen["buffer"] * 1024 <= plan.INCAST_BUFFER_PACKETS * FRAME_BYTES:
        raise ValueError(
            f"the healthy --buffer must hold more than the scenario's {plan.INCAST_BUFFER_PACKETS} packets"
        )
    scenes = (plan.HEALTHY, scenario) if scenario else (plan.HEALTHY,)
    conditions = (
        Condition(loss, rtt, scene) for rtt in chosen["rtts"] for loss in chosen["losses"] for scene in scenes
    )
    return Plan(
        network_of(chosen),
        tuple(variants_of(chosen)),
        tuple(dict.fromkeys(chosen["collectives"])),
        tuple(dict.fromkeys(chosen["ranks"])),
        tuple(dict.fromkeys(max(4, int(size * plan.MB) // 4 * 4) for size in chosen["sizes"])),
        tuple(dict.fromkeys(conditions)),
        chosen["samples"],
        min(chosen["block"], chosen["samples"]),
        chosen["minutes"],
        chosen["settle"],
        chosen["is_tcp_chosen"],
    )


def training_plan_of(chosen: dict[str, Any]) -> TrainingPlan:
    """The same of training, which opts all gradients in: `exact` has no meaning there.

    Raises:
        ValueError: the options contradict each other, or name several of what a training has one of.
    """
    for name in ("ranks", "rtts"):
        if len(chosen[name]) > 1:
            raise ValueError(f"a training has one --{name.removesuffix('s') if name == 'rtts' else name}, not several")
    _check_training(chosen)
    if others := set(chosen["required"]) and {word.partition("=")[0] for word in chosen["required"]} - {
        "calm",
        "speedup",
    }:
        raise ValueError(
            f"with --training nothing but calm and speedup can be required, not {', '.join(sorted(others))}"
        )
    return TrainingPlan(
        chosen["examples"].resolve(),
        network_of(chosen),
        tuple(variant for variant in variants_of(chosen) if variant.is_peer or variant.preset),
        tuple(dict.fromkeys(chosen["losses"])),
        chosen["rtts"][0],
        chosen["ranks"][0],
        chosen["steps"],
        min(chosen["block"], chosen["steps"]),
        seed=chosen["seed"],
        target=chosen["target"],
        minutes=chosen["minutes"],
        is_tcp_chosen=chosen["is_tcp_chosen"],
        validation_batches=2 if chosen["quick"] else TrainingPlan.validation_batches,
    )


def _check_training(chosen: dict[str, Any]) -> None:
    """Raises ValueError where something is asked for that no training does: its variants would be the same under other names."""
    asked = {
        "--scenario": chosen["scenario"],
        "--collective": chosen["collectives"] != ("all_reduce",),
        "--algorithm": chosen["algorithms"] != ("auto",),
        "--rotated": chosen["rotated"],
    }
    if refused := [option for option, is_given in asked.items() if is_given]:
        raise ValueError(f"--training has no {' and no '.join(refused)}")


def network_of(chosen: dict[str, Any]) -> NetworkPlan:
    """The network that the options ask for.

    Raises:
        ValueError: it has not what they ask for.
    """
    is_gray = chosen["scenario"] == "gray" and chosen["rails"] == 1
    rails = plan.GRAY_RAILS if is_gray else chosen["rails"]
    asked = [f"--{name}" for name in _OF_LINKS if name in chosen["given"]]
    if asked and chosen["network"] in plan.UNSHAPED:
        raise ValueError(f"{', '.join(asked)}: of shaped links, which --network {chosen['network']} has not")
    if "mtu" in chosen["given"] and chosen["network"] == "loopback":
        raise ValueError("--mtu: not of --network loopback, whose device has 65536 bytes")
    bucket = None if chosen["bucket"] is None else chosen["bucket"] * 1024
    return NetworkPlan(chosen["network"], chosen["rate"], chosen["buffer"] * 1024, chosen["mtu"], rails, bucket)


def variants_of(chosen: dict[str, Any]) -> list[Variant]:
    """Peers first, then every preset with every schedule."""
    found = [plan.gloo(tcp) for tcp in chosen["peers"] if tcp != "none"]
    for preset in chosen["presets"]:
        for algorithm in ("auto",) if preset == plan.EXACT else chosen["algorithms"]:
            found.append(plan.gradwire(preset, algorithm))
            if chosen["rotated"] and preset != plan.EXACT:
                found.append(plan.gradwire(preset, algorithm, "on"))
    return list(dict.fromkeys(found))


def _with_defaults(ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Options of which those that nobody gave are as training, a scenario or `--quick` needs them; `given` names the others."""
    default: dict[str, Any] = {}
    if options["trains"]:
        default |= {"losses": training.LOSSES, "minutes": 60.0}
    if options["scenario"]:
        default |= {"rate": plan.SCENARIO_RATES[options["scenario"]]}
    if options["scenario"] == "incast":
        default |= {"ranks": (8,), "minutes": 20.0}  # a call takes more than half a second on its slowest links
    if options["scenario"] == "slow-host":
        default |= {"settle": plan.SETTLE_CALLS, "block": options["samples"]}
    if options["quick"]:
        default |= {
            "ranks": (2,),
            "sizes": (0.0625,),
            "samples": 6,
            "block": 3,
            "peers": ("cubic",),
            "minutes": 1.0,
            "settle": 1,
        }
        default |= {"losses": (0.0, 0.01), "steps": 6} if options["trains"] else {}
    given = {name for name in options if ctx.get_parameter_source(name) != ParameterSource.DEFAULT}
    chosen = {name: value for name, value in default.items() if name not in given}
    return {**options, **chosen, "is_tcp_chosen": "peers" in given, "given": given}
