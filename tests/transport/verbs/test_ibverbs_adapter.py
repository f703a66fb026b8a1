"""The adapter of PyPI's ibverbs: the contract on a device, if there is one, and the rest without."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest

from tests.transport.verbs.contract import Rig, VerbsSuite
from zcactor.transport.verbs.base import Binding
from zcactor.transport.verbs.ibverbs_adapter import IbverbsBinding, load
from zcactor.transport.verbs.viability import NotViable, choose_gid, viability


def real_binding() -> IbverbsBinding:
    """The binding, if it finds a device here."""
    try:
        binding = load()
        names = binding.devices()
    except (ImportError, OSError) as error:
        pytest.skip(f"ibverbs cannot be used here: {error}")
    if not names:
        pytest.skip("ibverbs finds no RDMA device")
    return binding


@pytest.mark.rdma
class TestOnADevice(VerbsSuite):
    """The first device."""

    @pytest.fixture
    def rig(self) -> Rig:
        binding = real_binding()
        name = binding.devices()[0]
        device = binding.open(name)
        gid = choose_gid(device.gids(1))
        device.close()
        assert gid is not None
        return Rig(binding, name, gid_index=gid.index)


@pytest.mark.rdma
def test_viable() -> None:
    answer = viability(real_binding(), arena_nbytes=1 << 20)
    assert not isinstance(answer, NotViable), str(answer)
    assert answer.binding == "ibverbs"


def test_not_installed() -> None:
    def importer(name: str) -> ModuleType:
        raise ModuleNotFoundError(name=name)

    with pytest.raises(ModuleNotFoundError):
        load(importer)


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
