"""RDMA between two processes, on a machine with a device, next to the least that the same binding allows.

::

    python -m benchmarks.rdma                          # on a machine with a device
    python -m benchmarks.rdma pulls calls              # two of pulls, calls and graph
    python tools/vm.py run --timeout 900 -- python -m benchmarks.rdma --quick       # in a virtual machine
    python -m benchmarks.rdma --binding fake --quick   # the pulls only, in one process: whether this program works

The floors are loops over `zcactor.transport.verbs.driver.base`, without zcactor above it: READs in lists, with the
piece size of `zcactor.transport.verbs.peer.pulling` and as many under way, and small messages to and fro, each waiting
for completions by the descriptor of the completion channel on the event loop. So all cost above them is zcactor's. A
guest's device is emulated along with its processor, so its ratios are of use and its times are not.

*graph*: an edge of a graph is the time by which a run grows when its value is an array and not an int. The least of all
samples counts, as times in a guest scatter by ten times. Frames, registrations and copies are those of all processes of
the graph: an array needs no frame more than an int, because the frame that names it starts the method, and the release
of the array before rides in the next frame.

``python tools/vm.py run --counting -- python -m benchmarks.rdma guest --built FOLDER`` compares calls and pulls with a
base, and sealed with not sealed, in a guest whose clock counts instructions, a nanosecond each: seconds of an emulated
processor differ by a fifth between two runs of one program. FOLDER has the package of the base, which takes too long to
build there; ``python -m benchmarks.budgets guest`` does both.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import secrets
import selectors
import shutil
import subprocess
import sys
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import uvloop

import zcactor as zc
from benchmarks.harness import (
    Measurement,
    Sample,
    Scale,
    at_least,
    at_most,
    each,
    exactly,
    interleave,
    medians,
    options_of,
    rate,
    report,
    show,
    spread,
)
from benchmarks.machine import cores
from benchmarks.paired import ROOT, Side, launches
from zcactor.objectstore.arena import Arena
from zcactor.process import context
from zcactor.rpc.codec import frame_size
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.frames import LENGTH_PREFIX
from zcactor.transport.verbs.device.sizing import MAX_READS
from zcactor.transport.verbs.device.slots import HEADER_NBYTES
from zcactor.transport.verbs.device.viability import NotViable, viability
from zcactor.transport.verbs.driver.base import MAX_U24, PathAttributes, QpAddress, Read, Receive, Send
from zcactor.transport.verbs.driver.bindings import NAMES, Absent, bindings
from zcactor.transport.verbs.driver.codes import CompletionStatus, describe_status
from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.endpoint import VerbsEndpoint
from zcactor.transport.verbs.peer.connection import VerbsConnection
from zcactor.transport.verbs.peer.pull import pieces_of
from zcactor.transport.verbs.peer.pulling import LIST_READS, PIECE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from typing import IO

    from zcactor.transport.base import Connection
    from zcactor.transport.verbs.device.viability import Viable
    from zcactor.transport.verbs.driver.base import Binding, Completion, Device


__all__ = ["Echoer", "Link", "Wire", "address_from", "main", "plain", "usable"]


# ---- bare queue pairs


class Wire:
    """A bare queue pair and its resources, on the running loop. Closed by `stack`.

    Args:
        device: makes all resources.
        found: the port and GID.
        nbytes: of a message.
        stack: closes the resources.
    """

    RING: Final = 16

    def __init__(self, device: Device, found: Viable, nbytes: int, stack: ExitStack) -> None:
        self._found = found
        self._loop = asyncio.get_running_loop()
        self._memory = mmap.mmap(-1, (self.RING + 1) * nbytes)
        anchor = ctypes.c_char.from_buffer(self._memory)
        self._region = device.register(ctypes.addressof(anchor), len(self._memory), remote_read=False)
        stack.callback(self._region.close)
        self._cq = cq = device.create_completion_queue(256)
        stack.callback(cq.close)
        self._srq = device.create_shared_receive_queue(self.RING)
        stack.callback(self._srq.close)
        self._qp = device.create_queue_pair(cq, self._srq, max_send_wr=MAX_READS, max_inline=nbytes)
        stack.callback(self._qp.close)
        address, lkey = self._region.address, self._region.lkey
        self._receives = [[Receive(i, address + i * nbytes, nbytes, lkey)] for i in range(self.RING)]
        for receive in self._receives:
            self._srq.post_receives(receive)
        # signalled now and then, so that the queue's room comes back
        self._sends = [[Send(1 << 32, address + self.RING * nbytes, nbytes, lkey, i == 0, True)] for i in range(16)]
        self._sent = 0
        self._psn = secrets.randbelow(MAX_U24 + 1)
        self._left: list[list[Read]] = []
        self._under_way = 0
        self._waiter: asyncio.Future[None] | None = None
        self._echoes = False
        cq.arm()
        self._loop.add_reader(cq.fd, self._on_event)
        stack.callback(self._loop.remove_reader, cq.fd)

    @property
    def address(self) -> QpAddress:
        """The address of the queue pair, for the other end."""
        found = self._found
        gid = bytes(16) if found.gid is None else found.gid.raw
        return QpAddress(self._qp.qp_num, self._psn, gid, found.port.lid, found.port.active_mtu)

    def connect(self, remote: QpAddress, *, echoes: bool) -> None:
        """Connect to the other end; with `echoes` every message goes back."""
        found = self._found
        reads = max(1, min(16, found.attributes.max_qp_rd_atom, found.attributes.max_qp_init_rd_atom))
        self._echoes = echoes
        self._qp.connect(
            remote,
            PathAttributes(
                found.port.port,
                0 if found.gid is None else found.gid.index,
                self._psn,
                found.port.active_mtu,
                is_global=found.is_global,
                max_rd_atomic=reads,
                max_dest_rd_atomic=reads,
            ),
        )

    def ping(self) -> asyncio.Future[None]:
        """Send a message. The future is done when a message has come back."""
        self._waiter = waiter = self._loop.create_future()
        self._send()
        return waiter

    def _send(self) -> None:
        self._qp.post_sends(self._sends[self._sent & 15])
        self._sent += 1

    def read(self, lists: Sequence[list[Read]]) -> asyncio.Future[None]:
        """Post lists of READs, with as many under way as in `Puller`. The future is done when all have ended."""
        self._waiter = waiter = self._loop.create_future()
        self._left = list(reversed(lists))
        self._pump()
        return waiter

    def _pump(self) -> None:
        while self._left and self._under_way + LIST_READS + 1 <= MAX_READS:
            reads = self._left.pop()
            self._under_way += len(reads)
            self._qp.post_reads(reads)

    def _on_event(self) -> None:
        cq = self._cq
        cq.drain_events()
        cq.arm()
        while found := cq.poll(16):
            for completion in found:
                self._completed(completion)

    def _completed(self, completion: Completion) -> None:
        number, status = completion.wr_id, completion.status
        waiter = self._waiter
        if status != CompletionStatus.SUCCESS:
            if waiter is not None and not waiter.done():
                waiter.set_exception(OSError(f"a bare request failed: {describe_status(status)}"))
        elif number < self.RING:
            self._srq.post_receives(self._receives[number])
            if self._echoes:
                self._send()
            elif waiter is not None:
                waiter.set_result(None)
        elif number != 1 << 32:
            self._under_way -= number - (1 << 33)
            if self._left:
                self._pump()
            elif not self._under_way and waiter is not None:
                waiter.set_result(None)


def lists_of(target: int, lkey: int, source: int, rkey: int, nbytes: int, piece: int) -> list[list[Read]]:
    """The READs of `nbytes`, in lists of which the last one asks for a completion; its number has the list's length."""
    reads = [
        Read(0, target + at, min(piece, nbytes - at), lkey, source + at, rkey, signalled=False)
        for at in range(0, nbytes, piece)
    ]
    lists = [reads[first : first + LIST_READS] for first in range(0, len(reads), LIST_READS)]
    for one in lists:
        one[-1] = one[-1]._replace(signalled=True, wr_id=(1 << 33) + len(one))
    return lists


