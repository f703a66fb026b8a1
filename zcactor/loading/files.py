"""Files of any kind, recognised by their first bytes."""

from __future__ import annotations

import io
import operator
import os
import stat
import struct
import zipfile
from math import prod
from typing import TYPE_CHECKING, Any, Final, SupportsIndex, cast

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from zcactor.loading.form import Form, Shape, check_possible, raw_shape
from zcactor.loading.progress import Progress, Shown
from zcactor.loading.source import HEADER_NBYTES, ArraySource, parsing
from zcactor.marshal.arrays import innermost
from zcactor.process.context import current

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.loading.source import Readable
    from zcactor.objectstore.store import Store

__all__ = ["load"]

_Array = npt.NDArray[Any]

_ZIP_MAGICS: Final = (b"PK\x03\x04", b"PK\x05\x06")
"""The first bytes of an archive: of its first member or, in an empty archive, of the end of its directory."""
_ZIP_END: Final = struct.Struct("<4s6xH10x")
"""The end of an archive, before its comment: magic, and the number of members."""
_MANY_MEMBERS: Final = 0xFFFF
"""The number of members in the directory that means as many or more."""
_DEFLATE_RATIO: Final = 1032
"""Bytes that one deflated byte can stand for, at most: two bits give at most 258."""


def _read_header(source: ArraySource) -> Form:
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


def _read_array(store: Store, source: ArraySource, form: Form, progress: Progress) -> _Array:
    """Read the array of a file that holds one."""
    nbytes = _claimed_nbytes(source, form)
    with Shown(source.what, nbytes, progress) as shown:
        return _read_elements(store, source, form, shown.advance)


def _claimed_nbytes(source: ArraySource, form: Form) -> int:
    """The size in bytes of an array of that form, which must not be more than the source has."""
    check_possible(source.what, form.shape, form.dtype)
    nbytes = prod(form.shape) * form.dtype.itemsize
    if source.left is not None and nbytes > source.left:
        raise ValueError(
            f"{source.what}: shape {form.shape} of dtype {form.dtype} takes {nbytes:,} bytes, {source.left:,} were "
            "found; it is truncated or its header is wrong"
        )
    return nbytes


def _read_elements(store: Store, source: ArraySource, form: Form, advance: Callable[[int], None]) -> _Array:
    """Make an array in the store and read its elements."""
    array = store.empty(*form)
    try:
        with innermost(array).data as memory:
            source.fill(memory, advance)
        source.verify()
    except BaseException:
        del array  # the traceback would keep the array
        raise
    return array


def _read_archive(store: Store, path: str, file: io.FileIO, nbytes: int, progress: Progress) -> dict[str, _Array]:
    """Read the arrays of an .npz, by name. All members are checked before anything is allocated."""
    with parsing(f"{path} is no valid .npz"):
        archive = zipfile.ZipFile(file)
        _check_count(archive, file, nbytes)
    arrays: dict[str, _Array] = {}
    with archive:
        members = _members(path, archive, file, nbytes)
        total = sum(info.file_size for info, _ in members.values())
        try:
            with Shown(path, total, progress) as shown:
                for name, (info, start) in members.items():
                    arrays[name] = _member(store, path, archive, file, info, start, shown.advance)
        except BaseException:
            arrays.clear()  # the traceback would keep them
            raise
    return arrays


