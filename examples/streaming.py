"""Streams: an async generator in one process, read in another, never more than a few items ahead of its reader.

    python examples/streaming.py --frames 40

A camera makes frames as fast as it can. A detector reads them straight from the camera, actor to actor, and yields the
bright ones to the program. The program leaves the loop early, which closes both generators.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import zcactor as zc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Frame = npt.NDArray[Any]


@zc.actor
class Camera:
    """A camera that makes pictures of 1,280 x 720 bytes, each born in the store."""

    def __init__(self) -> None:
        self.made, self.ended = 0, asyncio.Event()

    @zc.method
    async def frames(self) -> AsyncIterator[Frame]:
        """Pictures without end. The generator stands still while its reader is a window of items behind."""
        try:
            for self.made in itertools.count(1):
                yield zc.full((720, 1280), self.made % 256, np.uint8)
        finally:
            self.ended.set()

    @zc.method
    async def closed(self) -> int:
        """The number of frames made, once the generator is closed."""
        await self.ended.wait()
        return self.made


@zc.actor
class Detector:
    """A detector that picks the bright frames."""

    @zc.method
    async def bright(self, camera: Camera, threshold: float) -> AsyncIterator[tuple[int, float]]:
        """Number and mean brightness of the frames above `threshold`."""
        number = 0
        async for frame in camera.frames():
            number += 1
            if (brightness := float(frame.mean())) > threshold:
                yield number, brightness


async def main(frames: int) -> None:
    """Run the whole program."""
    async with zc.init():
        camera, detector = await Camera.spawn(), await Detector.spawn()
        async for number, brightness in detector.bright(camera, threshold=9.5):
            print(f"frame {number:4}  brightness {brightness:.0f}")
            if number >= frames:
                break
        print(f"left the loop at frame {number}; the camera was closed after {await camera.closed()}")
        print(f"bytes copied: {sum([(await zc.stats(actor)).bytes_copied for actor in (camera, detector)])}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Read a stream of pictures with backpressure.")
    parser.add_argument("--frames", type=int, default=40)
    zc.run(main(parser.parse_args().frames))
