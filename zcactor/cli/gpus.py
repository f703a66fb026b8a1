"""The findings of ``python -m zcactor doctor`` about arrays on GPUs: the driver, the abilities of each GPU, and whether
bytes from another process come out right."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import zcactor as zc
from zcactor.assembly.devices import offered_gpus
from zcactor.errors import DeviceUnavailable, ZcactorError
from zcactor.process.loops import run
from zcactor.process.nvidia import may_have_gpus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.config import Config
    from zcactor.device.driver import GpuDriver, GpuFacts

__all__ = ["GpuFinding", "Gpus", "RandomSender", "look_at_gpus"]

_PROOF_NBYTES: Final = 64 << 10
_PATIENCE: Final = 60.0
"""Seconds for all transfers: the start of a driver that no process has loaded takes several."""
_EXPORTS: Final = {"vmm": "descriptors", "legacy": "handles", "none": "none"}
_WRONG: Final = (
    "the bytes that came are not those that were sent",
    "use no arrays on this GPU: set gpu to 'off' (ZCACTOR_GPU=off), and test the GPU, as by dcgmi diag -r 3",
)
_NOT_MAPPED: Final = (
    "this GPU's memory cannot be mapped by another process",
    "arrays go through host memory; where this is a container or a virtual machine, try its host",
)


@dataclass(frozen=True, slots=True)
class GpuFinding:
    """One GPU."""

    index: int
    """The number in this process, as in ``device="cuda:0"``."""
    uuid: str
    name: str
    total: int
    """Bytes of its memory."""
    free: int
    """Bytes of its memory that were not allocated."""
    exports: str
    """The way on which memory leaves a process: ``"descriptors"``, ``"handles"`` or ``"none"``."""
    shared_events: bool
    """Whether other processes can wait for its work."""
    readonly_imports: bool | None
    """Whether it refuses writes to memory that was received; None where none was mapped."""
    dma_buf: bool
    """Whether network cards can register its memory."""
    path: str
    """The way that a transfer from another process took: ``"mapped"`` or ``"host"``; empty where it failed."""
    proven: bool
    """Whether 64 KiB of random bytes went that way and came out right."""
    reason: str
    """The reason why memory is not mapped, or why the transfer failed; empty where it is mapped."""
    fix: str
    """The next step; empty where there is none to take."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of this host."""

    driver: str
    """``"cuda"`` or ``"fake"``; empty where no GPU can be used."""
    gpus: tuple[GpuFinding, ...]
    offered: tuple[str, ...]
    """UUIDs of the GPUs that a node of this host gives to actors with ``num_gpus``."""
    reason: str
    """The reason why no GPU can be used, and the next step; empty where some can."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    path: str
    proven: bool
    readonly: bool | None
    reason: str
    fix: str


class RandomSender:
    """An actor that makes random bytes on a GPU."""

    def send(self, device: str) -> tuple[zc.DeviceArray, bytes]:
        """Make an array of random bytes on `device`. Returns it, and the bytes."""
        values = os.urandom(_PROOF_NBYTES)
        return zc.to_device(np.frombuffer(values, np.uint8), device), values


def look_at_gpus(config: Config, root: Path = Path("/")) -> Gpus:
    """Look at the GPUs of this host, and send bytes from another process to this one by each. A node is started for
    that, and ended.

    Args:
        config: the settings. No runtime and no loop may be running in this process.
        root: the folder of ``proc`` and ``dev``.
    """
    try:
        offered = tuple(offered_gpus(config, os.environ, root))
        if not may_have_gpus(config.gpu, root):
            raise DeviceUnavailable(
                "this machine has no GPU of NVIDIA's, or this container does not show it: there is no file "
                f"{root / 'dev/nvidia*'}; start the container with its GPUs, or set gpu to 'fake' (ZCACTOR_GPU=fake) "
                "for fake GPUs"
            )
        return run(_look(config, offered))
    except (ZcactorError, ValueError, OSError, TimeoutError) as error:
        return Gpus("", (), (), str(error) or f"no answer within {_PATIENCE:g} s; nvidia-smi may say more")


async def _look(config: Config, offered: tuple[str, ...]) -> Gpus:
    async with asyncio.timeout(_PATIENCE), zc.init(config=replace(config, address=None)) as runtime:
        driver: GpuDriver = runtime.process.store.devices().driver
        sender: Any = await zc.spawn(RandomSender)
        found = [await _finding(driver, facts, sender) for facts in driver.devices()]
    return Gpus(driver.kind, tuple(found), offered, "")


async def _finding(driver: GpuDriver, facts: GpuFacts, sender: Any) -> GpuFinding:
    transfer = await _transfer(facts, sender)
    return GpuFinding(
        facts.index, facts.uuid, facts.name, facts.total, driver.free(facts.index), _EXPORTS[driver.exporting],
        driver.shared_events, transfer.readonly, driver.exports_to_cards, transfer.path, transfer.proven,
        transfer.reason, transfer.fix,
    )  # fmt: skip


async def _transfer(facts: GpuFacts, sender: Any) -> _Transfer:
    try:
        x, expected = await sender.send(f"cuda:{facts.index}")
        extent: Any = getattr(getattr(x, "holder", None), "extent", None)
        proven = zc.to_host(x).tobytes() == expected
    except ZcactorError as error:
        return _Transfer("", False, None, str(error), "nvidia-smi shows what uses the GPU, and its errors")
    why: Sequence[str] = ("", "") if proven and extent else _NOT_MAPPED if proven else _WRONG
    return _Transfer("mapped" if extent else "host", proven, extent.readonly if extent else None, *why)
