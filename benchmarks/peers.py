"""Rows for users: zcactor beside multiprocessing, joblib, Ray, Dask and MPI, each alone on the machine, in turns.

::

    pip install -e . --group peers
    python -m benchmarks peers --json docs/figures/peers.jsonl    # on a machine that does nothing else
    python docs/pictures.py                                       # draw the charts and write the table

A round starts the program of each library, measures and ends it; every round begins with another library. The median of
the rounds counts. A program has one worker process, and does with it as the library's own pages say: a pool of
multiprocessing, joblib's ``Parallel``, an actor of Ray, Dask or zcactor, two ranks of MPI. Libraries that are not
installed are left out, and said to be.

- *start*: from the start of the interpreter to the result of the first call.
- *call*: a call with two numbers, one at a time.
- *calls at once*: 1,000 calls before the first result is waited for. Joblib puts several into one message by itself.
- *array*: an array that the program has just made, until the worker has read its first element.
- *memory*: the proportional set size of the worker, before it has seen an array.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt

import zcactor as zc
from benchmarks.harness import Measurement, Scale, spread
from benchmarks.machine import available_memory, pss

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping

__all__ = ["LIBRARIES", "ROWS", "launcher", "measure_peers", "missing"]

ROOT: Final = Path(__file__).resolve().parents[1]
ARRAYS: Final = {"1 MiB": 1 << 20, "64 MiB": 1 << 26, "1 GiB": 1 << 30}
MEMORY_FACTOR: Final = 6
"""Bytes of free memory for each byte of an array: a pickle and its parts are as large as the array."""
CALLS, AT_ONCE = 2000, 1000
TIMES: Final = 5
"""Arrays of each size, and turns of calls at once, in a round."""
ROWS: Final[Mapping[str, tuple[str, str]]] = {
    "start": ("start", "s"),
    "call": ("call", "us"),
    "calls": (f"{AT_ONCE:,} calls at once", "calls/s"),
    **{f"array {size}": (f"array of {size}", "ms") for size in ARRAYS},
    "memory": ("idle worker", "MB"),
}
"""The name of each row and its unit."""

Array = npt.NDArray[np.float64]


class Worker:
    """The worker's side of libraries."""

    def add(self, a: int, b: float) -> float:
        """The sum."""
        return a + b

    def first(self, array: Array) -> float:
        """The first element: proof that the array is here."""
        return float(array[0])

    def pid(self) -> int:
        """The pid of the process."""
        return os.getpid()


_WORKER: Final = Worker()
ZcactorWorker: Any = zc.actor(type("ZcactorWorker", (Worker,), {"__module__": "benchmarks.peers"}))


@dataclass(frozen=True, slots=True)
class Ways:
    """A library's worker, from its program.

    Attributes:
        call: calls its `Worker.add`, and waits.
        at_once: makes so many of these calls, and then waits for all.
        hand: gives the array to its `Worker.first`.
        pid: asks for its pid.
        prepare: tells it what comes next, where it has to know: ``prepare(WHAT, AMOUNT)``. No time is taken of that.
    """

    call: Callable[[], Any]
    at_once: Callable[[int], Any]
    hand: Callable[[Array], Any]
    pid: Callable[[], Any]
    prepare: Callable[[str, int], None] = lambda *_: None


async def _result(value: Any) -> Any:
    """The value of a way, which is awaited where it has to be."""
    return await value if inspect.isawaitable(value) else value


