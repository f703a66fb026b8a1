"""The count of copies, with their reasons: every byte of an array, and of a payload above the eager limit, that is
copied in this process.

A shared array is not copied at all. An array that cannot be shared (one outside the store, for instance) is copied
once. For arrays the counters equal the result of a tracing memcpy. Other values are made into a payload and taken out
of it; for a payload above the eager limit its way into the store counts, and its way out.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from zcactor.errors import CopyWarning
from zcactor.lazy_numpy import np
from zcactor.native import hot
from zcactor.objectstore.bulk_copy import copy_in_bulk
from zcactor.objectstore.parallel import PARALLEL_NBYTES, in_parallel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["THROUGH_HOST", "CopyCount", "CopyCounter"]

LARGE_NBYTES: Final = 16 << 20
"""Bytes of the copies that are warned of. One takes 2 ms, as long as all the rest of a call several times over."""
OFTEN: Final = 3
"""Number of such copies by one line after which the program hears of them: one or two may be its start."""
_PACKAGE: Final = str(Path(__file__).parent.parent) + os.sep
THROUGH_HOST: Final = "through host memory"
"""The reason of copies of arrays on GPUs where GPU memory cannot be mapped, at either end."""


@dataclass(frozen=True, slots=True)
class CopyCount:
    """Number of copies made for one reason, and their bytes."""

    count: int
    nbytes: int


class CopyCounter:
    """The payload copies of one process, made and counted here. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer that passes arrays may run inside it
        self._counts: dict[str, list[int]] = {}  # by reason: copies, bytes
        self._on_loop: dict[str, list[int]] = {}
        self._known: dict[tuple[int, int], tuple[ref[Any], ref[Any]]] = {}  # the copy and its source, by memory
        self._large: dict[tuple[str, int], int] = {}  # by place

    def snapshot(self) -> Mapping[str, CopyCount]:
        """The copies made so far, by reason: a new mapping, which does not change any more."""
        with self._lock:
            found = {reason: CopyCount(count, nbytes) for reason, (count, nbytes) in self._counts.items()}
        for reason, (count, nbytes) in list(self._on_loop.items()):
            if count:
                before = found.get(reason, CopyCount(0, 0))
                found[reason] = CopyCount(before.count + count, before.nbytes + nbytes)
        return found

    def on_loop(self, reason: str) -> list[int]:
        """Copies of a reason, and their bytes, that the loop's thread alone adds to: without a call and a lock."""
        return self._on_loop.setdefault(reason, [0, 0])

    def copy_into(self, destination: NDArray[Any], source: NDArray[Any], reason: str) -> None:
        """Copy the elements of `source` to `destination` and count ``destination.nbytes`` bytes.

        Contiguous arrays of at least 8 MiB are copied by several threads, as bytes (padding included).

        Args:
            destination: a writable array; any strides.
            source: an array of the same shape, with any strides, and any dtype that casts to `destination`'s safely or
                within its kind. It must not overlap `destination`.
            reason: the purpose of the copy, which is the key in `snapshot`.

        Raises:
            ValueError: the shapes differ, or `destination` is read-only.
            TypeError: the dtypes do not cast.
        """
        if destination.shape != source.shape:
            raise ValueError(f"cannot copy an array of shape {source.shape} into one of shape {destination.shape}")
        nbytes = destination.nbytes
        if nbytes < PARALLEL_NBYTES or not _same_layout(destination, source):
            np.copyto(destination, source)
        elif not destination.flags.writeable:
            raise ValueError("the array to copy into is read-only")
        else:
            copy_in_bulk(hot.address(destination), hot.address(source), nbytes)
        self.count(reason, nbytes)

    def copy_all(self, pairs: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]], reason: str) -> None:
        """Copy many pieces and count each. Several threads share the work from 8 MiB in total on.

        Args:
            pairs: destination and source of each piece, both one-dimensional, contiguous and of one length; as for
                `copy_into`.
            reason: the purpose of the copies, which is the key in `snapshot`.
        """
        starts = [0, *accumulate(destination.size for destination, _ in pairs)]

        def work(start: int, stop: int) -> None:
            for index in range(bisect_right(starts, start) - 1, bisect_left(starts, stop)):
                destination, source = pairs[index]
                first, last = max(start - starts[index], 0), stop - starts[index]
                destination[first:last] = source[first:last]

        in_parallel(work, starts[-1])
        for destination, _ in pairs:
            self.count(reason, destination.nbytes)

    def copy_bytes(
        self, destination: NDArray[np.uint8], buffer: bytes | bytearray | memoryview | NDArray[Any], reason: str
    ) -> None:
        """Copy the bytes of `buffer` to `destination` and count them.

        Args:
            destination: a writable, contiguous, one-dimensional array.
            buffer: a contiguous buffer of exactly as many bytes, of any format; not within `destination`.
            reason: the purpose of the copy, which is the key in `snapshot`.

        Raises:
            ValueError: the lengths differ, `destination` is read-only, or `buffer` is an array with gaps.
            BufferError: `buffer` is another buffer with gaps.
        """
        self.copy_into(destination, np.frombuffer(buffer, np.uint8), reason)

    def remember(self, address: int, nbytes: int, block: Any, source: Any) -> None:
        """Note that `block` holds a copy of so many bytes at `address`; see `known`. Neither object is kept alive.

        Args:
            address, nbytes: the bytes that were copied.
            block: the object that holds the copy; its type must support weak references.
            source: the object that holds the copied memory. With its end the copy is forgotten: whether the allocator
                gives the same memory to the next array is nothing that a program should notice.
        """
        known, key = self._known, (address, nbytes)

        def forget(gone: ref[Any]) -> None:
            if gone in known.get(key, ()):
                del known[key]

        known[key] = ref(block, forget), ref(source, forget)

    def known(self, address: int, nbytes: int) -> Any:
        """The living object that got a copy of these bytes, or None. They may be others since: the caller compares."""
        found = self._known.get((address, nbytes))
        return None if found is None else found[0]()

    def warn_of_large(self, nbytes: int) -> None:
        """Issue a `CopyWarning` before the `OFTEN`-th copy of at least `LARGE_NBYTES` that one line of the program has
        caused, once a line.

        Raises:
            CopyWarning: the program turns warnings into errors. Nothing was copied.
        """
        if nbytes < LARGE_NBYTES:
            return
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            level, frame = level + 1, frame.f_back
        place = frame.f_code.co_filename, frame.f_lineno
        with self._lock:
            count = self._large[place] = self._large.get(place, 0) + 1
        if count == OFTEN:
            warnings.warn(
                f"arrays of {LARGE_NBYTES >> 20} MiB and more from outside the store are passed here again and again, "
                f"and this is copy {OFTEN}, of {nbytes >> 20} MiB: make them after zc.init(), or copy each into the "
                "store once, by x = zc.asarray(x)",
                CopyWarning,
                stacklevel=level,
            )

    def count(self, reason: str, nbytes: int, *, begins: bool = True) -> None:
        """Count a copy that a library made while it encrypted, decrypted, or took values out of a payload; or a GPU.

        Args:
            reason: the purpose of the copy, which is the key in `snapshot`.
            nbytes: bytes that were copied.
            begins: False for a further piece of a copy that has been counted.
        """
        with self._lock:
            counts = self._counts.setdefault(reason, [0, 0])
            counts[0] += begins
            counts[1] += nbytes


def _same_layout(destination: NDArray[Any], source: NDArray[Any]) -> bool:
    """Whether copying the elements equals copying the bytes from the first to the last."""
    ours, theirs = destination.flags, source.flags
    return (
        destination.dtype == source.dtype
        and not destination.dtype.hasobject
        and ((ours.c_contiguous and theirs.c_contiguous) or (ours.f_contiguous and theirs.f_contiguous))
    )
