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

The ways run between the same two processes, in turns, and allocate received arrays in the same
way, by NumPy in zcactor's store. Nothing is sealed or authenticated on any of them. *Encode* is pickle's protocol 4
over a socket, and by RDMA through the private buffers. *Private buffers* are a ring of slots of 1 MiB: which both ends
map, or which are sent by a socket, or READ by the receiver.

Copies are counted from outside: a library beneath both processes adds up the bytes that the C library's copying
functions are given (``copies.c``). A socket's copies by the kernel are in none of the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import mmap
import os
import pickle
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

import zcactor as zc
from benchmarks.budgets import no_guest
from benchmarks.harness import (
    Budget,
    Measurement,
    Sample,
    Scale,
    at_least,
    at_most,
    exactly,
    interleave,
    options_of,
    report,
    show,
    spread,
)
from tests.hosts.netns import Network, missing
from zcactor.transport.verbs.device.viability import NotViable, viability
from zcactor.transport.verbs.driver.bindings import Absent, bindings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from benchmarks.rdma import Wire
    from zcactor.transport.verbs.driver.base import Device


__all__ = ["MEDIA", "THESIS", "Server", "beside", "main"]


# ---- counting copies

SOURCE: Final = Path(__file__).with_name("copies.c")
FILE: Final = "COPIES_FILE"
"""The variable with the path of the file that has the number."""
_NUMBER: Final = struct.Struct("@Q")


def counting(folder: Path) -> Mapping[str, str]:
    """Build the library; the variables with which a program and its children count.

    Args:
        folder: for the library and the number. It must stay as long as the programs run.

    Raises:
        OSError: there is no C compiler, or it fails; the message has its words.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise OSError("copies are counted by a library that needs a C compiler: install gcc")
    library, number = folder / "copies.so", folder / "copies"
    command = [compiler, "-O2", "-fPIC", "-shared", "-fno-builtin", "-o", str(library), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"the library that counts copies was not built: {done.stderr.strip()}")
    number.write_bytes(_NUMBER.pack(0))
    return {"LD_PRELOAD": str(library), FILE: str(number)}


def so_far() -> int:
    """Bytes that all processes with the file of this process's `FILE` have copied.

    Raises:
        KeyError: the program was not started with the variables of `counting`.
    """
    (found,) = _NUMBER.unpack(Path(os.environ[FILE]).read_bytes())
    return int(found)


# ---- sizes of the layers


def _with_biases(weights: Sequence[tuple[int, int]]) -> list[int]:
    """Elements of the weights and biases of layers, each given by its outputs and the inputs of one output."""
    return [count for outputs, inputs in weights for count in (outputs * inputs, outputs)]


def _alexnet() -> list[int]:
    return _with_biases(
        ((96, 363), (256, 1200), (384, 2304), (384, 1728), (256, 1728), (4096, 9216), (4096, 4096), (1000, 4096))
    )


def _vgg16() -> list[int]:
    outputs = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    convolutions = [(out, 9 * come) for come, out in zip((3, *outputs), outputs, strict=False)]
    return _with_biases((*convolutions, (4096, 25088), (4096, 4096), (1000, 4096)))


_Branch = tuple[tuple[int, int], ...]
"""Convolutions in turn: outputs, and elements of the kernel."""


def _blocks() -> Iterator[tuple[tuple[_Branch, ...], bool]]:
    """The blocks of Inception but for the last two, each with its branches, and whether a pooled copy of its input is
    one more."""
    for pooled in (32, 64, 64):
        yield (((64, 1),), ((48, 1), (64, 25)), ((64, 1), (96, 9), (96, 9)), ((pooled, 1),)), False
    yield (((384, 9),), ((64, 1), (96, 9), (96, 9))), True
    for n in (128, 160, 160, 192):
        yield (
            ((192, 1),), ((n, 1), (n, 7), (192, 7)), ((n, 1), (n, 7), (n, 7), (n, 7), (192, 7)), ((192, 1),)
        ), False  # fmt: skip
    yield (((192, 1), (320, 9)), ((192, 1), (192, 7), (192, 7), (192, 9))), True


def _inception() -> list[int]:
    found: list[int] = []

    def add(come: int, branch: _Branch) -> int:
        for out, kernel in branch:
            found.extend((come * kernel * out, out))
            come = out
        return come

    come = add(3, ((32, 9), (32, 9), (64, 9), (80, 1), (192, 9)))
    for branches, pooled in _blocks():
        come = sum(add(come, branch) for branch in branches) + (come if pooled else 0)
    for _ in range(2):
        add(come, ((320, 1),))
        for first in (((384, 1),), ((448, 1), (384, 9))):
            middle = add(come, first)
            for _pair in range(2):
                add(middle, ((384, 3),))
        add(come, ((192, 1),))
        come = 320 + 4 * 384 + 192
    return [*found, *_with_biases(((1000, come),))]


MODELS: Final[Mapping[str, Sequence[int]]] = {"Inception": _inception(), "AlexNet": _alexnet(), "VGG16": _vgg16()}
"""Elements of each array of the parameters, by network."""


# ---- carriers

SLOT_NBYTES: Final = 1 << 20
SLOTS: Final = 4
"""Slots of a ring."""


def address_of(view: memoryview) -> int:
    """The address of a view's first byte."""
    found: int = np.frombuffer(view, np.uint8).ctypes.data
    return found


