"""One peer by TLS: frames and bytes as over TCP, and all of them encrypted.

The native part, which reads and writes the descriptor itself, is not used. Bulk bytes do not go by sendfile(2): the
owner maps the range that was asked for and gives it to OpenSSL, and the reader has OpenSSL write to where the bytes
belong. So encrypting and decrypting are the only times that they pass through a CPU.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any, ClassVar, Final

from zcactor.transport import tcp_data
from zcactor.transport.tcp_connection import TcpConnection
from zcactor.transport.tcp_data import Channel
from zcactor.transport.tls import TlsSocket

if TYPE_CHECKING:
    import socket

    from zcactor.transport.base import Receiver

__all__ = ["TlsChannel", "TlsConnection"]

READS: Final = 16
"""Records of at most 16 KiB in one turn of the loop: as much as the buffer of other connections takes at once."""
PIECE_NBYTES: Final = 1 << 20
"""Bytes that one call encrypts and sends, which `PATIENCE` is for."""
LASTS_NBYTES: Final = 1 << 38
"""256 GiB are 2^24 full records. RFC 8446, 5.5, allows 2^24.5 under one key, and keys are not changed."""


class TlsChannel(Channel):
    """A data socket that is a `zcactor.transport.tls.TlsSocket`."""

    lasts: ClassVar[float] = LASTS_NBYTES

    def _be_patient(self, sock: socket.socket) -> None:
        sock.settimeout(tcp_data.PATIENCE)  # which OpenSSL's calls take into account, unlike the system's own

    def send(self, data: bytes, *, more: bool = False) -> None:
        """See `Channel.send`. It becomes a record of its own."""
        del more
        self.sock.sendall(data)

    def send_file(self, fd: int, offset: int, nbytes: int) -> None:
        """See `Channel.send_file`; the bytes are read where they lie."""
        if os.fstat(fd).st_size < offset + nbytes:
            raise BrokenPipeError("the arena ends before its announced size")
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        # not closed here: the frames of what is raised hold the view until it has been dealt with, and then it goes
        view = memoryview(mmap.mmap(fd, offset + nbytes - start, prot=mmap.PROT_READ, offset=start))
        at, end = offset - start, len(view)
        while at < end:
            at += self.sock.send(view[at : at + PIECE_NBYTES])

    def wait(self, seconds: float) -> bool:
        """See `Channel.wait`. What was decrypted and not asked for is not told by the descriptor."""
        assert isinstance(self.sock, TlsSocket)
        return self.sock.pending() > 0 or super().wait(seconds)

    def _receive_into(self, view: memoryview) -> int:
        return self.sock.recv_into(view)


class TlsConnection(TcpConnection):
    """A connection on a `zcactor.transport.tls.TlsSocket`. Satisfies `zcactor.transport.base.Connection`.

    Args: as of `TcpConnection`, with data sockets that are of that kind, too.
    """

    native: ClassVar[bool] = False
    tls: ClassVar[bool] = True
    channel: ClassVar[type[Channel]] = TlsChannel

    def __init__(self, sock: socket.socket, *args: Any, **settings: Any) -> None:
        super().__init__(sock, *args, **settings)
        self._going_on = False  # reading, in a later turn

    @property
    def integrity(self) -> str:
        """See `TcpConnection.integrity`."""
        return "tls"

    @property
    def sealed(self) -> bool:
        """Whether nobody on the way can read or change the frames: always."""
        return True

    def _begin(self, receiver: Receiver) -> None:
        super()._begin(receiver)
        self._go_on_later()  # what was received before is not told by the descriptor

    def _go_on_later(self) -> None:
        if not self._going_on:
            self._going_on = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._going_on = False
        self._on_readable()

    def _on_readable(self) -> bool:
        """Read until there is nothing, or others are to have their turn. False when there was nothing more to read, or
        the connection ended."""
        for _ in range(READS):
            if self._lost or not super()._on_readable():
                return False
        self._go_on_later()
        return True
