"""An edge of a graph over RDMA, on a machine with a device, next to a bare READ of the same bytes.

::

    python -m benchmarks.graph_rdma                        # on a machine with a device
    python tools/vm.py run --timeout 900 -- python -m benchmarks.graph_rdma --quick      # in a virtual machine

An edge is the time by which a run grows when its value is an array and not an int. The least of all samples counts, as
times in a guest scatter by ten times. Frames, registrations and copies are those of all processes of the graph: an
array needs no frame more than an int, because the frame that names it starts the method, and the release of the array
before rides in the next frame.
"""

from __future__ import annotations

import secrets
import sys
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import uvloop

import zcactor as zc
from benchmarks.bare_verbs import address_from, lists_of, plain, usable, viable
from benchmarks.harness import Measurement, Scale, at_most, exactly, interleave, show
from benchmarks.program import options_of, report
from benchmarks.rdma import End, ProcessPeer
from zcactor.transport.verbs.driver.bindings import NAMES
from zcactor.transport.verbs.peer.pulling import PIECE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Link", "main"]

MIB: Final = 1 << 20
NBYTES: Final = MIB
"""Bytes of the array on the edge."""
TIMES_FRAMES: Final = 1.2
"""Budget of the frames of a run, next to those of a run with ints."""
PASSES: Final = 16
"""Runs that are counted."""

FULL, QUICK = Scale(9, 1.0), Scale(5, 0.25)


@zc.actor
class Link:
    """A part of a graph."""

    def __init__(self) -> None:
        self.array = zc.ones(NBYTES // 8)

    @zc.method
    def array_of(self, value: int) -> Any:
        """An array, for a number."""
        self.array = zc.ones(NBYTES // 8) if value < 0 else self.array
        return self.array

    @zc.method
    def first(self, array: Any) -> float:
        """The first element: proof that the array is here."""
        return float(array[0])

    @zc.method
    def number(self, value: float) -> float:
        """Return the number."""
        return value


async def _graph(first: Any, second: Any) -> Any:
    async with zc.graph() as g:
        g.output(second.bind(first.bind(g.input())))
    return await g.compile()


async def _runs(graph: Any, count: int) -> float:
    before = time.perf_counter()
    for _ in range(count):
        if await graph(1) != 1:
            raise RuntimeError("a run has another result")
    return (time.perf_counter() - before) / count * 1e6


async def _counts(graph: Any, actors: Sequence[Any]) -> list[float]:
    """Frames of a run; and registrations and copied bytes of `PASSES` runs."""

    async def figures() -> list[int]:
        found = [zc.stats(), *[await zc.stats(actor) for actor in actors]]
        return [
            sum(each.frames_sent for each in found), sum(each.registrations for each in found),
            sum(each.bytes_copied for each in found),
        ]  # fmt: skip

    await _runs(graph, PASSES)  # from then on destinations are used again
    idle = await figures()
    before = await figures()  # the frames of asking are in the difference of these two
    await _runs(graph, PASSES)
    after = await figures()
    frames = after[0] - before[0] - (before[0] - idle[0])
    return [frames / PASSES, after[1] - before[1], after[2] - before[2]]


async def edges(binding: str, scale: Scale) -> tuple[dict[str, float], list[float], list[float]]:
    """The least microseconds of runs with an int and with an array, and their counts."""
    config = zc.Config(verbs_binding=binding, sealing="off")  # type: ignore[arg-type]
    async with zc.init(transports=("verbs",), config=config):
        actors: list[Any] = [await Link.spawn() for _ in range(2)]
        maker, reader = actors
        ints, arrays = await _graph(maker.number, reader.number), await _graph(maker.array_of, reader.first)
        count = scale.count(200, least=8)
        subjects = {"int": partial(_runs, ints, count), "array": partial(_runs, arrays, count)}
        times = {name: min(samples) for name, samples in (await interleave(scale.runs, subjects)).items()}
        return times, await _counts(ints, actors), await _counts(arrays, actors)


async def read(binding: str, scale: Scale) -> float:
    """The microseconds of a bare READ of the same bytes, the least of some."""
    token = secrets.token_bytes(32)
    with ExitStack() as stack:
        peer, end = ProcessPeer(binding, token, stack), End(usable(binding), token, stack)
        about = await peer.ask({"do": "start"})
        await end.start()
        wire = end.open_wire(64)
        answer = await peer.ask({"do": "wire", "wire": plain(wire.address), "nbytes": 64})
        wire.connect(address_from(answer["wire"]), echoes=False)
        piece = min(end.engine.found.port.max_msg_sz, PIECE_NBYTES)
        lists = lists_of(end.arena.address, end.region.lkey, about["arena"], about["rkey"], NBYTES, piece)
        times = []
        for _ in range(scale.count(200, least=8)):
            before = time.perf_counter()
            await wire.read(lists)
            times.append(time.perf_counter() - before)
        await end.endpoint.aclose()
    return min(times) * 1e6


def measure(binding: str, scale: Scale) -> list[Measurement]:
    """Measure the edge, and the READ."""
    times, ints, arrays = zc.run(edges(binding, scale))
    bare = uvloop.run(read(binding, scale))
    name = f"graph edge of {NBYTES // MIB} MiB"
    return [
        Measurement("graph-rdma", name, times["array"] - times["int"], "us", bare, "a bare READ", None, scale.runs,
                    "least"),
        Measurement("graph-rdma", f"{name}: frames of a run", arrays[0], "", ints[0], "with ints",
                    at_most(TIMES_FRAMES)),
        Measurement("graph-rdma", f"{name}: memory regions registered", arrays[1], "", budget=exactly(0)),
        Measurement("graph-rdma", f"{name}: bytes copied", arrays[2], "B", budget=exactly(0)),
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Measure and show.

    Returns:
        0; 1 with ``--strict`` when a budget does not hold; 2 on a machine without a device.
    """
    parser = options_of("benchmarks.graph_rdma", "An edge of a graph over RDMA, next to a READ.")
    parser.add_argument("--binding", choices=NAMES, help="default: the first that finds a device")
    options = parser.parse_args(arguments)
    device = viable(options.binding)
    if device is None:
        return 2
    found = measure(device[0].name, QUICK if options.quick else FULL)
    show("An edge of a graph through the device", found)
    return report(options, found)


if __name__ == "__main__":
    from benchmarks import graph_rdma  # not as __main__, whose actors a worker would look for in vain

    sys.exit(graph_rdma.main())
