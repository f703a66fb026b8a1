"""What a session knows of the process that makes it: a Protocol, which `zcactor.runtime.process.Process` satisfies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from zcactor.objectstore.ref import Region
    from zcactor.objectstore.store import Block
    from zcactor.rpc.call import Call
    from zcactor.rpc.counters import Counters
    from zcactor.rpc.incoming import Incoming
    from zcactor.rpc.messages import Hello
    from zcactor.rpc.parts import Part
    from zcactor.transport.os_process import OsProcess

__all__ = ["Hub"]


class Hub(Protocol):
    """What a `zcactor.rpc.session.Session` asks of its process; it names itself in most questions."""

    process: bytes
    counters: Counters

    @property
    def hosts(self) -> Mapping[int, Any]:
        """The actors here, by index."""

    dtype_codes: dict[Any, Any]
    """Wire names by dtype, those that are in use."""
    dtypes: dict[str, Any]
    """The inverse."""
    store: Any
    """The store here; None where there is none."""

    def share(self, array: Any, address: int, nbytes: int) -> Any:
        """The block of our store that an array of plain bytes lies in, C-contiguous at `address`, read-only and
        exported; None when it lies in none."""

    def hello(self) -> Hello:
        """Who we are."""

    def call_received(self, incoming: Incoming) -> None:
        """A call has arrived; it is to be answered exactly once."""

    def cancel_received(self, incoming: Incoming) -> None:
        """The caller cancelled, or is gone."""

    def import_region(
        self, session: Any, region: Region, unread: bool, sealed: bool
    ) -> tuple[Part, asyncio.Future[Part] | None]:
        """The part that a region of the peer's stands for; a future where a third process must lease it first, or its
        bytes have to be read. With `unread` that is left for later: the part's holder is a `RemoteLease`. `sealed`: the
        bytes are ciphertext whose tag is in the frame. Whoever opens it checks it, so no tags on its way are needed."""

    def read_result(self, call: Call) -> None:
        """Read the bytes of a result that has arrived without them, then complete `call`."""

    def park(self, reader: OsProcess, session: Any, blocks: Mapping[int, Block]) -> None:
        """Keep blocks of ours, by id, that `reader` maps and had leased by `session`: until it is gone, or says that
        it does not hold them any more."""

    def outlived(self, session: Any) -> None:
        """A lease that the peer of `session` had granted us has ended after the connection."""

    def session_lost(self, session: Any, cause: Exception | None, calls: list[Call]) -> None:
        """The connection is gone, with `calls` of ours unanswered."""
