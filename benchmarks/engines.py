"""Runs under launchers, and heads that may die: the seconds that users wait, or ratios to a floor of the same run.

::

    python -m benchmarks.engines              # everything that the engines at hand allow
    python -m benchmarks.engines --quick      # fewer runs

Nodes are processes of this machine, of a made-up user. Real launchers are taken where they are installed
(``make engines``); a measure whose launcher is missing is left out, and says why. Times of a launcher begin when the
process of its last rank does: how long the launcher takes to start them is its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import psutil

from benchmarks.harness import Measurement, Scale, at_most, show, spread
from benchmarks.program import options_of, report
from tests.driver.programs import processes, until
from tests.engines.launching import User, unused_ports
from tests.engines.slurm_cluster import missing as no_slurm
from tests.engines.slurm_cluster import slurm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import IO

    from benchmarks.harness import Budget

__all__ = ["ITEM", "main", "measure"]

ITEM: Final = "engines"
LAUNCHED: Final = 2.0
"""Budget: seconds from the start of the last rank's process to the first line of the program."""
STARTS: Final = 2.5
"""Budgets: a head next to an interpreter with NumPy, and a whole run next to a head."""
HEAD_MIB: Final = 40.0
ORDERLY: Final = 5.0
"""Budget: seconds from SIGTERM until no process is left, all actors being closed."""
LOST: Final = 7.0
"""Budget: seconds until a node whose processes were killed is lost, and said to be."""
BACK: Final = 1.5
"""Budget: a head that was killed, next to its first start."""
COMMITS: Final = 3
"""Commits that a spawn may cost."""
TOGETHER: Final = 100
"""Actors that are spawned at once."""
AT_ONCE: Final = 1.3
"""Budget: so many spawns with a log next to those without."""
PLACED: Final = 1.1
"""Budget: calls between nodes of a run next to nodes that were started one by one."""
NODES: Final = 8
RANKS: Final = 4
_ZCACTOR: Final = (sys.executable, "-m", "zcactor")
_PATIENCE: Final = 60.0

FULL, QUICK = Scale(7, 1.0), Scale(3, 0.5)

_SERVING: Final = """
import asyncio, sys, time
import numpy as np
import zcactor as zc

@zc.actor
class Near:
    def one(self, x): return x
    def size(self, array): return array.nbytes

async def spawned(count):
    before = time.perf_counter()
    actors = await asyncio.gather(*(Near.options(num_cpus=0).spawn() for _ in range(count)))
    seconds = time.perf_counter() - before
    for each in actors:
        await zc.kill(each)
    return seconds

async def called(actor, count, value):
    before = time.perf_counter()
    for _ in range(count):
        await actor.one(value) if isinstance(value, int) else await actor.size(value)
    return (time.perf_counter() - before) / count

async def main():
    async with zc.init():
        far = (await zc.nodes())[-1].node_id
        actor = await Near.options(node=far, num_cpus=0).spawn()
        array = zc.ones(64 << 20, "u1")
        await called(actor, 100, 1), await called(actor, 3, array), await spawned(1)
        print("ready", flush=True)
        while line := (await asyncio.to_thread(sys.stdin.readline)).split():
            what, count = line[0], int(line[1])
            if what == "spawn":
                print(await spawned(count), flush=True)
            else:
                print(await called(actor, count, 1 if what == "call" else array), flush=True)

zc.run(main())
"""
"""A program that measures what the lines of its input name, in seconds."""


def _measured(
    name: str, values: Sequence[float], unit: str, budget: Budget, floors: Sequence[float] = (), floor_name: str = ""
) -> Measurement:
    """The measurement of the median of some values, next to the median of their floors."""
    floor = median(floors) if floors else None
    return Measurement(ITEM, name, median(values), unit, floor, floor_name, budget, len(values), spread=spread(values))


