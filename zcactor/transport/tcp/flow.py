"""Flows: bytes of several peers that are used as they arrive, and not when all are there.

One thread takes a piece of each flow in turn, so the pieces are in its processor's cache when it uses them, and need no
more memory than that. Sums of arrays from several hosts are made so.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, Protocol

from zcactor.errors import ObjectLost, ProtocolError
from zcactor.transport.tcp import crew

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zcactor.transport.bytes import Flow, RemoteRegion

__all__ = ["TcpFlow", "take_flows"]


PART_NBYTES: Final = 8 << 20
"""Bytes of one request. A flow that ends early costs its owner so many at most."""
AHEAD: Final = 2
"""Requests that are sent before the answer to the first one: the owner has the next one when it has answered one."""


class Socket(Protocol):
    """A data socket; see `zcactor.transport.tcp.pull`."""

    def ask(self, region: RemoteRegion, start: int, nbytes: int) -> None:
        """Ask for bytes of a region."""

    def answered(self) -> bool:
        """Whether the owner sends the bytes of the next request."""

    def take(self, view: memoryview, *, last: bool) -> None:
        """Fill `view` with the next bytes."""

    def end(self) -> None:
        """Make the thread stop at once."""

    def rest(self) -> None:
        """Note that no thread uses the socket any more."""


class TcpFlow:
    """The bytes of a region on a data socket. Satisfies `zcactor.transport.bytes.Flow`.

    Args:
        sock: the data socket, unused.
        region: the bytes.
        ended: called on the loop's thread when no thread takes bytes any more: with whether all were taken, and the
            violation of the protocol by the owner, if any.
    """

    def __init__(
        self, sock: Socket, region: RemoteRegion, ended: Callable[[TcpFlow, bool, ProtocolError | None], None]
    ) -> None:  # fmt: skip
        self._socket = sock
        self._region = region
        self._ended = ended
        self._asked = self._taken = self._answered = 0  # bytes
        self._violation: ProtocolError | None = None

    def begin(self) -> None:
        """See `zcactor.transport.bytes.Flow`."""
        for _ in range(AHEAD):
            self._ask()

    def _ask(self) -> None:
        nbytes = min(PART_NBYTES, self._region.nbytes - self._asked)
        if nbytes:
            self._socket.ask(self._region, self._asked, nbytes)
            self._asked += nbytes

    def take(self, view: memoryview) -> None:
        """See `zcactor.transport.bytes.Flow`."""
        while view.nbytes:
            if self._taken == self._answered:
                self._await_answer()
            nbytes = min(view.nbytes, self._answered - self._taken)
            self._socket.take(view[:nbytes], last=self._taken + nbytes == self._region.nbytes)
            self._taken += nbytes
            view = view[nbytes:]

    def _await_answer(self) -> None:
        try:
            answered = self._socket.answered()
        except ProtocolError as error:
            self._violation = error.with_traceback(None)
            raise
        if not answered:
            raise ObjectLost(f"the owner does not have object {self._region.object_id:x} any more")
        self._answered = min(self._answered + PART_NBYTES, self._region.nbytes)
        self._ask()

    def end(self) -> None:
        """See `zcactor.transport.bytes.Flow`."""
        self._socket.end()

    def left(self) -> None:
        """See `zcactor.transport.bytes.Flow`."""
        self._socket.rest()
        self._ended(self, self._taken == self._region.nbytes, self._violation)


async def take_flows(flows: Sequence[Flow], use: Callable[[], None]) -> bool:
    """Have one thread call ``use()``, which takes all bytes of some flows, and wait for it.

    Args:
        flows: of any peers. They end here, also where this raises.
        use: takes the bytes. It holds the memory for them, and is dropped when its thread has ended.

    Returns:
        Whether it has taken them. Otherwise a data socket has broken, an owner has refused or violated the protocol, or
        no thread is left, and the work of `use` has to be done anew.

    Raises:
        Exception: any other exception of `use`.

    Cancelling ends the data sockets, and with them the thread.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[bool] = loop.create_future()
    work = [use]
    del use  # the frames of an exception do not keep the memory

    def ended(error: BaseException | None) -> None:
        for flow in flows:
            flow.left()
        if done.done():
            return
        if error is None or isinstance(error, OSError | ObjectLost | ProtocolError):
            done.set_result(error is None)
        else:
            done.set_exception(error)

    def run() -> None:
        failure = None
        try:
            work.pop()()
        except BaseException as error:
            failure = error.with_traceback(None)  # its frames would keep the memory
        with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits
            loop.call_soon_threadsafe(ended, failure)

    try:
        crew.run(run)
    except crew.NoThread as error:
        for flow in flows:
            flow.end()
        ended(OSError(str(error)))
    try:
        return await done
    finally:
        if done.cancelled():
            for flow in flows:
                flow.end()