class Carrier(Protocol):
    """A way that carries bytes to and fro."""

    async def send(self, view: memoryview) -> None:
        """Send the bytes; they may change afterwards."""

    async def receive(self, view: memoryview) -> None:
        """Fill the view with the bytes that the other end sends."""

    async def take(self, nbytes: int) -> bytes | bytearray:
        """Receive so many bytes into memory that the carrier allocates."""


def _fill(sock: socket.socket, view: memoryview) -> None:
    at = 0
    while at < len(view):
        received = sock.recv_into(view[at:], len(view) - at, socket.MSG_WAITALL)
        if not received:
            raise ConnectionResetError("the other end has closed its socket")
        at += received


class Stream:
    """A socket. Satisfies `Carrier`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    async def send(self, view: memoryview) -> None:
        """Send by sendall."""
        self._sock.sendall(view)

    async def receive(self, view: memoryview) -> None:
        """Receive into the view itself."""
        _fill(self._sock, view)

    async def take(self, nbytes: int) -> bytes:
        """Receive by recv until all is there, and join the parts."""
        parts = []
        while nbytes:
            part = self._sock.recv(min(SLOT_NBYTES, nbytes))
            if not part:
                raise ConnectionResetError("the other end has closed its socket")
            parts.append(part)
            nbytes -= len(part)
        return b"".join(parts)


def _pieces(view: memoryview) -> Iterator[tuple[int, int]]:
    """The address and the bytes of each piece that fits a slot."""
    address = address_of(view)
    for at in range(0, len(view), SLOT_NBYTES):
        yield address + at, min(SLOT_NBYTES, len(view) - at)


class _Slots(ABC):
    """The common part of all carriers with slots."""

    @abstractmethod
    async def receive(self, view: memoryview) -> None:
        """See `Carrier`."""

    async def take(self, nbytes: int) -> bytearray:
        """Receive into bytes of their own."""
        data = bytearray(nbytes)
        await self.receive(memoryview(data))
        return data


class _Ring:
    """Slots of memory at one end, in turn."""

    def __init__(self, address: int) -> None:
        self._address = address
        self._next = 0

    def slot(self) -> int:
        """The address of the next slot."""
        found = self._address + self._next * SLOT_NBYTES
        self._next = (self._next + 1) % SLOTS
        return found


def _touched(nbytes: int) -> tuple[mmap.mmap, int]:
    """Memory whose pages are there, and its address."""
    memory = mmap.mmap(-1, nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, 0, nbytes)
    return memory, address


class SentSlots(_Slots):
    """Slots at each end, and a socket between them. Satisfies `Carrier`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._memory, address = _touched(SLOTS * SLOT_NBYTES)
        self._view = memoryview(self._memory)
        self._low, self._ring = address, _Ring(address)

    async def send(self, view: memoryview) -> None:
        """Copy each piece into a slot, and send the slot."""
        for address, nbytes in _pieces(view):
            slot = self._ring.slot()
            ctypes.memmove(slot, address, nbytes)
            self._sock.sendall(self._view[slot - self._low : slot - self._low + nbytes])

    async def receive(self, view: memoryview) -> None:
        """Receive each piece into a slot, and copy it out."""
        for address, nbytes in _pieces(view):
            slot = self._ring.slot()
            _fill(self._sock, self._view[slot - self._low : slot - self._low + nbytes])
            ctypes.memmove(address, slot, nbytes)


