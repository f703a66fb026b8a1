"""Measuring a device, on the fake fabric with a clock that only the measured work moves."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import NoReturn

import pytest

from zcactor.transport.cost import CostModel, Line, choose
from zcactor.transport.verbs.device import calibration
from zcactor.transport.verbs.device.calibration import PULL_STEPS, calibrate
from zcactor.transport.verbs.device.viability import choose_gid
from zcactor.transport.verbs.driver.base import Read, Send
from zcactor.transport.verbs.driver.codes import CompletionStatus, LinkLayer
from zcactor.transport.verbs.driver.fake import FakeDevice, FakeFabric
from zcactor.transport.verbs.driver.fake_nic import FakeNic
from zcactor.transport.verbs.driver.fake_queues import FakeQueuePair

MIB = 2**20
COPY = Line(82.5e-9, 10000 * MIB)
READ = Line(3605e-9, 11794 * MIB)
"""The figures of the slides of SC Asia 2018: two such copies are their eager line."""
FREE = Line(0.0, float("inf"))


class Machine:
    """A device whose work takes known times, by its own clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.copy, self.read, self.send, self.step = COPY, READ, FREE, 0.0
        self.done: list[tuple[str, int]] = []
        post_reads, post_sends = FakeQueuePair.post_reads, FakeQueuePair.post_sends

        def reads(qp: FakeQueuePair, requests: Sequence[Read]) -> None:
            self.spend("read", self.read, requests[0].nbytes)
            post_reads(qp, requests)

        def sends(qp: FakeQueuePair, requests: Sequence[Send]) -> None:
            self.spend("send", self.send, requests[0].nbytes)
            post_sends(qp, requests)

        def steps() -> None:
            self.now += calibration._STEPS * self.step

        monkeypatch.setattr(FakeQueuePair, "post_reads", reads)
        monkeypatch.setattr(FakeQueuePair, "post_sends", sends)
        monkeypatch.setattr(calibration, "memmove", lambda to, source, nbytes: self.spend("copy", self.copy, nbytes))
        monkeypatch.setattr(calibration, "_steps", steps)

    def spend(self, kind: str, line: Line, nbytes: int) -> None:
        """Record the work, and let the clock go on."""
        self.done.append((kind, nbytes))
        self.now += line.cost(nbytes)

    def clock(self) -> float:
        """The time in seconds."""
        return self.now


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with the times of the slides."""
    return Machine(monkeypatch)


def run(fabric: FakeFabric, nic: FakeNic, **kwargs: object) -> CostModel:
    """Calibrate through `nic`, and check that nothing stays open."""
    device = fabric.binding(nic.name).open(nic.name)
    gid = None if nic.port.link_layer == LinkLayer.INFINIBAND else choose_gid(device.gids(1))
    try:
        return calibrate(device, nic.port, gid, **kwargs)  # type: ignore[arg-type]
    finally:
        assert not device.closed
        assert len(device.ledger) == 0
        assert nic.pinned == 0


def test_known_costs_give_the_known_limit(fabric: FakeFabric, machine: Machine) -> None:
    model = run(fabric, fabric.add_nic("a"), clock=machine.clock)
    assert model.eager_limit == pytest.approx(31_296, abs=64)
    assert "us + bytes at 5,000 MiB/s, by READ 3.61 us + bytes at 11,794 MiB/s: equal at" in model.reason


def test_the_rate_of_messages_and_the_python_of_a_pull_count(fabric: FakeFabric, machine: Machine) -> None:
    machine.send, machine.step = Line(2e-6, 8000 * MIB), 5e-9
    model = run(fabric, fabric.add_nic("a"), clock=machine.clock)
    eager = Line(165e-9, 1 / (1 / (5000 * MIB) + 1 / (8000 * MIB)))
    expected = choose(eager, Line(READ.latency_s + PULL_STEPS * 5e-9, READ.bytes_per_s))
    assert 4096 < expected.eager_limit < 65536
    assert model.eager_limit == pytest.approx(expected.eager_limit, abs=64)


@pytest.mark.parametrize(
    ("slow", "limit"),
    [(1, 0.015), (1000, 1.5)],  # hardware, and an emulated machine, whose READ of 1 MiB takes 90 ms
    ids=["fast", "slow"],
)
def test_takes_few_samples_of_what_takes_long(fabric: FakeFabric, machine: Machine, slow: int, limit: float) -> None:
    machine.copy = Line(COPY.latency_s * slow, COPY.bytes_per_s / slow)
    machine.read = Line(READ.latency_s * slow, READ.bytes_per_s / slow)
    machine.send, machine.step = Line(machine.read.latency_s, machine.read.bytes_per_s), 0.5e-6 * slow / 10
    run(fabric, fabric.add_nic("a"), clock=machine.clock)
    assert machine.now < limit
    for kind, sizes in (("copy", calibration.COPIES), ("send", calibration.SENDS), ("read", calibration.READS)):
        for nbytes in sizes:
            assert machine.done.count((kind, nbytes)) >= 4, (kind, nbytes)


def test_the_real_clock(fabric: FakeFabric) -> None:
    model = run(fabric, fabric.add_nic("a"))
    assert 4096 <= model.eager_limit <= 65536
    assert model.eager_limit % 64 == 0
    assert fabric.statistics().failures == 0


def test_infiniband(fabric: FakeFabric, machine: Machine) -> None:
    model = run(fabric, fabric.add_nic("ib0", link_layer=LinkLayer.INFINIBAND), clock=machine.clock)
    assert model.eager_limit == pytest.approx(31_296, abs=64)


@pytest.mark.parametrize("longest", [1 << 16, 8192, 1024])
def test_no_message_is_longer_than_the_port_takes(fabric: FakeFabric, machine: Machine, longest: int) -> None:
    run(fabric, fabric.add_nic("a", max_msg_sz=longest), clock=machine.clock)
    assert max(nbytes for kind, nbytes in machine.done if kind != "copy") <= longest


@pytest.mark.parametrize(("high", "limit"), [(16384, 16384), (1000, 960), (64, 64)])
def test_high_bounds_the_limit(fabric: FakeFabric, machine: Machine, high: int, limit: int) -> None:
    assert run(fabric, fabric.add_nic("a"), clock=machine.clock, high=high).eager_limit == limit


def test_high_below_a_cache_line(fabric: FakeFabric, machine: Machine) -> None:
    with pytest.raises(ValueError, match="none from 0 to 32"):
        run(fabric, fabric.add_nic("a"), clock=machine.clock, high=32)


@pytest.mark.parametrize(
    ("part", "what"), [("_send", "a message of 4096 bytes to itself"), ("_read", "a READ of 4096 bytes from itself")]
)
def test_request_fails(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch, part: str, what: str) -> None:
    monkeypatch.setattr(fabric, part, lambda *_: CompletionStatus.REM_ACCESS)
    with pytest.raises(OSError, match=rf"a: {what} failed: REM_ACCESS \(10\)") as caught:
        run(fabric, fabric.add_nic("a"))
    assert caught.value.errno == errno.EIO


def test_request_never_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_SECONDS", 0.01)
    fabric = FakeFabric(manual=True)
    with pytest.raises(TimeoutError, match=r"a message of 4096 bytes to itself did not complete in 0\.01 s"):
        run(fabric, fabric.add_nic("a"))


def refusing(*_: object, **__: object) -> NoReturn:
    """A verb that fails."""
    raise OSError(errno.ENOMEM, "the device refuses")


@pytest.mark.parametrize(
    "verb", ["register", "create_completion_queue", "create_shared_receive_queue", "create_queue_pair"]
)
def test_verb_fails(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setattr(FakeDevice, verb, refusing)
    with pytest.raises(OSError, match="the device refuses"):
        run(fabric, fabric.add_nic("a"))


@pytest.mark.parametrize("verb", ["connect", "post_sends", "post_reads"])
def test_verb_of_the_queue_pair_fails(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setattr(FakeQueuePair, verb, refusing)
    with pytest.raises(OSError, match="the device refuses"):
        run(fabric, fabric.add_nic("a"))


@pytest.mark.parametrize("limit", [0, MIB, 2 * MIB])
def test_memory_cannot_be_registered(fabric: FakeFabric, limit: int) -> None:
    with pytest.raises(OSError, match="cannot register") as caught:
        run(fabric, fabric.add_nic("a", pin_limit=limit))
    assert caught.value.errno == errno.ENOMEM


def test_steps_run(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    original: Callable[..., object] = calibration._step

    def counted(*args: object) -> object:
        nonlocal count
        count += 1
        return original(*args)

    monkeypatch.setattr(calibration, "_step", counted)
    calibration._steps()
    assert count == calibration._STEPS
