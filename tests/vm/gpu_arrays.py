"""A program whose processes pass arrays on fake GPUs to each other, and reach each other by RDMA only."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import zcactor as zc
from tests.vm.guest_actors import MIB, Shard

NBYTES = 4 * MIB + 12_345
"""Bytes of an array: two pieces, the last of which is not whole."""
HOST = "through host memory"


def _moved(before: zc.Stats, after: zc.Stats) -> dict[str, int]:
    """The bytes that came to a process, and the number of arrays that it copied through host memory."""
    then, now = (stats.copies[HOST].count if HOST in stats.copies else 0 for stats in (before, after))
    return {
        "read": after.bytes_read - before.bytes_read,
        "received": after.bytes_received - before.bytes_received,
        "mapped": after.bytes_mapped - before.bytes_mapped,
        HOST: now - then,
    }


async def main() -> None:
    """Print the facts as a JSON line."""
    async with zc.init(config=zc.Config(gpu="fake"), transports=("verbs",), store_capacity=128 * MIB):
        shard: Any = await Shard.spawn(8)
        path = (await zc.explain(shard)).device
        assert path is not None
        before = [zc.stats(), await zc.stats(shard)]
        there = await shard.total(zc.full(NBYTES, 3, "u1", device="cuda"))
        made = await shard.made(NBYTES, 5)
        here = type(made).__name__, int(zc.gpu.to_host(made).sum(dtype="u8"))
        after = [zc.stats(), await zc.stats(shard)]
        print(
            json.dumps(
                {
                    "path": path.path,
                    "proven": path.proven,
                    "rejected": dict(path.rejected),
                    "nbytes": NBYTES,
                    "there": there,
                    "here": here,
                    "moved": [_moved(then, now) for then, now in zip(before, after, strict=True)],
                }
            )
        )


if __name__ == "__main__":
    asyncio.run(main())
