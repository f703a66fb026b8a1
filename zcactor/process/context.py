"""The runtime of this process, for the few places that get no reference to it: a decorated class, an unpickled handle.

A process has at most one. `zc.init` and a worker's start set it, `zc.shutdown` clears it, and a fork marks it unusable
in the child.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple, overload

from zcactor.errors import ForkedProcess, NotInitialized
from zcactor.exception_pickling import hides

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence

    from zcactor.config import Config
    from zcactor.ids import ActorId
    from zcactor.marshal import Marshaller
    from zcactor.objectstore.copies import CopyCounter
    from zcactor.objectstore.lease import RemoteLease
    from zcactor.objectstore.placement import Placements
    from zcactor.objectstore.ref import Region
    from zcactor.objectstore.store import Store
    from zcactor.observe.stats import Stats
    from zcactor.process.head_outage import HeadOutage
    from zcactor.process.head_places import HeadPlaces
    from zcactor.process.place import Place
    from zcactor.process.places import Places
    from zcactor.process.sessions import Sessions
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.call import Call
    from zcactor.rpc.parts import Part
    from zcactor.rpc.session import Session
    from zcactor.transport.bytes import Commit, Flow

__tracebackhide__ = hides
__all__ = [
    "Asking",
    "LocalProcess",
    "call_deadline",
    "choose_by",
    "clear_current",
    "current",
    "current_host",
    "current_or_none",
    "mark_forked",
    "restored",
    "set_current",
]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

call_deadline: ContextVar[float | None] = ContextVar("zcactor_call_deadline", default=None)
"""Inside a method: the loop time at which its caller's deadline ends. Calls made there inherit it."""
current_host: ContextVar[Any] = ContextVar("zcactor_current_host", default=None)
"""Inside a method: the host of the actor whose method runs."""


class Connecting(Protocol):
    """The connections that this process opens; see `zcactor.peers.connections.Connections`."""

    async def connect(self, process: bytes) -> Session:
        """Return the session with `process`, which is opened if necessary."""


class Asking(Protocol):
    """Requests to the services of peers; see `zcactor.peers.requests.Requests`."""

    @overload
    def ask(
        self, session: Session, method: Callable[[Any, *Ts], Coroutine[Any, Any, R]], *args: *Ts
    ) -> Awaitable[R]: ...  # fmt: skip
    @overload
    def ask(self, session: Session, method: Callable[[Any, *Ts], R], *args: *Ts) -> Awaitable[R]: ...
    def ask(self, session: Session, method: Callable[[Any, *Ts], Any], *args: *Ts) -> Awaitable[Any]:
        """Call a remote method of the peer."""

    def send(
        self, session: Session, method: Callable[[Any, *Ts], None], args: tuple[*Ts], *, more: bool = False
    ) -> None:
        """Call a remote method of the peer that gives no answer."""

    def tell(self, session: Session, method: Callable[[Any, *Ts], object], args: tuple[*Ts]) -> Call | None:
        """Call a remote method of the peer, without awaiting the answer."""

    async def ask_of(
        self, session: Session, method: Callable[[Any, *Ts], Coroutine[Any, Any, R]], *args: *Ts
    ) -> R:  # fmt: skip
        """Call a remote method of the peer, with errors of zcactor's own as they are."""


class AskingHead(Protocol):
    """Requests to the head; see `zcactor.peers.head_link.HeadLink`."""

    outage: HeadOutage
    places: HeadPlaces
    epoch: int
    moving: bool

    @property
    def process(self) -> bytes:
        """Id of the head's process."""

    async def whereabouts(self, known: int) -> str:
        """The place of a head that leads elsewhere."""

    async def rejoin(
        self, known: int, method: Callable[[Any, *Ts], Coroutine[Any, Any, R]], *args: *Ts
    ) -> tuple[Session, R]:  # fmt: skip
        """Call a remote method of a head that is away."""

    async def ask(self, method: Callable[[Any, *Ts], Coroutine[Any, Any, R]], *args: *Ts) -> R:
        """Call a remote method of the head."""

    async def hold_actor(self, object_id: int) -> Callable[[], None] | None:
        """Lease an actor."""

    async def locate(self, actor_id: ActorId, *, calls_wait: bool = False) -> tuple[str, tuple[bytes, int], str]:
        """Return the location of an actor."""

    async def silence_of(self, process: bytes) -> tuple[float, str]:
        """Return when the head last heard from the node of a process."""


class Bringing(Protocol):
    """Bytes of other processes; see `zcactor.objects.locations.Locations`."""

    def remote(self, session: Session, region: Region) -> Part:
        """Return the part for a lease on bytes that cannot be mapped."""

    async def fetch(
        self, lease: RemoteLease, start: int, nbytes: int, address: int, keep: object, commit: Commit | None = None
    ) -> None:
        """Pull a part of the bytes of a lease to memory of the caller's."""

    async def flows(self, leases: Sequence[RemoteLease], start: int, nbytes: int) -> list[Flow] | None:
        """Prepare to take a part of the bytes of several leases side by side as they arrive."""

    def flowed(self, nbytes: int) -> None:
        """Count bytes that were taken as they arrived."""


