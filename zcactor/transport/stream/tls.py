"""TLS 1.3 between hosts (RFC 8446), with certificates at both ends: the folder with the certificates, and the socket.

A folder has three files: ``ca.pem`` with the certificates of the authorities, ``cert.pem`` with this host's certificate
and those between it and the authority, and ``key.pem`` with its private key, which no other user may read. Each
certificate of the authority makes a member. Names in certificates are not checked: the token and the names of
processes are proved by the handshake (`zcactor.transport.stream.handshake`), which runs inside TLS.

A client finishes before the server has checked its certificate (RFC 8446, 2), so a refusal arrives with the first bytes
that it reads. The alert of an end (RFC 8446, 6.1) is neither sent nor awaited: frames and answers carry their lengths,
and the end of a connection counts as a loss, whichever side caused it.

Certificates end, and are renewed on the disk. The files are read again at the next connection after they have changed.
Connections that exist go on with what they began with.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import os
import re
import socket
import ssl
import stat
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Self

from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError
from zcactor.logs import transport_log as log
from zcactor.token import check_private
from zcactor.transport.stream.handshake import REFUSAL_NBYTES, HandshakeStatus, raise_refusal, refusal
from zcactor.transport.stream.handshake_io import readable, writable

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BadTls", "RefusedTls", "Tls", "TlsSocket", "ends_soon", "load_tls"]

SOON: Final = timedelta(days=7)
"""The time before the end of a certificate in which that is logged."""
_FILES: Final = ("ca.pem", "cert.pem", "key.pem")
_HANDSHAKE: Final = b"\x16"
"""The first byte of a record with messages of the handshake (RFC 8446, 5.1)."""
_PEM: Final = re.compile(rb"-----BEGIN (X509 |TRUSTED |)CERTIFICATE-----([^-]*)-----END ")
"""A certificate within other text (RFC 7468), in one of the forms that OpenSSL takes."""
_ABOUT_CERTIFICATES: Final = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED", "DECRYPT_ERROR")
"""Parts of the names of alerts about certificates (RFC 8446, 6.2)."""


class BadTls(ProtocolError, OSError):
    """Bytes of the peer that are no TLS, or were changed. An `OSError` as well, for code that expects errors of
    sockets."""


class RefusedTls(AuthenticationError, OSError):
    """One side did not accept the other's certificate."""


