"""The copies: every byte of an array, and of a payload above the eager limit, that is copied in this process is counted
here, with a reason.

An array that is shared is not copied at all; what cannot be shared (an array outside the store, for one) is copied
once. The counters say so: of arrays they equal what a tracing memcpy would count. Other values are made into a payload
and taken out of it; of a payload above the eager limit its way into the store counts, and its way out.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from zcactor.objectstore.parallel import PARALLEL_NBYTES, in_parallel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["CopyCount", "CopyCounter"]


@dataclass(frozen=True, slots=True)
class CopyCount:
    """How often one reason made a copy, and how many bytes that was."""

    count: int
    nbytes: int


class CopyCounter:
    """Makes the payload copies of one process and counts them. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, list[int]] = {}  # by reason: copies, bytes
        self._known: dict[int, tuple[ref[NDArray[Any]], ref[Any]]] = {}

    def snapshot(self) -> Mapping[str, CopyCount]:
        """What was copied so far, by reason: a new mapping that does not change any more."""
        with self._lock:
            return {reason: CopyCount(count, nbytes) for reason, (count, nbytes) in self._counts.items()}

    def copy_into(self, destination: NDArray[Any], source: NDArray[Any], reason: str) -> None:
        """Copy the elements of `source` to `destination` and count ``destination.nbytes`` bytes.

        Contiguous arrays of at least 8 MiB are copied by several threads, as bytes (padding included).

        Args:
            destination: a writable array; any strides.
            source: an array of the same shape; any strides, and any dtype that casts to `destination`'s safely or
                within its kind. Must not overlap `destination`.
            reason: what the copy was for: the key in `snapshot`.

        Raises:
            ValueError: the shapes differ, or `destination` is read-only.
            TypeError: the dtypes do not cast.
        """
        if destination.shape != source.shape:
            raise ValueError(f"cannot copy an array of shape {source.shape} into one of shape {destination.shape}")
        nbytes = destination.nbytes
        if nbytes < PARALLEL_NBYTES or not _same_layout(destination, source):
            np.copyto(destination, source)
        elif destination.flags.c_contiguous:
            _copy_flat(_flat(destination), _flat(source))
        else:
            _copy_flat(_flat(destination.T), _flat(source.T))
        self.count(reason, nbytes)

    def copy_all(self, pairs: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]], reason: str) -> None:
        """Copy many pieces and count each: several threads share them when all together have at least 8 MiB.

        Args:
            pairs: destination and source, both one-dimensional, contiguous and of one length; as for `copy_into`.
            reason: what the copies were for: the key in `snapshot`.
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
            buffer: any contiguous buffer of exactly as many bytes, whatever its format; not within `destination`.
            reason: what the copy was for: the key in `snapshot`.

        Raises:
            ValueError: the lengths differ, `destination` is read-only, or `buffer` is an array with gaps.
            BufferError: `buffer` is another buffer with gaps.
        """
        self.copy_into(destination, np.frombuffer(buffer, np.uint8), reason)

    def remember(self, array: NDArray[Any], block: Any) -> None:
        """Note that `block` holds a copy of `array`, which the caller has made read-only; see `known`.

        Both may die. An array that does not own its memory is not noted: whoever does may still write to it.

        Args:
            array: what was copied.
            block: what holds the copy; anything that takes weak references.
        """
        if not array.flags.owndata:
            return
        known, key = self._known, id(array)
        # Runs before the array's memory is given back, so the id cannot belong to another array yet.
        known[key] = ref(array, lambda _: known.pop(key, None)), ref(block)

    def known(self, array: NDArray[Any]) -> Any:
        """What holds a copy of `array` already; None when nothing does, or `array` can be written to.

        A flag that was switched on and off again, or a view that was made before, leaves no trace: the caller compares.
        """
        entry = self._known.get(id(array))
        if entry is None or entry[0]() is not array or array.flags.writeable:
            return None
        return entry[1]()

    def count(self, reason: str, nbytes: int) -> None:
        """Count a copy that was made by a library: it encrypted or decrypted, or took values out of a payload."""
        with self._lock:
            counts = self._counts.get(reason)
            if counts is None:
                self._counts[reason] = [1, nbytes]
            else:
                counts[0] += 1
                counts[1] += nbytes


def _same_layout(destination: NDArray[Any], source: NDArray[Any]) -> bool:
    """Whether copying the elements is copying the bytes, from the first to the last."""
    ours, theirs = destination.flags, source.flags
    return (
        destination.dtype == source.dtype
        and not destination.dtype.hasobject
        and ((ours.c_contiguous and theirs.c_contiguous) or (ours.f_contiguous and theirs.f_contiguous))
    )


def _flat(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _copy_flat(destination: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    def work(start: int, stop: int) -> None:
        destination[start:stop] = source[start:stop]

    in_parallel(work, destination.nbytes)
