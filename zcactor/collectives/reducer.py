"""`Reducer`: sums of many named arrays, as the gradients of a step, which start while others are still computed."""

from __future__ import annotations

import threading
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np

from zcactor.collectives import kinds
from zcactor.collectives.steps import StepEnded
from zcactor.exception_pickling import shown_class
from zcactor.hooks import Gather, Sum
from zcactor.logs import logger
from zcactor.process.context import current
from zcactor.sizes import size

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import TracebackType

    from zcactor.api.future import ObjectRef
    from zcactor.collectives.kinds import Array
    from zcactor.collectives.steps import ReducerStep
    from zcactor.hooks import Hook

__all__ = ["GroupCalls", "Reducer"]

PACKED: Final = "gradient bucket"
"""The counted reason for copies of small arrays into one that is reduced."""
_APART: Final = 64 << 10
"""Bytes from which an array is reduced where it lies: it is in the store then, and worth an operation of its own."""


class GroupCalls:
    """The operations that a reducer asks of its group.

    Args:
        begin: begins a step. Returns it, and the reference that gets its outcome.
        reduce: ``reduce(array, op, what, step)``: starts a reduction; `what` is a part of the call's text.
        gather: ``gather(array, what, step)``: starts the exchange of one array by all ranks, by reference.
        ranks: number of ranks.
    """

    __slots__ = ("begin", "gather", "ranks", "reduce")

    def __init__(
        self, begin: Callable[[], tuple[ReducerStep, ObjectRef[Any]]],
        reduce: Callable[[Array, Any, str, ReducerStep], ObjectRef[Any]],
        gather: Callable[[Array, str, ReducerStep], ObjectRef[Any]], ranks: int,
    ) -> None:  # fmt: skip
        self.begin = begin
        self.reduce = reduce
        self.gather = gather
        self.ranks = ranks


