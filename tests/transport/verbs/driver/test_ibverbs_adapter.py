"""The adapter of PyPI's ibverbs: the contract on a device, if there is one, and the rest without."""

from __future__ import annotations

import os
from types import ModuleType, SimpleNamespace

import pytest

from tests.transport.verbs.on_device import DeviceSuite, not_installed
from zcactor.transport.verbs.driver import ibverbs_adapter
from zcactor.transport.verbs.driver.base import Binding
from zcactor.transport.verbs.driver.codes import EventType
from zcactor.transport.verbs.driver.ibverbs_adapter import load


@pytest.mark.rdma
class TestOnADevice(DeviceSuite):
    """The contract on the first device."""

    adapter = ibverbs_adapter


def test_not_installed() -> None:
    with pytest.raises(ModuleNotFoundError):
        load(not_installed)


def test_no_device() -> None:
    module = ModuleType("ibverbs")
    module.__dict__["get_device_list"] = lambda: [SimpleNamespace(name="mlx5_0")]
    binding = load(lambda _: module)
    assert isinstance(binding, Binding)
    assert binding.devices() == ["mlx5_0"]
    with pytest.raises(OSError, match="rxe0"):
        binding.open("rxe0")


class Context:
    """An open device of the package, whose events are bytes in a pipe."""

    def __init__(self, fd: int) -> None:
        self.async_fd = fd
        self.acknowledged: list[int] = []

    def query_device(self) -> SimpleNamespace:
        """The attributes that the adapter asks for."""
        return SimpleNamespace(phys_port_cnt=1, max_qp_rd_atom=1, max_qp_wr=1, max_srq_wr=1, max_cqe=1)

    def alloc_pd(self) -> Context:
        """A child with a `close`."""
        return self

    def get_async_event(self) -> SimpleNamespace:
        """The next event."""
        return SimpleNamespace(event_type=os.read(self.async_fd, 1)[0])

    def ack_async_event(self, event: SimpleNamespace) -> None:
        """Record the acknowledgement."""
        self.acknowledged.append(event.event_type)

    def close(self) -> None:
        """Do nothing."""


def test_events_are_acknowledged() -> None:
    read, write = os.pipe()
    try:
        context = Context(read)
        module = ModuleType("ibverbs")
        module.__dict__["get_device_list"] = lambda: [SimpleNamespace(name="mlx5_0", open=lambda: context)]
        device = load(lambda _: module).open("mlx5_0")
        os.write(write, bytes([EventType.PORT_ERR, EventType.GID_CHANGE]))
        assert device.async_events() == context.acknowledged == [EventType.PORT_ERR, EventType.GID_CHANGE]
        device.close()
    finally:
        os.close(read)
        os.close(write)


def test_device_that_cannot_be_queried_is_closed() -> None:
    closed = []

    def fail() -> None:
        raise OSError(5, "ibv_query_device failed")

    context = SimpleNamespace(query_device=fail, close=lambda: closed.append(True))
    module = ModuleType("ibverbs")
    module.__dict__["get_device_list"] = lambda: [SimpleNamespace(name="mlx5_0", open=lambda: context)]
    with pytest.raises(OSError, match="ibv_query_device"):
        load(lambda _: module).open("mlx5_0")
    assert closed == [True]
