"""Files as NumPy writes them and files that no program writes, and the checks on reading them."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.marshal.wire import assert_same, strides

MIB = 1 << 20
MAGIC = b"\x93NUMPY"
CAPACITY = 512 * MIB
"""Bytes of the store."""


def npy(header: str | bytes, data: bytes = b"", version: tuple[int, int] = (1, 0), length: int | None = None) -> bytes:
    """The bytes of an .npy with any header."""
    text = header.encode("latin1" if version < (3, 0) else "utf8") if isinstance(header, str) else header
    size = len(text) if length is None else length
    return MAGIC + bytes(version) + struct.pack("<H" if version == (1, 0) else "<I", size) + text + data


def described(shape: str, descr: str = "'<f8'", fortran: str = "False") -> str:
    """The text of a header."""
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}}}\n"


def saved(array: Any) -> bytes:
    """The bytes of an .npy as NumPy writes it."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def archive(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """The bytes of a zip."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as zipped:
        for name, data in members.items():
            zipped.writestr(name, data)
    return file.getvalue()


def refused(error: type[BaseException], match: str, path: Path, /, **arguments: Any) -> None:
    """Check that `load` raises `error`.

    The message names the file and matches, and the store holds no more than before, although the error is still alive.
    """
    before = zc.stats().store_used
    with pytest.raises(error, match=match) as caught:
        zc.load(path, **arguments)
    assert str(path) in str(caught.value)
    assert zc.stats().store_used == before


def assert_read(got: Any, expected: Any) -> None:
    """Check the result of `load` for an array that `numpy.load` reads as `expected`."""
    assert_same(got, expected)
    assert not got.size or strides(got) == strides(expected)
    assert got.flags.c_contiguous == expected.flags.c_contiguous
    assert got.flags.f_contiguous == expected.flags.f_contiguous
    assert got.flags.writeable
    assert got.ctypes.data % 64 == 0
    assert zc.in_store(got)
