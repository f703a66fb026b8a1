"""Runs under launchers, and heads that may die: the seconds that users wait, or ratios to a floor of the same run.

::

    python -m benchmarks.engines                # everything that the engines at hand allow
    python -m benchmarks.engines --quick        # fewer runs
    python -m benchmarks.engines deaths drains  # two parts of it

Nodes are processes of this machine, of a made-up user. Real engines are taken where they are installed
(``make engines``); a measure whose engine is missing says why, in the place of a figure. Times of a launcher begin when
the process of its last rank does: how long the launcher takes to start them is its own.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import sys
import time
from typing import TYPE_CHECKING, Final

import psutil

from benchmarks.harness import Measurement, Scale, Unmeasured, at_most, show
from benchmarks.heads import deaths, restarts, spawns
from benchmarks.placed_nodes import calls, drains
from benchmarks.program import options_of, report
from benchmarks.serving import (
    ITEM,
    PATIENCE,
    ZCACTOR,
    head_of,
    measured,
    place,
    seconds_of,
    start,
    zcactor,
)  # fmt: skip
from tests.driver.programs import processes, until
from tests.engines.launching import User, unused_ports
from tests.engines.slurm_cluster import kill_node, slurm
from tests.engines.slurm_cluster import missing as no_slurm

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["PARTS", "main", "measure"]

LAUNCHED: Final = 2.0
"""Budget: seconds from the start of the last rank's process to the first line of the program."""
STARTS: Final = 2.5
"""Budgets: a head next to an interpreter with NumPy, and a whole run next to a head."""
HEAD_MIB: Final = 40.0
ORDERLY: Final = 5.0
"""Budget: seconds from SIGTERM until no process is left, all actors being closed."""
LOST: Final = 7.0
"""Budget: seconds until a node whose processes were killed is lost, and said to be."""
NODES: Final = 8
RANKS: Final = 4
FULL, QUICK = Scale(7, 1.0), Scale(3, 0.5)


def _starts(scale: Scale) -> Iterator[Measurement]:
    """The start of a head, and a whole run without a launcher."""
    numpy, head, run = list[float](), list[float](), list[float]()
    for _ in range(scale.runs):
        with User() as user:
            numpy.append(seconds_of(user, sys.executable, "-c", "import numpy"))
            head.append(start(user, "--head", "--port", str(unused_ports(1)[0])))
            zcactor(user, "stop")
            run.append(seconds_of(user, *ZCACTOR, "run", "--", "true"))
    yield measured("zcactor start --head, until it is ready", head, "s", at_most(STARTS), numpy,
                    "an interpreter with NumPy")  # fmt: skip
    yield measured("zcactor run -- true", run, "s", at_most(STARTS), head, "zcactor start --head")


def _memory(scale: Scale) -> Iterator[Measurement]:
    """The memory of the head's process."""
    with User() as user:
        start(user, "--head", "--port", "0")
        head = head_of(user)
        for _ in range(1, NODES):
            start(user, "--address", head["address"])
        found = [psutil.Process(head["pid"]).memory_full_info().pss / (1 << 20) for _ in range(scale.runs)]
        yield measured(f"memory of a head with {NODES} nodes", found, "MiB", at_most(HEAD_MIB, "value"))
        zcactor(user, "stop")


@contextlib.contextmanager
def _running(size: int) -> Iterator[tuple[User, list[subprocess.Popen[str]]]]:
    """A run of some ranks without a launcher, whose program has an actor on each node: the user, and the ranks'
    processes."""
    with User() as user:
        command = (*ZCACTOR, "run", "--", sys.executable, "waiting.py")
        ranks = [user.start(*command, name=f"rank-{rank}", **place(user, rank, size)) for rank in range(size)]
        until(lambda: "up" in user.text("rank-0"), "the program", PATIENCE)
        yield user, ranks


