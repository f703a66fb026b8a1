"""The hub, a session's view of its process: a Protocol that `zcactor.assembly.hub.ProcessHub` satisfies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping, Sequence

    from zcactor.native import hot
    from zcactor.objectstore.checking import Checker
    from zcactor.objectstore.ref import Region
    from zcactor.objectstore.store import Block
    from zcactor.rpc.call import Call
    from zcactor.rpc.incoming import Incoming
    from zcactor.rpc.messages import Hello
    from zcactor.rpc.parts import Part
    from zcactor.transport.os_process import OsProcess

__all__ = ["Hub"]


class Hub(Protocol):
    """The services of its process that a `zcactor.rpc.session.Session` needs. Most methods take the session as an
    argument."""

    process: bytes
    counters: hot.Counters

    @property
    def hosts(self) -> Mapping[int, Any]:
        """The actors of this process, by index."""

    ref_type: type
    """The class of references to results. Calls with one among their arguments take a way of their own."""
    dtype_codes: dict[Any, Any]
    """Wire names of the dtypes in use, by dtype."""
    dtypes: dict[str, Any]
    """The dtypes in use, by wire name."""
    store: Any
    """The store of this process, or None."""
    checker: Checker | None
    """Compares the bytes of arrays that are passed; None without check mode."""
    takers: dict[int, Any]
    """The takers of values for graphs and groups, by the word that names each in PUSH frames; see
    `zcactor.objects.expectations.Expectations`."""

    def share(self, array: Any, address: int, nbytes: int) -> Any:
        """Share a C-contiguous array of plain bytes at `address`. Returns its block in the store, closed and exported;
        None when the array does not go by reference."""

    def share_copied(self, array: Any, address: int, nbytes: int) -> Any:
        """`share` for a peer that keeps copies by id."""

    def hello(self) -> Hello:
        """The greeting of this process."""

    def greeted(self, session: Any) -> None:
        """Note that the peer's greeting has come, which is its first frame."""

    def call_received(self, incoming: Incoming) -> None:
        """Take a call that has arrived. It must be answered exactly once."""

    def cancel_received(self, incoming: Incoming) -> None:
        """Note that the caller cancelled the call, or has ended."""

    def import_region(
        self, session: Any, region: Region, unread: bool, sealed: bool
    ) -> tuple[Part, asyncio.Future[Part] | None]:
        """Import a region of the peer.

        Args:
            session: the session with the peer.
            region: the region.
            unread: leave the reading of bytes for later; see `zcactor.rpc.parts.is_unread`.
            sealed: the bytes are ciphertext whose tag is in the frame. Decryption checks them, so they need no tags on
                their way.

        Returns:
            The part, and a future where it comes later, because a third process must lease it first or its bytes have
            to be read.
        """

    def sent_again(self, call: Call) -> None:
        """Note that a call whose outcome is owed to other processes was given to a session."""

    def forward_received(self, incoming: Incoming, number: int, key: int, target: bytes) -> None:
        """Take a FORWARD frame of an open call. Raises ProtocolError for a number that is not the next one."""

    def push_received(self, word: int, key: int, status: int, payload: Any, parts: Sequence[Part], flags: int) -> None:
        """Take the outcome of a promise that was passed to a call here."""

    def push_coming(self, word: int, key: int) -> None:
        """Note that such an outcome is here, and that its bytes are being read: `push_received` follows."""

    def argument_received(self, session: Any, object_id: int, key: int, label: str) -> Any:
        """Make the argument of a promise that the native part has read: one of the peer's, whose outcome will be
        pushed under `key`."""

    def push_received_plain(self, word: int, key: int, value: Any) -> None:
        """Take an outcome that the native part has read."""

    def read_result(self, call: Call) -> None:
        """Read the bytes of a result that has arrived without them, then complete `call`."""

    def park(self, reader: OsProcess, session: Any, blocks: Mapping[int, Block]) -> None:
        """Keep blocks of ours, by id, that `reader` maps and had leased by `session`, until its process is gone or
        reports that it does not hold them any more."""

    def outlived(self, session: Any) -> None:
        """Note that a lease which the peer of `session` had granted us ended after the connection."""

    def session_lost(self, session: Any, cause: Exception | None, calls: list[Call]) -> None:
        """Note that the connection has ended with `calls` of ours unanswered."""