class MappedSlots(_Slots):
    """Slots that both ends map, and a socket that says which are full and which are free. Satisfies `Carrier`.

    Args:
        sock: between the ends.
        fd: a memfd of `NBYTES`.
        number: of this end, 0 or 1.
    """

    NBYTES: Final = 2 * SLOTS * SLOT_NBYTES

    def __init__(self, sock: socket.socket, fd: int, number: int) -> None:
        self._sock = sock
        self._memory = mmap.mmap(fd, self.NBYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        half = SLOTS * SLOT_NBYTES
        self._mine, self._theirs = _Ring(address + number * half), _Ring(address + (1 - number) * half)
        self._full = 0  # of mine, as far as this end knows

    async def send(self, view: memoryview) -> None:
        """Copy each piece into a free slot."""
        for address, nbytes in _pieces(view):
            if self._full == SLOTS:
                self._hear()
                self._full -= 1
            ctypes.memmove(self._mine.slot(), address, nbytes)
            self._full += 1
            self._sock.sendall(b"+")

    async def receive(self, view: memoryview) -> None:
        """Copy each piece out of the slot that the other end has filled."""
        while self._full:  # the other end has emptied these before it sent
            self._hear()
            self._full -= 1
        for address, nbytes in _pieces(view):
            self._hear()
            ctypes.memmove(address, self._theirs.slot(), nbytes)
            self._sock.sendall(b"-")

    def _hear(self) -> None:
        if not self._sock.recv(1):
            raise ConnectionResetError("the other end has closed its socket")


class ReadSlots(_Slots):
    """Slots at each end, of which the receiver READs the sender's; words on a socket say which are full and free.
    Satisfies `Carrier`. Made by `connect`."""

    def __init__(self, wire: Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, device: Device) -> None:
        self._wire = wire
        self._reader = reader
        self._writer = writer
        half = SLOTS * SLOT_NBYTES
        self._memory, self._low = _touched(2 * half)
        self._mine, self._ours = _Ring(self._low), _Ring(self._low + half)
        self._theirs, self._rkey = _Ring(0), 0  # until they are known
        self._region = device.register(self._low, 2 * half, remote_read=True)
        self._full = 0

    @classmethod
    async def connect(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, binding: str, stack: ExitStack
    ) -> ReadSlots:
        """Open a device and a queue pair, and connect it to that of the other end, which does the same at once.

        Args:
            reader: of a socket between the ends.
            writer: of the same socket.
            binding: see `benchmarks.rdma.usable`.
            stack: closes what was opened.

        Raises:
            OSError: there is no device.
        """
        from benchmarks.rdma import Wire, address_from, plain, usable
        from zcactor.transport.verbs.device.viability import NotViable, viability

        library = usable(binding)
        found = viability(library, arena_nbytes=0)
        if isinstance(found, NotViable):
            raise OSError(str(found))
        device = library.open(found.device)
        stack.callback(device.close)
        wire = Wire(device, found, 64, stack)
        self = cls(wire, reader, writer, device)
        stack.callback(self._region.close)
        await self._say({"wire": plain(wire.address), "low": self._low, "rkey": self._region.rkey})
        theirs = await self._heard()
        self._theirs, self._rkey = _Ring(theirs["low"]), theirs["rkey"]
        wire.connect(address_from(theirs["wire"]), echoes=False)
        await self._say({})
        await self._heard()  # both are connected
        return self

    async def _say(self, words: dict[str, Any]) -> None:
        self._writer.write(json.dumps(words).encode() + b"\n")
        await self._writer.drain()

    async def _heard(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self._reader.readline())
        return found

    async def send(self, view: memoryview) -> None:
        """Copy each piece into a free slot."""
        for address, nbytes in _pieces(view):
            if self._full == SLOTS:
                await self._reader.readexactly(1)
                self._full -= 1
            ctypes.memmove(self._mine.slot(), address, nbytes)
            self._full += 1
            self._writer.write(b"+")

    async def receive(self, view: memoryview) -> None:
        """READ each piece that the other end has put into a slot, and copy it out of the slot here."""
        from benchmarks.rdma import lists_of

        while self._full:
            await self._reader.readexactly(1)
            self._full -= 1
        for address, nbytes in _pieces(view):
            await self._reader.readexactly(1)
            slot = self._ours.slot()
            reads = lists_of(slot, self._region.lkey, self._theirs.slot(), self._rkey, nbytes, SLOT_NBYTES)
            await self._wire.read(reads)
            self._writer.write(b"-")
            ctypes.memmove(address, slot, nbytes)


# ---- messages

Array = npt.NDArray[np.float32]

_LENGTH: Final = struct.Struct("<Q")
_MOST: Final = 510
"""Arrays of one message: their number and lengths go before them in less than a page."""


class Messages(Protocol):
    """One end's messages."""

    async def send(self, arrays: Sequence[Array]) -> None:
        """Send a message."""

    async def receive(self) -> list[Array]:
        """Receive a message; the arrays belong to the caller."""


class Encoded:
    """Messages that are pickled whole. Satisfies `Messages`."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    async def send(self, arrays: Sequence[Array]) -> None:
        """Encode into one string of bytes, and send it."""
        data = pickle.dumps(list(arrays), protocol=4)
        await self._carrier.send(memoryview(_LENGTH.pack(len(data))))
        await self._carrier.send(memoryview(data))

    async def receive(self) -> list[Array]:
        """Receive the bytes, and decode them."""
        length = bytearray(_LENGTH.size)
        await self._carrier.receive(memoryview(length))
        data = await self._carrier.take(_LENGTH.unpack(length)[0])
        found: list[Array] = pickle.loads(data)  # comes from this program's other end
        return found


class Private:
    """Messages whose arrays go through the carrier as they are, each into memory for it alone. Satisfies
    `Messages`."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    async def send(self, arrays: Sequence[Array]) -> None:
        """Send the arrays' lengths, and their bytes.

        Raises:
            ValueError: there are too many arrays.
        """
        if len(arrays) > _MOST:
            raise ValueError(f"a message has {len(arrays)} arrays, and at most {_MOST} are allowed: send several")
        lengths = np.zeros(_MOST + 1, np.int64)
        lengths[0] = len(arrays)
        lengths[1 : 1 + len(arrays)] = [len(array) for array in arrays]
        await self._carrier.send(_bytes(lengths))
        for array in arrays:
            await self._carrier.send(_bytes(array))

    async def receive(self) -> list[Array]:
        """Receive the lengths, allocate the arrays, and receive their bytes into them."""
        lengths = np.empty(_MOST + 1, np.int64)
        await self._carrier.receive(_bytes(lengths))
        found: list[Array] = []
        for length in lengths[1 : 1 + lengths[0]].tolist():
            array: Array = np.empty(length, np.float32)
            await self._carrier.receive(_bytes(array))
            found.append(array)
        return found


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    """The memory of an array that may be read-only, as plain bytes.

    A view that NumPy exports would make the array's memory count as lent (PEP 3118) as long as the view exists.
    """
    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    return memoryview(memory).cast("B")


WAYS: Final[Mapping[str, Callable[[Carrier], Messages]]] = {"encode": Encoded, "private buffers": Private}
"""The messages of each way without zcactor."""


# ---- the other end

_BY_STREAM: Final[Mapping[str, Callable[[socket.socket], Carrier]]] = {"encode": Stream, "private buffers": SentSlots}


@zc.actor
class Server:
    """A parameter server, of one worker."""

    def __init__(self) -> None:
        self._parameters: list[Array] = []
        self._folder = tempfile.TemporaryDirectory(prefix="zcthesis-")

    @zc.method
    async def take(self, array: Array) -> float:
        """Receive an array; its first element."""
        return float(array[0])

    @zc.method
    def step(self, gradients: list[Array]) -> list[Array]:
        """Subtract the gradients from the parameters; the new parameters."""
        return self._stepped(gradients)

    @zc.method
    async def forget(self) -> None:
        """Drop the parameters: those of the next step may have other sizes."""
        self._parameters = []

    @zc.method
    async def listen(self, medium: str, way: str, host: str, binding: str) -> str:
        """Serve one connection in a thread of its own.

        Args:
            medium: see `MEDIA`.
            way: see `WAYS`.
            host: the IP address to listen at, where the medium has addresses.
            binding: of RDMA.

        Returns:
            The address for `connect`.
        """
        if medium == "local":
            address = str(Path(self._folder.name) / way.replace(" ", "-"))
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(address)
            listening.listen()
        else:
            listening = socket.create_server((host, 0))
            address = f"{host}:{listening.getsockname()[1]}"

        async def serve() -> None:
            with contextlib.ExitStack() as stack:
                sock, _ = await asyncio.to_thread(listening.accept)
                listening.close()
                carrier = await _carrier(medium, way, sock, 0, binding, stack)
                with contextlib.suppress(ConnectionResetError, asyncio.IncompleteReadError):  # the worker has ended
                    await self._serve(WAYS[way](carrier))

        threading.Thread(target=asyncio.run, args=(serve(),), daemon=True, name=f"{way} over {medium}").start()
        return address

    async def _serve(self, messages: Messages) -> None:
        """Answer a message of one array by its first element, and one of several by the parameters."""
        while True:
            arrays = await messages.receive()
            if len(arrays) == 1:
                await messages.send([arrays[0][:1].copy()])
            else:
                await messages.send(self._stepped(arrays))
            del arrays

    def _stepped(self, gradients: Sequence[Array]) -> list[Array]:
        if not self._parameters:
            self._parameters = [np.zeros(len(gradient), np.float32) for gradient in gradients]
        self._parameters = [old - gradient for old, gradient in zip(self._parameters, gradients, strict=True)]
        return self._parameters


async def _carrier(
    medium: str, way: str, sock: socket.socket, number: int, binding: str, stack: contextlib.ExitStack
) -> Carrier:
    """The carrier of a way over a medium, at the end with this number."""
    sock.setblocking(True)
    stack.callback(sock.close)
    if medium != "local":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if medium == "rxe":
        reader, writer = await asyncio.open_connection(sock=sock)
        return await ReadSlots.connect(reader, writer, binding, stack)
    if medium == "local" and way == "private buffers":
        if number:
            fd = os.memfd_create("slots")
            os.posix_fallocate(fd, 0, MappedSlots.NBYTES)
            socket.send_fds(sock, [b"+"], [fd])
        else:
            _, (fd,), *_ = socket.recv_fds(sock, 1, 1)
        try:
            return MappedSlots(sock, fd, number)
        finally:
            os.close(fd)
    return _BY_STREAM[way](sock)


async def connect(medium: str, way: str, address: str, binding: str, stack: contextlib.ExitStack) -> Messages:
    """Connect to a `Server` that listens.

    Args:
        medium, way, binding: as of `Server.listen`.
        address: the address that it returned.
        stack: closes the connection.
    """
    if medium == "local":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
    else:
        host, port = address.rsplit(":", 1)
        sock = socket.create_connection((host, int(port)))
    return WAYS[way](await _carrier(medium, way, sock, 1, binding, stack))


# ---- the worker and the program

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
    return {**os.environ, "ZCACTOR_SECURITY": "off", "ZCACTOR_STORE_CAPACITY": str(store), **more}


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
    description = "Encoded, through private buffers, and without a copy."
    options = options_of("benchmarks.thesis", description, MEDIA).parse_args(arguments)
    scale = QUICK if options.quick else FULL
    found: list[Measurement] = []
    absent = False
    for medium in options.parts or MEDIA:
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
    return 2 if absent and options.parts else status


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        from benchmarks import thesis  # not as __main__, whose actors the other end would look for in vain

        zc.run(thesis.work(**json.loads(sys.argv[2])))
    else:
        sys.exit(main())
