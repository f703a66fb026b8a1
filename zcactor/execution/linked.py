"""The part of an actor's runner for calls with promises among their arguments, and calls whose results are pushed to
other processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from zcactor.api.passing import Awaited, Unresolved
from zcactor.interface import MethodKind, MethodSpec
from zcactor.rpc.incoming import Incoming

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.execution.arguments import Arguments
    from zcactor.execution.home import Home
    from zcactor.execution.mailbox import Mailbox
    from zcactor.rpc.session import Session

__all__ = ["Linked"]

_SYNC = int(MethodKind.SYNC)


class Linked(ABC):
    """The part of an actor's runner for calls that are linked with others: by promises among their arguments, or by
    FORWARD frames. The attributes are the runner's."""

    process: Home
    index: int
    stopping: bool
    _away: dict[Any, None]
    _closed: bool
    _arguments: Arguments
    _by_code: list[Mailbox]
    _plain: Sequence[tuple[str, int, Mailbox]]
    _specs: Sequence[MethodSpec]

    @abstractmethod
    def receive(self, incoming: Incoming) -> None:
        """Take a call that has arrived. On the loop's thread."""

    @abstractmethod
    def _refuse(self, incoming: Incoming) -> None:
        """Refuse a call that will not start."""

    def receive_linked(
        self, session: Session, call_id: int, code: int, timeout_ns: int, args: list[Any],
        forwards: Sequence[tuple[int, int, bytes]] | None,
    ) -> None:  # fmt: skip
        """Take a call as `receive_plain` does, with promises among its arguments or FORWARD frames."""
        incoming = session.incoming[call_id] = Incoming(session, call_id, self.index, code, args)
        if forwards is not None:
            pushes = self.process.pushes
            if len(forwards) == 1 and forwards[0][0] == 0 and forwards[0][2] in pushes.reached:
                incoming.forwards = forwards  # as `Pushes.forward` does it
            else:
                for forward in forwards:
                    pushes.forward(incoming, *forward)
        unresolved = False
        refused = self.stopping or session in self._away
        for place, value in enumerate(args):
            if type(value) is Awaited and refused:
                value.incoming = None  # nothing here waits for its outcome, which may come yet
                args[place] = value.unresolved()
            elif type(value) is Awaited:
                value.incoming, value.values, value.place = incoming, args, place
                incoming.blockers += 1
            elif type(value) is Unresolved:
                unresolved = True
        plain = self._plain
        if code < len(plain) and not (timeout_ns or unresolved or refused):
            # As in `receive_plain`: a call that waits, and one that starts at once.
            _, kind, mailbox = plain[code]
            lane = mailbox.lanes.get(session)
            if lane is not None:
                if incoming.blockers:
                    incoming.host = self
                    if not mailbox.steps_out:
                        lane.held.append((incoming, self._specs[code]))
                    return
                if kind == _SYNC and not lane.held and not lane.async_unstarted:
                    incoming.host = self
                    mailbox.hand_over(incoming, self._specs[code], lane)
                    return
        incoming.timeout_ns = timeout_ns
        self.receive_values(incoming, args)

    def receive_values(self, incoming: Incoming, args: list[Any]) -> None:
        """Take a call whose arguments have come one by one: plain values, and promises that are done."""
        if not (self.stopping or incoming.session in self._away):
            self._arguments.wait(incoming, args)
        self.receive(incoming)

    def unblocked(self, incoming: Incoming) -> None:
        """Go on with a call whose last lease or promise among the arguments has arrived."""
        if incoming.returning:
            self._refuse(incoming)
            return
        if incoming.host is not self or self._closed:
            return
        if type(incoming.payload) is not list:
            self._arguments.prepare(incoming)
        if not incoming.blockers:
            spec, mailbox = self._specs[incoming.code], self._by_code[incoming.code]
            lane = mailbox.lanes.get(incoming.session)
            if lane is not None and spec.kind == _SYNC and not (lane.async_unstarted or lane.pumping):
                held = lane.held  # the call is in it, unless calls step out of their lane while they wait
                if not held if mailbox.steps_out else len(held) == 1 and held[0][0] is incoming:
                    held.clear()
                    mailbox.hand_over(incoming, spec, lane)  # as `Mailbox.unblocked` does it, with two functions less
                    return
            mailbox.unblocked(incoming, spec)

    def keep_unresolved(self, incoming: Incoming, args: list[Any]) -> None:
        """Note that a plain call has an `Unresolved` among its arguments `args`."""
        if type(incoming.payload) is list:
            self._arguments.hold(incoming, args)
