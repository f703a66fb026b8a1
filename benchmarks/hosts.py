"""Hosts over TCP next to the least cost of sockets between them: namespaces on one cable, on one machine.

::

    python -m benchmarks.hosts                       # everything; needs root, iproute2 and nftables
    python -m benchmarks.hosts pulls --quick         # one of pulls, broadcast and group
    python -m benchmarks.hosts integrity             # what authentication costs, without namespaces

*pulls*: an array is pulled from the owner's arena into the reader's. The floor is the indispensable part: the same
bytes by one process's sendfile(2) from a memfd to the other's recv(2) into memory that it has already touched. The
floor of a call is a round trip of messages of the same sizes between two processes on uvloop. These messages are never
encrypted, not even where the call's frames are sealed. All go over the same cable, in turns and between the same two
processes. Pulls whose bytes are authenticated are measured in turns with pulls where only frames are sealed and with
TLS, each between two processes of its own; and over a link with the rate of a slow network.

*broadcast*: one array to eight hosts at once, the bytes that leave its owner, and the time. The floor of the time is
one pull by one host from the owner, in the same run over the same links. For comparison all hosts also take the array
from its owner, as they would if no host passed it on. Links without a limit are bounded by this machine's cores, which
then do the work of all hosts; where each host may send only 1 Gbit/s, the links are the bound.

*group*: a `reduce_scatter` over four hosts brings each rank the fourth part of the arrays of all others, and adds. The
floor is the exchange alone: each rank gets the same parts from each of the others at once, by sendfile(2) to recv(2).
Both begin after a barrier, and the slowest rank counts. Neither side's bytes are sealed. Both take turns, and the round
of the median ratio counts.

*integrity*: the cost of authenticating the bytes of arrays, of the primitives in one core and of whole pulls between
two processes (``docs/explanation/decisions/0021-integrity.md``). It needs ``cryptography``, of the ``cluster`` extra.

As all ends and the cable belong to one machine, its cores are measured: on two of them, a pull's further streams gain
little, and figures scatter. Ratios are of use, times are not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import datetime
import hashlib
import hmac
import json
import mmap
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import numpy.typing as npt
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.poly1305 import Poly1305
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

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
    median_round,
    medians,
    options_of,
    rate,
    report,
    show,
)
from benchmarks.machine import cores
from tests.hosts.members import Member
from tests.hosts.netns import Network, missing
from zcactor.api.handle import ActorHandle
from zcactor.api.remote_actor import RemoteActor
from zcactor.ids import new_actor
from zcactor.interface import Interface
from zcactor.marshal.sharing import share
from zcactor.objects import locations
from zcactor.observe.stats import stats_of
from zcactor.rpc.codec import frame_size
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.frames import LENGTH_PREFIX
from zcactor.transport.stream.record_layer import Integrity
from zcactor.transport.stream.tls import load_tls
from zcactor.transport.tcp.endpoint import TcpEndpoint
from zcactor.transport.tcp.serve import DataServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from benchmarks.harness import Budget
    from tests.hosts.netns import Host, Program
    from zcactor.transport.base import Connection
    from zcactor.transport.tcp.data import Channel


# ---- authentication of bytes

NBYTES: Final = 64 << 20
CHUNK: Final = 1 << 20
PULLED: Final = (("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("32 MiB", 32 << 20), ("64 MiB", 64 << 20))
"""Sizes of pulls: from 64 MiB on they use several streams."""
MODES: Final = ("nothing", "frames", "arrays", "tls")
TOKEN: Final = bytes(32)
"""The token of two processes of this program, which keeps all other processes out."""


class Silent:
    """A receiver of frames that gets none."""

    def frames_received(self, data: memoryview) -> None:
        """Never called: no frames come."""

    def connection_lost(self, cause: Exception | None) -> None:
        """Ignore the end: the other end has closed."""


def primitives() -> dict[str, Callable[[memoryview], object]]:
    """The functions that may be applied to a chunk, by name; each nonce is used once."""
    cipher, key, copy = AESGCM(os.urandom(32)), os.urandom(32), bytearray(CHUNK)
    nonces = iter(range(1 << 40))

    def into(chunk: memoryview) -> None:
        copy[:] = chunk

    return {
        "memcpy": into,
        "GMAC": lambda chunk: cipher.encrypt(next(nonces).to_bytes(12, "little"), b"", chunk),
        "Poly1305": lambda chunk: Poly1305.generate_tag(key, chunk),
        "AES-256-GCM": lambda chunk: cipher.encrypt(next(nonces).to_bytes(12, "little"), chunk, b""),
        "HMAC-SHA256": lambda chunk: hmac.digest(key, chunk, "sha256"),
        "BLAKE2b": lambda chunk: hashlib.blake2b(chunk, key=key).digest(),
    }


def throughput(work: Callable[[memoryview], object], seconds: float) -> float:
    """The throughput in GiB/s over 64 MiB, chunk by chunk."""
    data = memoryview(os.urandom(CHUNK) * (NBYTES // CHUNK))
    done, begin = 0, time.perf_counter()
    while (taken := time.perf_counter() - begin) < seconds:
        at = done % NBYTES
        work(data[at : at + CHUNK])
        done += CHUNK
    return done / taken / (1 << 30)


def certificate(folder: Path) -> None:
    """Make a CA that is its own only member."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "benchmark")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    made = made.add_extension(x509.BasicConstraints(True, None), critical=True)
    pem = made.sign(key, SHA256()).public_bytes(Encoding.PEM)
    for file in ("ca.pem", "cert.pem"):
        (folder / file).write_bytes(pem)
    (folder / "key.pem").touch(0o600)
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def endpoint(mode: str, folder: Path) -> TcpEndpoint:
    """One end, with an arena of 64 MiB."""
    fd = os.memfd_create("benchmark")
    os.ftruncate(fd, NBYTES)
    with mmap.mmap(fd, NBYTES) as arena:
        arena[:] = os.urandom(CHUNK) * (NBYTES // CHUNK)
    return TcpEndpoint(
        "127.0.0.1", secrets.token_bytes(16), TOKEN, fd, NBYTES, sealing=mode in {"frames", "arrays"},
        integrity=Integrity.FRAMES if mode == "frames" else Integrity.ARRAYS,
        tls=load_tls(folder) if mode == "tls" else None,
    )  # fmt: skip


async def own(mode: str, folder: Path) -> None:
    """Run the owner: serve until its input ends."""
    here = endpoint(mode, folder)
    kept: list[Connection] = []

    def accepted(connection: Connection) -> None:
        connection.start(Silent())
        kept.append(connection)

    await here.start(accepted)
    print(here.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def pulls(mode: str, folder: Path, address: str, seconds: float) -> list[float]:
    """The median time of a pull of each of `SIZES`, in seconds."""
    connection = await endpoint(mode, folder).connect(address)
    connection.start(Silent())
    into = (ctypes.c_char * NBYTES)()
    found = []
    for _, nbytes in PULLED:
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < end:
            begin = time.perf_counter()
            await connection.pull(RemoteRegion(1, 0, nbytes), ctypes.addressof(into), into)
            times.append(time.perf_counter() - begin)
        found.append(median(times))
    connection.abort()
    return found


def sealed_pulls(mode: str, folder: Path, seconds: float) -> list[float]:
    """Measure `pulls` from an owner in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.hosts", "integrity", "--own", mode, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdin is not None
        address = owner.stdout.readline().strip()
        try:
            return asyncio.run(pulls(mode, folder, address, seconds))
        finally:
            owner.stdin.close()


def table(seconds: float) -> str:
    """Measure everything; the tables in Markdown."""
    lines = ["| one core, chunks of 1 MiB | GiB/s |", "|---|---:|"]
    lines += [f"| {name} | {throughput(work, seconds):.1f} |" for name, work in primitives().items()]
    with tempfile.TemporaryDirectory() as folder:
        certificate(Path(folder))
        found = {mode: sealed_pulls(mode, Path(folder), seconds) for mode in MODES}
    lines += ["", "| pulled over loopback, ms | not sealed | `frames` | `arrays` | TLS |", "|---|---:|---:|---:|---:|"]
    for i, (name, _) in enumerate(PULLED):
        lines.append(f"| {name} | " + " | ".join(f"{found[mode][i] * 1e3:.2f}" for mode in MODES) + " |")
    return "\n".join(lines)


def integrity(arguments: Sequence[str] | None = None) -> None:
    """Run the program; see the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts integrity", description="Authentication.")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    parser.add_argument("--own", nargs=2, metavar=("MODE", "FOLDER"), help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.own is None:
        print(table(chosen.seconds))
    else:
        asyncio.run(own(chosen.own[0], Path(chosen.own[1])))


# ---- pulls and calls

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


def _accept(listening: socket.socket, memory: int) -> None:
    """Serve each client that comes, in a thread of its own."""
    while True:
        sock, _ = listening.accept()
        threading.Thread(target=_serve, args=(sock, memory), daemon=True).start()


def _serve(sock: socket.socket, memory: int) -> None:
    """Answer each request, two numbers, by the bytes of the memfd from the first on to the second."""
    with sock:
        while request := sock.recv(16, socket.MSG_WAITALL):
            at, end = int.from_bytes(request[:8], "little"), int.from_bytes(request[8:], "little")
            while at < end:
                at += os.sendfile(sock.fileno(), memory, at, end - at)


def _receive(sock: socket.socket, start: int, view: memoryview) -> None:
    sock.sendall(start.to_bytes(8, "little") + (start + len(view)).to_bytes(8, "little"))
    at = 0
    while at < len(view):
        at += sock.recv_into(view[at:], len(view) - at, socket.MSG_WAITALL)


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
        threading.Thread(target=_accept, args=(listening, memory), daemon=True).start()
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
                await loop.run_in_executor(None, _receive, sock, 0, view)

            subjects: dict[str, Sample] = {
                "bare": partial(rate, receive, nbytes, times),
                "pull": partial(rate, partial(pull, region, target.address, target), nbytes, times),
                "call": partial(rate, partial(self._get, nbytes), nbytes, times),
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
        return medians(await interleave(runs, {name: partial(each, run, times) for name, run in subjects.items()}))


async def answer(make: Callable[[], End | Node]) -> None:
    """Run the program of a host: execute the commands on the standard input."""
    end = make()
    await end.member.start()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        number, name = command.pop("id"), command.pop("do")
        print(json.dumps({"id": number, "value": await getattr(end, name)(**command)}), flush=True)


def measure_pulls(scale: Scale) -> list[Measurement]:
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


# ---- one array to many hosts

HOSTS = 8
BROADCAST = (256, 64)
"""MiB of the array: over links without a limit, and over slow links."""
TIMES_ARRAY: Final = 2
"""Budget of the bytes that leave the owner, in arrays."""
LINK: Final = "1gbit"
PATIENCE: Final = 120.0
"""Seconds that one broadcast may take."""

BROADCAST_FULL, BROADCAST_QUICK = Scale(5, 1.0), Scale(1, 0.25)


class Taker:
    """An actor that takes an array, and keeps it as a reader would."""

    def __init__(self) -> None:
        self.kept: Array | None = None

    async def take(self, array: Array) -> float:
        """A sum that touches each page."""
        self.kept = array
        return float(array[:: 4096 // 8].sum())


class Node:
    """One of the processes. Its methods are commands."""

    def __init__(self, host: str, mib: int) -> None:
        self.member = Member(host, 3 * mib * MIB)
        self.member.be_current()
        self._takers: list[Any] = []
        self._taker = Taker()
        self._served: list[int] = []
        self._count()
        process = self.member.process
        self._index = process.hosts.take_index()
        process.hosts.add(self._index, Taker, "Taker").adopt(self._taker)

    def _count(self) -> None:
        served, answer = self._served, DataServer._answer

        def counting(self: DataServer, channel: Channel, arena: int, object_id: int, offset: int, nbytes: int) -> None:
            served.append(nbytes)
            answer(self, channel, arena, object_id, offset, nbytes)

        setattr(DataServer, "_answer", counting)  # noqa: B010  # here bytes leave, for any reader

    async def about(self) -> dict[str, Any]:
        """The name, address and actor of this process."""
        member = self.member
        return {"name": member.name.hex(), "address": member.endpoint.address, "index": self._index}

    async def meet(self, others: list[dict[str, Any]]) -> None:
        """Make the other processes known, and connect to each."""
        process = self.member.process
        for other in others:
            self.member.addresses[other["name"]] = other["address"]
            place = bytes.fromhex(other["name"]), other["index"]
            remote = RemoteActor(process, new_actor(), Interface.of(Taker), place, None, "default", 1000, 0)
            self._takers.append(ActorHandle(remote))
            await process.connections.connect(place[0])

    async def passed_on(self, wanted: bool) -> None:
        """Set whether this reader asks for the places of the array; otherwise it takes the array from its owner."""
        locations.LOCATED_NBYTES = 1 if wanted else 1 << 62  # type: ignore[misc]

    async def give(self, count: int, mib: int) -> dict[str, float]:
        """Give an array to so many of the others: the seconds until each has it, and the bytes that this process has
        sent."""
        array: Array = zc.empty(mib * MIB // 8)
        array[:] = 1
        self._served.clear()
        before = time.perf_counter()
        sums = await asyncio.gather(*(taker.take(array) for taker in self._takers[:count]))
        seconds = time.perf_counter() - before
        assert sums == [len(array[:: 4096 // 8])] * count
        return {"seconds": seconds, "bytes": sum(self._served)}

    async def drop(self) -> None:
        """Drop the kept array."""
        self._taker.kept = None

    async def stats(self) -> dict[str, Any]:
        """The figures of the process."""
        return stats_of(self.member.process).plain()


@contextlib.contextmanager
def limited(hosts: Sequence[Host]) -> Iterator[None]:
    """Limit what each host sends to the rate `LINK`, with a bucket of 4 ms."""
    line = ("qdisc", "add", "dev", "eth0", "root", "tbf", "rate", LINK, "burst", "512kb", "latency", "50ms")
    for host in hosts:
        host.command("tc", *line)
    try:
        yield
    finally:
        for host in hosts:
            host.command("tc", "qdisc", "del", "dev", "eth0", "root")


def measure_broadcast(scale: Scale) -> list[Measurement]:
    """Make the hosts, and measure everything between them."""
    found: list[Measurement] = []
    with Network(1 + HOSTS) as hosts, ExitStack() as stack:
        largest = str(max(BROADCAST))
        owner, *readers = (
            stack.enter_context(host.python("-m", "benchmarks.hosts", "serve", host.address, largest)) for host in hosts
        )
        about = [program.ask("about") for program in (owner, *readers)]
        for number, program in enumerate((owner, *readers)):
            program.ask("meet", others=about[:number] + about[number + 1 :])
        found += _rounds(owner, readers, BROADCAST[0], scale, f"{BROADCAST[0]} MiB to {HOSTS} hosts")
        with limited(hosts):
            found += _rounds(owner, readers, BROADCAST[1], scale, f"{BROADCAST[1]} MiB to {HOSTS} hosts, {LINK} each")
        copied = sum(program.ask("stats")["bytes_copied"] for program in (owner, *readers))
        found.append(Measurement("broadcast", "bytes copied", copied, "", budget=exactly(0)))
    return found


def _rounds(owner: Program, readers: Sequence[Program], mib: int, scale: Scale, name: str) -> list[Measurement]:
    seconds: dict[str, list[float]] = {"direct": [], "tree": [], "star": []}
    left: list[float] = []
    for turn in range(scale.runs + 1):
        for kind, figures in seconds.items():
            for reader in readers:
                reader.ask("passed_on", wanted=kind == "tree")
            told = owner.answer(owner.send("give", count=1 if kind == "direct" else len(readers), mib=mib), PATIENCE)
            for reader in readers:
                reader.ask("drop")
            if turn:  # the first one is for the memory's pages
                figures.append(told["seconds"])
                if kind == "tree":
                    left.append(told["bytes"] / (mib * MIB))
    taken = medians(seconds)
    return [
        Measurement(
            "broadcast", f"{name}: leaves the owner", max(left), "arrays", budget=at_most(TIMES_ARRAY, "value"),
            runs=scale.runs,
        ),
        Measurement(
            "broadcast", f"{name}: time", taken["tree"], "s", taken["direct"], "one direct pull", None, scale.runs
        ),
        Measurement(
            "broadcast", f"{name}: all from the owner", taken["star"], "s", taken["direct"], "one direct pull", None,
            scale.runs,
        ),
    ]  # fmt: skip


# ---- a group over hosts

RANKS: Final = 4
REDUCED = (16, 64)
"""MiB of each rank's input."""
SHARE: Final = 0.85
"""Budget: of the rate of bare sockets."""
ENVIRONMENT: Final = {
    "ZCACTOR_TOKEN": "5a" * 32, "ZCACTOR_SECURITY": "off", "ZCACTOR_STORE_CAPACITY": str(1 << 30),
}  # fmt: skip
GROUP_PATIENCE: Final = 300.0
"""Seconds that all measurements of one size may take."""

ROUNDS: Final = 3
"""Rounds of each run."""


@zc.actor
class Rank:
    """A member of the group, and beside it the sockets of the floor."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.inputs: dict[int, Any] = {}

    @zc.method
    async def listen(self, nbytes: int) -> tuple[str, int]:
        """Serve so many bytes to each client. Returns the address."""
        memory = os.memfd_create("floor")
        os.posix_fallocate(memory, 0, nbytes)
        listening = socket.create_server((self.address, 0))

        threading.Thread(target=_accept, args=(listening, memory), daemon=True).start()
        return self.address, listening.getsockname()[1]

    @zc.method
    async def meet(self, others: list[tuple[str, int]], nbytes: int) -> None:
        """Connect to the others, each of which gives so many bytes at most."""
        self.threads = ThreadPoolExecutor(len(others))
        self.sockets = [socket.create_connection((host, port)) for host, port in others]
        self.bare = [memoryview(mmap.mmap(-1, nbytes)) for _ in others]
        for view in self.bare:
            view[:] = bytes(len(view))

    @zc.method
    async def exchanges(self, group: zc.Group, nbytes: int, count: int) -> float:
        """Seconds of taking a part of so many bytes in all from each of the others."""
        loop, part = asyncio.get_running_loop(), nbytes // group.size
        start = group.rank * part  # each takes bytes of its own, as in a reduce_scatter
        taken = [(sock, start, view[:part]) for sock, view in zip(self.sockets, self.bare, strict=True)]
        times = []
        for _ in range(count):
            await group.barrier()
            before = time.perf_counter()
            await asyncio.gather(*[loop.run_in_executor(self.threads, _receive, *each) for each in taken])
            times.append(time.perf_counter() - before)
        return median(times)

    @zc.method
    async def scatters(self, group: zc.Group, nbytes: int, count: int) -> float:
        """Seconds of a reduce_scatter of an array of the store."""
        array = self.inputs.get(nbytes)
        if array is None:
            array = self.inputs[nbytes] = zc.ones(nbytes // 4, np.float32)
        times = []
        for _ in range(count):
            await group.barrier()
            before = time.perf_counter()
            piece = await group.reduce_scatter(array)
            times.append(time.perf_counter() - before)
            if piece[0] != group.size or piece[-1] != group.size:
                raise RuntimeError(f"a sum of ones over {group.size} ranks is {piece[0]}, {piece[-1]}")
            del piece
        return median(times)


async def _slowest(actors: Sequence[Any], method: str, *args: Any) -> float:
    return max([float(each) for each in await zc.get([getattr(actor, method)(*args) for actor in actors])])


async def drive(head: str, sizes: Sequence[int], runs: int, share: float) -> None:
    """Be the program that measures: print for each size the MiB, the seconds of the floor and of ours, and the bytes
    that were copied."""
    async with zc.init(head):
        nodes = {node.host: node for node in await zc.nodes()}
        actors: list[Any] = []
        for node in nodes.values():
            address = node.address.rpartition("@")[2].rpartition(":")[0]
            actors.append(await Rank.options(node=node.node_id, num_cpus=0).spawn(address))
        group = await zc.group(actors)
        most = max(sizes) * MIB // RANKS
        places = await zc.get([actor.listen(max(sizes) * MIB) for actor in actors])
        for rank, actor in enumerate(actors):
            await actor.meet([place for other, place in enumerate(places) if other != rank], most)
        for mib in sizes:
            count = Scale(runs, share).count(256 // mib, least=2)
            before = [(await zc.stats(actor)).bytes_copied for actor in actors]
            subjects: dict[str, Any] = {
                "bare": partial(_slowest, actors, "exchanges", group, mib * MIB, count),
                "ours": partial(_slowest, actors, "scatters", group, mib * MIB, count),
            }
            times = await interleave(ROUNDS * runs, subjects)
            copied = sum([(await zc.stats(actor)).bytes_copied for actor in actors]) - sum(before)
            ours, bare = median_round(times["ours"], times["bare"])
            print(json.dumps([mib, bare, ours, copied]), flush=True)


def _start(host: Host, *arguments: str) -> None:
    line = (sys.executable, "-m", "zcactor", "start", *arguments, "--num-cpus", "2")
    with host.start(*line, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        output, _ = process.communicate(timeout=60)
    if process.returncode:
        raise RuntimeError(f"no node starts on {host.name}: {output}")


def measure_group(scale: Scale) -> list[Measurement]:
    """Make the hosts, and measure the group on them."""
    found: list[Measurement] = []
    with ExitStack() as stack:
        hosts = stack.enter_context(Network(RANKS))
        head = f"{hosts[0].address}:7433"
        for host in hosts:
            _start(host, *(["--head", "--host", host.address] if host is hosts[0] else ["--address", head]))
        line = (sys.executable, "-m", "benchmarks.hosts", "drive", head, str(scale.runs), str(scale.share))
        sizes = [str(mib) for mib in REDUCED]
        with hosts[0].start(*line, *sizes, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
            output, _ = process.communicate(timeout=GROUP_PATIENCE)
        if process.returncode:
            raise RuntimeError(f"the program that measures ended with {process.returncode}")
    for mib, bare, ours, copied in map(json.loads, output.splitlines()):
        moved = mib * (RANKS - 1) / RANKS  # MiB that a rank takes
        found.append(
            Measurement("group-hosts", f"reduce_scatter of {mib} MiB over {RANKS} hosts", moved / ours, "MiB/s",
                        moved / bare, "sendfile to recv", at_least(SHARE), ROUNDS * scale.runs,
                        "round of the median ratio")
        )  # fmt: skip
        found.append(Measurement("group-hosts", f"bytes copied for {mib} MiB", copied, "B", budget=exactly(0)))
    return found


# ---- the program

ITEMS: Final[Mapping[str, tuple[str, Callable[[Scale], list[Measurement]], Scale, Scale]]] = {
    "pulls": ("Two hosts over TCP", measure_pulls, FULL, QUICK),
    "broadcast": ("One array to many hosts", measure_broadcast, BROADCAST_FULL, BROADCAST_QUICK),
    "group": ("A group over four hosts", measure_group, FULL, QUICK),
}
"""The title of each part, its function, and its scales."""


def main(arguments: list[str] | None = None) -> int:
    """Measure and show.

    Returns:
        0; 1 with ``--strict`` when a budget does not hold; 2 where hosts cannot be made.
    """
    options = options_of("benchmarks.hosts", "Hosts next to their floors.", ITEMS).parse_args(arguments)
    reason = missing()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    found: list[Measurement] = []
    for part in options.parts or ITEMS:
        title, measure, full, quick = ITEMS[part]
        measured = measure(quick if options.quick else full)
        show(title, measured)
        found += measured
    return report(options, found)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", host, how, folder]:
            uvloop.run(answer(lambda: End(host, how, Path(folder))))
        case ["serve", host, largest]:
            uvloop.run(answer(lambda: Node(host, int(largest))))
        case ["drive", head, runs, amount, *sizes]:
            zc.run(drive(head, [int(mib) for mib in sizes], int(runs), float(amount)))
        case ["integrity", *rest]:
            integrity(rest)
        case _:
            sys.exit(main())
