"""What has to hold in every process, whatever goes wrong: watched as a run goes on, and looked at when at rest."""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import OutOfMemory, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zcactor.runtime.process import Process
    from zcactor.simulation.cluster import Cluster
    from zcactor.simulation.loop import SimLoop
    from zcactor.simulation.record import Record

__all__ = ["Invariants"]

POISON: Final = 0xDD
"""What free bytes of arenas are full of: who reads bytes that were given back finds them changed."""
POISONED: Final = 0.3
"""Virtual seconds from one time to the next, on average, that a process's free bytes are filled."""
COUNTED: Final = 0.2
"""Virtual seconds from one look to the next, on average, at what the head's ledger has given away."""
_LOOKS: Final = 4
"""Looks at processes at rest, each a moment apart: what is there in all of them is no message on its way."""


class Invariants(logging.Handler):
    """Watches the processes of one run. Beside that it takes what they log: no error is to be expected.

    Args:
        cluster: whose processes.
        record: is told what is broken.
    """

    def __init__(self, cluster: Cluster, record: Record) -> None:
        super().__init__(logging.ERROR)
        self._cluster = cluster
        self._record = record
        self._world = cluster.world
        self._drawn = self._world.random("poison")
        self._counted = self._world.random("count")
        cluster.on_process = self._born
        cluster.network.on_lost = self._lost
        cluster.network.on_overrun = self._overrun

    # ---------------------------------------------------------------- always

    def emit(self, record: logging.LogRecord) -> None:
        """Something was logged as an error (I11)."""
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() + (f": {error!r}" if error is not None else "")
        self._record.break_("I11", f"{self._record.place()} has logged: {text[:500]}")

    def _lost(self, loop: SimLoop, cause: Exception | None) -> None:
        if isinstance(cause, ProtocolError):
            self._record.break_("I11", f"{loop.label} takes an honest peer for a broken one: {cause}")

    def _overrun(self, loop: SimLoop, outstanding: int, window: int) -> None:
        self._record.break_("I7", f"{loop.label} has {outstanding} frames outstanding, its window is {window}")

    def _born(self, process: Process, loop: SimLoop) -> None:
        if process.role != "agent":
            loop.at(self._world.now + self._drawn.uniform(0, POISONED), self._poison, process, loop)
        elif process.process == self._cluster.head_id:
            loop.at(self._world.now + COUNTED, self._count, loop)

    def _count(self, loop: SimLoop) -> None:
        """What is free of each node and what its actors have makes what it has, and no request waits that could be
        served (I9)."""
        loop.at(self._world.now + self._counted.expovariate(1 / COUNTED), self._count, loop)
        head: Any = self._cluster.head_host
        ledger = head.node._ledger
        taken: dict[str, Counter[str]] = {}
        for actor in head.node._actors.values():
            if actor.node is not None:
                taken.setdefault(actor.node.id, Counter()).update(actor.request)
        for node, amounts in ledger._nodes.items():
            for name, total in amounts.total.items():
                free, used = amounts.free[name], taken.get(node, Counter())[name]
                if abs(free + used - total) > 1e-6:
                    self._record.break_("I9", f"of {total:g} {name} {free:g} are free, and actors have {used:g}")
        if ledger.waiting:  # the first of them waits for no other
            first = ledger._waiting[0]
            if any(ledger._nodes[node].now(first.request) for node in first.order() if node in ledger._nodes):
                self._record.break_("I9", f"a request for {first.request} waits, and there is room for it")

    def _poison(self, process: Process, loop: SimLoop) -> None:
        """Take free bytes of an arena, and leave them as nobody else does (I5)."""
        blocks = []
        try:
            for _ in range(4):
                nbytes = self._drawn.choice((64, 1024, 20_000, 160_000))
                block = process.store.allocate(nbytes)
                ctypes.memset(block.address, POISON, nbytes)
                blocks.append(block)
        except OutOfMemory:
            self._record.saw("store full")
        blocks.clear()
        loop.at(self._world.now + self._drawn.expovariate(1 / POISONED), self._poison, process, loop)

    def problems(self) -> None:
        """What nobody caught (I11)."""
        for at, text in self._world.problems:
            self._record.break_("I11", f"at {at:.3f}: {text}")
        self._world.problems.clear()

    # ---------------------------------------------------------------- at rest

    def _processes(self) -> Iterable[tuple[SimLoop, Process]]:
        return [(loop, loop.process) for loop in self._world.loops.values() if loop.process is not None]

    def _leftovers(self, *, ended: bool) -> dict[tuple[Any, ...], str]:
        """What there is at this moment that nothing at rest has, by what names it."""
        found: dict[tuple[Any, ...], str] = {}
        head = self._cluster.head_id
        for loop, process in self._processes():
            recipes = 0
            for session in process.sessions.all():
                peer = session.peer_process.hex()[:8]
                for number, call in list(session.pending.items()):
                    found[loop.label, session.number, "pending", number] = f"an open call to {peer}, {call.label}"
                for number in list(session.incoming):
                    found[loop.label, session.number, "incoming", number] = f"a call from {peer} without an answer"
                if loop.name.startswith("a") and not ended:
                    continue  # handles are leases at the head
                if session.peer_process == head and not ended:  # it keeps what actors are to be made of again
                    recipes += len(session.leases)
                    continue
                for number in list(session.leases._leases):
                    found[loop.label, peer, "lease", number] = f"a lease of {peer} on object {number:x}"
                other = getattr(session.connection, "other", None)  # none where it leads to the process itself
                if other is not None and other.loop.dead:
                    found[loop.label, session.number, "dead"] = f"a connection to {peer}, which has ended"
            if not loop.name.startswith("a") and not recipes and process.store.stats().used:
                stats = process.store.stats()
                found[loop.label, "store", stats.blocks] = f"{stats.used} bytes in {stats.blocks} blocks of the store"
        return found

    def at_rest(self, *, ended: bool) -> None:
        """Nothing is left of calls that have ended (I8); `ended`: nor of actors."""
        for _, process in self._processes():
            process.placements.clear()  # kept on purpose, for the next array of the same size
        left, credits = self._leftovers(ended=ended), self._credits()
        for _ in range(_LOOKS):
            self._world.run(lambda: False, limit=self._world.now + 0.37)
            now = self._leftovers(ended=ended)
            left = {key: text for key, text in left.items() if key in now}
            now = self._credits()
            credits = {key: text for key, text in credits.items() if key in now}
        for key, text in left.items():
            self._record.break_("I8", f"{key[0]} has {text} at rest")
        for text in credits.values():
            self._record.break_("I7", text)
        if ended:
            self._ledger()

    def _credits(self) -> dict[tuple[Any, ...], str]:
        """Where what one end may send is not what the other end's window has room for (I7)."""
        found: dict[tuple[Any, ...], str] = {}
        by_end = {session.connection: session for _, process in self._processes() for session in process.sessions.all()}
        for end, session in by_end.items():
            other = by_end.get(getattr(end, "other", None))
            if other is None or session.closed is not None or other.closed is not None:
                continue
            available, owed, window = session.credits.available, other.credits.owed, session.credits.window
            if available + owed != window:
                text = f"{end.loop.label} may send {available} frames to {end.other.loop.label}, {owed} are owed"
                found[end.loop.label, session.number, available, owed] = f"{text}, of a window of {window}"
        return found

    def _ledger(self) -> None:
        """Everything that was taken of the nodes is given back (I9)."""
        head = self._cluster.head_host
        node: Any = None if head is None else head.node
        if node is None:
            return
        ledger = node._ledger
        if ledger.total() != ledger.free():
            self._record.break_("I9", f"of {ledger.total()} only {ledger.free()} are free when no actor lives")
        if ledger.waiting:
            self._record.break_("I9", f"{ledger.waiting} requests wait when everything is free")
        for actor in node._actors.values():
            if actor.state != "dead":
                self._record.break_("I10", f"{actor.label} is {actor.state} after it was ended")
