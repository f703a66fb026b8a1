"""Files read straight into the store: passing an array that `load` returned copies nothing, nor did reading it."""

from __future__ import annotations

import errno
import io
import operator
import os
import stat
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, SupportsIndex, TextIO, cast

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from zcactor.context import current
from zcactor.marshal.arrays import innermost, is_shareable

if TYPE_CHECKING:
    from typing import Self

    from zcactor.objectstore.store import Store

__all__ = ["load"]

Array = npt.NDArray[Any]
Shape = SupportsIndex | Sequence[SupportsIndex]
Progress = bool | Callable[[int, int], object] | None

_ZIP_MAGICS: Final = (b"PK\x03\x04", b"PK\x05\x06")
"""How an archive begins: with its first member, or, when it has none, with the end of its directory."""
_ZIP_END: Final = struct.Struct("<4s6xH10x")
"""What ends an archive, before its comment: magic, and how many members there are."""
_MANY_MEMBERS: Final = 0xFFFF
"""Stands for as many members and for more."""
_CHUNK: Final = 8 << 20
"""Bytes of one read: between two of them Ctrl-C is noticed and progress is shown."""
_LARGE_NBYTES: Final = 256 << 20
"""Bytes from which on it takes long enough that somebody at a terminal wants to know."""
_HEADER_NBYTES: Final = 256 << 10
"""Bytes of a .npy header, at most. Headers are parsed as Python literals, which takes time and memory."""
_DEFLATE_RATIO: Final = 1032
"""Bytes that one deflated byte can stand for: two bits give at most 258."""
_REDRAWN: Final = 0.1
"""Seconds between two states of the line on the terminal."""


def load(
    path: str | os.PathLike[str],
    *,
    dtype: npt.DTypeLike | None = None,
    shape: Shape | None = None,
    offset: SupportsIndex = 0,
    progress: Progress = None,
) -> Any:
    """Read a file into the store: passing what it returns copies nothing. What it holds is told by its first bytes.

    - *.npy*: versions 1.0, 2.0 and 3.0, in C and in Fortran order. Bytes after the array are left alone, as
      `numpy.load` does. May be a pipe, which is read as far as the array goes; a file's size is compared with what its
      header claims before anything is allocated, that of a pipe cannot be.
    - *.npz*: every member. Those that are stored (`numpy.savez`) are read into place, deflated ones
      (`numpy.savez_compressed`) pass through a buffer of `zipfile`'s. The checksums are compared.
    - raw: any other file, when `dtype` is given. It holds the elements in C order, from `offset` to its end.

    It blocks: an async program writes ``await asyncio.to_thread(zc.load, path)``. Any thread may call it.

    Args:
        path: the file.
        dtype: raw files only: any dtype of plain bytes, of the file's byte order.
        shape: raw files only: elements along each axis, or an int for one axis; one of them may be -1, which is
            inferred. None is one axis of everything.
        offset: raw files only: bytes before the first element.
        progress: a callable takes ``(bytes_done, bytes_total)``, at the beginning and after each chunk of some MiB; in
            an .npz the headers of members count as well. True shows one line on stderr (name, percent, GB/s), False
            shows nothing; None shows the line from 256 MiB on, when stderr is a terminal.

    Returns:
        A writable, aligned ndarray of the file's dtype and order; of an .npz a dict of such, by the members' names
        without ``.npy``.

    Raises:
        NotInitialized: no runtime is running.
        OutOfMemory: the store cannot hold it.
        OSError: the file is missing, a directory, or cannot be read.
        TypeError: elements are not plain bytes: Python objects, which are never unpickled, or strings of variable
            width; or an argument is of a wrong type.
        ValueError: the file is damaged, truncated, or shrank while it was read; its header is wrong or claims more than
            the file holds; its size does not match `dtype`, `shape` and `offset`; these are given for an .npy or .npz,
            or `dtype` is not for a file that is neither; `shape` or `offset` is negative; an archive has members that
            are no arrays, are encrypted, bear one name, or are compressed otherwise than by deflating; a pipe holds
            anything but an .npy.

        Whatever is raised, nothing stays allocated in the store.
    """
    store = current().store
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise TypeError(f"progress={progress!r}: True, False, None or a callable of (bytes_done, bytes_total)")
    name = os.fsdecode(path)
    first = operator.index(offset)
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        nbytes = status.st_size if stat.S_ISREG(status.st_mode) else None
        head = _beginning(file)
        is_npy, is_zip = head == npy.MAGIC_PREFIX, head.startswith(_ZIP_MAGICS)
        if (is_npy or is_zip) and (dtype is not None or shape is not None or first):
            raise ValueError(
                f"{name} is {'an .npy' if is_npy else 'an .npz'}, which says itself what it holds: dtype, shape and "
                "offset are for raw files"
            )
        if is_npy:
            source = _Source(name, file, nbytes, head)
            return _array(store, source, _header(source), progress)
        if not is_zip and dtype is None:
            raise ValueError(
                f"{name} is neither an .npy nor an .npz: it begins with {head!r}; to read a raw file, pass dtype="
            )
        if nbytes is None:
            raise ValueError(f"{name} is no regular file: only an .npy can be read from a pipe or a device")
        if is_zip:
            return _archive(store, name, file, nbytes, progress)
        elements = np.dtype(dtype)
        form = _Form(_raw_shape(name, nbytes, elements, shape, first), elements, "C")
        file.seek(first)
        return _array(store, _Source(name, file, nbytes - first), form, progress)


