"""A sharded parameter server trains a classifier of handwritten digits, with synchronous and asynchronous updates.

    python examples/parameter_server.py --servers 2 --workers 4 --mode both
    python examples/parameter_server.py --servers 2 --workers 4 --costs --json

The parameters of a small neural network are one vector, cut into ranges; each server keeps one. A worker pulls all
ranges, computes a gradient on its part of the data, freezes it, and pushes each range of it to its server. Weights and
gradients lie in shared memory, so pulling and pushing map them: zcactor copies nothing, and the table at the end proves
it.

A server never changes weights that it has given out. Each update makes the next version beside the old one, which is
freed when its last reader lets go. So no lock is needed.

The cost model is that of one pull by every worker at once: max(n/beta, p n/(k beta)) seconds for n bytes of parameters,
p workers, k servers and a bandwidth of beta. It leaves out messages and processes that share cores, which make up the
cost of a pull of small weights; with --hidden 100000 --epochs 1 the bytes weigh more.

With --costs nothing is trained. One sum over all workers is made by the parameter server and by four plans without one,
over sockets, and each one's bytes and seconds stand beside those of its model: the volume that a rank takes from others
by the bandwidth of a rank, and a round trip a step. --json ends with these rows as a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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
    """The keeper of one range of the parameters. With a `barrier` an update waits for that many workers' gradients."""

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
    """A worker that computes gradients on one part of the data."""

    def __init__(self, servers: list[Server], network: Network, x: Array, y: Labels, seed: int) -> None:
        self.servers, self.network, self.x, self.y = servers, network, x, y
        self.rng = np.random.default_rng(seed)

    @zc.method
    async def train(self, epochs: int) -> AsyncIterator[tuple[float, float]]:
        """Yield after each epoch its mean loss, and the seconds spent pulling weights."""
        for _ in range(epochs):
            losses, pulling = [], 0.0
            for batch in np.array_split(self.rng.permutation(len(self.y)), len(self.y) // BATCH):
                started = time.perf_counter()
                ranges = await asyncio.gather(*(server.pull() for server in self.servers))
                weights = np.concatenate(ranges)  # reads them in place, in the servers' memory
                pulling += time.perf_counter() - started
                gradient = np.empty(self.network.size)
                losses.append(self.network.gradient(weights, self.x[batch], self.y[batch], gradient))
                gradient = zc.freeze(gradient)  # so that its parts go by reference
                parts = np.array_split(gradient, len(self.servers))
                await asyncio.gather(*(server.push(part) for server, part in zip(self.servers, parts, strict=True)))
            yield float(np.mean(losses)), pulling


@zc.actor
class Summer:
    """The keeper of one range of a sum, which returns to each worker what all have pushed."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.parts: list[Array] = []
        self.total: asyncio.Future[Array] | None = None

    @zc.method
    async def push(self, part: Array) -> Array:
        """Take one worker's part in; returns the sum of all."""
        self.parts.append(part)
        if self.total is None:
            self.total = asyncio.get_running_loop().create_future()
        total = self.total
        if len(self.parts) == self.workers:
            total.set_result(added(self.parts))
            self.parts, self.total = [], None
        return await total


@zc.actor
class Rank:
    """A worker that sums with others by plans that need no server. A rank takes: it asks for what another has published
    for a step, and waits until it is there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.own = zc.freeze(np.full(size, float(rank + 1)))  # others take slices of it
        self.ranks: list[Rank] = []
        self.summers: list[Summer] = []
        self.published: dict[int, asyncio.Future[Array]] = {}

    @zc.method
    async def meet(self, ranks: list[Rank], summers: list[Summer]) -> None:
        """Get to know all ranks, this one included, and all servers."""
        self.ranks, self.summers = ranks, summers

    @zc.method
    async def begin(self) -> None:
        """Forget what was published."""
        self.published = {}

    def step(self, number: int) -> asyncio.Future[Array]:
        """The array of a step, once it is published."""
        if number not in self.published:
            self.published[number] = asyncio.get_running_loop().create_future()
        return self.published[number]

    @zc.method
    async def give(self, step: int, start: int, end: int) -> Array:
        """A slice of the array that this rank publishes for a step, which is frozen or was received."""
        return (await self.step(step))[start:end]

    @zc.method
    async def sum(self, plan: str) -> bool:
        """Sum over all ranks. Returns whether the result is right."""
        total: Array = await getattr(self, plan)()
        right = float(sum(range(1, len(self.ranks) + 1)))
        return total.shape == self.own.shape and bool((total == right).all())

    def shards(self) -> list[tuple[int, int]]:
        """The range of each rank."""
        ends = [len(part) for part in np.array_split(np.empty(len(self.own), np.uint8), len(self.ranks))]
        return list(zip(np.cumsum([0, *ends[:-1]]).tolist(), np.cumsum(ends).tolist(), strict=True))

    async def neighbour(self) -> Array:
        """Take all from the next rank and throw it away: the bandwidth of a rank while all take at once."""
        self.step(0).set_result(self.own)
        await self.ranks[(self.rank + 1) % len(self.ranks)].give(0, 0, len(self.own))
        return np.full(len(self.own), float(sum(range(1, len(self.ranks) + 1))))

    async def parameter_server(self) -> Array:
        """Push each range to its server, and get the sum back."""
        parts = np.array_split(self.own, len(self.summers))
        return np.concatenate(
            await asyncio.gather(*(summer.push(part) for summer, part in zip(self.summers, parts, strict=True)))
        )

    async def naive(self) -> Array:
        """Take everything from all."""
        self.step(0).set_result(self.own)
        return added([self.own, *await self.of_others(0, 0, len(self.own))])

    async def direct(self) -> Array:
        """Take this rank's shard from all at once and sum it, then take all finished shards."""
        shards = self.shards()
        start, end = shards[self.rank]
        self.step(0).set_result(self.own)
        mine = zc.freeze(added([self.own[start:end], *await self.of_others(0, start, end)]))
        self.step(1).set_result(mine)
        sizes = [end - start for start, end in shards]
        taken = await asyncio.gather(
            *(rank.give(1, 0, size) for rank, size in zip(self.ranks, sizes, strict=True) if rank != self.me)
        )
        return np.concatenate([*taken[: self.rank], mine, *taken[self.rank :]])

    async def ring(self) -> Array:
        """Take a shard from the rank on the left in each step: partial sums first, finished shards then."""
        count, shards = len(self.ranks), self.shards()
        left = self.ranks[self.rank - 1]
        start, end = shards[self.rank]
        shard = self.own[start:end]
        done: dict[int, Array] = {}
        self.step(0).set_result(shard)
        for number in range(1, 2 * count - 1):
            which = (self.rank - number) % count
            start, end = shards[which]
            shard = await left.give(number - 1, 0, end - start)
            if number < count:
                shard = zc.freeze(shard + self.own[start:end])
            if number >= count - 1:
                done[which] = shard
            self.step(number).set_result(shard)
        return np.concatenate([done[which] for which in range(count)])

    async def halving(self) -> Array:
        """Exchange halves of halves with partners, then double back. Where the number of ranks is no power of two, the
        odd ones of the first ranks give all they have to the rank before and get the result at the end."""
        count = len(self.ranks)
        core = 1 << (count.bit_length() - 1)
        surplus, size = count - core, len(self.own)
        self.step(0).set_result(self.own)
        if self.rank < 2 * surplus and self.rank % 2:
            return await self.ranks[self.rank - 1].give(-1, 0, size)
        value, start, end, number = self.own, 0, size, 1
        if self.rank < 2 * surplus:
            value = zc.freeze(value + await self.ranks[self.rank + 1].give(0, 0, size))
        index = self.rank // 2 if self.rank < 2 * surplus else self.rank - surplus
        ranges = []
        distance = core // 2
        while distance:
            self.step(number).set_result(value)
            middle = start + (end - start) // 2
            low, high = (middle, end) if index & distance else (start, middle)
            other = await self.partner(index ^ distance, surplus).give(number, low - start, high - start)
            value = zc.freeze(value[low - start : high - start] + other)
            ranges.append((distance, start, end))
            start, end, number, distance = low, high, number + 1, distance // 2
        for distance, low, high in reversed(ranges):
            self.step(number).set_result(value)
            other = await self.partner(index ^ distance, surplus).give(number, 0, high - low - (end - start))
            value = zc.freeze(np.concatenate([other, value] if index & distance else [value, other]))
            start, end, number = low, high, number + 1
        self.step(-1).set_result(value)
        return value

    def partner(self, index: int, surplus: int) -> Rank:
        """The rank with a number among those that take part in halving."""
        return self.ranks[2 * index if index < surplus else index + surplus]

    @property
    def me(self) -> Rank:
        """The handle of this rank."""
        return self.ranks[self.rank]

    async def of_others(self, step: int, start: int, end: int) -> list[Array]:
        """A slice from each of the other ranks."""
        return await asyncio.gather(*(rank.give(step, start, end) for rank in self.ranks if rank != self.me))


def added(parts: list[Array]) -> Array:
    """The sum, in the order of the parts."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def volumes(n: int, p: int, k: int) -> dict[str, tuple[str, int, float, int]]:
    """The plans by their methods: name, servers, bytes that a rank takes from others, and steps."""
    core = 1 << (p.bit_length() - 1)
    rounds = core.bit_length() - 1
    least = 2 * n * (p - 1) / p
    halved = least if core == p else n + 2 * n * (core - 1) / core
    return {
        "parameter_server": ("parameter server", k, max(n, p * n / k), 2),
        "naive": ("naive", 0, (p - 1) * n, 1),
        "ring": ("ring", 0, least, 2 * (p - 1)),
        "halving": ("halving-doubling", 0, halved, 2 * rounds + (0 if core == p else 2)),
        "direct": ("direct exchange", 0, least, 2),
    }


async def costs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the table: each plan's volume and time, predicted and measured over sockets."""
    p, k, size = options.workers, options.servers, options.nbytes // 8
    rows: list[dict[str, Any]] = []
    async with zc.init(transports=("tcp",)):
        summers = [await Summer.spawn(p) for _ in range(k)]
        ranks = [await Rank.spawn(rank, size) for rank in range(p)]
        actors: list[Any] = [*ranks, *summers]
        await zc.get([rank.meet(ranks, summers) for rank in ranks])

        async def once(plan: str) -> tuple[float, int]:
            """Seconds of a sum, and the most bytes that an actor has taken."""
            await zc.get([rank.begin() for rank in ranks])
            before = [stats.bytes_received for stats in await asyncio.gather(*map(zc.stats, actors))]
            started = time.perf_counter()
            right = await zc.get([rank.sum(plan) for rank in ranks])
            took = time.perf_counter() - started
            after = [stats.bytes_received for stats in await asyncio.gather(*map(zc.stats, actors))]
            if not all(right):
                raise ArithmeticError(f"{plan}: the sum is wrong on rank {right.index(False)}")
            return took, max(now - then for now, then in zip(after, before, strict=True))

        async def best(plan: str) -> tuple[float, int]:
            """The fastest of some sums."""
            return min([await once(plan) for _ in range(1 + options.repeat)][1:])

        times = []
        for _ in range(50):
            started = time.perf_counter()
            await zc.get([rank.begin() for rank in ranks])
            times.append(time.perf_counter() - started)
        round_trip = float(np.median(times))
        beta = size * 8 / max((await best("neighbour"))[0] - round_trip, 1e-9)
        for plan, (name, servers, volume, steps) in volumes(size * 8, p, k).items():
            seconds, taken = await best(plan)
            rows.append(
                {
                    "plan": name, "servers": servers, "nbytes": size * 8, "volume_predicted": round(volume),
                    "volume_measured": taken, "steps": steps, "predicted_s": volume / beta + steps * round_trip,
                    "measured_s": seconds,
                }
            )  # fmt: skip
    print(f"n = {size * 8:,} bytes, p = {p} workers, k = {k} servers, beta = {beta / 1e9:.2f} GB/s a rank over sockets")
    print(f"{'plan':<18}{'steps':>6}{'bytes, model':>16}{'measured':>16}{'ms, model':>12}{'measured':>12}")
    for row in rows:
        print(
            f"{row['plan']:<18}{row['steps']:>6}{row['volume_predicted']:>16,}{row['volume_measured']:>16,}"
            f"{row['predicted_s'] * 1e3:>12.2f}{row['measured_s'] * 1e3:>12.2f}"
        )
    return rows


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
    """The data: 1,797 digits of 8 x 8 pixels, three quarters to train with and the rest to test, always the same."""
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
    """Train, print the progress and the cost, and return the accuracy on the test set."""
    x, y, test_x, test_y = load_data()
    network = Network(options.hidden)
    ranges = np.array_split(zc.freeze(network.initial(seed=1)), options.servers)
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
    """Train in each requested mode; return whether all were accurate enough."""
    modes: tuple[Mode, ...] = ("sync", "async") if options.mode == "both" else (options.mode,)
    async with zc.init():
        return min([await train(mode, options) for mode in modes]) >= TARGET


def main() -> None:
    """Read the options and run; the exit status says whether the accuracy was reached."""
    parser = argparse.ArgumentParser(description="Train a classifier with a sharded parameter server.")
    parser.add_argument("--mode", choices=("sync", "async", "both"), default="both")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512, help="units of the hidden layer")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--rate", type=float, default=0.1, help="of learning")
    parser.add_argument("--costs", action="store_true", help="train nothing; print the costs of a sum by each plan")
    parser.add_argument("--nbytes", type=int, default=16 << 20, help="of the sum, with --costs (default: 16 MiB)")
    parser.add_argument("--repeat", type=int, default=5, help="sums of each plan, the fastest counts (default: 5)")
    parser.add_argument("--json", action="store_true", help="with --costs: end with a line of JSON")
    options = parser.parse_args()
    if options.costs:
        least = 1 << 20
        if options.workers < 2 or options.servers < 1 or options.repeat < 1 or options.nbytes < least:
            parser.error(f"--costs needs 2 workers, a server, a repetition and {least:,} bytes at least")
        rows = zc.run(costs(options))
        if options.json:
            print(json.dumps(rows))
        return
    if not zc.run(run(options)):
        sys.exit(f"the accuracy is below {TARGET:.0%}")


if __name__ == "__main__":
    main()