async def _measure(ways: Ways, what: str, amount: int) -> float:
    """Seconds of so many calls, or of handing over so many bytes; for ``memory`` the worker's bytes."""
    if what == "memory":
        ways.prepare(what, amount)
        return pss(await _result(ways.pid()))
    array = np.ones(amount // 8) if what == "array" else None
    ways.prepare(what, amount)
    before = time.perf_counter()
    if array is not None:
        await _result(ways.hand(array))
    elif what == "calls":
        await _result(ways.at_once(amount))
    else:
        for _ in range(amount):
            await _result(ways.call())
    return time.perf_counter() - before


async def serve(ways: Ways) -> None:
    """Answer lines ``WHAT AMOUNT`` until the input ends."""
    await _measure(ways, "call", 1)
    print("@ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        what, amount = line.split()
        print(f"@{await _measure(ways, what, int(amount))}", flush=True)


async def by_zcactor() -> None:
    """Serve with an actor."""
    async with zc.init():
        worker: Any = await ZcactorWorker.spawn()
        await serve(
            Ways(
                lambda: worker.add(3, 4.5), lambda count: zc.get([worker.add(3, 4.5) for _ in range(count)]),
                worker.first, worker.pid,
            )
        )  # fmt: skip


async def by_multiprocessing() -> None:
    """Serve with a pool of one process."""
    pool = multiprocessing.Pool(1)
    await serve(
        Ways(
            lambda: pool.apply(_WORKER.add, (3, 4.5)), lambda count: pool.starmap(_WORKER.add, [(3, 4.5)] * count, 1),
            lambda array: pool.apply(_WORKER.first, (array,)), lambda: pool.apply(_WORKER.pid),
        )
    )  # fmt: skip


async def by_joblib() -> None:
    """Serve with processes of loky: two, as with one joblib would call in this process."""
    from joblib import Parallel, delayed

    add = delayed(_WORKER.add)
    with Parallel(n_jobs=2) as parallel:
        await serve(
            Ways(
                lambda: parallel([add(3, 4.5)]), lambda count: parallel([add(3, 4.5) for _ in range(count)]),
                lambda array: parallel([delayed(_WORKER.first)(array)]), lambda: parallel([delayed(_WORKER.pid)()])[0],
            )
        )  # fmt: skip


async def by_ray() -> None:
    """Serve with an actor of Ray's, on a node of this program."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    worker = ray.remote(Worker).remote()
    add = worker.add.remote
    await serve(
        Ways(
            lambda: ray.get(add(3, 4.5)), lambda count: ray.get([add(3, 4.5) for _ in range(count)]),
            lambda array: ray.get(worker.first.remote(array)), lambda: ray.get(worker.pid.remote()),
        )
    )  # fmt: skip


async def by_dask() -> None:
    """Serve with an actor of Dask's, on a worker process of a local cluster."""
    from distributed import Client

    client = Client(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None)
    worker = client.submit(Worker, actor=True).result()
    await serve(
        Ways(
            lambda: worker.add(3, 4.5).result(),
            lambda count: [future.result() for future in [worker.add(3, 4.5) for _ in range(count)]],
            lambda array: worker.first(array).result(), lambda: worker.pid().result(),
        )
    )  # fmt: skip


def told_by_first(comm: Any) -> Any:
    """Receive the next message of rank 0, asleep until then: MPI's own wait keeps a core busy, and others measure."""
    while not comm.Iprobe(0):
        time.sleep(0.001)
    return comm.recv(source=0)


async def by_mpi() -> None:
    """Serve with two ranks. The second is told what comes next."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD

    def prepare(what: str, amount: int) -> None:
        comm.send((what, amount), 1)
        comm.Barrier()

    def call() -> None:
        comm.send((3, 4.5), 1)
        comm.recv(source=1)

    def at_once(count: int) -> None:
        for request in [comm.isend((3, 4.5), 1) for _ in range(count)]:
            comm.recv(source=1)
            request.wait()

    def hand(array: Array) -> None:
        comm.Send(array, 1)
        comm.recv(source=1)

    if comm.rank == 0:
        await serve(Ways(call, at_once, hand, lambda: comm.recv(source=1), prepare))
        prepare("end", 0)
        return
    what = ""
    while what != "end":
        what, amount = told_by_first(comm)
        comm.Barrier()
        if what == "array":
            array = np.empty(amount // 8)
            comm.Recv(array, 0)
            comm.send(_WORKER.first(array), 0)
        elif what == "memory":
            comm.send(_WORKER.pid(), 0)
        else:
            for _ in range(amount):
                comm.send(_WORKER.add(*comm.recv(source=0)), 0)


LIBRARIES: Final[Mapping[str, tuple[str, Callable[[], Coroutine[Any, Any, None]]]]] = {
    "zcactor": ("zcactor", by_zcactor),
    "multiprocessing": ("multiprocessing", by_multiprocessing),
    "joblib": ("joblib", by_joblib),
    "Ray": ("ray", by_ray),
    "Dask": ("distributed", by_dask),
    "MPI": ("mpi4py", by_mpi),
}
"""The module that each library needs, and its program."""


def launcher() -> str | None:
    """The path of ``mpiexec``; the one beside this interpreter comes with the package mpich."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def missing(name: str) -> str:
    """The lack because of which a library cannot run here; empty where it runs."""
    module = LIBRARIES[name][0]
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    return "there is no mpiexec; pip install mpich" if name == "MPI" and launcher() is None else ""


class Program:
    """The program of a library, within ``with``.

    Attributes:
        seconds: from its start to the result of its first call.

    Raises:
        RuntimeError: it does not start; the message has its errors.
    """

    def __init__(self, name: str) -> None:
        command = [sys.executable, "-m", "benchmarks.peers", name]
        if name == "MPI":
            command = [str(launcher()), "-n", "2", *command]
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        began = time.perf_counter()
        with contextlib.ExitStack() as undo:
            self._errors = undo.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=ROOT,
                env={**os.environ, **root, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            self._process = undo.enter_context(process)
            self._answer()
            self._undo = undo.pop_all()
        self.seconds = time.perf_counter() - began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()  # closes the program's input, at whose end it ends, and waits

    def measure(self, what: str, amount: int) -> float:
        """See `_measure`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what} {amount}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):  # some libraries print as well
                return line[1:].strip()
        self._errors.seek(0)
        raise RuntimeError(f"its program has ended: {self._errors.read().strip()[-500:]}")


def _round(name: str, scale: Scale) -> dict[str, float]:
    """Start, measure and end a library; the figure of each row."""
    found = {}
    with Program(name) as program:
        found["start"] = program.seconds
        found["memory"] = program.measure("memory", 0) / 1e6
        calls = scale.count(CALLS)
        program.measure("call", calls)  # warms up
        found["call"] = program.measure("call", calls) / calls * 1e6
        found["calls"] = AT_ONCE / median(program.measure("calls", AT_ONCE) for _ in range(TIMES))
        for size, nbytes in ARRAYS.items():
            if MEMORY_FACTOR * nbytes < available_memory() and (scale.share >= 1 or size != "1 GiB"):
                taken = [program.measure("array", nbytes) for _ in range(TIMES + 1)]
                found[f"array {size}"] = median(taken[1:]) * 1e3
    return found


def measure_peers(scale: Scale) -> Iterator[Measurement]:
    """Measure each library that is here. A quick run leaves the largest array out."""
    names = []
    for name in LIBRARIES:
        if reason := missing(name):
            print(f"{name} is left out: {reason}", file=sys.stderr)
        else:
            names.append(name)
    figures: dict[tuple[str, str], list[float]] = {}
    for turn in range(scale.runs):
        for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
            try:
                found = _round(name, scale)
            except RuntimeError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                names.remove(name)
                continue
            for row, figure in found.items():
                figures.setdefault((row, name), []).append(figure)
    for row, (title, unit) in ROWS.items():
        for name in names:
            if taken := figures.get((row, name)):
                yield Measurement(
                    "peers", f"{title}: {name}", median(taken), unit, runs=len(taken), spread=spread(taken)
                )


if __name__ == "__main__":
    from benchmarks import peers  # not as __main__, whose actors a worker would look for in vain

    begin = peers.LIBRARIES[sys.argv[1]][1]
    zc.run(begin()) if sys.argv[1] == "zcactor" else asyncio.run(begin())
