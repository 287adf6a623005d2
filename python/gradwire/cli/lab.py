"""`gradwire lab`: a small network on this machine, and what can be done to it while it runs."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

import click

from gradwire import _interpreter
from gradwire.cli.suspending import around_stops
from gradwire.cli.types import FiniteFloat, check_stdout
from gradwire.lab import LabError, sandbox
from gradwire.lab.claim import Claim, end_builder, identity, new_path_of, path_of
from gradwire.lab.errors import NoLab, WrongRequest
from gradwire.lab.network import HOSTS_MAX, RAILS_MAX, Layout, Network
from gradwire.lab.service import Client, Service
from gradwire.lab.switches import KINDS, Port

EXIT_WRONG, EXIT_NO_LAB = 2, 3
_KB_MAX = 4_194_303  # what tc's numbers of 32 bits can say
_NAME = "lab"  # of one that has no other
EXIT_NOT_STARTED = 125  # of `exec`, whose other statuses are the program's: as `env` and `timeout` have it

_EPILOG = """
\b
Examples:
  gradwire lab up --hosts 4 --rate 100 --delay 0.5 --rails 2
  gradwire lab exec 0 -- ping -c 3 10.77.0.2
  gradwire lab exec all -- sh -c 'RANK=$GRADWIRE_LAB_HOST WORLD_SIZE=4 MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 python train.py'
  gradwire lab set --host 2 --loss 0.01 --burst 4
  gradwire switch --os tc --rate 100 --buffer 256 --port vec0 --port vec1 | gradwire lab tc
  gradwire lab cut 3; gradwire lab stats; gradwire lab heal 3
  gradwire lab down

\b
Host h has the address 10.77.r.(h+1) on rail r. Everything is inside namespaces of the lab's own and gone after `down`, after
Ctrl-C of `up --foreground` or the end of its terminal, and when its process is killed; a kill leaves its socket and lock, which the
next lab takes over. docs/lab.md says what each switch can do.

