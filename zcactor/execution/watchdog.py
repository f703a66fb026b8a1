"""Warnings of long waits in a process of actors: a loop that a method blocks, and calls behind a plain method.

A thread of its own looks, because the loop may be what hangs. It only looks: in a process without calls it does not
wake the loop, and calls cost nothing more for being watched. It reads the data of other threads, so a warning may be a
moment old. Of frames it keeps only text, because frames would keep their arrays alive.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from zcactor.interface import MethodKind
from zcactor.logs import logger
from zcactor.rpc.services import SYSTEM_INDEX

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping
    from types import FrameType

    from zcactor.execution.actor_runner import ActorRunner
    from zcactor.native import hot
    from zcactor.process.sessions import Sessions
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.incoming import Incoming

__all__ = ["Watchdog", "open_calls"]

AGAIN: Final = 60.0
"""Seconds until the same warning of an actor is repeated."""
_LOOKS: Final = 4
"""The number of looks within the time before a warning, which is therefore late by a quarter of that time at most."""
_CALLS: Final = 1000
"""Open calls of one caller that are looked at, the oldest first: the call that waits longest is among them."""
_NAMED: Final = 3
"""Calls or actors that one line names."""
THREADED = frozenset({int(MethodKind.SYNC), int(MethodKind.GENERATOR)})
_PACKAGE = str(Path(__file__).parents[1])
_RUNNER = str(Path(__file__).with_name("actor_runner.py"))


class Watchdog:
    """The watchdog of the actors in one process.

    Args:
        hosts: the runners by index.
        sessions: of the process.
        counters: of the process.
        tasks: of the process; their loop is watched.
        after: seconds before a warning, more than 0; see `zcactor.config.Config.warn_after`.
    """

    def __init__(
        self, hosts: Mapping[int, ActorRunner], sessions: Sessions, counters: hot.Counters, tasks: Tasks,
        after: float,
    ) -> None:  # fmt: skip
        self._hosts = hosts
        self._sessions = sessions
        self._counters = counters
        self._tasks = tasks
        self._after = after
        self._asked: float | None = None
        """The time when the loop was asked for a sign of life, while it has given none."""
        self._looked: float | None = None
        self._frames = 0
        """Frames received before the last look."""
        self.seen: dict[tuple[int, int, bool], float] = {}
        """The times since when calls have been seen waiting or running, by session, id and whether they run. It is
        replaced at each look."""
        self._said: dict[tuple[int, str], float] = {}
        self.on_held: Callable[[], Coroutine[Any, Any, None]] | None = None
        """The coroutine function that runs on the loop after a look which has found a call held up by a method."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look. Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop looking. Idempotent; does not wait."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._after / _LOOKS):
            try:
                self.look(time.monotonic())
            except RuntimeError:  # a container was changed during the look, or the loop has been closed
                if self._tasks.loop.is_closed():
                    return

    def look(self, now: float) -> None:
        """Warn of each wait that has lasted long enough.

        Args:
            now: seconds on a clock that does not jump.
        """
        if self._looked is not None and now - self._looked > self._after / 2:
            # This thread did not run either: the process was stopped, or the machine suspended. All waits begin anew.
            self._asked = None if self._asked is None else now
            self.seen = {}
        self._looked = now
        hosts = [host for index, host in list(self._hosts.items()) if index != SYSTEM_INDEX]
        calls = open_calls(self._sessions, _CALLS)
        if self._asked is not None:
            if now - self._asked >= self._after:
                self._blocked(now, hosts, calls)
        elif calls or self._counters.frames_received != self._frames:
            self._asked = now
            self._tasks.loop.call_soon_threadsafe(self._alive)
        self._frames = self._counters.frames_received
        before, seen, held = self.seen, {}, False
        for incoming in calls:
            if incoming.cancelled or incoming.blockers:
                continue
            key = (id(incoming.session), incoming.id, incoming.started)
            since = seen[key] = before.get(key, now)
            if not incoming.started and now - since >= self._after:
                self._held_up(now, incoming, calls)
                held = True
        self.seen = seen
        if held and self.on_held is not None and self._may_say(now, SYSTEM_INDEX, "circle", self._after):
            self._tasks.start(self.on_held())

    def _alive(self) -> None:
        self._asked = None

    def _may_say(self, now: float, index: int, what: str, again: float = AGAIN) -> bool:
        last = self._said.get((index, what))
        if last is not None and now - last < again:
            return False
        self._said[index, what] = now
        return True

    # ---------------------------------------------------------------- the loop

    def _blocked(self, now: float, hosts: list[ActorRunner], calls: list[Incoming]) -> None:
        place = _method_in(sys._current_frames().get(self._tasks.thread))
        host = hosts[0] if len(hosts) == 1 else self._blocker(calls, place[0])
        if not self._may_say(now, 0 if host is None else host.index, "loop"):
            return
        label = f"process {os.getpid()}" if host is None else host.label
        logger.warning("%s has not come back to its event loop for %g s: in %s, %s", label, self._after, *place)

    def _blocker(self, calls: list[Incoming], method: str) -> ActorRunner | None:
        """The actor, of several in the process, whose method runs on the loop; None where that cannot be told."""
        task = asyncio.current_task(self._tasks.loop)
        found = set()
        for incoming in calls:
            if incoming.task is not None and incoming.task is task:
                return incoming.host  # type: ignore[no-any-return]
            if incoming.started and incoming.host.interface.methods[incoming.code].name == method:
                found.add(incoming.host)
        return found.pop() if len(found) == 1 else None

    # ---------------------------------------------------------------- plain methods

    def _held_up(self, now: float, incoming: Incoming, calls: list[Incoming]) -> None:
        host = incoming.host
        spec, mailbox = host.interface.methods[incoming.code], host.mailbox_of(incoming.code)
        running = next(
            (
                other
                for other in calls
                if other.host is host
                and other.started
                and other.stream is None
                and host.interface.methods[other.code].kind in THREADED
                and host.mailbox_of(other.code) is mailbox
            ),
            None,
        )
        if running is None and not mailbox.tasks.full:
            return
        if not self._may_say(now, host.index, "calls"):
            return
        if running is None:
            logger.warning(
                "%s has waited %g s: as many calls of %s run as may (max_concurrency is %d)",
                spec.label, self._after, host.label, mailbox.tasks.running,
            )  # fmt: skip
            return
        what = host.interface.methods[running.code]
        others = list(dict.fromkeys(islice(self._awaited(), _NAMED + 1)))
        if others:
            more = ", and others" if len(others) > _NAMED else ""
            doing = f"waits for {', '.join(others[:_NAMED])}{more}"
        else:
            place = _method_of(what.name)
            doing = "runs" if place is None else f"is at {place}"
        logger.warning("%s has waited %g s for %s, which %s", spec.label, self._after, what.label, doing)

    def _awaited(self) -> Iterator[str]:
        """The calls out of this process that a plain method waits for, in ``result()`` or on a loop of its own."""
        for remote in list(self._sessions.remotes.values()):
            for call in list(remote.unfinished):
                waiter = call.waiter
                if call.blocked or (waiter is not None and waiter.get_loop() is not self._tasks.loop):
                    yield f"{remote.label}.{call.label.rpartition('.')[2]}"


