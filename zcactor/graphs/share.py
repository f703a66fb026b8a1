"""One process's share of a graph: its methods run when their values have come, in the order of runs.

Every node sends one frame a run to each process that takes its value: the value, or its failure. So each method gets
everything that it needs for each run once, also where a run has failed or is cancelled, and no state of a run is left.
"""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVarTuple

from numpy import ndarray

from zcactor.errors import ConnectionLost, ProtocolError, ZcactorError
from zcactor.graphs.layout import RUN_BITS
from zcactor.graphs.service import GraphService
from zcactor.graphs.values import PLAIN, Courier, Outcome, argument
from zcactor.marshal.packed import Packed
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.messages import Flags, Status, owner_word

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from zcactor.process.context import LocalProcess
    from zcactor.process.spinning import Spinner
    from zcactor.rpc.parts import Part
    from zcactor.rpc.session import Session

__all__ = ["KEY_NBYTES", "Duty", "Share"]

Ts = TypeVarTuple("Ts")

KEY_NBYTES: Final = 16
"""Random bytes that name a graph. Frames name it by the first 8."""
_RUN: Final = (1 << RUN_BITS) - 1
_OK: Final = int(Status.OK)
_KWARGS: Final = int(Flags.KWARGS)
_GONE: Final[Mapping[int, str]] = {
    int(Status.NO_SUCH_ACTOR): "its process does not know it any more",
    int(Status.STOPPED): "it was stopped before the call started",
    int(Status.KILLED): "it was ended while the call ran",
}


class Hosting(Protocol):
    """The runner of an actor; see `zcactor.execution.actor_runner.ActorRunner`."""

    index: int
    label: str

    def receive_plain(self, session: Any, call_id: int, code: int, timeout_ns: int, args: list[Any]) -> None:
        """Take a call with plain positional arguments."""

    def receive_values(self, incoming: Incoming, args: list[Any]) -> None:
        """Take a call whose arguments have come one by one."""

    def cancel(self, incoming: Incoming) -> None:
        """Cancel a call."""

    def session_closed(self, session: Any) -> None:
        """Forget a caller."""


class Duty:
    """One method of a graph, in the process of its actor.

    Args:
        number: of its node.
        host: runs it.
        code: number of the method in its actor's interface.
        label: its name in messages.
        args: its positional arguments: ``(True, node)`` for a value of each run, ``(False, constant)``. A constant that
            methods can change is packed.
        kwargs: its keyword arguments, likewise.
        needs: the numbers of the nodes whose values it takes, each once.
    """

    def __init__(
        self, number: int, host: Hosting, code: int, label: str, args: Sequence[tuple[bool, Any]],
        kwargs: Mapping[str, tuple[bool, Any]], needs: Sequence[int],
    ) -> None:  # fmt: skip
        self.number, self.host, self.code, self.label = number, host, code, label
        self.args, self.kwargs, self.needs = args, kwargs, needs
        self.takes_one = len(args) == 1 and args[0][0]
        """Whether its only positional argument is a value of each run."""
        self.is_plain = not kwargs and not any(type(what) is Packed for _, what in args)
        """Whether it takes positional arguments only, and every run may get the same constants."""
        self.next = 1
        """The run that starts next."""
        self.gathered: dict[int, dict[int, Outcome]] = {}
        """The values that have come for runs that have not started."""
        self.nbytes = 0
        """Bytes of its largest result so far."""


