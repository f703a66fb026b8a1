"""``python -m zcactor demo``: a frame of numbers with many sets of parameters, by multiprocessing, joblib and zcactor.

The command needs no extra. Each way runs in a program of its own (`demo_ways`), one after the other, so that no way
computes beside another one, or in an interpreter that another one has warmed up.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

import zcactor
from zcactor.cli import demo_ways
from zcactor.config import load_config
from zcactor.machine import usable_cpus
from zcactor.node.agent_main import search_path
from zcactor.objectstore.groups import memory_of_machine, own_groups
from zcactor.sizes import size, sized

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

__all__ = [
    "DEFAULT", "LEAST", "SIZE_HELP", "SUMMARY", "Figures", "Refused", "Room", "choose", "compare", "main", "report",
]  # fmt: skip

SUMMARY: Final = "Compute on one frame with many sets of parameters, by multiprocessing, joblib and zcactor."
SIZE_HELP: Final = "Of the frame, as in 64MiB.  [96MiB, less where memory is little]"
DEFAULT: Final = 96 << 20
"""Bytes of the frame: multiprocessing pickles them for each set. The demo takes 15 s of processor time, on 2 cores."""
LEAST: Final = 16 << 20
"""Bytes of the least frame: computing on a smaller one takes less than starting a worker."""
SETS: Final = 12
_MOST_WORKERS: Final = 4
_SEMAPHORES: Final = 1 << 20
"""Bytes that multiprocessing needs in /dev/shm, at most."""
_PATIENCE: Final = 5.0
"""Seconds that a way has to end its workers once it was told to end."""
_INTERRUPTED: Final = 130
"""The exit status after Ctrl-C, as shells have it."""
_TITLES: Final = {
    "argument": "multiprocessing, as argument",
    "initializer": "multiprocessing, by initializer",
    "joblib": "joblib",
    "zcactor": "zcactor",
}


class Refused(Exception):
    """The frame cannot be compared on; the message has the remedy."""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of this machine.

    Attributes:
        free: bytes that programs can still have.
        shared: bytes that are free in /dev/shm.
        workers: worker processes of each way.
        joblib: whether joblib is installed, which puts the frame into /dev/shm.
    """

    free: int
    shared: int
    workers: int
    joblib: bool

    @property
    def copies(self) -> int:
        """The frames that may be in memory at once: ours, its pickle, and of each worker both."""
        return 2 + 2 * self.workers

    @property
    def most(self) -> int:
        """The largest frame in bytes for which there is room, in whole MiB."""
        bounds = [self.free // self.copies]
        if self.joblib:
            bounds.append(self.shared - _SEMAPHORES)
        return max(min(bounds) >> 20 << 20, 0)

    @classmethod
    def here(cls) -> Room:
        """The room of this machine, and of the control groups of this process."""
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":") for line in file)
        left = [int(fields["MemAvailable"].split()[0]) << 10]
        left += [found for group in own_groups() if (found := group.left) is not None]
        try:
            shared = shutil.disk_usage(demo_ways.SHARED).free
        except OSError:  # it is not there
            shared = 0
        workers = min(max(usable_cpus(), 2), _MOST_WORKERS)
        return cls(min(left), shared, workers, find_spec("joblib") is not None)


class Figures(msgspec.Struct, frozen=True):
    """The figures of one way; see `demo_ways.Measured`."""

    start: float
    run: float
    copied: int | None
    memory: int | None
    sums: list[float]

    @property
    def seconds(self) -> float:
        """Seconds from the frame to the last result."""
        return self.start + self.run


def choose(asked: int | None, room: Room) -> int:
    """The bytes of the frame.

    Args:
        asked: bytes that the user has asked for; None for `DEFAULT`, or less where there is little room.
        room: the memory of this machine.

    Raises:
        Refused: there is no room for a frame of that size, or for the least one.
    """
    nbytes = LEAST if asked is None else asked
    if nbytes < LEAST:
        raise Refused(f"--size is {sized(nbytes)}, and the least is {sized(LEAST)}")
    if room.shared < _SEMAPHORES:
        raise Refused(
            f"{demo_ways.SHARED} is not there or full ({sized(room.shared)} are free), and multiprocessing needs it: "
            "mount a tmpfs there (of a container: --shm-size=1g)"
        )
    fits = f"try --size {room.most >> 20}MiB" if room.most >= LEAST else f"the least frame is {sized(LEAST)}"
    if room.joblib and nbytes > room.shared - _SEMAPHORES:
        raise Refused(
            f"joblib puts a frame of {sized(nbytes)} into {demo_ways.SHARED}, which has {sized(room.shared)} free: "
            f"make it larger (of a container: --shm-size=1g), or {fits}"
        )
    if nbytes > room.most:
        raise Refused(
            f"a frame of {sized(nbytes)} needs {sized(nbytes * room.copies)} of memory, because multiprocessing makes "
            f"copies, and {sized(room.free)} are free: {fits}"
        )
    return min(DEFAULT, room.most) if asked is None else nbytes


def _refuse_clusters() -> None:
    """Refuse settings that name a cluster.

    Raises:
        Refused: they do, or there is an error in them.
    """
    try:
        config, sources = load_config()
    except (ValueError, TypeError, OSError) as error:
        raise Refused(" ".join(str(error).split())) from error
    if config.address is not None:
        raise Refused(
            f"{sources['address']} says address = {config.address!r}, and the demo is about this machine alone: "
            "start it without that setting"
        )


