"""The process of a program, before it is started."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from typing import TYPE_CHECKING, TextIO

from zcactor.assembly.process import Process
from zcactor.control.node_table import own_machine

if TYPE_CHECKING:
    from zcactor.config import Config
    from zcactor.objectstore.store import Store
    from zcactor.transport.base import Endpoint
    from zcactor.workers.run_directory import RunDirectory

__all__ = ["make_process"]


def make_process(
    config: Config, directory: RunDirectory, name: bytes, store: Store, endpoint: Endpoint, head: bytes
) -> Process:
    """Make the process of a program on the running loop. It is not reached yet, and reaches nobody.

    Args:
        config: the settings.
        directory: the run directory of its node or cluster.
        name: its process id.
        store: its store.
        endpoint: makes its connections.
        head: the process id of the head.
    """
    process = Process(name, "driver", config, asyncio.get_running_loop(), store, endpoint)
    process.sessions.head = head
    process.locations.machine = own_machine(config, directory.path)
    process.news.print_log = _print_log
    return process


def _print_log(stream: str, text: str) -> None:
    """Write an actor's output to the present ``sys.stdout`` or ``sys.stderr`` (a notebook's, a test's capture).

    A notebook shows output at the cell whose context printed it. Our context is that of the cell that called `init`, so
    the text is printed in an empty context, which stands for the cell that runs now.
    """
    contextvars.Context().run(_write, sys.stderr if stream == "stderr" else sys.stdout, text)


def _write(file: TextIO | None, text: str) -> None:
    if file is None:
        return
    try:
        file.write(text)
    except UnicodeEncodeError:  # a standard output that is not UTF-8
        encoding = getattr(file, "encoding", None) or "ascii"
        file.write(text.encode(encoding, "backslashreplace").decode(encoding))
    file.flush()
