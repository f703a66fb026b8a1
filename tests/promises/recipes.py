"""Ways to make arrays, to take pieces of them, and to write to them: the vocabulary of the tests of snapshots."""

from __future__ import annotations

import array
import ctypes
import importlib
import io
import pickle
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import ml_dtypes
import numpy as np
import pandas as pd
import pyarrow as pa

import zcactor as zc

__all__ = [
    "DTYPES",
    "IDIOMS",
    "MAKERS",
    "PARTS",
    "SIZES",
    "Boxed",
    "Sub",
    "digest",
    "make",
    "part_of",
    "read_only",
    "write",
]

try:
    torch: Any = importlib.import_module("torch")
except ImportError:
    torch = None

KIB: Final = 1 << 10
MIB: Final = 1 << 20
SIZES: Final = (
    0, 8, 16 * KIB - 8, 16 * KIB, 16 * KIB + 8, 64 * KIB - 8, 64 * KIB, 64 * KIB + 8, 128 * KIB, 200_000, MIB, MIB + 8,
)  # fmt: skip
"""Bytes of arrays: nothing, one number, around the eager limit and `Config.store_min_nbytes`, and large ones."""
DTYPES: Final = (
    "f8", "f4", "i2", "u1", "c16", "?", "M8[s]", "S8", np.dtype([("a", "i4"), ("b", "f8")]),
    np.dtype(ml_dtypes.bfloat16),
)  # fmt: skip
"""Kinds of elements. Each has 16 bytes at most."""


class Sub(np.ndarray[Any, Any]):
    """A subclass that adds nothing."""


