"""Reductions of arrays, element by element, in the order of the ranks: ((x[0] + x[1]) + x[2]) + ...

The bits of a result depend on that order alone. Sums and means of the usual dtypes are made by one loop in C
(``zcactor/native/fold.c``); `fold_by_numpy` makes the same bits, except for the payloads of NaNs, and everything else.
Floats narrower than 32 bits are added and multiplied as float32 and rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from zcactor.collectives.kinds import Array, is_narrow_float
from zcactor.native import hot

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Memory", "Operand", "array_at", "fold", "fold_by_numpy", "fold_by_terms", "operand_of", "swift_nbytes",
    "wide_dtype",
]  # fmt: skip

_BLOCK_NBYTES: Final = 256 << 10
"""Bytes of the result that are computed at once: a block stays in the second-level cache while inputs are added."""
_FUNCTIONS: Final = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
_KINDS: Final = {
    ("i", 1): "u8", ("i", 2): "u16", ("i", 4): "u32", ("i", 8): "u64",
    ("u", 1): "u8", ("u", 2): "u16", ("u", 4): "u32", ("u", 8): "u64",
    ("f", 2): "f16", ("f", 4): "f32", ("f", 8): "f64", ("c", 8): "f32", ("c", 16): "f64",
}  # fmt: skip
"""Names that the loop in C has for dtypes, by kind and bytes. Numbers with and without a sign have the same sums."""


class Memory:
    """Bytes at an address of this process, as an object that NumPy makes arrays of.

    Args:
        address: of the first byte.
        nbytes: number of bytes.
        keep: object that keeps the bytes valid.
        writable: whether arrays over the bytes may be written to.
    """

    __slots__ = ("__array_interface__", "keep")

    def __init__(self, address: int, nbytes: int, keep: object, *, writable: bool = False) -> None:
        self.keep = keep
        self.__array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, not writable), "version": 3,
        }  # fmt: skip


class Operand(NamedTuple):
    """One rank's input, or the result."""

    address: int
    """Address of the first element."""
    array: Array | None
    """The array, where it is not contiguous in C order; None where it is."""
    keep: object
    """Object that keeps the bytes valid."""
    dtype: np.dtype[Any] | None = None
    """The dtype of a sum of several ranks, where that is wider than the inputs; None for the dtype of the inputs."""


def operand_of(array: Array) -> Operand:
    """Return the operand for an array of this process."""
    return Operand(hot.address(array), None if array.flags.c_contiguous else array, array)


def array_at(address: int, count: int, dtype: np.dtype[Any], keep: object, *, writable: bool = False) -> Array:
    """Make a one-dimensional array of `count` elements at an address of this process."""
    nbytes = count * dtype.itemsize
    return np.asarray(Memory(address, nbytes, keep, writable=writable)).view(dtype)


def native_kind(dtype: np.dtype[Any], op: str) -> str | None:
    """The name that the loop in C has for reductions of `dtype` by `op`; None where NumPy makes them."""
    if op not in ("sum", "mean") or not dtype.isnative:
        return None
    if dtype.type.__module__ == "ml_dtypes":
        return "bf16" if dtype.name == "bfloat16" else None
    return _KINDS.get((dtype.kind, dtype.itemsize))


def wide_dtype(dtype: np.dtype[Any], op: str) -> np.dtype[Any]:
    """The dtype of reductions of some of the ranks' inputs by `op`, which are reduced further and not rounded."""
    return np.dtype(np.float32) if is_narrow_float(dtype) and op in ("sum", "mean", "prod") else dtype


def swift_nbytes(op: str, dtype: np.dtype[Any], operands: Sequence[Operand], count: int) -> int | None:
    """Bytes that `fold` reads for `count` elements of all `operands`, where it takes no longer than memory does; None
    where it converts floats, gathers elements or uses NumPy."""
    if native_kind(dtype, op) is None or is_narrow_float(dtype):
        return None
    for operand in operands:
        if operand.array is not None:
            return None
    return count * dtype.itemsize * len(operands)


