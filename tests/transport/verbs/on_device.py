"""The common tests of both adapters of libibverbs: the contract on the first device, if there is one."""

from __future__ import annotations

from types import ModuleType
from typing import NoReturn

import pytest

from tests.transport.verbs.contract import Rig, VerbsSuite
from zcactor.transport.verbs.device.viability import NotViable, choose_gid, viability
from zcactor.transport.verbs.driver.base import Binding

__all__ = ["DeviceSuite", "not_installed"]


class DeviceSuite(VerbsSuite):
    """The contract, with the mark ``rdma``. A subclass joins by an attribute `adapter`."""

    adapter: ModuleType

    @pytest.fixture
    def binding(self) -> Binding:
        """The adapter's binding; skip the test where it finds no device."""
        name = self.adapter.__name__.rpartition(".")[2]
        try:
            binding: Binding = self.adapter.load()
            names = binding.devices()
        except (ImportError, OSError) as error:
            pytest.skip(f"{name} cannot be used here: {error}")
        if not names:
            pytest.skip(f"{name} finds no RDMA device")
        return binding

    @pytest.fixture
    def rig(self, binding: Binding) -> Rig:
        name = binding.devices()[0]
        device = binding.open(name)
        gid = choose_gid(device.gids(1))
        device.close()
        assert gid is not None
        return Rig(binding, name, gid_index=gid.index)

    def test_viable(self, binding: Binding) -> None:
        answer = viability(binding, arena_nbytes=1 << 20)
        assert not isinstance(answer, NotViable), str(answer)
        assert f"{answer.binding}_adapter" == self.adapter.__name__.rpartition(".")[2]


def not_installed(name: str) -> NoReturn:
    """An importer without modules."""
    raise ModuleNotFoundError(name=name)