class TlsSocket(ssl.SSLSocket):
    """A connected socket with encrypted bytes. `Tls.connect` and `Tls.accept` make it.

    If it is non-blocking, `recv`, `recv_into` and `send` raise `BlockingIOError`, as those of other sockets do. One
    thread may send while another receives. The descriptor does not report bytes that were received and decrypted
    already: read until `BlockingIOError` is raised. After a `send` that has raised it, the next call must begin with
    the same bytes, and more may follow them.

    Raises, in all three:
        BadTls, RefusedTls: as their docstrings say.
        OSError: the system reports the connection broken.
    """

    def __new__(cls, *args: Any, **settings: Any) -> Self:  # wrap_socket leaves `__init__` out
        made = super().__new__(cls, *args, **settings)
        made._turn = threading.RLock()
        return made

    certificate: bytes
    """The certificate of this process, in DER."""
    # One operation at a time, as OpenSSL's state of a connection has no lock. A finalizer that makes calls may run in
    # Python's part of an operation, in the same thread.
    _turn: threading.RLock

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receive up to `buflen` bytes; empty bytes when the stream has ended."""
        try:
            with self._turn:
                return super().recv(buflen, flags)
        except ssl.SSLError as error:
            raise _translated(error) from error
        except OSError as error:
            _forget_errors()
            if isinstance(error, BrokenPipeError):  # the stream has ended, and OpenSSL wanted to send an alert for that
                return b""
            raise

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive into `buffer`; otherwise as `recv`. Returns the number of bytes."""
        try:
            with self._turn:
                return super().recv_into(buffer, nbytes, flags)
        except ssl.SSLError as error:
            raise _translated(error) from error
        except OSError as error:
            _forget_errors()
            if isinstance(error, BrokenPipeError):  # as in `recv`
                return 0
            raise

    def send(self, data: Any, flags: int = 0) -> int:
        """Encrypt and send `data`. Returns the number of bytes taken."""
        try:
            with self._turn:
                return super().send(data, flags)
        except ssl.SSLError as error:
            raise _translated(error) from error
        except OSError:
            _forget_errors()
            raise

    def shutdown(self, how: int) -> None:
        """Shut down the stream below, so that calls of other threads return. Unlike the base class, it does not
        continue without TLS."""
        socket.socket.shutdown(self, how)

    def binding(self) -> bytes:
        """Return the binding of this stream, which is the same at both ends: the hashes of the acceptor's and of the
        connector's certificate, as this end sees them (RFC 5929, 4, with SHA-256 for all). After the handshake only."""
        theirs = self.getpeercert(binary_form=True)
        assert theirs is not None  # no handshake succeeds without it
        hashes = [hashlib.sha256(one).digest() for one in (self.certificate, theirs)]
        return b"".join(hashes if self.server_side else reversed(hashes))

    async def shake_hands(self) -> None:
        """Do the handshake. Cancelling leaves no watch behind, but the socket cannot be used then.

        Raises:
            AuthenticationError: one side does not accept the other's certificate.
            ProtocolError: the peer does not speak TLS 1.3.
            VersionMismatch, ConnectionLost: the acceptor has sent this refusal without TLS.
            OSError: the system reports the connection broken.
        """
        while True:
            if not self.server_side:
                with contextlib.suppress(BlockingIOError):
                    raise_refusal(socket.socket.recv(self, REFUSAL_NBYTES, socket.MSG_PEEK))
            try:
                self.do_handshake()
            except ssl.SSLWantReadError:
                await readable(self)
            except ssl.SSLWantWriteError:
                await writable(self)
            except ssl.SSLEOFError as error:
                raise ConnectionLost(
                    "the peer closed the connection during the TLS handshake, and its log may say why"
                ) from error
            except ssl.SSLError as error:
                raise _translated(error) from error
            except OSError:
                _forget_errors()
                raise
            else:
                return


_forgetting: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _forget_errors() -> None:
    """Empty OpenSSL's list of this thread's errors, after an error of the system.

    OpenSSL 3.6 puts such an error there, and the module `ssl` of CPython leaves it: the next call for any other
    connection in this thread would fail with it instead of waiting.
    """
    with contextlib.suppress(ssl.SSLError):
        _forgetting.set_ciphers("")  # its failure empties the list


