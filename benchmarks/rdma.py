"""RDMA between two processes, on a machine with a device, next to the least that the same binding allows.

::

    python -m benchmarks.rdma                          # on a machine with a device
    python tools/vm.py run --timeout 900 -- python -m benchmarks.rdma --quick       # in a virtual machine
    python -m benchmarks.rdma --binding fake --quick   # the pulls only, in one process: whether this program works

The floors are the loops of `benchmarks.bare_verbs`: READs with the piece size of
`zcactor.transport.verbs.peer.pulling`, and small messages to and fro. So all cost above them is zcactor's. A guest's
device is emulated along with its processor, so its ratios are of use and its times are not.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import selectors
import shutil
import subprocess
import sys
import time
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import uvloop

import zcactor as zc
from benchmarks.bare_verbs import Wire, address_from, lists_of, plain, usable, viable
from benchmarks.harness import (
    Measurement,
    Sample,
    Scale,
    at_least,
    at_most,
    exactly,
    interleave,
    medians,
    show,
)
from benchmarks.program import options_of, report
from zcactor.objectstore.arena import Arena
from zcactor.process import context
from zcactor.rpc.codec import frame_size
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.frames import LENGTH_PREFIX
from zcactor.transport.verbs.device.slots import HEADER_NBYTES
from zcactor.transport.verbs.device.viability import NotViable, viability
from zcactor.transport.verbs.driver.bindings import NAMES
from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.endpoint import VerbsEndpoint
from zcactor.transport.verbs.peer.connection import VerbsConnection
from zcactor.transport.verbs.peer.pull import pieces_of
from zcactor.transport.verbs.peer.pulling import PIECE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import IO

    from zcactor.transport.base import Connection
    from zcactor.transport.verbs.device.viability import Viable
    from zcactor.transport.verbs.driver.base import Binding

__all__ = ["Echoer", "main"]

MIB: Final = 1 << 20
SIZES: Final = (1, 4, 16, 64)
"""MiB of the pulls."""
ARENA_NBYTES: Final = 64 * MIB
SHARE_OF_RATE, TIMES_PING_PONG, REUSED = 0.9, 2.5, 0.9
"""Budgets: of the rate of bare READs; times a bare ping-pong; and the share of pulls into a used destination."""
PASSES: Final = 8
"""Calls with an array whose frames, READs and copies are counted."""
SECONDS: Final = {True: 0.25, False: 1.0}
"""Seconds of one sample of calls, quick or not."""

FULL, QUICK = Scale(9, 1.0), Scale(5, 0.25)

Array = npt.NDArray[np.float64]


# ---- the two ends


class _Whole:
    """The only object of an arena."""

    offset = 0
    nbytes = ARENA_NBYTES


class _Nobody:
    """A receiver that gets no frames. Satisfies `Receiver`."""

    def frames_received(self, data: memoryview) -> None:
        """Never called."""

    def connection_lost(self, cause: Exception | None) -> None:
        """Ignore the end of the connection."""


class End:
    """One process's arena and endpoint, and a bare queue pair beside its connection. Closed by `stack`."""

    def __init__(self, binding: Binding, token: bytes, stack: ExitStack) -> None:
        self._stack = stack
        self.arena = Arena(ARENA_NBYTES)
        self._whole = _Whole()
        self.process = secrets.token_bytes(16)
        self.endpoint = VerbsEndpoint(
            "127.0.0.1",
            self.process,
            token,
            self.arena,
            self.arena.fd,
            binding=lambda: binding,
            lookup=lambda _: self._whole,
            verbs_eager_limit=16384,
            falls_back=False,
        )
        stack.callback(self.endpoint.dispose)
        self.accepted: asyncio.Queue[Connection] = asyncio.Queue()
        self.wire: Wire | None = None

    async def start(self) -> None:
        """Listen, with all of the arena registered."""
        await self.endpoint.start(self.accepted.put_nowait)
        engine = self.endpoint.engine
        if engine is None:
            raise OSError(self.endpoint.problem)
        self.engine = engine
        (self.region,) = await engine.extents.get(0, ARENA_NBYTES)

    def open_wire(self, nbytes: int) -> Wire:
        """Open the bare queue pair."""
        self.wire = Wire(self.engine.device, self.engine.found, nbytes, self._stack)
        return self.wire

    async def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Answer a command of the other process."""
        if command["do"] == "start":
            await self.start()
            return {"address": self.endpoint.address, "arena": self.arena.address, "rkey": self.region.rkey}
        if command["do"] == "export":
            connection = await self.accepted.get()
            connection.start(_Nobody())
            assert connection.export is not None
            seal, rkey = connection.export(1, 0, ARENA_NBYTES)
            return {"seal": seal, "rkey": rkey}
        if command["do"] == "processor":
            return {"seconds": time.process_time()}
        wire = self.open_wire(command["nbytes"])
        wire.connect(address_from(command["wire"]), echoes=True)
        return {"wire": plain(wire.address)}


class Peer(Protocol):
    """The other end, in this process or in another."""

    async def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Pass the command to its `End.answer`."""


