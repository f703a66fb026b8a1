"""Memfds and endpoints for the tests of local connections."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from tests.conformance.connection import ARENA_NBYTES, Side
from zcactor.transport.local.endpoint import LocalEndpoint

TOKEN = bytes(range(32))
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@contextlib.contextmanager
def memfd(nbytes: int = ARENA_NBYTES, seals: int = SEALS) -> Iterator[int]:
    """A memfd of `nbytes` with `seals`."""
    fd = os.memfd_create("test-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def local_side(directory: Path, token: bytes = TOKEN) -> Iterator[Side]:
    """An endpoint in `directory`, not started, with an arena of its own."""
    with memfd() as fd, mmap.mmap(fd, ARENA_NBYTES) as arena:
        process = secrets.token_bytes(16)
        with memoryview(arena) as view:
            yield Side(LocalEndpoint(directory, process, token, fd, ARENA_NBYTES), process, view)


def run_directory(parent: Path) -> Path:
    """Make a run directory with the mode that endpoints ask for."""
    directory = parent / "run"
    directory.mkdir(mode=0o700)
    return directory
