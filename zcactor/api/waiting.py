"""Waiting for many references."""

from __future__ import annotations

import asyncio
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar

from zcactor.api.future import ObjectRef, needed, value_of
from zcactor.api.operation import operation
from zcactor.exception_pickling import hides, shown_class
from zcactor.options import checked_seconds
from zcactor.rpc.messages import Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zcactor.rpc.call import Call

__tracebackhide__ = hides
__all__ = ["get", "wait"]

T = TypeVar("T")


@operation
async def get(refs: Sequence[ObjectRef[T]], timeout: float | None = None) -> list[T]:
    """Wait for all of `refs` and return their values in order.

    Args:
        refs: a sequence of references; a reference may occur several times.
        timeout: seconds to wait at most; None waits for ever.

    Raises:
        TypeError: `refs` is a single reference, an element is not a reference, or `timeout` is no number.
        ValueError: `timeout` is negative or NaN.
        TimeoutError: not all references were done in time; the calls go on.
        Exception: the first failure in the order of `refs`, as ``await`` raises it. Other calls may still be running
            then.

    Cancelling abandons the wait only: the calls go on, because `refs` holds them.
    """
    if isinstance(refs, ObjectRef):
        raise TypeError("zc.get takes a sequence of references; await a single one")
    refs = list(refs)
    seconds = checked_seconds(timeout, "zc.get")
    calls = _checked(refs)
    try:
        await _wait_count(calls, len(refs), seconds, all_or_error=True)
        for call in calls:
            if call.done and (call.error is not None or call.status != Status.OK):
                value_of(call)  # raises; the other calls may still be running
        values = []
        for call in calls:
            values.append(value_of(call))  # noqa: PERF401  # the frame of a comprehension would hold the call
        return values
    finally:  # an error has this frame in its traceback: see `value_of`
        refs, calls = (), []
        call = None  # type: ignore[assignment]


@operation
async def wait(
    refs: Sequence[ObjectRef[T]],
    num_returns: int = 1,
    timeout: float | None = None,
) -> tuple[list[ObjectRef[T]], list[ObjectRef[T]]]:
    """Wait until `num_returns` of `refs` are done.

    Args:
        refs: a sequence of distinct references.
        num_returns: number of references to wait for, 1 to ``len(refs)``.
        timeout: seconds to wait at most; None waits for ever, 0 polls.

    Returns:
        ``(done, pending)``, both in the order of `refs`, with at most `num_returns` references in `done`. Failed calls
        count as done. When the timeout passes, `done` has fewer references; no exception is raised.

    Raises:
        TypeError: an element of `refs` is not a reference, `num_returns` no int, or `timeout` no number.
        ValueError: `refs` has a duplicate, `num_returns` is out of range, or `timeout` is negative or NaN.

    Cancelling abandons the wait only: the calls go on.
    """
    refs = list(refs)
    calls, seconds = _checked(refs), checked_seconds(timeout, "zc.wait")
    count: Any = num_returns  # mypy takes it for an int
    if isinstance(count, bool) or not isinstance(count, Integral):
        raise TypeError(f"zc.wait: num_returns must be an int, not {shown_class(type(count))}")
    if len({id(call) for call in calls}) != len(calls):
        raise ValueError("zc.wait: the same reference occurs more than once")
    if not 1 <= num_returns <= len(refs):
        raise ValueError(
            f"zc.wait: num_returns is {num_returns}, but must be between 1 and the {len(refs)} references given"
        )
    try:
        await _wait_count(calls, num_returns, seconds, all_or_error=False)
    except TimeoutError:  # the references that are done by now are the answer
        pass
    done = [ref for ref in refs if ref._call.known][:num_returns]
    taken = {id(ref) for ref in done}
    return done, [ref for ref in refs if id(ref) not in taken]


def _checked(refs: Iterable[Any]) -> list[Call]:
    calls = []
    for ref in refs:
        if not isinstance(ref, ObjectRef):
            raise TypeError(f"expected ObjectRef, got {shown_class(type(ref))}: {ref!r}")
        calls.append(needed(ref))
    return calls


async def _wait_count(calls: list[Call], count: int, timeout: float | None, *, all_or_error: bool) -> None:
    """Return when `count` of `calls` are done; with `all_or_error` one failure is enough."""
    enough: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = count

    def finished(call: Call) -> None:
        nonlocal left
        left -= 1
        failed = all_or_error and (call.error is not None or call.status != Status.OK)
        if (left <= 0 or failed) and not enough.done():
            enough.set_result(None)

    try:
        for call in calls:
            call.add_callback(finished)
        if count == 0 or enough.done():
            return
        if timeout == 0:
            raise TimeoutError
        if timeout is None:
            await enough
        else:
            async with asyncio.timeout(timeout):
                await enough
    except TimeoutError:
        raise TimeoutError(f"{left} of {count} references were not done after {timeout:.6g} s") from None
    finally:
        for call in calls:
            if call.callbacks is not None and finished in call.callbacks:
                call.callbacks.remove(finished)
