"""The parts of a head that its membership needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

    from zcactor.control.draining import Draining
    from zcactor.control.handle_grants import HandleGrants
    from zcactor.control.recipes import Recipes
    from zcactor.control.recorder import HeadRecorder
    from zcactor.ids import ProcessId
    from zcactor.process.context import LocalProcess
    from zcactor.workers.worker_table import WorkerRecord

__all__ = ["HeadAgent", "Showing"]


class HeadAgent(Protocol):
    """The parts of `zcactor.control.head.Head` that the membership needs."""

    process: LocalProcess
    driver: ProcessId
    closing: bool
    recorder: HeadRecorder
    draining: Draining
    grants: HandleGrants
    recipes: Recipes

    async def worker_ready(self, process: ProcessId, pid: int, address: str) -> None:
        """Note that a worker of another node serves."""

    def worker_ended(self, record: WorkerRecord) -> None:
        """Note the end of a worker."""

    def stop_owned(self, driver: ProcessId, grace: float) -> list[asyncio.Task[None]]:
        """Begin to stop the actors of a program that is about to go in `grace` seconds."""

    def end_owned(self, driver: ProcessId) -> None:
        """Retire the actors of a program that is gone."""


class Showing(Protocol):
    """A console for the output of workers; see `zcactor.control.console.Console`."""

    def show(self, driver: ProcessId, stream: str, prefix: str, lines: list[str]) -> None:
        """Show the output of a worker on another node."""

    async def show_all(self, driver: ProcessId | None = None) -> None:
        """Wait until the rest of the output is shown, at one program or at all."""
