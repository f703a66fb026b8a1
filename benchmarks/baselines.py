"""Allreduce by other libraries, for comparison: torch's gloo, and MPI by mpi4py. Neither is a dependency.

    pip install torch mpi4py mpich

`available` names those that are installed. `Baseline` runs the ranks of one in processes of their own, which measure
when they are asked, so that runs of all libraries can take turns. The processes are this module as a program:
``python -m benchmarks.baselines gloo|mpi``; rank 0 reads ``BYTES COUNT`` from its standard input and writes the
microseconds of an allreduce: the median of COUNT calls, on the slowest rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LABELS", "Baseline", "available"]

LABELS: Final = {"gloo": "torch's gloo", "mpi": "MPI by mpi4py"}
RANKS: Final = 2
ROOT: Final = Path(__file__).resolve().parents[1]
_PATIENCE: Final = 60.0
"""Seconds for an answer."""


def launcher() -> str | None:
    """The path of ``mpiexec``; the one beside this interpreter comes with the package mpich."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def available() -> dict[str, str]:
    """The baselines by name, each with an empty text, or with what is missing for it."""
    found = {}
    found["gloo"] = "" if importlib.util.find_spec("torch") else "torch is not installed"
    found["mpi"] = (
        "mpi4py is not installed" if not importlib.util.find_spec("mpi4py")
        else "there is no mpiexec; pip install mpich" if launcher() is None
        else ""
    )  # fmt: skip
    return found


class Baseline:
    """The ranks of one library, in processes of their own, within ``async with``.

    Args:
        name: a key of `LABELS`.

    Raises:
        RuntimeError: the ranks do not start; the message has their errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._processes: list[asyncio.subprocess.Process] = []
        self._stack = contextlib.ExitStack()

    async def __aenter__(self) -> Self:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._errors = self._stack.enter_context((Path(folder) / "errors").open("w+"))
        program = [sys.executable, "-m", "benchmarks.baselines", self.name]
        if self.name == "mpi":
            await self._start([str(launcher()), "-n", str(RANKS), *program], {})
        else:
            for rank in range(RANKS):
                await self._start(program, {"RANK": str(rank), "RENDEZVOUS": f"{folder}/rendezvous"})
        try:
            await self._answer()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        try:
            async with asyncio.timeout(_PATIENCE):
                for process in self._processes:
                    await process.wait()
        finally:
            for process in self._processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            self._stack.close()

    async def allreduce(self, nbytes: int, count: int) -> float:
        """Microseconds of a sum of float32 over the ranks.

        Args:
            nbytes: bytes of each rank's input.
            count: number of sums, whose median counts.

        Raises:
            RuntimeError: a rank has ended; the message has its errors.
            TimeoutError: the ranks do not answer.
        """
        stdin = self._processes[0].stdin
        assert stdin is not None
        stdin.write(f"{nbytes} {count}\n".encode())
        return float(await self._answer())

    async def _start(self, command: list[str], environment: dict[str, str]) -> None:
        self._processes.append(
            await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._errors,
                cwd=ROOT,
                env={**os.environ, **environment, "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(RANKS)},
            )
        )

    async def _answer(self) -> str:
        stdout = self._processes[0].stdout
        assert stdout is not None
        async with asyncio.timeout(_PATIENCE):
            line = await stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"{LABELS[self.name]} does not run: {self._errors.read().strip()[-1000:]}")
        return line.decode()


def serve(first: bool, share: Callable[[list[int]], list[int]], slowest: Callable[[float], float], sums: Any) -> None:
    """Measure whenever rank 0 is asked to, until its standard input ends.

    Args:
        first: whether this is rank 0.
        share: gives the numbers of rank 0 to all ranks.
        slowest: the greatest figure of all ranks.
        sums: ``sums(elements)`` makes a function that sums arrays of so many elements of float32.
    """
    if first:
        print("ready", flush=True)
    while True:
        line = sys.stdin.readline() if first else ""
        nbytes, count = share([int(word) for word in line.split()] or [0, 0])
        if not count:
            return
        add = sums(nbytes // 4)
        times = []
        for _ in range(count):
            before = time.perf_counter()
            add()
            times.append(time.perf_counter() - before)
        figure = slowest(median(times) * 1e6)
        if first:
            print(figure, flush=True)


def by_gloo() -> None:
    """Be a rank of torch's gloo, which sums in place."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", f"file://{os.environ['RENDEZVOUS']}", rank=rank, world_size=RANKS)

    def share(numbers: list[int]) -> list[int]:
        told = torch.tensor(numbers)
        dist.broadcast(told, 0)
        return [int(each) for each in told]

    def slowest(figure: float) -> float:
        most = torch.tensor([figure], dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most[0])

    def sums(elements: int) -> Callable[[], object]:
        array = torch.zeros(elements)
        return lambda: dist.all_reduce(array)

    serve(rank == 0, share, slowest, sums)
    dist.destroy_process_group()


def by_mpi() -> None:
    """Be a rank of MPI."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD

    def share(numbers: list[int]) -> list[int]:
        if comm.rank == 0:
            for rank in range(1, comm.size):
                comm.send(numbers, rank)
            return numbers
        while not comm.Iprobe(0):
            time.sleep(0.001)  # MPI's own wait keeps a core busy, and this process waits while others measure
        told: list[int] = comm.recv(source=0)
        return told

    def sums(elements: int) -> Callable[[], object]:
        array, out = np.zeros(elements, np.float32), np.empty(elements, np.float32)
        return lambda: comm.Allreduce(array, out)

    serve(comm.rank == 0, share, lambda figure: float(comm.allreduce(figure, MPI.MAX)), sums)


if __name__ == "__main__":
    {"gloo": by_gloo, "mpi": by_mpi}[sys.argv[1]]()
