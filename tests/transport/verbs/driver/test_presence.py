"""The presence of a device, by the kernel's lists."""

from __future__ import annotations

from pathlib import Path

from zcactor.transport.verbs.driver.presence import has_device


def test_has_device(tmp_path: Path) -> None:
    assert not has_device(tmp_path) and not has_device(tmp_path / "none")
    (tmp_path / "mlx5_0").mkdir()
    assert has_device(tmp_path)
