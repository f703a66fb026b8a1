"""A stand-in for NCCL, which exchanges the bytes of fake GPUs through sockets, in a module that workers can import.

As NCCL it queues its work on streams, hangs when a rank is gone, and ends when it is aborted. Sums are those of the
ranks in their order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Client, Connection, Listener
from queue import SimpleQueue
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.conformance.device_peer import until_done
from zcactor.device.fake import FakeGpuDriver

__all__ = ["StandInNccl", "folded"]

_FOLDS: dict[str, Any] = {"sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def folded(op: str, arrays: Sequence[Any]) -> Any:
    """The reduction of arrays in their order, narrow floats as float32."""
    dtype = arrays[0].dtype
    narrow = dtype == np.float16 or dtype == ml_dtypes.bfloat16
    with np.errstate(all="ignore"):
        total = arrays[0].astype(np.float32 if narrow else dtype)
        for each in arrays[1:]:
            total = _FOLDS[op](total, each.astype(total.dtype))
        return (total / len(arrays) if op == "mean" else total).astype(dtype)


class Call(NamedTuple):
    """One call of a rank."""

    kind: str
    facts: tuple[Any, ...]
    """The arguments that are the same on all ranks; for sends and receives the peer."""
    data: Any
    """The bytes that the rank sends."""


def _answers(calls: Sequence[Sequence[Call]]) -> list[list[Any]]:
    """The bytes that each rank receives, for each of its calls."""
    found: list[list[Any]] = [[] for _ in calls]
    sent: dict[tuple[int, int], list[Any]] = {}
    for rank, mine in enumerate(calls):
        for call in mine:
            if call.kind == "send":
                sent.setdefault((rank, call.facts[0]), []).append(call.data)
    for number, first in enumerate(calls[0]):
        if first.kind in {"send", "receive"}:
            continue
        row = [mine[number] for mine in calls]
        assert all(each[:2] == first[:2] for each in row), f"the ranks made different calls: {row}"
        if "reduce" in first.kind:
            element, op, *more = first.facts
            dtype = np.dtype(getattr(ml_dtypes, element, element))
            whole = folded(op, [np.frombuffer(each.data, dtype) for each in row])
            size = whole.size // len(calls)
            for rank, mine in enumerate(found):
                if first.kind == "reduce":
                    mine.append(whole.tobytes() if more[0] == rank else None)
                elif first.kind == "reduce_scatter":
                    mine.append(whole[rank * size : (rank + 1) * size].tobytes())
                else:
                    mine.append(whole.tobytes())
        else:
            value = b"".join(each.data for each in row) if first.kind == "all_gather" else row[first.facts[0]].data
            for mine in found:
                mine.append(value)
    for rank, mine in enumerate(calls):
        for call in mine:
            if call.kind == "send":
                found[rank].append(None)
            elif call.kind == "receive":
                found[rank].append(sent[call.facts[0], rank].pop(0))
    return found


class StandInNccl:
    """The maker of communicators. Each process has one.

    Args:
        driver: the fake GPUs' driver.
        fails: the name of a method that raises, or ``"connect"``; none by default.
    """

    def __init__(self, driver: FakeGpuDriver, fails: str = "") -> None:
        self.driver = driver
        self.fails = fails
        self.made: list[StandIn] = []
        """The communicators of this process."""

    def new_id(self) -> str:
        """Let ranks meet in this process. The id is an address."""
        listener = Listener(family="AF_UNIX")
        threading.Thread(target=self._serve, args=[listener], daemon=True).start()
        return str(listener.address)

    @staticmethod
    def _serve(listener: Listener) -> None:
        with listener, contextlib.suppress(EOFError, OSError):  # a rank is gone: the others wait until they are aborted
            ranks: dict[int, Connection[Any, Any]] = {}
            size = 1
            while len(ranks) < size:
                connection = listener.accept()
                rank, size = connection.recv()
                ranks[rank] = connection
            lines = [ranks[rank] for rank in range(size)]
            for line in lines:
                line.send(None)
            while True:
                for line, answers in zip(lines, _answers([line.recv() for line in lines]), strict=True):
                    line.send(answers)

    def connect(self, device: int, size: int, rank: int, name: str) -> StandIn:
        """Meet the other ranks."""
        if self.fails == "connect":
            raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: there is no network")
        line = Client(name, family="AF_UNIX")
        line.send((rank, size))
        line.recv()
        made = StandIn(self, device, size, rank, line)
        self.made.append(made)
        return made


class _Planned(NamedTuple):
    kind: str
    facts: tuple[Any, ...]
    source: int
    out: int
    """Bytes that are sent; negative: so many for each rank."""
    target: int
    into: int
    """Bytes that are received; negative: so many from each rank."""
    stream: int


class _Round(NamedTuple):
    calls: list[Call]
    targets: list[Any]
    read: int
    """The event after which all sent bytes are on the host."""
    gate: threading.Event


class StandIn:
    """A communicator."""

    def __init__(self, nccl: StandInNccl, device: int, size: int, rank: int, line: Connection[Any, Any]) -> None:
        self._size, self._rank = size, rank
        self._nccl, self._driver, self._device, self._line = nccl, nccl.driver, device, line
        self._rounds: SimpleQueue[_Round | None] = SimpleQueue()
        self._gates: list[threading.Event] = []
        self._group: list[_Planned] | None = None
        self.calls: list[str] = []
        """The names of all calls."""
        self.ended = ""
        """``"aborted"`` or ``"destroyed"``."""
        self.was_ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    # ---- the Protocol

    def all_reduce(self, source: int, target: int, count: int, element: str, op: str, stream: int) -> None:
        nbytes = count * np.dtype(getattr(ml_dtypes, element, element)).itemsize
        self._call("all_reduce", (element, op), source, nbytes, target, nbytes, stream)

    def reduce(self, source: int, target: int, count: int, element: str, op: str, root: int, stream: int) -> None:
        nbytes = count * np.dtype(getattr(ml_dtypes, element, element)).itemsize
        self._call("reduce", (element, op, root), source, nbytes, target, nbytes, stream)

    def reduce_scatter(self, source: int, target: int, count: int, element: str, op: str, stream: int) -> None:
        nbytes = count * np.dtype(getattr(ml_dtypes, element, element)).itemsize
        self._call("reduce_scatter", (element, op), source, -nbytes, target, nbytes, stream)

    def all_gather(self, source: int, target: int, nbytes: int, stream: int) -> None:
        self._call("all_gather", (), source, nbytes, target, -nbytes, stream)

    def broadcast(self, source: int, target: int, nbytes: int, root: int, stream: int) -> None:
        self._call("broadcast", (root, nbytes), source, nbytes, target, nbytes, stream)

    def send(self, source: int, nbytes: int, peer: int, stream: int) -> None:
        self._call("send", (peer,), source, nbytes, 0, 0, stream)

    def receive(self, target: int, nbytes: int, peer: int, stream: int) -> None:
        self._call("receive", (peer,), 0, 0, target, nbytes, stream)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        self._group = []
        yield
        group, self._group = self._group, None
        self._queue(group)

    def check(self) -> None:
        if self._nccl.fails == "check":
            raise RuntimeError("NCCL_ERROR_REMOTE_ERROR: a link is lost")

    def abort(self) -> None:
        self._end("aborted")
        for gate in self._gates:
            gate.set()

    def destroy(self) -> None:
        if self._nccl.fails == "destroy":
            raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: it does not end")
        self._end("destroyed")

    # ---- the exchange

    def _end(self, how: str) -> None:
        self.ended = how
        self._rounds.put(None)
        self.was_ended.set()

    def _call(self, kind: str, facts: tuple[Any, ...], *places: int) -> None:
        if self.ended:
            raise RuntimeError(f"NCCL_ERROR_INVALID_ARGUMENT: the communicator is {self.ended}")
        if self._nccl.fails == kind:
            raise RuntimeError(f"NCCL_ERROR_INTERNAL_ERROR: {kind} failed")
        self.calls.append(kind)
        call = _Planned(kind, facts, *places)
        if self._group is None:
            self._queue([call])
        else:
            self._group.append(call)

    def _queue(self, calls: Sequence[_Planned]) -> None:
        driver, device, stream, size = self._driver, self._device, calls[0].stream, self._size
        sent, targets = [], []
        for call in calls:
            nothing = call.kind == "broadcast" and call.facts[0] != self._rank
            values = np.empty(0 if nothing else call.out if call.out >= 0 else -call.out * size, np.uint8)
            if values.nbytes:
                self._copy(values.ctypes.data, call.source, values.nbytes, stream)
            sent.append(Call(call.kind, call.facts, values))
            targets.append(np.empty(call.into if call.into >= 0 else -call.into * size, np.uint8))
        read, written, lane = driver.event(device), driver.event(device), driver.stream(device)
        driver.record(device, read, stream)
        gate = threading.Event()
        self._gates.append(gate)
        if self.ended:  # since this began
            gate.set()
        driver.hold(device, lane, gate.is_set)
        driver.record(device, written, lane)
        driver.wait(device, stream, written)
        driver.end_stream(device, lane)
        for call, values in zip(calls, targets, strict=True):
            if values.nbytes and not (call.kind == "reduce" and call.facts[2] != self._rank):
                self._copy(call.target, values.ctypes.data, values.nbytes, stream)
        self._rounds.put(_Round(sent, targets, read, gate))

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._driver.copy(self._device, target, source, 1, nbytes, (nbytes, nbytes), stream)

    def _run(self) -> None:
        while (now := self._rounds.get()) is not None:
            until_done(self._driver, self._device, now.read)  # NCCL's kernels begin after the stream's work
            try:
                self._line.send([call._replace(data=call.data.tobytes()) for call in now.calls])
                answers = self._line.recv()
            except (EOFError, OSError):  # as NCCL, which waits for a rank that is gone until it is aborted
                return
            for target, data in zip(now.targets, answers, strict=True):
                if data is not None:
                    target[:] = np.frombuffer(data, np.uint8)
            now.gate.set()
