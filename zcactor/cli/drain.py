"""``zcactor drain``: a node's actors move to other nodes, and the node leaves or starts again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from zcactor.cli.nodes import Seconds, fail, heads_here, settings
from zcactor.errors import ZcactorError
from zcactor.process.loops import run

if TYPE_CHECKING:
    from zcactor.config import Config

__all__ = ["drain"]

_LEFT = 3
"""Exit status where actors could not leave in time."""


@click.command()
@click.argument("node", required=False)
@click.option(
    "--timeout", type=Seconds(min=0), metavar="SECONDS",
    help="How long to wait for actors that cannot move, for each node.  [any time]",
)  # fmt: skip
@click.option("--restart", is_flag=True, help="Start the node again, with its own options, when it has left.")
@click.option("--each", is_flag=True, help="All nodes, one after the other; needs --restart.")
@click.option("--address", metavar="HOST:PORT[,...]", help="The head. Default: that of a node on this host.")
def drain(node: str | None, timeout: float | None, restart: bool, each: bool, address: str | None) -> None:
    """Move the actors of NODE to other nodes, after which NODE leaves the cluster.

    NODE is named by four or more digits of its id, its host name, or its address. Actors with max_restarts other than 0
    are closed in order and constructed elsewhere; calls to them wait meanwhile. Others are waited for. Where NODE is on
    the head's host, the head resigns then to another one that stands by.

    The exit status is 1 when nothing was moved because that cannot be done, or the node was lost; 2 for a wrong option;
    and 3 when actors were left after --timeout: they are listed, and the node is open again.
    """
    if each and (node is not None or not restart):
        raise fail("--each drains all nodes, which have to start again: zcactor drain --each --restart", 2)
    if not each and node is None:
        raise fail("give the node to drain: see zcactor status", 2)
    config, _ = settings(address=address)
    if config.address is None:
        config = replace(config, address=heads_here())
    config = replace(config, store_capacity=1 << 24, num_cpus=None, num_gpus=None)
    try:
        status = run(_drain(config, node, timeout, restart))
    except (ZcactorError, OSError, ValueError, TypeError) as error:  # TypeError: of a name that is empty or too long
        raise fail(error) from error
    raise click.exceptions.Exit(status)


async def _drain(config: Config, node: str | None, timeout: float | None, restart: bool) -> int:
    """Drain a node, or all of them where `node` is None. Returns the exit status."""
    from zcactor.api import inspection
    from zcactor.cluster.drain import drain as drain_node
    from zcactor.driver import driver

    status = 0
    async with driver.init(config=config):
        names = [node] if node is not None else [each.node_id for each in await inspection.nodes()]
        for name in names:
            done = await drain_node(name, timeout, restart=restart)
            for line in done.left:
                click.echo(f"zcactor: left: {line}", err=True)
            if done.left:
                click.echo(f"zcactor: node {done.node[:8]} is open again: {len(done.left)} actors are left", err=True)
                status = _LEFT
                break
            again = f", and has started again as node {done.joined[:8]}" if done.joined else ""
            click.echo(f"zcactor: node {done.node[:8]} has left, {done.moved} actors have moved{again}")
            if done.head:
                click.echo(f"zcactor: the head on its host has resigned, and the one at {done.head} leads")
            elif done.beside_head and not restart:
                click.echo("zcactor: the head on its host goes on, as no other one stands by")
    return status
