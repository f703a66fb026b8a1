"""The GPUs of a process are opened by the settings, when they are needed first."""

from __future__ import annotations

import asyncio

import pytest

from zcactor.assembly.devices import device_opener
from zcactor.config import Config
from zcactor.errors import DeviceUnavailable


def test_the_settings_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.new_event_loop()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    config = Config(gpu="fake", gpu_fake="devices=3", device_capacity=4 << 20, device_keep_nbytes=0)
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
