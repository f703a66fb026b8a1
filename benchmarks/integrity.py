"""The cost of authenticating the bytes of arrays: the primitives in one core, and whole pulls between two processes.

::

    python -m benchmarks.integrity [--seconds 1.0]

The table belongs to ``docs/explanation/decisions/0021-integrity.md``. It needs ``cryptography`` (the ``cluster``
extra).
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import datetime
import hashlib
import hmac
import mmap
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.poly1305 import Poly1305
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.stream.record_layer import Integrity
from zcactor.transport.stream.tls import load_tls
from zcactor.transport.tcp.endpoint import TcpEndpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zcactor.transport.base import Connection

NBYTES: Final = 64 << 20
CHUNK: Final = 1 << 20
SIZES: Final = (("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("32 MiB", 32 << 20), ("64 MiB", 64 << 20))
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
    for _, nbytes in SIZES:
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < end:
            begin = time.perf_counter()
            await connection.pull(RemoteRegion(1, 0, nbytes), ctypes.addressof(into), into)
            times.append(time.perf_counter() - begin)
        found.append(median(times))
    connection.abort()
    return found


def measure_pulls(mode: str, folder: Path, seconds: float) -> list[float]:
    """Measure `pulls` from an owner in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.integrity", "--own", mode, str(folder)]
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
        found = {mode: measure_pulls(mode, Path(folder), seconds) for mode in MODES}
    lines += ["", "| pulled over loopback, ms | not sealed | `frames` | `arrays` | TLS |", "|---|---:|---:|---:|---:|"]
    for i, (name, _) in enumerate(SIZES):
        lines.append(f"| {name} | " + " | ".join(f"{found[mode][i] * 1e3:.2f}" for mode in MODES) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    parser.add_argument("--own", nargs=2, metavar=("MODE", "FOLDER"), help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.own is None:
        print(table(chosen.seconds))
    else:
        asyncio.run(own(chosen.own[0], Path(chosen.own[1])))


if __name__ == "__main__":
    main()
