"""Reductions of bytes as they arrive: the bits of `fold`, and what leaves them to it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.collectives.test_folding import bits, drawn
from zcactor.collectives import direct as module
from zcactor.collectives.direct import Inflow
from zcactor.collectives.folding import fold, operand_of


class FakeFlow:
    """The bytes of an array, which break after so many."""

    def __init__(self, data: bytes, breaks_after: int) -> None:
        self.data, self.breaks_after = data, breaks_after
        self.at, self.begun, self.times_left = 0, False, 0

    def begin(self) -> None:
        self.begun = True

    def take(self, view: memoryview) -> None:
        assert self.begun
        if self.at + len(view) > self.breaks_after:
            raise ConnectionResetError("the test cuts it")
        view[:] = self.data[self.at : self.at + len(view)]
        self.at += len(view)

    def end(self) -> None:
        pass

    def left(self) -> None:
        self.times_left += 1


class FakeProcess:
    """A process whose leases are arrays."""

    process = b"p" * 16

    def __init__(self, breaks_after: int = 1 << 40, *, flows: bool = True) -> None:
        self.locations = self.placements = self
        self.breaks_after = breaks_after
        self.made: list[FakeFlow] = []
        self.counted = 0
        self._flows = flows

    async def flows(self, leases: list[Any], start: int, nbytes: int) -> list[FakeFlow] | None:
        if not self._flows:
            return None
        flows = [FakeFlow(lease.tobytes()[start : start + nbytes], self.breaks_after) for lease in leases]
        self.made += flows
        return flows

    def flowed(self, nbytes: int) -> None:
        self.counted += nbytes

    def take(self, owner: bytes, nbytes: int) -> Any:
        array = np.empty(nbytes, np.uint8)
        return SimpleNamespace(address=array.ctypes.data, keep=array)


async def reduced(process: Any, op: str, inputs: list[Any], rank: int, low: int, count: int) -> tuple[bool, Any]:
    dtype = inputs[0].dtype
    out = np.zeros(count, dtype)
    others = [each for number, each in enumerate(inputs) if number != rank]
    own = operand_of(inputs[rank])
    own = own._replace(address=own.address + low * dtype.itemsize)
    done = await Inflow(process, op, dtype).reduce(own, rank, others, low, count, operand_of(out))
    return done, out


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16, np.complex64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("op", ["sum", "mean"])
async def test_the_bits_are_those_of_a_fold(
    monkeypatch: pytest.MonkeyPatch, op: str, dtype: Any, threads: int
) -> None:  # fmt: skip
    if op == "mean" and dtype is np.int16:
        op = "sum"
    monkeypatch.setattr(module, "PIECE_NBYTES", 1 << 10)
    monkeypatch.setattr(module, "SHARE_NBYTES", 4 << 10)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2 * threads)))
    rng = np.random.default_rng(5)
    inputs = [drawn(rng, dtype, 9_000) for _ in range(4)]
    for rank, low, count in ((0, 0, 9_000), (1, 17, 8_001), (3, 5, 1)):
        wanted = np.zeros(count, dtype)
        fold(op, np.dtype(dtype), [operand_of(each) for each in inputs], wanted.ctypes.data, low, count)
        process = FakeProcess()
        done, out = await reduced(process, op, inputs, rank, low, count)
        assert done
        assert bits(out) == bits(wanted)
        assert process.counted == 3 * count * out.itemsize
        assert len(process.made) == (3 * threads if count > 1 else 3)
        assert [flow.times_left for flow in process.made] == [1] * len(process.made)


async def test_pieces_of_many_ranks_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECES_NBYTES", 600)
    inputs = [np.arange(1_000, dtype=np.int32) for _ in range(12)]
    done, out = await reduced(FakeProcess(), "sum", inputs, 11, 0, 1_000)
    assert done
    assert np.array_equal(out, 12 * inputs[0])


@pytest.mark.parametrize("process", [FakeProcess(flows=False), FakeProcess(breaks_after=2_000)])
async def test_what_does_not_arrive_is_left_to_others(process: FakeProcess) -> None:
    inputs = [np.ones(1_000) for _ in range(3)]
    done, _ = await reduced(process, "sum", inputs, 1, 0, 1_000)
    assert not done
    assert process.counted == 0
    assert all(flow.times_left == 1 for flow in process.made)


class FakeLease:
    """A lease on bytes of another host."""


def test_what_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RemoteLease", FakeLease)
    lease: Any = FakeLease()
    least = module.LEAST_NBYTES // 4
    array = np.ones(least, np.float32)

    def worth(op: str = "sum", array: Any = array, count: int = least, memory: Any = lease) -> bool:
        return Inflow(FakeProcess(), op, array.dtype).is_worth_it(operand_of(array), [lease, memory], count)  # type: ignore[arg-type]

    assert worth()
    assert not worth(count=least - 1), "a frame less costs more"
    assert not worth("max"), "NumPy reduces them"
    assert not worth(array=np.ones((2, least), np.float32)[:, ::2])
    assert not worth(memory=object()), "it is mapped"
    shifted = np.frombuffer(bytearray(4 * least + 1), np.uint8)[1:].view(np.float32)
    assert worth(array=shifted) == (shifted.ctypes.data % 4 == 0)