def _check_count(archive: zipfile.ZipFile, file: io.FileIO, nbytes: int) -> None:
    """Check that all members were found. A damaged length in the directory hides the members behind it, and zipfile
    does not notice.

    Raises:
        ValueError: members are missing, or the archive does not end where its file does.
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
    """The members with the beginning of their bytes, by the names of the arrays. Each claims a size that `nbytes` can
    hold."""
    members: dict[str, tuple[zipfile.ZipInfo, int]] = {}
    for info in archive.infolist():
        what = f"{path}, member {info.filename!r}"
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(
                f"{what} is compressed by method {info.compress_type}; expected is 0, stored, or 8, deflated"
            )
        with parsing(f"{what} cannot be read"):
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
) -> _Array:
    """Read one array of an archive."""
    what = f"{path}, member {info.filename!r}"
    if info.compress_type != zipfile.ZIP_STORED:
        with archive.open(info) as member:  # zipfile compares the checksum
            return _member_array(store, ArraySource(what, cast("Readable", member), info.file_size), advance)
    file.seek(start)  # past zipfile, which would read into bytes objects of its own
    return _member_array(store, ArraySource(what, file, info.file_size, crc=info.CRC), advance)


def _member_array(store: Store, source: ArraySource, advance: Callable[[int], None]) -> _Array:
    """Read the array of a member. The member must hold one .npy and nothing else: otherwise its checksum, which covers
    the whole member, could not be compared."""
    claimed = source.left or 0
    form = _read_header(source)
    nbytes = _claimed_nbytes(source, form)
    if nbytes != source.left:
        raise ValueError(
            f"{source.what}: shape {form.shape} of dtype {form.dtype} takes {nbytes:,} bytes, "
            f"{source.left or 0:,} were found"
        )
    advance(claimed - nbytes)
    return _read_elements(store, source, form, advance)


def load(
    path: str | os.PathLike[str],
    *,
    dtype: npt.DTypeLike | None = None,
    shape: Shape | None = None,
    offset: SupportsIndex = 0,
    progress: Progress = None,
) -> Any:
    """Read the arrays of a file into the store, so that passing them copies nothing. The first bytes tell the kind of
    file.

    - *.npy*: versions 1.0, 2.0 and 3.0, in C and in Fortran order. Bytes after the array are ignored, as by
      `numpy.load`. `path` may be a pipe, which is read to the end of the array. The size of a file is compared with the
      claim of its header before anything is allocated; a pipe has no size to compare.
    - *.npz*: every member. Stored members (`numpy.savez`) are read into place, deflated members
      (`numpy.savez_compressed`) pass through a buffer of `zipfile`. The checksums are compared.
    - raw: any other file, when `dtype` is given. It holds the elements in C order, from `offset` to its end.

    The function blocks: an async program writes ``await asyncio.to_thread(zc.load, path)``. Any thread may call it.
    Cancelling that await does not end the reading. After an exception nothing stays allocated in the store.

    Args:
        path: path of the file.
        dtype: for raw files only: any dtype of plain bytes, in the file's byte order.
        shape: for raw files only: number of elements along each axis, or an int for one axis. One length may be -1,
            which is inferred. None means one axis with all elements.
        offset: for raw files only: number of bytes before the first element.
        progress: a callable is called with ``(bytes_done, bytes_total)`` at the beginning and after each chunk of some
            MiB; in an .npz the headers of members count as well. True shows one line on stderr (name, percent, GB/s),
            False shows nothing; None shows the line from 256 MiB on, when stderr is a terminal.

    Returns:
        A writable, aligned ndarray in the file's dtype and order. For an .npz a dict of such arrays, by the names of
        the members without ``.npy``.

    Raises:
        NotInitialized: no runtime is running.
        OutOfMemory: the store cannot hold an array.
        OSError: the file is missing, a directory, or cannot be read.
        TypeError: the elements are not plain bytes but Python objects, which are never unpickled, or strings of
            variable width; or an argument has a wrong type.
        ValueError: the file is damaged, truncated, or shrank while it was read; its header is wrong or claims more than
            the file holds; its size does not match `dtype`, `shape` and `offset`; these are given for an .npy or .npz,
            or `dtype` is missing for another file; `shape` or `offset` is negative; an archive has members that are not
            arrays, are encrypted, have the same name, or are compressed by another method than deflating; a pipe holds
            a file other than an .npy.
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
            source = ArraySource(name, file, nbytes, head)
            return _read_array(store, source, _read_header(source), progress)
        if not is_zip and dtype is None:
            raise ValueError(
                f"{name} is neither an .npy nor an .npz: it begins with {head!r}; to read a raw file, pass dtype="
            )
        if nbytes is None:
            raise ValueError(f"{name} is no regular file: only an .npy can be read from a pipe or a device")
        if is_zip:
            return _read_archive(store, name, file, nbytes, progress)
        elements = np.dtype(dtype)
        form = Form(raw_shape(name, nbytes, elements, shape, first), elements, "C")
        file.seek(first)
        return _read_array(store, ArraySource(name, file, nbytes - first), form, progress)


def _beginning(file: io.FileIO) -> bytes:
    """Read as many bytes as the magic of an .npy has, or fewer from a shorter file. A pipe may give them in pieces."""
    head = b""
    while len(head) < len(npy.MAGIC_PREFIX):
        data = file.read(len(npy.MAGIC_PREFIX) - len(head))
        if not data:
            break
        head += data
    return head