def fold(
    op: str, dtype: np.dtype[Any], operands: Sequence[Operand], out: int, start: int, count: int,
    into: np.dtype[Any] | None = None, ranks: int | None = None,
) -> None:  # fmt: skip
    """Reduce `count` elements of all `operands`, from element number `start` of each on, in their order. Any thread may
    call this; the interpreter lock is released for most of the time.

    Args:
        op: one of `zcactor.collectives.kinds.OPS`, defined for `dtype`.
        dtype: of the ranks' inputs.
        operands: inputs, or reductions of some, of equal shapes, in the order of the ranks.
        out: address of the result's first element, the one for element `start`. It overlaps no operand.
        start: number of the first element in C order.
        count: number of elements.
        into: dtype of the result; None for `dtype`.
        ranks: number of ranks that a mean is divided by; None for the number of operands, 0 where operands of other
            ranks are still to come.
    """
    if not count:
        return
    itemsize = dtype.itemsize
    kind = native_kind(dtype, op)
    divisor = (len(operands) if ranks is None else ranks) if op == "mean" else 0
    alignment = dtype.alignment
    native, straight = (into is None or into == dtype) and not out % alignment, True
    for operand in operands:
        if operand.array is not None:
            straight = False
        elif operand.address % alignment:
            native = False
        if operand.dtype is not None and operand.dtype != dtype:
            native = False
    if kind is not None and native:
        numbers = 2 if dtype.kind == "c" else 1
        if straight:
            addresses = tuple([x.address + start * itemsize for x in operands])
            hot.fold(kind, addresses, out, count * numbers, divisor)
            return
        step = _BLOCK_NBYTES // itemsize
        for low in range(0, count, step):
            high = min(low + step, count)
            # `flat` gathers the elements of an array with gaps, in C order.
            gathered = [x.array.flat[start + low : start + high] if x.array is not None else None for x in operands]
            addresses = tuple(
                [
                    x.address + (start + low) * itemsize if part is None else part.ctypes.data
                    for x, part in zip(operands, gathered, strict=True)
                ]
            )
            hot.fold(kind, addresses, out + low * itemsize, (high - low) * numbers, divisor)
        return
    fold_by_numpy(op, dtype, operands, out, start, count, into, ranks)


def fold_by_numpy(
    op: str, dtype: np.dtype[Any], operands: Sequence[Operand], out: int, start: int, count: int,
    into: np.dtype[Any] | None = None, ranks: int | None = None,
) -> None:  # fmt: skip
    """Do the same as `fold` by NumPy's functions, block by block: the twin of the loop in C, with the same bits."""
    function = _FUNCTIONS[op]
    wide, into = wide_dtype(dtype, op), into or dtype
    divisor = (len(operands) if ranks is None else ranks) if op == "mean" else 0
    step = max(_BLOCK_NBYTES // wide.itemsize, 1)
    with np.errstate(all="ignore"):  # as in C: an overflow is an infinity, and no warning
        for low in range(0, count, step):
            n = min(step, count - low)
            result = array_at(out + low * into.itemsize, n, into, None, writable=True)
            total = result if into == wide else np.empty(n, wide)
            for index, operand in enumerate(operands):
                first, theirs = start + low, operand.dtype or dtype
                part = (
                    array_at(operand.address + first * theirs.itemsize, n, theirs, operand.keep)
                    if operand.array is None
                    else operand.array.flat[first : first + n]
                )
                if not index:
                    total[...] = part
                elif wide.kind == "c":
                    # NumPy takes a single element in place as a reduction, whose complex products are rounded another
                    # way: the bits would depend on how the array is cut.
                    total[...] = function(total, part)
                else:
                    function(total, part.astype(wide) if theirs != wide else part, out=total)
            if divisor:
                real = total.view(total.real.dtype) if dtype.kind == "c" else total
                np.divide(real, divisor, out=real)
            if total is not result:
                result[...] = total


def fold_by_terms(
    op: str, dtype: np.dtype[Any], operands: Sequence[Operand], terms: Sequence[Sequence[int]], out: int, start: int,
    count: int,
) -> None:  # fmt: skip
    """Reduce as `fold` does, term by term.

    Args:
        op, dtype, out, start, count: as for `fold`.
        operands: the inputs of all ranks.
        terms: the ranks of each term, see `zcactor.collectives.hierarchy.Hierarchy`.
    """
    if len(terms) == 1:
        fold(op, dtype, operands, out, start, count)
        return
    wide = wide_dtype(dtype, op)
    step = max(_BLOCK_NBYTES // wide.itemsize, 1)
    for low in range(start, start + count, step):
        n = min(step, start + count - low)
        parts = []
        for ranks in terms:
            made = np.empty(n, wide)
            fold(op, dtype, [operands[rank] for rank in ranks], made.ctypes.data, low, n, wide, 0)
            parts.append(Operand(made.ctypes.data, None, made, wide))
        fold(op, dtype, parts, out + (low - start) * dtype.itemsize, 0, n, None, len(operands))
