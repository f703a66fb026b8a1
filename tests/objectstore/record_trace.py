"""Records the allocations of NumPy while a small network is trained, for `test_heap_stress` to replay.

``python -m tests.objectstore.record_trace`` writes ``training.trace`` beside this file: gzip, one operation per line,
``+ id nbytes`` for memory of at least `MIN_NBYTES` and ``- id`` for its end. The recorder is a handler of its own (NEP
49), made with ctypes, so that the trace is independent of the heap that replays it.

The loop does the things that fragment heaps: batches of different sizes, activations that live until the backward pass,
optimizer state that lives for good, evaluation on a larger set now and then, and shuffling by fancy indexing.
"""

from __future__ import annotations

import ctypes
import gzip
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MIN_NBYTES", "TRACE", "main", "record", "train"]

MIN_NBYTES = 64 << 10
TRACE = Path(__file__).with_name("training.trace")

Array = NDArray[np.float32]

_MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_CALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
_REALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_SET_HANDLER = 304  # PyDataMem_SetHandler in numpy/__multiarray_api.h


class _Allocator(ctypes.Structure):
    """``PyDataMemAllocator`` of numpy/ndarraytypes.h."""

    _fields_ = (
        ("ctx", ctypes.c_void_p),
        ("malloc", _MALLOC),
        ("calloc", _CALLOC),
        ("realloc", _REALLOC),
        ("free", _FREE),
    )


class _Handler(ctypes.Structure):
    """``PyDataMem_Handler``."""

    _fields_ = (("name", ctypes.c_char * 127), ("version", ctypes.c_uint8), ("allocator", _Allocator))


class Recorder:
    """A data-memory handler on the C library's malloc that records large allocations."""

    def __init__(self) -> None:
        libc = ctypes.PyDLL(None)  # keeps the interpreter lock: NumPy expects no other thread to run here
        for name, result, arguments in (
            ("malloc", ctypes.c_void_p, [ctypes.c_size_t]),
            ("calloc", ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_size_t]),
            ("realloc", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]),
            ("free", None, [ctypes.c_void_p]),
        ):
            function = getattr(libc, name)
            function.restype, function.argtypes = result, arguments
        self.lines: list[str] = []
        self._ids: dict[int, int] = {}
        self._last = 0

        def malloc(_: int | None, nbytes: int) -> int | None:
            address: int | None = libc.malloc(nbytes)
            return self._begin(address, nbytes)

        def calloc(_: int | None, count: int, each: int) -> int | None:
            address: int | None = libc.calloc(count, each)
            return self._begin(address, count * each)

        def realloc(_: int | None, old: int | None, nbytes: int) -> int | None:
            address: int | None = libc.realloc(old, nbytes)
            if address is not None:
                self._end(old)
            return self._begin(address, nbytes)

        def free(_: int | None, address: int | None, nbytes: int) -> None:
            del nbytes
            self._end(address)
            libc.free(address)

        # NumPy and the structure keep addresses only, and an array of the recorded program may live until the very end.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        self._callbacks = (_MALLOC(malloc), _CALLOC(calloc), _REALLOC(realloc), _FREE(free))
        self._handler = _Handler(b"recorder", 1, _Allocator(None, *self._callbacks))
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self._capsule = new(ctypes.addressof(self._handler), b"mem_handler", None)

    def _begin(self, address: int | None, nbytes: int) -> int | None:
        if address is not None and nbytes >= MIN_NBYTES:
            self._last += 1
            self._ids[address] = self._last
            self.lines.append(f"+ {self._last} {nbytes}")
        return address

    def _end(self, address: int | None) -> None:
        number = self._ids.pop(address, None) if address is not None else None
        if number is not None:
            self.lines.append(f"- {number}")

    def start(self) -> Any:
        """Let NumPy allocate here from now on; return the handler that was set."""
        return _set_handler(self._capsule)


def _set_handler(capsule: Any) -> Any:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.cast(
        pointer(import_module("numpy._core._multiarray_umath")._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p)
    )
    address = table[_SET_HANDLER]
    assert address is not None
    return ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(address)(capsule)


def _patches(images: Array) -> Array:
    """3x3 patches of [n, 16, 16, channels], one row each: a convolution is a product with them."""
    n, height, width, channels = images.shape
    windows = np.lib.stride_tricks.sliding_window_view(images, (3, 3), axis=(1, 2))
    return np.ascontiguousarray(windows).reshape(n * (height - 2) * (width - 2), channels * 9)