def open_calls(sessions: Sessions, most: int | None = None) -> list[Incoming]:
    """The calls of peers to the actors of a process that have no answer yet, at most so many of each caller, the oldest
    ones."""
    return [
        incoming
        for session in list(sessions.all())
        for incoming in list(islice(session.incoming.values(), most))
        if incoming.host is not None and incoming.actor != SYSTEM_INDEX
    ]


# ---------------------------------------------------------------- frames


def _stack(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """File, line and function of a thread's frames, the outermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return found[::-1]


def _users(stack: list[tuple[str, int, str]]) -> tuple[str, int, str] | None:
    """The method of an actor in a stack, which the actor's runner has called. None for a stack without a runner."""
    inside = False
    for entry in stack:
        inside = inside or entry[0] == _RUNNER
        if inside and not entry[0].startswith(_PACKAGE):
            return entry
    return None


def _written(entry: tuple[str, int, str]) -> str:
    return f"{os.path.basename(entry[0])}:{entry[1]}"


def _method_in(frame: FrameType | None) -> tuple[str, str]:
    """The method of an actor that a thread runs, and its place; for a thread without one, its innermost function."""
    stack = _stack(frame)
    entry = _users(stack) or (stack[-1] if stack else ("?", 0, "?"))
    return entry[2], _written(entry)


def _method_of(name: str) -> str | None:
    """The place of the method of that name that some thread runs; None where no thread or several threads run one."""
    found = [entry for frame in sys._current_frames().values() if (entry := _users(_stack(frame))) and entry[2] == name]
    return _written(found[0]) if len(found) == 1 else None
