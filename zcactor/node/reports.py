"""Reports of embedded nodes: a socket in the run directory at which the agent tells processes of its user what its
program's actors do. ``zcactor status`` reads them.

A connection gets one report as JSON, and is closed; nothing is read from it. Both ends ask the kernel for the other
one's user (SO_PEERCRED, unix(7)), and the reader looks at the folder and the socket first: another user may put such
names into a shared temporary directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from zcactor.execution.activity import ActorActivity, ask_activities
from zcactor.ids import ActorId
from zcactor.logs import logger
from zcactor.observe.stats import StatsService
from zcactor.transport.local import unix
from zcactor.transport.os_process import started_at
from zcactor.workers.run_directory import PREFIX, base_directory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zcactor.assembly.process import Process
    from zcactor.control.head import Head
    from zcactor.process.context import LocalProcess

__all__ = ["ActorReport", "ProgramReport", "ReportServer", "activities_of", "programs_here"]

_SUFFIX: Final = ".status"
_LARGEST: Final = 4 << 20
"""Bytes of a report that are read: far above that of `_TOLD` actors."""
_TOLD: Final = 100
"""Actors that a report names."""
_PATIENCE: Final = 1.0
"""Seconds that the processes of actors have to tell their activity."""
_READ: Final = 4.0
"""Seconds in which a report must have come."""


class ActorReport(msgspec.Struct, frozen=True):
    """One actor."""

    actor_id: str
    class_name: str
    name: str
    state: str
    pid: int
    activity: ActorActivity | None
    """None where its process has not told it: its loop is blocked, or it has just started."""
    store_used: int | None
    """Bytes of living objects in the store of its process."""


class ProgramReport(msgspec.Struct, frozen=True):
    """One program with an embedded node."""

    pid: int
    """The pid of the program; 0 where it has just ended."""
    program: str
    """Its command line."""
    seconds: float
    """Seconds since it has started."""
    resources: dict[str, tuple[float, float]]
    """The total and the free amount of each resource."""
    store_used: int | None
    """Bytes of living objects in the program's own store; None where its loop is blocked."""
    store_capacity: int | None
    """Bytes that each of its stores may grow to; likewise."""
    actors: list[ActorReport]
    further: int
    """The number of actors that are not in `actors`."""


async def activities_of(
    process: LocalProcess, actors: Iterable[tuple[str, bytes]]
) -> dict[str, tuple[ActorActivity, int]]:
    """The activity of actors, with the bytes in the stores of their processes, by the actor's id. Those whose process
    does not answer within a second are left out.

    Args:
        process: the asking one.
        actors: the id of each, 32 hexadecimal digits, and its process.
    """
    told = await ask_activities(process, (host for _, host in actors if host), _PATIENCE)
    return {each.actor_id: (each, activity.store_used) for activity in told.values() for each in activity.actors}


class ReportServer:
    """The socket of an embedded node's agent.

    Args:
        process: the agent's own.
        head: the head that it is.
        driver: the process id of the program.
        directory: the run directory.
    """

    def __init__(self, process: Process, head: Head, driver: bytes, directory: Path) -> None:
        self._process = process
        self._head = head
        self._driver = driver
        self._path = directory / f"{process.process.hex()}{_SUFFIX}"
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen, where the system lets us. The file goes with the run directory."""
        try:
            listener = unix.listen(self._path)
            self._path.chmod(0o600)
            self._server = await asyncio.start_unix_server(self._answer, sock=listener)
        except OSError as error:  # the program goes on all the same
            logger.info("zcactor status will not see this program: %s", error)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            if unix.peer_uid(writer.get_extra_info("socket")) in (os.geteuid(), 0):
                writer.write(msgspec.json.encode(await self._report()))
                await writer.drain()

    async def _report(self) -> ProgramReport:
        head, process = self._head, self._process
        alive = [actor for actor in await head.actors() if actor["state"] != "dead"]
        told = alive[:_TOLD]
        total, free = await head.resources()
        hosts = [
            (actor["actor_id"], (await head.locate(ActorId(bytes.fromhex(actor["actor_id"])), False))[1])
            for actor in told
            if actor["state"] == "alive"  # others are waited for
        ]
        used, capacity = await self._store_of_driver()
        activities = await activities_of(process, hosts)
        pid = os.getppid()
        reports = []
        for actor in told:
            activity, store_used = activities.get(actor["actor_id"], (None, None))
            reports.append(
                ActorReport(
                    actor["actor_id"],
                    actor["class_name"],
                    actor["name"] or "",
                    actor["state"],
                    actor["pid"],
                    activity,
                    store_used,
                )
            )
        return ProgramReport(
            pid, _command_line(pid), _age(pid), {name: (total[name], free.get(name, 0.0)) for name in total}, used,
            capacity, reports, len(alive) - len(told),
        )  # fmt: skip

    async def _store_of_driver(self) -> tuple[int | None, int | None]:
        session = self._process.sessions.used.get(self._driver)
        if session is None:
            return None, None
        try:
            async with asyncio.timeout(_PATIENCE):
                stats = await self._process.requests.ask(session, StatsService.stats)
        except TimeoutError:
            return None, None
        return stats["store_used"], stats["store_capacity"]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _age(pid: int) -> float:
    """Seconds since a process has started; 0 where it has ended."""
    started = started_at(pid)
    if started is None:
        return 0.0
    uptime = float(Path("/proc/uptime").read_text("ascii").split()[0])
    return max(uptime - started / os.sysconf("SC_CLK_TCK"), 0.0)


def _is_private_socket(path: Path) -> bool:
    """Whether it is a socket of this user's, to which no other user can connect."""
    try:
        status = path.lstat()
    except OSError:  # it has just gone
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _sockets() -> list[Path]:
    bases = dict.fromkeys((base_directory(), Path(tempfile.gettempdir()), Path(f"/run/user/{os.geteuid()}")))
    return sorted(
        path
        for base in bases
        for folder in base.glob(f"{PREFIX}*")
        if unix.directory_problem(folder) is None
        for path in folder.glob(f"*{_SUFFIX}")
        if _is_private_socket(path)
    )


async def _read(path: Path) -> ProgramReport | None:
    """The report at a socket; None where no process of this user sends one."""
    try:
        async with asyncio.timeout(_READ):
            connection = await unix.connect(path)
            reader, writer = await asyncio.open_unix_connection(sock=connection)
            with contextlib.closing(writer):
                if unix.peer_uid(connection) != os.geteuid():
                    return None
                content = bytearray()
                while len(content) <= _LARGEST and (block := await reader.read(1 << 16)):
                    content += block
        return msgspec.json.decode(content, type=ProgramReport)
    except (OSError, TimeoutError, msgspec.DecodeError, RecursionError):  # it ended, hangs, or is of another version
        return None


async def programs_here() -> list[ProgramReport]:
    """The reports of this user's programs with embedded nodes on this host, by pid."""
    found = await asyncio.gather(*map(_read, _sockets()))
    return sorted((report for report in found if report is not None), key=lambda report: report.pid)
