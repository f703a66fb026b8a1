"""The last resort: end the processes that a node's agent and zygote leave behind when both are killed.

Agent and zygote adopt the processes that actors start and leave behind (`zcactor.workers.zygote`). When both are gone,
only the program remains to which the node belongs, so the program adopts as well (PR_SET_CHILD_SUBREAPER, prctl(2)).
Then it also adopts the orphans of processes that it has started itself. So a node's processes are recognised by a mark
in their environment, or by the session of a worker to which they belong.

A cluster's node belongs to no program. It has a keeper instead: a process between agent and zygote that only waits for
the zygote's end.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Final, NamedTuple

from zcactor.workers.zygote import adopt_orphans, adopts_orphans, children_of_ours, kill_orphans, set_name

if TYPE_CHECKING:
    import socket

__all__ = ["MARK", "LastResort", "keep_orphans"]

MARK: Final = "ZCACTOR_NODE"
"""The environment variable that marks a node's processes; the processes that they start inherit it."""
_ROUNDS: Final = 100
"""Generations: the children of a killed process become ours, and are next."""
_NAMED: Final = "zc "
"""The first characters in the names of zygotes and workers. A process that has ended keeps its name, but has no
environment."""


class _Child(NamedTuple):
    pid: int
    session: int
    name: str
    marked: bool


class LastResort:
    """The adopter of the processes that a node may leave behind, from its construction until `close`.

    Args:
        node: the node's id, with which its processes are marked.
    """

    def __init__(self, node: str) -> None:
        self._mark = f"{MARK}={node}".encode()
        self._before = adopts_orphans()
        adopt_orphans()

    def end(self) -> None:
        """Send SIGKILL to the node's processes that are our children, and to those that become our children by that.
        Reap them.

        Any thread may call it. It waits until each process is gone. Processes of another user are left alone.
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
                except (ProcessLookupError, ChildProcessError):  # another thread has reaped it
                    continue

    def _of_the_node(self, leaders: set[int]) -> list[int]:
        """The children of ours that belong to the node. Adds to `leaders` each child whose session may have other
        processes of the node."""
        children = [child for pid in children_of_ours() if (child := self._look(pid)) is not None]
        for child in children:
            if child.marked or child.name.startswith(_NAMED):
                leaders.add(child.pid)
        return [child.pid for child in children if child.pid in leaders or child.session in leaders]

    def _look(self, pid: int) -> _Child | None:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                head, _, tail = file.read().decode(errors="replace").rpartition(")")
        except OSError:  # the process is gone
            return None
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                marked = self._mark in file.read().split(b"\0")
        except OSError:  # the process has ended and waits to be reaped, or runs as another user
            marked = False
        return _Child(pid, int(tail.split()[3]), head.partition("(")[2], marked)

    def close(self) -> None:
        """Stop adopting, unless this process adopted before. Idempotent."""
        if not self._before:
            adopt_orphans(yes=False)


def keep_orphans(zygotes: socket.socket) -> None:
    """Become the keeper of a node: adopt the orphans of the zygote and, once the zygote has ended, end them.

    Returns only in a fork, which is to become the zygote. The calling process must have one thread.

    Args:
        zygotes: the zygote's socket. The keeper closes it, so that the agent notices the zygote's end by it.
    """
    adopt_orphans()
    set_name("zc keeper")
    pid = os.fork()
    if pid == 0:
        return
    try:
        zygotes.close()
        while os.waitpid(-1, 0)[0] != pid:  # other children are orphans that have ended
            continue
        kill_orphans()
    finally:
        os._exit(0)
