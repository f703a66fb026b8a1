"""The cluster whose nodes another engine has placed, and a wait for that engine which does not hold up the loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import msgspec

from zcactor.driver.driver import init
from zcactor.token import default_file, find_token, make_token_file, read_token_file

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from zcactor.cluster.drain import Drained

__all__ = ["EngineCluster", "aside", "given", "token_of_user"]

P = ParamSpec("P")
T = TypeVar("T")


class EngineCluster(msgspec.Struct, frozen=True):
    """A cluster whose nodes another engine runs, as `zcactor.cluster.on_ray` and `zcactor.cluster.submit` give it."""

    address: str
    """The head's address, ``host:port``, for `zc.init` in other programs of the same user."""
    nodes: int
    """The number of nodes that had joined when the cluster was given."""
    job_id: str = ""
    """The id of Slurm's job; empty under Ray."""

    async def drain(self, node_id: str, timeout: float | None = None) -> Drained:
        """Move the actors of a node to other nodes, and have the node leave; see `zcactor.cluster.drain.drain`, whose
        exceptions this raises. The program has to be part of the cluster (``join=True``, or `zc.init`).

        Args:
            node_id: at least four digits of the node's id, its host name, or its address.
            timeout: seconds to wait for actors that cannot move; None for any time.

        Cancelling opens the node again; actors that have moved stay where they are.
        """
        from zcactor.cluster.drain import drain  # with the runtime, which the import of this module does without

        return await drain(node_id, timeout)


@contextlib.asynccontextmanager
async def given(cluster: EngineCluster, token: bytes, *, join: bool) -> AsyncIterator[EngineCluster]:
    """A cluster as a program gets it: the program joins it by `zc.init`, and leaves it with the context, or with `join`
    False does neither.

    Args:
        cluster: the cluster, whose nodes have joined.
        token: its token.
        join: whether the program joins.
    """
    if not join:
        yield cluster
        return
    async with init(cluster.address, token=token.hex()):
        yield cluster


async def aside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a blocking function in a thread.

    Cancelling waits until the function has returned. So the things that it has made are known when they are cleaned up.
    """
    call = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        if not call.cancelled():
            call.exception()  # it is of no interest any more, and counts as seen
        raise


def token_of_user() -> bytes:
    """The token of this user, which is made where there is none.

    Raises:
        AuthenticationError: the one that was found is not safe.
        OSError: the file cannot be made.
    """
    found = find_token(None, os.environ)
    if found is not None:
        return found[0]
    path = default_file(os.environ)
    try:
        return make_token_file(path)
    except FileExistsError:  # another program has made it at the same moment
        return read_token_file(path)