class _Form(NamedTuple):
    """What an array is besides its elements' values."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]


class _Readable(Protocol):
    """What a `_Source` reads from: an unbuffered file, or a member of an archive."""

    def read(self, size: int, /) -> bytes | None: ...
    def readinto(self, buffer: memoryview, /) -> int | None: ...


class _Source:
    """The bytes of one array: `read` for the header, as NumPy's parsers want it, then `fill` for the elements.

    Args:
        what: the file, and the member, for messages.
        stream: stands after `head`.
        left: bytes that there are, with `head`; None when nobody knows.
        head: bytes that were read already.
        crc: what the CRC-32 of all the bytes is to be; None when the stream itself sees to it, or there is none.
    """

    def __init__(
        self, what: str, stream: _Readable, left: int | None, head: bytes = b"", *, crc: int | None = None
    ) -> None:
        self.what: Final = what
        self.left = left
        self._stream = stream
        self._head = head
        self._expected = crc
        self._crc = 0

    def read(self, size: int = _HEADER_NBYTES, /) -> bytes:
        """At most `size` bytes of a header, fewer when there are no more.

        Raises:
            ValueError: no header is that long: a damaged length must not have the whole file read.
        """
        if size > _HEADER_NBYTES:
            raise ValueError(f"its length is said to be {size:,} bytes, {_HEADER_NBYTES:,} are the limit")
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
        """Read `memory` full, and tell `advance` of each chunk.

        Raises:
            ValueError: the bytes end early, or are damaged.
        """
        done = 0
        while done < len(memory):
            # Released at once and not when the frame dies: a traceback keeps frames, and so the store's bytes, alive.
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
        """Compare the checksum, once everything was read.

        Raises:
            ValueError: it is another.
        """
        if self._expected is not None and self._crc != self._expected:
            raise ValueError(
                f"{self.what} is damaged: CRC-32 {self._expected:#010x} was expected and {self._crc:#010x} found"
            )


@contextmanager
def _parsing(what: str) -> Iterator[None]:
    """Whatever a parser raises over bytes that it did not expect becomes a ValueError that says where.

    Literals that are nested too deep raise MemoryError or RecursionError, directories of archives struct.error, and so
    on: no list of these would be complete. Failures of the device stay what they are; EINVAL is none, but a seek to
    where a damaged directory points.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise ValueError(f"{what}: {str(error) or type(error).__name__}") from error


def _beginning(file: io.FileIO) -> bytes:
    """The first bytes, as many as .npy's magic has unless the file is shorter; a pipe may give them in pieces."""
    head = b""
    while len(head) < len(npy.MAGIC_PREFIX):
        data = file.read(len(npy.MAGIC_PREFIX) - len(head))
        if not data:
            break
        head += data
    return head


def _header(source: _Source) -> _Form:
    """What an .npy claims to hold; the source stands at its elements then."""
    with _parsing(f"{source.what} has no valid .npy header"):
        version = npy.read_magic(source)
        if version == (1, 0):
            shape, fortran, dtype = npy.read_array_header_1_0(source, _HEADER_NBYTES)
        elif version == (2, 0):
            shape, fortran, dtype = npy.read_array_header_2_0(source, _HEADER_NBYTES)
        elif version == (3, 0):
            shape, fortran, dtype = npy.read_array_header_2_0(_escaped(source), _HEADER_NBYTES)
        else:
            raise ValueError(f"version {version[0]}.{version[1]} is none of 1.0, 2.0 and 3.0")
    return _Form(shape, dtype, "F" if fortran else "C")


