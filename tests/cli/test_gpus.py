"""The findings of the doctor about GPUs: with the fake, and on a machine without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zcactor.cli import gpus
from zcactor.cli.gpus import GpuFinding, Gpus, look_at_gpus
from zcactor.config import Config
from zcactor.device.driver import GpuFacts
from zcactor.device.fake import host_uuids
from zcactor.transport.verbs.driver.fake import FakeFabric


@pytest.fixture(autouse=True)
def all_gpus_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this machine's own choice of GPUs away."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def looked(options: str = "", **settings: Any) -> Gpus:
    """The findings with fake GPUs of these options."""
    return look_at_gpus(Config(gpu=f"fake:{options}", **settings))


def only(seen: Gpus) -> GpuFinding:
    (found,) = seen.gpus
    return found


@pytest.mark.slow
def test_each_gpu_is_proven() -> None:
    uuids = host_uuids("devices=2")
    seen = looked("devices=2,memory=256MiB")
    assert (seen.driver, seen.reason, seen.offered) == ("fake", "", tuple(uuids))
    assert [(each.index, each.uuid) for each in seen.gpus] == list(enumerate(uuids))
    for each in seen.gpus:
        assert (each.total, each.exports, each.shared_events) == (256 << 20, "descriptors", True)
        assert (each.readonly_imports, each.dma_buf) == (True, True)
        assert (each.path, each.proven, each.reason, each.fix) == ("mapped", True, "", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "exports", "path", "readonly"),
    [("readonly=no,dmabuf=no", "descriptors", "mapped", False), ("export=none,events=none", "none", "host", None)],
)
def test_what_a_gpu_cannot_do(options: str, exports: str, path: str, readonly: bool | None) -> None:
    found = only(looked(options, num_gpus=0))
    assert (found.exports, found.path, found.proven, found.readonly_imports) == (exports, path, True, readonly)
    assert (found.dma_buf, found.shared_events) == ("dmabuf=no" not in options, "events=none" not in options)
    assert ("cannot be mapped" in found.reason) is ("try its host" in found.fix) is (path == "host")


CARDS: dict[str, tuple[str, Callable[[FakeFabric], object], str]] = {
    "works": ("", lambda fabric: fabric.add_nic("fake0"), ""),
    "no card": ("", lambda _: None, "RDMA does not work here: there is no RDMA device"),
    "no memory of GPUs": (
        "", lambda fabric: setattr(fabric.add_nic("fake0"), "takes_dma_bufs", False), "cannot register a dma-buf",
    ),
    "no dma-buf": ("dmabuf=no", lambda fabric: fabric.add_nic("fake0"), "exports no memory to network cards"),
    "no stream": ("fail=stream", lambda fabric: fabric.add_nic("fake0"), "stream on GPU 0 failed"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS)
def test_a_network_card_beside_a_gpu(card: str) -> None:
    options, prepare, reason = CARDS[card]
    fabric = FakeFabric()
    prepare(fabric)
    found = only(look_at_gpus(Config(gpu=f"fake:{options}"), binding=fabric.binding()))
    assert found.proven and found.card == ("" if reason else "fake0")
    assert reason in found.no_card and bool(reason) is bool(found.no_card)
    assert not any(nic.devices for nic in fabric.devices), "it is closed"


@pytest.mark.slow
def test_a_transfer_that_fails() -> None:
    found = only(looked("fail=create"))
    assert (found.path, found.proven, found.readonly_imports) == ("", False, None)
    assert "create on GPU 0 failed" in found.reason
    assert "nvidia-smi" in found.fix


class Liar:
    """A sender that says to have sent other bytes."""

    async def send(self, device: str) -> tuple[Any, bytes]:
        assert device == "cuda:3"
        return np.zeros(4, np.uint8), b"abcd"


async def test_bytes_that_come_out_wrong() -> None:
    found = await gpus._transfer(GpuFacts(3, "GPU-3", "a GPU", 1), Liar())
    assert (found.path, found.proven) == ("host", False)
    assert "not those that were sent" in found.reason and "dcgmi" in found.fix


def test_without_a_gpu(tmp_path: Path) -> None:
    seen = look_at_gpus(Config(), tmp_path)
    assert (seen.driver, seen.gpus, seen.offered) == ("", (), ())
    assert "no GPU of NVIDIA's" in seen.reason and "ZCACTOR_GPU=fake" in seen.reason


@pytest.mark.slow
def test_switched_off(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert "switched off" in look_at_gpus(Config(gpu="off"), tmp_path).reason


def test_settings_that_are_wrong() -> None:
    assert "does not know the option 'devices=99'" in looked("devices=99").reason
    assert "num_gpus=3, and this node sees 1 of them" in looked(num_gpus=3).reason
