"""A sharded parameter server trains a classifier of handwritten digits, with synchronous and asynchronous updates.

    python examples/parameter_server.py --servers 2 --workers 4 --mode both

The parameters of a small neural network are one vector, cut into ranges; each server keeps one. A worker pulls all
ranges, computes a gradient on its part of the data, and pushes to each server its range of that. Weights and gradients
lie in shared memory, so pulling and pushing map them: zcactor copies nothing, and the table at the end proves it.

A server never changes weights that it has given out. Each update makes the next version beside the old one, which is
freed when its last reader lets go. That is all the locking there is.

The cost model is that of one pull by every worker at once: max(n/beta, p n/(k beta)) seconds for n bytes of parameters,
p workers, k servers and a bandwidth of beta. It knows nothing of messages and of processes that share cores, which is
what a pull of small weights costs; with --hidden 100000 --epochs 1 the bytes weigh more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy: the workers inherit it, and are parallel themselves

import numpy as np
import numpy.typing as npt

import zcactor as zc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Array = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]
Mode = Literal["sync", "async"]
PIXELS, DIGITS, BATCH, TARGET = 64, 10, 32, 0.93


class Network:
    """Pixels, one hidden layer, ten classes; softmax and cross-entropy. Its parameters are views of one flat vector."""

    def __init__(self, hidden: int) -> None:
        self.shapes = ((PIXELS, hidden), (hidden,), (hidden, DIGITS), (DIGITS,))
        self.size = sum(int(np.prod(shape)) for shape in self.shapes)

    def initial(self, seed: int) -> Array:
        """Random weights (He et al. 2015), zero biases."""
        rng = np.random.default_rng(seed)
        layers = [rng.normal(0, np.sqrt(2 / s[0]), s) if len(s) == 2 else np.zeros(s) for s in self.shapes]
        return np.concatenate([layer.ravel() for layer in layers])

    def layers(self, flat: Array) -> list[Array]:
        """The matrices and biases in `flat`, as views."""
        ends = np.cumsum([np.prod(shape) for shape in self.shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(flat, ends), self.shapes, strict=True)]

    def forward(self, flat: Array, x: Array) -> tuple[Array, Array]:
        """Activations of the hidden layer, and the probability of each class; one row per sample."""
        w1, b1, w2, b2 = self.layers(flat)
        hidden = np.maximum(x @ w1 + b1, 0)
        scores = np.exp((logits := hidden @ w2 + b2) - logits.max(1, keepdims=True))
        return hidden, scores / scores.sum(1, keepdims=True)

    def gradient(self, flat: Array, x: Array, y: Labels, out: Array) -> float:
        """Write the gradient of the mean loss to `out`, and return the loss."""
        hidden, probability = self.forward(flat, x)
        rows = np.arange(len(y))
        loss = -np.log(probability[rows, y]).mean()
        probability[rows, y] -= 1
        error = probability / len(y)
        w1, b1, w2, b2 = self.layers(out)
        np.matmul(hidden.T, error, out=w2)
        error.sum(0, out=b2)
        back = (error @ self.layers(flat)[2].T) * (hidden > 0)
        np.matmul(x.T, back, out=w1)
        back.sum(0, out=b1)
        return float(loss)


@zc.actor
class Server:
    """Keeps one range of the parameters. With a `barrier` an update waits for the gradients of that many workers."""

    def __init__(self, weights: Array, rate: float, barrier: int) -> None:
        self.weights, self.rate, self.barrier = weights, rate, barrier
        self.gradients: list[Array] = []
        self.updated = asyncio.Event()

    @zc.method
    async def pull(self) -> Array:
        """The newest weights, by reference."""
        return self.weights

    @zc.method
    async def push(self, gradient: Array) -> None:
        """Take part in an update; returns when it is done. `gradient` is a view of the worker's memory."""
        self.gradients.append(gradient)
        updated = self.updated
        if len(self.gradients) < self.barrier:
            await updated.wait()
            return
        self.weights = self.weights - self.rate * np.mean(self.gradients, axis=0)
        self.gradients, self.updated = [], asyncio.Event()
        updated.set()


