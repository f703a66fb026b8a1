"""What a node's agent and zygote leave behind when both are killed: the program that the node belongs to ends it.

Agent and zygote adopt what actors start and leave behind (`zcactor.runtime.zygote`). With both gone only the program is
left, so it adopts as well (PR_SET_CHILD_SUBREAPER, prctl(2)). Then it adopts what it has started itself, too, so a
node's processes are told by a mark in their environment, or by the session of a worker that they belong to.
"""

from __future__ import annotations

import os
import signal
from typing import Final, NamedTuple

from zcactor.runtime.zygote import adopt_orphans, adopts_orphans, children_of_ours

__all__ = ["MARK", "LastResort"]

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
