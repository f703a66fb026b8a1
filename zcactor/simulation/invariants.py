"""The invariants of every process under all faults: watched as a run goes on, and checked when it is at rest."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import ProtocolError
from zcactor.simulation.poison import Poison
from zcactor.simulation.states import States
from zcactor.simulation.supervision import Supervision

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zcactor.assembly.process import Process
    from zcactor.simulation.cluster import Cluster
    from zcactor.simulation.loop import SimLoop
    from zcactor.simulation.record import Record

__all__ = ["Invariants"]

POISONED: Final = 0.3
"""Virtual seconds from one time to the next, on average, that a process's free bytes are filled."""
COUNTED: Final = 0.2
"""Virtual seconds from one look to the next, on average, at the grants in the head's ledger."""
_LOOKS: Final = 4
"""The number of looks at processes at rest, each a moment apart: an object that is there in all of them is not a
message on its way."""


class Invariants(logging.Handler):
    """The watch over the processes of one run. It also takes their log records: no error is expected.

    Args:
        cluster: the cluster of the processes.
        record: the record that gets the violations.
    """

    def __init__(self, cluster: Cluster, record: Record) -> None:
        super().__init__(logging.ERROR)
        self._cluster = cluster
        self._record = record
        self._world = cluster.world
        self._drawn = self._world.random("poison")
        self._counted = self._world.random("count")
        self.supervision = Supervision(cluster, record)
        self._states = States(record)
        record.on_construct = self.supervision.constructed
        cluster.on_process = self._born
        cluster.on_head = self.supervision.begins
        cluster.on_head_lost = self.supervision.head_lost
        cluster.on_take_over = self.supervision.taken_over
        cluster.network.on_lost = self._lost
        cluster.network.on_overrun = self._overrun
        cluster.network.on_delivered = self._delivered

    # ---------------------------------------------------------------- always

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record that was logged as an error (I11)."""
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() + (f": {error!r}" if error is not None else "")
        self._record.break_("I11", f"{self._record.place()} has logged: {text[:500]}")

    def _lost(self, loop: SimLoop, cause: Exception | None) -> None:
        if isinstance(cause, ProtocolError):
            self._record.break_("I11", f"{loop.label} takes an honest peer for a broken one: {cause}")

    def _overrun(self, loop: SimLoop, outstanding: int, window: int) -> None:
        self._record.break_("I7", f"{loop.label} has {outstanding} frames outstanding, its window is {window}")

    def _delivered(self, loop: SimLoop, session: Any, outstanding: int) -> None:
        """Check that a session may not send more frames than its window has room for (I7)."""
        credits = session.credits
        if credits.available + outstanding > credits.window:
            text = f"{loop.label} may send {credits.available} frames with {outstanding} outstanding"
            self._record.break_("I7", f"{text}, its window is {credits.window}")
        if loop.process is not None:
            self._states.of_batch(loop.process, session)

    def _born(self, process: Process, loop: SimLoop) -> None:
        process.pushes.noted = process.pushes.expectations.noted = self._record.saw
        if process.role != "agent":
            poison = Poison(process.store, self._drawn)
            loop.at(self._world.now + self._drawn.uniform(0, POISONED), self._poison, poison, loop)
        elif process.process == self._cluster.head_id:
            loop.at(self._world.now + COUNTED, self._watch_head, loop)

    def _count(self, loop: SimLoop) -> None:
        """Look at the head's tables; see `zcactor.simulation.supervision`."""
        loop.at(self._world.now + self._counted.expovariate(1 / COUNTED), self._count, loop)
        self.supervision.look()
        host = self._cluster.head_host
        if host is not None and host.node is not None:
            self._states.of_head(host.node)

    def _watch_head(self, loop: SimLoop) -> None:
        host = self._cluster.head_host
        assert host is not None
        if host.node is None:  # its log has not answered yet
            loop.at(self._world.now + COUNTED, self._watch_head, loop)
            return
        self.supervision.attach(host.node)
        self._count(loop)

    def _poison(self, poison: Poison, loop: SimLoop) -> None:
        """Fill free bytes of an arena (I5)."""
        if not poison.renew():
            self._record.saw("store full")
        if loop.process is not None:
            self._states.of_process(loop.process)
        loop.at(self._world.now + self._drawn.expovariate(1 / POISONED), self._poison, poison, loop)

    def problems(self) -> None:
        """Report the exceptions that no code has caught (I11)."""
        for at, text in self._world.problems:
            self._record.break_("I11", f"at {at:.3f}: {text}")
        self._world.problems.clear()

    # ---------------------------------------------------------------- at rest

    def _processes(self) -> Iterable[tuple[SimLoop, Process]]:
        return [(loop, loop.process) for loop in self._world.loops.values() if loop.process is not None]

    def _leftovers(self, *, ended: bool) -> dict[tuple[Any, ...], str]:
        """The objects of this moment that a cluster at rest does not have, by a key for each."""
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
                if session.peer_process == head and not ended:  # the head keeps the recipes of actors that may restart
                    recipes += len(session.leases)
                    continue
                for number in list(session.leases._counts):
                    found[loop.label, peer, "lease", number] = f"a lease of {peer} on object {number:x}"
                if session.twin is not None and session.twin.closed is None and session.closed is None:
                    found[loop.label, session.number, "twin"] = f"two connections to {peer}"
                other = getattr(session.connection, "other", None)  # None where it leads to this process
                if other is not None and other.loop.dead:
                    found[loop.label, session.number, "dead"] = f"a connection to {peer}, which has ended"
            if not loop.name.startswith("a") and not recipes and process.store.stats().used:
                stats = process.store.stats()
                found[loop.label, "store", stats.blocks] = f"{stats.used} bytes in {stats.blocks} blocks of the store"
        return found

    def at_rest(self, *, ended: bool) -> None:
        """Check that nothing is left of calls that have ended (I8); with `ended`, nor of actors."""
        for _, process in self._processes():
            process.placements.clear()  # kept on purpose, for the next array of the same size
        left, credits = self._leftovers(ended=ended), self._credits()
        for _ in range(_LOOKS):
            self._world.run(limit=self._world.now + 0.37)
            now = self._leftovers(ended=ended)
            left = {key: text for key, text in left.items() if key in now}
            now = self._credits()
            credits = {key: text for key, text in credits.items() if key in now}
        for key, text in left.items():
            self._record.break_("I8", f"{key[0]} has {text} at rest")
        for text in credits.values():
            self._record.break_("I7", text)
        self.supervision.at_rest()
        if ended:
            self._ledger()

    def without_head(self) -> None:
        """Check that a cluster without a head has ended, and that a driver has nothing left of its calls."""
        for loop in self._world.loops.values():
            if loop.name[0] in "aw":
                self._record.break_("I10", f"{loop.label} lives on without the head")
        left = self._leftovers(ended=True)
        for _ in range(_LOOKS):
            self._world.run(limit=self._world.now + 0.37)
            now = self._leftovers(ended=True)
            left = {key: text for key, text in left.items() if key in now}
        for (place, _, what, *_), text in left.items():
            if what in ("pending", "incoming", "dead"):
                self._record.break_("I8", f"{place} has {text} without the head")

    def _credits(self) -> dict[tuple[Any, ...], str]:
        """The connections where the credits of one end do not match the room in the other end's window (I7)."""
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
        """Check that all resources taken of the nodes were given back (I9)."""
        head = self._cluster.head_host
        node: Any = None if head is None else head.node
        if node is None:
            return
        ledger = node._ledger
        if ledger.total() != ledger.free():
            self._record.break_("I9", f"of {ledger.total()} only {ledger.free()} are free when no actor lives")
        if ledger.waiting:
            self._record.break_("I9", f"{ledger.waiting} requests wait when everything is free")
        for actor in node._actors.all():
            if actor.state != "dead":
                self._record.break_("I10", f"{actor.label} is {actor.state} after it was ended")
