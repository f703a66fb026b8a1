"""Files of any kind, recognised by their first bytes."""

from __future__ import annotations

import operator
import os
import stat
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from zcactor.loading.archive import ZIP_MAGICS, read_archive
from zcactor.loading.array import read_array
from zcactor.loading.form import Form, Shape, raw_shape
from zcactor.loading.header import read_header
from zcactor.loading.source import ArraySource
from zcactor.process.context import current

if TYPE_CHECKING:
    import io

    from zcactor.loading.progress import Progress

__all__ = ["load"]


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
        is_npy, is_zip = head == npy.MAGIC_PREFIX, head.startswith(ZIP_MAGICS)
        if (is_npy or is_zip) and (dtype is not None or shape is not None or first):
            raise ValueError(
                f"{name} is {'an .npy' if is_npy else 'an .npz'}, which says itself what it holds: dtype, shape and "
                "offset are for raw files"
            )
        if is_npy:
            source = ArraySource(name, file, nbytes, head)
            return read_array(store, source, read_header(source), progress)
        if not is_zip and dtype is None:
            raise ValueError(
                f"{name} is neither an .npy nor an .npz: it begins with {head!r}; to read a raw file, pass dtype="
            )
        if nbytes is None:
            raise ValueError(f"{name} is no regular file: only an .npy can be read from a pipe or a device")
        if is_zip:
            return read_archive(store, name, file, nbytes, progress)
        elements = np.dtype(dtype)
        form = Form(raw_shape(name, nbytes, elements, shape, first), elements, "C")
        file.seek(first)
        return read_array(store, ArraySource(name, file, nbytes - first), form, progress)


def _beginning(file: io.FileIO) -> bytes:
    """Read as many bytes as the magic of an .npy has, or fewer from a shorter file. A pipe may give them in pieces."""
    head = b""
    while len(head) < len(npy.MAGIC_PREFIX):
        data = file.read(len(npy.MAGIC_PREFIX) - len(head))
        if not data:
            break
        head += data
    return head
