"""``zcactor start --head --standby --force``: a head acts where more than half of the nodes were lost at once."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import click

from zcactor.control.head_log import LogUnavailable, LogUnusable
from zcactor.errors import ConnectionLost
from zcactor.token import find_token

if TYPE_CHECKING:
    from zcactor.config import Config

__all__ = ["WARNING", "have_it_act", "is_there"]

WARNING: Final = (
    "zcactor: WARNING: --force lets the head act though less than half of the nodes on record serve it. Nodes that are "
    "silent are given up, and their actors start elsewhere. If such a node still lives, cut off from here, its actors "
    "live twice: make sure that it has ended"
)


def _small(config: Config, address: str) -> Config:
    """The settings of a program that only asks."""
    return replace(config, address=address, store_capacity=1 << 24, num_cpus=None, num_gpus=None)


async def is_there(config: Config, url: str, port: int) -> bool:
    """Look at the head that leads, before one is started that may be forced.

    Args:
        config: the settings.
        url: of the etcd.
        port: the port at which the head is about to be started.

    Returns:
        Whether the head that leads is at that place, so that none has to be started.

    Raises:
        ConnectionLost: a head leads that acts.
            Or etcd does not tell who leads.
        ValueError: `url` or a variable is not as it must be.
    """
    from zcactor.control.etcd_log import EtcdLog
    from zcactor.node.standby import written

    found = find_token(None, os.environ)
    if found is None:  # it is about to be made, so nothing was started yet
        return False
    log = EtcdLog.at(url, found[0], os.environ)
    try:
        async with asyncio.timeout(config.head_timeout):
            leader = await anext(aiter(log.leaders()), None)
    except TimeoutError:
        raise ConnectionLost(f"{log} does not answer in {config.head_timeout:g} s", False) from None
    except (LogUnavailable, LogUnusable) as error:
        raise ConnectionLost(str(error), False) from error
    finally:
        await log.aclose()
    if leader is None:
        return False
    try:
        told = await _ask(_small(config, leader.address), "leader")
    except ConnectionLost:  # it was killed, and its term is about to end
        return False
    if told["state"] == "leading":
        raise ConnectionLost(f"the head at {leader.address} leads and acts: start this one without --force", False)
    return leader.address == written(config.host, port)


async def _ask(config: Config, method: str) -> Any:
    from zcactor.driver import driver
    from zcactor.process.context import current

    async with driver.init(config=config):
        return await current().head.ask_agent(method)


async def have_it_act(config: Config, url: str) -> None:
    """Have the head act that leads, and print what it gives up.

    Raises:
        ConnectionLost: no head leads, or it was lost.
    """
    from zcactor.driver import driver
    from zcactor.process.context import current

    async with driver.init(config=_small(config, url)):
        head = current().head
        waits_for = (await head.ask_agent("leader")).get("waits_for", [])
        if waits_for:
            click.echo(f"zcactor: it waits for {', '.join(waits_for)}", err=True)
        try:
            lost = await head.ask_agent("force")
        except ValueError as error:
            click.echo(f"zcactor: {error}", err=True)
            return
    given_up = ", ".join(lost) or "no node"
    click.echo(f"zcactor: the head acts; it has given up {given_up}", err=True)
