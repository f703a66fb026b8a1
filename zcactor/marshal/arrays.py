"""Array layouts on the wire: dtype codes, strides, and which part of an arena an array occupies.

dtypes travel by *name*: NumPy's own string for simple ones, ``ml:<name>`` for ml_dtypes (whose ``str`` is ``<V2`` or
worse ``<f1`` and would lose the type), and nested plain lists for structured ones; metadata, in which h5py keeps
enumerations and types of strings, is pickled beside the name. PEP 574 buffers are not used for
arrays, because NumPy keeps datetime64, ml_dtypes and strided arrays in-band there, which is a hidden copy.
"""

from __future__ import annotations

import pickle
import re
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import ProtocolError
from zcactor.lazy_numpy import np
from zcactor.native import hot

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

__all__ = [
    "array_address",
    "base_of",
    "byte_bounds",
    "check_unmasked",
    "dtype_code",
    "dtype_from_code",
    "innermost",
    "is_shareable",
    "known_codes",
    "known_dtypes",
    "packed_strides",
    "plain_of",
    "root_of",
]

known_codes: dict[np.dtype[Any], Any] = {}
"""Codes of simple dtypes. Structured dtypes have none here: NumPy calls some equal that differ in alignment or scalar
type."""
known_dtypes: dict[str, np.dtype[Any]] = {}
_MAX_CACHED: Final = 4096
"""Entries in each of the two caches: programs use a handful of dtypes, and a flood of invented ones must not take
memory."""
_MAX_NESTING: Final = 32
_SIMPLE: Final = re.compile(r"[<>|=](?:[biufcSUV]\d{1,10}|[mM]8(?:\[\d{0,10}[A-Za-z\u03bc]{1,7}\])?)")
"""The form of ``dtype.str``. NumPy's own parser accepts a whole language (``"3i4,(2,2)f8"``), which no peer sends."""
_BUILTIN: Final = 24
"""NumPy's type numbers below this belong to its own fixed-size types; user types and StringDType have larger
numbers."""


def is_shareable(dtype: np.dtype[Any]) -> bool:
    """Whether the elements are plain bytes of a type that the receiver knows: NumPy's own or ml_dtypes'. Python objects
    and variable-width strings on a heap are not."""
    return not dtype.hasobject and (0 <= dtype.num < _BUILTIN or dtype.type.__module__ == "ml_dtypes")


def check_unmasked(x: Any, what: str) -> None:
    """Refuse a masked array, for a result that has elements alone.

    Raises:
        TypeError: `x` is one; the message begins with `what`, a function.
    """
    if isinstance(x, np.ndarray) and isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{what}: the result would not have the mask of a masked array; pass x.filled(value), or x.data and x.mask "
            "each by itself"
        )


def dtype_code(dtype: np.dtype[Any]) -> Any:
    """Encode `dtype` as a plain value (str or nested list), which `dtype_from_code` decodes."""
    # NumPy calls dtypes equal that differ in their metadata.
    code = known_codes.get(dtype) if dtype.metadata is None else None
    if code is None:
        code = _make_code(dtype)
        if type(code) is str and len(known_codes) < _MAX_CACHED:
            known_codes[dtype] = code
    return code


def _make_code(dtype: np.dtype[Any]) -> Any:
    code = _bare_code(dtype)
    if dtype.metadata is None:
        return code
    import cloudpickle

    return ["meta", code, cloudpickle.dumps(dict(dtype.metadata))]


def _bare_code(dtype: np.dtype[Any]) -> Any:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return ["sub", _make_code(base), list(shape)]
    if dtype.names is not None:
        fields = [_field_code(name, *dtype.fields[name]) for name in dtype.names] if dtype.fields is not None else []
        return ["rec" if dtype.type is np.record else "struct", fields, dtype.itemsize, dtype.isalignedstruct]
    if dtype.num >= _BUILTIN:
        if not is_shareable(dtype):
            raise TypeError(f"a field of dtype {dtype} cannot be shared: only NumPy's own types and ml_dtypes can")
        return f"ml:{dtype.name}" if dtype.isnative else f"ml:>{dtype.name}"
    return dtype.str


def _field_code(name: str, dtype: np.dtype[Any], offset: int, title: Any = None) -> list[Any]:
    if title is None:
        return [name, _make_code(dtype), offset]
    if type(title) is not str:
        raise TypeError(f"field {name!r} of an array's dtype has the title {title!r}; only strings can be titles here")
    return [name, _make_code(dtype), offset, title]


