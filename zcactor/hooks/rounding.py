"""Gradients as bfloat16: half of the bytes of float32, with its range."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zcactor.hooks.base import Compressor, Gather

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

__all__ = ["BF16", "from_bfloat16", "to_bfloat16"]


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of `values` as bfloat16: rounded to the nearest, ties to even. A NaN stays a NaN."""
    bits = values.view(np.uint32)
    # Adding half of the last kept bit carries into it, and on into the exponent, exactly where rounding goes up.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0 | (bits >> 16), rounded).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The values of bfloat16 numbers, given as their bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class BF16(Compressor):
    """A hook that sends each gradient as bfloat16, 2 bytes an element, and sums in float32 in the order of ranks.

    Args:
        error_feedback: whether what rounding took away is added to the next gradient of that name.

    Raises:
        ValueError: `error_feedback` is no bool.
    """

    def __init__(self, error_feedback: bool = True) -> None:
        super().__init__(error_feedback)

    def reduce(self, name: str, grad: NDArray[Any], size: int) -> Generator[Gather, Any, NDArray[Any]]:
        """See `zcactor.hooks.Hook.reduce`.

        Raises:
            TypeError: `grad` has no real floats.
            ValueError: the gradient of that name had another shape or precision before.
        """
        del size
        corrected = self._corrected(name, grad)
        bits = to_bfloat16(np.ascontiguousarray(corrected, np.float32).reshape(-1))
        ranks = yield Gather([bits])
        total = self._added(grad, corrected, (from_bfloat16(np.asarray(theirs, np.uint16)) for (theirs,) in ranks))
        self._commit(name, total, self._rest(corrected, from_bfloat16(bits)))
        return total