@zc.actor
class Worker:
    """Computes gradients on one part of the data."""

    def __init__(self, servers: list[Server], network: Network, x: Array, y: Labels, seed: int) -> None:
        self.servers, self.network, self.x, self.y = servers, network, x, y
        self.rng = np.random.default_rng(seed)

    @zc.method
    async def train(self, epochs: int) -> AsyncIterator[tuple[float, float]]:
        """After each epoch its mean loss, and the seconds spent pulling weights."""
        for _ in range(epochs):
            losses, pulling = [], 0.0
            for batch in np.array_split(self.rng.permutation(len(self.y)), len(self.y) // BATCH):
                started = time.perf_counter()
                ranges = await asyncio.gather(*(server.pull() for server in self.servers))
                weights = np.concatenate(ranges)  # reads them where they lie, in the servers' memory
                pulling += time.perf_counter() - started
                gradient = np.empty(self.network.size)
                losses.append(self.network.gradient(weights, self.x[batch], self.y[batch], gradient))
                parts = np.array_split(gradient, len(self.servers))
                await asyncio.gather(*(server.push(part) for server, part in zip(self.servers, parts, strict=True)))
            yield float(np.mean(losses)), pulling


def memory_bandwidth(nbytes: int = 64 << 20) -> float:
    """Bytes a second of a copy from memory to memory, the best of five."""
    source, target = np.ones(nbytes // 8), np.ones(nbytes // 8)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return nbytes / min(times)


def load_data() -> tuple[Array, Labels, Array, Labels]:
    """1,797 digits of 8 x 8 pixels: three quarters to train with, the rest to test, always the same."""
    from sklearn.datasets import load_digits  # takes seconds to import, and only this process needs it

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = (x / 16)[order], y[order]
    train = len(y) * 3 // 4
    return x[:train], y[:train], x[train:], y[train:]


async def moved(actors: list[Any]) -> tuple[int, int]:
    """Bytes that `actors` have received by mapping or sent within frames, and bytes copied, since they started."""
    stats = await asyncio.gather(*map(zc.stats, actors))
    return sum(s.bytes_mapped + s.bytes_eager for s in stats), sum(s.bytes_copied for s in stats)


async def train(mode: Mode, options: argparse.Namespace) -> float:
    """Train, print what happens and what it costs, and return the accuracy on the test set."""
    x, y, test_x, test_y = load_data()
    network = Network(options.hidden)
    ranges = np.array_split(network.initial(seed=1), options.servers)
    barrier = options.workers if mode == "sync" else 1
    servers = [await Server.spawn(part, options.rate, barrier) for part in ranges]
    order = np.arange(len(y))
    parts = [order[i :: options.workers][: len(y) // options.workers] for i in range(options.workers)]
    workers = [await Worker.spawn(servers, network, x[part], y[part], seed) for seed, part in enumerate(parts)]

    bytes_before, copied_before = await moved([*servers, *workers])
    started, pulling = time.perf_counter(), 0.0
    streams = [worker.train(options.epochs) for worker in workers]
    for epoch in range(1, options.epochs + 1):
        results = await asyncio.gather(*(anext(stream) for stream in streams))
        pulling += float(np.mean([seconds for _, seconds in results]))
        if epoch in (1, 2, 5) or epoch % 10 == 0:
            print(f"{mode:>5}  epoch {epoch:3}  loss {np.mean([loss for loss, _ in results]):.4f}", flush=True)
    took = time.perf_counter() - started
    bytes_after, copied_after = await moved([*servers, *workers])

    weights = np.concatenate(await zc.get([server.pull() for server in servers]))
    accuracy = float((network.forward(weights, test_x)[1].argmax(1) == test_y).mean())

    steps = options.epochs * (len(parts[0]) // BATCH)
    n, p, k, beta = network.size * 8, options.workers, options.servers, memory_bandwidth()
    rows = [
        ("bytes moved, pull and push", f"{2 * p * n:,}", f"{(bytes_after - bytes_before) / steps:,.0f}"),
        ("microseconds of a pull", f"{max(n / beta, p * n / (k * beta)) * 1e6:,.0f}", f"{pulling / steps * 1e6:,.0f}"),
        ("bytes copied by zcactor", "0", f"{(copied_after - copied_before) / steps:,.0f}"),
    ]
    print(f"{mode:>5}  accuracy {accuracy:.1%} on {len(test_y)} test digits after {took:.1f} s")
    print(f"{'':7}n = {n:,} bytes, p = {p} workers, k = {k} servers, beta = {beta / 1e9:.1f} GB/s (memcpy)")
    for row in [("each step", "model", "measured"), *rows]:
        print("{:7}{:<28}{:>14}{:>14}".format("", *row))
    print(flush=True)
    return accuracy


async def run(options: argparse.Namespace) -> bool:
    """Train in each mode asked for; whether all were accurate enough."""
    modes: tuple[Mode, ...] = ("sync", "async") if options.mode == "both" else (options.mode,)
    async with zc.init():
        return min([await train(mode, options) for mode in modes]) >= TARGET


def main() -> None:
    """Read the options and run; the exit status tells whether the accuracy was reached."""
    parser = argparse.ArgumentParser(description="Train a classifier with a sharded parameter server.")
    parser.add_argument("--mode", choices=("sync", "async", "both"), default="both")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512, help="units of the hidden layer")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--rate", type=float, default=0.1, help="of learning")
    if not zc.run(run(parser.parse_args())):
        sys.exit(f"the accuracy is below {TARGET:.0%}")


if __name__ == "__main__":
    main()