class _Caller:
    """The caller of a share's methods, in the place of a session: it takes the answers; see
    `zcactor.rpc.incoming.Answering`."""

    peer_process = b""
    closed = None

    def __init__(self, share: Share, eager_limit: int) -> None:
        self.wire = SimpleNamespace(respond=share.answered, answer=share.answered)
        self.connection: Any = SimpleNamespace(eager_limit=eager_limit, max_frame=eager_limit)
        self.incoming: dict[int, Incoming] = share.open
        self.fail = share.fail
        self._failed = share.answered_otherwise
        self._used = share.process.sessions.used
        self._targets = {target for targets in share.targets.values() for target in targets}
        self._held: list[Session] = []
        if len(self._targets) == 1:
            session = self._used.get(next(iter(self._targets)))
            if session is not None:  # without a function between: a twin that is used later sends what nobody took
                self.hold_releases, self.unhold_releases = (  # type: ignore[method-assign]
                    session.hold_releases, session.unhold_releases,
                )  # fmt: skip

    def respond(
        self, incoming: Incoming, status: int, payload: Any, parts: Sequence[Part], flags: int, *, more: bool = False,
        pushed: int = 0,
    ) -> None:  # fmt: skip
        """Take an answer that is no value."""
        del more, pushed
        self._failed(incoming, Outcome(status, payload, parts, flags))

    def send_item(self, *_: object) -> None:
        """Refuse the item of a stream, which no method of a graph has."""
        raise RuntimeError("a method of a graph is no generator")

    def hold_releases(self) -> bool:
        """Promise a frame to the processes that take values: it takes releases along."""
        if self._held:  # another thread has promised it
            return False
        for target in self._targets:
            session = self._used.get(target)
            if session is not None and session.hold_releases():
                self._held.append(session)
        return bool(self._held)

    def unhold_releases(self) -> None:
        """Take the promise of `hold_releases` back."""
        held, self._held = self._held, []
        for session in held:
            session.unhold_releases()


