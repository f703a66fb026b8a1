"""The place of a process, as it reports it."""

from __future__ import annotations

import os
import socket

from zcactor.process.place import Place


def test_here() -> None:
    assert Place.here() == (os.getpid(), socket.gethostname())
