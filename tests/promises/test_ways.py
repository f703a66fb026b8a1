"""Each way to make an array, in each way to pass it, gives the receiver the bytes of the moment of the call."""

from __future__ import annotations

import pytest
import uvloop

from tests.promises.recipes import IDIOMS
from tests.promises.snapshots import play, world

pytestmark = pytest.mark.slow
LOOP_FACTORIES = {"uvloop": uvloop.new_event_loop}

PARTS = {"whole": (), "slice": ("x[: n // 2]",), "column": ("x[..., 0]",), "transposed": ("x.T",)}
"""The parts of an array that are passed."""
WAYS = {
    "argument": "0: pass 1 0 0 0 0, write 0 -1 41, check, pass 1 0 0 1 99, pass 2 0 1 0 0",
    "result": "1: give 1 0 0 0, write 1 -1 41, check, read 2 0, give 1 3 0 1, read 0 0",
    "put": "0: put 0 0, write 0 -1 41, read 1 0, put 0 0, write 0 -1 50, read 2 1, read 3 0",
}
"""The place of the array, 0 for the driver, and the steps that follow."""


def _words(step: str) -> list[object]:
    kind, *numbers = step.split()
    return [kind, *map(int, numbers)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transport", ["local", "tcp"])
async def test_each_way_to_make_an_array_gives_snapshots(transport: str, way: str) -> None:
    place, steps = int(WAYS[way][0]), [tuple(_words(each)) for each in WAYS[way][2:].split(",")]
    wrong = []
    async with world(transport) as actors:
        for idiom in IDIOMS:
            for what, parts in PARTS.items():
                taking = [("part", place, 0, part) for part in parts]
                said = await play(actors, [("make", place, idiom, 200_000, 0, 7), *taking, *steps])
                wrong += [f"{idiom}, {what}: {said}"] * bool(said)
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:20])
