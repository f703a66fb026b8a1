"""Actors that tell which GPUs they see, in a module that workers can import without importing a test."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import zcactor as zc

__all__ = ["Breaker", "Seer", "Sights"]

AT_IMPORT = os.environ.get("CUDA_VISIBLE_DEVICES")
"""The variable as it was before any code of an actor ran."""
Sights = tuple[str | None, str | None, list[str]]


@zc.actor
class Seer:
    """An actor that looks at its GPUs."""

    def __init__(self, fails: bool = False) -> None:
        if fails:
            raise ValueError("not today")

    def seen(self) -> Sights:
        """``CUDA_VISIBLE_DEVICES`` at the import of this module and now, and the UUIDs of the GPUs."""
        return AT_IMPORT, os.environ.get("CUDA_VISIBLE_DEVICES"), [gpu.uuid for gpu in zc.gpu.gpus()]

    def maps(self) -> str:
        """The memory that this process has mapped, once it has used its GPU."""
        zc.zeros(1, device="cuda")
        with open("/proc/self/maps", encoding="utf-8") as file:
            return file.read()

    def die(self) -> None:
        """End the process."""
        os.kill(os.getpid(), signal.SIGKILL)


@zc.actor
class Breaker:
    """An actor whose GPU breaks."""

    def works(self) -> int:
        """Use the GPU for a fill and a copy."""
        return int(zc.gpu.to_host(zc.full(10, 3, "u1", device="cuda")).sum())

    def works_on(self) -> str:
        """As `works`, and go on after an error."""
        try:
            return str(self.works())
        except zc.DeviceError as error:
            return f"fatal: {error.fatal}"

    def forks(self) -> list[str]:
        """The errors of uses of the GPU in a forked child."""
        x = zc.full(10, 3, "u1", device="cuda")
        uses: list[Callable[[], Any]] = [
            lambda: zc.zeros(3, device="cuda"), lambda: x.fill(1), lambda: zc.gpu.to_host(x), x.copy, zc.gpu.gpus,
        ]  # fmt: skip
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                for use in uses:
                    os.write(writes, f"{_error_of(use)}\n".encode())
            finally:
                os._exit(0)
        os.close(writes)
        with open(reads, encoding="utf-8") as file:
            told = file.read().splitlines()
        os.waitpid(pid, 0)
        return [*told, str(self.works())]


def _error_of(use: Callable[[], Any]) -> str:
    try:
        use()
    except zc.ZcactorError as error:
        return type(error).__name__
    return "none"