def _terminated(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise ``SystemExit`` meanwhile, so that what was begun is undone."""
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _go(way: str, nbytes: int, workers: int) -> Figures | None:
    """Go one way, in a program and a session of its own. None where it has failed: its error stands on standard error.

    Ctrl-C, and any other exception, ends the program and all that it has started.
    """
    program = [sys.executable, "-P", demo_ways.__file__, way, str(nbytes), str(SETS), str(workers)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path())}
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, start_new_session=True
    ) as process:
        assert process.stdout is not None
        line = b""
        try:
            line = process.stdout.readline()
        finally:
            _end(process, patient=line != b"")
    return msgspec.json.decode(line, type=Figures) if line else None


def _end(process: subprocess.Popen[bytes], *, patient: bool) -> None:
    """End a way, and all processes of its session that are left.

    Args:
        process: its program, which was not waited for.
        patient: whether it is about to end by itself. It is told to end otherwise.
    """
    pidfd = os.pidfd_open(process.pid)
    try:
        if not patient or not select.select([pidfd], [], [], _PATIENCE)[0]:
            process.terminate()
            select.select([pidfd], [], [], _PATIENCE)
    finally:
        os.close(pidfd)
        with contextlib.suppress(ProcessLookupError):  # they have all ended
            os.killpg(process.pid, signal.SIGKILL)


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


def _amount(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else sized(nbytes)


def report(nbytes: int, workers: int, found: Mapping[str, Figures]) -> Iterator[str]:
    """The lines of the comparison, of at most 80 columns.

    Args:
        nbytes: of the frame.
        workers: the number of worker processes of each way.
        found: the figures of each way, by its name.
    """
    rows = nbytes // 8 // demo_ways.COLUMNS
    yield (
        f"zcactor {zcactor.__version__}, Python {platform.python_version()}, Linux {platform.release().split('-')[0]}, "
        f"{usable_cpus()} processors, {sized(memory_of_machine())}"
    )
    yield f"A frame of {sized(nbytes)} ({rows:,} rows), {SETS} sets of parameters, {workers} workers:"
    yield ""
    yield f"{'':32}{'start':>8}{'the sets':>10}{'copied':>13}{'memory':>13}"
    for way, each in found.items():
        times = f"{_seconds(each.start):>8}{_seconds(each.run):>10}"
        yield f"{_TITLES[way]:32}{times}{_amount(each.copied):>13}{_amount(each.memory):>13}"
    yield ""
    yield "start     until all workers are there, with the frame if they get it then"
    yield "copied    bytes through pipes and files, and copies that zcactor counts"
    yield "memory    of the processes that were started, beside memory that they share;"
    yield "          of joblib, with its copy of the frame in memory"
    yield "The frame of zcactor's way was made after zc.init(), so it lies in the store."
    yield ""
    by_time = sorted(found, key=lambda way: found[way].seconds)
    yield f"From the frame to all results, {_TITLES[by_time[0]]} is the fastest:"
    yield from (f"  {_seconds(found[way].seconds):>8}  {_TITLES[way]}" for way in by_time)


def compare(asked: str | None) -> int:
    """Compare the ways on this machine; print the figures, and the progress on standard error.

    Args:
        asked: the size of the frame, as in ``"64MiB"``; None for one that this machine has room for.

    Returns:
        The exit status: 0; 1 where a way has failed, or its results differ; 2 where there is no room, or the settings
        name a cluster; 130 after Ctrl-C, which ends all that was started.
    """
    room = Room.here()
    try:
        nbytes = choose(None if asked is None else size(asked), room)
        _refuse_clusters()
    except (Refused, ValueError) as error:
        print(f"zcactor: {error}", file=sys.stderr)
        return 2
    ways = [way for way in demo_ways.WAYS if way != "joblib" or room.joblib]
    if not room.joblib:
        print("zcactor: joblib is not installed, and left out", file=sys.stderr)
    found: dict[str, Figures] = {}
    try:
        with _ended_by_sigterm():
            for way in ways:
                print(f"zcactor: {_TITLES[way]}, with a frame of {sized(nbytes)} ...", file=sys.stderr, flush=True)
                figures = _go(way, nbytes, room.workers)
                if figures is not None:
                    found[way] = figures
    except KeyboardInterrupt:
        return _INTERRUPTED
    if found:
        print("\n".join(report(nbytes, room.workers, found)), flush=True)
    faults = [f"there are no figures of {_TITLES[way]}" for way in ways if way not in found]
    if len({tuple(each.sums) for each in found.values()}) > 1:
        faults.append("the ways have come to different results")
    for fault in faults:
        print(f"zcactor: {fault}", file=sys.stderr)
    return 1 if faults else 0


def main(words: Sequence[str] | None = None) -> int:
    """The command where the extra of the command line is not installed.

    Args:
        words: the arguments of ``zcactor demo``; by default the program's.

    Returns:
        The exit status, as of `compare`.
    """
    parser = argparse.ArgumentParser(prog="zcactor demo", description=SUMMARY)
    parser.add_argument("--size", help=SIZE_HELP)
    return compare(parser.parse_args(words).size)
