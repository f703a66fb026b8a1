"""The start of nodes: the time from the command until a node is ready, and the time in which many form a cluster.

::

    python -m benchmarks.cluster              # 64 nodes on this machine, agents only
    python -m benchmarks.cluster --quick      # 8 of them

One node is started as a user starts it, by ``zcactor start``. Its floor is the start of an interpreter that imports
NumPy, with which the command begins. Many nodes are started by one program, one after another, by the function that the
command calls: 64 hosts have 64 times the processors of this one, so only the nodes' own work is measured. The time ends
when ``zcactor status`` has listed all of them. Memory is the proportional share (PSS) of an agent and of the process
that its workers are forked from, in which the pages that they share count once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Self

import psutil

from benchmarks.harness import Measurement, Scale, at_most, options_of, report, show
from zcactor.cluster.records import list_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["main"]

NODES: Final = 64
READY: Final = 0.5
"""Budget: seconds from the command to a node that is ready."""
FORMED: Final = 10.0
"""Budgets: seconds until so many nodes know of each other, and MiB of one node."""
AGENT_MIB: Final = 40.0
_MANY: Final = """
import sys
from zcactor.cluster.child import fork_agent
from zcactor.cluster.daemon import start_node
from zcactor.config import Config

head = None
for _ in range(int(sys.argv[1])):
    node = start_node(Config(), own_host=False, head=head, port=0, resources={}, stays=True, launch=fork_agent)
    node.control.close()
    head = head or node.record.address
"""
"""A program that starts a given number of nodes."""

FULL, QUICK = Scale(5, 1.0), Scale(2, 0.125)


class Made:
    """Nodes in folders of their own, as of a new user; they end with the block."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zcb-")
        self.base = Path(self._folder.name)
        run = self.base / "run"
        run.mkdir(mode=0o700)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ZCACTOR_")}
        self.environ = {
            **kept, "XDG_CONFIG_HOME": str(self.base / "config"), "XDG_STATE_HOME": str(self.base / "state"),
            "XDG_RUNTIME_DIR": str(run),
        }  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.zcactor("stop")
        self._folder.cleanup()

    def zcactor(self, *arguments: str) -> float:
        """Run the command line; the seconds until its first line."""
        before = time.perf_counter()
        command = [sys.executable, "-m", "zcactor", *arguments]
        with subprocess.Popen(command, env=self.environ, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            seconds = time.perf_counter() - before
            process.stdout.read()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, line)
        return seconds

    def start_many(self, count: int) -> None:
        """Start a head and so many members, less one."""
        subprocess.run([sys.executable, "-c", _MANY, str(count)], env=self.environ, check=True, capture_output=True)

    def head(self) -> str:
        """The address at which the head listens."""
        return list_nodes(Path(self.environ["XDG_RUNTIME_DIR"]))[0].head

    def seen(self) -> int:
        """The number of nodes that the head knows."""
        command = [sys.executable, "-m", "zcactor", "status", "--json"]
        done = subprocess.run(command, env=self.environ, check=True, capture_output=True, text=True)
        return len(json.loads(done.stdout)["nodes"])

    def pss(self) -> list[float]:
        """MiB of each node's agent, with the processes that it has forked."""
        found = []
        for record in list_nodes(Path(self.environ["XDG_RUNTIME_DIR"])):
            agent = psutil.Process(record.pid)
            shares = [process.memory_full_info().pss for process in (agent, *agent.children())]
            found.append(sum(shares) / (1 << 20))
        return found


def _interpreter(environ: Mapping[str, str]) -> float:
    before = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import numpy"], env=environ, check=True)
    return time.perf_counter() - before


def measure(scale: Scale) -> list[Measurement]:
    """Measure the start of nodes one by one, and then of many."""
    times: dict[str, list[float]] = {"floor": [], "head": [], "member": [], "MiB": []}
    for _ in range(scale.runs):
        with Made() as made:
            times["floor"].append(_interpreter(made.environ))
            times["head"].append(made.zcactor("start", "--head", "--port", "0"))
            times["member"].append(made.zcactor("start", "--address", made.head()))
            times["MiB"] += made.pss()
    floor = median(times["floor"])
    found = [
        Measurement("cluster", "zcactor start --head, until it is ready", median(times["head"]), "s", floor,
                    "an interpreter with NumPy", at_most(READY, "value")),
        Measurement("cluster", "zcactor start --address, until it is ready", median(times["member"]), "s", floor,
                    "an interpreter with NumPy", at_most(READY, "value")),
    ]  # fmt: skip
    count = scale.count(NODES, 2)
    with Made() as made:
        before = time.perf_counter()
        made.start_many(count)
        seen = made.seen()
        seconds = time.perf_counter() - before
        if seen != count:
            raise RuntimeError(f"{count} nodes were started, and the head knows of {seen}")
    limit = FORMED * count / NODES
    found.append(
        Measurement("cluster", f"{count} nodes on one machine", seconds, "s", None, "", at_most(limit, "value"))
    )
    found.append(
        Measurement("cluster", "memory of a node", median(times["MiB"]), "MiB", None, "", at_most(AGENT_MIB, "value"))
    )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and show.

    Returns:
        0; 1 with ``--strict`` when a budget does not hold.
    """
    options = options_of("benchmarks.cluster", "Starting nodes.").parse_args(arguments)
    found: list[Any] = measure(QUICK if options.quick else FULL)
    show("Starting nodes", found)
    return report(options, found)


if __name__ == "__main__":
    sys.exit(main())
