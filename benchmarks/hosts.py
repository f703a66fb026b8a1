"""Two hosts over TCP next to the least cost of a socket between them: namespaces on one cable, on one machine.

::

    python -m benchmarks.hosts            # needs root, iproute2 and nftables
    python -m benchmarks.hosts --quick

An array is pulled from the owner's arena into the reader's. The floor is the indispensable part: the same bytes by one
process's sendfile(2) from a memfd to the other's recv(2) into memory that it has already touched. The floor of a call
is a round trip of messages of the same sizes between two processes on uvloop. These messages are never encrypted, not
even where the call's frames are sealed. All go over the same cable, in turns and between the same two processes.

Pulls whose bytes are authenticated are measured in turns with pulls where only frames are sealed and with TLS, each
between two processes of its own; and over a link with the rate of a slow network.

As both ends and the cable belong to one machine, its cores are measured: on two of them, a pull's further streams gain
little, and figures scatter. Ratios are of use, times are not.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import socket
import sys
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, cast

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
    exactly,
    interleave,
    medians,
    show,
)
from benchmarks.integrity import certificate
from benchmarks.machine import cores
from benchmarks.program import options_of, report
from tests.hosts.members import Member
from tests.hosts.netns import Network, missing
from zcactor.api.handle import ActorHandle
from zcactor.api.remote_actor import RemoteActor
from zcactor.ids import new_actor
from zcactor.interface import Interface
from zcactor.marshal.sharing import share
from zcactor.observe.stats import stats_of
from zcactor.rpc.codec import frame_size
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.frames import LENGTH_PREFIX
from zcactor.transport.stream.record_layer import Integrity
from zcactor.transport.stream.tls import load_tls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.harness import Budget
    from tests.hosts.netns import Host, Program

__all__ = ["main"]

MIB: Final = 1 << 20
SIZES: Final = (64, 256)
"""MiB of the pulls."""
SHARE_OF_RATE, TIMES_ECHO, TIMES_ECHO_SEALED = 0.9, 1.6, 2.0
"""Budgets: of the rate of a bare socket, and times a bare round trip, for plain frames and for sealed ones."""
SHARE_OF_FRAMES, TIMES_TLS, SHARE_OF_SLOW = 0.5, 2.0, 0.97
"""Budgets of pulls whose bytes are authenticated: of the rate without, times TLS, and of the rate over a slow link."""
SLOW_MBIT: Final = 4000
CALLS, PARTS = 2000, 8
"""Calls in one run, and the number of its parts: other work of the machine meets short turns alike, and long ones
not."""

Array = npt.NDArray[np.float64]

FULL, QUICK = Scale(9, 1.0), Scale(5, 0.25)


# ---- the floors


def _send_file(listening: socket.socket, memory: int) -> None:
    """Answer, in a thread, each number that comes with as many bytes of the memfd."""
    while True:
        sock, _ = listening.accept()
        with sock:
            while request := sock.recv(8, socket.MSG_WAITALL):
                at, end = 0, int.from_bytes(request, "little")
                while at < end:
                    at += os.sendfile(sock.fileno(), memory, at, end - at)


class _Echo(asyncio.Protocol):
    """A server that answers each `nbytes` that it gets by `answers` bytes."""

    def __init__(self, nbytes: int, answers: int) -> None:
        self._nbytes, self._answer, self._got = nbytes, bytes(answers), 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        _no_delay(transport)

    def data_received(self, data: bytes) -> None:
        self._got += len(data)
        while self._got >= self._nbytes:
            self._got -= self._nbytes
            self._transport.write(self._answer)


class _Asking(asyncio.Protocol):
    """A client with one round trip at a time."""

    def __init__(self, nbytes: int, answers: int) -> None:
        self._message, self._answers, self._left = bytes(nbytes), answers, 0
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        _no_delay(transport)

    def call(self) -> asyncio.Future[None]:
        """Send the message. The future is done when the answer has come."""
        self._left = self._answers
        self._waiter = waiter = self._loop.create_future()
        self._transport.write(self._message)
        return waiter

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left <= 0:
            self._waiter.set_result(None)


def _no_delay(transport: asyncio.BaseTransport) -> None:
    transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


# ---- the two ends


class Kinds:
    """An actor with one method of each kind, and an array."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def sync(self, a: int, b: float) -> float:
        """Add in the actor's thread."""
        return a + b

    async def coro(self, a: int, b: float) -> float:
        """Add as a task."""
        return a + b

    @zc.method(inline=True)
    def inline(self, a: int, b: float) -> float:
        """Add on the loop at once."""
        return a + b

    async def kept(self, nbytes: int) -> Array:
        """The array's first bytes."""
        return self.array[: nbytes // 8]


class End:
    """One of the two processes: a member, and beside it the sockets of the floors. Its methods are commands."""

    def __init__(self, host: str, how: str, folder: Path) -> None:
        self._host = host
        self._largest = SIZES[-1] * MIB
        self.member = Member(
            host, 3 * self._largest, sealing=how in {"sealed", "frames", "arrays"},
            integrity=Integrity.FRAMES if how == "frames" else Integrity.ARRAYS,
            tls=load_tls(folder) if how == "tls" else None,
        )  # fmt: skip
        self.member.be_current()
        self._keep: list[Any] = []

    async def serve(self, nbytes: int, answers: int) -> int:
        """Listen as the floor of a call; returns the port."""
        server = await asyncio.get_running_loop().create_server(lambda: _Echo(nbytes, answers), self._host, 0)
        self._keep.append(server)
        found: int = server.sockets[0].getsockname()[1]
        return found

    async def own(self) -> dict[str, Any]:
        """Be the owner of the bytes; returns the places of everything."""
        process = self.member.process
        array = process.store.empty(self._largest // 8)
        array[:] = 1
        share(process.store, array)  # its parts go by reference then
        process.hosts.add(index := process.hosts.take_index(), Kinds, "Kinds").adopt(Kinds(array))
        memory = os.memfd_create("floor")
        os.posix_fallocate(memory, 0, self._largest)
        listening = socket.create_server((self._host, 0))
        threading.Thread(target=_send_file, args=(listening, memory), daemon=True).start()
        found = process.store.block_of(array)
        assert found is not None
        process.store.export(found[0])
        return {
            "name": self.member.name.hex(),
            "address": self.member.endpoint.address,
            "index": index,
            "object": found[0].id,
            "offset": found[0].offset,
            "bytes": listening.getsockname()[1],
        }

    async def meet(self, host: str, owner: dict[str, Any]) -> None:
        """Be the reader."""
        self._owner_host, self._owner = host, owner
        self.member.addresses[owner["name"]] = owner["address"]
        place = (bytes.fromhex(owner["name"]), owner["index"])
        remote = RemoteActor(
            self.member.process, new_actor(), Interface.of(Kinds), place, None, "default", 1000, 0
        )  # fmt: skip
        self._kinds: Any = ActorHandle(remote)
        await self._kinds.coro(3, 4.5)

    async def some(self, times: int) -> None:
        """Make so many calls."""
        for _ in range(times):
            await self._kinds.coro(3, 4.5)

    async def stats(self) -> dict[str, Any]:
        """The figures of the process."""
        return stats_of(self.member.process).plain()

    async def cores(self, cores: list[int]) -> None:
        """Keep all threads of the process on these cores."""
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)

    async def pulls(self, mib: int, runs: int, times: int) -> dict[str, float]:
        """Measure MiB a second of a bare socket, of pulls, and of calls that return the array."""
        nbytes = mib * MIB
        process = self.member.process
        (session,) = process.sessions.all()
        pull, owner = session.connection.pull, self._owner
        target = process.store.allocate(nbytes)
        ctypes.memset(target.address, 1, nbytes)  # has its pages, as the bare one
        bare = mmap.mmap(-1, nbytes)
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(bare)), 1, nbytes)
        region = RemoteRegion(owner["object"], owner["offset"], nbytes)
        leased = self._kinds.kept(self._largest)  # only leased bytes can be pulled: a result that has not been read yet
        while not leased.done():
            await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        with socket.create_connection((self._owner_host, owner["bytes"])) as sock, memoryview(bare) as view:

            async def receive() -> None:
                await loop.run_in_executor(None, _receive, sock, view)

            subjects: dict[str, Sample] = {
                "bare": partial(_rate, receive, nbytes, times),
                "pull": partial(_rate, partial(pull, region, target.address, target), nbytes, times),
                "call": partial(_rate, partial(self._get, nbytes), nbytes, times),
            }
            return medians(await interleave(runs, subjects))

    async def _get(self, nbytes: int) -> None:
        array = await self._kinds.kept(nbytes)
        assert array[0] == array[-1] == 1

    async def calls(self, port: int, sizes: tuple[int, int], runs: int, times: int) -> dict[str, float]:
        """Measure microseconds of a bare round trip and of calls."""
        loop = asyncio.get_running_loop()
        _, asking = await loop.create_connection(lambda: _Asking(*sizes), self._owner_host, port)
        kinds = self._kinds
        subjects: dict[str, Callable[[], Any]] = {
            "bare": asking.call,
            "sync": partial(kinds.sync, 3, 4.5),
            "async": partial(kinds.coro, 3, 4.5),
            "inline": partial(kinds.inline, 3, 4.5),
        }
        return medians(await interleave(runs, {name: partial(_each, run, times) for name, run in subjects.items()}))


