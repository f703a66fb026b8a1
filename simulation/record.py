"""The record of a run, kept outside of the simulated processes: it knows facts that they may forget or report
wrongly."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from zcactor.errors import RemoteError, ZcactorError, remote_of
from zcactor.ids import ActorId
from zcactor.process.context import current_host

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from simulation.loop import SimLoop
    from simulation.world import World

__all__ = ["Broken", "Operation", "Record", "current"]

PATIENCE = 120
"""Virtual seconds in which a call from a method has to end."""


class Broken:
    """A violation of an invariant."""

    __slots__ = ("at", "invariant", "text")

    def __init__(self, invariant: str, at: float, text: str) -> None:
        self.invariant = invariant
        self.at = at
        self.text = text

    def plain(self) -> dict[str, Any]:
        """The violation, in the types of the JSON line."""
        return {"invariant": self.invariant, "at": round(self.at, 6), "text": self.text}


class Operation:
    """One call that a workload made."""

    __slots__ = ("begun", "caller", "ended", "kind", "maybe", "number", "order", "outcome", "runs", "tries")

    def __init__(self, number: int, kind: str, begun: float, tries: int, order: tuple[str, int] | None) -> None:
        self.number = number
        self.caller: Any = asyncio._get_running_loop()
        """The loop of the process that made the call."""
        self.kind = kind
        self.begun = begun
        self.tries = tries
        """The number of times that the method may run."""
        self.order = order
        """The sequence of calls from one caller to one actor, and the call's place in it."""
        self.runs = 0
        self.outcome = ""
        self.maybe: bool | None = None
        """The error's statement on whether the method has run."""
        self.ended = 0


