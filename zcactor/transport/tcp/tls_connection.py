"""A connection to a peer by TLS: frames and bytes as over TCP, and all of them encrypted.

The native part writes and reads the frames, and Python calls OpenSSL for their bytes. Bulk bytes are not sent by
sendfile(2): the owner passes the requested range to OpenSSL where it is mapped, and maps it first if it is not. The
puller has OpenSSL write to the destination. So the bytes pass through a CPU only for encryption and decryption.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, ClassVar, Final

from zcactor.transport.frames import LENGTH_PREFIX
from zcactor.transport.stream.slots import Slots
from zcactor.transport.stream.tls import TlsSocket
from zcactor.transport.tcp import data as tcp_data
from zcactor.transport.tcp.connection import TcpConnection
from zcactor.transport.tcp.data import Channel

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from zcactor.native import hot
    from zcactor.transport.frames import Receiver

__all__ = ["TlsChannel", "TlsConnection"]

RECORD_NBYTES: Final = 16 << 10
"""Bytes of a record's plain text, at most (RFC 8446, 5.1). One call of OpenSSL decrypts one record."""
READS: Final = 16
"""Records in one turn of the loop: as many bytes as other connections read at once."""
PIECE_NBYTES: Final = 1 << 20
"""Bytes that one call encrypts and sends, within `PATIENCE` seconds."""
LASTS_NBYTES: Final = 1 << 38
"""256 GiB are 2^24 full records. RFC 8446, 5.5, allows 2^24.5 under one key, and keys are not changed."""


class TlsChannel(Channel):
    """A data socket that is a `zcactor.transport.stream.tls.TlsSocket`."""

    lasts: ClassVar[float] = LASTS_NBYTES

    def is_bare(self, *, authenticate: bool, sealed: bool) -> bool:
        """See `Channel.is_bare`: bytes are decrypted, which several threads do faster than one."""
        del authenticate, sealed
        return False

    def _be_patient(self, sock: socket.socket) -> None:
        sock.settimeout(tcp_data.PATIENCE)  # OpenSSL's calls follow Python's timeout, not that of the system

    def send(self, data: bytes | memoryview, *, more: bool = False) -> None:
        """See `Channel.send`. The bytes become records of their own."""
        del more
        view = memoryview(data)
        at, end = 0, len(view)
        while at < end:
            at += self.sock.send(view[at : at + PIECE_NBYTES])

    def send_file(self, fd: int, offset: int, nbytes: int) -> None:
        """See `Channel.send_file`. The bytes are read from the mapped file."""
        if os.fstat(fd).st_size < offset + nbytes:
            raise BrokenPipeError("the arena ends before its announced size")
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        # Do not close the mapping here: the frames of an exception hold the view until it has been handled.
        view = memoryview(mmap.mmap(fd, offset + nbytes - start, prot=mmap.PROT_READ, offset=start))
        self.send(view[offset - start :])

    def wait(self, seconds: float) -> bool:
        """See `Channel.wait`. The descriptor does not report bytes that were decrypted already."""
        assert isinstance(self.sock, TlsSocket)
        return self.sock.pending() > 0 or super().wait(seconds)

    def _receive_into(self, view: memoryview, looking: int) -> int:
        return self.sock.recv_into(view)


class TlsConnection(TcpConnection):
    """A connection on a `zcactor.transport.stream.tls.TlsSocket`. Satisfies `zcactor.transport.base.Connection`.

    Args: as for `TcpConnection`, with data sockets that use TLS, too.
    """

    channel: ClassVar[type[Channel]] = TlsChannel

    _going_on = False
    """Whether reading goes on in a later turn."""

    def describe(self) -> str:
        """See `zcactor.transport.base.Connection`."""
        return f"frames and arrays over TCP by TLS; arrays received into the store over {self._further_sockets()}"

    @property
    def integrity(self) -> str:
        """See `TcpConnection.integrity`."""
        return "tls"

    @property
    def sealed(self) -> bool:
        """Always True; see `zcactor.transport.base.Connection`."""
        return True

    def _make_buffer(self) -> hot.SendBuffer:
        self._slots = Slots(self.max_frame + LENGTH_PREFIX, self._sock.send)
        return self._slots.buffer

    def _is_pending(self) -> bool:
        return self._slots.pending

    def _make_read(self, reader: hot.Reader) -> Callable[[], bool]:
        self._feed: Callable[[bytes], bool] = reader.feed
        return self._read_on

    def _begin(self, receiver: Receiver) -> None:
        super()._begin(receiver)
        self._go_on_later()  # the descriptor does not report bytes that were received before

    def _go_on_later(self) -> None:
        if not self._going_on:
            self._going_on = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._going_on = False
        self._read()

    def _read_on(self) -> bool:
        """Read until there is nothing more, or until it is the turn of others. False when there was nothing more to
        read, or the connection has ended."""
        for _ in range(READS):
            if self._lost:
                return False
            try:
                received = self._sock.recv(RECORD_NBYTES)
            except BlockingIOError:
                return False
            except OSError as error:
                self._reading_ended(error, False)
                return False
            if not received:
                self._reading_ended(None, False)
                return False
            if not self._feed(received):
                return False
        self._go_on_later()
        return True

    def _lose(self, cause: Exception | None) -> None:
        self._slots.close()  # before the descriptor is: its number may be given away at once
        super()._lose(cause)

    def _report(self, cause: Exception | None) -> None:
        self._feed = bool
        super()._report(cause)
