"""The nodes that start in the place of others: those that leave and start again with their own options."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from zcactor.errors import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.control.node_table import NodeRecord

__all__ = ["Successors"]


class Successors:
    """The nodes that leave, and those that are to follow them. Used on the head's loop."""

    def __init__(self) -> None:
        self._expected: dict[str, asyncio.Future[NodeRecord]] = {}
        """The nodes that follow, by the ids of those that leave."""

    def are_expected_for(self, node: NodeRecord) -> bool:
        """Whether a node leaves by an order, so that its end is no loss."""
        return node.id in self._expected

    def joined(self, node: NodeRecord, follows: str) -> None:
        """Note a node that has joined in the place of another, whose id is `follows`."""
        expected = self._expected.get(follows)
        if expected is not None and not expected.done():
            expected.set_result(node)

    async def after(self, node: NodeRecord, leave: Callable[[], None], limit: float | None) -> NodeRecord | None:
        """Have a node leave by ``leave()``, and wait until it is gone, and then for the node in its place.

        Args:
            node: the node.
            leave: asks it to end.
            limit: seconds that the node in its place may take to join; None where none is to start.

        Returns:
            The node in its place, if one is to start.

        Raises:
            ConnectionLost: none has joined in time.
        """
        expected: asyncio.Future[NodeRecord] = asyncio.get_running_loop().create_future()
        self._expected[node.id] = expected
        try:
            leave()
            await node.gone.wait()
            if limit is None:
                return None
            try:
                async with asyncio.timeout(limit):
                    return await expected
            except TimeoutError:
                log = "see the newest log in its ~/.local/state/zcactor/logs"
                raise ConnectionLost(f"{node.label} has left and did not start again in {limit:g} s; {log}") from None
        finally:
            del self._expected[node.id]