class Record:
    """The calls of one run, the lives of actors, and the violations.

    Args:
        world: the world of the run.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.operations: dict[int, Operation] = {}
        self.outcomes: dict[str, int] = {}
        self.sometimes: dict[str, int] = {}
        self.broken: list[Broken] = []
        self.calm = True
        """Whether no fault has happened so far."""
        self.take_overs = 0
        """The number of heads that have gone on where an earlier one had ended. Each may start an actor again whose
        start it cannot have seen."""
        self.ends: dict[str, str] = {}
        """The causes of the ends of named actors, by name, as heads with a log have decided them."""
        self._numbers = 0
        self.apart: Callable[[str, str], bool] = lambda *_: False
        """Whether the second of two hosts may not have noticed yet that an actor on it was ended; see
        `Cluster.is_apart`."""
        self.crash: Callable[[], None] = lambda: None
        """A function that ends the process of its caller; see `Cluster.crash`."""
        self.on_construct: Callable[[SimLoop, ActorId], None] = lambda *_: None
        """Called with the process and the id of each actor that is constructed."""
        self._lives: dict[str, list[tuple[SimLoop, bytes, int]]] = {}
        """The lives by name: each one's process, the actor's id, and its number in that process."""
        self._latest: WeakKeyDictionary[object, dict[str, tuple[int, int]]] = WeakKeyDictionary()
        """The latest place by actor and line: the record must not keep an actor alive, with all that it holds."""

    def break_(self, invariant: str, text: str) -> None:
        """Note a violation of an invariant; the first hundred are kept."""
        if len(self.broken) < 100:
            self.broken.append(Broken(invariant, self.world.now, text))
            self.world.note("world", "broken", invariant=invariant)

    def saw(self, state: str) -> None:
        """Note that a rare state has come about."""
        self.sometimes[state] = self.sometimes.get(state, 0) + 1

    # ---------------------------------------------------------------- calls

    def begin(self, kind: str, tries: int = 1, order: tuple[str, int] | None = None) -> Operation:
        """Note that a call is about to be made."""
        self._numbers += 1
        made = self.operations[self._numbers] = Operation(self._numbers, kind, self.world.now, tries, order)
        return made

    def ran(self, number: int, instance: object) -> None:
        """Note that a method has begun, in the actor `instance`. One that begins in the ruins of an ended process does
        not count."""
        if getattr(asyncio._get_running_loop(), "dead", False):
            return
        operation = self.operations[number]
        operation.runs += 1
        self.world.note(self.place(), "run", op=number)
        if operation.runs > operation.tries:
            self.break_("I2", f"{self.name(operation)} has run {operation.runs} times, {operation.tries} were allowed")
        if operation.order is not None:
            line, place = operation.order
            lines = self._latest.setdefault(instance, {})
            before = lines.get(line)
            if before is not None and place < before[0]:
                self.break_("I6", f"{self.name(operation)} of line {line} began after a later one, {before[1]}")
            lines[line] = max(place, before[0] if before else 0), number

    def end(self, operation: Operation, outcome: str, maybe: bool | None = None) -> None:
        """Note the end of a call, with a value or an error.

        Args:
            operation: the call.
            outcome: ``"ok"``, or the error's name.
            maybe: the error's statement on whether the method may have run; None for an error without one.
        """
        operation.ended += 1
        operation.outcome = outcome
        operation.maybe = maybe
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.world.note(self.place(), "end of call", op=operation.number, outcome=outcome)
        if operation.ended > 1:
            self.break_("I1", f"{self.name(operation)} has ended {operation.ended} times")

    def fail(self, operation: Operation, error: BaseException) -> None:
        """Note that a call has ended with an error."""
        if isinstance(error, RemoteError):  # the method has run, and raised
            self.end(operation, f"remote {type(remote_of(error).original or error).__name__}", maybe=True)
        else:
            self.end(operation, type(error).__name__, getattr(error, "maybe_executed", None))

    async def called(self, kind: str, method: Callable[..., Awaitable[Any]], *args: Any) -> tuple[Operation, Any]:
        """Make a call from within a method, and note its end.

        Args:
            kind: of the call.
            method: called with the call's number, and `args`.

        Returns:
            The call, and its value.

        Raises:
            ZcactorError: the error of the call.
            TimeoutError: the call did not end, which breaks I1.
        """
        operation = self.begin(kind)
        try:
            async with asyncio.timeout(PATIENCE):
                value = await method(operation.number, *args)
        except (ZcactorError, asyncio.CancelledError) as error:
            self.fail(operation, error)
            raise
        except TimeoutError:
            self.break_("I1", f"{self.name(operation)} had no end in {PATIENCE} s")
            raise
        self.end(operation, "ok")
        return operation, value

    def same(self, array: Any, value: float, what: str) -> None:
        """Check that each element of an array is `value`, so that its bytes have not changed."""
        if not (array == value).all():
            self.break_("I5", f"{what} has an array of {np.unique(array)[:4]} instead of {value}")

    def name(self, operation: Operation) -> str:
        """The name of a call in reports."""
        return f"call {operation.number} ({operation.kind})"

    @property
    def open(self) -> list[Operation]:
        """Calls of living callers that have not ended."""
        return [each for each in self.operations.values() if not each.ended and not each.caller.dead]

    def judge(self) -> None:
        """Check that outcomes told the truth; at the end, when no call runs."""
        for operation in self.operations.values():
            what = f"{self.name(operation)} ended with {operation.outcome}"
            if operation.outcome == "ok" and not operation.runs:
                self.break_("I3", f"{what} and has never run")
            if operation.outcome != "ok" and operation.maybe is False and operation.runs:
                self.break_("I3", f"{what}, which says that it cannot have run, and it has")

    # ---------------------------------------------------------------- actors

    def place(self) -> str:
        """The label of the caller's process."""
        loop: Any = asyncio._get_running_loop()
        return str(getattr(loop, "label", "world"))

    def constructed(self, name: str) -> None:
        """Note that an actor of that name has begun to live, and check that it has no other life. A different actor may
        still have the name on a host that has not noticed that actor's end yet."""
        loop: Any = asyncio._get_running_loop()
        host = current_host.get()
        actor: ActorId = host.info.actor_id if host is not None and host.info is not None else ActorId(b"")
        index = -1 if host is None else host.index
        self.world.note(loop.label, "construct", actor=name)
        lives = self._lives.setdefault(name, [])
        for other, another, its_index in lives:
            if other.dead or _is_closed(other, its_index):
                continue
            if actor == another or not self.apart(loop.host, other.host):
                self.break_("I4", f"{name} lives in {other.label} and is constructed in {loop.label}")
        lives.append((loop, actor, index))
        self.on_construct(loop, actor)

    def lives(self, name: str) -> int:
        """The number of times that an actor of that name was constructed."""
        return len(self._lives.get(name, ()))


def _is_closed(loop: SimLoop, index: int) -> bool:
    """Whether an actor has ended in a process that lives on: it has moved, or was discarded. Only the runner of that
    life tells: one that comes back to a shared process has another runner there, whose constructor runs now."""
    if loop.process is None:
        return False
    runner = loop.process.hosts.by_index.get(index)
    return runner is None or (runner.moving and runner.instance is None)


current: Record
"""The record of the present run: actors reach it by the module, as they are made anew in each simulated process."""