def plain(address: QpAddress) -> dict[str, Any]:
    """The address in the types of JSON."""
    return {**asdict(address), "gid": address.gid.hex()}


def address_from(fields: dict[str, Any]) -> QpAddress:
    """The inverse of `plain`."""
    return QpAddress(**{**fields, "gid": bytes.fromhex(fields["gid"])})


def viable(name: str | None) -> tuple[Binding, Viable] | None:
    """The binding of that name, or the first that finds a device, and a port that works. None without such a port; the
    reason goes to standard error."""
    found = bindings(name)
    port = found if isinstance(found, Absent) else viability(found, arena_nbytes=0)
    if isinstance(found, Absent) or isinstance(port, Absent | NotViable):
        print(port, file=sys.stderr)
        return None
    return found, port


def usable(name: str) -> Binding:
    """The binding of that name.

    Raises:
        OSError: it finds no device.
    """
    found = bindings(name)
    if isinstance(found, Absent):
        raise OSError(str(found))
    return found


# ---- pulls and calls

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
                "bare": partial(rate, partial(wire.read, lists), nbytes, times),
                "pull": partial(rate, pull, nbytes, times),
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


async def calls(binding: str, scale: Scale, *, quick: bool) -> list[Measurement]:
    """Measure small calls against a bare ping-pong, and the frames, READs and copies of calls with arrays."""
    found: list[Measurement] = []
    library = usable(binding)
    config = zc.Config(verbs=f"binding={binding}", security="off")
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
        least = min([await each(call, 4) for call in subjects.values()])
        times = max(8, round(SECONDS[quick] / (least / 1e6) / 4))
        taken = medians(await interleave(scale.runs, {k: partial(each, call, times) for k, call in subjects.items()}))
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


