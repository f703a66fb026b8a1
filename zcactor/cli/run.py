"""``zcactor run``: a cluster out of the processes that a launcher has started, and a program in it."""

from __future__ import annotations

import os

import click

from zcactor.cli.nodes import Seconds, fail, settings
from zcactor.errors import ZcactorError

__all__ = ["run"]


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes that must have joined.  [all ranks]")
@click.option(
    "--timeout",
    type=Seconds(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds until then.",
)
@click.option(
    "--grace", type=Seconds(min=0), default=3.0, show_default=True,
    help="Seconds between SIGTERM and SIGKILL for the program.",
)  # fmt: skip
@click.option(
    "--explain", is_flag=True, help="Print where rank, size and head come from; without a program that is all."
)
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def run(nodes: int | None, timeout: float, grace: float, explain: bool, program: tuple[str, ...]) -> None:
    """Run a program once, in a cluster of one node for each rank of a launcher.

    Every rank starts the same command: by srun, mpirun, mpiexec, an Indexed Job, or by hand with ZCACTOR_RANK and
    ZCACTOR_SIZE; without a launcher there is one rank. Rank 0 is the head. The program runs there when all have joined,
    and joins the cluster by a plain zc.init(). Its exit status is that of every rank: 127 where it is not there, 126
    where it cannot be executed, 128 + n after signal n. Status 1 when a rank could not start, and 2 for a wrong option.
    """
    from zcactor.cluster import sources
    from zcactor.cluster.run import Request, run_rank

    if explain:
        for line in sources.explain(os.environ):
            click.echo(line, err=bool(program))
        if not program:
            return
    if not program:
        raise fail("give a program: zcactor run -- python program.py", 2)
    config, own_host = settings()
    try:
        spot = sources.decide(os.environ).spot
    except ValueError as error:
        raise fail(error, 2) from error
    if nodes is not None and nodes > spot.size:
        raise fail(f"--nodes asks for {nodes}, and the run has {spot.size} {'rank' if spot.size == 1 else 'ranks'}", 2)
    request = Request(program, nodes or spot.size, timeout, grace)
    try:
        status = run_rank(config, spot, request, dict(os.environ), own_host=own_host)
    except (ZcactorError, OSError, ValueError) as error:
        raise fail(error) from error
    raise click.exceptions.Exit(status)
