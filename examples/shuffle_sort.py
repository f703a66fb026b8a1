"""A distributed sort: random keys are shuffled by ranges between actors, and each actor sorts its own range.

    python examples/shuffle_sort.py --size 1GiB --workers 2
    python examples/shuffle_sort.py --size 64MiB --json     # ends with a line of JSON

Each worker divides its keys by their highest bits. Its parts stay in its store, the worker that they are for maps them,
and copies each key once: into the array that it sorts. This program sees references only.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import time
from typing import Any

import numpy as np
import numpy.typing as npt

import zcactor as zc

Keys = npt.NDArray[np.uint64]

BLOCK = 1 << 18
"""Keys that are divided at a time: 2 MiB, which a second-level cache holds, so no index of all keys is needed."""


def divide(keys: Keys, count: int) -> list[Keys]:
    """The keys of each of `count` equal ranges, in the order in which they lie in `keys`."""
    blocks = [keys[start : start + BLOCK] for start in range(0, len(keys), BLOCK)]
    scale = np.uint64(count)

    def ranges(block: Keys) -> npt.NDArray[Any]:
        """The range of each key: sorting 8 or 16 bits is one or two passes of a radix sort."""
        number = (block >> np.uint64(32)) * scale >> np.uint64(32)
        return number.astype(np.uint8 if count <= 256 else np.uint16)

    sizes = sum((np.bincount(ranges(block), minlength=count) for block in blocks), np.zeros(count, np.int64))
    parts: list[Keys] = [np.empty(size, np.uint64) for size in sizes]
    filled = [0] * count
    for block in blocks:
        which = ranges(block)
        ordered = block[np.argsort(which, kind="stable")]
        ends = np.cumsum(np.bincount(which, minlength=count)).tolist()
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            parts[number][filled[number] : filled[number] + end - start] = ordered[start:end]
            filled[number] += end - start
    return parts


def checksum(keys: Keys) -> int:
    """The sum of all keys, modulo 2**64."""
    return int(keys.sum(dtype=np.uint64))


@zc.actor
class Sorter:
    """A worker: it makes keys, divides them for all, and sorts the range that is its own."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.keys: Keys = np.empty(0, np.uint64)
        self.seconds = 0.0

    @zc.method
    def generate(self, count: int) -> int:
        """Make `count` random keys. Returns their checksum."""
        self.keys = np.random.default_rng(self.seed).integers(0, 2**64, count, dtype=np.uint64)
        return checksum(self.keys)

    @zc.method
    def partition(self, workers: int) -> list[Keys]:
        """The keys by the worker that sorts them. They are not kept here as well."""
        started = time.perf_counter()
        keys, self.keys = self.keys, np.empty(0, np.uint64)
        parts = divide(keys, workers)
        self.seconds = time.perf_counter() - started
        return parts

    @zc.method
    def merge(self, parts: list[Keys]) -> None:
        """Take in the keys of this worker's range, which still lie where they were made."""
        self.keys = np.concatenate(parts)

    @zc.method
    def partition_seconds(self) -> float:
        """The time that dividing took."""
        return self.seconds

    @zc.method
    def sort(self) -> None:
        """Sort in place."""
        self.keys.sort()

    @zc.method
    def check(self) -> tuple[bool, int, int, int]:
        """Whether the keys are sorted, the least and the greatest of them, and their checksum."""
        keys = self.keys
        if not len(keys):
            return True, 0, 0, 0
        rising = all(bool((block[:-1] <= block[1:]).all()) for block in overlapping(keys))
        return rising, int(keys[0]), int(keys[-1]), checksum(keys)


def overlapping(keys: Keys) -> list[Keys]:
    """Blocks of keys, each with the first key of the next one."""
    return [keys[start : start + BLOCK + 1] for start in range(0, len(keys), BLOCK)]


async def run(nbytes: int, workers: int) -> dict[str, Any]:
    """Shuffle and sort `nbytes` of keys. Returns the figures."""
    async with zc.init():
        sorters = [await Sorter.spawn(seed) for seed in range(workers)]
        count = nbytes // 8 // workers
        before = await zc.get([sorter.generate(count) for sorter in sorters])

        started = time.perf_counter()
        await zc.get(await zc.shuffle(sorters, "partition", "merge"))
        shuffled = time.perf_counter() - started
        partition = max(await zc.get([sorter.partition_seconds() for sorter in sorters]))

        started = time.perf_counter()
        await zc.get([sorter.sort() for sorter in sorters])
        sort = time.perf_counter() - started

        found = await zc.get([sorter.check() for sorter in sorters])
        filled = [each for each in found if each[1] or each[2]]
        ascending = all(one[2] <= other[1] for one, other in itertools.pairwise(filled))
        stats = [zc.stats(), *await asyncio.gather(*map(zc.stats, sorters))]
        return {
            "nbytes": count * 8 * workers,
            "partition_s": partition,
            "exchange_s": shuffled - partition,
            "sort_s": sort,
            "sorted": ascending and all(each[0] for each in found),
            "checksum_ok": sum(before) % 2**64 == sum(each[3] for each in found) % 2**64,
            "bytes_copied": sum(each.bytes_copied for each in stats),
        }


def parse_size(text: str) -> int:
    """A size: ``"1GiB"``, ``"64MiB"`` or plain bytes."""
    found = re.fullmatch(r"(\d+) ?([KMG]iB)?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for instance 1GiB, 64MiB or 1048576")
    size = int(found[1]) << {None: 0, "KiB": 10, "MiB": 20, "GiB": 30}[found[2]]
    if size < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 1MiB: too small to show anything")
    return size


def parse_workers(text: str) -> int:
    """A number of workers."""
    if not text.isdecimal() or not 1 <= int(text) <= 256:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of workers from 1 to 256")
    return int(text)


def main() -> None:
    """Read the options, run, and print the figures."""
    parser = argparse.ArgumentParser(description="Sort random keys by a shuffle.")
    parser.add_argument("--size", type=parse_size, default="1GiB", help="of all keys: 1GiB (default), 64MiB, ...")
    parser.add_argument("--workers", type=parse_workers, default=2, help="number of actors (default: 2)")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    options = parser.parse_args()
    told = zc.run(run(options.size, options.workers))
    mib = told["nbytes"] / 2**20
    print(f"{mib:,.0f} MiB of keys between {options.workers} workers")
    for name in ("partition", "exchange", "sort"):
        print(f"  {name:<10} {told[f'{name}_s']:8.3f} s  {mib / told[f'{name}_s']:10,.0f} MiB/s")
    print(f"sorted: {told['sorted']}, checksums match: {told['checksum_ok']}")
    print(f"bytes copied by zcactor: {told['bytes_copied']:,}")
    if options.json:
        print(json.dumps(told))


if __name__ == "__main__":
    main()