# ---- an edge of a graph

NBYTES: Final = MIB
"""Bytes of the array on the edge."""
TIMES_FRAMES: Final = 1.2
"""Budget of the frames of a run, next to those of a run with ints."""
COUNTED: Final = 16
"""Runs that are counted."""


@zc.actor
class Link:
    """A part of a graph."""

    def __init__(self) -> None:
        self.array = zc.ones(NBYTES // 8)

    @zc.method
    def array_of(self, value: int) -> Any:
        """An array, for a number."""
        self.array = zc.ones(NBYTES // 8) if value < 0 else self.array
        return self.array

    @zc.method
    def first(self, array: Any) -> float:
        """The first element: proof that the array is here."""
        return float(array[0])

    @zc.method
    def number(self, value: float) -> float:
        """Return the number."""
        return value


async def _graph(first: Any, second: Any) -> Any:
    async with zc.graph() as g:
        g.output(second.bind(first.bind(g.input())))
    return await g.compile()


async def _runs(graph: Any, count: int) -> float:
    before = time.perf_counter()
    for _ in range(count):
        if await graph(1) != 1:
            raise RuntimeError("a run has another result")
    return (time.perf_counter() - before) / count * 1e6


async def _counts(graph: Any, actors: Sequence[Any]) -> list[float]:
    """Frames of a run; and registrations and copied bytes of `PASSES` runs."""

    async def figures() -> list[int]:
        found = [zc.stats(), *[await zc.stats(actor) for actor in actors]]
        return [
            sum(each.frames_sent for each in found), sum(each.registrations for each in found),
            sum(each.bytes_copied for each in found),
        ]  # fmt: skip

    await _runs(graph, COUNTED)  # from then on destinations are used again
    idle = await figures()
    before = await figures()  # the frames of asking are in the difference of these two
    await _runs(graph, COUNTED)
    after = await figures()
    frames = after[0] - before[0] - (before[0] - idle[0])
    return [frames / COUNTED, after[1] - before[1], after[2] - before[2]]


async def edges(binding: str, scale: Scale) -> tuple[dict[str, float], list[float], list[float]]:
    """The least microseconds of runs with an int and with an array, and their counts."""
    config = zc.Config(verbs=f"binding={binding}", security="off")
    async with zc.init(transports=("verbs",), config=config):
        actors: list[Any] = [await Link.spawn() for _ in range(2)]
        maker, reader = actors
        ints, arrays = await _graph(maker.number, reader.number), await _graph(maker.array_of, reader.first)
        count = scale.count(200, least=8)
        subjects = {"int": partial(_runs, ints, count), "array": partial(_runs, arrays, count)}
        times = {name: min(samples) for name, samples in (await interleave(scale.runs, subjects)).items()}
        return times, await _counts(ints, actors), await _counts(arrays, actors)


async def read(binding: str, scale: Scale) -> float:
    """The microseconds of a bare READ of the same bytes, the least of some."""
    token = secrets.token_bytes(32)
    with ExitStack() as stack:
        peer, end = ProcessPeer(binding, token, stack), End(usable(binding), token, stack)
        about = await peer.ask({"do": "start"})
        await end.start()
        wire = end.open_wire(64)
        answer = await peer.ask({"do": "wire", "wire": plain(wire.address), "nbytes": 64})
        wire.connect(address_from(answer["wire"]), echoes=False)
        piece = min(end.engine.found.port.max_msg_sz, PIECE_NBYTES)
        lists = lists_of(end.arena.address, end.region.lkey, about["arena"], about["rkey"], NBYTES, piece)
        times = []
        for _ in range(scale.count(200, least=8)):
            before = time.perf_counter()
            await wire.read(lists)
            times.append(time.perf_counter() - before)
        await end.endpoint.aclose()
    return min(times) * 1e6


def measure_edge(binding: str, scale: Scale) -> list[Measurement]:
    """Measure the edge, and the READ."""
    times, ints, arrays = zc.run(edges(binding, scale))
    bare = uvloop.run(read(binding, scale))
    name = f"graph edge of {NBYTES // MIB} MiB"
    return [
        Measurement("graph-rdma", name, times["array"] - times["int"], "us", bare, "a bare READ", None, scale.runs,
                    "least"),
        Measurement("graph-rdma", f"{name}: frames of a run", arrays[0], "", ints[0], "with ints",
                    at_most(TIMES_FRAMES)),
        Measurement("graph-rdma", f"{name}: memory regions registered", arrays[1], "", budget=exactly(0)),
        Measurement("graph-rdma", f"{name}: bytes copied", arrays[2], "B", budget=exactly(0)),
    ]  # fmt: skip


# ---- calls and pulls next to a base

GUEST_ITEMS: Final[Mapping[str, tuple[str, int]]] = {
    "sync": ("sync call in a guest", 16),
    "pipelined": ("call in a guest, 1,000 in flight", 1000),
    "array-16m": ("16 MiB array as argument in a guest", 1),
}
"""The name of each item, and its count in a round."""
GUEST_ROUNDS, QUICK_GUEST_ROUNDS = 16, 8
GUEST_LAUNCHES: Final = 2
"""The number of times that the sides are started. Instructions hardly differ from one start to the next."""
TIMES_BASE, TIMES_PLAIN = 1.03, 1.3
RDMA: Final[Mapping[str, object]] = {"transports": ["verbs"], "security": "off"}
SEALED: Final[Mapping[str, object]] = {"transports": ["verbs"]}


def guest(arguments: list[str] | None = None) -> int:
    """Measure and show.

    Returns:
        0; 1 with ``--strict`` when a budget does not hold.
    """
    parser = options_of("benchmarks.rdma guest", "Calls and pulls by RDMA, next to a base.")
    parser.add_argument("--built", type=Path, required=True, metavar="FOLDER", help="where the base's package is")
    options = parser.parse_args(arguments)
    rounds = QUICK_GUEST_ROUNDS if options.quick else GUEST_ROUNDS
    core = cores()[-1]
    sides = [
        partial(Side, options.built, core, RDMA), partial(Side, ROOT, core, RDMA), partial(Side, ROOT, core, SEALED),
    ]  # fmt: skip
    found: list[Measurement] = []
    for item, (name, count) in GUEST_ITEMS.items():
        figures = launches(sides if item == "sync" else sides[:2], {item: count}, rounds, GUEST_LAUNCHES)[item]
        before, after = map(min, figures[:2])
        told = [
            Measurement("guest", name, after, "us", before, "the base", at_most(TIMES_BASE), rounds, "least",
                        spread(figures[1]))
        ]  # fmt: skip
        if len(figures) == 3:
            budget = at_most(TIMES_PLAIN)
            told.append(
                Measurement("guest", f"{name}, sealed", min(figures[2]), "us", after, "not sealed", budget, rounds,
                            "least", spread(figures[2]))
            )  # fmt: skip
        for measurement in told:  # a guest that is ended keeps no other output
            print(json.dumps(measurement.plain()), flush=True)
        found += told
    show("By RDMA", found)
    return report(options, found)


# ---- the program

PARTS: Final = ("pulls", "calls", "graph")


def main(arguments: list[str] | None = None) -> int:
    """Measure and show.

    Returns:
        0; 1 with ``--strict`` when a budget does not hold; 2 on a machine without a device.
    """
    parser = options_of("benchmarks.rdma", "RDMA next to its floors.", PARTS)
    parser.add_argument("--binding", choices=[*NAMES, "fake"], help="default: the first that finds a device")
    options = parser.parse_args(arguments)
    scale = QUICK if options.quick else FULL
    found: list[Measurement] = []
    if options.binding == "fake":
        found = uvloop.run(pulls("fake", scale))
        show("Pulls through no device", found)
        return report(options, found)
    device = viable(options.binding)
    if device is None:
        return 2
    library, port = device
    print(f"{library.name}, {port.device}\n", flush=True)
    for part in options.parts or PARTS:
        if part == "pulls":
            measured = [*uvloop.run(pulls(library.name, scale)), *perftest(port, scale.count(64))]
        elif part == "calls":
            measured = zc.run(calls(library.name, scale, quick=options.quick))
        else:
            measured = measure_edge(library.name, scale)
        show(f"Through the device: {part}", measured)
        found += measured
    return report(options, found)


if __name__ == "__main__":
    from benchmarks import rdma  # not as __main__, whose actors a worker would look for in vain

    match sys.argv[1:]:
        case ["serve", binding, token]:
            uvloop.run(rdma.serve(binding, token))
        case ["guest", *rest]:
            sys.exit(rdma.guest(rest))
        case _:
            sys.exit(rdma.main())
