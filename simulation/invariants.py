"""The invariants of every process under all faults: watched as a run goes on, and checked when it is at rest."""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING, Any, Final

from simulation.supervision import Supervision
from zcactor.errors import OutOfMemory, ProtocolError

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from simulation.cluster import Cluster
    from simulation.loop import SimLoop
    from simulation.record import Record
    from zcactor.assembly.process import Process
    from zcactor.objectstore.store import Store

__all__ = ["OF_PUSHES", "OF_RUNS", "POISON", "STATES", "Invariants", "Poison", "States"]

POISON: Final = 0xDD
_SIZES: Final = (64, 1024, 20_000, 160_000)
"""Bytes of the blocks that are filled; each time some of these are drawn."""
_BLOCKS: Final = 4
_IDLE: Final = 8
"""Renewals of a store in which nothing was allocated or freed do nothing, except one in so many."""
_fill = ctypes.memset


class Poison:
    """The poison of one store.

    Args:
        store: the store.
        drawn: decides which bytes are filled.
    """

    def __init__(self, store: Store, drawn: random.Random) -> None:
        self._store = store
        self._drawn = drawn
        self._next = 0, 0
        """The state where nothing happens until the next renewal."""
        self._idle = 0

    def renew(self) -> bool:
        """Fill free bytes with a pattern of their own where others were freed since the last time.

        Returns:
            False where the store had too little room.
        """
        now = self._state()
        self._idle = self._idle + 1 if now == self._next else 0
        filled = True
        if self._idle % _IDLE == 0:
            filled = self.fill()
            now = self._state()
        self._next = now[0] + 1, now[1]
        return filled

    def _state(self) -> tuple[int, int]:
        """The number of a block that is taken now, and the bytes in use. Blocks are numbered as they are taken."""
        heap = self._store.heap
        used = heap.used
        try:
            return heap.take(_SIZES[0]).id >> 32, used
        except OutOfMemory:
            return 0, used

    def fill(self) -> bool:
        """Take free bytes, fill them with a pattern of their own, and give them back. Returns as `renew` does."""
        store, draw = self._store, self._drawn.choice
        heap, base = store.heap, store.arena.address
        held: list[Any] = []
        for _ in range(_BLOCKS):
            nbytes = draw(_SIZES)
            try:  # without the store's object and table entry for a block: no code looks for this block
                hold: Any = heap.take(nbytes)
                heap.commit(hold.offset, nbytes)
            except (OutOfMemory, OSError):
                try:
                    hold = store.allocate(nbytes)  # this gives up the memory that is kept for later
                except OutOfMemory:
                    return False
            _fill(base + hold.offset, POISON, nbytes)
            held.append(hold)
        return True


OF_HEAD: Final = {
    "a node is fenced": "a node cannot be reached, and is not given up yet",
    "a fence ran out": "a node was given up, and an actor of it is placed anew",
    "an actor is displaced": "the node of an actor is lost, and the actor lives on no other yet",
    "a restart during a stop": "an actor is being restarted while a stop of it goes on",
    "a restart waits for resources": "an actor is being restarted, and no node has room for it",
    "a third life": "an actor is restarted for the second time, or later",
    "an end in the constructor": "the process of an actor has ended before the constructor returned",
}
"""States of the head, with their meanings."""
OF_PROCESSES: Final = {
    "a credit stall": "frames wait, because the peer has not reported enough of the sent ones consumed",
    "a duplicate connection": "two processes have connected to each other at once, and both connections are open",
    "a connection is about to close": "a process has proposed to a peer to close an idle connection",
    "both ends propose to close": "a process agrees to close a connection that it has itself proposed to close",
    "an object was pinned": "an object of a third process was kept until a peer had a lease of its own from there",
    "bytes are on their way": "a process waits for the bytes of an array",
    "a call is held back": "a call waits for its arguments, or behind such a call of the same caller",
    "an object outlives its owner": "the bytes of a process that has ended are still mapped or copied",
}
"""States of drivers and workers, with their meanings."""
OF_RUNS: Final = {
    "a cancel after the answer": "a call is cancelled that had returned a value",
    "NameTaken": "two actors are to have one name",
    "a request waited": "resources are granted after a while",
    "store full": "an allocation finds no room",
    "a handle held by the third process that had it": "a handle has passed through two processes",
    "the head's host is gone": "the cluster has ended before its driver",
}
"""States that workloads, invariants and faults meet by themselves, with their meanings."""
OF_PUSHES: Final = {
    "owner pushes": "the maker of a result was not asked to push it, or its call has failed",
    "owner pushes in place of the maker": "a result was asked for, and its maker has not pushed it",
    "maker has no connection to push by": "a result is made where no connection to the process that needs it is open",
    "no way to push": "a process does not reach the one to which it is to push a result",
    "push before its call": "a result is here before the call that has it as an argument",
    "push came late or twice": "a result comes for which no call waits",
    "push without a call dropped": "the call of a result has not come for a while",
    "reference after its push was dropped": "a call comes whose argument may have been dropped",
    "owner asked for a failure": "the owner of an argument pushes no result, as the call has failed",
    "owner asked after a while": "a result that was to be pushed has not come for a while",
    "owner asked after a loss": "a connection has ended that may have carried a result",
}
"""States of results on their way to other calls, which `zcactor.objects` notes, with their meanings."""
STATES: Final = (*OF_HEAD, *OF_PROCESSES, *OF_RUNS, *OF_PUSHES)
"""The states that are to be met in a night's runs, by the names under which they are counted."""


# A net is as wide as the states that it gets to. A state that a night's runs never meet says that the faults, or the
# workloads, do not reach it (the *sometimes* assertions of Antithesis and FoundationDB).
class States:
    """The look-out of one run.

    Args:
        record: of the run; it counts the states.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._fenced: dict[str, None] = {}

    def of_head(self, head: Any) -> None:
        """Look at the head."""
        saw = self._record.saw
        for node in head.members._fenced:
            self._fenced[node.id] = None
            saw("a node is fenced")
        for actor in head._actors.all():
            if actor.displaced:
                saw("an actor is displaced")
                if actor.state == "restarting" and actor.node_id in self._fenced:
                    saw("a fence ran out")
            if actor.state == "restarting":
                if actor.ending is not None:
                    saw("a restart during a stop")
                if actor.withdraw is not None:
                    saw("a restart waits for resources")
                if actor.restarts > 1:
                    saw("a third life")
                if actor._failed_starts:
                    saw("an end in the constructor")

    def of_batch(self, process: Process, session: Any) -> None:
        """Look at a process that has just taken in a batch of frames."""
        if session._backlog and session.credits.available == 0:
            self._record.saw("a credit stall")
        if process.locations._coming:
            self._record.saw("bytes are on their way")
        if process.idle_reaper._proposed:
            self._record.saw("a connection is about to close")
            if any(process.idle_reaper._proposed.values()):
                self._record.saw("both ends propose to close")

    def of_process(self, process: Process) -> None:
        """Look at a driver or a worker."""
        saw = self._record.saw
        for session in process.sessions.all():
            twin = session.twin
            if twin is not None and twin.closed is None and session.closed is None:
                saw("a duplicate connection")
            if session.leases._next_pin > 1:
                saw("an object was pinned")
        if process.adoptions._outlived:
            saw("an object outlives its owner")
        for runner in process.hosts.actors():
            for box in runner._by_code:
                for lane in box.lanes.values():
                    if lane.held:
                        saw("a call is held back")
                        break


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
        """Look at the head's tables; see `simulation.supervision`."""
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
