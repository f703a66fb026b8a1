"""Three ways of an array to another process: encoded, through private buffers, and by zcactor, which copies nothing.

::

    python -m benchmarks.thesis --quick               # all media that there are here, at most 90 s
    python -m benchmarks.thesis local tcp             # two of them
    python -m benchmarks.thesis --markdown            # end with the table that has the thesis' figures beside ours

The comparison is that of the thesis "Zero Copy Transport in Distributed Dataflow Applications": a dataflow framework
that encodes its tensors into messages took 2.43 times, and one that copies them through registered buffers of its own
1.21 times as long as with tensors that the card reads where they lie, and writes where they are used.

Work: bare transfers from 64 KiB on, each answered by one number; and steps of a parameter server, in which a worker
sends the gradients of a network, the server subtracts them, and the worker gets all parameters, with the sizes of the
layers of Inception, AlexNet and VGG16.

Media: ``local``, two processes of one host; ``tcp``, the same over the loopback device; ``veth``, two network
namespaces on one cable, which needs root; ``rxe``, the software RDMA device, in a virtual machine where this machine
has none. Times in a guest mean nothing, and ratios do.

The ways (`benchmarks.paths`) run between the same two processes, in turns, and allocate received arrays in the same
way, by NumPy in zcactor's store. Nothing is sealed or authenticated on any of them. *Encode* is pickle's protocol 4
over a socket, and by RDMA through the private buffers. *Private buffers* are a ring of slots of 1 MiB: which both ends
map, or which are sent by a socket, or READ by the receiver.

Copies are counted from outside: a library beneath both processes adds up the bytes that the C library's copying
functions are given (`benchmarks.paths.copies`). A socket's copies by the kernel are in none of the figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import zcactor as zc
from benchmarks.budget_rows import no_guest
from benchmarks.harness import (
    Budget,
    Measurement,
    Sample,
    Scale,
    at_least,
    at_most,
    exactly,
    interleave,
    show,
    spread,
)
from benchmarks.paths.copies import counting, so_far
from benchmarks.paths.messages import WAYS
from benchmarks.paths.models import MODELS
from benchmarks.paths.server import Server, connect
from benchmarks.program import options_of, report
from tests.hosts.netns import Network, missing
from zcactor.transport.verbs.device.viability import NotViable, viability
from zcactor.transport.verbs.driver.bindings import Absent, bindings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.paths.messages import Array, Messages

__all__ = ["MEDIA", "THESIS", "beside", "main"]

KIB: Final = 1 << 10
MIB: Final = 1 << 20
MEDIA: Final = ("local", "tcp", "veth", "rxe")
ZERO_COPY: Final = "zero copy"
THESIS: Final[Mapping[str, float]] = {"encode": 2.43, "private buffers": 1.21}
"""The thesis' times of the other ways, next to zero copy."""
SIZES: Final = (64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
"""Bytes of the bare transfers. A quick run leaves the last one out."""
GUEST_SIZES: Final = (64 * KIB, MIB, 4 * MIB)
BUDGET_NBYTES: Final = MIB
"""Bytes from which zero copy must be the fastest."""
COUNTED_NBYTES: Final = 16 * MIB
COPIES: Final[Mapping[str, Budget]] = {
    "encode": at_least(3.9, "value"), "private buffers": exactly(2), ZERO_COPY: exactly(0)
}  # fmt: skip
"""Copies of each byte. Some parts that a socket delivers are smaller than what is counted."""
COPIED: Final = "copies of each byte"
ROUND_NBYTES: Final = 32 * MIB
"""Bytes of one sample of transfers; at most `ROUND` of them."""
ROUND: Final = 32
GUEST_ROUND: Final = 4
STORE_NBYTES: Final = 4 << 30
GUEST_STORE_NBYTES: Final = 256 * MIB
SECONDS: Final = 600.0
"""Seconds that a medium may take."""

FULL, QUICK = Scale(9, 1.0), Scale(3, 0.25)


# ---- the worker


class Worker:
    """The measuring end of all ways.

    Args:
        medium: one of `MEDIA`.
        server: the actor at the other end.
        others: the connections of the other ways.
    """

    def __init__(self, medium: str, server: Any, others: Mapping[str, Messages]) -> None:
        self.medium = medium
        self._server = server
        self._others = others
        self._steps = 0

    async def pass_on(self, way: str, array: Array, times: int) -> float:
        """Milliseconds of a transfer."""
        before = time.perf_counter()
        for _ in range(times):
            if way == ZERO_COPY:
                first = await self._server.take(array)
            else:
                await self._others[way].send([array])
                first = (await self._others[way].receive())[0][0]
            assert first == array[0]
        return (time.perf_counter() - before) / times * 1e3

    async def begin(self) -> None:
        """Have the server forget its parameters: those of the next step have other sizes."""
        await self._server.forget()
        self._steps = 0

    async def step(self, way: str, gradients: list[Array]) -> float:
        """Milliseconds of a step."""
        before = time.perf_counter()
        if way == ZERO_COPY:
            parameters = await self._server.step(gradients)
        else:
            await self._others[way].send(gradients)
            parameters = await self._others[way].receive()
        taken = (time.perf_counter() - before) * 1e3
        self._steps += 1
        assert all(own[0] == -self._steps * gradient[0] for own, gradient in zip(parameters, gradients, strict=True))
        return taken


async def work(
    medium: str, sizes: Sequence[int], models: Sequence[str], counted: int, runs: int, binding: str, address: str | None
) -> None:
    """Run the worker: print each result as a line of JSON.

    Args:
        medium: one of `MEDIA`.
        sizes: bytes of the transfers.
        models: names of the networks.
        counted: bytes of the transfers whose copies are counted.
        runs: samples of each way.
        binding: of RDMA.
        address: of the cluster's head; None starts a node here.
    """
    transports = {"local": ("local",), "rxe": ("verbs",)}.get(medium, ("tcp",))
    spawning = Server.options(resources={"server": 1}) if address else Server
    async with zc.init(address, transports=transports):
        server: Any = await spawning.spawn()
        with ExitStack() as stack:
            host = zc.Config().host if address is None else address.rsplit(":", 1)[0]
            others = {
                way: await connect(medium, way, await server.listen(medium, way, host, binding), binding, stack)
                for way in WAYS
            }
            worker = Worker(medium, server, others)
            ways = (*WAYS, ZERO_COPY)
            for nbytes in sizes:
                array: Array = zc.ones(nbytes // 4, np.float32)
                times = max(1, min(GUEST_ROUND if medium == "rxe" else ROUND, ROUND_NBYTES // nbytes))
                subjects: dict[str, Sample] = {way: partial(worker.pass_on, way, array, times) for way in ways}
                for way, taken in (await interleave(runs, subjects)).items():
                    _tell(nbytes, way, taken)
            for model in models:
                gradients: list[Array] = [zc.ones(count, np.float32) for count in MODELS[model]]
                steps: dict[str, Sample] = {way: partial(worker.step, way, gradients) for way in ways}
                await worker.begin()
                for way, taken in (await interleave(runs, steps)).items():
                    _tell(model, way, taken)
            array = zc.ones(counted // 4, np.float32)
            for way in ways:
                await worker.pass_on(way, array, 2)
                before = so_far()
                await worker.pass_on(way, array, 4)
                _tell(COPIED, way, [(so_far() - before) / (4 * counted)])


def _tell(what: int | str, way: str, values: list[float]) -> None:
    print(json.dumps({"what": what, "way": way, "values": values}), flush=True)


# ---- the processes


def _environment(medium: str, more: Mapping[str, str]) -> dict[str, str]:
    store = GUEST_STORE_NBYTES if medium == "rxe" else STORE_NBYTES
    return {**os.environ, "ZCACTOR_SEALING": "off", "ZCACTOR_STORE_CAPACITY": str(store), **more}


def _results(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """The results of a worker, as they come.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, "the worker")


@contextlib.contextmanager
def started(medium: str, arguments: Mapping[str, Any], more: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A worker, and all that the medium needs around it.

    Args:
        medium: one of `MEDIA`.
        arguments: of `work`, but for the medium and the address.
        more: further variables of all processes.
    """
    environment = _environment(medium, more)
    program = (sys.executable, "-m", "benchmarks.thesis", "work")
    with ExitStack() as stack:
        if medium != "veth":
            command = [*program, json.dumps({"medium": medium, "address": None, **arguments})]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            stack.enter_context(process)
            stack.callback(process.kill)
            yield process
            return
        here, there = stack.enter_context(Network(2, direct=True))
        environment |= {"ZCACTOR_TOKEN": secrets.token_hex(32), "ZCACTOR_TRANSPORTS": "tcp"}
        address = f"{there.address}:7433"
        zcactor = (sys.executable, "-m", "zcactor", "start")
        for host, how in (
            (there, ("--head", "--host", there.address, "--resources", '{"server": 1}')),
            (here, ("--address", address, "--host", here.address)),
        ):
            node = host.start(*zcactor, *how, env=_changed(environment), stdout=subprocess.DEVNULL)
            if node.wait():
                raise subprocess.CalledProcessError(node.returncode, "zcactor start")
        environment["ZCACTOR_HOST"] = here.address
        command = [*program, json.dumps({"medium": medium, "address": address, **arguments})]
        process = here.start(*command, env=_changed(environment), stdout=subprocess.PIPE, text=True)
        stack.enter_context(process)
        yield process


def _changed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that this process does not have, or not so."""
    return {name: value for name, value in environment.items() if os.environ.get(name) != value}


# ---- the measurements


def named(what: int | str) -> str:
    """The name of a transfer of so many bytes, or of a step."""
    if isinstance(what, str):
        return f"{what} step"
    return f"{what // MIB} MiB" if what >= MIB else f"{what // KIB} KiB"


def rows(medium: str, results: Sequence[Mapping[str, Any]]) -> list[Measurement]:
    """The measurements of a medium. Each way has the next slower one as the floor of its time."""
    taken: dict[int | str, dict[str, list[float]]] = {}
    for result in results:
        taken.setdefault(result["what"], {})[result["way"]] = result["values"]
    copies = taken.pop(COPIED)
    found = [
        Measurement("thesis", f"{medium}, {way}: {COPIED}", copied, "", budget=COPIES[way])
        for way, (copied,) in copies.items()
    ]
    for what, ways in taken.items():
        slower = ""
        for way in (*WAYS, ZERO_COPY):
            budget = at_most(1.0) if slower and (isinstance(what, str) or what >= BUDGET_NBYTES) else None
            floor = median(ways[slower]) if slower else None
            found.append(
                Measurement("thesis", f"{medium}, {named(what)}, {way}", median(ways[way]), "ms", floor, slower, budget,
                            len(ways[way]), spread=spread(ways[way]))
            )  # fmt: skip
            slower = way
    return found


def measure(medium: str, scale: Scale, *, quick: bool, binding: str) -> list[Measurement]:
    """Measure one medium, and count its copies."""
    guest = medium == "rxe"
    sizes = GUEST_SIZES if guest else SIZES[: 4 if quick else 5]
    models: list[str] = [] if guest else list(MODELS)[: 1 if quick else 3]
    counted = GUEST_SIZES[-1] if guest else COUNTED_NBYTES
    arguments = {"sizes": sizes, "models": models, "counted": counted, "runs": scale.runs, "binding": binding}
    with (
        tempfile.TemporaryDirectory(prefix="zcthesis-") as folder,
        started(medium, arguments, counting(Path(folder))) as worker,
    ):
        return rows(medium, list(_results(worker)))


def beside(found: Sequence[Measurement]) -> str:
    """A Markdown table of the ratios to zero copy, with the thesis' above them."""
    times = {m.name: m.value for m in found if m.unit == "ms"}
    lines = [f"| next to {ZERO_COPY} | {' | '.join(THESIS)} |", f"|---|{'---:|' * len(THESIS)}"]
    lines.append(f"| *the thesis* | {' | '.join(f'{ratio:.2f}x' for ratio in THESIS.values())} |")
    for name, least in times.items():
        what, _, way = name.rpartition(", ")
        if way == ZERO_COPY:
            ratios = (f"{times[f'{what}, {other}'] / least:.2f}x" for other in THESIS)
            lines.append(f"| {what} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def _in_guest(*, quick: bool) -> list[Measurement]:
    """Measure by RDMA in a virtual machine."""
    command = [sys.executable, "tools/vm.py", "run", "--memory", "3072", "--timeout", str(round(SECONDS)), "--",
               sys.executable, "-m", "benchmarks.thesis", "rxe", "--json", "/dev/stdout"]  # fmt: skip
    done = subprocess.run(
        [*command, "--quick"] if quick else command, cwd=Path(__file__).resolve().parents[1], stdout=subprocess.PIPE,
        text=True, check=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"item"')]
    return [Measurement.from_plain(line) for line in lines]


def device() -> str:
    """The name of the binding that finds an RDMA device here; empty where there is none."""
    library = bindings(None)
    if isinstance(library, Absent) or isinstance(viability(library, arena_nbytes=0), NotViable):
        return ""
    return library.name


# ---- the program


def main(arguments: list[str] | None = None) -> int:
    """Measure and show.

    Returns:
        0; 1 with ``--strict`` when a budget does not hold; 2 where a medium that was named is not to be had.
    """
    parser = options_of("benchmarks.thesis", "Encoded, through private buffers, and without a copy.")
    parser.add_argument("media", nargs="*", metavar="MEDIUM", help=f"which: {', '.join(MEDIA)} (default: all here)")
    options = parser.parse_args(arguments)
    for medium in options.media:
        if medium not in MEDIA:
            parser.error(f"there is no medium {medium!r}; media: {', '.join(MEDIA)}")
    scale = QUICK if options.quick else FULL
    found: list[Measurement] = []
    absent = False
    for medium in options.media or MEDIA:
        binding = device() if medium == "rxe" else ""
        reason = missing() if medium == "veth" else no_guest() if medium == "rxe" and not binding else None
        if reason is not None:
            print(f"{medium} is left out: {reason}", file=sys.stderr)
            absent = True
            continue
        if medium == "rxe" and not binding:
            part = _in_guest(quick=options.quick)
        else:
            part = measure(medium, scale, quick=options.quick, binding=binding)
        show(f"Three ways, {medium}", part)
        found += part
    if options.markdown:
        print(beside(found) + "\n")
    status = report(options, found)
    return 2 if absent and options.media else status


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        from benchmarks import thesis  # not as __main__, whose actors the other end would look for in vain

        zc.run(thesis.work(**json.loads(sys.argv[2])))
    else:
        sys.exit(main())
