"""`gradwire serve`: a dedicated parameter server."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from gradwire import _files, _store_address
from gradwire.cli.types import FiniteFloat
from gradwire.errors import ConfigError, GradwireError, MissingExtraError, RendezvousError, SettingsMismatchError

EXIT_FAILED, EXIT_USAGE, EXIT_NO_WORKERS, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 3, 130, 143

_STDOUT = "-"
_UNUSED = 'Only all-reduces of the default group by algorithm="parameter_server" do: set GRADWIRE_ALGORITHM=parameter_server on the workers'
_EPILOG = """
\b
On the workers, which train as ever (torchrun, Slurm, ...):
  export GRADWIRE_SERVER_MODE=dedicated GRADWIRE_SERVERS=2
  gradwire.torch.tolerate_loss(model, algorithm="parameter_server")

\b
On a machine of its own for each server, with the MASTER_ADDR and MASTER_PORT of the workers:
  MASTER_ADDR=node0 MASTER_PORT=29500 gradwire serve --index 0
  MASTER_ADDR=node0 MASTER_PORT=29500 gradwire serve --index 1

\b
Workers and servers may start in any order. Everything that must agree (timeouts, the rate controller, the number of
servers) is taken from the workers; loss bounds and deadlines travel with each call. A call that is not scheduled by
parameter_server, and every group but the default one, goes on without the servers.

\b
Exit status: 0 every worker has left in good order, 1 a worker died or the group failed (the message names it), 2 wrong
usage, settings that contradict the workers', a package that is missing, or a file that cannot be written, 3 the workers did not come, 130
interrupted, 143 terminated. A server that is interrupted or terminated says goodbye: the workers then fail at once with
its name.
"""


@click.command(name="serve", epilog=_EPILOG, context_settings={"show_default": True})
@click.option("--index", default=0, type=click.IntRange(0, 16_383), help="Number of this server, from 0.")
@click.option(
    "--servers",
    type=click.IntRange(1, 16_384),
    help="Servers in all; only compared.",
    show_default="as the workers say",
)
@click.option(
    "--workers", type=click.IntRange(1, 16_384), help="Workers; only compared.", show_default="as the workers say"
)
@click.option("--store", "address", help="Where the workers meet: tcp://host:port or file:///path.",
              show_default="tcp://$MASTER_ADDR:$MASTER_PORT")  # fmt: skip
@click.option("--memory", default=2048, type=click.IntRange(1), help="MB that the sums in flight may take. What needs more "
              "at once waits; one call that needs more alone is an error on every worker.")  # fmt: skip
@click.option("--wait", default=600.0, type=FiniteFloat(1, 604_800), help="Seconds to wait for the Store and worker 0, and from then on "
              "for all others, unless worker 0 gives up before.")  # fmt: skip
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path, allow_dash=True),
              help="Write the statistics here at the end, whatever ends it once all workers have come; before that there are "
              "none. - is the standard output.")  # fmt: skip
def command(
    *,
    index: int,
    servers: int | None,
    workers: int | None,
    address: str | None,
    memory: int,
    wait: float,
    json_file: Path | None,
) -> None:
    """Sum gradients for a training job: a parameter server that needs no GPU and no model.

    Each of the job's servers sums a part of every tensor that the workers reduce with the schedule parameter_server, and
    sends the mean back. It ends by itself when the last worker has left.
    """
    _check(index, servers, json_file)
    signal.signal(signal.SIGTERM, _terminate)
    address = address or _address_of_environment()
    stats: dict[str, Any] = {}
    status, text = _serve(
        address, stats, index=index, servers=servers, workers=workers, memory_bytes=memory << 20, timeout_s=wait
    )
    click.echo(f"gradwire serve: {text}", err=True)
    if json_file is not None and stats:
        try:
            _write(json_file, json.dumps({"index": index, **stats, "error": text if status else None}, indent=2) + "\n")
        except OSError as error:
            click.echo(f"gradwire serve: {json_file}: {error.strerror}", err=True)
            status = status or EXIT_USAGE
    sys.exit(status)


def _serve(address: str, stats: dict[str, Any], **service: Any) -> tuple[int, str]:
    """The exit status and what there is to say; `stats` gets what was counted, however it ends."""
    try:
        _go(address, stats, **service)
    except (ConfigError, MissingExtraError, SettingsMismatchError) as error:
        return EXIT_USAGE, str(error)
    except RendezvousError as error:
        return EXIT_NO_WORKERS, str(error)
    except GradwireError as error:
        return EXIT_FAILED, str(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED, "interrupted"
    except _Terminated:
        return EXIT_TERMINATED, "terminated"
    return 0, f"server {service['index']} {_summary(stats['served'])}"


def _go(address: str, stats: dict[str, Any], **asked: Any) -> None:
    _store_address.checked(address)
    # torch is only needed from here on, and takes seconds to import.
    from gradwire.torch._serving import Service, open_store, serve

    service = Service(**asked)

    def tell(text: str) -> None:
        click.echo(f"gradwire serve: server {service.index} {text}", err=True)

    tell(f"waits for the workers at {address}")
    store = open_store(address, service.timeout_s)
    serve(store, service, lambda served: tell(f"of {served.servers} serves {served.workers} workers"), stats.update)


def _check(index: int, servers: int | None, json_file: Path | None) -> None:
    """Before the job's hours of training."""
    if servers is not None and index >= servers:
        raise click.UsageError(f"--index {index}: of {servers} server(s) the last is {servers - 1}")
    if json_file is None or str(json_file) == _STDOUT:
        return
    if not json_file.parent.is_dir():
        raise click.UsageError(f"--json {json_file}: there is no folder {json_file.parent}")
    try:
        _files.check(json_file)
    except OSError as error:
        raise click.UsageError(f"--json {json_file}: {error.strerror}: {error.filename}") from error


def _write(json_file: Path, text: str) -> None:
    if str(json_file) == _STDOUT:
        click.echo(text, nl=False)
    else:
        _files.replace(json_file, text)


def _address_of_environment() -> str:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise click.UsageError("--store is not given, and MASTER_ADDR and MASTER_PORT are not both set")
    return f"tcp://{host}:{port}"


def _summary(served: dict[str, Any]) -> str:
    expected, received = served["elems_expected"], served["elems_received"]
    if not served["calls"]:
        return f"is done: every worker has left, and none of their calls came here. {_UNUSED}"
    share = 100.0 * received / expected if expected else 100.0
    return (
        f"is done: every worker has left; {served['calls']} calls, {served['bytes_received'] / 1e6:.1f} MB in with {share:.2f} % of "
        f"all contributions, {served['bytes_sent'] / 1e6:.1f} MB out"
    )


class _Terminated(BaseException):
    """SIGTERM, which nothing on the way may take for an error of its own."""


def _terminate(_number: int, _frame: object) -> None:
    raise _Terminated
