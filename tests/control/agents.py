"""Stand-ins for the processes, sessions and pools that agents work with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from types import SimpleNamespace
from typing import Any

from zcactor.config import Config
from zcactor.errors import ConnectionLost
from zcactor.ids import ProcessId, new_process
from zcactor.process.epochs import KnownEpoch
from zcactor.process.head_outage import HeadOutage
from zcactor.process.head_places import HeadPlaces
from zcactor.rpc.services import method_number
from zcactor.workers.worker_table import WorkerRecord

DRIVER = ProcessId(b"d" * 16)
HEAD = ProcessId(b"h" * 16)


class FakeSession:
    """A connection to `peer_process`."""

    def __init__(self, peer: bytes) -> None:
        self.peer_process = peer
        self.closed: Exception | None = None
        self.successor: FakeSession | None = None

    @property
    def is_replaced(self) -> bool:
        """See `zcactor.rpc.session.Session`, as for `in_use`."""
        return self.successor is not None

    @property
    def in_use(self) -> FakeSession:
        """The twin that is used instead, or this session."""
        return self.successor or self

    async def aclose(self) -> None:
        self.closed = self.closed or ConnectionLost("closed here")


class FakeProcess:
    """A process whose requests go to `answer`, which may wait or raise."""

    def __init__(self, answer: Callable[..., Coroutine[Any, Any, Any]] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.process = self.agent = HEAD
        self.asked: list[tuple[Any, ...]] = []
        used: dict[bytes, FakeSession] = {}
        self.config = Config()
        self.sessions = SimpleNamespace(used=used, head=HEAD, living=lambda peer: used.get(peer))
        self.tasks = SimpleNamespace(closing=False, start=self.start, begin=self.loop.create_task)
        self.leases = SimpleNamespace(revive=None)
        self.news = SimpleNamespace(known=KnownEpoch(), on_heads=None, on_actor_changed=None)
        self.requests = self.head = self
        self.outage = HeadOutage(self.loop, 20.0)
        self.places, self.moving = HeadPlaces("head:1"), False
        self.begun: list[asyncio.Task[Any]] = []
        self._answer = answer

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.begun.append(self.loop.create_task(coroutine))

    async def _asked(self, *what: Any) -> Any:
        self.asked.append(what)
        return None if self._answer is None else await self._answer(*what)

    async def ask(self, *asked: Any) -> Any:
        """Ask a peer, whose session comes first, or else the head."""
        peer, asked = (asked[0].peer_process, asked[1:]) if isinstance(asked[0], FakeSession) else (self.agent, asked)
        method_number(asked[0])
        return await self._asked(peer, asked[0].__name__, *asked[1:])

    ask_of = ask

    async def rejoin(self, known: int, *asked: Any) -> tuple[FakeSession, Any]:
        assert known == self.news.known.epoch
        return FakeSession(self.agent), await self.ask(*asked)

    async def settle(self) -> None:
        """Let every ready task run."""
        await turns()


class FakePool:
    """A pool whose workers end when they are killed."""

    def __init__(self, ended: Callable[[WorkerRecord], None] = lambda _: None) -> None:
        self.by_process: dict[ProcessId, WorkerRecord] = {}
        self.drained = 0
        self.refuse: Exception | None = None
        self._ended = ended

    def start(
        self, label: str, env: Mapping[str, str], driver: ProcessId, *, shared: bool, process: ProcessId | None = None
    ) -> WorkerRecord:
        if self.refuse is not None:
            raise self.refuse
        record = _Worker(self, process or new_process(), label, driver, shared=shared)
        self.by_process[record.process] = record
        return record

    def end(self, record: WorkerRecord, cause: str) -> None:
        if self.by_process.pop(record.process, None) is not None:
            record.ended.set_result(cause)
            self._ended(record)

    def kill_all(self, cause: str | None) -> None:
        for record in list(self.by_process.values()):
            record.kill(cause)

    async def wait_all(self, timeout: float) -> None:
        assert timeout > 0

    def drain_output(self) -> None:
        self.drained += 1


class _Worker(WorkerRecord):
    def __init__(self, pool: FakePool, process: ProcessId, label: str, driver: ProcessId, *, shared: bool) -> None:
        super().__init__(process, asyncio.get_running_loop(), label, driver, shared=shared)
        self._pool = pool

    def kill(self, cause: str | None = None) -> None:
        self._pool.end(self, cause or "its process was killed")


async def turns() -> None:
    """Let every ready task run."""
    for _ in range(20):
        await asyncio.sleep(0)