def _translated(error: ssl.SSLError) -> OSError:
    """Translate the error into those of other sockets and of this package."""
    if isinstance(error, (ssl.SSLWantReadError, ssl.SSLWantWriteError)):
        return BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    if isinstance(error, (ssl.SSLZeroReturnError, ssl.SSLEOFError, ssl.SSLSyscallError)):
        return BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    if isinstance(error, ssl.SSLCertVerificationError):
        return RefusedTls(
            f"the peer's certificate is not accepted: {error.verify_message}; it must be signed by the CA in this "
            "host's ca.pem, and be valid today for both ends of TLS"
        )
    reason = error.reason or ""
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return RefusedTls("the peer speaks TLS and has no certificate; only who has one of the CA in ca.pem is let in")
    told = reason.lower().replace("_", " ")
    if "ALERT" in reason and any(part in reason for part in _ABOUT_CERTIFICATES):
        return RefusedTls(
            f"the peer does not accept this process's certificate ({told}); the cert.pem of this host must be signed "
            "by the CA in the peer's ca.pem, and be valid today for both ends of TLS"
        )
    return BadTls(
        f"what comes from the peer is not TLS 1.3, or somebody changed it on its way ({told or error}); tls must "
        "be set at both ends"
    )


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The files of a folder, as they were at one time."""

    client: ssl.SSLContext
    server: ssl.SSLContext
    certificate: bytes
    """The certificate that both contexts use, in DER."""
    ends: datetime
    """The time from which on the certificate counts no more."""


class Tls:
    """The certificate, key and authorities of a process; see `load_tls`, which makes it.

    Raises:
        AuthenticationError: as `load_tls`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamp = _stamp(folder)
        self.loaded = _load_folder(folder)
        self._warned: datetime | None = None
        self._warn()

    @property
    def ends(self) -> datetime:
        """The time from which on the certificate counts no more."""
        return self.loaded.ends

    @property
    def cert(self) -> Path:
        """The file with the certificate."""
        return self._folder / "cert.pem"

    def _warn(self) -> None:
        """Log once that the certificate ends soon."""
        ends = self.loaded.ends
        if self._warned != ends and (ending := ends_soon(ends)):
            self._warned = ends
            log.warning("%s %s: put a new certificate there, which is read without a restart", self.cert, ending)

    def _current(self) -> _Loaded:
        """Return the contexts for the next connection, after a look at the files. Where they have changed and cannot be
        used, as between two files of a renewal, the former ones are used further."""
        stamp = _stamp(self._folder)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self.loaded = _load_folder(self._folder)
            except AuthenticationError as error:
                log.warning("the files of tls have changed, and the former ones are used further: %s", error)
        self._warn()
        return self.loaded

    async def connect(self, sock: socket.socket) -> TlsSocket:
        """Begin TLS on `sock`, connected and non-blocking, which belongs to the result from here. Cancelling closes it.

        Raises:
            AuthenticationError, ProtocolError, VersionMismatch, ConnectionLost, OSError: as `TlsSocket.shake_hands`.
        """
        return await self._wrap(sock, accepting=False)

    async def accept(self, sock: socket.socket) -> TlsSocket:
        """Begin TLS on a socket that was accepted; otherwise as `connect`. A peer that does not begin with TLS gets a
        refusal without TLS.

        Raises:
            AuthenticationError, ProtocolError, OSError: as `TlsSocket.shake_hands`.
            ConnectionLost: the peer closed the connection.
        """
        with contextlib.ExitStack() as undo:
            undo.enter_context(sock)
            await readable(sock)
            first = sock.recv(1, socket.MSG_PEEK)
            if first and first != _HANDSHAKE:
                with contextlib.suppress(OSError):  # the error that is being raised is the reason for closing
                    sock.send(refusal(HandshakeStatus.TLS))
                raise ProtocolError(
                    f"the peer speaks no TLS, it began with {first!r}, and TLS is demanded here; if it is a process of "
                    "this cluster, set security (ZCACTOR_SECURITY) there as well"
                )
            undo.pop_all()
        return await self._wrap(sock, accepting=True)

    async def _wrap(self, sock: socket.socket, *, accepting: bool) -> TlsSocket:
        with contextlib.ExitStack() as undo:
            undo.enter_context(sock)
            loaded = self._current()
            context = loaded.server if accepting else loaded.client
            wrapped = context.wrap_socket(sock, server_side=accepting, do_handshake_on_connect=False)
            assert isinstance(wrapped, TlsSocket)
            wrapped.certificate = loaded.certificate
            undo.enter_context(wrapped)
            await wrapped.shake_hands()
            undo.pop_all()
        return wrapped


def load_tls(folder: Path) -> Tls:
    """Load ``ca.pem``, ``cert.pem`` and ``key.pem`` from `folder`.

    Raises:
        AuthenticationError: a file is missing, cannot be read or has no certificate or key; or the key belongs to
            another user, can be read by others, is encrypted or does not fit the certificate. The message names the
            file.
    """
    return Tls(folder)


