"""The messages of a group's members to each other's processes, as their senders see them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from zcactor.rpc.services import remote

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GroupService"]


class GroupService(ABC):
    """The service of a process in which members of groups may live: `zcactor.collectives.groups.Groups`.

    In all methods `key` names the epoch of a group, `to` the rank for which the message is, `source` the rank that has
    sent it, and `seq` the operation.
    """

    @remote(40)
    @abstractmethod
    async def join(self, key: bytes, epoch: int, places: Sequence[Sequence[Any]]) -> Any:
        """Make the members of this process, and connect them to the processes of the others.

        Args:
            epoch: its number.
            places: the fields of a `zcactor.peers.seating.Seat` for each rank.

        Returns:
            The fields of a `zcactor.collectives.groups.Joined`; with the number of a later epoch, which the group has
            already, there are no members.

        Raises:
            ConnectionLost: another process is not reached.
            Misplaced: an actor is not in this process, or the party that makes the group has given up.
        """

    @remote(41)
    @abstractmethod
    async def start(self, key: bytes, facts: Sequence[Any]) -> None:
        """Let the members of this process take calls: all others have joined.

        Args:
            facts: the fields of a `zcactor.collectives.groups.Facts`.

        Raises:
            ConnectionLost: the process of a member has ended.
        """

    @remote(129)
    @abstractmethod
    def publish(
        self, key: bytes, to: int, source: int, seq: int, signature: str, failed: bool, data: Any, owner: bytes,
        offset: int, layout: bytes,
    ) -> None:  # fmt: skip
        """Take a rank's publication.

        Args:
            signature, data, owner, offset, layout: as in `zcactor.collectives.operations.Publication`; the data as
                `zcactor.collectives.member.Member.unpacked` takes it.
            failed: whether `data` is the error for which the rank cannot take part.
        """

    @remote(43)
    @abstractmethod
    def publish_with(
        self, key: bytes, to: int, source: int, seq: int, signature: str, failed: bool, data: Any, owner: bytes,
        offset: int, layout: bytes, object_id: int, place: int, nbytes: int,
    ) -> bool:  # fmt: skip
        """Take a rank's publication that names leased memory: for the result, or of its input.

        Args:
            object_id, place, nbytes: id, offset and bytes of the memory.

        Returns:
            Whether the rank lives here, and has taken the lease.
        """

    @remote(130)
    @abstractmethod
    def piece(self, key: bytes, to: int, source: int, seq: int, data: bytes) -> None:
        """Take a piece of an input that does not fit one frame."""

    @remote(45)
    @abstractmethod
    def offer(self, key: bytes, to: int, source: int, seq: int, object_id: int, offset: int, nbytes: int) -> bool:
        """Take memory that rank `source` has leased to this process. Returns whether this process has that member."""

    @remote(46)
    @abstractmethod
    def input(self, key: bytes, to: int, seq: int) -> tuple[int, bytes]:
        """Take the input of rank `to` to memory of this process; see `zcactor.collectives.member.Member.own_input`.

        Raises:
            OutOfMemory: there is no room for it.
            ProtocolError: there is no such rank or operation.
        """

    @remote(131)
    @abstractmethod
    def take_gpu(self, key: bytes, to: int, source: int, attempt: int, uuid: str, reason: str, name: Any) -> None:
        """Take what rank `source` tells of itself before an exchange of arrays on GPUs.

        Args:
            attempt: number of times that the ranks began to make a communicator.
            uuid: of its GPU.
            reason: why it takes no part; empty where it does.
            name: from rank 0, the id of a communicator.
        """

    @remote(132)
    @abstractmethod
    def report(self, key: bytes, to: int, source: int, seq: int, failure: Any) -> None:
        """Take the report of rank `source` that it is done with the memory of an operation. The failure is as
        `zcactor.collectives.member.Member.unpacked` takes it."""

    @remote(133)
    @abstractmethod
    def broken(self, key: bytes, rank: int, actor: str, cause: str) -> None:
        """Take the news that a member is gone."""

    @remote(134)
    @abstractmethod
    def superseded(self, name: bytes, epoch: int) -> None:
        """Break the epochs of a group before number `epoch`: the group was formed anew."""

    @remote(135)
    @abstractmethod
    def forget(self, key: bytes) -> None:
        """Forget the members of a group that nobody can call any more. Idempotent."""

    @remote(52)
    @abstractmethod
    def state(self, key: bytes, rank: int) -> tuple[int, str, list[str]]:
        """Tell what a member here does, for a rank that waits for it.

        Returns:
            The number of operations that it has called, the one that it waits in (empty: none), and the methods that
            its actor runs.
        """

    @remote(53)
    @abstractmethod
    def facts(self, key: bytes) -> Any:
        """The fields of a `zcactor.collectives.groups.Facts` for a group that has a member here, or None."""
