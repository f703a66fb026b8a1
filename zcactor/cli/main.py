"""The commands: ``zcactor run``, ``start``, ``stop``, ``status``, ``token``, ``doctor``, ``topology``, ``k8s``, ``up``,
``down``, ``drain``, ``demo``."""

from __future__ import annotations

import json

import click

import zcactor
from zcactor.cli import k8s, nodes, topology, up
from zcactor.cli.demo import SIZE_HELP, compare
from zcactor.cli.drain import drain
from zcactor.cli.run import run
from zcactor.cli.status import status
from zcactor.config import load_config

__all__ = ["Commands", "app", "demo", "doctor"]


class Commands(click.Group):
    """A group whose help has the whole first paragraph of each command; click cuts it to fit one line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See `click.Group`."""
        rows = [(name, _summary(command)) for name, command in sorted(self.commands.items())]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _summary(command: click.Command) -> str:
    text = " ".join((command.help or "").partition("\n\n")[0].split())
    return text.removesuffix(".")


@click.group(cls=Commands)
@click.version_option(zcactor.__version__, prog_name="zcactor", message="%(prog)s %(version)s")
def app() -> None:
    """Actors for asyncio that pass large arrays by reference."""


@app.command()
@click.option("--json", "as_json", is_flag=True, help="Print the same as one JSON object.")
def doctor(as_json: bool) -> None:
    """Show settings, limits, RDMA, GPUs, and which transports work.

    Each setting is shown with its source, and each failure with its cause and a remedy. The exit status is 1 when no
    transport works or the kernel lacks a call, and 2 when the configuration has an error.
    """
    try:
        config, sources = load_config()
    except (ValueError, TypeError, OSError) as error:
        raise nodes.fail(" ".join(str(error).split()), 2) from error
    # The modules that only this command needs are imported here: starting a node is not to wait for them.
    from zcactor.cli.doctor import examine
    from zcactor.cli.render import plain_console, render

    report = examine(config, sources)
    if as_json:
        click.echo(json.dumps(report.plain(), indent=2, allow_nan=False))
    else:
        render(report, plain_console())
    raise click.exceptions.Exit(0 if report.usable else 1)


@app.command()
@click.option("--size", metavar="SIZE", help=SIZE_HELP)
def demo(size: str | None) -> None:
    """Compute on one frame with many sets of parameters, by multiprocessing, joblib and zcactor.

    Seconds, bytes copied and memory of each way are printed side by side, for this machine. The frame has a size for
    which there is room. Joblib takes part where it is installed. The exit status is 1 when a way has failed, and 2 for
    a wrong option, and where there is no room.
    """
    raise click.exceptions.Exit(compare(size))


for command in (
    run, drain, nodes.start, nodes.stop, status, nodes.token, topology.topology, k8s.k8s, up.up, up.down,
):  # fmt: skip
    app.add_command(command)