def ends_soon(ends: datetime) -> str:
    """Say when a certificate ends, or has ended; empty where that is more than a week ahead."""
    left = ends - datetime.now(UTC)
    if left > SOON:
        return ""
    return f"{'ends' if left > timedelta() else 'has ended'} on {ends:%Y-%m-%d at %H:%M} UTC"


def _stamp(folder: Path) -> tuple[tuple[int, ...], ...]:
    """Return a value that changes when the files of a folder are replaced or written to."""
    return tuple(_stamp_of(folder / name) for name in _FILES)


def _stamp_of(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:  # loading says which file, and why
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _load_folder(folder: Path) -> _Loaded:
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.check_hostname = False
    server.num_tickets = 0  # sessions are not resumed, and the server sends nothing after the handshake by itself
    for context in (client, server):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.sslsocket_class = TlsSocket
    with contextlib.ExitStack() as undo:
        # Check and load the same open files, also when the names are given to other files meanwhile.
        ca, cert, key = (_open(folder, name, undo) for name in _FILES)
        check_private("the key", folder / "key.pem", os.fstat(key), "make another")
        with open(cert, "rb", closefd=False) as file:
            chain = file.read()
        copy = os.memfd_create("zcactor-cert", os.MFD_CLOEXEC)
        undo.callback(os.close, copy)
        os.write(copy, chain)
        for context in (client, server):
            _load(context, folder, ca, copy, key)
    certificate = _first(chain, folder)
    return _Loaded(client, server, certificate, _end_of(certificate, folder))


def _end_of(certificate: bytes, folder: Path) -> datetime:
    """Return the time at which a certificate in DER ends; the last one there is without the package ``cryptography``,
    and where that takes the certificate for malformed."""
    unknown = datetime.max.replace(tzinfo=UTC)
    try:
        from cryptography.x509 import InvalidVersion, load_der_x509_certificate
    except ImportError:
        return unknown
    try:
        return load_der_x509_certificate(certificate).not_valid_after_utc
    except (ValueError, InvalidVersion) as error:  # OpenSSL has accepted it
        log.warning("no warning will come before the certificate in %s ends, which cannot be read: %s", folder, error)
        return unknown


def _first(chain: bytes, folder: Path) -> bytes:
    """Return the first certificate, in DER, of a chain in PEM that OpenSSL has accepted."""
    found = _PEM.search(chain)
    if found is None or found[1] == b"TRUSTED ":  # a TRUSTED one has bytes that were not signed
        raise AuthenticationError(
            f"{folder}/cert.pem does not begin with a plain certificate (BEGIN CERTIFICATE); write it as one: openssl "
            "x509 -in cert.pem"
        )
    return base64.b64decode(found[2])


def _load(context: ssl.SSLContext, folder: Path, ca: int, cert: int, key: int) -> None:
    try:
        context.load_verify_locations(f"/proc/self/fd/{ca}")
    except ssl.SSLError as error:
        raise AuthenticationError(
            f"{folder}/ca.pem holds no certificates in PEM: {error.reason or error}; copy the CA's there"
        ) from error
    try:
        # With an empty password OpenSSL does not ask the terminal for one.
        context.load_cert_chain(f"/proc/self/fd/{cert}", f"/proc/self/fd/{key}", "")
    except ssl.SSLError as error:
        raise AuthenticationError(
            f"{folder}: cert.pem and key.pem are no certificate and its key, in PEM and not encrypted: "
            f"{error.reason or error}; make both anew, and have the CA sign the certificate"
        ) from error


def _open(folder: Path, name: str, undo: contextlib.ExitStack) -> int:
    try:
        fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise AuthenticationError(
            f"security is tls:{folder}, and {name} there cannot be read: {error.strerror}; the folder must hold "
            "ca.pem, cert.pem and key.pem"
        ) from error
    undo.callback(os.close, fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise AuthenticationError(f"security is tls:{folder}, and {name} there is no file; put one in PEM there")
    return fd
