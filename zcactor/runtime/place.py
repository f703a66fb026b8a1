"""Where a process runs, as it tells its peers."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple, Self

__all__ = ["Place"]


class Place(NamedTuple):
    """The number of a process and the name of its host. It is given to `zcactor.runtime.process.Process`, which asks
    the system for neither."""

    pid: int
    host: str

    @classmethod
    def here(cls) -> Self:
        """The place of the running process, as the system knows it."""
        return cls(os.getpid(), socket.gethostname())
