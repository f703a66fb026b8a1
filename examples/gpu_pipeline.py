"""A pipeline over batches of images on a GPU: one actor loads, one crops, one counts. No batch leaves the GPU.

    python examples/gpu_pipeline.py --items 50
    python examples/gpu_pipeline.py --items 10 --json     # ends with a line of JSON

On a machine without an NVIDIA GPU it runs on zcactor's fake GPU, and says so in its first line. The arrays have copies,
fills and views, which is all that this needs: neither CuPy nor PyTorch has to be installed. Several batches are on
their way at once, and no actor waits for the GPU: the work of one is ordered behind that of the one before.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

import zcactor as zc

COUNT, SIDE, EDGE = 16, 512, 64
"""Images of a batch, pixels of a side, and pixels that are cut off there: 16 MiB of float32 become 9 MiB."""


@zc.actor
class Loader:
    """The source of batches."""

    def load(self, number: int) -> zc.gpu.DeviceArray:
        """A batch whose border is -1 and whose inner pixels are `number`."""
        batch = zc.full((COUNT, SIDE, SIDE), -1, np.float32, device="cuda")
        batch[:, EDGE:-EDGE, EDGE:-EDGE].fill(number)
        return batch


@zc.actor
class Cropper:
    """The middle of the pipeline."""

    def crop(self, batch: zc.gpu.DeviceArray) -> zc.gpu.DeviceArray:
        """The inner pixels of a batch, one behind the other: a copy on the GPU."""
        return batch[:, EDGE:-EDGE, EDGE:-EDGE].copy()


@zc.actor
class Counter:
    """The end of the pipeline."""

    def corners(self, batch: zc.gpu.DeviceArray) -> float:
        """The mean of the corners of a batch's images: only these come to the host."""
        step = batch.shape[1] - 1
        return float(zc.gpu.to_host(batch[:, ::step, ::step]).mean())


async def has_a_gpu() -> bool:
    """Whether an NVIDIA GPU works here, or a fake one was asked for."""
    async with zc.init():
        return bool(zc.gpu.gpus())


async def run_all(items: int, config: zc.Config) -> dict[str, Any]:
    """Run the pipeline over `items` batches. Returns the figures."""
    async with zc.init(config=config):
        loader: Any = await Loader.spawn()
        cropper: Any = await Cropper.spawn()
        counter: Any = await Counter.spawn()
        started = time.perf_counter()
        means = [counter.corners(cropper.crop(loader.load(number))) for number in range(items)]
        for number, coming in enumerate(means):
            if (mean := await coming) != number:
                raise SystemExit(f"the corners of batch {number} have the mean {mean}")
        taken = time.perf_counter() - started
        stats = [zc.stats(), *[await zc.stats(actor) for actor in (loader, cropper, counter)]]
        return {
            "gpu": zc.gpu.gpus()[0].name,
            "items": items,
            "seconds": taken,
            "bytes_mapped": sum(each.bytes_device_mapped for each in stats),
            "bytes_copied": sum(stat.bytes_copied for stat in stats) - COUNT * 4 * 4 * items,  # without the corners
        }


def parse_items(text: str) -> int:
    """A number of batches."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of batches; give 1 or more")
    return int(text)


def main() -> None:
    """Read the options, run, and print the figures."""
    parser = argparse.ArgumentParser(description="Run a pipeline over batches of images on a GPU.")
    parser.add_argument("--items", type=parse_items, default=50, help="number of batches (default: 50)")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    options = parser.parse_args()
    config = zc.Config()
    if not zc.run(has_a_gpu()):
        print("no NVIDIA GPU works here: this runs on zcactor's fake GPU, whose times say nothing about a real one")
        config = zc.Config(gpu="fake")
    told = zc.run(run_all(options.items, config))
    print(f"{told['items']} batches of 16 MiB on {told['gpu']} in {told['seconds']:.2f} s")
    print(f"mapped from actor to actor: {told['bytes_mapped']:,} bytes")
    print(f"copied on the way: {told['bytes_copied']:,} bytes")
    if options.json:
        print(json.dumps(told))


if __name__ == "__main__":
    main()
