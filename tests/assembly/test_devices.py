"""The GPUs of a process are opened by the settings, when they are needed first, and a node offers those it sees."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from zcactor.assembly.devices import device_opener, offered_gpus
from zcactor.config import Config
from zcactor.errors import DeviceUnavailable


def test_the_settings_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.new_event_loop()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    config = Config(gpu="fake:devices=3", device_capacity=4 << 20, device_keep_nbytes=0)
    store = device_opener(config, loop)()
    assert [gpu.uuid[-2:] for gpu in store.gpus] == ["02", "00"]
    with pytest.raises(DeviceUnavailable, match="switched off"):
        device_opener(Config(gpu="off"), loop)()
    loop.close()


def test_a_driver_that_is_not_there_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def missing() -> None:
        asked.append(1)
        raise DeviceUnavailable("there is no driver")

    monkeypatch.setattr("zcactor.device.cuda.gpu.bindings", missing)
    loop = asyncio.new_event_loop()
    opener = device_opener(Config(), loop)
    for _ in range(3):
        with pytest.raises(DeviceUnavailable, match="no driver"):
            opener()
    assert len(asked) == 1
    loop.close()


def test_what_a_node_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Config(gpu="fake:devices=3")
    uuids = offered_gpus(fake, {})
    assert [uuid[-2:] for uuid in uuids] == ["00", "01", "02"]
    assert offered_gpus(fake, {"CUDA_VISIBLE_DEVICES": f"1,{uuids[0]}"}) == [uuids[1], uuids[0]]
    assert offered_gpus(replace(fake, num_gpus=2), {}) == uuids[:2]
    assert offered_gpus(replace(fake, num_gpus=0), {}) == []
    assert offered_gpus(replace(fake, num_gpus=9), {"CUDA_VISIBLE_DEVICES": ""}) == [], "they are only counted"
    with pytest.raises(ValueError, match=r"num_gpus=4, and this node sees 3 of them .* num_gpus=0\.5"):
        offered_gpus(replace(fake, num_gpus=4), {})
    listed: list[object] = []

    def listing(*asked: object) -> list[str]:
        listed.append(asked)
        return ["GPU-a", "GPU-b"]

    monkeypatch.setattr("zcactor.device.listing.list_gpus", listing)
    (tmp_path / "dev").mkdir()
    assert offered_gpus(Config(), {}, tmp_path) == []
    assert not listed, "nothing is looked for on a machine without NVIDIA's driver"
    (tmp_path / "dev/nvidiactl").touch()
    for kind in ("auto", "cuda", "off"):
        assert offered_gpus(Config(gpu=kind), {"A": "b"}, tmp_path) == ["GPU-a", "GPU-b"]
    assert listed == [({"A": "b"}, tmp_path)] * 3