class Boxed:
    """An object that hands its buffer to pickle out of band, as PEP 574 says."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __reduce_ex__(self, protocol: Any) -> Any:
        """See `object.__reduce_ex__`."""
        return Boxed, (pickle.PickleBuffer(self.buffer),)


# ---------------------------------------------------------------- making


def _load(m: int, n: int) -> Any:
    file = io.BytesIO()
    np.save(file, np.zeros((m, n)))
    file.seek(0)
    return np.load(file)


def _load_file(m: int, n: int) -> Any:
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file.name, np.zeros((m, n)))
        return np.load(file.name)


def _from_file(m: int, n: int) -> Any:
    with tempfile.NamedTemporaryFile() as file:
        np.zeros(m * n).tofile(file.name)
        return np.fromfile(file.name).reshape(m, n)


def _text(m: int, n: int) -> io.StringIO:
    return io.StringIO("0 0 0 0\n" * (m * n // 4))


_zeros = np.zeros
_random = np.random.default_rng(0)
IDIOMS: Final[dict[str, Callable[[int, int], Any]]] = {
    "zeros": lambda m, n: _zeros((m, n)),
    "zeros.reshape": lambda m, n: _zeros(m * n).reshape(m, n),
    "arange.reshape": lambda m, n: np.arange(m * n * 1.0).reshape(m, n),
    "load(file)": _load_file,
    "load(BytesIO)": _load,
    "fromfile.reshape": _from_file,
    "x.T": lambda m, n: _zeros((n, m)).T,
    "A @ B": lambda m, n: _zeros((m, 3)) @ _zeros((3, n)),
    "tile": lambda m, n: np.tile(_zeros(n), (m, 1)),
    "linspace.reshape": lambda m, n: np.linspace(0, 0, m * n).reshape(m, n),
    "stack": lambda m, n: np.stack([_zeros(n)] * m),
    "einsum": lambda m, n: np.einsum("i,j->ij", _zeros(m), _zeros(n)),
    "outer": lambda m, n: np.outer(_zeros(m), _zeros(n)),
    "squeeze": lambda m, n: np.squeeze(_zeros((m, 1, n))),
    "rng.normal": lambda m, n: _random.normal(0, 0, (m, n)),
    "x[..., None][..., 0]": lambda m, n: _zeros((m, n))[..., None][..., 0],
    "swapaxes": lambda m, n: np.swapaxes(_zeros((n, m)), 0, 1),
    "indices": lambda m, n: np.indices((m, n), dtype=float)[0],
    "meshgrid": lambda m, n: np.meshgrid(_zeros(n), _zeros(m))[0],
    "split": lambda m, n: np.split(_zeros((2 * m, n)), 2)[0],
    "hstack": lambda m, n: np.hstack([_zeros((m, n // 2))] * 2),
    "column_stack": lambda m, n: np.column_stack([_zeros(m)] * n),
    "concatenate": lambda m, n: np.concatenate([_zeros((m // 2, n))] * 2),
    "fft": lambda m, n: np.fft.fft(_zeros((m, n))),
    "fft.real": lambda m, n: np.fft.fft(_zeros((m, n))).real,
    "qr": lambda m, n: np.linalg.qr(_zeros((m, min(m, n, 40))))[0],
    "svd": lambda m, n: np.linalg.svd(_zeros((m, min(m, n, 40))), full_matrices=False)[0],
    "solve": lambda m, n: np.linalg.solve(np.eye(min(m, 100)), _zeros((min(m, 100), m * n // min(m, 100)))),
    "gradient": lambda m, n: np.gradient(_zeros((m, n)))[0],
    "cumsum": lambda m, n: np.cumsum(_zeros((m, n)), axis=0),
    "sort": lambda m, n: np.sort(_zeros((m, n))),
    "pad": lambda m, n: np.pad(_zeros((m - 2, n - 2)), 1),
    "roll": lambda m, n: np.roll(_zeros((m, n)), 1),
    "rot90": lambda m, n: np.rot90(_zeros((n, m))),
    "broadcast_to.copy": lambda m, n: np.broadcast_to(_zeros(n), (m, n)).copy(),
    "vectorize": lambda m, n: np.vectorize(float)(_zeros((m, n))),
    "asarray(list)": lambda m, n: np.asarray([[0.0] * n] * m),
    "astype": lambda m, n: _zeros((m, n), "f4").astype(float),
    "random.rand": lambda m, n: _random.random((m, n)),
    "array_split": lambda m, n: np.array_split(_zeros((2 * m, n)), 2)[1],
    "unique": lambda m, n: np.unique(np.arange(m * n * 1.0)),
    "histogram2d": lambda m, n: np.histogram2d(_zeros(10), _zeros(10), bins=(m, n))[0],
    "tensordot": lambda m, n: np.tensordot(_zeros((m, 3)), _zeros((3, n)), 1),
    "kron": lambda m, n: np.kron(_zeros((m // 2, n // 2)), _zeros((2, 2))),
    "take": lambda m, n: np.take(_zeros((m, n)), range(m), 0),
    "x[index]": lambda m, n: _zeros((m, n))[np.arange(m)],
    "moveaxis": lambda m, n: np.moveaxis(_zeros((n, m)), 0, 1),
    "atleast_2d.T": lambda m, n: np.atleast_2d(_zeros(m * n)).T,
    "genfromtxt": lambda m, n: np.genfromtxt(_text(m, min(n, 40))),
    "loadtxt": lambda m, n: np.loadtxt(_text(m, n)),
    "flip": lambda m, n: np.flip(_zeros((m, n))),
    "mgrid": lambda m, n: np.mgrid[0:m, 0:n][0],
    "ones_like(x.T)": lambda m, n: np.ones_like(_zeros((n, m)).T),
    "where": lambda m, n: np.where(_zeros((m, n)) > 0, 1.0, 0.0),
    "median": lambda m, n: np.median(_zeros((3, m, n)), axis=0),
    "mean": lambda m, n: np.mean(_zeros((3, m, n)), axis=0),
    "dot(x.T)": lambda m, n: np.dot(_zeros((3, m)).T, _zeros((3, n))),
    "repeat": lambda m, n: np.repeat(_zeros((m // 2, n)), 2, axis=0),
    "delete": lambda m, n: np.delete(_zeros((m + 1, n)), 0, 0),
    "convolve": lambda m, n: np.convolve(_zeros(m * n), _zeros(3), "same"),
    "full": lambda m, n: np.full((m, n), 0.0),
    "cov": lambda m, n: np.cov(_zeros((m, 20))),
    "ravel": lambda m, n: _zeros((m, n)).ravel(),
    "expand_dims": lambda m, n: np.expand_dims(_zeros((m, n)), 0),
    "ascontiguousarray": lambda m, n: np.ascontiguousarray(_zeros((m, n))),
    "asfortranarray": lambda m, n: np.asfortranarray(_zeros((m, n))),
    "matrix": lambda m, n: _zeros((m, n)).view(np.matrix),
    "subclass": lambda m, n: _zeros((m, n)).view(Sub),
    "x[::2]": lambda m, n: _zeros((2 * m, n))[::2],
    "x.view": lambda m, n: _zeros((m, n)).view("i8"),
    "x.imag": lambda m, n: _zeros((m, n), complex).imag,
}
"""Ordinary ways to make an array of about m x n float64, by name: many give a view of an array without a name."""


def _scaled(m: int, n: int) -> Any:
    try:
        preprocessing = importlib.import_module("sklearn.preprocessing")  # takes a second: not in every process
    except ImportError:  # no part of the smallest set-up
        return _random.random((m, n)) * 2
    return preprocessing.StandardScaler().fit_transform(_random.random((m, n)))


IDIOMS["StandardScaler"] = _scaled


def _columns(k: int) -> dict[str, Any]:
    return {name: np.ones(k) for name in "ab"}


def _frames(k: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "DataFrame(dict)", lambda: pd.DataFrame(_columns(k))
    yield "DataFrame(2d)", lambda: pd.DataFrame(np.ones((k, 2)), columns=["a", "b"])
    yield "DataFrame(2d, copy=False)", lambda: pd.DataFrame(np.ones((k, 2)), columns=["a", "b"], copy=False)
    yield "DataFrame + 1", lambda: pd.DataFrame(_columns(k)) + 1
    yield "concat", lambda: pd.concat([pd.DataFrame(_columns(k // 2))] * 2, ignore_index=True)
    yield "read_csv", lambda: pd.read_csv(io.StringIO("a,b\n" + "1.0,1.0\n" * k))
    yield "assign", lambda: pd.DataFrame({"a": np.ones(k)}).assign(b=np.ones(k))
    yield "DataFrame.copy", lambda: pd.DataFrame(_columns(k)).copy()
    yield "sort_values", lambda: pd.DataFrame(_columns(k)).sort_values("a")
    yield "filter", lambda: (lambda frame: frame[frame["a"] > 0])(pd.DataFrame(_columns(k)))
    yield "Series", lambda: pd.Series(np.ones(k))


def _plain(nbytes: int, dtype: Any, order: str, within: bool) -> Any:
    dtype = np.dtype(dtype)
    count = -(-nbytes // dtype.itemsize)
    shape: tuple[int, ...] = (count,) if order == "C" else (count // 4, 4)
    if within:
        return zc.zeros(shape, dtype=dtype)
    return np.zeros(shape, dtype, order="C" if order == "C" else "F")


MAKERS: Final[dict[str, Callable[[int, Any], Any]]] = {
    "np.zeros": lambda size, dtype: _plain(size, dtype, "C", False),
    "np.zeros F": lambda size, dtype: _plain(size, dtype, "F", False),
    "zc.zeros": lambda size, dtype: _plain(size, dtype, "C", True),
    "zc.zeros.reshape": lambda size, dtype: _plain(size // 4 * 4, dtype, "C", True)[None],
    "0-d": lambda size, dtype: np.zeros((), dtype),
    "bytearray": lambda size, dtype: bytearray(size),
    "array.array": lambda size, dtype: array.array("d", bytes(size // 8 * 8)),
}
"""Ways that depend on a size in bytes and on a dtype. `make` knows idioms and frames as well."""
FRAMES: Final = tuple(name for name, _ in _frames(8))


def make(name: str, size: int, dtype: Any, value: int) -> Any:
    """Make an object that holds arrays.

    Args:
        name: of a maker, an idiom or a frame.
        size: bytes of one array, about.
        dtype: of the elements, where the maker has a choice.
        value: the number that is written into it first.
    """
    if name in MAKERS:
        made = MAKERS[name](size, dtype)
    elif name in IDIOMS:
        m = max(4, int((size / 8) ** 0.5)) // 2 * 2
        made = IDIOMS[name](m, max(4, size // 8 // m) // 2 * 2)
    else:
        made = dict(_frames(max(2, size // 8)))[name]()
    if isinstance(made, np.ndarray) and not made.flags.writeable:
        made = made + 0  # that one cannot be written to, but what is made of it can
    write(made, value)
    return made


# ---------------------------------------------------------------- parts, and other objects over the same memory


def _ctypes(x: Any) -> Any:
    return (ctypes.c_ubyte * memoryview(x).nbytes).from_buffer(x)


PARTS: Final[dict[str, Callable[[Any], Any]]] = {
    "x[1:]": lambda x: x[1:],
    "x[: n // 2]": lambda x: x[: len(x) // 2],
    "x[: n - 1]": lambda x: x[: len(x) - 1],
    "x[:]": lambda x: x[:],
    "x[::2]": lambda x: x[::2],
    "x[::-1]": lambda x: x[::-1],
    "x.T": lambda x: x.T,
    "x[..., 0]": lambda x: x[..., 0],
    "x.reshape(-1)": lambda x: x.reshape(-1),
    "x.view(Sub)": lambda x: x.view(Sub),
    "x.view('u1')": lambda x: x.view("u1"),
    "memoryview": memoryview,
    "memoryview.cast": lambda x: memoryview(x).cast("B"),
    "frombuffer": lambda x: np.frombuffer(x, "u1"),
    "asarray(memoryview)": lambda x: np.asarray(memoryview(x)),
    "ctypes": _ctypes,
    "Series(x, copy=False)": lambda x: pd.Series(x.reshape(-1), copy=False),
    "DataFrame(x, copy=False)": lambda x: (
        pd.DataFrame(x.reshape(-1, 1), columns=["a"], copy=False) if x.dtype.kind in "fiu" else None
    ),
    "pa.array": lambda x: pa.array(x.reshape(-1)),
    "pa.table": lambda x: pa.table({"x": x.reshape(-1)}),
    "pa.py_buffer": pa.py_buffer,
    "Boxed(x)": lambda x: Boxed(x) if memoryview(x).c_contiguous else None,
    "Boxed(memoryview)": lambda x: Boxed(memoryview(x).cast("B")),
    "Boxed(x[1:])": lambda x: Boxed(x[1:]) if memoryview(x[1:]).c_contiguous else None,
    "column": lambda x: x["a"],
    "rows": lambda x: x.iloc[1:],
    "columns": lambda x: x[["a", "b"]],
    "to_numpy": lambda x: x.to_numpy(),
    "values.T": lambda x: x.values.T,
    "column.array": lambda x: x["a"].array,
}
"""Ways to look at an object's memory by another one. Not every one fits every object: see `part_of`."""
if torch is not None:
    PARTS["torch.from_numpy"] = torch.from_numpy
    PARTS["torch rows"] = lambda x: torch.from_numpy(x)[1:]


