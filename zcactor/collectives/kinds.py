"""Checks of the arguments of collectives, made in the caller before anything is sent."""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from zcactor.marshal.arrays import is_shareable
from zcactor.marshal.on_gpu import is_on_gpu
from zcactor.marshal.sharing import CLAIMED
from zcactor.native import hot

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "OPS", "PLANS", "Array", "Op", "Plan", "as_array", "check_op", "check_out", "check_plan",
    "described", "is_narrow_float", "row_bounds",
]  # fmt: skip

Array = npt.NDArray[Any]
Op = Literal["sum", "mean", "min", "max", "prod"]
Plan = Literal["auto", "eager", "naive", "shared", "direct", "ring", "halving"]
OPS: Final = ("sum", "mean", "min", "max", "prod")
PLANS: Final = ("auto", "eager", "naive", "shared", "direct", "ring", "halving")
_BETWEEN_HOSTS: Final = ("ring", "halving")


def is_narrow_float(dtype: np.dtype[Any]) -> bool:
    """Whether `dtype` is a float of less than 32 bits, whose sums are kept as float32."""
    return dtype.itemsize < 4 and (dtype.kind == "f" or _is_ml_float(dtype))


def _is_ml_float(dtype: np.dtype[Any]) -> bool:
    if dtype.type.__module__ != "ml_dtypes":
        return False
    import ml_dtypes  # the array has imported it

    try:
        ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    except (ValueError, TypeError):  # one of its integers
        return False
    return True


def as_array(x: Any, what: str) -> Array:
    """Return `x` as an array whose elements are plain bytes.

    Raises:
        TypeError: the elements are Python objects or strings of variable width, or they lie on a GPU; or `x` carries
            more than its elements, such as a mask.
        ValueError: the array takes the result of an operation that is not done.
    """
    if type(x) is not np.ndarray:
        if is_on_gpu(x):
            raise TypeError(f"{what}: the array is on a GPU; pass zc.gpu.to_host(x)")
        _check_bare(x, what)
    array: Array = np.asarray(x)
    if not array.flags.writeable and hot.claimed(array):
        raise ValueError(f"{what}: {CLAIMED}")
    if not is_shareable(array.dtype):
        raise TypeError(
            f"{what}: dtype {array.dtype} is not plain bytes, which members of a group could read; pass numbers, or "
            "send such values by a method call"
        )
    return array


def _check_bare(x: Any, what: str) -> None:
    """Refuse an array of a subclass that carries more than its elements: the other ranks would not see it."""
    if not isinstance(x, np.ndarray):
        return
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{what}: the members of a group would not see the mask of a masked array; pass x.filled(value), such as "
            "x.filled(0) for a sum"
        )
    if type(x).__module__.partition(".")[0] == "numpy":
        return
    more = [name for name, value in getattr(x, "__dict__", {}).items() if value is not None]
    if more:
        raise TypeError(
            f"{what}: the members of a group would not see {', '.join(more)} of a {type(x).__name__}; pass "
            "np.asarray(x), whose elements are all that there is"
        )


def check_op(dtype: np.dtype[Any], op: str, what: str) -> None:
    """Check that arrays of `dtype` can be reduced by `op`.

    Raises:
        ValueError: there is no such op.
        TypeError: the op is not defined for `dtype`.
    """
    if op not in OPS:
        raise ValueError(f"{what}: there is no op {op!r}; ops are {', '.join(OPS)}")
    if dtype.kind == "b":
        allowed: Sequence[str] = ("min", "max")
    elif dtype.kind in "iu":
        allowed = ("sum", "min", "max", "prod")
    elif dtype.kind == "c":
        allowed = ("sum", "mean", "prod")
    elif dtype.kind == "f" or _is_ml_float(dtype):
        allowed = OPS
    else:
        allowed = ()
    if op not in allowed:
        known = f"ops of {dtype} are {', '.join(allowed)}" if allowed else "it takes numbers and bools"
        raise TypeError(f"{what}: there is no {op} of dtype {dtype}; {known}")


def check_out(out: Any, array: Array, what: str) -> None:
    """Check that the result for inputs like `array` can be written to `out`.

    Raises:
        TypeError: `out` is no NumPy array, or carries more than its elements.
        ValueError: `out` is not writable, has another dtype or shape, or is used by an operation that is not done.
    """
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{what}: out is of type {type(out).__name__}, and must be a NumPy array")
    if type(out) is not np.ndarray:
        _check_bare(out, f"{what}: out")
    if out.dtype != array.dtype or out.shape != array.shape:
        raise ValueError(
            f"{what}: out has dtype {out.dtype} and shape {out.shape}, and the result has dtype {array.dtype} and "
            f"shape {array.shape}"
        )
    if not out.flags.writeable:
        if hot.claimed(out):
            raise ValueError(f"{what}: out: {CLAIMED}")
        if hot.lent(out):
            raise ValueError(f"{what}: out is the input of an operation that is not done: await that operation first")
        raise ValueError(f"{what}: out is read-only; pass a writable array, or none and take the shared result")


def check_plan(plan: str, what: str, *, one_host: bool) -> None:
    """Check a plan for a group, of which all members may be on one host.

    Raises:
        ValueError: there is no such plan, or it is for groups over several hosts.
    """
    if plan not in PLANS:
        raise ValueError(f"{what}: there is no plan {plan!r}; plans are {', '.join(PLANS)}")
    if plan in _BETWEEN_HOSTS and one_host:
        raise ValueError(
            f"{what}: plan {plan!r} passes pieces from host to host, and all members of this group are on one host, "
            "where they map each other's memory; use 'auto'"
        )


def row_bounds(length: int, size: int, shards: Sequence[int] | None, what: str) -> list[int]:
    """The rows at which `length` rows are cut into `size` pieces: ``size + 1`` of them, from 0 to `length`.

    Args:
        length: number of rows.
        size: number of pieces.
        shards: rows of each piece; None cuts as ``np.array_split`` does.
        what: the caller, for messages.

    Raises:
        TypeError: a length is no integer.
        ValueError: `shards` are not `size` lengths of at least 0 that add up to `length`.
    """
    if shards is None:
        each, more = divmod(length, size)
        lengths = [each + 1] * more + [each] * (size - more)
    else:
        lengths = [operator.index(rows) for rows in shards]
        if len(lengths) != size or any(rows < 0 for rows in lengths) or sum(lengths) != length:
            raise ValueError(
                f"{what}: shards {lengths} add up to {sum(lengths)} rows in {len(lengths)} pieces; they must be "
                f"{size} lengths of at least 0 that add up to {length}, the length of the array"
            )
    bounds = [0]
    for rows in lengths:
        bounds.append(bounds[-1] + rows)
    return bounds


def described(dtype: np.dtype[Any], shape: tuple[int, ...], *, rows: bool = True) -> str:
    """A dtype and a shape, for signatures; without `rows` the shape of a row."""
    text = f"{shape}" if rows else f"rows of {shape[1:]}"
    return f"{_name_of(dtype) if dtype.names is None else dtype.descr}, {text}"


@lru_cache(maxsize=256)
def _name_of(dtype: np.dtype[Any]) -> str:
    """The name of a simple dtype, such as ``float32``; of another byte order its code. NumPy takes 3 us to make it."""
    return str(dtype)
