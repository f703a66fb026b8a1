"""The messages of a graph's founder and its shares to each other's processes, as their senders see them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from zcactor.rpc.services import remote

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zcactor.marshal.packed import Packed

__all__ = ["GraphService"]


class GraphService(ABC):
    """The service of a process that may have a share of graphs: `zcactor.graphs.graphs.Graphs`.

    In all methods `key` names the graph.
    """

    @remote(60)
    @abstractmethod
    async def join(
        self, key: bytes, founder: bytes, steps: Sequence[Sequence[Any]], targets: Mapping[str, Sequence[bytes]],
        peers: Sequence[tuple[bytes, str]], order: Sequence[bytes], spin_us: float,
    ) -> None:  # fmt: skip
        """Make this process's share of a graph, and connect to the processes behind it in `order`, which do the same.

        Args:
            founder: the process that runs it.
            steps: the fields of a `zcactor.graphs.share.Duty` each, with the actor's number here and its id in the
                place of the runner.
            targets: the processes that take the value of each node made here, by the node's number.
            peers: the processes that exchange values with this one, with their names.
            order: all processes of the graph.
            spin_us: microseconds for which the loop stays awake after a message.

        Raises:
            Misplaced: an actor is not in this process, or another process is not reached.
            AttributeError, TypeError: its class there has not the method that the founder's has.
            BaseException: the error of unpickling a constant, or of a reference among the constants.
        """

    @remote(61)
    @abstractmethod
    async def start(self, key: bytes) -> list[tuple[bytes, str]]:
        """The transports to the processes that exchange values with this one, once all are connected.

        Raises:
            Misplaced: the graph was given up, or another process is not reached.
        """

    @remote(136)
    @abstractmethod
    def failed(self, key: bytes, number: int, run: int, packed: Packed) -> None:
        """Take the failure of a node in a run.

        Raises:
            ProtocolError: this process takes no value of that node, or has got it.
        """

    @remote(137)
    @abstractmethod
    def cancel(self, key: bytes, run: int) -> None:
        """Stop what runs for a run that nobody waits for."""

    @remote(138)
    @abstractmethod
    def noted(self, key: bytes, number: int, nbytes: int) -> None:
        """Take note of the bytes of a node's value."""

    @remote(139)
    @abstractmethod
    def broken(self, key: bytes, label: str, cause: str, died: bool) -> None:
        """Take the news that a graph has lost an actor, or messages."""

    @remote(140)
    @abstractmethod
    def forget(self, key: bytes) -> None:
        """Forget a graph. Idempotent."""
