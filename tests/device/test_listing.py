"""The GPUs of a node: by the driver's files, by nvidia-smi, or by a child that asks CUDA."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zcactor.device import listing
from zcactor.device.listing import list_gpus

UUIDS = [f"GPU-{number:08x}-43b6-93b6-1767-5541447af562" for number in range(3)]
INFORMATION = """Model: \t\t {model}
IRQ:   \t\t 41
GPU UUID: \t {uuid}
Bus Location: \t 0000:0{minor}:00.0
Device Minor: \t {minor}
GPU Excluded:\t No
"""


def add_files(root: Path, *models: str, devices: tuple[int, ...] = ()) -> None:
    """Write the driver's files for GPUs of these models, and device files."""
    for minor, model in enumerate(models):
        folder = root / f"proc/driver/nvidia/gpus/0000:0{minor}:00.0"
        folder.mkdir(parents=True)
        text = INFORMATION.format(model=model, uuid=UUIDS[minor], minor=minor)
        (folder / "information").write_text(text)
    (root / "dev").mkdir()
    for minor in devices:
        (root / f"dev/nvidia{minor}").touch()


def add_smi(root: Path, *models: str, status: int = 0) -> dict[str, str]:
    """Write a program ``nvidia-smi`` that knows GPUs of these models. Returns an environment in which it is found."""
    lines = "".join(f"{uuid}, {model}\n" for uuid, model in zip(UUIDS, models, strict=False))
    (root / "bin").mkdir()
    path = root / "bin/nvidia-smi"
    path.write_text(f"#!/bin/sh\ncat <<'EOF'\n{lines}EOF\nexit {status}\n")
    path.chmod(0o755)
    return {"PATH": f"{root / 'bin'}:{os.environ['PATH']}"}


def add_cuda(root: Path, monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
    """Let a child find a module ``cuda.bindings.driver`` that shows GPUs of these UUIDs."""
    package = root / "site/cuda/bindings"
    package.mkdir(parents=True)
    (root / "site/cuda/__init__.py").touch()
    (package / "__init__.py").touch()
    raw = [bytes.fromhex(uuid.removeprefix("GPU-").replace("-", "")) for uuid in uuids]
    (package / "driver.py").write_text(
        "from types import SimpleNamespace\n"
        f"raw = {raw!r}\n"
        "def cuInit(flags): return (0,)\n"
        "def cuDriverGetVersion(): return 0, 13000\n"
        "def cuDeviceGetCount(): return 0, len(raw)\n"
        "def cuDeviceGet(number): return 0, number\n"
        "def cuDeviceGetUuid(number): return 0, SimpleNamespace(bytes=raw[number])\n"
        "def cuDeviceGetName(nbytes, number): return 0, b'GPU\\0'\n"
        "def cuDeviceTotalMem(number): return 0, 1\n"
    )
    monkeypatch.syspath_prepend(root / "site")


def test_by_the_drivers_files(tmp_path: Path) -> None:
    add_files(tmp_path, "H200", "H200", "H200", devices=(0, 1, 2))
    assert list_gpus({}, tmp_path) == UUIDS
    assert list_gpus({"CUDA_VISIBLE_DEVICES": "2,0"}, tmp_path) == [UUIDS[2], UUIDS[0]]
    assert list_gpus({"CUDA_VISIBLE_DEVICES": UUIDS[1][:12]}, tmp_path) == [UUIDS[1]]
    assert list_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def test_a_container_has_the_device_files_of_its_own(tmp_path: Path) -> None:
    add_files(tmp_path, "H200", "H200", "H200", devices=(1,))
    assert list_gpus({}, tmp_path) == [UUIDS[1]]


def test_slices_of_a_gpu_that_cuda_tells_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_cuda(tmp_path, monkeypatch, UUIDS[0])
    driver = tmp_path / "site/cuda/bindings/driver.py"
    text = driver.read_text().replace("b'GPU\\0'", "b'NVIDIA H200 MIG 1g.18gb\\0'")
    driver.write_text(text + "def cuDeviceGetUuid_v2(number): return 0, SimpleNamespace(bytes=b'\\1' * 16)\n")
    assert list_gpus({"PATH": ""}, tmp_path) == ["MIG-01010101-0101-0101-0101-010101010101"]


def test_before_any_device_file_was_made(tmp_path: Path) -> None:
    add_files(tmp_path, "H200", "H200")
    (tmp_path / "proc/driver/nvidia/gpus/0000:09:00.0").mkdir()
    assert list_gpus({}, tmp_path) == UUIDS[:2], "the folder without a file is none"


def test_by_nvidia_smi(tmp_path: Path) -> None:
    environ = add_smi(tmp_path, "A", "A")
    assert list_gpus(environ, tmp_path) == UUIDS[:2]
    assert list_gpus({**environ, "CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == [UUIDS[1]]


def test_by_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_cuda(tmp_path, monkeypatch, *UUIDS[:2])
    environ = {**add_smi(tmp_path, "A", "A", "A", status=9), "CUDA_VISIBLE_DEVICES": "0"}
    assert list_gpus(environ, tmp_path) == UUIDS[:2], "CUDA itself heeds the variable"


def test_numbers_of_unlike_gpus_are_cudas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_cuda(tmp_path, monkeypatch, UUIDS[1])
    add_files(tmp_path, "A", "H200", devices=(0, 1))
    assert list_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == [UUIDS[1]], "the fastest is the first"
    by_bus = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert list_gpus(by_bus, tmp_path) == [UUIDS[0]]
    assert list_gpus({"CUDA_VISIBLE_DEVICES": UUIDS[0]}, tmp_path) == [UUIDS[0]]


def test_slices_of_a_gpu(tmp_path: Path) -> None:
    add_files(tmp_path, "H200")
    assert list_gpus({"CUDA_VISIBLE_DEVICES": "MIG-a, MIG-b"}, tmp_path) == ["MIG-a", "MIG-b"]


def test_without_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_ASK", "raise SystemExit(1)  # {path}")
    assert list_gpus({"PATH": str(tmp_path)}, tmp_path) == []
