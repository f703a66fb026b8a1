"""A pipeline over images as a compiled graph: one actor loads, two filter side by side, one joins.

    python examples/pipeline_graph.py --items 50
    python examples/pipeline_graph.py --items 10 --json     # ends with a line of JSON

Each image has 8 MiB and is made once. The filters map it where it lies, and the joining actor maps what they have made:
no byte is copied by zcactor, and this program sees a number per image. Several images are in the pipeline at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt

import zcactor as zc

Image = npt.NDArray[np.float32]
SIDE = 1448
"""Pixels in a row and a column: 8 MiB of float32."""


@zc.actor
class Camera:
    """The source of images."""

    @zc.method
    def take(self, number: int) -> Image:
        """An image: a gradient that moves."""
        row = np.arange(SIDE, dtype=np.float32) + number
        return row[:, None] * np.float32(0.5) + row[None, :]


@zc.actor
class Filter:
    """One of the filters."""

    @zc.method
    def edges(self, image: Image) -> Image:
        """The differences between neighbours in a row."""
        out = np.zeros_like(image)
        np.subtract(image[:, 1:], image[:, :-1], out=out[:, 1:])
        return out

    @zc.method
    def darker(self, image: Image) -> Image:
        """Half the brightness."""
        return image * np.float32(0.5)


@zc.actor
class Joiner:
    """The end of the pipeline."""

    @zc.method
    def join(self, edges: Image, darker: Image) -> float:
        """The mean brightness of the image with its edges."""
        return float((edges + darker).mean(dtype=np.float64))


@zc.actor
class Empty:
    """An actor that does nothing, for the time of a hop alone."""

    @zc.method(inline=True)
    def same(self, value: int) -> int:
        """The value."""
        return value


def expected(number: int) -> float:
    """The mean that the pipeline has to give."""
    row = np.arange(SIDE) + number
    return 1.5 * float(row.mean()) * 0.5 + (SIDE - 1) / SIDE


async def hop_us(runs: int) -> float:
    """Microseconds by which each further actor lengthens a run: the pipeline without any work, in medians."""
    ends = [await Empty.spawn() for _ in range(2)]
    medians = []
    for length in (2, 10):
        async with zc.graph() as g:
            node = g.input()
            for index in range(length):
                node = ends[index % 2].same.bind(node)
            g.output(node)
        run = await g.compile()
        await run(0)
        times = []
        for number in range(runs):
            started = time.perf_counter()
            await run(number)
            times.append(time.perf_counter() - started)
        medians.append(statistics.median(times) * 1e6)
        await run.close()
    return (medians[1] - medians[0]) / 8


async def run_all(items: int) -> dict[str, Any]:
    """Run the pipeline over `items` images. Returns the figures."""
    async with zc.init():
        camera, left, right, joiner = (
            await Camera.spawn(),
            await Filter.spawn(),
            await Filter.spawn(),
            await Joiner.spawn(),
        )
        async with zc.graph() as g:
            image = camera.take.bind(g.input())
            g.output(joiner.join.bind(left.edges.bind(image), right.darker.bind(image)))
        run = await g.compile()
        started, number = time.perf_counter(), 0
        async for mean in run.map(range(items)):
            if abs(mean - expected(number)) > 1e-3 * expected(number):
                raise SystemExit(f"image {number} has mean {mean}, and should have {expected(number)}")
            number += 1
        taken = time.perf_counter() - started
        print(run.explain())
        stats = [zc.stats(), *[await zc.stats(actor) for actor in (camera, left, right, joiner)]]
        await run.close()
        return {
            "items": number,
            "hop_us": await hop_us(300),
            "bytes_copied": sum(each.bytes_copied for each in stats),
            "seconds": taken,
        }


def parse_items(text: str) -> int:
    """A number of images."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of images; give 1 or more")
    return int(text)


def main() -> None:
    """Read the options, run, and print the figures."""
    parser = argparse.ArgumentParser(description="Run a pipeline over images as a compiled graph.")
    parser.add_argument("--items", type=parse_items, default=50, help="number of images (default: 50)")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    options = parser.parse_args()
    told = zc.run(run_all(options.items))
    print(f"{told['items']} images of 8 MiB in {told['seconds']:.2f} s, {told['items'] / told['seconds']:.1f} a second")
    print(f"a hop without work: {told['hop_us']:.1f} us")
    print(f"bytes copied by zcactor: {told['bytes_copied']:,}")
    if options.json:
        print(json.dumps({name: told[name] for name in ("items", "hop_us", "bytes_copied")}))


if __name__ == "__main__":
    main()
