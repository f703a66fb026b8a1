"""What a node's agent and zygote leave behind when both are killed, and who ends it.

Agent and zygote adopt what actors start and leave behind (`zcactor.runtime.zygote`). With both gone only the program is
left that the node belongs to, so it adopts as well (PR_SET_CHILD_SUBREAPER, prctl(2)). Then it adopts what it has
started itself, too, so a node's processes are told by a mark in their environment, or by the session of a worker that
they belong to.

A cluster's node belongs to no program. It has a keeper instead, a process between agent and zygote that does nothing
but wait for the zygote's end.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Final, NamedTuple

from zcactor.runtime.zygote import adopt_orphans, adopts_orphans, children_of_ours, kill_orphans, set_name

if TYPE_CHECKING:
    import socket

__all__ = ["MARK", "LastResort", "keep_orphans"]

MARK: Final = "ZCACTOR_NODE"
"""The variable that a node's processes have in their environment, and what they start inherits."""
_ROUNDS: Final = 100
"""Generations: the children of a killed process become ours, and are next."""
_NAMED: Final = "zc "
"""How the names of zygotes and workers begin. One that has ended has its name still, and no environment."""


class _Child(NamedTuple):
    pid: int
    session: int
    name: str
    marked: bool


class LastResort:
    """Adopts what a node may leave behind, from its making until `close`.

    Args:
        node: what the node's processes are marked with.
    """

    def __init__(self, node: str) -> None:
        self._mark = f"{MARK}={node}".encode()
        self._before = adopts_orphans()
        adopt_orphans()

    def end(self) -> None:
        """SIGKILL to all processes of the node that are ours by now, and to those that become ours by that. Reaps them.

        Any thread may call it; it waits for each to be gone. Those that run as another user are left alone.
        """
        refused: set[int] = set()
        leaders: set[int] = set()
        for _ in range(_ROUNDS):
            left = [pid for pid in self._of_the_node(leaders) if pid not in refused]
            if not left:
                return
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                except PermissionError:
                    refused.add(pid)
                except (ProcessLookupError, ChildProcessError):  # reaped by somebody else
                    continue

    def _of_the_node(self, leaders: set[int]) -> list[int]:
        """Children of ours that are the node's; adds to `leaders` those whose session may have others of it."""
        children = [child for pid in children_of_ours() if (child := self._look(pid)) is not None]
        for child in children:
            if child.marked or child.name.startswith(_NAMED):
                leaders.add(child.pid)
        return [child.pid for child in children if child.pid in leaders or child.session in leaders]

    def _look(self, pid: int) -> _Child | None:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                head, _, tail = file.read().decode(errors="replace").rpartition(")")
        except OSError:  # it is gone
            return None
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                marked = self._mark in file.read().split(b"\0")
        except OSError:  # it has ended and waits to be reaped, or runs as another user
            marked = False
        return _Child(pid, int(tail.split()[3]), head.partition("(")[2], marked)

    def close(self) -> None:
        """Adopt no more, unless this process did before. Idempotent."""
        if not self._before:
            adopt_orphans(yes=False)


def keep_orphans(zygotes: socket.socket) -> None:
    """Become the keeper of a node: adopt what the zygote leaves behind and, once that has ended, end it.

    Returns only in a fork, which is to become the zygote. Called in a process with one thread.

    Args:
        zygotes: the zygote's socket, which is closed in the keeper: the agent sees the zygote's end by it.
    """
    adopt_orphans()
    set_name("zc keeper")
    pid = os.fork()
    if pid == 0:
        return
    try:
        zygotes.close()
        while os.waitpid(-1, 0)[0] != pid:  # others are orphans that have ended
            continue
        kill_orphans()
    finally:
        os._exit(0)
