"""Array layouts on the wire: dtype codes, strides, and which part of an arena an array occupies.

dtypes travel by *name*: NumPy's own string for simple ones, ``ml:<name>`` for ml_dtypes (whose ``str`` is ``<V2`` and
would lose the type), and nested plain lists for structured ones. PEP 574 buffers are not used for arrays, because
NumPy keeps datetime64, ml_dtypes and strided arrays in-band there, which is a hidden copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from zcactor.errors import ProtocolError

__all__ = ["array_address", "byte_bounds", "dtype_code", "dtype_from_code", "is_shareable", "known_codes", "known_dtypes", "packed_strides", "root_of"]

Array = npt.NDArray[Any]
known_codes: dict[np.dtype[Any], Any] = {}
known_dtypes: dict[str, np.dtype[Any]] = {}
_MAX_CACHED = 4096
"""Entries kept in the two caches: programs use a handful of dtypes; a flood of made-up ones must not grow for ever."""


def is_shareable(dtype: np.dtype[Any]) -> bool:
    """Whether the elements are plain bytes: no Python objects, no variable-width strings kept on a heap."""
    return not dtype.hasobject and dtype.kind != "T"


def dtype_code(dtype: np.dtype[Any]) -> Any:
    """The plain value (str or nested list) that names `dtype`; `dtype_from_code` is its inverse."""
    code = known_codes.get(dtype)
    if code is None:
        code = _make_code(dtype)
        if len(known_codes) < _MAX_CACHED:
            known_codes[dtype] = code
    return code


def _make_code(dtype: np.dtype[Any]) -> Any:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return ["sub", _make_code(base), list(shape)]
    if dtype.names is not None:
        assert dtype.fields is not None
        fields = [[name, _make_code(dtype.fields[name][0]), dtype.fields[name][1]] for name in dtype.names]
        return ["rec" if dtype.type is np.record else "struct", fields, dtype.itemsize, dtype.isalignedstruct]
    if dtype.kind == "V" and dtype.type is not np.void:
        return f"ml:{dtype.name}"
    return dtype.str


def dtype_from_code(code: Any) -> np.dtype[Any]:
    """The dtype that `code` names.

    Raises:
        ProtocolError: the code names no dtype of plain bytes.
    """
    if type(code) is str:
        dtype = known_dtypes.get(code)
        if dtype is None:
            dtype = _parse_code(code)
            if len(known_dtypes) < _MAX_CACHED:
                known_dtypes[code] = dtype
        return dtype
    return _parse_code(code)


def _parse_code(code: Any, depth: int = 0) -> np.dtype[Any]:
    if depth > 32:
        raise ProtocolError("an array's dtype is nested more than 32 levels deep")
    try:
        if isinstance(code, str):
            if code.startswith("ml:"):
                import ml_dtypes

                dtype = np.dtype(getattr(ml_dtypes, code[3:]))
            else:
                dtype = np.dtype(code)
        elif code[0] == "sub":
            dtype = np.dtype((_parse_code(code[1], depth + 1), tuple(code[2])))
        else:
            kind, fields, itemsize, aligned = code
            dtype = np.dtype(
                {
                    "names": [f[0] for f in fields],
                    "formats": [_parse_code(f[1], depth + 1) for f in fields],
                    "offsets": [f[2] for f in fields],
                    "itemsize": itemsize,
                },
                align=bool(aligned),
            )
            if kind == "rec":
                dtype = np.dtype((np.record, dtype))
    except ImportError as error:
        raise ProtocolError(f"an array of dtype {code!r} needs the package ml_dtypes here: pip install ml_dtypes") from error
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise ProtocolError(f"{code!r} names no dtype: {error}") from error
    if not is_shareable(dtype):
        raise ProtocolError(f"{code!r} names a dtype whose elements are not plain bytes")
    return dtype


def root_of(array: Array) -> Any:
    """What holds the memory of `array`: the base of the innermost ndarray, or None for NumPy's own memory.

    For an array of the store this is its ``Block``, for one received from a peer its ``Lease``.
    """
    base = array.base
    while isinstance(base, np.ndarray):
        inner = base.base
        if inner is None:
            return None
        base = inner
    return base


def array_address(array: Array) -> int:
    """Virtual address of the first element (``[0, 0, ...]``), the lowest address only when no stride is negative."""
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def byte_bounds(array: Array) -> tuple[int, int]:
    """Lowest address and one past the highest that the elements of a non-empty `array` touch."""
    low = array_address(array)
    if array.flags.c_contiguous or array.flags.f_contiguous:
        return low, low + array.nbytes
    high = low
    for count, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (count - 1) * stride
        else:
            high += (count - 1) * stride
    return low, high + array.itemsize


def packed_strides(array: Array) -> tuple[int, ...]:
    """Strides in bytes of a gapless array that keeps the axis order of `array` in memory (NumPy's order "K")."""
    strides = [0] * array.ndim
    step = array.itemsize
    for axis in sorted(range(array.ndim), key=lambda i: (abs(array.strides[i]), -i)):
        strides[axis] = step
        step *= array.shape[axis]
    return tuple(strides)
