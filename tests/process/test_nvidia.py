"""Whether there may be GPUs, by the device files."""

from __future__ import annotations

from pathlib import Path

import pytest

from zcactor.process.nvidia import may_have_gpus


@pytest.mark.parametrize(("file", "found"), [("null", False), ("nvidia0", True), ("nvidiactl", True), ("dxg", True)])
def test_device_files(tmp_path: Path, file: str, found: bool) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / file).touch()
    assert may_have_gpus("auto", tmp_path) is may_have_gpus("off", tmp_path) is found
    assert may_have_gpus("fake", tmp_path) and may_have_gpus("cuda", tmp_path)