class Share:
    """The methods of one graph in one process, and the values that pass here. Used on the loop's thread, but for
    answers.

    Args:
        process: the process.
        key: names the graph, 16 bytes.
        founder: the process that runs it.
        duties: the methods here.
        targets: the processes that take the value of each node made here.
        peers: the names of the other processes that exchange values with this one.
        sink: the outputs, in the founder, and the functions that take their outcomes: ``(node, run, outcome)``, or
            ``(node, run, value)`` for a plain value.
        spinner: keeps the loop awake for a while; None lets it sleep.
    """

    def __init__(
        self, process: LocalProcess, key: bytes, founder: bytes, duties: Sequence[Duty],
        targets: Mapping[int, Sequence[bytes]], peers: Mapping[bytes, str],
        sink: tuple[frozenset[int], Callable[[int, int, Outcome], None], Callable[[int, int, Any], None]] | None = None,
        spinner: Spinner | None = None,
    ) -> None:  # fmt: skip
        self.process, self.key, self.founder, self.peers, self.targets = process, key, founder, peers, targets
        self.word = owner_word(key)
        self.spinner = spinner
        self.open: dict[int, Incoming] = {}
        """The runs of methods that have started, by key."""
        self.broken = False
        self._outputs: frozenset[int] = frozenset() if sink is None else sink[0]
        self._sink = None if sink is None else sink[1]
        self._sink_plain = None if sink is None else sink[2]
        self._takers: dict[int, list[Duty]] = {number: [] for number in self._outputs}
        for duty in duties:
            for number in duty.needs:
                self._takers.setdefault(number, []).append(duty)
        self._duties = {duty.number: duty for duty in duties}
        self._alone = {
            number: takers[0]
            for number, takers in self._takers.items()
            if len(takers) == 1 and takers[0].needs == [number] and takers[0].is_plain and number not in self._outputs
        }
        """The only taker of a node, by number, where it takes nothing else."""
        self._ends = frozenset(number for number in self._outputs if not self._takers[number])
        """Outputs that no method here takes."""
        self._served: dict[int, list[bytes]] = {}
        """The processes that have got the value of a run whose method then failed, by key."""
        self._used = process.sessions.used
        self._single = {number: to[0] for number, to in targets.items() if len(to) == 1 and to[0] != process.process}
        """The only process that takes the value of a node, by node."""
        self._courier = Courier(process, self.word, self.arrived)
        self._caller = _Caller(self, process.config.eager_limit)

    # ---------------------------------------------------------------- values that come

    def arrived(self, key: int, payload: Any, parts: Sequence[Part], flags: int) -> None:
        """Take the value that a PUSH frame has brought.

        Raises:
            ProtocolError: this process takes no value of that node, or has got the value.
        """
        if self.broken:
            return
        number, run, sink = key >> RUN_BITS, key & _RUN, self._sink_plain
        if sink is not None and number in self._ends and flags == PLAIN and run:
            if self.spinner is not None:
                self.spinner.touch()
            sink(number, run, payload)
            return
        duty = self._alone.get(number)
        if duty is not None and flags == PLAIN and run == duty.next:
            if self.spinner is not None:
                self.spinner.touch()
            duty.next = run + 1
            args = [payload] if duty.takes_one else [payload if comes else what for comes, what in duty.args]
            duty.host.receive_plain(self._caller, duty.number << RUN_BITS | run, duty.code, 0, args)
            if duty.gathered:
                self._start_next(duty)
        else:
            self.take(key, Outcome(_OK, payload, parts, flags))

    def take(self, key: int, outcome: Outcome) -> None:
        """Take a value or a failure. Raises as `arrived`."""
        number, run = key >> RUN_BITS, key & _RUN
        duties = self._takers.get(number)
        if duties is None or not run:
            raise ProtocolError(f"the value of node {number} in run {run} came to a process that does not take it")
        if self.spinner is not None:
            self.spinner.touch()
        if self._sink is not None and number in self._outputs:
            self._sink(number, run, outcome)
        for duty in duties:
            found = duty.gathered.setdefault(run, {})
            if run < duty.next or number in found:
                raise ProtocolError(f"the value of node {number} in run {run} came twice")
            found[number] = outcome
            if len(found) == len(duty.needs) and run == duty.next:
                self._start_next(duty)

    def _start_next(self, duty: Duty) -> None:
        """Start the runs whose turn has come."""
        while True:
            found = duty.gathered.get(duty.next)
            if found is None or len(found) < len(duty.needs):
                return
            run = duty.next
            del duty.gathered[run]
            duty.next += 1
            failure = next((found[number] for number in duty.needs if found[number].failed), None)
            if failure is None or not self._pass_on(duty.number << RUN_BITS | run, failure, []):
                self._start(duty, run, found)

    def _start(self, duty: Duty, run: int, found: Mapping[int, Outcome]) -> None:
        def value(argued: tuple[bool, Any]) -> Any:
            comes, what = argued
            if comes:
                return argument(self.process, duty.label, found[what])
            if type(what) is Packed:  # an object of this run's own
                return argument(self.process, duty.label, Outcome(_OK, what.payload, what.parts, what.flags))
            return what

        args = [value(each) for each in duty.args]
        key = duty.number << RUN_BITS | run
        incoming = Incoming(self._caller, key, duty.host.index, duty.code, args)
        if duty.kwargs:
            incoming.flags = _KWARGS
            args.append({name: value(each) for name, each in duty.kwargs.items()})
        self.open[key] = incoming
        duty.host.receive_values(incoming, args)

    # ---------------------------------------------------------------- values that go

    def send(self, number: int, run: int, value: Any) -> None:
        """Send the value of a node that needs no method: an input.

        Raises:
            Exception: the error of packing the value.
        """
        self._courier.send(number << RUN_BITS | run, value, self.targets[number], [])

    def handed(self, numbers: Iterable[int]) -> int:
        """A number that is larger once the value of one of these nodes has been handed over to a process."""
        return self._courier.handed({target for number in numbers for target in self.targets[number]})

    def answered(self, key: int, value: Any, more: bool = False, pushed: int = 0) -> bool:
        """Take the result of a method, and send it on. Called in the thread that has run the method.

        Returns:
            True: the answer is taken.

        Raises:
            Exception: the error of packing the value.
        """
        del more, pushed
        if self.broken:
            return True
        number = key >> RUN_BITS
        sent, session = False, self._used.get(self._single.get(number, b""))
        if session is not None and session.closed is None:  # as the courier does, with fewer steps
            try:
                sent = session.wire.push(key, self.word, value, False)
            except ConnectionLost:  # its end breaks the graph
                sent = True
        if not sent:
            served: list[bytes] = []
            try:
                self._courier.send(key, value, self.targets[number], served)
            except BaseException:
                self._served[key] = served
                raise
        self.open.pop(key, None)
        if type(value) is ndarray and value.nbytes > self._duties[number].nbytes:
            self._duties[number].nbytes = value.nbytes
            self._on_loop(partial(self._tell_founder, GraphService.noted, self.key, number, value.nbytes))
        return True

    def answered_otherwise(self, incoming: Incoming, outcome: Outcome) -> None:
        """Take the failure of a method, and send it on. Any thread may call this."""
        if self.open.pop(incoming.id, None) is not None and not self.broken:
            self._on_loop(partial(self._fail_here, incoming, outcome, self._served.pop(incoming.id, [])))

    def _fail_here(self, incoming: Incoming, outcome: Outcome, served: list[bytes]) -> None:
        if not self._pass_on(incoming.id, outcome, served):
            self.tell_broken(incoming.host.label, "its failure could not be sent", died=False)

    def _on_loop(self, function: Callable[[], None]) -> None:
        if threading.get_ident() == self.process.thread:
            function()
        else:
            self.process.loop.call_soon_threadsafe(function)

    def _pass_on(self, key: int, outcome: Outcome, served: list[bytes]) -> bool:
        """Send the failure of a node to all that take its value and have not got it, and count these as served.

        Returns:
            False where something in the failure is not here, an array that had no room for example: the others have to
            get another failure.
        """
        number, run = key >> RUN_BITS, key & _RUN
        if outcome.status in _GONE:
            self.tell_broken(self._duties[number].host.label, _GONE[outcome.status], died=True)
            return True
        for target in self.targets[number]:
            if target in served:
                continue
            session = self.process.sessions.used.get(target)
            if target == self.process.process:
                self.process.loop.call_soon(self.failed, number, run, outcome)
            elif session is not None and session.closed is None:
                packed = Packed(outcome.payload, outcome.parts, outcome.flags, outcome.status)
                try:
                    self.process.requests.send(session, GraphService.failed, (self.key, number, run, packed))
                except (ZcactorError, OSError):
                    self._served[key] = served
                    return False
            served.append(target)
        return True

    def failed(self, number: int, run: int, outcome: Outcome) -> None:
        """Take the failure of a node. Raises as `arrived`."""
        if not self.broken:
            self.take(number << RUN_BITS | run, outcome)

    # ---------------------------------------------------------------- the ends

    def cancel(self, run: int) -> None:
        """Stop what runs for a run that nobody waits for."""
        for key, incoming in list(self.open.items()):
            if key & _RUN == run and not incoming.cancelled:
                incoming.cancelled = True
                incoming.host.cancel(incoming)

    def _tell_founder(self, method: Callable[[Any, *Ts], None], *args: *Ts) -> None:
        session = self.process.sessions.used.get(self.founder)
        if self.founder == self.process.process:
            getattr(self.process.graphs(), method.__name__)(*args)
        elif session is not None and session.closed is None:
            self.process.requests.send(session, method, args)

    def tell_broken(self, label: str, cause: str, *, died: bool) -> None:
        """Tell the founder that the graph has lost an actor, or messages."""
        if not self.broken:
            self.broken = True
            self._tell_founder(GraphService.broken, self.key, label, cause, died)

    def fail(self, error: Exception) -> None:
        """Break the graph by a method that could not be answered. Any thread may call this."""
        self._on_loop(partial(self.tell_broken, "an actor", str(error), died=False))

    def actor_ended(self, actor_id: bytes, cause: str) -> None:
        """Note that an actor of this process has ended."""
        for duty in self._duties.values():
            host: Any = duty.host
            if host.info is not None and host.info.actor_id == actor_id:
                self.tell_broken(host.label, cause, died=True)
                return

    def close(self) -> None:
        """Stop all runs, and forget the graph. Idempotent."""
        self.broken = True
        for incoming in list(self.open.values()):
            if not incoming.cancelled:
                incoming.cancelled = True
                incoming.host.cancel(incoming)
        self.open.clear()
        for duty in self._duties.values():
            duty.gathered.clear()
            duty.host.session_closed(self._caller)
