"""The bytes of one array, from a file or from a member of an archive."""

from __future__ import annotations

import errno
import zipfile
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["HEADER_NBYTES", "ArraySource", "Readable", "parsing"]

HEADER_NBYTES: Final = 256 << 10
"""Bytes of a .npy header, at most. Headers are parsed as Python literals, which takes time and memory."""
_CHUNK: Final = 8 << 20
"""Bytes of one read: between two of them Ctrl-C is noticed and progress is shown."""


class Readable(Protocol):
    """The stream of an `ArraySource`: an unbuffered file, or a member of an archive."""

    def read(self, size: int, /) -> bytes | None:
        """Read at most `size` bytes; no bytes at the end."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Read into `buffer`, at most its size. Returns the number of bytes."""


class ArraySource:
    """The bytes of one array: `read` gives the header to NumPy's parsers, then `fill` gives the elements.

    Args:
        what: name of the file, and of the member, for messages.
        stream: the stream, which stands after `head`.
        left: number of bytes left, with `head`; None when it is unknown.
        head: bytes that were already read from `stream`.
        crc: the expected CRC-32 of all bytes; None when the stream itself checks it, or the bytes have no checksum.
    """

    def __init__(
        self, what: str, stream: Readable, left: int | None, head: bytes = b"", *, crc: int | None = None
    ) -> None:
        self.what: Final = what
        self.left = left
        self._stream = stream
        self._head = head
        self._expected = crc
        self._crc = 0

    def read(self, size: int = HEADER_NBYTES, /) -> bytes:
        """Read at most `size` bytes of a header, fewer at the end.

        Raises:
            ValueError: `size` is more than a header may have: a damaged length must not cause the whole file to be
                read.
        """
        if size > HEADER_NBYTES:
            raise ValueError(f"its length is said to be {size:,} bytes, {HEADER_NBYTES:,} are the limit")
        data = self._head[:size]
        self._head = self._head[size:]
        if not data:
            data = self._stream.read(size if self.left is None else min(size, self.left)) or b""
        if self.left is not None:
            self.left -= len(data)
        if self._expected is not None:
            self._crc = zlib.crc32(data, self._crc)
        return data

    def fill(self, memory: memoryview, advance: Callable[[int], None]) -> None:
        """Fill `memory`, and call `advance` with the size of each chunk.

        Raises:
            ValueError: the bytes end early, or are damaged.
        """
        done = 0
        while done < len(memory):
            # Released at once and not when the frame dies: a traceback keeps frames, and with them the store's bytes,
            # alive.
            with memory[done : done + _CHUNK] as chunk:
                try:
                    count = self._stream.readinto(chunk) or 0
                except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                    raise ValueError(f"{self.what} is damaged: {str(error) or 'its bytes end early'}") from error
                if self._expected is not None:
                    with chunk[:count] as read:
                        self._crc = zlib.crc32(read, self._crc)
            if not count:
                raise ValueError(
                    f"{self.what} ended early: {len(memory):,} bytes of elements were expected and {done:,} found; it "
                    "is truncated, or shrank while it was read"
                )
            done += count
            advance(count)

    def verify(self) -> None:
        """Compare the checksum, once all bytes were read.

        Raises:
            ValueError: the checksum differs.
        """
        if self._expected is not None and self._crc != self._expected:
            raise ValueError(
                f"{self.what} is damaged: CRC-32 {self._expected:#010x} was expected and {self._crc:#010x} found"
            )


@contextmanager
def parsing(what: str) -> Iterator[None]:
    """Turn each error that a parser raises over unexpected bytes into a ValueError that names the place.

    Literals that are nested too deep raise MemoryError or RecursionError, directories of archives struct.error, and so
    on: no list of these would be complete. Failures of the device are raised unchanged. EINVAL is not one: it comes
    from a seek to a position in a damaged directory.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise ValueError(f"{what}: {str(error) or type(error).__name__}") from error
