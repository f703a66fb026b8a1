"""The form of an array, its shape, dtype and order, and the check whether an array of that form is possible."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any, Literal, NamedTuple, SupportsIndex

import numpy as np

from zcactor.marshal.arrays import is_shareable

__all__ = ["Form", "Shape", "check_possible", "raw_shape"]

Shape = SupportsIndex | Sequence[SupportsIndex]


class Form(NamedTuple):
    """The shape, dtype and order of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]


def check_possible(what: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Check that an array of that form is possible in the store, apart from the room it takes.

    Raises:
        TypeError: the store cannot hold elements of `dtype`.
        ValueError: an array of `shape` is impossible, or `dtype` has a shape of its own.
    """
    if not is_shareable(dtype):
        raise TypeError(
            f"{what}: dtype {dtype} is not plain bytes, which is all that the store holds; objects would have to be "
            "unpickled, which may run any code: save the array with a fixed-size dtype"
        )
    if dtype.subdtype is not None:
        raise ValueError(f"{what}: dtype {dtype} has a shape of its own; its axes belong to the array's shape")
    try:
        # One element, repeated: NumPy checks the lengths and their product and allocates nothing. In the store it would
        # refuse after the block is taken, and the traceback would keep the block.
        np.ndarray(shape, dtype, bytes(dtype.itemsize or 1), 0, (0,) * len(shape))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{what}: there can be no array of that shape: {error}") from error


def raw_shape(what: str, nbytes: int, dtype: np.dtype[Any], shape: Shape | None, offset: int) -> tuple[int, ...]:
    """The lengths of a raw file's axes, of which one may be inferred. Together they take the whole file after
    `offset`."""
    if not 0 <= offset <= nbytes:
        raise ValueError(f"{what}: offset {offset:,} is not within its {nbytes:,} bytes")
    axes = (-1,) if shape is None else _axes(shape)
    open_axes = [axis for axis, length in enumerate(axes) if length == -1]
    if len(open_axes) > 1 or any(length < -1 for length in axes):
        raise ValueError(f"{what}: shape {axes} has negative lengths; one -1, which is inferred, is all there can be")
    found = nbytes - offset
    if open_axes:
        step = prod(length for length in axes if length != -1) * dtype.itemsize
        if not step:
            raise ValueError(f"{what}: in shape {axes} of dtype {dtype} nothing can be inferred from {found:,} bytes")
        if found % step:
            raise ValueError(
                f"{what}: a multiple of {step:,} bytes was expected for shape {axes} of dtype {dtype}, and {found:,} "
                f"found after offset {offset:,}"
            )
        axes = (*axes[: open_axes[0]], found // step, *axes[open_axes[0] + 1 :])
    check_possible(what, axes, dtype)
    expected = prod(axes) * dtype.itemsize
    if expected != found:
        raise ValueError(
            f"{what}: {expected:,} bytes were expected for shape {axes} of dtype {dtype}, and {found:,} found after "
            f"offset {offset:,}"
        )
    return axes


def _axes(shape: Shape) -> tuple[int, ...]:
    return tuple(map(operator.index, shape)) if isinstance(shape, Sequence) else (operator.index(shape),)
