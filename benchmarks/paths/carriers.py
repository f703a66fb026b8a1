"""Carriers of bytes between the two ends of a path: a stream, or slots of memory that only the path uses.

Each end sends or receives, and both know whose turn it is. All methods may block their thread: each end has one for
this alone.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import socket
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator
    from contextlib import ExitStack

    from benchmarks.bare_verbs import Wire
    from zcactor.transport.verbs.driver.base import Device

__all__ = ["SLOTS", "SLOT_NBYTES", "Carrier", "MappedSlots", "ReadSlots", "SentSlots", "Stream", "address_of"]

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
            binding: see `benchmarks.bare_verbs.usable`.
            stack: closes what was opened.

        Raises:
            OSError: there is no device.
        """
        from benchmarks.bare_verbs import Wire, address_from, plain, usable
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
        from benchmarks.bare_verbs import lists_of

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