def _receive(sock: socket.socket, view: memoryview) -> None:
    """Receive in a thread, as a pull does: ask for as many bytes as the view holds, and take them."""
    sock.sendall(len(view).to_bytes(8, "little"))
    at = 0
    while at < len(view):
        at += sock.recv_into(view[at:], len(view) - at, socket.MSG_WAITALL)


async def _rate(read: Callable[[], Any], nbytes: int, times: int) -> float:
    before = time.perf_counter()
    for _ in range(times):
        await read()
    return times * nbytes / MIB / (time.perf_counter() - before)


async def _each(run: Callable[[], Any], times: int) -> float:
    before = time.perf_counter()
    for _ in range(times):
        await run()
    return (time.perf_counter() - before) / times * 1e6


async def answer(host: str, how: str, folder: str) -> None:
    """Run the program of either process: execute the commands on the standard input."""
    end = End(host, how, Path(folder))
    await end.member.start()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        number, name = command.pop("id"), command.pop("do")
        print(json.dumps({"id": number, "value": await getattr(end, name)(**command)}), flush=True)


# ---- the measurements


def measure(scale: Scale) -> list[Measurement]:
    """Make two hosts, and measure everything between them."""
    found: list[Measurement] = []
    with Network(2, direct=True) as (here, there), TemporaryDirectory() as folder, ExitStack() as stack:
        certificate(Path(folder))
        pair = partial(_pair, stack, here, there, folder)
        reader, owner = pair("plain")
        for mib in SIZES:
            times = max(1, scale.count(512) // mib)
            before = copied(reader, owner)
            rates = reader.answer(reader.send("pulls", mib=mib, runs=scale.runs, times=times), LIMIT)
            copies = copied(reader, owner) - before
            name, floor, budget = f"pull of {mib} MiB", "sendfile to recv", at_least(SHARE_OF_RATE)
            found.append(Measurement("hosts", name, rates["pull"], "MiB/s", rates["bare"], floor, budget, scale.runs))
            name = f"call that returns {mib} MiB"
            found.append(Measurement("hosts", name, rates["call"], "MiB/s", rates["bare"], floor, None, scale.runs))
            found.append(Measurement("hosts", f"bytes copied for {mib} MiB", copies, "", budget=exactly(0)))
        found += _calls(reader, owner, scale, "", at_most(TIMES_ECHO))
        found += _calls(*pair("sealed"), scale, "sealed ", at_most(TIMES_ECHO_SEALED))
        readers = {how: pair(how)[0] for how in ("frames", "arrays", "tls")}
        for mib in SIZES:
            rates = _rates(readers, mib, scale)
            frames, arrays, of = rates["frames"], rates["arrays"], f"of {mib} MiB"
            bare, tls = rates["bare"], rates["tls"]
            rows = (
                ("frames sealed", frames, bare, "sendfile to recv", SHARE_OF_RATE),
                ("authenticated, next to frames alone", arrays, frames, "frames alone", SHARE_OF_FRAMES),
                ("authenticated, next to TLS", arrays, tls, "TLS", TIMES_TLS),
            )
            for what, value, least, beside, share in rows:
                name, budget = f"pull {of}, {what}", at_least(share)
                found.append(Measurement("hosts", name, value, "MiB/s", least, beside, budget, scale.runs))
        with there.limited(SLOW_MBIT):
            rates = _rates({how: readers[how] for how in ("frames", "arrays")}, SIZES[0], scale)
        name, budget = (
            f"pull of {SIZES[0]} MiB over {SLOW_MBIT / 1000:g} Gbit/s, authenticated",
            at_least(SHARE_OF_SLOW),
        )
        arrays, frames = rates["arrays"], rates["frames"]
        found.append(Measurement("hosts", name, arrays, "MiB/s", frames, "frames alone", budget, scale.runs))
    return found


def _rates(readers: Mapping[str, Program], mib: int, scale: Scale) -> dict[str, float]:
    """MiB a second of pulls by each reader, in turns, and of a bare socket beside the first reader's."""
    times = max(1, scale.count(512) // mib)
    rates: dict[str, list[float]] = {name: [] for name in ("bare", *readers)}
    for turn in range(scale.runs):
        for name in list(readers)[:: 1 if turn % 2 else -1]:
            reader = readers[name]
            found = reader.answer(reader.send("pulls", mib=mib, runs=1, times=times), LIMIT)
            rates[name].append(found["pull"])
            if name == next(iter(readers)):
                rates["bare"].append(found["bare"])
    return medians(rates)


def _pair(stack: ExitStack, here: Host, there: Host, folder: str, how: str) -> tuple[Program, Program]:
    """A reader and an owner that know each other; `how` names the protection of their traffic."""
    reader, owner = (
        stack.enter_context(host.python("-m", "benchmarks.hosts", "serve", host.address, how, folder))
        for host in (here, there)
    )
    reader.ask("meet", host=there.address, owner=owner.ask("own"))
    return reader, owner


def _calls(reader: Program, owner: Program, scale: Scale, how: str, budget: Budget) -> list[Measurement]:
    available = cores()
    for end, core in ((reader, available[0]), (owner, available[-1])):
        end.ask("cores", cores=[core])
    sizes = [frame_nbytes(*stats) for stats in _eager(reader, owner)]
    port = owner.ask("serve", nbytes=sizes[0], answers=sizes[1])
    times = scale.count(CALLS // PARTS)
    taken = reader.answer(reader.send("calls", port=port, sizes=sizes, runs=scale.runs * PARTS, times=times), LIMIT)
    floor = f"echo of {sizes[0]} B to {sizes[1]} B"
    return [
        Measurement("hosts", f"{how}{kind} call, each host on a core", taken[kind], "us", taken["bare"], floor, budget,
                    scale.runs)
        for kind in ("sync", "async", "inline")
    ]  # fmt: skip


LIMIT: Final = 300.0
"""Seconds that one measurement may take."""


def copied(*ends: Program) -> int:
    """Bytes that zcactor has copied in these processes."""
    return sum(end.ask("stats")["bytes_copied"] for end in ends)


def _eager(reader: Program, owner: Program) -> list[tuple[int, int]]:
    """Bytes of payload sent and the number of frames, for calls ``coro(3, 4.5)``, at either end."""
    before = reader.ask("stats"), owner.ask("stats")
    times = 16
    reader.ask("some", times=times)
    after = reader.ask("stats"), owner.ask("stats")
    return [(late["bytes_eager"] - early["bytes_eager"], times) for early, late in zip(before, after, strict=True)]


def frame_nbytes(payload: int, frames: int) -> int:
    """Bytes of each of so many frames, with `payload` bytes in all."""
    return LENGTH_PREFIX + frame_size(0, 0, payload // frames)


# ---- the program


def main(arguments: list[str] | None = None) -> int:
    """Measure and show.

    Returns:
        0; 1 with ``--strict`` when a budget does not hold; 2 where hosts cannot be made.
    """
    options = options_of("benchmarks.hosts", "Two hosts next to their floors.").parse_args(arguments)
    reason = missing()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    found = measure(QUICK if options.quick else FULL)
    show("Two hosts over TCP", found)
    return report(options, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        uvloop.run(answer(*sys.argv[2:]))
    else:
        sys.exit(main())
