"""Ranks train one network on parts of the data, and sum their gradients in each step, compressed or not.

    python examples/data_parallel.py --hook none
    python examples/data_parallel.py --hook topk --fraction 0.01 --link 100Mbit --json

Each rank is an actor with all weights and a part of the data: scikit-learn's handwritten digits, and a network of
64-128-64-10 units. A step computes a gradient, exchanges it by ``group.reducer(hook=...)`` and applies the mean, so
that all ranks keep the same weights. A hook makes the gradient smaller, and adds the rest to the next one.

Fewer bytes pay where T_comp I_comp < T_orig I_orig. T is the time of a step, to compute, compress and exchange, and I
the number of steps to 95 % on the test digits. "comp" stands for the hook, "orig" for a run without one, which is made
as well. Computing is the processor time of a rank. The exchange is measured between the processes of this host. With
--link the time of the bytes that a rank takes from others is added, at that rate: (p-1) n bytes where a hook gathers,
and 2 n (p-1)/p bytes in sums, for n bytes a rank and p ranks.

It needs scikit-learn: ``pip install scikit-learn``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy: the ranks inherit it, and are parallel themselves

import numpy as np
import numpy.typing as npt

import zcactor as zc

if TYPE_CHECKING:
    from collections.abc import Generator

Array = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Gradients = dict[str, Array]

UNITS: Final = (64, 128, 64, 10)
BATCH: Final = 16
RATE: Final = 0.05
MOMENTUM: Final = 0.9
TARGET: Final = 0.95
EVERY: Final = 5
"""Steps from one look at the test digits to the next."""
HOOKS: Final = ("none", "bf16", "int8", "fp8", "topk", "powersgd")


class Network:
    """A network of fully connected layers with rectifiers between them; softmax and cross-entropy at its end."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.weights: Gradients = {}
        for layer, (inputs, outputs) in enumerate(itertools.pairwise(UNITS)):
            scale = np.sqrt(2 / inputs)  # He et al. 2015
            self.weights[f"w{layer}"] = rng.normal(0, scale, (inputs, outputs)).astype(np.float32)
            self.weights[f"b{layer}"] = np.zeros(outputs, np.float32)
        self.speed = {name: np.zeros_like(weight) for name, weight in self.weights.items()}

    def forward(self, x: Array) -> list[Array]:
        """The input of each layer, and last the probability of each class; one row per sample."""
        found = [x]
        for layer in range(len(UNITS) - 1):
            sums = found[-1] @ self.weights[f"w{layer}"] + self.weights[f"b{layer}"]
            found.append(np.maximum(sums, 0))
        scores = np.exp(sums - sums.max(axis=1, keepdims=True))
        found[-1] = scores / scores.sum(axis=1, keepdims=True)
        return found

    def gradients(self, x: Array, y: Labels) -> Gradients:
        """The gradients of the mean loss, the last layer first."""
        *inputs, error = self.forward(x)
        error[np.arange(len(y)), y] -= 1
        error /= len(y)
        found = {}
        for layer in reversed(range(len(UNITS) - 1)):
            found[f"w{layer}"] = inputs[layer].T @ error
            found[f"b{layer}"] = error.sum(axis=0)
            error = (error @ self.weights[f"w{layer}"].T) * (inputs[layer] > 0)
        return found

    def apply(self, gradients: Gradients) -> None:
        """Go a step down."""
        for name, gradient in gradients.items():
            self.speed[name] = MOMENTUM * self.speed[name] + gradient
            self.weights[name] -= np.float32(RATE) * self.speed[name]

    def accuracy(self, x: Array, y: Labels) -> float:
        """The part of the samples that is classified as `y`."""
        return float((self.forward(x)[-1].argmax(axis=1) == y).mean())


class Timed:
    """A hook around another one, which counts the processor time of compressing and the bytes that a rank takes."""

    def __init__(self, hook: zc.hooks.Hook) -> None:
        self.hook = hook
        self.seconds = 0.0
        self.taken = 0.0

    def reduce(self, name: str, grad: Any, size: int) -> Generator[Any, Any, Any]:
        """See `zcactor.hooks.Hook.reduce`."""
        steps = self.hook.reduce(name, grad, size)
        answer: Any = None
        while True:
            started = time.thread_time()
            try:
                request = steps.send(answer)
            except StopIteration as end:
                return end.value
            finally:
                self.seconds += time.thread_time() - started
            nbytes = sum(array.nbytes for array in request.arrays)
            self.taken += volume(nbytes, size) if isinstance(request, zc.hooks.Sum) else (size - 1) * nbytes
            answer = yield request


