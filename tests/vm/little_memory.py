"""A program that may lock hardly any memory: prints its experience with RDMA as one JSON object."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

import zcactor as zc
from zcactor.transport.verbs.device.viability import viability
from zcactor.transport.verbs.driver.bindings import bindings


@zc.actor
class Doubler:
    def double(self, array: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return array * 2


async def main() -> None:
    """Make one call with an array each way, and print the facts about the path."""
    async with zc.init(transports=("verbs", "tcp"), store_capacity=64 << 20):
        doubler: Any = await zc.spawn(Doubler)
        doubled = await doubler.double(np.ones(1 << 17))
        path = await zc.explain(doubler)
        facts = {
            "value": float(doubled[-1]),
            "transport": path.transport,
            "rejected": dict(path.rejected),
            "received": zc.stats().bytes_received,
            "read": zc.stats().bytes_read,
        }
    try:
        async with zc.init(transports=("verbs",), store_capacity=64 << 20):
            await zc.spawn(Doubler)
    except (zc.ZcactorError, OSError) as error:
        facts["alone"] = f"{type(error).__name__}: {error}"
    facts["viability"] = str(viability(bindings(), arena_nbytes=64 << 20))
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    zc.run(main())
