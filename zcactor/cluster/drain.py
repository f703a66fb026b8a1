"""Draining from a program that has joined the cluster: a node's actors move to others, and then the node leaves."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from zcactor.options import checked_name, checked_seconds
from zcactor.process.cluster import HeadService, MembershipService
from zcactor.process.context import current

__all__ = ["Drained", "drain"]

_LOOK: Final = 0.05
"""Seconds between two looks at whether a head has ended that resigns."""


class Drained(msgspec.Struct, frozen=True):
    """The end of a drain."""

    node: str
    """Id of the node."""
    moved: int
    """Number of actors that have moved to other nodes."""
    left: list[str]
    """A line for each actor that could not leave in time. The node is open again then; otherwise it has left."""
    joined: str
    """Id of the node that has started in its place; empty for none."""
    beside_head: bool = False
    """Whether it was on the host of the cluster's head."""
    head: str = ""
    """``host:port`` of the head that leads now, where the one on the node's host has resigned."""


async def drain(node: str, timeout: float | None = None, *, restart: bool = False) -> Drained:
    """Move the actors of a node to other nodes, and have the node leave the cluster.

    Nothing is placed on the node from now on. Actors with ``max_restarts`` other than 0 are closed in order (queued
    calls run, then ``close()``) and constructed elsewhere, under the same id and name, which counts as no restart;
    calls that are made meanwhile wait. Other actors are waited for. Lines on the progress are printed.

    Where the node was on the head's host and does not start again, the head resigns, if another one stands by.
    Otherwise it stays there.

    Args:
        node: at least four digits of the node's id, its host name, or its address.
        timeout: seconds after which the node is opened again if actors are left; None waits for any time.
        restart: whether the node starts again, with its own options, when it has left.

    Raises:
        NotInitialized: no runtime is running.
        TypeError: `node` is no str of 1 to 1,000 characters, `timeout` no number, or `restart` no bool.
        ValueError: `timeout` is negative; the name fits no node, or several; or the node is the head's, the last one,
            or drained already.
        InsufficientResources: the other nodes have no room for its actors. Nothing was moved.
        ConnectionLost: the node or the head was lost meanwhile, or the node did not start again.

    Cancelling opens the node again; actors that have moved stay where they are.
    """
    head = current().head
    if not isinstance(restart, bool):
        raise TypeError(f"drain: restart must be a bool, got {restart!r}")
    name, seconds = checked_name("drain: node", node), checked_seconds(timeout, "drain")
    told = await head.ask(MembershipService.drain, name, seconds, restart)
    done = msgspec.convert(told, Drained)
    if done.left or restart or not done.beside_head:
        return done
    before = await head.ask(HeadService.leader)
    if not before["standbys"]:
        return done
    resigns = await head.ask(HeadService.give_way, before["epoch"])  # the answer may be lost with that head
    while (after := await head.ask(HeadService.leader))["epoch"] == before["epoch"] and resigns:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK)  # until that process has ended
    return done if after["epoch"] == before["epoch"] else msgspec.structs.replace(done, head=after["address"])
