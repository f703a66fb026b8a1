"""The runtime of this process, for the few places that cannot be handed it: a decorated class, an unpickled handle.

There is at most one. `zc.init` and a worker's start set it, `zc.shutdown` clears it, a fork marks it unusable in the
child.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from zcactor.errors import ForkedProcess, NotInitialized

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Sequence

    from zcactor.config import Config
    from zcactor.interface import Interface
    from zcactor.marshal import Marshaller
    from zcactor.objectstore.copies import CopyCounter
    from zcactor.objectstore.store import Store
    from zcactor.observe.stats import Stats
    from zcactor.rpc.call import Call
    from zcactor.rpc.session import Session
    from zcactor.runtime.place import Place
    from zcactor.runtime.sessions import Sessions
    from zcactor.runtime.tasks import Tasks

__all__ = [
    "Asking",
    "Runtime",
    "call_deadline",
    "clear_current",
    "current",
    "current_host",
    "current_or_none",
    "mark_forked",
    "set_current",
]

call_deadline: ContextVar[float | None] = ContextVar("zcactor_call_deadline", default=None)
"""Inside a method: the loop time by which its caller wants the answer. Calls made there inherit it."""
current_host: ContextVar[Any] = ContextVar("zcactor_current_host", default=None)
"""Inside a method: the host of the actor that runs."""


class Connecting(Protocol):
    """Opens connections; see `zcactor.runtime.connections.Connections`."""

    async def connect(self, process: bytes) -> Session:
        """The connection to `process`."""


class Asking(Protocol):
    """Calls system actors; see `zcactor.runtime.requests.Requests`."""

    def ask(self, session: Session, method: str, *args: Any) -> Awaitable[Any]:
        """Call that of every process."""

    async def ask_of(self, session: Session, index: int, interface: Interface, method: str, args: Sequence[Any]) -> Any:
        """Call another one."""


class AskingHead(Protocol):
    """Asks the head; see `zcactor.runtime.head.HeadLink`."""

    async def ask_agent(self, method: str, *args: Any) -> Any:
        """Call its agent."""

    async def ask_members(self, method: str, *args: Any) -> Any:
        """Call its `zcactor.runtime.membership.Membership`."""

    async def locate(self, actor_id: bytes, *, calls_wait: bool = False) -> tuple[str, tuple[bytes, int], str]:
        """Where an actor is."""

    async def silence_of(self, process: bytes) -> tuple[float, str]:
        """When the head has heard from the node of a process."""


class Promising(Protocol):
    """Passes promises on; see `zcactor.runtime.promises.Promises`."""

    def export(self, call: Call) -> int:
        """Let peers hold one of ours."""

    def call_of(self, holder: Any, label: str) -> Call:
        """The promise that a reference names."""


class Runtime(Protocol):
    """What handles, references and arrays need of the process that they are in."""

    process: bytes
    """16 bytes that name it."""
    loop: asyncio.AbstractEventLoop
    thread: int
    """The loop's."""
    config: Config
    namespace: str
    place: Place
    store: Store
    copies: CopyCounter
    marshaller: Marshaller
    tasks: Tasks
    sessions: Sessions

    @property
    def connections(self) -> Connecting:
        """Opens them."""

    @property
    def requests(self) -> Asking:
        """To system actors of peers."""

    @property
    def head(self) -> AskingHead:
        """Of the cluster."""

    @property
    def promises(self) -> Promising:
        """That are passed on."""

    @property
    def unseen(self) -> Any:
        """Failures that nobody has looked at."""

    @property
    def address(self) -> str:
        """Where peers on other hosts find it; empty where they cannot."""

    def stats(self) -> Stats:
        """What it has done."""

    def use_numpy(self) -> Any:
        """NumPy allocates in the store from now on."""


_process: Any = None
_forked_from: int | None = None


def current() -> Runtime:
    """The running process object.

    Raises:
        NotInitialized: no `zc.init` is in effect.
        ForkedProcess: this is a child made by ``os.fork``; the parent's connections are not ours to use.
    """
    if _process is not None:
        return _process  # type: ignore[no-any-return]
    if _forked_from is not None:
        raise ForkedProcess(
            f"this process was forked from process {_forked_from}, which runs zcactor; handles, references and the "
            "store's connections work there only: start actors instead of forking, or call zc.init() here"
        )
    raise NotInitialized("zcactor is not running in this process: wrap the program in 'async with zc.init():'")


def current_or_none() -> Runtime | None:
    """The running process object, or None."""
    return _process  # type: ignore[no-any-return]


def set_current(process: Runtime) -> None:
    """Make `process` the one that `current` returns."""
    global _process, _forked_from
    _process = process
    _forked_from = None


def clear_current() -> None:
    """`current` raises from now on."""
    global _process
    _process = None


def mark_forked(parent_pid: int) -> None:
    """Called in the child of a fork: nothing of the parent's runtime may be used."""
    global _process, _forked_from
    _process = None
    _forked_from = parent_pid
