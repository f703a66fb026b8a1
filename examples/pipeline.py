"""A pipeline of actors: references as promises, so that no array passes through the program that wires them up.

    python examples/pipeline.py --images 8

Every call is sent at once; no result is awaited before the end. A stage starts an image when the stage before it has
finished that image, and gets the array directly from that stage, so the stages work on different images at the same
time.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt

import zcactor as zc

Image = npt.NDArray[np.float32]


@zc.actor
class Source:
    """The source of images."""

    @zc.method
    def read(self, number: int) -> Image:
        """An image of 8 MiB, born in the store."""
        return np.random.default_rng(number).random((1024, 2048), dtype=np.float32)


@zc.actor
class Blur:
    """A stage that makes a new array of each one it gets."""

    @zc.method
    def apply(self, image: Image) -> Image:
        """The mean of each pixel and its two neighbours in the row. `image` is read-only: the source owns it."""
        result = image + np.roll(image, 1, axis=1) + np.roll(image, -1, axis=1)
        result /= 3
        return result


@zc.actor
class Statistics:
    """The last stage: large in, small out."""

    @zc.method
    def describe(self, image: Image) -> tuple[float, float]:
        """The mean and the standard deviation."""
        return float(image.mean()), float(image.std())


async def main(images: int) -> None:
    """Run the whole program."""
    async with zc.init():
        source, blur, statistics = await Source.spawn(), await Blur.spawn(), await Statistics.spawn()
        results = [statistics.describe(blur.apply(source.read(number))) for number in range(images)]
        print(f"{images} images are on their way, {sum(ref.done() for ref in results)} are done")
        for number, (mean, deviation) in enumerate(await asyncio.gather(*results)):
            print(f"image {number}: mean {mean:.4f}, standard deviation {deviation:.4f}")

        actors: list[Any] = [source, blur, statistics]
        stages = await asyncio.gather(*map(zc.stats, actors))
        mapped, copied = sum(each.bytes_mapped for each in stages), sum(each.bytes_copied for each in stages)
        print(f"bytes mapped by the stages: {mapped:,}; by this process: {zc.stats().bytes_mapped}")
        print(f"bytes copied: {copied + zc.stats().bytes_copied}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Chain actors by references.")
    parser.add_argument("--images", type=int, default=8)
    zc.run(main(parser.parse_args().images))
