"""The commands: ``zcactor start``, ``stop``, ``status``, ``token``, ``doctor``, ``--version``."""

from __future__ import annotations

import json
from typing import Annotated, Final

import typer

import zcactor
from zcactor.cli import nodes
from zcactor.config import load_config

__all__ = ["app", "doctor", "options"]

_LEAST_COLUMNS: Final = 140
"""Width of what goes into a file or a pipe, where nobody has a window for it to fit into."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zcactor {zcactor.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Actors for asyncio that pass large arrays by reference."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as one JSON object.")] = False,
) -> None:
    """Show settings, limits, RDMA, and which transports work.

    Each setting is shown with its source, and what does not work with its cause and what to do. The exit status is 1
    when no transport works, and 2 when the configuration has an error.
    """
    try:
        config, sources = load_config()
    except (ValueError, TypeError, OSError) as error:
        typer.echo(f"zcactor: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error
    # What only this command needs is imported here: starting a node is not to wait for it.
    from rich.console import Console

    from zcactor.cli.doctor import examine
    from zcactor.cli.render import render

    report = examine(config, sources)
    if as_json:
        typer.echo(json.dumps(report.plain(), indent=2, allow_nan=False))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = max(console.width, _LEAST_COLUMNS)
        render(report, console)
    raise typer.Exit(0 if report.usable else 1)


nodes.add_to(app)
