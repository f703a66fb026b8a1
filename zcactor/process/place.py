"""The place of a process, as its peers learn it."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple, Self

__all__ = ["Place"]


class Place(NamedTuple):
    """The process id and the host name of a process. `zcactor.assembly.process.Process` receives its place and asks the
    system for neither."""

    pid: int
    host: str

    @classmethod
    def here(cls) -> Self:
        """The place of this process, as the system knows it."""
        return cls(os.getpid(), socket.gethostname())
