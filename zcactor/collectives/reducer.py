"""`Reducer`: sums of many named arrays, as the gradients of a step, which start while others are still computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np

from zcactor.collectives import kinds
from zcactor.hooks import Gather, Sum
from zcactor.process.context import current
from zcactor.sizes import size

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import TracebackType

    from zcactor.api.future import ObjectRef
    from zcactor.collectives.kinds import Array
    from zcactor.hooks import Hook

__all__ = ["GroupCalls", "Reducer"]

PACKED: Final = "gradient bucket"
"""The counted reason for copies of small arrays into one that is reduced."""
_APART: Final = 64 << 10
"""Bytes from which an array is reduced where it lies: it is in the store then, and worth an operation of its own."""


class GroupCalls:
    """The operations that a reducer asks of its group.

    Args:
        reduce: ``reduce(array, op, what)``: starts a reduction; `what` is a part of the call, which ranks agree in.
        gather: ``gather(array, what)``: starts the exchange of one array by all ranks, by reference.
        refuse: ``refuse(error, what)``: takes the place of an operation that this rank cannot take part in. All ranks
            get the error.
        ranks: number of ranks.
    """

    __slots__ = ("gather", "ranks", "reduce", "refuse")

    def __init__(
        self, reduce: Callable[[Array, Any, str], ObjectRef[Any]], gather: Callable[[Array, str], ObjectRef[Any]],
        refuse: Callable[[Exception, str], ObjectRef[Any]], ranks: int,
    ) -> None:  # fmt: skip
        self.reduce = reduce
        self.gather = gather
        self.refuse = refuse
        self.ranks = ranks


class _Bucket:
    """Small arrays of one dtype that are reduced as one."""

    __slots__ = ("arrays", "nbytes", "reference")

    def __init__(self) -> None:
        self.arrays: list[tuple[str, Array]] = []
        self.nbytes = 0
        self.reference: ObjectRef[Any] | None = None


class _Run:
    """A hook at work on one array.

    Args:
        name: of the array.
        grad: the array.
        steps: the hook's generator.
    """

    __slots__ = ("error", "grad", "name", "pending", "result", "round", "steps")

    def __init__(self, name: str, grad: Array, steps: Generator[Any, Any, Array]) -> None:
        self.name = name
        self.grad = grad
        self.steps = steps
        self.round = 0
        self.pending: tuple[type[Sum | Gather], list[ObjectRef[Any]]] | None = None
        self.result: Array | None = None
        self.error: Exception | None = None


class Reducer:
    """Named arrays on their way to their sums or means over the ranks of a group, made by `zcactor.Group.reducer`.

    All ranks add arrays of the same names, dtypes and shapes in the same order, inside of ``async with`` or ``with``::

        async with group.reducer() as reducer:
            for name, gradient in gradients:
                reducer.add(name, gradient)
        means = reducer.result()

    Arrays of 64 KiB and more are reduced where they lie, from the moment they are added, and are borrowed until the end
    of the block. Smaller ones of one dtype are copied together, and reduced when there are enough of them; the copy is
    counted as "gradient bucket". With a hook each array goes through the hook by itself, whatever its size.

    The end of the block waits for everything that was added. ``with`` is for plain methods, whose thread it blocks.
    Where the block raises, nothing more is started; as the other ranks wait for the rest, form the group anew then
    (`zcactor.Group.reform`). Cancelling ends the waiting; operations that were started go on.
    """

    def __init__(self, calls: GroupCalls, op: Literal["mean", "sum"], hook: Hook | None, bucket: int | str) -> None:
        if op not in ("mean", "sum"):
            raise ValueError(f"Group.reducer: op is {op!r}, and must be 'mean' or 'sum'")
        if hook is not None and not callable(getattr(hook, "reduce", None)):
            raise TypeError(f"Group.reducer: a {type(hook).__name__} is no hook: it has no method reduce()")
        self._limit = _bucket_nbytes(bucket)
        self._calls = calls
        self._op = op
        self._hook = hook
        self._names: dict[str, None] = {}
        self._apart: dict[str, ObjectRef[Any]] = {}
        self._runs: list[_Run] = []
        self._open: dict[np.dtype[Any], _Bucket] = {}
        self._started: list[_Bucket] = []
        self._results: dict[str, Array] | None = None
        self._state: Literal["new", "open", "ended", "failed"] = "new"
        self.nbytes = 0
        """Bytes that this rank has published for others to read."""

    def add(self, name: str, grad: Array) -> None:
        """Add an array; its sum starts at once, or when its bucket is full.

        Args:
            name: of the array, once a block.
            grad: an array as for `zcactor.Group.allreduce`, of floats or complex numbers with ``op="mean"``; with a
                hook an array that the hook takes. Not to be written to until the end of the block.

        Raises:
            RuntimeError: the block has not begun, or has ended.
            ValueError: `name` was added before.
            TypeError: `name` is no string, or the dtype cannot be reduced.
            OutOfMemory: a bucket does not fit the store.
            Exception: the errors of `zcactor.Group.allreduce`. An error of the hook is raised at the end of the block,
                on all ranks.
        """
        if self._state != "open":
            raise RuntimeError("Reducer.add is called inside of the reducer's block: async with group.reducer() as r")
        if not isinstance(name, str):
            raise TypeError(f"Reducer.add: a name is a string, not {type(name).__name__}")
        if name in self._names:
            raise ValueError(f"Reducer.add: {name!r} was added before: each array of a block has a name of its own")
        array = kinds.as_array(grad, "Reducer.add")
        kinds.check_op(array.dtype, self._op, "Reducer.add")
        self._names[name] = None
        if self._hook is not None:
            run = _Run(name, array, self._hook.reduce(name, array, self._calls.ranks))
            self._runs.append(run)
            self._advance(run, None)
        elif array.nbytes >= _APART:
            self.nbytes += array.nbytes
            self._apart[name] = self._calls.reduce(array, self._op, f"name={name!r}")
        else:
            bucket = self._open.setdefault(array.dtype, _Bucket())
            bucket.arrays.append((name, array))
            bucket.nbytes += array.nbytes
            if bucket.nbytes >= self._limit:
                self._start(array.dtype)

    def result(self) -> dict[str, Array]:
        """The sums or means by name, in the order in which the arrays were added.

        Without a hook they are read-only and in memory that the ranks share; with one they are the hook's.

        Raises:
            RuntimeError: the block has not ended, or has raised.
        """
        if self._results is None:
            raise RuntimeError("Reducer.result is called behind the reducer's block, where that has not raised")
        return self._results

    # ---------------------------------------------------------------- the block

    async def __aenter__(self) -> Self:
        return self._enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._leaves(error):
            return
        steps = self._finish()
        answer: Any = None
        while (reference := _next(steps, answer)) is not None:
            try:
                answer = await reference
            except Exception as failure:  # told to all by `_finish`, when the others have been waited for
                answer = failure

    def __enter__(self) -> Self:
        return self._enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._leaves(error):
            return
        steps = self._finish()
        answer: Any = None
        while (reference := _next(steps, answer)) is not None:
            try:
                answer = reference.result()
            except Exception as failure:
                answer = failure

    def _enter(self) -> Self:
        if self._state != "new":
            raise RuntimeError("a reducer has one block: make a new one for the next step by group.reducer()")
        self._state = "open"
        return self

    def _leaves(self, error: BaseException | None) -> bool:
        """Whether the block has raised: nothing more is started then."""
        self._state = "ended" if error is None else "failed"
        if error is not None:
            for run in self._runs:
                run.steps.close()
        return error is not None

    def _finish(self) -> Generator[ObjectRef[Any], Any, None]:
        """Start the rest, and make the results: a generator of references that is sent values, or errors.

        The order of operations is the same on all ranks, as each step depends on names and rounds alone.
        """
        for dtype in list(self._open):
            self._start(dtype)
        found: dict[str, Array] = {}
        errors: list[Exception] = []

        def keep(answer: Any) -> bool:
            if isinstance(answer, Exception):
                errors.append(answer)
            return not isinstance(answer, Exception)

        for name, reference in self._apart.items():
            total = yield reference
            if keep(total):
                found[name] = total
        for bucket in self._started:
            assert bucket.reference is not None
            total = yield bucket.reference
            if keep(total):
                at = 0
                for name, array in bucket.arrays:
                    found[name] = total[at : at + array.size].reshape(array.shape)
                    at += array.size
        waiting = self._runs
        while waiting:
            for run in waiting:
                if run.pending is not None:
                    kind, references = run.pending
                    answers: list[Any] = []
                    for reference in references:
                        answer = yield reference
                        answers.append(answer)
                    failure = next((answer for answer in answers if isinstance(answer, Exception)), None)
                    if failure is None:
                        if kind is Gather:  # by array until here, and by rank from here
                            answers = [list(arrays) for arrays in zip(*answers, strict=True)]
                        self._advance(run, answers)
                        continue
                    run.steps.close()
                    run.pending, run.error = None, run.error or failure
            waiting = [run for run in waiting if run.pending is not None]
        for run in self._runs:
            if run.error is not None:
                errors.append(run.error)
            elif run.result is not None:
                found[run.name] = self._averaged(run.result)
        if errors:
            self._state = "failed"
            raise errors[0]
        self._results = {name: found[name] for name in self._names}

    def _start(self, dtype: np.dtype[Any]) -> None:
        """Reduce the arrays of a bucket as one."""
        bucket = self._open.pop(dtype)
        process = current()
        packed = process.store.empty((sum(array.size for _, array in bucket.arrays),), dtype)
        at = 0
        for _, array in bucket.arrays:
            process.copies.copy_into(packed[at : at + array.size].reshape(array.shape), array, PACKED)
            at += array.size
        self.nbytes += packed.nbytes
        names = ", ".join(name for name, _ in bucket.arrays)
        self._started.append(bucket)
        bucket.reference = self._calls.reduce(packed, self._op, f"names={names!r}")

    def _averaged(self, total: Array) -> Array:
        if self._op == "sum":
            return total
        mean: Array = np.divide(total, self._calls.ranks).astype(total.dtype, copy=False)
        return mean

    def _advance(self, run: _Run, answer: list[Any] | None) -> None:
        """Let a hook go on with `answer`, and start what it asks for. An error of its takes the place of the operation,
        so that the other ranks do not wait and later operations keep their places."""
        run.pending = None
        run.round += 1
        what = f"name={run.name!r}, round={run.round}"
        try:
            request = run.steps.send(answer)
            arrays = _checked(request, self._hook, run.name)
        except StopIteration as end:
            try:
                run.result = _result(end.value, run.grad, self._hook, run.name)
            except (TypeError, ValueError) as error:  # found behind the last exchange, so by every rank for itself
                run.error = error
            return
        except Exception as error:  # any error of a user's hook: the end of the block raises it
            run.error = error
            run.pending = Sum, [self._calls.refuse(error, what)]
            return
        kind = type(request)
        self.nbytes += sum(array.nbytes for array in arrays)
        run.pending = (
            kind,
            [
                self._calls.reduce(array, "sum", f"{what}, {number} of {len(arrays)}")
                if kind is Sum
                else self._calls.gather(array, f"{what}, {number} of {len(arrays)}")
                for number, array in enumerate(arrays, 1)
            ],
        )


def _next(steps: Generator[ObjectRef[Any], Any, None], answer: Any) -> ObjectRef[Any] | None:
    """The next reference to wait for; None at the end."""
    try:
        return steps.send(answer)
    except StopIteration:
        return None


def _bucket_nbytes(bucket: object) -> int:
    if isinstance(bucket, str):
        found = size(bucket)
    elif isinstance(bucket, int) and not isinstance(bucket, bool):
        found = bucket
    else:
        raise TypeError(f"Group.reducer: bucket is a number of bytes or a size such as '25MiB', not {bucket!r}")
    if found < 1:
        raise ValueError(f"Group.reducer: bucket is {bucket!r}, and must be at least 1 byte")
    return found


def _checked(request: object, hook: Any, name: str) -> list[Array]:
    """The arrays of a hook's request.

    Raises:
        TypeError: the request is neither `Sum` nor `Gather` of arrays, or it is of nothing.
    """
    if not isinstance(request, Sum | Gather):
        raise TypeError(
            f"{type(hook).__name__}.reduce({name!r}) yielded {type(request).__name__}: a hook yields Sum or Gather"
        )
    arrays = list(request.arrays)
    if not arrays or not all(isinstance(array, np.ndarray) for array in arrays):
        kinds_of = ", ".join(type(array).__name__ for array in arrays) or "nothing"
        raise TypeError(
            f"{type(hook).__name__}.reduce({name!r}) yielded {type(request).__name__} of {kinds_of}: it takes arrays"
        )
    return arrays


def _result(value: Any, grad: Array, hook: Any, name: str) -> Array:
    """The array that a hook has returned.

    Raises:
        TypeError, ValueError: it does not have the dtype and shape of the gradient.
    """
    said = f"{type(hook).__name__}.reduce({name!r}) returned"
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{said} {type(value).__name__}: it returns the sum over ranks, an array")
    if value.shape != grad.shape or value.dtype != grad.dtype:
        raise ValueError(f"{said} {value.dtype}{value.shape}, and the gradient is {grad.dtype}{grad.shape}")
    return value
