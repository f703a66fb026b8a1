"""Where a process says that it runs."""

from __future__ import annotations

import os
import socket

from zcactor.runtime.place import Place


def test_here() -> None:
    assert Place.here() == (os.getpid(), socket.gethostname())