\b
Exit status: 0 done, 2 wrong usage (also a host that is not there, and what this kind of switch cannot do), 3 no lab or a failure (the
message says why), 130 interrupted, 143 terminated, 129 hung up (the terminal has gone). Of `exec` that of the program, of several the
greatest; 127 there is no such program, 126 it cannot be run, 125 no lab or no such host.
"""


@click.group(name="lab", epilog=_EPILOG)
@click.option("--name", default=_NAME, show_default=True, help="Of the lab, where several are up.")
@click.pass_context
def command(context: click.Context, name: str) -> None:
    """Build a small network on this machine, run programs on its hosts, and break it on purpose."""
    if not name.replace("-", "").isalnum():
        raise click.UsageError(f"--name {name}: letters, digits and hyphens")
    context.obj = name


def _port_options(*, shows_defaults: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Options for what a port does; None where they are not given, which is the default only of a network that is built."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for name, kind, text, default in (
            ("--rate", FiniteFloat(0.1, 100_000), "Mbit/s of each port.", "100"),
            ("--delay", FiniteFloat(0, 10_000), "One-way delay, ms; a round trip crosses two ports.", "0"),
            ("--loss", FiniteFloat(0, 1), "Share of packets lost at a port.", "0"),
            ("--burst", FiniteFloat(1, 10_000), "Mean packets lost in a row.", "1"),
            ("--buffer", FiniteFloat(7, _KB_MAX), "KB (1024 bytes) that a port holds before it drops.", "256"),
            (
                "--bucket",
                FiniteFloat(6, _KB_MAX),
                "KB (1024 bytes) that leave at once after a port was idle.",
                "four packets",
            ),
        ):
            told = f"{text}  [default: {default}]" if shows_defaults else text
            function = click.option(name, type=kind, help=told)(function)
        return function

    return decorate


def _changes(
    *,
    rate: float | None,
    delay: float | None,
    loss: float | None,
    burst: float | None,
    buffer: float | None,
    bucket: float | None,
) -> dict[str, Any]:
    """Those that were given, as fields of `Port`."""
    size, at_once = (None if kb is None else int(kb * 1024) for kb in (buffer, bucket))
    given = {"rate_mbit": rate, "delay_ms": delay, "loss": loss, "burst": burst, "buffer_bytes": size}
    given["bucket_bytes"] = at_once
    return {name: value for name, value in given.items() if value is not None}


@command.command()
@click.option("--hosts", default=4, show_default=True, type=click.IntRange(1, HOSTS_MAX), help="Number of hosts.")
@click.option(
    "--rails",
    default=1,
    show_default=True,
    type=click.IntRange(1, RAILS_MAX),
    help="Links of each host, each to a switch of its own.",
)
@click.option(
    "--mtu", default=1500, show_default=True, type=click.IntRange(576, 9000), help="Largest IP packet, bytes."
)
@click.option(
    "--switch", default="auto", show_default=True, type=click.Choice(["auto", *KINDS]), help="What the switches are."
)
@click.option("--host-rate", type=FiniteFloat(0.1, 100_000), help="Mbit/s at which hosts send.  [default: --rate]")
@click.option(
    "--foreground", is_flag=True, help="Stay until Ctrl-C, SIGTERM or SIGHUP; a line `ready` comes before the others."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Say what there is, once it is ready, as one line of JSON and nothing else."
)
@_port_options(shows_defaults=True)
@click.pass_obj
def up(
    name: str,
    /,
    *,
    hosts: int,
    rails: int,
    mtu: int,
    switch: str,
    host_rate: float | None,
    foreground: bool,
    as_json: bool,
    **port: float | None,
) -> None:
    """Build the network, and keep it until `down`."""
    try:
        layout = Layout(hosts, rails, Port(**_changes(**port)), mtu, switch, host_rate)
        path = new_path_of(name)
        if foreground:
            check_stdout()
            keeper = identity(os.getpid())  # the sandbox has other numbers
            serve = lambda: _serve(layout, path, keeper, as_json=as_json)  # noqa: E731
            sys.exit(sandbox.run(serve, terminates_in_order=True))
        _start_in_background(path)
        click.echo(_described(Client(path).ask(do="describe"), name, as_json=as_json))
    except LabError as error:
        _fail(error)


def _serve(layout: Layout, path: Path, keeper: str, *, as_json: bool) -> int:
    """In the sandbox: builds and serves. Says so on standard output, by one call: who has read the first line may go."""

    def say(told: dict[str, Any]) -> None:
        text = _described(told, path.name, as_json=as_json)
        sys.stdout.write(f"{text}\n" if as_json else f"ready\n{text}\n")
        sys.stdout.flush()

    try:
        with Claim(path, keeper) as claim, Network(layout) as network:
            Service(network, claim).run(say)
    except KeyboardInterrupt:
        return sandbox.EXIT_INTERRUPTED
    except BrokenPipeError:  # who asked for it has gone
        return EXIT_NO_LAB
    except (LabError, OSError) as error:  # no folder for the socket, or a name that is too long for one
        print(f"error: {error}", file=sys.stderr)
        return EXIT_WRONG if isinstance(error, WrongRequest) else EXIT_NO_LAB
    return 0


def _start_in_background(path: Path) -> None:
    """The same command once more, in a session of its own, with --foreground; returns when it is ready."""
    arguments = [*_interpreter.running("from gradwire.cli import main; main()"), *sys.argv[1:], "--foreground"]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with tempfile.TemporaryFile("w+") as errors, _Asked() as asked:
        process = subprocess.Popen(
            arguments, stdin=nothing, stdout=pipe, stderr=errors, text=True, start_new_session=True
        )
        assert process.stdout is not None
        try:
            asked.hear()
            answer = process.stdout.readline()
        except (KeyboardInterrupt, SystemExit):  # what ends this process does not reach another session
            os.killpg(process.pid, signal.SIGINT)
            process.wait()
            raise
        if not answer:
            process.wait()
            errors.seek(0)
            kind = WrongRequest if process.returncode == EXIT_WRONG else LabError
            raise kind(errors.read().strip().removeprefix("error: ") or _ended(process.returncode))
    if not path.exists():
        raise LabError("the lab ended at once")


def _ended(status: int) -> str:
    is_told = status in (sandbox.EXIT_TERMINATED, -signal.SIGTERM)
    return "it was taken down while it was built" if is_told else f"it ended with status {status}"


class _Asked:
    """Within it, who asks this process to end, by SIGINT or SIGTERM, is heard from `hear` on, by an exception.

    Before, a process that is just being started would be left behind: nobody could end it then.
    """

    def __enter__(self) -> _Asked:
        self._held: list[int] = []
        now = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self._before = {number: handler for number, handler in now.items() if handler not in (None, signal.SIG_IGN)}
        for number in self._before:
            signal.signal(number, lambda number, _: self._held.append(number))
        return self

    def hear(self) -> None:
        """Raises KeyboardInterrupt, or SystemExit, if that was asked for meanwhile, and when it will be."""
        for number in self._before:
            signal.signal(number, self._end)
        if self._held:
            self._end(self._held[0])

    def _end(self, number: int, _: object = None) -> NoReturn:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(sandbox.EXIT_TERMINATED)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _described(told: dict[str, Any], name: str, *, as_json: bool) -> str:
    if as_json:
        return json.dumps({"name": name, **told})
    named = "" if name == _NAME else f" --name {name}"
    addresses = told["addresses"]
    return (
        f"{told['hosts']} hosts with {told['rails']} rail{'s' * (told['rails'] > 1)} on a switch of kind {told['switch']}:"
        f" {addresses[0][0]} to {addresses[-1][0]}; gradwire lab{named} down ends it"
    )


@command.command(context_settings={"allow_interspersed_args": False})
@click.argument("host", metavar="HOST|all")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def exec(name: str, host: str, program: tuple[str, ...]) -> None:  # noqa: A001  (the subcommand's name)
    """Run a program on a host, or on all at once, as if it were started here.

    In a lab that a user without root has built it sees itself as root: what refuses that needs to be told so (mpirun --allow-run-as-root).

    GRADWIRE_LAB_HOST is the host's number in its environment. GLOO_SOCKET_IFNAME, by which torch's gloo finds the other hosts, names the
    devices of all rails (eth0,eth1) unless it is set here.
    """
    program = program[program[:1] == ("--",) :]  # options end with the host already
    if not program:
        raise click.UsageError("Missing argument 'PROGRAM...'.")
    _fill_standard_streams()
    try:
        caller = secrets.token_hex()  # there may be others on this terminal
        request = {"do": "exec", "command": list(program), "folder": _current_folder(), "caller": caller}
        path = path_of(name)
        told = Client(path).ask(do="describe")
        numbers = list(range(told["hosts"])) if host == "all" else [_number(host)]
        # Gloo would look for the name of this machine, which has none of the lab's addresses.
        devices = ",".join(f"eth{rail}" for rail in range(told["rails"]))
        environment = {"GLOO_SOCKET_IFNAME": devices, **os.environ}
        stop, resume = (partial(_pass_on, path, caller, number) for number in (signal.SIGSTOP, signal.SIGCONT))
        with around_stops(stop, resume):
            statuses = _at_once(
                [
                    lambda number=number: Client(path).ask(  # type: ignore[misc]
                        (0, 1, 2), **request, host=number, environment={**environment, "GRADWIRE_LAB_HOST": str(number)}
                    )
                    for number in numbers
                ]
            )
    except LabError as error:
        _fail(error, EXIT_NOT_STARTED)
    except KeyboardInterrupt:  # the connection is closed, and with it the program ends
        sys.exit(sandbox.EXIT_INTERRUPTED)
    sys.exit(max(statuses))


def _pass_on(path: Path, caller: str, number: int) -> None:
    """A signal to the caller's programs, which have sessions of their own: none of a terminal's reaches them."""
    with suppress(LabError):  # the lab is stopped, too, or has gone
        Client(path).ask(do="pass_on", caller=caller, signal=number)


def _fill_standard_streams() -> None:
    """Opens the null device as each standard stream that is closed: else the next thing to be opened would be the program's."""
    if sys.stdout is not None:
        sys.stdout.flush()
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one


