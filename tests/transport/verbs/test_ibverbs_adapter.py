"""The adapter of PyPI's ibverbs: the contract on a device, if there is one, and the rest without."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest

from tests.transport.verbs.on_device import DeviceSuite, not_installed
from zcactor.transport.verbs import ibverbs_adapter
from zcactor.transport.verbs.base import Binding
from zcactor.transport.verbs.ibverbs_adapter import load


@pytest.mark.rdma
class TestOnADevice(DeviceSuite):
    """The first device."""

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