def part_of(x: Any, name: str) -> Any:
    """The part of that name, or None where `x` has no such part.

    Args:
        x: an object that `make` or this function has made.
        name: one of `PARTS`.
    """
    if name[0] == "x" and not isinstance(x, np.ndarray):
        return None  # slices of buffers are copies or cannot be passed, and those of frames have names of their own
    try:
        return PARTS[name](x)
    # The errors of libraries for a part that an object lacks; NotImplementedError is that of slices of memoryviews of
    # several dimensions, which Python has not.
    except (
        AttributeError, BufferError, IndexError, KeyError, NotImplementedError, OverflowError, TypeError, ValueError,
        pa.ArrowException,
    ):  # fmt: skip
        return None


def can_travel(x: Any) -> bool:
    """Whether `x` can be an argument: views of buffers cannot."""
    return not isinstance(x, (memoryview, ctypes.Array))


__all__ += ["FRAMES", "can_travel"]


# ---------------------------------------------------------------- writing and reading


def read_only(x: Any) -> bool:
    """Whether `x` says that it is read-only."""
    return (isinstance(x, np.ndarray) and not x.flags.writeable) or (isinstance(x, memoryview) and x.readonly)


def write(x: Any, value: int) -> bool:
    """Write `value` to all elements of `x` in place. Returns whether that was possible.

    Args:
        x: any object of this module's.
        value: from 1 to 250.
    """
    value = value % 250 + 1
    try:
        if isinstance(x, np.ndarray):
            if x.dtype.kind == "M":
                x[...] = np.datetime64(value, "s")
            elif x.dtype.kind == "b":
                np.logical_not(x, out=x)
            elif x.dtype.kind == "V" and x.dtype.names:
                x["a"], x["b"] = value, value
            elif x.dtype.kind == "S":
                x[...] = str(value).encode()
            else:
                x[...] = value % 120
        elif isinstance(x, pd.DataFrame):
            if not len(x):
                return False  # a frame without rows has no row to set
            (_locate, _assign, _multiply, _mask)[value % 4](x, value)
        elif isinstance(x, pd.Series):
            if x.dtype.kind == "V":
                return False  # pandas reports a bug of its own where items of ml_dtypes are set
            x.iloc[:] = (
                x.dtype.type(value) if x.dtype.kind == "f" else value % 2 if x.dtype.kind == "b" else x.iloc[::-1]
            )
        elif isinstance(x, memoryview):
            if not x.c_contiguous or not x.nbytes:
                return False
            plain = x.cast("B")
            plain[:] = bytes([value]) * plain.nbytes
        elif isinstance(x, ctypes.Array):
            ctypes.memset(x, value, ctypes.sizeof(x))
        elif isinstance(x, bytearray):
            x[:] = bytes([value]) * len(x)
        elif isinstance(x, array.array):
            for index in range(0, len(x), max(1, len(x) // 100)):
                x[index] = float(value)
        elif isinstance(x, Boxed):
            return write(x.buffer, value)
        elif torch is not None and isinstance(x, torch.Tensor):
            x.fill_(value)
        else:
            return False
    except ValueError as error:
        if "read-only" not in str(error) and "not writ" not in str(error) and "resiz" not in str(error):
            raise
        return False
    except (BufferError, TypeError) as error:
        refused = ("export", "read-only", "readonly", "Invalid value")  # the last: pandas, of read-only columns
        if not any(word in str(error) for word in refused):
            raise
        return False
    return True


def _locate(frame: Any, value: int) -> None:
    frame.loc[:, "a"] = float(value)


def _assign(frame: Any, value: int) -> None:
    frame.iloc[len(frame) // 2, 0] = float(value)


def _multiply(frame: Any, value: int) -> None:
    frame *= value


def _mask(frame: Any, value: int) -> None:
    frame.mask(frame["a"] > -1, float(value), inplace=True)


def digest(x: Any) -> int:
    """A checksum of the elements of `x`: equal for an object and a copy of it."""
    if isinstance(x, pd.DataFrame):
        return zlib.crc32(repr([digest(x[name].to_numpy()) for name in x.columns]).encode())
    if isinstance(x, pa.Table):
        return digest(x["x"].to_numpy())
    if isinstance(x, (pa.Array, pa.ChunkedArray)):
        return digest(x.to_numpy(zero_copy_only=False))
    if isinstance(x, Boxed):
        return digest(np.asarray(memoryview(x.buffer)).reshape(-1).view("u1"))
    if isinstance(x, (bytes, bytearray, pa.Buffer)):
        return zlib.crc32(x)
    if isinstance(x, ctypes.Array):
        return zlib.crc32(memoryview(x).cast("B"))
    got = np.asarray(x)
    if got.dtype == object:  # Arrow's strings: these elements are addresses
        return zlib.crc32(repr(got.tolist()).encode())
    return zlib.crc32(got.tobytes(), zlib.crc32(f"{got.shape}".encode()))
