"""The header of an .npy."""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING

from numpy.lib import format as npy

from zcactor.loading.form import Form
from zcactor.loading.source import HEADER_NBYTES, parsing

if TYPE_CHECKING:
    from zcactor.loading.source import ArraySource

__all__ = ["read_header"]


def read_header(source: ArraySource) -> Form:
    """Read the form of the array in an .npy. Afterwards `source` stands at the array's elements."""
    with parsing(f"{source.what} has no valid .npy header"):
        version = npy.read_magic(source)
        if version == (1, 0):
            shape, fortran, dtype = npy.read_array_header_1_0(source, HEADER_NBYTES)
        elif version == (2, 0):
            shape, fortran, dtype = npy.read_array_header_2_0(source, HEADER_NBYTES)
        elif version == (3, 0):
            shape, fortran, dtype = npy.read_array_header_2_0(_escaped(source), HEADER_NBYTES)
        else:
            raise ValueError(f"version {version[0]}.{version[1]} is none of 1.0, 2.0 and 3.0")
    return Form(shape, dtype, "F" if fortran else "C")


def _escaped(source: ArraySource) -> io.BytesIO:
    """Translate a header of version 3.0 into one of 2.0, which NumPy parses publicly: the former is UTF-8, the latter
    Latin-1.

    The characters that differ stand in string literals, where an escape has the same meaning.
    """
    (length,) = struct.unpack("<I", _exactly(source, 4))
    text = _exactly(source, length).decode().encode("ascii", "backslashreplace")
    return io.BytesIO(struct.pack("<I", len(text)) + text)


def _exactly(source: ArraySource, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = source.read(size - len(data))
        if not piece:
            raise ValueError(f"{size} bytes were expected and {len(data)} found")
        data += piece
    return data
