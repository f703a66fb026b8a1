"""The receiver's half of a proof: arrays of NumPy and on GPUs, and the reasons against mapping."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from zcactor.errors import DeviceUnavailable
from zcactor.objects.device_proof import proof_of


class Store:
    """A store of a process that sees these GPUs; None for one without a driver."""

    process = b"me"

    def __init__(self, *uuids: str | None) -> None:
        self._uuids = uuids

    def devices(self) -> Any:
        if None in self._uuids:
            raise DeviceUnavailable("GPUs are switched off")
        return SimpleNamespace(gpus=[SimpleNamespace(uuid=uuid) for uuid in self._uuids])


def session(peer: bytes = b"peer", *, maps: bool = True) -> Any:
    return SimpleNamespace(peer_process=peer, connection=SimpleNamespace(fetch_extents=print if maps else None))


@pytest.mark.parametrize(
    ("store", "exports", "maps", "against"),
    [
        (Store(None), True, True, "the actor's process has no GPU: GPUs are switched off"),
        (Store(), True, True, "does not see the GPU GPU-0 (it sees: none)"),
        (Store("GPU-1", "GPU-2"), True, True, "does not see the GPU GPU-0 (it sees: GPU-1, GPU-2)"),
        (Store("GPU-0"), True, True, "the driver of the actor's process refused to map it"),
        (Store("GPU-0"), False, True, "lets no memory of GPUs out"),
        (Store("GPU-0"), True, False, "of one host only"),
    ],
)
async def test_reasons(store: Any, exports: bool, maps: bool, against: str) -> None:
    x = np.arange(10, dtype=np.uint8)
    path, rejected, values = await proof_of(x, "GPU-0", exports, session(maps=maps), store)
    assert (path, values) == ("host", x.tobytes())
    assert against in rejected["mapped"]


async def test_the_own_process() -> None:
    x, store = np.arange(10, dtype=np.uint8), Store("GPU-0")
    found: Any = store
    assert await proof_of(x, "GPU-0", True, session(b"me"), found) == ("mapped", {}, x.tobytes())


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("path", ["", "gpudirect", "pulled"])
async def test_the_reason_against_network_cards_is_told_between_hosts(maps: bool, path: str) -> None:
    x: Any = SimpleNamespace(
        shape=(3,), dtype=np.dtype("u1"), copy_to_host=lambda values: values.fill(5), holder=SimpleNamespace(path=path)
    )
    found: Any = Store("GPU-0")
    way, rejected, values = await proof_of(x, "GPU-0", True, session(maps=maps), found, "no cable")
    assert (way, values) == (path or "host", b"\5\5\5")
    assert rejected.get("gpudirect", "") == ("" if path or maps else "no cable")
