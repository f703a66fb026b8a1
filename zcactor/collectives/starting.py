"""The start of an operation: its promise, its timeout, and its way to the loop."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from zcactor.api.future import ObjectRef
from zcactor.collectives.operations import Refusal
from zcactor.errors import GroupTimeout, OutOfMemory
from zcactor.exception_pickling import fields_of
from zcactor.options import checked_seconds
from zcactor.process.context import call_deadline
from zcactor.rpc.call import Call

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.collectives.member import Member
    from zcactor.collectives.operations import Collective
    from zcactor.collectives.steps import ReducerStep
    from zcactor.process.context import LocalProcess

__all__ = ["CountedCall", "start"]


def start(
    member: Member, what: str, timeout: float | None, make: Callable[[LocalProcess, Call], Collective],
    step: ReducerStep | None = None,
) -> ObjectRef[Any]:  # fmt: skip
    """Start an operation, and return the reference to its result. Any thread may call this.

    Args:
        member: the member that calls.
        what: the name of the operation in messages.
        timeout: seconds, or None.
        make: makes the operation of the process and of the promise of the result.
        step: the step of a reducer that it belongs to.
    """
    left = checked_seconds(timeout, what)
    process = member.process
    call = _promise(process, what)
    try:
        operation = make(process, call)
    except OutOfMemory as error:  # no room for a copy of the input: all ranks get the error
        operation = Refusal(process, call, what, error)
    operation.step = step
    reference: ObjectRef[Any] = ObjectRef(call)
    call.retrieved = False
    deadline = call_deadline.get()
    if deadline is not None:
        rest = max(deadline - process.loop.time(), 0.0)
        left = rest if left is None else min(left, rest)
    _post(member, operation, left)
    return reference


class CountedCall:
    """A call of a collective, from its beginning on. One that raises takes its place in the order of the group, unless
    it has taken that: all other ranks get the error, none waits for this one, and the next calls are matched with each
    other. Any thread may enter this.

    Args:
        member: the member that calls.
        what: the name of the operation in messages.
        refusal: the kind of operation that takes the place.
    """

    __slots__ = ("member", "place", "refusal", "what")

    def __init__(self, member: Member, what: str, refusal: type[Refusal]) -> None:
        self.member = member
        self.what = what
        self.refusal = refusal
        self.place = member.seat.next

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            return
        member, process = self.member, self.member.process
        if threading.get_ident() == process.thread and member.seat.next != self.place:
            return
        notes = fields_of(error).setdefault("__notes__", [])
        if type(notes) is list:
            notes.append(f"rank {member.rank} has raised this in {self.what}, and all ranks get it")
        _post(member, self.refusal(process, _promise(process, self.what), self.what, error), None)


def _promise(process: LocalProcess, what: str) -> Call:
    """The promise of an operation, of which nobody has a reference yet."""
    call = Call(process.process, process.loop, process.thread)
    call.label = what
    call.retrieved = True
    return call


def _post(member: Member, operation: Collective, seconds: float | None) -> None:
    """Begin an operation on the loop's thread, after those that were begun before."""
    process = member.process
    if threading.get_ident() == process.thread:
        _begin(member, operation, seconds)
    else:
        process.loop.call_soon_threadsafe(_begin, member, operation, seconds)


def _begin(member: Member, operation: Collective, seconds: float | None) -> None:
    member.begin(operation)
    call = operation.call
    if seconds is None or call.known:
        return

    def expire() -> None:
        if not call.known:
            call.fail(GroupTimeout(call.label, seconds, operation.missing))

    call.timer = member.process.loop.call_later(seconds, expire)