def _current_folder() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        raise LabError("the folder that this was started in is gone: start it in another one") from None


def _at_once(calls: list[Callable[[], int]]) -> list[int]:
    """Results of all, which run at the same time; one runs on this thread, so that Ctrl-C ends it by closing its connection."""
    if len(calls) == 1:
        return [calls[0]()]
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(len(calls))
    try:
        return [future.result() for future in [pool.submit(call) for call in calls]]
    except KeyboardInterrupt:
        os._exit(sandbox.EXIT_INTERRUPTED)  # the threads would wait; the connections close with the process


def _number(text: str) -> int:
    if not text.isdecimal():
        raise click.UsageError(f"{text!r} is no host: a number from 0, or all")
    return int(text)


@command.command(name="set")
@click.option("--host", "hosts", multiple=True, type=int, help="Only this host's ports; repeatable.  [default: all]")
@click.option("--rail", "rails", multiple=True, type=int, help="Only this rail's ports; repeatable.  [default: all]")
@_port_options(shows_defaults=False)
@click.pass_obj
def set_(name: str, /, hosts: tuple[int, ...], rails: tuple[int, ...], **port: float | None) -> None:
    """Change what ports do to the packets that leave through them, towards their hosts.

    What is not given stays as it is.
    """
    changes = _changes(**port)
    if not changes:
        raise click.UsageError("nothing to change: give --rate, --delay, --loss, --burst, --buffer or --bucket")
    _ask(name, do="set", hosts=hosts, rails=rails, changes=changes)


def _faulty(name: str, hosts: tuple[int, ...], rails: tuple[int, ...], *, is_cut: bool) -> None:
    _ask(name, do="set", hosts=hosts, rails=rails, changes={"is_cut": is_cut})


@command.command()
@click.argument("hosts", nargs=-1, type=int, required=True)
@click.option("--rail", "rails", multiple=True, type=int, help="Only this rail's link; repeatable.  [default: all]")
@click.pass_obj
def cut(name: str, hosts: tuple[int, ...], rails: tuple[int, ...]) -> None:
    """Cut hosts off: nothing passes in either direction, and nobody is told."""
    _faulty(name, hosts, rails, is_cut=True)


