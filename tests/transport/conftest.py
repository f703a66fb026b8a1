"""Sockets and certificates that the tests of several transports share."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transport.certificates import Authority


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a socket pair, non-blocking."""
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        right.setblocking(False)
        yield left, right


@pytest.fixture(scope="session")
def authority() -> Authority:
    """The authority that has signed the certificates of `tls_folder`."""
    return Authority()


@pytest.fixture(scope="session")
def tls_folder(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The TLS folder of a host."""
    return authority.folder(tmp_path_factory.mktemp("tls") / "host")
