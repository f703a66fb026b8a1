"""Copies between arrays of any strides, as the rows that a driver copies."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["MOST_ROWS", "Rows", "few_rows", "rows_of"]

MOST_ROWS: Final = 256
"""Copies that are queued for one array, at most: each takes the driver microseconds. With more it is faster to copy all
bytes between the first and the last element to the host and to pick the elements there."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One copy, for `zcactor.device.driver.GpuDriver.copy`."""

    destination: int
    """Bytes from the first element of the destination."""
    source: int
    count: int
    nbytes: int
    strides: tuple[int, int]


def rows_of(shape: Sequence[int], into: Sequence[int], out: Sequence[int], itemsize: int) -> Iterator[Rows]:
    """The copies that bring all elements of one array into another. Axes that are contiguous in both are one row, and
    the axis around them is the rows of one copy. Each further axis, and one that goes backwards, is a copy an element.

    Args:
        shape: elements along each axis.
        into: strides in bytes of the destination.
        out: the same of the source.
        itemsize: bytes of an element.
    """
    if 0 in shape:
        return
    axes = [(length, to, from_) for length, to, from_ in zip(shape, into, out, strict=True) if length > 1]
    axes.sort(key=lambda axis: -abs(axis[1]))
    nbytes, count, strides = itemsize, 1, (itemsize, itemsize)
    while axes and axes[-1][1:] == (nbytes, nbytes):
        nbytes *= axes.pop()[0]
    if axes and min(axes[-1][1:]) >= nbytes:
        length, *last = axes.pop()
        count, strides = length, (last[0], last[1])
    for place in product(*(range(length) for length, _, _ in axes)):
        yield Rows(
            sum(at * to for at, (_, to, _) in zip(place, axes, strict=True)),
            sum(at * from_ for at, (_, _, from_) in zip(place, axes, strict=True)),
            count,
            nbytes,
            strides,
        )


def few_rows(shape: Sequence[int], into: Sequence[int], out: Sequence[int], itemsize: int) -> list[Rows] | None:
    """The result of `rows_of` as a list; None where there are more than `MOST_ROWS`."""
    found = list(islice(rows_of(shape, into, out, itemsize), MOST_ROWS + 1))
    return None if len(found) > MOST_ROWS else found