def volume(nbytes: int, ranks: int) -> float:
    """Bytes that a rank takes from others in a sum of `nbytes` a rank, at least."""
    return 2 * nbytes * (ranks - 1) / ranks


@zc.actor
class Rank:
    """A rank: all weights, and a part of the data."""

    def __init__(self, x: Array, y: Labels, test_x: Array, test_y: Labels, seed: int) -> None:
        self.x, self.y, self.test_x, self.test_y, self.seed = x, y, test_x, test_y, seed

    @zc.method
    async def train(self, group: zc.Group, hook: zc.hooks.Hook | None, epochs: int) -> dict[str, Any]:
        """Train with the others. Returns each step's seconds to compute and to exchange, the bytes a step, and from
        rank 0 the accuracy by steps."""
        network = Network(self.seed)  # equal on all ranks
        rng = np.random.default_rng([self.seed, group.rank])
        timed = None if hook is None else Timed(hook)
        compute, exchange, accuracy = [], [], {}
        published = steps = 0
        for _ in range(epochs):
            for batch in np.array_split(rng.permutation(len(self.y)), len(self.y) // BATCH):
                before = time.thread_time()
                gradients = network.gradients(self.x[batch], self.y[batch])
                computed = time.thread_time() - before
                compressed = 0.0 if timed is None else timed.seconds

                before = time.perf_counter()
                async with group.reducer(hook=timed) as reducer:
                    for name, gradient in gradients.items():
                        reducer.add(name, gradient)
                passed = time.perf_counter() - before
                compressed = 0.0 if timed is None else timed.seconds - compressed

                before = time.thread_time()
                network.apply(reducer.result())
                compute.append(computed + compressed + time.thread_time() - before)
                exchange.append(passed - compressed)
                published += reducer.nbytes
                steps += 1
                if group.rank == 0 and steps % EVERY == 0:
                    accuracy[steps] = network.accuracy(self.test_x, self.test_y)
        if group.rank == 0:
            accuracy[steps] = network.accuracy(self.test_x, self.test_y)
        taken = volume(published, group.size) if timed is None else timed.taken
        return {
            "compute": compute, "exchange": exchange, "published": published / steps, "taken": taken / steps,
            "accuracy": accuracy,
        }  # fmt: skip


@dataclass(frozen=True)
class Run:
    """The figures of a training; seconds and bytes are those of a step."""

    accuracy: float
    steps: int | None
    """Steps to 95 %; None where it was not reached."""
    published: float
    """Bytes that a rank gives to the others."""
    taken: float
    """Bytes that a rank takes from the others, at least."""
    compute: float
    exchange: float
    """Between the processes of this host."""

    def exchange_at(self, link: float | None) -> float:
        """Seconds of the exchange by a link of so many bytes a second; None stands for this host."""
        return self.exchange + (0.0 if link is None else self.taken / link)

    def to_target(self, link: float | None) -> float | None:
        """Seconds to 95 %."""
        return None if self.steps is None else self.steps * (self.compute + self.exchange_at(link))


def hook_of(options: argparse.Namespace, rank: int) -> zc.hooks.Hook | None:
    """The hook of a rank."""
    match options.hook:
        case "bf16":
            return zc.hooks.BF16()
        case "int8":
            return zc.hooks.Int8(seed=rank)  # ranks round independently of each other
        case "fp8":
            return zc.hooks.FP8()
        case "topk":
            return zc.hooks.TopK(options.fraction)
        case "powersgd":
            return zc.hooks.PowerSGD(options.rank)
        case _:
            return None


def load_data() -> tuple[Array, Labels, Array, Labels]:
    """The data: 1,797 digits of 8 x 8 pixels, three quarters to train with and the rest to test, always the same."""
    try:
        from sklearn.datasets import load_digits  # takes seconds to import, and only this process needs it
    except ImportError:
        sys.exit("data_parallel.py needs scikit-learn: pip install scikit-learn")
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = (x / 16)[order].astype(np.float32), y[order]
    train = len(y) * 3 // 4
    return x[:train], y[:train], x[train:], y[train:]


async def train(options: argparse.Namespace, compress: bool) -> Run:
    """Train from the start, with the hook or without one."""
    x, y, test_x, test_y = load_data()
    x, test_x = zc.freeze(x), zc.freeze(test_x)  # slices of x go by reference, and test_x is passed several times
    length = len(y) // options.workers
    parts = [slice(rank * length, (rank + 1) * length) for rank in range(options.workers)]
    ranks = [await Rank.spawn(x[part], y[part], test_x, test_y, options.seed) for part in parts]
    group = await zc.group(ranks)
    hooks = [hook_of(options, rank) if compress else None for rank in range(options.workers)]
    found = await zc.get(
        [rank.train(group, hook, options.epochs) for rank, hook in zip(ranks, hooks, strict=True)],
    )
    for rank in ranks:
        await zc.kill(rank)
    accuracy = found[0]["accuracy"]
    return Run(
        accuracy=list(accuracy.values())[-1],
        steps=next((step for step, reached in accuracy.items() if reached >= TARGET), None),
        published=found[0]["published"],
        taken=found[0]["taken"],
        compute=float(np.median([each["compute"] for each in found])),
        exchange=float(np.median(np.min([each["exchange"] for each in found], axis=0))),  # the last rank to come
    )


def told(name: str, run: Run) -> None:
    """Print the figures of a training."""
    steps = "not reached" if run.steps is None else f"{run.steps} steps"
    print(
        f"{name:<10} accuracy {run.accuracy:.3f}, to {TARGET:.0%}: {steps}; a step publishes {run.published:,.0f} "
        f"bytes, computes {run.compute * 1e6:,.0f} us, exchanges in {run.exchange * 1e6:,.0f} us on this host"
    )


def judged(run: Run, plain: Run, link: float | None, where: str) -> bool | None:
    """Print the inequality, and return whether it holds; None where a training has not reached its accuracy."""
    ours, theirs = run.to_target(link), plain.to_target(link)
    if ours is None or theirs is None:
        print(f"{where}: {TARGET:.0%} was not reached, so there is nothing to compare")
        return None
    parts = [
        f"{(each.compute + each.exchange_at(link)) * 1e3:.2f} ms x {each.steps} = {time_ * 1e3:,.0f} ms"
        for each, time_ in ((run, ours), (plain, theirs))
    ]
    print(f"{where}: T_comp I_comp < T_orig I_orig is {ours < theirs}: {parts[0]}, {parts[1]}")
    return ours < theirs


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train without a hook, then with the one that was asked for. Returns the figures of the latter."""
    async with zc.init():
        plain = compressed = await train(options, compress=False)
        told("none", plain)
        if options.hook != "none":
            compressed = await train(options, compress=True)
            told(options.hook, compressed)
    name, link = options.link
    faster = judged(compressed, plain, None, "on this host")
    if link is not None:
        faster = judged(compressed, plain, link, f"at {name}")
    return {
        "accuracy": compressed.accuracy,
        "steps_to_95": compressed.steps,
        "bytes_per_step": round(compressed.published),
        "compute_s": compressed.compute,
        "exchange_s": compressed.exchange_at(link),
        "time_to_95_s": compressed.to_target(link),
        "faster": faster,
    }


def parse_link(text: str) -> tuple[str, float | None]:
    """A rate such as ``"100Mbit"`` in bytes a second, or ``"host"``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMG])bit", text)
    if text != "host" and (found is None or not float(found[1])):
        raise argparse.ArgumentTypeError(f"{text!r} is no link; write for instance 100Mbit, 10Gbit, or host")
    return text, None if found is None else float(found[1]) * {"k": 1e3, "M": 1e6, "G": 1e9}[found[2]] / 8


def number(least: int, most: int) -> Any:
    """A parser of whole numbers in a range."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} to {most}")
        return int(text)

    return parse


def parse_fraction(text: str) -> float:
    """A number greater than 0 and at most 1."""
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no fraction: a number greater than 0 and at most 1")
    return fraction


def main() -> None:
    """Read the options, train, and print the figures."""
    parser = argparse.ArgumentParser(description="Train a classifier on ranks that sum their gradients.")
    parser.add_argument("--hook", choices=HOOKS, default="none", help="compression of gradients (default: none)")
    parser.add_argument("--fraction", type=parse_fraction, default=0.01, help="that topk sends (default: 0.01)")
    parser.add_argument("--rank", type=number(1, 64), default=4, help="of powersgd's matrices (default: 4)")
    parser.add_argument("--workers", type=number(2, 32), default=4, help="number of ranks (default: 4)")
    parser.add_argument("--epochs", type=number(1, 1000), default=30, help="default: 30")
    parser.add_argument("--seed", type=number(0, 2**31), default=0, help="of weights and batches (default: 0)")
    parser.add_argument("--link", type=parse_link, default="host", help="100Mbit, 10Gbit, or host (default)")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    options = parser.parse_args()
    found = zc.run(run(options))
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
