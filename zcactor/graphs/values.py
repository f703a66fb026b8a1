"""The values of a run on their way: as a frame has brought them, and to the processes that take them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zcactor.api.passing import Unresolved
from zcactor.errors import ConnectionLost
from zcactor.marshal.packed import Packed, shared
from zcactor.marshal.values import SCALARS
from zcactor.rpc.call import Call
from zcactor.rpc.messages import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from zcactor.process.context import LocalProcess
    from zcactor.rpc.parts import Part

__all__ = ["PLAIN", "Courier", "Outcome", "argument", "completed"]

PLAIN: Final = -1
"""In the place of flags: the payload is the value itself."""
_OK: Final = int(Status.OK)


class Outcome(NamedTuple):
    """The value of one node in one run, or its failure."""

    status: int
    payload: Any
    parts: Sequence[Part] = ()
    flags: int = PLAIN

    @property
    def failed(self) -> bool:
        """Whether there is no value."""
        return self.status != _OK


def completed(process: LocalProcess, label: str, outcome: Outcome) -> Call:
    """The promise of an outcome that has come."""
    call = Call(process.process, process.loop, process.thread)
    call.label = label
    call.retrieved = True
    if outcome.flags == PLAIN:
        call.complete_plain(outcome.payload)
    else:
        call.complete(outcome.status, outcome.payload, outcome.parts, outcome.flags)
    return call


def argument(process: LocalProcess, label: str, outcome: Outcome) -> Any:
    """The value as an argument: itself, or packed until the method runs."""
    return outcome.payload if outcome.flags == PLAIN else Unresolved(completed(process, label, outcome))


class Courier:
    """The sender of the values that one process makes for a graph. Any thread may send.

    Args:
        process: the process.
        word: names the graph in PUSH frames.
        arrived: takes what stays in this process, on its loop: ``arrived(key, payload, parts, flags)``.
    """

    def __init__(
        self, process: LocalProcess, word: int, arrived: Callable[[int, Any, Sequence[Part], int], None]
    ) -> None:  # fmt: skip
        self._process = process
        self._used = process.sessions.used
        self._marshaller = process.marshaller
        self._word = word
        self._arrived = arrived
        self._handed = 0
        """The values for this process so far."""

    def handed(self, targets: Iterable[bytes]) -> int:
        """A number that is larger once a value has been handed over to one of these processes."""
        sessions = [session for target in targets if (session := self._used.get(target)) is not None]
        frames: int = sum(session.connection.native_out.committed for session in sessions)
        return self._handed + frames

    def send(self, key: int, value: Any, targets: Sequence[bytes], served: list[bytes]) -> None:
        """Send a value, one frame a process. A process whose connection has ended gets none: its end breaks the graph.

        Args:
            key: names the node and the run.
            value: the value, or a `zcactor.marshal.packed.Packed` one.
            targets: the processes.
            served: gets the targets that need no other frame for this key.

        Raises:
            Exception: the error of packing the value; the targets in `served` have it all the same.
        """
        packed = (value.payload, shared(value.parts), value.flags) if type(value) is Packed else None
        # On one core each frame that is sent at once would wake its receiver before the next one is written.
        written: list[Any] | None = [] if len(targets) > 1 else None
        try:
            self._send(key, value, packed, targets, served, written)
        finally:
            for wire in written or ():
                wire.flush()

    def _send(
        self, key: int, value: Any, packed: Any, targets: Sequence[bytes], served: list[bytes],
        written: list[Any] | None,
    ) -> None:  # fmt: skip
        """Do so, and append the native parts with frames that the caller has to flush to `written`, if there is one."""
        more = False if written is None else None
        used, word, here = self._used, self._word, self._process.process
        for target in targets:
            session = None
            if target != here:
                session = used.get(target)
                if session is None or session.closed is not None:
                    served.append(target)
                    continue
                try:
                    wire = session.wire
                    if packed is None and wire.push(key, word, value, more):
                        if written is not None:
                            written.append(wire)
                        served.append(target)
                        continue
                except ConnectionLost:
                    served.append(target)
                    continue
            elif packed is None and type(value) in SCALARS:
                self._here(key, value, (), PLAIN)
                served.append(target)
                continue
            if packed is None:
                payload, parts, flags = self._marshaller.pack(value)
                packed = payload, shared(parts), flags  # a node may have any number of takers
            if session is None:
                self._here(key, *packed)
            else:
                packed = self._marshaller.fit(packed, session.connection.eager_limit)
                try:
                    session.push(key, self._word, _OK, *packed)
                except ConnectionLost:  # as above
                    pass
            served.append(target)

    def _here(self, key: int, payload: Any, parts: Sequence[Part], flags: int) -> None:
        self._handed += 1
        self._process.loop.call_soon_threadsafe(partial(self._arrived, key, payload, parts, flags))
