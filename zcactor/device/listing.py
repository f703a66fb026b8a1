"""The GPUs that a node offers, by UUID. This process does not initialise CUDA for that: one that has done so cannot
fork workers that use GPUs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from zcactor.device.visible import visible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["list_gpus"]

_PROC: Final = "proc/driver/nvidia/gpus"
_SMI: Final = ("nvidia-smi", "--query-gpu=uuid,name", "--format=csv,noheader")
_ASK: Final = """import sys; sys.path[:] = {path!r}
from zcactor.device.cuda.calls import CudaCalls, bindings
cuda = CudaCalls(bindings())
print(*(cuda.fact(index).uuid for index in range(len(cuda.devices))), sep="\\n")
"""
_PATIENCE: Final = 60.0
"""Seconds for a command: the start of a driver that no process has loaded takes several on hosts with many GPUs."""


def list_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """The UUIDs of NVIDIA's GPUs that processes with `environ` see, in the order of their numbers.

    Args:
        environ: ``CUDA_VISIBLE_DEVICES`` limits the GPUs. Slices of a GPU (``MIG-...``) are taken as they stand there.
        root: the folder of ``proc`` and ``dev``.

    Returns:
        The UUIDs; none where there are no GPUs, or neither the driver's files nor ``nvidia-smi`` nor CUDA tell of any.
    """
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    entries = [] if variable is None else [entry.strip() for entry in variable.split(",")]
    if entries and entries[0].startswith("MIG-"):
        return [entry for entry in entries if entry.startswith("MIG-")]
    gpus = _of_files(root) or _of_smi(environ)
    by_number = any(entry.isdigit() for entry in entries)
    if by_number and len({model for _, model in gpus}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        gpus = []  # CUDA counts the fastest first, and which that is only CUDA knows
    if gpus:
        uuids = [uuid for uuid, _ in gpus]
        return [uuids[number] for number in visible(uuids, variable)]
    return _of_cuda(environ)


def _of_files(root: Path) -> list[tuple[str, str]]:
    """UUID and model of each GPU by the driver's files, in the order of their places on the bus.

    A container may see the files of all GPUs of its host, and have the device files of its own ones alone."""
    gpus = []
    there = {path.name for path in (root / "dev").glob("nvidia[0-9]*")}
    for folder in sorted((root / _PROC).glob("*")):
        try:
            text = (folder / "information").read_text(encoding="ascii", errors="replace")
        except OSError:  # a GPU that was just taken out, or a file that this user may not read
            continue
        facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
        uuid, minor = facts.get("GPU UUID", ""), facts.get("Device Minor", "")
        hidden = there and minor.isdigit() and f"nvidia{minor}" not in there
        if re.fullmatch(r"GPU-[0-9a-f-]{36}", uuid) and not hidden:
            gpus.append((uuid, facts.get("Model", "")))
    return gpus


def _of_smi(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    lines = (line.partition(",") for line in _printed(_SMI, environ))
    return [(uuid.strip(), model.strip()) for uuid, _, model in lines if uuid.startswith("GPU-")]


def _of_cuda(environ: Mapping[str, str]) -> list[str]:
    """The UUIDs by a child that initialises CUDA and ends."""
    found = _printed((sys.executable, "-c", _ASK.format(path=list(map(str, sys.path)))), environ)
    return [line for line in found if line.startswith(("GPU-", "MIG-"))]


def _printed(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The lines that a command prints; none where it cannot be run, or fails."""
    try:
        done = subprocess.run(
            command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, check=False, timeout=_PATIENCE,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
