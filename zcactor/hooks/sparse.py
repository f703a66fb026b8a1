"""The largest elements of a gradient, and no others."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from zcactor.hooks.base import Compressor, Gather

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

__all__ = ["TopK"]

_LARGEST = 2**31 - 1
"""Elements that indices of 32 bits tell apart."""


class TopK(Compressor):
    """A hook that sends the elements of largest magnitude: an index of 4 bytes and a value for each.

    Lin et al., *Deep Gradient Compression*, 2018. Without error feedback small elements would never be sent.

    Args:
        fraction: of a gradient's elements that are sent, at least one: greater than 0, at most 1.
        error_feedback: whether the other elements are added to the next gradient of that name.

    Raises:
        ValueError: `fraction` is out of range, or `error_feedback` is no bool.
    """

    _agreed = ("fraction", "error_feedback")

    def __init__(self, fraction: float, error_feedback: bool = True) -> None:
        super().__init__(error_feedback)
        number: object = fraction
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= 1:
            raise ValueError(f"fraction={fraction!r}: a number greater than 0 and at most 1")
        self.fraction = float(number)

    def reduce(self, name: str, grad: NDArray[Any], size: int) -> Generator[Gather, Any, NDArray[Any]]:
        """See `zcactor.hooks.Hook.reduce`.

        Raises:
            TypeError: `grad` has no real floats.
            ValueError: the gradient of that name had another shape or precision before, or has 2^31 elements or more.
        """
        del size
        corrected = self._corrected(name, grad)
        flat = corrected.reshape(-1)
        if flat.size > _LARGEST:
            raise ValueError(f"gradient {name!r} has {flat.size} elements; TopK takes {_LARGEST}: give it in parts")
        count = min(flat.size, max(1, math.ceil(self.fraction * flat.size)))
        # Sorted, so that adding walks memory forwards, and equal gradients give equal bytes.
        chosen = np.sort(np.argpartition(np.abs(flat), flat.size - count)[flat.size - count :]).astype(np.int32)
        values = flat[chosen]
        ranks = yield Gather([chosen, values])
        total = np.zeros(flat.size, flat.dtype)
        with np.errstate(all="ignore"):
            for indices, theirs in ranks:
                if np.any(indices < 0):
                    raise ValueError(f"gradient {name!r}: a rank has sent a negative index")
                total[indices] += theirs  # each index comes once a rank
            result: NDArray[Any] = total.reshape(grad.shape).astype(grad.dtype)
        rest = corrected  # which is ours
        rest.reshape(-1)[chosen] = 0
        self._commit(name, result, rest)
        return result
