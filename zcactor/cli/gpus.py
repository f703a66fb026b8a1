"""The findings of ``python -m zcactor doctor`` about arrays on GPUs: the driver, the abilities of each GPU, and whether
bytes from another process come out right."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import zcactor as zc
from zcactor.assembly.devices import offered_gpus
from zcactor.config import rdma_of
from zcactor.errors import DeviceUnavailable, ZcactorError
from zcactor.process.loops import run
from zcactor.process.nvidia import may_have_gpus
from zcactor.transport.verbs.device.viability import NotViable, viability, wishes
from zcactor.transport.verbs.driver import bindings as drivers
from zcactor.transport.verbs.driver.bindings import Absent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zcactor.config import Config
    from zcactor.device.driver import GpuDriver, GpuFacts
    from zcactor.device.memory import GpuMemory
    from zcactor.process.tasks import Tasks
    from zcactor.transport.verbs.device.gpu_memory import RegisteredGpuMemory
    from zcactor.transport.verbs.driver.base import Binding

__all__ = ["GpuFinding", "Gpus", "RandomSender", "look_at_gpus"]

_PROOF_NBYTES: Final = 64 << 10
_PATIENCE: Final = 60.0
"""Seconds for all transfers: the start of a driver that no process has loaded takes several."""
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
    card: str = ""
    """The network card that moved 64 KiB to the GPU and from it, which came out right; empty where none did."""
    no_card: str = ""
    """The reason why none did; empty where one did."""


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

    def send(self, device: str) -> tuple[zc.gpu.DeviceArray, bytes]:
        """Make an array of random bytes on `device`. Returns it, and the bytes."""
        values = os.urandom(_PROOF_NBYTES)
        return zc.gpu.to_device(np.frombuffer(values, np.uint8), device), values


def look_at_gpus(config: Config, root: Path = Path("/"), binding: Binding | Absent | None = None) -> Gpus:
    """Look at the GPUs of this host, and send bytes from another process to this one by each, and by a network card
    if there is one. A node is started for that, and ended.

    Args:
        config: the settings. No runtime and no loop may be running in this process.
        root: the folder of ``proc`` and ``dev``.
        binding: of libibverbs; None looks for the one that `config` names.
    """
    try:
        offered = tuple(offered_gpus(config, os.environ, root))
        if not may_have_gpus(config.gpu, root):
            raise DeviceUnavailable(
                "this machine has no GPU of NVIDIA's, or this container does not show it: there is no file "
                f"{root / 'dev/nvidia*'}; start the container with its GPUs, or set gpu to 'fake' (ZCACTOR_GPU=fake) "
                "for fake GPUs"
            )
        with _card(config, binding) as card:
            return run(_look(config, offered, card))
    except (ZcactorError, ValueError, OSError, TimeoutError) as error:
        return Gpus("", (), (), str(error) or f"no answer within {_PATIENCE:g} s; nvidia-smi may say more")


@contextlib.contextmanager
def _card(config: Config, binding: Binding | Absent | None) -> Iterator[RegisteredGpuMemory | str]:
    """The network card that RDMA would use here, open, or the reason why there is none."""
    if binding is None:
        binding = drivers.bindings(rdma_of(config.verbs).binding)
    found = viability(binding, arena_nbytes=_PROOF_NBYTES, **wishes(config))
    if isinstance(found, NotViable) or isinstance(binding, Absent):
        yield f"RDMA does not work here: {found.reason if isinstance(found, NotViable) else binding}"
        return
    from zcactor.transport.verbs.device.gpu_memory import RegisteredGpuMemory

    with contextlib.ExitStack() as stack:
        device = stack.enter_context(contextlib.closing(binding.open(found.device)))
        yield stack.enter_context(contextlib.closing(RegisteredGpuMemory(device, found.port, found.gid, found.marking)))


async def _look(config: Config, offered: tuple[str, ...], card: RegisteredGpuMemory | str) -> Gpus:
    async with asyncio.timeout(_PATIENCE), zc.init(config=replace(config, address=None, summary="off")) as runtime:
        process = runtime.process
        devices = process.store.devices()
        driver: GpuDriver = devices.driver
        sender: Any = await zc.spawn(RandomSender)
        found = []
        for gpu, facts in zip(devices.gpus, driver.devices(), strict=True):
            finding = await _finding(driver, facts, sender)
            reason = card if isinstance(card, str) else await _direct(process.tasks, card, gpu)
            name = "" if isinstance(card, str) or reason else card.device.name
            found.append(replace(finding, card=name, no_card=reason))
    return Gpus(driver.kind, tuple(found), offered, "")


async def _direct(tasks: Tasks, card: RegisteredGpuMemory, gpu: GpuMemory) -> str:
    """The reason why a network card does not reach a GPU; empty where it does."""
    from zcactor.device.streams import GpuStream
    from zcactor.objects.device_card import prove

    try:
        stream = GpuStream(gpu)
        return await prove(tasks, card, gpu, stream.ptr)
    except ZcactorError as error:
        return str(error)


async def _finding(driver: GpuDriver, facts: GpuFacts, sender: Any) -> GpuFinding:
    transfer = await _transfer(facts, sender)
    return GpuFinding(
        facts.index, facts.uuid, facts.name, facts.total, driver.free(facts.index),
        "descriptors" if driver.exports else "none",
        driver.shared_events, transfer.readonly, driver.exports_to_cards, transfer.path, transfer.proven,
        transfer.reason, transfer.fix,
    )  # fmt: skip


async def _transfer(facts: GpuFacts, sender: Any) -> _Transfer:
    try:
        x, expected = await sender.send(f"cuda:{facts.index}")
        extent: Any = getattr(getattr(x, "holder", None), "extent", None)
        proven = zc.gpu.to_host(x).tobytes() == expected
    except ZcactorError as error:
        return _Transfer("", False, None, str(error), "nvidia-smi shows what uses the GPU, and its errors")
    why: Sequence[str] = ("", "") if proven and extent else _NOT_MAPPED if proven else _WRONG
    return _Transfer("mapped" if extent else "host", proven, extent.readonly if extent else None, *why)