def _ends(scale: Scale) -> Iterator[Measurement]:
    """Runs that are told to end, and runs that lose a node."""
    ended, lost = list[float](), list[float]()
    for _ in range(scale.count(4, 2)):
        with _running(RANKS) as (user, ranks):
            before = time.perf_counter()
            for process in ranks:
                process.send_signal(signal.SIGTERM)
            until(lambda mark=user.mark: not processes(mark), "processes to end", PATIENCE)  # type: ignore[misc]
            ended.append(time.perf_counter() - before)
            if len(user.closed()) != RANKS:
                raise RuntimeError(f"{len(user.closed())} of {RANKS} actors were closed")
        with _running(2) as (user, ranks):
            member = psutil.Process(ranks[1].pid)
            before = time.perf_counter()
            for each in (member, *member.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            until(lambda user=user: "left" in user.text("rank-0"), "the loss", PATIENCE)  # type: ignore[misc]
            lost.append(time.perf_counter() - before)
            ranks[0].send_signal(signal.SIGTERM)
            ranks[0].wait(PATIENCE)
    yield measured(
        f"SIGTERM to a run of {RANKS} ranks, until no process is left", ended, "s", at_most(ORDERLY, "value")
    )
    yield measured("a node of a run is killed, until it is lost", lost, "s", at_most(LOST, "value"))


_TELLING: Final = "import time; print('program', time.time(), flush=True)"
_NOTING: Final = 'date +%s.%N >> "$STARTS"; exec "$0" -m zcactor run -- "$0" -c "$1"'


def _launched(user: User, scale: Scale, *launcher: str) -> list[float]:
    """Seconds from the start of the last rank's process to the program's first line, of several runs."""
    found = list[float]()
    for number in range(scale.runs):
        starts = user.folder / f"starts-{number}"
        status, text = user.done(*launcher, "/bin/sh", "-c", _NOTING, sys.executable, _TELLING, STARTS=str(starts))
        told = re.search(r"program ([\d.]+)", text)
        if status or told is None:
            raise RuntimeError(f"{launcher[0]} ended with {status}: {text[-300:]}")
        found.append(float(told[1]) - max(map(float, starts.read_text().split())))
    return found


def _mpi(scale: Scale) -> Iterator[Measurement | Unmeasured]:
    """Runs under Open MPI."""
    name = f"a run of {RANKS} ranks under mpirun, until the program runs"
    mpirun = shutil.which("mpirun.openmpi")
    if mpirun is None:
        yield Unmeasured(ITEM, name, "mpirun.openmpi is not installed: make engines does that as root on Debian")
        return
    with User() as user:
        found = _launched(user, scale, mpirun, "--allow-run-as-root", "--oversubscribe", "-n", str(RANKS))
    yield measured(name, found, "s", at_most(LAUNCHED, "value"))


_LOSING: Final = """
import asyncio, os
import zcactor as zc

@zc.actor
class Kept:
    def node(self): return os.environ["SLURMD_NODENAME"]

async def main():
    async with zc.init():
        nodes = [node.node_id for node in await zc.nodes()]
        moving = [await Kept.options(node="spread", num_cpus=0, max_restarts=-1).spawn() for _ in nodes]
        fixed = [await Kept.options(node=node, num_cpus=0).spawn() for node in nodes]
        one, victim = moving[-1], await moving[-1].node()
        others = [actor for actor in fixed if await actor.node() == victim]

        async def moved():
            while True:
                try:
                    if await one.node() != victim: return
                except zc.ZcactorError:
                    await asyncio.sleep(0.01)

        async def dead():
            while True:
                try:
                    await others[0].node()
                except zc.ActorDied:
                    return
                except zc.ZcactorError:
                    await asyncio.sleep(0.01)

        print("victim", victim, flush=True)
        await asyncio.gather(moved(), dead())
        print("lost", flush=True)

zc.run(main())
"""
"""A program that says which of its nodes to kill, and when an actor of that node is elsewhere and another is dead."""


def _cancelled(user: User) -> float:
    """Seconds from ``scancel`` of a run until its actors are closed and no process is left."""
    process = user.start(*_SRUN, f"-N{NODES}", *ZCACTOR, "run", "--", sys.executable, "waiting.py")
    user.says("up")
    _, job = user.done_beside("squeue", "-h", "-o", "%A")
    before = time.perf_counter()
    user.done_beside("scancel", job.strip())
    user.ended({"SLURM_JOB_ID": job.strip(), "SLURM_STEP_ID": "0"})
    seconds = time.perf_counter() - before
    process.wait(PATIENCE)
    if len(user.closed()) != NODES:
        raise RuntimeError(f"{len(user.closed())} of {NODES} actors were closed")
    for name in user.closed():
        (user.folder / name).unlink()
    return seconds


def _bereft(user: User, lost: list[str]) -> float:
    """Seconds from the death of a node, whose name is added to those that are lost, until an actor of it is elsewhere
    and another is known to be dead."""
    command = (*_SRUN, f"-N{NODES - len(lost)}", *([f"--exclude={','.join(lost)}"] if lost else []))
    process = user.start(*command, *ZCACTOR, "run", "--", sys.executable, "-c", _LOSING)
    user.says("victim")
    found = re.search(r"victim (\w+)", user.text())
    assert found is not None
    before = time.perf_counter()
    kill_node(user, found[1])
    user.says("lost")
    seconds = time.perf_counter() - before
    lost.append(found[1])
    process.terminate()
    process.wait(PATIENCE)
    return seconds


_SRUN: Final = ("srun", "--ntasks-per-node=1", "--no-kill")


def _slurm(scale: Scale) -> Iterator[Measurement | Unmeasured]:
    """Runs under Slurm, whose nodes are virtual ones of this machine."""
    begins, ends, losses = (
        f"a run on {NODES} nodes of Slurm, until the program runs",
        f"scancel of a run on {NODES} nodes of Slurm, until no process is left",
        "a node of Slurm is killed, until its actors are elsewhere or dead",
    )
    reason = no_slurm()
    if reason is not None:
        for name in (begins, ends, losses):
            yield Unmeasured(ITEM, name, reason)
        return
    with slurm(NODES) as user:
        found = _launched(user, scale, *_SRUN, f"-N{NODES}")
        yield measured(begins, found, "s", at_most(LAUNCHED, "value"))
        found = [_cancelled(user) for _ in range(scale.count(2))]
        yield measured(ends, found, "s", at_most(ORDERLY, "value"))
        lost = list[str]()
        found = [_bereft(user, lost) for _ in range(scale.count(2))]
        yield measured(losses, found, "s", at_most(LOST, "value"))


PARTS: Final[Mapping[str, Callable[[Scale], Iterator[Measurement | Unmeasured]]]] = {
    "starts": _starts, "memory": _memory, "restarts": restarts, "spawns": spawns, "deaths": deaths, "calls": calls,
    "drains": drains, "ends": _ends, "mpi": _mpi, "slurm": _slurm,
}  # fmt: skip


def measure(scale: Scale, parts: Sequence[str] = ()) -> Iterator[Measurement | Unmeasured]:
    """Measure what the engines at hand allow: these parts, or all."""
    for name in parts or PARTS:
        yield from PARTS[name](scale)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and show.

    Returns:
        0; 1 with ``--strict`` when a budget does not hold.
    """
    parser = options_of("benchmarks.engines", "Launchers, and heads that may die.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"which (default all): {', '.join(PARTS)}")
    options = parser.parse_args(arguments)
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"there is no part {name!r}; parts: {', '.join(PARTS)}")
    lines = list(measure(QUICK if options.quick else FULL, options.parts))
    found = [line for line in lines if isinstance(line, Measurement)]
    show("Launchers, and heads that may die", found)
    return report(options, found, [line for line in lines if isinstance(line, Unmeasured)])


if __name__ == "__main__":
    sys.exit(main())