def dtype_from_code(code: Any) -> np.dtype[Any]:
    """Return the dtype that `code` names.

    Raises:
        ProtocolError: the code names no dtype of plain bytes.
        Exception: the error of unpickling the dtype's metadata, as it is.
    """
    if type(code) is str:
        dtype = known_dtypes.get(code)
        if dtype is None:
            dtype = _parse_code(code)
            if len(known_dtypes) < _MAX_CACHED:
                hot.with_numpy()
                known_dtypes[code] = dtype
        return dtype
    try:
        dtype = _parse_code(code)
    except _MetadataError as carrier:
        error = carrier.error
    else:
        if dtype.subdtype is not None:
            raise ProtocolError(f"{code!r} names no dtype of an array's elements")
        return dtype
    try:
        raise error
    finally:
        del error  # its traceback holds this frame


def _parse_code(code: Any, depth: int = 0) -> np.dtype[Any]:
    if depth > _MAX_NESTING:
        raise ProtocolError(f"an array's dtype is nested more than {_MAX_NESTING} levels deep")
    try:
        if type(code) is str:
            dtype = _simple(code)
        elif code[0] == "sub":
            dtype = np.dtype((_parse_code(code[1], depth + 1), tuple(code[2])))
        elif code[0] == "meta":
            dtype = np.dtype(_parse_code(code[1], depth + 1), metadata=_metadata(code[2]))
        else:
            dtype = _structured(code, depth)
    except ImportError as error:
        raise ProtocolError(
            f"an array of dtype {code!r} needs the package ml_dtypes here: pip install ml_dtypes"
        ) from error
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise ProtocolError(f"{code!r} names no dtype: {error}") from error
    if not is_shareable(dtype):
        raise ProtocolError(f"{code!r} names a dtype whose elements are not plain bytes")
    return dtype


class _MetadataError(Exception):
    """The carrier of an error of the user's own code through the handlers for malformed codes."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _metadata(pickled: Any) -> Any:
    if type(pickled) is not bytes:
        raise TypeError("its metadata is not pickled")
    try:
        return pickle.loads(pickled)  # the peer has been authenticated, and sends other pickles, too
    except Exception as error:
        raise _MetadataError(error) from error


def _simple(code: str) -> np.dtype[Any]:
    if code.startswith("ml:"):
        import ml_dtypes

        swapped = code.startswith("ml:>")
        scalar = getattr(ml_dtypes, code[3 + swapped :])
        if not (isinstance(scalar, type) and issubclass(scalar, np.generic)):
            raise TypeError("ml_dtypes has no such type")
        dtype: np.dtype[Any] = np.dtype(scalar)
        return dtype.newbyteorder() if swapped else dtype
    if not _SIMPLE.fullmatch(code):
        raise ValueError("it is not what NumPy calls a dtype")
    return np.dtype(code)


def _structured(code: Any, depth: int) -> np.dtype[Any]:
    kind, fields, itemsize, aligned = code
    if kind not in ("struct", "rec"):
        raise ValueError("it is neither a structure nor a record")
    layout = {
        "names": [field[0] for field in fields],
        "formats": [_parse_code(field[1], depth + 1) for field in fields],
        "offsets": [field[2] for field in fields],
        "itemsize": itemsize,
    }
    if any(len(field) > 3 for field in fields):
        layout["titles"] = [field[3] if len(field) > 3 else None for field in fields]
    dtype: np.dtype[Any] = np.dtype(layout, align=bool(aligned))  # type: ignore[call-overload]
    return np.dtype((np.record, dtype)) if kind == "rec" else dtype


def base_of(array: Array) -> Any:
    """The object that `array` holds for its memory: a subclass may answer anything for its base."""
    return array.base if type(array) is np.ndarray else np.ndarray.base.__get__(array)


def plain_of(array: Array) -> Array:
    """A plain ndarray over the elements of `array`: a subclass may answer anything for its shape, dtype and flags."""
    return array if type(array) is np.ndarray else np.asarray(array)


def root_of(array: Array) -> Any:
    """Return the object that holds the memory of `array`: the base of the innermost ndarray, or None for NumPy's own
    memory.

    For an array of the store this is its ``Block``, for an array received from a peer its ``Lease``.
    """
    base: Any = base_of(array)
    while issubclass(type(base), np.ndarray):
        inner = base_of(base)
        if inner is None:
            return None
        base = inner
    return base


def innermost(array: Array) -> Array:
    """The innermost ndarray of `array`: it owns the memory, or its base is the result of `root_of`."""
    base: Any = base_of(array)
    while issubclass(type(base), np.ndarray):
        array, base = base, base_of(base)
    return array


def array_address(array: Array) -> int:
    """Virtual address of the first element (``[0, 0, ...]``). With a negative stride this is not the lowest address."""
    return hot.address(array)


def byte_bounds(array: Array) -> tuple[int, int]:
    """The lowest address that the elements of a non-empty `array` touch, and the address after the highest."""
    array = plain_of(array)
    low: int = hot.address(array)
    if array.flags.forc:  # contiguous in either order
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
