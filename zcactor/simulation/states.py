"""Rare states of the package: each is looked for as a run goes on, and counted where it is met.

A net is as wide as the states that it gets to. A state that a night's runs never meet says that the faults, or the
workloads, do not reach it (the *sometimes* assertions of Antithesis and FoundationDB).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from zcactor.assembly.process import Process
    from zcactor.simulation.record import Record

__all__ = ["OF_PUSHES", "OF_RUNS", "STATES", "States"]

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
        if process.parting is not None and process.parting._proposed:
            self._record.saw("a connection is about to close")
            if any(process.parting._proposed.values()):
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
