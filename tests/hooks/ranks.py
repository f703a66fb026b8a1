"""Ranks that run hooks in step, without a group: the exchange is a list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zcactor.hooks import Gather, Sum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from zcactor.hooks import Hook

__all__ = ["exchange"]


def exchange(hooks: Sequence[Hook], grads: Sequence[NDArray[Any]], name: str = "w") -> tuple[list[NDArray[Any]], int]:
    """One step of all ranks: the arrays that the hooks return, and the bytes that each rank has published."""
    runs = [hook.reduce(name, grad, len(hooks)) for hook, grad in zip(hooks, grads, strict=True)]
    asked: list[Any] = [next(run) for run in runs]
    results: list[NDArray[Any]] = []
    nbytes = 0
    while not results:
        kinds = {type(request) for request in asked}
        assert len(kinds) == 1, "all ranks have to ask for the same"
        sizes = {sum(array.nbytes for array in request.arrays) for request in asked}
        assert len(sizes) == 1
        nbytes += sizes.pop()
        if kinds == {Sum}:
            answer: Any = [
                sum(arrays[1:], start=arrays[0]) for arrays in zip(*(one.arrays for one in asked), strict=True)
            ]
        else:
            assert kinds == {Gather}
            answer = [list(request.arrays) for request in asked]
        asked = []
        for run in runs:
            try:
                asked.append(run.send(answer))
            except StopIteration as end:
                results.append(end.value)
        assert not (asked and results), "all ranks have to end at once"
    for result, grad in zip(results, grads, strict=True):
        assert (result.shape, result.dtype) == (grad.shape, grad.dtype)
        np.testing.assert_array_equal(result, results[0])
    return results, nbytes
