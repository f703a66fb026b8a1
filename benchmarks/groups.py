"""Groups on one host, next to the sum alone and to a call, and orders of ranks.

The floor of small operations is the round trip of an inline call between the same two ranks. Both times depend on where
the ranks run, so that is fixed, for the call as for the operation:

- **A core for each rank**, as programs run that share work. Left to the system, ranks wander between one core, where a
  call takes 19 us, and two, where it takes 34.
- **No rank waits for a core**: where the user may, they go before other programs.
- **No core halts**: a process of the idle class keeps it awake. A virtual machine wakes a core that has halted in 20 to
  50 us. A call waits for two wake-ups, and an operation for less than one a rank, so cores that halt would flatter it.
- **On one core, too**: the work of both ranks counts there, as nothing is done at the same time, and nobody waits for
  another core. That is the strictest measure. An allreduce of 1 MiB has no budget there: two cores share its work, and
  on one core the sum alone takes 1.8 calls.

Call and operation take turns, and each round gives one ratio. The program is started anew a few times, because the
place of a process's memory costs it something as long as it lives. The round of the median ratio counts. Ranks hold a
core each for sums of 64 MiB, too.

Where torch or mpi4py is installed (``pip install torch mpi4py mpich``), allreduce also stands beside theirs. Their
ranks are processes of their own, which measure when they are asked, so that runs of all libraries take turns:
``python -m benchmarks.groups gloo|mpi``. Rank 0 reads ``BYTES COUNT`` from its standard input and writes the
microseconds of an allreduce: the median of COUNT calls, on the slowest rank.

Orders of ranks are compared with 1,000 random ones by the load of links, and with the best ten of these by prediction,
and the worse of both counts. Predictions are compared with SimGrid, where an interpreter has it: Debian's package
``python3-simgrid``.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt

import zcactor as zc
from benchmarks.harness import Measurement, Scale, at_most, exactly, interleave, median_round, medians, spread
from benchmarks.machine import awake, cores, hold_core
from benchmarks.peers import launcher, told_by_first
from tests.topology.simgrid_judge import interpreter, judged
from zcactor.collectives.folding import fold, operand_of
from zcactor.topology import dragonfly, fat_tree, mesh, orders, plans, torus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence

    from zcactor.topology import Topology


# ---- other libraries

LABELS: Final = {"gloo": "torch's gloo", "mpi": "MPI by mpi4py"}
RANKS: Final = 2
ROOT: Final = Path(__file__).resolve().parents[1]
_PATIENCE: Final = 60.0
"""Seconds for an answer."""


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
        program = [sys.executable, "-m", "benchmarks.groups", self.name]
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
        told: list[int] = told_by_first(comm)
        return told

    def sums(elements: int) -> Callable[[], object]:
        array, out = np.zeros(elements, np.float32), np.empty(elements, np.float32)
        return lambda: comm.Allreduce(array, out)

    serve(comm.rank == 0, share, lambda figure: float(comm.allreduce(figure, MPI.MAX)), sums)


# ---- on one host

MIB: Final = 1 << 20
LARGE: Final = 64 * MIB
SUMS: Final = {"1 KiB": (1 << 10, 2.0), "16 KiB": (16 << 10, 2.0), "1 MiB": (MIB, 4.0)}
"""Bytes of the inputs, and most round trips of an inline call with 1 KiB that an allreduce may take."""
PASSED: Final = {"1 KiB": 1 << 10, "64 MiB": LARGE}
"""Bytes of arrays that are given by reference."""
PASSING: Final = 1.3
"""Most round trips of an inline call with the array."""
LAUNCHES, ROUNDS = 3, 5
"""Starts of the program, at most, and rounds of each small operation in each."""
BASELINES: Final = {"gloo": 0.25, "mpi": 1 / 3}
"""Our time of a large allreduce by that of other libraries."""
SPIN_US: Final = 200.0
"""Microseconds for which ranks stay awake where they are measured beside ranks that never sleep."""
DEATH: Final = 20
"""Milliseconds from SIGKILL to `GroupBroken` at the other member."""

Array = npt.NDArray[Any]


@zc.actor
class Rank:
    """A member that measures. Each figure is the median of its calls, in microseconds."""

    def __init__(self) -> None:
        self.inputs: dict[int, Array] = {}

    @zc.method
    async def hold(self, core: int) -> None:
        """Hold a core."""
        hold_core(core)

    @zc.method(inline=True)
    def first(self, array: Any) -> float:
        """The first element: the call whose round trip is the floor."""
        return float(array[0])

    @zc.method
    async def calls(self, other: Any, nbytes: int, count: int) -> float:
        """Call `first` of another member with an array of so many bytes."""
        array = self._input(nbytes)
        return await self._median(count, lambda: other.first(array))

    @zc.method
    async def reduces(self, group: zc.Group, nbytes: int, count: int, in_place: bool = False) -> float:
        """Sum an array of the store over the group."""
        array = self._input(nbytes)
        if in_place:
            array = np.ones(nbytes // 4, np.float32)
        together = group.size if nbytes <= MIB else 1  # with larger ones both ranks work all of the time
        return await self._median(count, lambda: group.allreduce(array, out=array if in_place else None), together)

    @zc.method
    async def exchanges(self, group: zc.Group, operation: str, nbytes: int, count: int) -> float:
        """Give an array to all members by reference."""
        array = self._input(-nbytes)  # shared, and read-only after the first time
        if operation == "broadcast":
            return await self._median(count, lambda: group.broadcast(array), group.size)
        return await self._median(count, lambda: group.allgather(array, concat=False), group.size)

    @zc.method
    async def sums_alone(self, group: zc.Group, nbytes: int, count: int) -> float:
        """Only sum this rank's part of the inputs of all, through the same mappings."""
        inputs = [operand_of(each) for each in await group.allgather(self._input(-nbytes), concat=False)]
        elements = nbytes // 4 // group.size
        out = zc.empty(elements, np.float32)
        times = []
        for _ in range(count):
            await group.barrier()
            before = time.perf_counter()
            fold("sum", np.dtype(np.float32), inputs, out.ctypes.data, group.rank * elements, elements)
            times.append(time.perf_counter() - before)
        return median(times) * 1e6

    @zc.method
    async def copies(self, nbytes: int, count: int) -> float:
        """Copy an array: the gather of a private result."""
        array = self._input(nbytes)
        out = np.empty_like(array)
        times = []
        for _ in range(count):
            before = time.perf_counter()
            np.copyto(out, array)
            times.append(time.perf_counter() - before)
        return median(times) * 1e6

    @zc.method
    async def breaks(self, group: zc.Group) -> float:
        """Wait in a collective for a member that ends. Returns the time of the error, by the clock of the host."""
        try:
            await group.barrier()
        except zc.GroupBroken:
            return time.monotonic()
        raise RuntimeError("a barrier ended without its last member")

    @zc.method
    async def pid(self) -> int:
        """The pid."""
        return os.getpid()

    def _input(self, nbytes: int) -> Array:
        array = self.inputs.get(nbytes)
        if array is None:
            array = self.inputs[nbytes] = zc.ones(abs(nbytes) // 4, np.float32)
        return array

    @staticmethod
    async def _median(count: int, call: Callable[[], Awaitable[Any]], together: int = 1) -> float:
        """The median of calls, so many of which are timed together: ranks take turns in who works and who waits, so one
        operation is short and the next one long, and a median of single ones would be one or the other."""
        times = []
        for _ in range(max(count // together, 1)):
            before = time.perf_counter()
            for _ in range(together):
                await call()
            times.append((time.perf_counter() - before) / together)
        return median(times) * 1e6


async def _slowest(actors: list[Any], method: str, *args: Any) -> float:
    """The figure of the slower member."""
    return max([float(each) for each in await zc.get([getattr(actor, method)(*args) for actor in actors])])


async def _death() -> float:
    actors: list[Any] = [await Rank.spawn() for _ in range(2)]
    group = await zc.group(actors)
    waiting, pid = actors[0].breaks(group), await actors[1].pid()
    await actors[0].pid()
    before = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    passed = (float(await waiting) - before) * 1e3
    await zc.kill(actors[0])
    return passed


async def _beside(scale: Scale, actors: list[Any], group: zc.Group) -> list[Measurement]:
    """Allreduce beside that of the other libraries which are here."""
    found = []
    async with AsyncExitStack() as stack:
        running = {}
        for name, missing in available().items():
            try:
                if not missing:
                    running[name] = await stack.enter_async_context(Baseline(name))
            except RuntimeError as error:
                missing = str(error)
            if missing:
                print(f"allreduce is not compared with {LABELS[name]}: {missing}", file=sys.stderr)
        for size, nbytes in {"16 KiB": 16 << 10, "1 MiB": MIB, "64 MiB": LARGE}.items() if running else ():
            count = scale.count(1000, least=20) if nbytes < MIB else scale.count(30, least=5)
            subjects: dict[str, Any] = {name: partial(each.allreduce, nbytes, count) for name, each in running.items()}
            subjects["ours"] = partial(_slowest, actors, "reduces", group, nbytes, count)
            times = medians(await interleave(scale.runs, subjects))
            found += [
                Measurement(
                    "collective",
                    f"allreduce, {size}, 2 ranks, beside {LABELS[name]}",
                    times["ours"],
                    "us",
                    times[name],
                    LABELS[name],
                    at_most(BASELINES[name]) if nbytes == LARGE else None,
                    scale.runs,
                )
                for name in running
            ]
        if "mpi" in running:
            found.append(await _awake(scale, actors, running["mpi"]))
    return found


async def _awake(scale: Scale, actors: list[Any], mpi: Baseline) -> Measurement:
    """A small allreduce of ranks that stay awake, beside MPI, whose ranks never sleep."""
    group, nbytes, count = await zc.group(actors, spin_us=SPIN_US), 1 << 10, scale.count(1000, least=20)
    subjects: dict[str, Any] = {
        "mpi": partial(mpi.allreduce, nbytes, count),
        "ours": partial(_slowest, actors, "reduces", group, nbytes, count),
    }
    times = medians(await interleave(scale.runs, subjects))
    return Measurement(
        "collective",
        f"allreduce, 1 KiB, 2 ranks awake, beside {LABELS['mpi']}",
        times["ours"],
        "us",
        times["mpi"],
        LABELS["mpi"],
        None,
        scale.runs,
    )


async def _rounds(scale: Scale, actors: list[Any], group: zc.Group) -> dict[str, list[tuple[float, float]]]:
    """The times of the call and of each small operation, round by round, by the names of the measures."""
    found = {}
    small, few = scale.count(1000, least=50), scale.count(120, least=10)
    ways: dict[str, tuple[int, Any]] = {
        f"allreduce, {size}": (
            1 << 10,
            partial(_slowest, actors, "reduces", group, nbytes, few if nbytes == MIB else small),
        )
        for size, (nbytes, _) in SUMS.items()
    }
    for operation, label in {"allgather": "allgather by reference", "broadcast": "broadcast"}.items():
        for size, nbytes in PASSED.items():
            ways[f"{label}, {size}"] = nbytes, partial(_slowest, actors, "exchanges", group, operation, nbytes, small)
    for name, (nbytes, operation) in ways.items():
        subjects: dict[str, Any] = {"call": partial(actors[0].calls, actors[1], nbytes, small), "ours": operation}
        times = await interleave(ROUNDS, subjects)
        found[name] = [*zip(times["ours"], times["call"], strict=True)]
    return found


async def _small(scale: Scale) -> dict[str, list[tuple[float, float]]]:
    """The times of small operations in one launch, where each rank has a core, and where both share one."""
    found: dict[str, list[tuple[float, float]]] = {}
    own, *others = cores()
    async with zc.init():
        actors: list[Any] = [await Rank.spawn() for _ in range(2)]
        group = await zc.group(actors)
        places = {"2 ranks": (own, others[0])} if others else {}
        for where, chosen in {**places, "2 ranks on one core": (own, own)}.items():
            for actor, core in zip(actors, chosen, strict=True):
                await actor.hold(core)
            found |= {f"{name}, {where}": each for name, each in (await _rounds(scale, actors, group)).items()}
    return found


def _beside_calls(scale: Scale) -> Iterator[Measurement]:
    """Small operations beside a call."""
    found: dict[str, list[tuple[float, float]]] = {}
    with awake(*cores()[:2]):
        for _ in range(min(LAUNCHES, scale.runs)):
            for name, times in zc.run(_small(scale)).items():
                found.setdefault(name, []).extend(times)
    for name, times in found.items():
        ours, call = median_round(*zip(*times, strict=True))
        reduced, unlimited = name.startswith("allreduce"), name == "allreduce, 1 MiB, 2 ranks on one core"
        limit = SUMS[name.split(", ")[1]][1] if reduced else PASSING
        yield Measurement(
            "collective",
            name,
            ours,
            "us",
            call,
            "round trip of an inline call" if reduced else "an inline call with the array",
            None if unlimited else at_most(limit),
            len(times),
            "round of the median ratio",
            spread([*map(itemgetter(0), times)]),
        )


async def _scene(scale: Scale) -> list[Measurement]:
    found = []
    async with zc.init():
        actors: list[Any] = [await Rank.spawn() for _ in range(2)]
        group = await zc.group(actors)
        for actor, core in zip(actors, (cores() * 2)[:2], strict=True):
            await actor.hold(core)
        few = scale.count(30, least=5)
        before = [(await zc.stats(actor)).bytes_copied for actor in actors]
        subjects: dict[str, Any] = {
            "sum": partial(_slowest, actors, "sums_alone", group, LARGE, few),
            "reduce": partial(_slowest, actors, "reduces", group, LARGE, few),
        }
        turns = await interleave(scale.runs, subjects)
        ours, alone = median_round(turns["reduce"], turns["sum"])
        copied = sum([(await zc.stats(actor)).bytes_copied for actor in actors]) - sum(before)
        found.append(
            Measurement(
                "collective",
                "allreduce, 64 MiB, 2 ranks",
                ours / 1e3,
                "ms",
                alone / 1e3,
                "the blocked sum alone",
                at_most(1.25),
                scale.runs,
                "round of the median ratio",
            )
        )
        found.append(Measurement("collective", "copied by them", copied, "B", budget=exactly(0), runs=scale.runs))
        subjects = {
            "reduce": partial(_slowest, actors, "reduces", group, LARGE, few),
            "copy": partial(_slowest, actors, "copies", LARGE, few),
            "in place": partial(_slowest, actors, "reduces", group, LARGE, few, True),
        }
        times = medians(await interleave(scale.runs, subjects))
        found.append(
            Measurement(
                "collective",
                "allreduce in place, 64 MiB",
                times["in place"] / 1e3,
                "ms",
                (times["reduce"] + times["copy"]) / 1e3,
                "the same, and a memcpy",
                at_most(1.25),
                scale.runs,
            )
        )
        actors = [await Rank.spawn() for _ in range(2)]  # which hold no core: other libraries' ranks do not, either
        found += await _beside(scale, actors, await zc.group(actors))
        death = medians(await interleave(scale.runs, {"death": _death}, warm_up=False))["death"]
        found.append(
            Measurement(
                "collective", "SIGKILL to GroupBroken", death, "ms", budget=at_most(DEATH, "value"), runs=scale.runs
            )
        )
    return found


def measure_collective(scale: Scale) -> Iterator[Measurement]:
    """Measure with two members in processes of their own."""
    yield from _beside_calls(scale)
    yield from zc.run(_scene(scale))


# ---- orders of ranks

NBYTES = 256 << 20
"""Bytes of the allreduce."""
RANDOM = 1000
"""Random orders of which the best counts."""
FOLLOWED = 10
"""Random orders that are predicted, as that takes a hundred times as long as to find the load of links."""
FOUND, TIMES_BEST, APART = 1.0, 1.1, 15.0
"""Budgets: seconds to find an order of 1,024 hosts, times the best random one, and per cent between the predictions."""


def _together(network: Topology, hosts: Sequence[Hashable]) -> float:
    """Seconds of a ring whose ranks start each step together."""
    (step,) = plans.steps("ring", len(network.hosts))
    number = {host: index for index, host in enumerate(network.hosts)}
    numbers = [number[host] for host in hosts]
    return step.times * orders.seconds(network._arcs, numbers, step.flows, step.part * NBYTES)


def _orders(scale: Scale) -> Iterator[Measurement]:
    rng = random.Random(0)
    for network in (
        torus(32, 32),
        mesh(32, 32),
        fat_tree(radix=16, levels=3),
        dragonfly(groups=32, routers=8, hosts=4),
    ):
        hosts = rng.sample(list(network.hosts), len(network.hosts))
        before = time.perf_counter()
        network.order(hosts)
        took = time.perf_counter() - before
        yield Measurement(
            "topology", f"order of 1,024 hosts, {network.label}", took, "s", budget=at_most(FOUND, "value")
        )
    for network in (torus(8, 8), fat_tree(radix=8, levels=3, blocking=2), dragonfly(groups=8, routers=4, hosts=2)):
        hosts = list(network.hosts)
        best = network.order(hosts)
        tried = [rng.sample(hosts, len(hosts)) for _ in range(scale.count(RANDOM))]
        tried.sort(key=partial(_together, network))
        together = _together(network, best), _together(network, tried[0])
        others = min(network.predict(NBYTES, hosts=hosts) for hosts in tried[:FOLLOWED])
        followed = network.predict(NBYTES, hosts=best), others
        taken, least = max(together, followed, key=lambda pair: pair[0] / pair[1])
        yield Measurement(
            "topology", f"ring in the best order, {network.label}", taken * 1e3, "ms", least * 1e3,
            "best of random orders", at_most(TIMES_BEST),
        )  # fmt: skip


def _judged() -> Iterator[Measurement]:
    for network, asked in (
        (torus(4, 4), ("ring", "halving", "direct")),
        (fat_tree(radix=4, levels=3), ("ring", "halving", "direct")),
        (torus(8, 8), ("ring", "halving")),
        (dragonfly(groups=8, routers=4, hosts=2), ("ring", "halving")),
    ):
        for plan in asked:
            predicted, found = network.predict(NBYTES, plan=plan), judged(network, NBYTES, plan)
            name = f"{plan} among {len(network.hosts)} hosts, {network.label}: apart from SimGrid"
            apart = abs(predicted / found - 1) * 100
            yield Measurement("topology", name, apart, "%", budget=at_most(APART, "value"))


def measure_topology(scale: Scale) -> Iterator[Measurement]:
    """Measure orders, then predictions where there is a judge."""
    yield from _orders(scale)
    if interpreter() is None:
        print(
            "SimGrid is not installed: predictions are not judged (as root on Debian: apt-get install python3-simgrid)"
        )
    else:
        yield from _judged()


if __name__ == "__main__":
    {"gloo": by_gloo, "mpi": by_mpi}[sys.argv[1]]()
