"""Expectations: outcomes of promises that other processes have said they will push here.

A call whose argument is an unfinished promise carries a reference with a key. The outcome comes in a PUSH frame under
that key, from the process that makes it or from the promise's owner. A PUSH only shortens the way: the reference is a
lease on the promise all the same, so an outcome that has not come in time is asked for at the owner, as that of every
other reference is. A lost, late, repeated or refused PUSH therefore costs time, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary, ref

from zcactor.api.passing import Awaited, Unresolved
from zcactor.buggify import buggify
from zcactor.errors import ProtocolError
from zcactor.rpc.messages import Status, owner_word

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from zcactor.objects.promises import Promises
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.call import Call
    from zcactor.rpc.parts import Part
    from zcactor.rpc.session import Session

__all__ = ["Expectation", "Expectations"]

PATIENCE: Final = 1.0
"""Seconds until an outcome that has not come is asked for at its owner, and until one that came without its call is
dropped. A call whose result takes longer costs one frame more; a shorter time would send that frame for more calls."""
_MAX_EARLY: Final = 256
"""Outcomes that have come before their calls, at most. Each is a frame, and may hold leases."""
_OK: Final = int(Status.OK)

_new_awaited: Final = Awaited.__new__

_Outcome = tuple[Any, "Sequence[Part]", int]
"""Payload, parts and flags; without parts and flags None, for a value that the native part has read."""


class Expectation:
    """One outcome that is to come, or has come and is not taken yet. The argument that was announced keeps it, and
    until it has come, for `PATIENCE` seconds at most, the table of expectations does."""

    __slots__ = ("__weakref__", "asked", "calls", "coming", "outcome", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        """Time of the loop at which the reference came."""
        self.calls: list[ref[Call | Awaited]] = []
        """The stand-ins and arguments that wait for the outcome. Each keeps this object, a stand-in by its holder."""
        self.outcome: _Outcome | None = None
        self.asked = False
        """Whether the owner is asked as well."""
        self.coming = False
        """Whether the frame is here, and its bytes are being read."""

    def _give(self, call: Call | Awaited, outcome: _Outcome) -> None:
        payload, parts, flags = outcome
        if flags < 0:
            call.complete_plain(payload)
        else:
            call.complete(_OK, payload, parts, flags)

    def add(self, call: Call, ask: Callable[[Call], None]) -> None:
        """Complete `call` with the outcome, now or when it comes. `ask` gets the outcome from its owner."""
        if self.outcome is not None:
            self._give(call, self.outcome)
        else:
            self.calls.append(ref(call))
            if self.asked:
                call.fetch = ask

    def come(self, outcome: _Outcome) -> None:
        """Take the outcome; the first one counts."""
        if self.outcome is None:
            self.outcome = outcome
            calls, self.calls = self.calls, []
            for each in calls:
                call = each()
                if call is not None:
                    self._give(call, outcome)

    def ask(self, ask: Callable[[Call], None]) -> None:
        """Get the outcome from its owner, unless a PUSH brings it before. The bytes of a result that took its time
        would come twice if both were taken."""
        if self.outcome is None and not self.asked:
            self.asked = True
            calls, self.calls = self.calls, []
            for each in calls:
                call = each()
                if isinstance(call, Awaited):
                    call.stand_in()  # its call is added here, and asks
                elif call is not None:
                    self.calls.append(each)
                    ask(call)


class Expectations:
    """The outcomes that are to be pushed to one process. Used on the loop's thread.

    Args:
        tasks: of the process.
        promises: of the process; they ask the owner of a promise for an outcome that does not come.
    """

    def __init__(self, tasks: Tasks, promises: Promises) -> None:
        self._loop = tasks.loop
        self._promises = promises
        self._ask = promises.ask
        self._waiting: dict[tuple[int, int], Expectation] = {}
        self._asked: WeakValueDictionary[tuple[int, int], Expectation] = WeakValueDictionary()
        """Those whose owners were asked as well."""
        self._early: dict[tuple[int, int], tuple[float, _Outcome | None]] = {}
        self._coming: set[tuple[int, int]] = set()
        """The outcomes whose frames are here, and whose bytes are being read."""
        self._latest: dict[int, int] = {}
        """The highest key that was announced or dropped, by the owner's word: keys of one owner rise."""
        self._timer: asyncio.TimerHandle | None = None
        self.takers: dict[int, Callable[[int, Any, Sequence[Part], int], None]] = {}
        """The graphs of this process, and its members of groups, by the word that names each in PUSH frames. A value
        for one of them is no outcome of a promise. The native part calls them by itself, with negative flags, for what
        it has read."""
        self.noted: Callable[[str], None] = lambda _: None
        """Called with the name of a rare state, for simulations."""

    def expect(self, owner: bytes, key: int) -> Expectation | None:
        """Expect the outcome of a promise under `key`, which the owner has just announced.

        Returns:
            The expectation, or None where the outcome may have been dropped: it has to be asked for.
        """
        word = int.from_bytes(owner[:8], "little")  # as `owner_word`
        early = self._early.pop((word, key), None) if self._early else None
        if key > self._latest.get(word, 0):
            self._latest[word] = key
        elif early is None:
            self.noted("reference after its push was dropped")
            return None
        made = Expectation(self._loop.time())
        if self._coming:
            made.coming = (word, key) in self._coming
        if early is None:
            self._waiting[word, key] = made
            if self._timer is None:
                self._look_later()
        elif early[1] is None:
            return None
        else:
            made.outcome = early[1]
        return made

    def argument(self, session: Session, object_id: int, key: int, label: str) -> Any:
        """See `zcactor.rpc.hub.Hub.argument_received`."""
        owner = session.peer_process
        if self._early:
            early = self._early.get((int.from_bytes(owner[:8], "little"), key))
            if early is not None and early[1] is not None and early[1][2] < 0:  # a plain value, which is needed as such
                self.expect(owner, key)
                session.release_later(object_id)
                return early[1][0]
        holder = _new_awaited(Awaited)  # no constructor: it would be a function more, with cold caches
        holder.owner = owner
        holder.id = object_id
        holder._release = session.release_later
        holder.label = label
        holder.promises = self._promises
        holder.taken = None
        holder.expected = expected = self.expect(owner, key)
        if expected is None or expected.outcome is not None:
            return Unresolved(self._promises.call_of(holder, label))
        expected.calls.append(ref(holder))
        return holder

    def coming(self, word: int, key: int) -> None:
        """Note that the frame of a PUSH is here, and its bytes are being read, which may take longer than `PATIENCE`.
        To ask the owner would bring them twice."""
        self._coming.add((word, key))
        waiting = self._waiting.get((word, key))
        if waiting is not None:
            waiting.coming = True

    def pushed(self, word: int, key: int, status: int, payload: Any, parts: Sequence[Part], flags: int) -> None:
        """Take a PUSH of the owner's `word`: the outcome for status OK, otherwise the request to ask the owner."""
        taker = self.takers.get(word)
        if taker is None:
            self._come(word, key, (payload, parts, flags) if status == _OK else None)
            return
        self._coming.discard((word, key))
        if status == _OK:
            taker(key, payload, parts, flags)
        else:
            raise ProtocolError(f"PUSH {key:#x} for a graph or a group has status {status}; these take values alone")

    def pushed_plain(self, word: int, key: int, value: Any) -> None:
        """Take a PUSH that the native part has read."""
        self._come(word, key, (value, (), -1))

    def _come(self, word: int, key: int, outcome: _Outcome | None) -> None:
        self._coming.discard((word, key))
        waiting = self._waiting.pop((word, key), None) or self._asked.pop((word, key), None)
        if waiting is not None:
            if outcome is None:
                self.noted("owner asked for a failure")
                waiting.ask(self._ask)
            else:
                waiting.come(outcome)
        elif key <= self._latest.get(word, 0):
            self.noted("push came late or twice")
        elif (word, key) not in self._early:
            self.noted("push before its call")
            if len(self._early) >= _MAX_EARLY or buggify("early push dropped"):
                self._drop(next(iter(self._early), (word, key)))
            self._early[word, key] = self._loop.time(), outcome
            self._look_later()

    def _drop(self, name: tuple[int, int]) -> None:
        """Drop an outcome whose call has not come: its reference, and all announced before it, will be asked for."""
        self._early.pop(name, None)
        word, key = name
        self._latest[word] = max(key, self._latest.get(word, 0))

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(PATIENCE, self._look)

    def _look(self) -> None:
        """Ask for what has not come in time, and drop what has come without its call."""
        self._timer = None
        now = self._loop.time()
        for name, (since, _) in list(self._early.items()):
            if now - since >= PATIENCE:
                self.noted("push without a call dropped")
                self._drop(name)
        again = bool(self._early)
        for name, waiting in list(self._waiting.items()):
            if now - waiting.since >= PATIENCE and not waiting.coming:
                self.noted("owner asked after a while")
                self._waiting.pop(name, None)
                self._asked[name] = waiting
                waiting.ask(self._ask)
        if again or self._waiting:
            self._look_later()

    def session_lost(self, peer: bytes, *, last: bool) -> None:
        """Ask for every outcome that has not come: the lost connection may have carried it.

        Args:
            peer: the process at the other end.
            last: whether no other connection to it is open.
        """
        lost, self._waiting = self._waiting, {}
        self._asked.update(lost)
        for waiting in lost.values():
            self.noted("owner asked after a loss")
            waiting.ask(self._ask)
        if last:
            word = owner_word(peer)
            self._latest.pop(word, None)
            for name in [name for name in self._early if name[0] == word]:
                del self._early[name]

    def close(self) -> None:
        """Expect nothing more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._early.clear()
        self._coming.clear()