@command.command()
@click.argument("hosts", nargs=-1, type=int)
@click.option("--rail", "rails", multiple=True, type=int, help="Only this rail's link; repeatable.  [default: all]")
@click.pass_obj
def heal(name: str, hosts: tuple[int, ...], rails: tuple[int, ...]) -> None:
    """Undo `cut`, for all hosts unless some are named."""
    _faulty(name, hosts, rails, is_cut=False)


@command.command()
@click.option("--rail", default=0, show_default=True, type=click.IntRange(0), help="Whose switch.")
@click.argument("script", type=click.File(), default="-")
@click.pass_obj
def tc(name: str, rail: int, script: IO[str]) -> None:
    """Run the lines of a script, as `gradwire switch --os tc` writes it, on a rail's switch; by default those of the standard input.

    Each line is a command of its own, until one fails: what a line sets (variables, loops) is unknown to the next.
    Of a lab of kind uml alone: its switch is a Linux kernel, whose port towards host h is vec<h>. `set`, `cut` and `heal` give a port the
    queue of the lab again.
    """
    try:
        lines = [line.strip() for line in script]
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{script.name} is no text in UTF-8: {error}") from error
    # Each line is run by a shell of its own, and the first that fails ends it anyway.
    commands = [line for line in lines if line and not line.startswith("#") and line != "set -e"]
    told = _ask(name, do="run", rail=rail, commands=commands)
    if told:
        click.echo(told)


def _signal(name: str, hosts: tuple[int, ...], number: int) -> None:
    click.echo(f"{_ask(name, do='kill', hosts=hosts, signal=number)} processes")


@command.command()
@click.argument("hosts", nargs=-1, type=int, required=True)
@click.option("--signal", "signal_name", default="KILL", show_default=True, help="Name of another signal.")
@click.pass_obj
def kill(name: str, hosts: tuple[int, ...], signal_name: str) -> None:
    """Kill every process on hosts, as when a machine dies."""
    try:
        number = signal.Signals[f"SIG{signal_name.upper().removeprefix('SIG')}"]
    except KeyError:
        raise click.UsageError(f"there is no signal {signal_name}") from None
    _signal(name, hosts, number)


@command.command()
@click.argument("hosts", nargs=-1, type=int, required=True)
@click.pass_obj
def stop(name: str, hosts: tuple[int, ...]) -> None:
    """Stop every process on hosts (SIGSTOP), as when a machine hangs; `resume` lets them go on."""
    _signal(name, hosts, signal.SIGSTOP)


@command.command()
@click.argument("hosts", nargs=-1, type=int, required=True)
@click.pass_obj
def resume(name: str, hosts: tuple[int, ...]) -> None:
    """Let what `stop` has stopped go on."""
    _signal(name, hosts, signal.SIGCONT)


@command.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON, with every setting and counter.")
@click.pass_obj
def stats(name: str, as_json: bool) -> None:
    """Print what each port does and has counted; what it does where `tc` has changed its queue is not known."""
    check_stdout()
    rows = _ask(name, do="stats")
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    click.echo("host rail address      Mbit/s  delay ms    loss  burst      passed      lost   sent MB    got MB")
    for row in rows:
        click.echo(
            f"{row['host']:>4} {row['rail']:>4} {row['address']:<12} {_shown(row['rate_mbit'], 6, 'g')} {_shown(row['delay_ms'], 9, 'g')}"
            f" {_shown(row['loss'], 7, '.3%')} {_shown(row['burst'], 6, 'g')} {row['passed']:>11} {row['lost']:>9}"
            f" {row['tx_bytes'] / 1e6:>9.1f} {row['rx_bytes'] / 1e6:>9.1f}{'  cut' if row['is_cut'] else ''}"
        )


def _shown(value: float | None, width: int, kind: str) -> str:
    """A dash where the lab does not know."""
    return ("-" if value is None else f"{value:{kind}}").rjust(width)


@command.command()
@click.pass_obj
def down(name: str) -> None:
    """End every process on every host and remove the network; also one that is still being built."""
    try:
        path = path_of(name)
        try:
            Client(path).ask(do="down")
        except NoLab:
            if not end_builder(path):
                raise
    except LabError as error:
        _fail(error)


def _ask(name: str, **request: Any) -> Any:
    try:
        return Client(path_of(name)).ask(**request)
    except LabError as error:
        _fail(error)


def _fail(error: LabError, status: int | None = None) -> NoReturn:
    click.echo(f"error: {error}", err=True)
    if status is None:
        status = EXIT_WRONG if isinstance(error, WrongRequest) else EXIT_NO_LAB
    sys.exit(status)