class Promising(Protocol):
    """Promises that are passed on; see `zcactor.objects.promises.Promises`."""

    def announce(self, call: Call, session: Session) -> int:
        """Announce that the outcome of a call will be pushed to a peer. Returns the key, or 0 for none."""

    def export(self, call: Call) -> int:
        """Let peers hold a promise of this process. Returns its id."""

    def call_of(self, holder: Any, label: str) -> Call:
        """Return the promise that a reference names."""

    def complete(self, call: Call, status: int, payload: Any, parts: Sequence[Part], flags: int) -> None:
        """Complete a promise."""


class Pushing(Protocol):
    """Results for processes of other calls; see `zcactor.objects.pushes.Pushes`."""

    expectations: Any
    """The outcomes that are to come, and the graphs."""

    def call(self, dependent: Call, session: Session, actor: int, code: int, args: tuple[Any, ...]) -> bool:
        """Send a call with references among its arguments by the native part."""


class LocalProcess(Protocol):
    """The parts of a process that handles, references and arrays need."""

    process: bytes
    """Id of the process, 16 bytes."""
    role: str
    """``"driver"``, ``"agent"`` or ``"worker"``."""
    loop: asyncio.AbstractEventLoop
    thread: int
    """Identifier of the loop's thread."""
    config: Config
    namespace: str
    place: Place
    store: Store
    copies: CopyCounter
    marshaller: Marshaller
    tasks: Tasks
    sessions: Sessions
    places: Places
    placements: Placements

    @property
    def connections(self) -> Connecting:
        """Connections to other processes."""

    @property
    def requests(self) -> Asking:
        """Requests to the services of peers."""

    @property
    def head(self) -> AskingHead:
        """Requests to the cluster's head."""

    @property
    def locations(self) -> Bringing:
        """Bytes of other processes."""

    @property
    def promises(self) -> Promising:
        """Promises that are passed on."""

    @property
    def pushes(self) -> Pushing:
        """Results for processes of other calls."""

    @property
    def groups(self) -> Callable[[], Any]:
        """Function that returns the groups of the process, a `zcactor.collectives.groups.Groups`."""

    @property
    def graphs(self) -> Callable[[], Any]:
        """Function that returns the graphs of the process, a `zcactor.graphs.graphs.Graphs`."""

    @property
    def unretrieved_errors(self) -> Any:
        """Failures that nobody has retrieved."""

    @property
    def address(self) -> str:
        """Address at which peers on other hosts reach the process; empty where they cannot."""

    def stats(self) -> Stats:
        """Return the statistics of the process."""

    def use_numpy(self) -> Any:
        """Make NumPy allocate in the store from now on. Returns the argument of `use_handler` that undoes it."""


_process: Any = None
_choose: Callable[[], Any] | None = None
"""See `choose_by`; asked only where `_process` is None."""
_forked_from: int | None = None


def current() -> LocalProcess:
    """Return the process object that runs here.

    Raises:
        NotInitialized: no `zc.init` is in effect.
        ForkedProcess: this process is a child made by ``os.fork``, which must not use the parent's connections.
    """
    if _process is not None:
        return _process  # type: ignore[no-any-return]
    if _choose is not None:
        return _choose()  # type: ignore[no-any-return]
    if _forked_from is not None:
        raise ForkedProcess(
            f"this process was forked from process {_forked_from}, which runs zcactor; handles, references and the "
            "store's connections work there only: start actors instead of forking, or call zc.init() here"
        )
    raise NotInitialized(
        "zcactor is not running in this process: wrap the program in 'async with zc.init():', or "
        "a plain script in 'with zc.init():'"
    )


def current_or_none() -> LocalProcess | None:
    """Return the process object that runs here, or None."""
    if _process is None and _choose is not None:
        return _choose()  # type: ignore[no-any-return]
    return _process  # type: ignore[no-any-return]


def set_current(process: LocalProcess) -> None:
    """Make `current` return `process`."""
    global _process, _forked_from
    _process = process
    _forked_from = None


def choose_by(choose: Callable[[], LocalProcess]) -> None:
    """Make `current` return the result of `choose`, which knows by the context of the caller which of several process
    objects runs here. For tests, which have a whole runtime in one process of the system."""
    global _process, _choose, _forked_from
    _process = _forked_from = None
    _choose = choose


def clear_current() -> None:
    """Make `current` raise from now on."""
    global _process, _choose
    _process = _choose = None


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore at the end of the block the process object that ran here at its beginning."""
    global _process, _choose, _forked_from
    before = _process, _choose, _forked_from
    try:
        yield
    finally:
        _process, _choose, _forked_from = before


def mark_forked(parent_pid: int) -> None:
    """Forbid the parent's runtime in the child of a fork, which calls this."""
    global _process, _choose, _forked_from
    _process = _choose = None
    _forked_from = parent_pid