class _Serving:
    """A program of `_SERVING` under way, in a run or beside nodes.

    Args:
        user: the user, whose folder it is in.
        command: the words before the interpreter and the program.
        environ: further variables.
    """

    def __init__(self, user: User, *command: str, **environ: str) -> None:
        path = user.folder / "serving.py"
        path.write_text(_SERVING)
        self._process = subprocess.Popen(
            [*command, sys.executable, str(path)], env={**user.variables, **environ}, cwd=user.folder,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        if self._line() != "ready":
            raise RuntimeError(f"{' '.join(command)} did not begin to measure")

    def _line(self) -> str:
        output: IO[str] | None = self._process.stdout
        assert output is not None
        return output.readline().strip()

    def seconds(self, what: str, count: int) -> float:
        """Measure ``"call"`` or ``"array"``, the mean of `count`, or ``"spawn"``, of so many at once."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what} {count}\n")
        self._process.stdin.flush()
        return float(self._line())

    def end(self) -> None:
        """Let the program end in order."""
        self._process.communicate("\n", timeout=_PATIENCE)


def _start(user: User, *arguments: str) -> float:
    """Run ``zcactor start``, which returns when all that it starts is ready; the seconds."""
    return _seconds(user, *_ZCACTOR, "start", *arguments)


def _zcactor(user: User, *arguments: str) -> str:
    """Run a command of zcactor's; return its output."""
    done = subprocess.run([*_ZCACTOR, *arguments], env=user.variables, cwd=user.folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"zcactor {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def _head(user: User) -> dict[str, Any]:
    """The head's line of ``zcactor status``."""
    found: dict[str, Any] = json.loads(_zcactor(user, "status", "--json"))["head"]
    return found


def _seconds(user: User, *command: str) -> float:
    before = time.perf_counter()
    subprocess.run(command, env=user.variables, cwd=user.folder, check=True, capture_output=True)
    return time.perf_counter() - before


def _starts(scale: Scale) -> Iterator[Measurement]:
    """The start of a head, and a whole run without a launcher."""
    numpy, head, run = list[float](), list[float](), list[float]()
    for _ in range(scale.runs):
        with User() as user:
            numpy.append(_seconds(user, sys.executable, "-c", "import numpy"))
            head.append(_start(user, "--head", "--port", str(unused_ports(1)[0])))
            _zcactor(user, "stop")
            run.append(_seconds(user, *_ZCACTOR, "run", "--", "true"))
    yield _measured("zcactor start --head, until it is ready", head, "s", at_most(STARTS), numpy,
                    "an interpreter with NumPy")  # fmt: skip
    yield _measured("zcactor run -- true", run, "s", at_most(STARTS), head, "zcactor start --head")


def _memory(scale: Scale) -> Iterator[Measurement]:
    """The memory of the head's process."""
    with User() as user:
        _start(user, "--head", "--port", "0")
        head = _head(user)
        for _ in range(1, NODES):
            _start(user, "--address", head["address"])
        found = [psutil.Process(head["pid"]).memory_full_info().pss / (1 << 20) for _ in range(scale.runs)]
        yield _measured(f"memory of a head with {NODES} nodes", found, "MiB", at_most(HEAD_MIB, "value"))
        _zcactor(user, "stop")


def _restarts(scale: Scale) -> Iterator[Measurement]:
    """A head that is killed and started again."""
    first, again = list[float](), list[float]()
    for _ in range(scale.runs):
        with User() as user:
            arguments = ("--head", "--port", str(unused_ports(1)[0]))
            first.append(_start(user, *arguments))
            os.kill(_head(user)["pid"], signal.SIGKILL)
            again.append(_start(user, *arguments))
            _zcactor(user, "stop")
    yield _measured("a head that was killed, until it leads again", again, "s", at_most(BACK), first, "its first start")


def _commit(file: Path) -> float:
    """A bare commit of SQLite, durable at its return as those of a head's log are."""
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("CREATE TABLE IF NOT EXISTS t (k INTEGER PRIMARY KEY, v BLOB)")
        before = time.perf_counter()
        for _ in range(10):
            db.execute("INSERT INTO t (v) VALUES (?)", (b"x" * 200,))
        return (time.perf_counter() - before) / 10


def _spawns(scale: Scale) -> Iterator[Measurement]:
    """Spawns with a log next to those without."""
    with User() as plain, User() as logged:
        _start(plain, "--head", "--port", "0")
        _start(logged, "--head", "--port", str(unused_ports(1)[0]))
        one, many = ([list[float](), list[float]()] for _ in range(2))
        floors = list[float]()
        sides = [_Serving(user, ZCACTOR_ADDRESS=_head(user)["address"]) for user in (plain, logged)]
        count = scale.count(TOGETHER, 20)
        for turn in range(scale.runs):
            for side in ((0, 1), (1, 0))[turn % 2]:
                one[side].append(median(sides[side].seconds("spawn", 1) for _ in range(5)))
                many[side].append(sides[side].seconds("spawn", count))
            floors.append(one[0][-1] + COMMITS * _commit(logged.folder / "bare.db"))
        for serving, user in zip(sides, (plain, logged), strict=True):
            serving.end()
            _zcactor(user, "stop")
    yield _measured("a spawn with a log in a file", [1e3 * each for each in one[1]], "ms", at_most(1.0),
                    [1e3 * each for each in floors], f"one without a log and {COMMITS} bare commits")  # fmt: skip
    yield _measured("spawns at once with a log in a file", many[1], "s", at_most(AT_ONCE), many[0],
                    f"{count} without a log")  # fmt: skip


def _place(user: User, rank: int, size: int) -> dict[str, str]:
    """The variables of a rank of a run without a launcher."""
    return {
        "ZCACTOR_RANK": str(rank), "ZCACTOR_SIZE": str(size), "ZCACTOR_RUN": user.mark, "ZCACTOR_HEAD": "127.0.0.1"
    }  # fmt: skip


def _calls(scale: Scale) -> Iterator[Measurement]:
    """Calls and arrays between nodes of a run, and between nodes that were started one by one."""
    with User() as plain, User() as run:
        for user in (plain, run):
            user.variables["ZCACTOR_STORE_CAPACITY"] = str(1 << 28)
        _start(plain, "--head", "--port", "0")
        address = _head(plain)["address"]
        _start(plain, "--address", address)
        member = run.start(*_ZCACTOR, "run", "--", "true", name="member", **_place(run, 1, 2))
        sides = [
            _Serving(plain, ZCACTOR_ADDRESS=address),
            _Serving(run, *_ZCACTOR, "run", "--", **_place(run, 0, 2)),
        ]
        for what, name, count in (
            ("call", "call with an int to another node", scale.count(2000)),
            ("array", "call with an array of 64 MiB to another node", scale.count(1000)),
        ):
            found = [list[float](), list[float]()]
            for turn in range(2 * scale.runs):
                for side in ((0, 1), (1, 0))[turn % 2]:
                    found[side].append(1e6 * sides[side].seconds(what, count))
            yield _measured(f"{name} of a run", found[1], "us", at_most(PLACED), found[0], "nodes started one by one")
        for serving in sides:
            serving.end()
        member.wait(_PATIENCE)
        _zcactor(plain, "stop")


@contextlib.contextmanager
def _running(size: int) -> Iterator[tuple[User, list[subprocess.Popen[str]]]]:
    """A run of some ranks without a launcher, whose program has an actor on each node: the user, and the ranks'
    processes."""
    with User() as user:
        command = (*_ZCACTOR, "run", "--", sys.executable, "waiting.py")
        ranks = [user.start(*command, name=f"rank-{rank}", **_place(user, rank, size)) for rank in range(size)]
        until(lambda: "up" in user.text("rank-0"), "the program", _PATIENCE)
        yield user, ranks


def _ends(scale: Scale) -> Iterator[Measurement]:
    """Runs that are told to end, and runs that lose a node."""
    ended, lost = list[float](), list[float]()
    for _ in range(scale.count(4, 2)):
        with _running(RANKS) as (user, ranks):
            before = time.perf_counter()
            for process in ranks:
                process.send_signal(signal.SIGTERM)
            until(lambda mark=user.mark: not processes(mark), "processes to end", _PATIENCE)  # type: ignore[misc]
            ended.append(time.perf_counter() - before)
            if len(user.closed()) != RANKS:
                raise RuntimeError(f"{len(user.closed())} of {RANKS} actors were closed")
        with _running(2) as (user, ranks):
            member = psutil.Process(ranks[1].pid)
            before = time.perf_counter()
            for each in (member, *member.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            until(lambda user=user: "left" in user.text("rank-0"), "the loss", _PATIENCE)  # type: ignore[misc]
            lost.append(time.perf_counter() - before)
            ranks[0].send_signal(signal.SIGTERM)
            ranks[0].wait(_PATIENCE)
    yield _measured(
        f"SIGTERM to a run of {RANKS} ranks, until no process is left", ended, "s", at_most(ORDERLY, "value")
    )
    yield _measured("a node of a run is killed, until it is lost", lost, "s", at_most(LOST, "value"))


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


def _launchers(scale: Scale) -> Iterator[Measurement]:
    """Runs under real launchers."""
    mpirun = shutil.which("mpirun.openmpi")
    if mpirun is None:
        print("mpirun.openmpi is not installed: make engines does that as root on Debian", file=sys.stderr)
    else:
        with User() as user:
            found = _launched(user, scale, mpirun, "--allow-run-as-root", "--oversubscribe", "-n", str(RANKS))
        yield _measured(f"a run of {RANKS} ranks under mpirun, until the program runs", found, "s",
                        at_most(LAUNCHED, "value"))  # fmt: skip
    reason = no_slurm()
    if reason is not None:
        print(reason, file=sys.stderr)
        return
    with slurm(NODES) as user:
        found = _launched(user, scale, "srun", f"-N{NODES}", "--ntasks-per-node=1", "--no-kill")
    yield _measured(f"a run on {NODES} nodes of Slurm, until the program runs", found, "s", at_most(LAUNCHED, "value"))


def measure(scale: Scale) -> Iterator[Measurement]:
    """Measure all that the engines at hand allow."""
    for part in (_starts, _memory, _restarts, _spawns, _calls, _ends, _launchers):
        yield from part(scale)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and show.

    Returns:
        0; 1 with ``--strict`` when a budget does not hold.
    """
    options = options_of("benchmarks.engines", "Launchers, and heads that may die.").parse_args(arguments)
    found = list(measure(QUICK if options.quick else FULL))
    show("Launchers, and heads that may die", found)
    return report(options, found)


if __name__ == "__main__":
    sys.exit(main())
