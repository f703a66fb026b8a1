"""The standard descriptors 0, 1 and 2, which some supervisors and programs leave closed at the start of a process.

The next file that is opened would get such a number: libuv aborts when it is to close one of them, and a child that is
given standard streams would lose the file.
"""

from __future__ import annotations

import fcntl
import os
import sys

__all__ = ["open_standard"]


def open_standard() -> None:
    """Open /dev/null at each standard descriptor that is closed, and let ``sys.stdin`` and the others use it where they
    are None.

    Call it before anything else is opened. Descriptors that are open stay as they are, and so do the streams in
    ``sys``: where another file has got the number meanwhile, nothing is to be printed into it.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            fcntl.fcntl(fd, fcntl.F_GETFD)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets `fd`, as those below it are open by now
            os.set_inheritable(opened, True)
            if getattr(sys, name) is None:
                setattr(sys, name, open(opened, "w" if fd else "r", encoding="utf-8", closefd=False))  # noqa: SIM115  # it stays open