class _Bucket:
    """Small arrays of one dtype that are reduced as one. Each is copied when it is added.

    Args:
        dtype: of the arrays.
        most: elements that it takes, at most.
    """

    __slots__ = ("arrays", "items", "most", "packed", "reference", "size")

    def __init__(self, dtype: np.dtype[Any], most: int) -> None:
        self.arrays: list[tuple[str, tuple[int, ...], int]] = []
        """Name, shape and number of elements of each."""
        self.items = blake2b(digest_size=8)
        """A digest of the arrays, which all ranks have to add."""
        self.most = most
        self.size = 0
        self.packed = current().store.empty((min(most, max(_APART // dtype.itemsize, 1)),), dtype)
        self.reference: ObjectRef[Any] | None = None

    def add(self, name: str, array: Array, item: str) -> None:
        """Copy an array of at most `_APART` bytes.

        Raises:
            OutOfMemory: the store has no room.
        """
        process, size = current(), self.size + array.size
        if size > self.packed.size:
            grown = process.store.empty((min(max(2 * self.packed.size, size), max(self.most, size)),), array.dtype)
            process.copies.copy_into(grown[: self.size], self.packed[: self.size], PACKED)
            self.packed = grown
        process.copies.copy_into(self.packed[self.size : size].reshape(array.shape), array, PACKED)
        self.arrays.append((name, array.shape, array.size))
        self.items.update(item.encode())
        self.size = size


class _Run:
    """A hook at work on one array.

    Args:
        name: of the array.
        grad: the array.
        steps: the hook's generator.
    """

    __slots__ = ("grad", "name", "pending", "result", "round", "steps")

    def __init__(self, name: str, grad: Array, steps: Generator[Any, Any, Array]) -> None:
        self.name = name
        self.grad = grad
        self.steps = steps
        self.round = 0
        self.pending: tuple[type[Sum | Gather], list[ObjectRef[Any]]] | None = None
        self.result: Array | None = None


class Reducer:
    """Named arrays on their way to their sums or means over the ranks of a group, made by `zcactor.Group.reducer`.

    All ranks add arrays of the same names, dtypes and shapes in the same order, inside of ``async with`` or ``with``::

        async with group.reducer() as reducer:
            for name, gradient in gradients:
                reducer.add(name, gradient)
        means = reducer.result()

    Arrays of 64 KiB and more are reduced where they lie, from the moment they are added, and are lent until the end
    of the block, as by `zcactor.Group.allreduce`. Smaller ones of one dtype are copied together at once, and reduced
    when there are enough of them; the copy is counted as "gradient bucket". With a hook each array goes through the
    hook by itself, whatever its size.

    The end of the block waits for everything that was added, and for the ends of all ranks. All succeed, or all raise:
    the error of a rank's hook, block or call of `reducer`, or `zcactor.GroupMismatch` with the first difference of what
    they have added and of their hooks. The group stays usable, and the next step runs. A hook is then as if the step
    had not been, and so it is where a result of the step is not finite. ``with`` is for plain methods, whose thread it
    blocks. A block that raises does not wait. Cancelling ends the waiting; operations that were started go on.
    """

    def __init__(self, calls: GroupCalls, op: Literal["mean", "sum"], hook: Hook | None, bucket: int | str) -> None:
        if op not in ("mean", "sum"):
            raise ValueError(f"Group.reducer: op is {op!r}, and must be 'mean' or 'sum'")
        if hook is not None and not callable(getattr(hook, "reduce", None)):
            raise TypeError(
                f"Group.reducer: an object of type {shown_class(type(hook))} is no hook: it has no method reduce()"
            )
        self._limit = _bucket_nbytes(bucket)
        self._calls = calls
        self._op = op
        self._hook = hook
        self._with = "" if hook is None else _described(hook)
        self._step: Any = None
        self._outcome: Any = None
        self._saved: tuple[Any] | None = None
        """The state of the hook before the step, where it has one."""
        self._items = [f"reducer(op={op!r}, {f'hook={self._with}' if hook is not None else f'bucket={self._limit}'})"]
        self._names: dict[str, None] = {}
        self._apart: dict[str, ObjectRef[Any]] = {}
        self._runs: list[_Run] = []
        self._open: dict[np.dtype[Any], _Bucket] = {}
        self._started: list[_Bucket] = []
        self._error: Exception | None = None
        """The first error of this rank, with which the step ends on all ranks."""
        self._stop: BaseException | None = None
        """The error of a hook's end that ends more than the step."""
        self._told = False
        """Whether the other ranks hear of the end of this one."""
        self._results: dict[str, Array] | None = None
        self._state: Literal["new", "open", "ended", "failed"] = "new"
        self.nbytes = 0
        """Bytes that this rank has published for others to read."""

    def add(self, name: str, grad: Array) -> None:
        """Add an array; its sum starts at once, or when its bucket is full.

        Args:
            name: of the array, once a block.
            grad: an array as for `zcactor.Group.allreduce`, of floats or complex numbers with ``op="mean"``; with a
                hook an array that the hook takes. One of 64 KiB and more is lent until the end of the block, or copied
                where others can write to it; with a hook it is not to be written to.

        Raises:
            RuntimeError: the block has not begun, or has ended.
            ValueError: `name` was added before, or the array takes the result of an operation that is not done.
            TypeError: `name` is no string, the dtype cannot be reduced, or the array carries more than its elements.
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
        item = f"add({name!r}, {kinds.described(array.dtype, array.shape)})"
        self._items.append(item)
        if self._hook is not None:
            if self._error is None:
                array = array.view()  # nobody else can set its dtype and shape
                run = _Run(name, array, self._hook.reduce(name, array, self._calls.ranks))
                self._runs.append(run)
                self._advance(run, None)
        elif array.nbytes >= _APART:
            self.nbytes += array.nbytes
            self._apart[name] = self._calls.reduce(array, self._op, f"name={name!r}", self._step)
        else:
            bucket = self._open.get(array.dtype)
            if bucket is None:
                most = (self._limit + _APART) // max(array.itemsize, 1)
                bucket = self._open[array.dtype] = _Bucket(array.dtype, most)
            bucket.add(name, array, item)
            if bucket.size * array.itemsize >= self._limit:
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
        try:
            steps = self._finish()
            answer: Any = None
            while (reference := _next(steps, answer)) is not None:
                try:
                    answer = await reference
                except Exception as failure:  # told to all by `_finish`, when the others have been waited for
                    answer = failure
        except BaseException as failed:
            self._leave(failed)
            raise
        finally:
            self._settle()

    def __enter__(self) -> Self:
        return self._enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._leaves(error):
            return
        try:
            steps = self._finish()
            answer: Any = None
            while (reference := _next(steps, answer)) is not None:
                try:
                    answer = reference.result()
                except Exception as failure:
                    answer = failure
        except BaseException as failed:
            self._leave(failed)
            raise
        finally:
            self._settle()

    def _enter(self) -> Self:
        if self._state != "new":
            raise RuntimeError("a reducer has one block: make a new one for the next step by group.reducer()")
        self._state = "open"
        self._step, self._outcome = self._calls.begin()
        hook: Any = self._hook
        if _has_state(hook):
            try:
                self._saved = (hook.snapshot(),)
            except Exception as failed:  # any error of a user's hook: the end of the block raises it
                self._fail(failed)
            except BaseException as failed:  # there is no block, and no end of it
                self._leaves(failed)
                raise
        return self

    def _leaves(self, error: BaseException | None) -> bool:
        """Whether the block has raised: nothing more is started then, and the other ranks hear of it."""
        self._state = "ended" if error is None else "failed"
        if error is None:
            return False
        references = [*self._apart.values(), *[bucket.reference for bucket in self._started]]
        for run in self._runs:
            self._close(run)
            references += run.pending[1] if run.pending is not None else []
        for reference in references:
            if reference is not None:
                reference._call.retrieved = True  # nobody asks for it any more
        self._end(error)
        self._settle()
        if self._stop is not None:
            raise self._stop
        return True

    def _leave(self, error: BaseException) -> None:
        """Let the other ranks hear that this one waits no more, unless they have heard of its end."""
        if not self._told:
            self._end(error)

    def _close(self, run: _Run) -> None:
        """End a hook's generator, as the step has failed. Its own error is no other one for the step. An error that
        ends more than a step is raised when the other ranks have heard of the end."""
        try:
            run.steps.close()
        except Exception:  # a hook may raise anything, and the step has its own error: this one is logged
            logger.exception("a hook raised while its generator for %r was closed", run.name)
        except BaseException as error:
            self._stop = error

    def _end(self, error: BaseException | None) -> None:
        """Say that no more operations of the step come."""
        if error is not None and not issubclass(type(error), Exception):  # of this rank alone, such as its cancelling
            error = RuntimeError(f"a rank has left the block of its reducer by {type(error).__name__}")
        self._told = True
        process = current()
        if threading.get_ident() == process.thread:
            self._step.end(self._items, error)
        else:
            process.loop.call_soon_threadsafe(self._step.end, self._items, error)

    def _settle(self) -> None:
        """Make the hook as it was before a step that has failed, or has a result that is not finite."""
        self._outcome._call.retrieved = True
        hook: Any = self._hook
        if self._saved is not None and not (
            self._results is not None and all(np.isfinite(one).all() for one in self._results.values())
        ):
            try:
                hook.restore(*self._saved)
            except Exception:  # a hook may raise anything, and a step that has failed has its own error
                if self._results is not None:
                    raise
                logger.exception("a hook was not made as it was before a step that has failed")

    def _finish(self) -> Generator[ObjectRef[Any], Any, None]:
        """Start the rest, and make the results: a generator of references that is sent values, or errors.

        The order of operations is the same on all ranks, as each step depends on names and rounds alone. With the first
        error nothing more is started.
        """
        try:
            for dtype in list(self._open):
                self._start(dtype)
        except Exception as failed:  # of this rank alone; the others must not wait for it
            self._fail(failed)
        if self._hook is None:
            self._end(self._error)
        found: dict[str, Array] = {}

        def keep(answer: Any) -> bool:
            if not issubclass(type(answer), Exception):
                return True
            self._fail(answer)
            return False

        for name, reference in self._apart.items():
            total = yield reference
            if keep(total):
                found[name] = total
        for bucket in self._started:
            assert bucket.reference is not None
            total = yield bucket.reference
            if keep(total):
                at = 0
                for name, shape, count in bucket.arrays:
                    found[name] = total[at : at + count].reshape(shape)
                    at += count
        waiting = self._runs
        while waiting:
            for run in waiting:
                if run.pending is None:
                    continue
                kind, references = run.pending
                answers: list[Any] = []
                for reference in references:
                    answer = yield reference
                    keep(answer)
                    answers.append(answer)
                if self._error is None:
                    if kind is Gather:  # by array until here, and by rank from here
                        answers = [list(arrays) for arrays in zip(*answers, strict=True)]
                    self._advance(run, answers)
                    continue
                self._close(run)
                run.pending = None
            waiting = [run for run in waiting if run.pending is not None]
        for run in self._runs:
            if run.result is not None:
                found[run.name] = self._averaged(run.result)
        if self._hook is not None:
            self._end(None if type(self._error) is StepEnded else self._error)
        outcome = yield self._outcome
        error = outcome if issubclass(type(outcome), Exception) else self._error
        if error is not None:
            self._state = "failed"
            raise error if self._stop is None else self._stop
        self._results = {name: found[name] for name in self._names}

    def _fail(self, error: Exception) -> None:
        if self._error is None or type(self._error) is StepEnded:
            self._error = error

    def _start(self, dtype: np.dtype[Any]) -> None:
        """Reduce the arrays of a bucket as one."""
        bucket = self._open.pop(dtype)
        packed = bucket.packed[: bucket.size]
        bucket.packed.flags.writeable = packed.flags.writeable = False  # nobody writes to it any more
        self.nbytes += packed.nbytes
        self._started.append(bucket)
        what = f"bucket of {len(bucket.arrays)}: {bucket.items.hexdigest()}"
        bucket.reference = self._calls.reduce(packed, self._op, what, self._step)

    def _averaged(self, total: Array) -> Array:
        if self._op == "sum":
            return total
        mean: Array = np.divide(total, self._calls.ranks).astype(total.dtype, copy=False)
        return mean

    def _advance(self, run: _Run, answer: list[Any] | None) -> None:
        """Let a hook go on with `answer`, and start what it asks for. With an error of its the step ends."""
        run.pending = None
        run.round += 1
        what = (
            f"name={run.name!r} of {kinds.described(run.grad.dtype, run.grad.shape)}, hook={self._with}, "
            f"round={run.round}"
        )
        try:
            request = run.steps.send(answer)
        except StopIteration as end:
            try:
                run.result = _result(end.value, run.grad, self._hook, run.name)
            except (TypeError, ValueError) as error:
                self._fail(error)
            return
        except Exception as error:  # any error of a user's hook: the end of the block raises it
            self._fail(error)
            return
        try:
            arrays = _checked(request, self._hook, run.name)
        except Exception as error:  # of the request's own attributes as well, a StopIteration among them
            self._fail(error)
            return
        kind = type(request)
        self.nbytes += sum(array.nbytes for array in arrays)
        references: list[ObjectRef[Any]] = []
        run.pending = kind, references
        try:
            for number, array in enumerate(arrays, 1):
                said = f"{what}, {number} of {len(arrays)}"
                references.append(
                    self._calls.reduce(array, "sum", said, self._step)
                    if kind is Sum
                    else self._calls.gather(array, said, self._step)
                )
        except Exception as error:  # of an array that no operation takes
            self._fail(error)


def _has_state(hook: Any) -> bool:
    """Whether a hook can be made as it was before a step."""
    return callable(getattr(hook, "snapshot", None)) and callable(getattr(hook, "restore", None))


def _described(hook: Any) -> str:
    """The text in which the hooks of all ranks agree."""
    settings = getattr(hook, "settings", None)
    return settings if isinstance(settings, str) else type(hook).__qualname__


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