def _escaped(source: _Source) -> io.BytesIO:
    """The header of version 3.0 as one of 2.0, which NumPy parses publicly: the former is UTF-8, the latter Latin-1.

    The characters that differ stand in string literals, and there an escape says the same.
    """
    (length,) = struct.unpack("<I", _exactly(source, 4))
    text = _exactly(source, length).decode().encode("ascii", "backslashreplace")
    return io.BytesIO(struct.pack("<I", len(text)) + text)


def _exactly(source: _Source, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = source.read(size - len(data))
        if not piece:
            raise ValueError(f"{size} bytes were expected and {len(data)} found")
        data += piece
    return data


def _check_possible(what: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Whether there can be such an array in the store, were there room.

    Raises:
        TypeError: not of these elements.
        ValueError: not of this shape.
    """
    if not is_shareable(dtype):
        raise TypeError(
            f"{what}: dtype {dtype} is not plain bytes, which is all that the store holds; objects would have to be "
            "unpickled, which may run any code: save the array with a fixed-size dtype"
        )
    if dtype.subdtype is not None:
        raise ValueError(f"{what}: dtype {dtype} has a shape of its own; its axes belong to the array's shape")
    try:
        # One element, repeated: NumPy looks at lengths and their product and allocates nothing. Asked in the store,
        # it would refuse when the block is taken, and the traceback would keep that.
        np.ndarray(shape, dtype, bytes(dtype.itemsize or 1), 0, (0,) * len(shape))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{what}: there can be no array of that shape: {error}") from error


def _array(store: Store, source: _Source, form: _Form, progress: Progress) -> Array:
    """The one array that a file holds."""
    nbytes = _claimed(source, form)
    with _Shown(source.what, nbytes, progress) as shown:
        return _filled(store, source, form, shown.advance)


def _claimed(source: _Source, form: _Form) -> int:
    """Bytes of such an array, which are at most those that the source has."""
    _check_possible(source.what, form.shape, form.dtype)
    nbytes = prod(form.shape) * form.dtype.itemsize
    if source.left is not None and nbytes > source.left:
        raise ValueError(
            f"{source.what}: shape {form.shape} of dtype {form.dtype} takes {nbytes:,} bytes, {source.left:,} were "
            "found; it is truncated or its header is wrong"
        )
    return nbytes


def _filled(store: Store, source: _Source, form: _Form, advance: Callable[[int], None]) -> Array:
    """An array in the store, its elements read."""
    array = store.empty(*form)
    try:
        with innermost(array).data as memory:
            source.fill(memory, advance)
        source.verify()
    except BaseException:
        del array  # the traceback would keep it
        raise
    return array


def _raw_shape(what: str, nbytes: int, dtype: np.dtype[Any], shape: Shape | None, offset: int) -> tuple[int, ...]:
    """The lengths of a raw file's axes, of which one may have to be inferred; together they take the whole file."""
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
    _check_possible(what, axes, dtype)
    expected = prod(axes) * dtype.itemsize
    if expected != found:
        raise ValueError(
            f"{what}: {expected:,} bytes were expected for shape {axes} of dtype {dtype}, and {found:,} found after "
            f"offset {offset:,}"
        )
    return axes


def _axes(shape: Shape) -> tuple[int, ...]:
    return tuple(map(operator.index, shape)) if isinstance(shape, Sequence) else (operator.index(shape),)


def _archive(store: Store, path: str, file: io.FileIO, nbytes: int, progress: Progress) -> dict[str, Array]:
    """The arrays of an .npz, by name. Its members are looked at before anything is allocated."""
    with _parsing(f"{path} is no valid .npz"):
        archive = zipfile.ZipFile(file)
        _check_count(archive, file, nbytes)
    arrays: dict[str, Array] = {}
    with archive:
        members = _members(path, archive, file, nbytes)
        total = sum(info.file_size for info, _ in members.values())
        try:
            with _Shown(path, total, progress) as shown:
                for name, (info, start) in members.items():
                    arrays[name] = _member(store, path, archive, file, info, start, shown.advance)
        except BaseException:
            arrays.clear()  # the traceback would keep them
            raise
    return arrays


def _check_count(archive: zipfile.ZipFile, file: io.FileIO, nbytes: int) -> None:
    """Whether all members were found: one damaged length in the directory hides those behind it, and zipfile is silent.

    Raises:
        ValueError: they were not, or the archive does not end where its file does.
    """
    file.seek(max(0, nbytes - _ZIP_END.size - len(archive.comment)))
    magic, expected = _ZIP_END.unpack(file.read(_ZIP_END.size))
    if magic != _ZIP_MAGICS[1]:
        raise ValueError("its directory does not end where the file does")
    found = len(archive.infolist())
    if expected != min(found, _MANY_MEMBERS):
        raise ValueError(f"its directory has {expected:,} members, {found:,} were found")


def _members(
    path: str, archive: zipfile.ZipFile, file: io.FileIO, nbytes: int
) -> dict[str, tuple[zipfile.ZipInfo, int]]:
    """The members and where their bytes begin, by the names of the arrays. What they claim is possible in `nbytes`."""
    members: dict[str, tuple[zipfile.ZipInfo, int]] = {}
    for info in archive.infolist():
        what = f"{path}, member {info.filename!r}"
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(
                f"{what} is compressed by method {info.compress_type}; expected is 0, stored, or 8, deflated"
            )
        with _parsing(f"{what} cannot be read"):
            archive.open(info).close()  # compares the directory with the member's own header
            file.seek(info.header_offset + 26)
            name_length, extra_length = struct.unpack("<HH", file.read(4))
        start = info.header_offset + 30 + name_length + extra_length
        if start + info.compress_size > nbytes:
            raise ValueError(f"{what} would end at byte {start + info.compress_size:,}, {nbytes:,} bytes were found")
        stored = info.compress_type == zipfile.ZIP_STORED
        most = info.compress_size if stored else info.compress_size * _DEFLATE_RATIO
        if info.file_size > most or (stored and info.file_size != most):
            raise ValueError(
                f"{what} claims {info.file_size:,} bytes, and {info.compress_size:,} were found, which cannot hold them"
            )
        name = info.filename.removesuffix(".npy")
        if name in members:
            raise ValueError(f"{what}: another member gives an array of that name, too")
        members[name] = info, start
    return members


def _member(
    store: Store,
    path: str,
    archive: zipfile.ZipFile,
    file: io.FileIO,
    info: zipfile.ZipInfo,
    start: int,
    advance: Callable[[int], None],
) -> Array:
    """One array of an archive."""
    what = f"{path}, member {info.filename!r}"
    if info.compress_type != zipfile.ZIP_STORED:
        with archive.open(info) as member:  # compares the checksum itself
            return _member_array(store, _Source(what, cast("_Readable", member), info.file_size), advance)
    file.seek(start)  # past zipfile, which would read into bytes objects of its own
    return _member_array(store, _Source(what, file, info.file_size, crc=info.CRC), advance)


def _member_array(store: Store, source: _Source, advance: Callable[[int], None]) -> Array:
    """What a member holds: one .npy and nothing else, or else its checksum, which is of everything, tells nothing."""
    claimed = source.left or 0
    form = _header(source)
    nbytes = _claimed(source, form)
    if nbytes != source.left:
        raise ValueError(
            f"{source.what}: shape {form.shape} of dtype {form.dtype} takes {nbytes:,} bytes, "
            f"{source.left or 0:,} were found"
        )
    advance(claimed - nbytes)
    return _filled(store, source, form, advance)


class _Line:
    """One line on a terminal, drawn over itself: name, percent, GB/s."""

    def __init__(self, stream: TextIO, path: str) -> None:
        name = os.path.basename(path)
        self._name = name if name.isprintable() else ascii(name)  # a name must not steer the terminal
        self._stream = stream
        self._began = time.perf_counter()
        self._drawn = -_REDRAWN

    def draw(self, done: int, total: int) -> None:
        """Show how far it is; not so often that the terminal has to be waited for."""
        elapsed = time.perf_counter() - self._began
        if done < total and elapsed - self._drawn < _REDRAWN:
            return
        self._drawn = elapsed
        percent = 100 * done // total if total else 100
        rate = done / elapsed / 1e9 if elapsed else 0.0
        self._stream.write(f"\r{self._name}: {percent:3d} %  {rate:6.2f} GB/s")
        self._stream.flush()

    def end(self) -> None:
        """Whatever is written next begins a line of its own."""
        self._stream.write("\n")
        self._stream.flush()


class _Shown:
    """The progress of one file, told to whoever asked for it.

    Args:
        path: the file.
        total: bytes that are to be read.
        progress: see `load`.
    """

    def __init__(self, path: str, total: int, progress: Progress) -> None:
        self._done = 0
        self._total: Final = total
        self._line: _Line | None = None
        self._report: Callable[[int, int], object] | None = None
        stream: TextIO | None = sys.stderr  # None in programs without a console
        if callable(progress):
            self._report = progress
        elif stream is not None and (progress or (progress is None and total >= _LARGE_NBYTES and stream.isatty())):
            self._line = _Line(stream, path)
            self._report = self._line.draw

    def __enter__(self) -> Self:
        self.advance(0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._line is not None:
            self._line.end()

    def advance(self, count: int) -> None:
        """`count` more bytes were read."""
        self._done += count
        if self._report is not None:
            self._report(self._done, self._total)