class Network:
    """A convolution and two dense layers, with Adam."""

    def __init__(self, rng: np.random.Generator, channels: int = 3, filters: int = 16, hidden: int = 512) -> None:
        shapes = [(channels * 9, filters), (14 * 14 * filters, hidden), (hidden, hidden), (hidden, 10)]
        self.weights: list[Array] = [rng.normal(0, 0.05, shape).astype(np.float32) for shape in shapes]
        self.first: list[Array] = [np.zeros_like(w) for w in self.weights]
        self.second: list[Array] = [np.zeros_like(w) for w in self.weights]
        self.steps = 0

    def forward(self, images: Array) -> tuple[Array, list[Array]]:
        """The probabilities, and the values that the backward pass needs."""
        patches = _patches(images)
        convolved = np.maximum(patches @ self.weights[0], 0)
        flat = convolved.reshape(len(images), -1)
        one = np.maximum(flat @ self.weights[1], 0)
        two = np.maximum(one @ self.weights[2], 0)
        logits = two @ self.weights[3]
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True), [patches, convolved, flat, one, two]

    def backward(self, probabilities: Array, labels: NDArray[np.int64], kept: list[Array]) -> list[Array]:
        """The gradient of each weight."""
        patches, convolved, flat, one, two = kept
        error = probabilities.copy()
        error[np.arange(len(labels)), labels] -= 1
        error /= len(labels)
        last = two.T @ error
        error = (error @ self.weights[3].T) * (two > 0)
        middle = one.T @ error
        error = (error @ self.weights[2].T) * (one > 0)
        dense = flat.T @ error
        error = (error @ self.weights[1].T).reshape(convolved.shape) * (convolved > 0)
        return [patches.T @ error, dense, middle, last]

    def update(self, gradients: list[Array]) -> None:
        """Update the weights by Adam, in the usual way: with temporaries."""
        self.steps += 1
        for i, gradient in enumerate(gradients):
            self.first[i] = 0.9 * self.first[i] + 0.1 * gradient
            self.second[i] = 0.999 * self.second[i] + 0.001 * gradient**2
            mean = self.first[i] / (1 - 0.9**self.steps)
            scale = np.sqrt(self.second[i] / (1 - 0.999**self.steps)) + 1e-8
            self.weights[i] = self.weights[i] - 1e-3 * mean / scale


def train(steps: int = 300) -> float:
    """Train; return the accuracy on held-out data."""
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 10, 6000)
    centres = rng.normal(0, 1, (10, 16, 16, 3)).astype(np.float32)
    images: Array = centres[labels] + rng.normal(0, 2, (6000, 16, 16, 3)).astype(np.float32)
    held, held_labels = images[5000:].copy(), labels[5000:].copy()
    images, labels = images[:5000].copy(), labels[:5000].copy()
    network = Network(rng)
    right, at, history = 0.0, 0, []
    for step in range(steps):
        size = int(rng.choice([32, 64, 64, 96, 128, 200]))
        if at + size > len(images) or step == 0:
            order = rng.permutation(len(images))
            images, labels, at = images[order], labels[order], 0
        batch, batch_labels = images[at : at + size], labels[at : at + size]
        at += size
        batch = batch + rng.normal(0, 0.1, batch.shape).astype(np.float32)
        probabilities, kept = network.forward(batch)
        gradients = network.backward(probabilities, batch_labels, kept)
        bucket = np.concatenate([g.ravel() for g in gradients])  # in the form in which it would travel between workers
        bucket /= max(1.0, float(np.linalg.norm(bucket)))
        parts, start = [], 0
        for gradient in gradients:
            parts.append(bucket[start : start + gradient.size].reshape(gradient.shape))
            start += gradient.size
        network.update(parts)
        if step % 25 == 24:
            guesses = network.forward(held)[0].argmax(axis=1)
            right = float((guesses == held_labels).mean())
        if step % 50 == 49:
            history.append([w.copy() for w in network.weights])  # checkpoints: the last two are kept
            history = history[-2:]
    return right


def record(steps: int = 300) -> tuple[list[str], float]:
    """The operations of a training run, and the accuracy of the network."""
    recorder = Recorder()
    before = recorder.start()
    try:
        right = train(steps)
    finally:
        _set_handler(before)
    return recorder.lines, right


def main() -> None:
    """Write the trace."""
    lines, right = record()
    live, peak, sizes = 0, 0, dict[str, int]()
    for line in lines:
        kind, number, *rest = line.split()
        if kind == "+":
            sizes[number] = int(rest[0])
        live += sizes[number] if kind == "+" else -sizes[number]
        peak = max(peak, live)
    with TRACE.open("wb") as file, gzip.GzipFile("", "wb", 9, file, 0) as packed:  # without a name or a time in it
        packed.write("\n".join(lines).encode() + b"\n")
    print(
        f"{len(lines)} operations, at most {peak / 2**20:.0f} MiB, {TRACE.stat().st_size} bytes; accuracy {right:.2f}"
    )


if __name__ == "__main__":
    main()