class HerePeer:
    """The other end in this process."""

    def __init__(self, end: End) -> None:
        self.end = end
        self.ask = end.answer


class ProcessPeer:
    """The other end in a process of its own."""

    def __init__(self, binding: str, token: bytes, stack: ExitStack) -> None:
        command = [sys.executable, "-m", "benchmarks.rdma", "serve", binding, token.hex()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.enter_context(self._process)
        stack.callback(self._process.kill)

    async def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Pass a command over the process's pipes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = await asyncio.get_running_loop().run_in_executor(None, self._process.stdout.readline)
        if not line:
            raise OSError("the other process has ended; it says why above")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def serve(binding: str, token: str) -> None:
    """Run the other process: answer commands until the input ends."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        end = End(usable(binding), bytes.fromhex(token), stack)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await end.answer(json.loads(line))), flush=True)


# ---- pulls


async def pulls(binding: str, scale: Scale) -> list[Measurement]:
    """Measure `VerbsConnection.pull` against bare READs of the same pieces of the same memory into the same memory."""
    token = secrets.token_bytes(32)
    found = []
    with ExitStack() as stack:
        peer: Peer
        if binding == "fake":
            fabric = FakeFabric()
            for nic in ("fake0", "fake1"):
                fabric.add_nic(nic)
            peer = HerePeer(End(fabric.binding("fake1"), token, stack))
            end = End(fabric.binding("fake0"), token, stack)
        else:
            peer = ProcessPeer(binding, token, stack)
            end = End(usable(binding), token, stack)
        about = await peer.ask({"do": "start"})
        await end.start()
        connection = await end.endpoint.connect(about["address"])
        assert isinstance(connection, VerbsConnection)
        connection.start(_Nobody())
        exported = await peer.ask({"do": "export"})
        wire = end.open_wire(64)
        answer = await peer.ask({"do": "wire", "wire": plain(wire.address), "nbytes": 64})
        wire.connect(address_from(answer["wire"]), echoes=False)
        piece = min(connection.pairs.agreed.max_msg_sz, PIECE_NBYTES)
        keep = object()
        for mib in SIZES if scale.share >= 1 else SIZES[:-1]:
            nbytes = mib * MIB
            times = max(1, round(16 * scale.share) // mib)
            lists = lists_of(end.arena.address, end.region.lkey, about["arena"], about["rkey"], nbytes, piece)
            region = RemoteRegion(1, 0, nbytes, exported["seal"], exported["rkey"])
            pull = partial(connection.pull, region, end.arena.address, keep)
            subjects: dict[str, Sample] = {
                "bare": partial(_rate, partial(wire.read, lists), nbytes, times),
                "pull": partial(_rate, pull, nbytes, times),
            }
            rates = medians(await interleave(scale.runs, subjects))
            name = f"pull of {mib} MiB ({pieces_of(nbytes, piece)} READs)"
            budget = at_least(SHARE_OF_RATE)
            found.append(
                Measurement("rdma", name, rates["pull"], "MiB/s", rates["bare"], "bare READs", budget, scale.runs)
            )
        connection.abort()
        await asyncio.sleep(0.05)  # until its queue pairs have drained
        await end.endpoint.aclose()
        if isinstance(peer, HerePeer):
            await peer.end.endpoint.aclose()
    return found


async def _rate(read: Callable[[], Any], nbytes: int, times: int) -> float:
    before = time.perf_counter()
    for _ in range(times):
        await read()
    return times * nbytes / MIB / (time.perf_counter() - before)


def _says(pipe: IO[bytes], words: bytes, seconds: float) -> bool:
    """Whether `words` come through `pipe` in that time, before the pipe ends."""
    deadline = time.monotonic() + seconds
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while words not in said and selector.select(max(0.0, deadline - time.monotonic())):
            part = os.read(pipe.fileno(), 4096)
            if not part:
                break
            said += part
    return words in said


def perftest(port: Viable, count: int) -> list[Measurement]:
    """The rate of perftest's READs of a piece; empty where perftest is not installed or fails."""
    program, by_lines = shutil.which("ib_read_bw"), shutil.which("stdbuf")
    if program is None or by_lines is None:
        return []
    nbytes = min(PIECE_NBYTES, port.port.max_msg_sz)
    command = [program, "-d", port.device, "-i", str(port.port.port), "-F", "-s", str(nbytes), "-n", str(count)]
    if port.gid is not None:
        command += ["-x", str(port.gid.index)]
    # Into a pipe the program would print nothing before its end, unless it is told to write each line.
    listening = [by_lines, "-oL", *command]
    with subprocess.Popen(listening, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        try:
            assert server.stdout is not None
            # It prints that right before it listens; the client first opens the device, which takes far longer.
            if not _says(server.stdout, b"Waiting for client to connect", 20):
                return []
            client = subprocess.run([*command, "127.0.0.1"], capture_output=True, text=True, timeout=120, check=False)
        except subprocess.TimeoutExpired:
            return []
        finally:
            server.kill()
    for words in map(str.split, client.stdout.splitlines()):
        if len(words) >= 4 and words[0] == str(nbytes):  # bytes, iterations, peak, average in MiB/s
            return [Measurement("rdma", f"ib_read_bw, {nbytes >> 10} KiB each", float(words[3]), "MiB/s")]
    return []


# ---- calls


@zc.actor
class Echoer:
    """An actor that returns its arguments, and reports the figures of its process."""

    @zc.method
    def sync(self, value: int) -> int:
        """Return the value, in the actor's thread."""
        return value

    @zc.method
    async def coro(self, value: int) -> int:
        """Return the value, as a task."""
        return value

    @zc.method(inline=True)
    def inline(self, value: int) -> int:
        """Return the value, on the loop at once."""
        return value

    @zc.method
    def first(self, array: Array) -> float:
        """The first element: proof that the array is here."""
        return float(array[0])

    @zc.method
    async def processor(self) -> float:
        """Seconds of processor time that this process has used."""
        return time.process_time()

    @zc.method
    async def reads(self) -> tuple[int, int]:
        """READs of arrays posted so far, and bytes of a piece."""
        found, piece = 0, PIECE_NBYTES
        for session in context.current().sessions.all():
            connection = session.connection
            if isinstance(connection, VerbsConnection):
                found += connection.puller.reads
                piece = min(piece, connection.pairs.agreed.max_msg_sz)
        return found, piece


async def _each(call: Callable[[], Any], times: int) -> float:
    before = time.perf_counter()
    for _ in range(times):
        await call()
    return (time.perf_counter() - before) / times * 1e6


async def calls(binding: str, scale: Scale, *, quick: bool) -> list[Measurement]:
    """Measure small calls against a bare ping-pong, and the frames, READs and copies of calls with arrays."""
    found: list[Measurement] = []
    library = usable(binding)
    config = zc.Config(verbs_binding=binding, sealing="off")  # type: ignore[arg-type]
    async with AsyncExitStack() as outer:
        await outer.enter_async_context(zc.init(transports=("verbs",), config=config))
        stack = outer.enter_context(ExitStack())
        echoer = await Echoer.spawn()
        await echoer.sync(1)
        before = zc.stats()
        for _ in range(4):
            await echoer.sync(1)
        after = zc.stats()
        payload = (after.bytes_eager - before.bytes_eager) // (after.calls - before.calls)
        nbytes = HEADER_NBYTES + LENGTH_PREFIX + frame_size(0, 0, payload)
        wire, peer = await _ping_pong(binding, library, nbytes, stack)
        subjects: dict[str, Callable[[], Any]] = {
            "bare": wire.ping,
            "sync": partial(echoer.sync, 1),
            "async": partial(echoer.coro, 1),
            "inline": partial(echoer.inline, 1),
        }
        least = min([await _each(call, 4) for call in subjects.values()])
        times = max(8, round(SECONDS[quick] / (least / 1e6) / 4))
        taken = medians(await interleave(scale.runs, {k: partial(_each, call, times) for k, call in subjects.items()}))
        for kind in ("sync", "async", "inline"):
            name, floor = f"{kind} call with an int", f"bare ping-pong of {nbytes} B"
            budget = at_most(TIMES_PING_PONG)
            found.append(Measurement("rdma", name, taken[kind], "us", taken["bare"], floor, budget, scale.runs * times))

        async def peers() -> float:
            return float((await peer.ask({"do": "processor"}))["seconds"])

        # Asking costs processor time as well, so an ask covers more calls than a sample above.
        busy = medians(
            await interleave(
                scale.runs,
                {
                    k: partial(_busy, call, peers if k == "bare" else echoer.processor, 4 * times)
                    for k, call in subjects.items()
                },
            )
        )
        for kind in ("sync", "async", "inline"):
            name = f"{kind} call with an int, processor time of both ends"
            found.append(Measurement("rdma", name, busy[kind], "us", busy["bare"], floor, None, scale.runs * times * 4))
        for nbytes in (256 << 10, 5 * MIB + 4096):
            found += await _passes(echoer, nbytes)
    return found


async def _busy(call: Callable[[], Any], theirs: Callable[[], Awaitable[float]], times: int) -> float:
    """Microseconds of processor time for each call, of both processes together, the kernel's work for them included."""
    before = time.process_time() + await theirs()
    for _ in range(times):
        await call()
    return (time.process_time() + await theirs() - before) / times * 1e6


async def _ping_pong(binding: str, library: Binding, nbytes: int, stack: ExitStack) -> tuple[Wire, Peer]:
    """A bare queue pair that is connected to a queue pair of another process, which sends messages back; and that
    process."""
    token = secrets.token_bytes(32)
    peer = ProcessPeer(binding, token, stack)
    await peer.ask({"do": "start"})
    found = viability(library, arena_nbytes=0)
    if isinstance(found, NotViable):
        raise OSError(str(found))
    device = library.open(found.device)
    stack.callback(device.close)
    wire = Wire(device, found, nbytes, stack)
    answer = await peer.ask({"do": "wire", "wire": plain(wire.address), "nbytes": nbytes})
    wire.connect(address_from(answer["wire"]), echoes=False)
    return wire, peer


async def _passes(echoer: Any, nbytes: int) -> list[Measurement]:
    """Count the frames, READs and copies while an array is passed some times."""
    array = zc.ones(nbytes // 8)
    for _ in range(3):  # from the third on destinations are used again
        await echoer.first(array)
    (reads, piece), there, here = await echoer.reads(), await zc.stats(echoer), zc.stats()
    for _ in range(PASSES):
        await echoer.first(array)
    last_here = zc.stats()
    (last_reads, _), last_there = await echoer.reads(), await zc.stats(echoer)
    copied = last_here.bytes_copied - here.bytes_copied + last_there.bytes_copied - there.bytes_copied
    frames = last_here.frames_sent - here.frames_sent + last_here.frames_received - here.frames_received
    expected = pieces_of(nbytes, piece)
    label = f"array of {nbytes >> 10} KiB"
    figures: list[tuple[str, float, Any]] = [
        ("bytes copied", copied, exactly(0)),
        (f"READs of each (pieces of {piece >> 10} KiB)", (last_reads - reads) / PASSES, exactly(expected)),
        ("frames of each call", frames / PASSES, exactly(2)),
        (
            "share into used destinations",
            (last_there.placements - there.placements) / PASSES,
            at_least(REUSED, "value"),
        ),
        ("memory regions registered", last_there.registrations - there.registrations, exactly(0)),
    ]
    return [Measurement("rdma", f"{label}: {name}", value, "", budget=budget) for name, value, budget in figures]


# ---- the program


def main(arguments: list[str] | None = None) -> int:
    """Measure and show.

    Returns:
        0; 1 with ``--strict`` when a budget does not hold; 2 on a machine without a device.
    """
    parser = options_of("benchmarks.rdma", "RDMA next to its floors.")
    parser.add_argument("--binding", choices=[*NAMES, "fake"], help="default: the first that finds a device")
    parser.add_argument("--only", choices=["pulls", "calls"], help="measure only that")
    options = parser.parse_args(arguments)
    scale = QUICK if options.quick else FULL
    found: list[Measurement] = []
    if options.binding == "fake":
        found = uvloop.run(pulls("fake", scale))
        show("Pulls through no device", found)
    else:
        device = viable(options.binding)
        if device is None:
            return 2
        library, port = device
        print(f"{library.name}, {port.device}\n", flush=True)
        if options.only != "calls":
            part = [*uvloop.run(pulls(library.name, scale)), *perftest(port, scale.count(64))]
            show("Pulls through the device", part)
            found += part
        if options.only != "pulls":
            part = zc.run(calls(library.name, scale, quick=options.quick))
            show("Calls through the device", part)
            found += part
    return report(options, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        uvloop.run(serve(*sys.argv[2:4]))
    else:
        from benchmarks import rdma  # not as __main__, whose actors a worker would look for in vain

        sys.exit(rdma.main())
