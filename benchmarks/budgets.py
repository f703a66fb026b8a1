"""The page of budgets, ``docs/budgets.md``: each budget, its measurement, and whether it holds.

::

    python -m benchmarks --markdown                    # everything, in at most 20 minutes; writes docs/budgets.md
    python -m benchmarks --markdown --out FILE         # the same, to another file
    python docs/pictures.py                            # then draw what the page for users shows
    python -m benchmarks.budgets shared echo           # the rows of two items, to the standard output

Each item is a program of its own that also runs by itself, and prints its figures as lines of JSON. An item that fails,
takes too long or cannot run here leaves rows that say so: the page always has the same rows. The figures are recorded
beside it, in ``docs/figures/budgets.jsonl``: a line with the machine and the command, and a line for each measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import machine
from benchmarks.graphs import CHAIN_LIMITS
from benchmarks.harness import Budget, Measurement, Unmeasured, at_least, at_most, exactly, quantity
from benchmarks.paired import built
from tests.hosts.netns import missing as no_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


__all__ = ["BASE", "ITEMS", "TABLES", "Item", "Outcome", "Row", "cells", "main", "page", "run_item", "write"]


# ---- rows

BASE: Final = "c211237"
"""The revision before the guarantees."""
ROOT: Final = Path(__file__).resolve().parents[1]


def _nothing() -> str | None:
    return None


def no_guest() -> str | None:
    """The reason why no virtual machine can run here; None where one can."""
    found = subprocess.run(
        [sys.executable, "tools/vm.py", "check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = (found.stderr + found.stdout).strip().splitlines()
    return None if found.returncode == 0 else lines[-1] if lines else "tools/vm.py check failed"


@dataclass(frozen=True, slots=True)
class Item:
    """A program whose figures are rows.

    Attributes:
        arguments: of the interpreter. The program takes ``--json FILE``.
        limit: seconds that it may take.
        missing: returns what the machine lacks for it, in words.
        needs_base: whether it takes ``--built FOLDER``, the package of the base.
    """

    arguments: tuple[str, ...]
    limit: float
    missing: Callable[[], str | None] = _nothing
    needs_base: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A budget, and the measurement of an item that shows whether it holds."""

    item: str
    what: str
    measurement: str
    budget: Budget
    unit: str = ""
    """The unit of a budget for the value itself."""

    def limit(self, unit: str) -> str:
        """The budget as text; `unit` is the measurement's, empty without a measurement."""
        budget, unit = self.budget, unit or self.unit
        return f"{budget.compare} {budget.limit:g}x" if budget.of == "ratio" else (
            f"{budget.compare} {quantity(budget.limit, unit)}"
        )  # fmt: skip


def _one(name: str, limit: float = 60.0) -> Item:
    return Item(("-m", "benchmarks.guarantees", name, "--quick"), limit)


def _of(name: str) -> Item:
    """An item of ``python -m benchmarks``."""
    return Item(("-m", "benchmarks", name, "--quick"), 60)


_WAYS: Final = {"local": "local", "tcp": "TCP", "sealed": "sealed TCP"}
_KINDS: Final = ("sync call", "async call", "inline call", "call, 1,000 in flight")
_ON: Final = ("", " on one core")
"""The places of two ranks: a core for each, and one for both."""
_PAIRED: Final = ("-m", "benchmarks.paired", "--base", BASE)

ITEMS: Final[dict[str, Item]] = {
    "calls": Item(
        (*_PAIRED, "--rounds", "64", "--over", "local", "--over", "tcp", "--over", "sealed", "sync", "async", "inline",
         "pipelined"),
        240, needs_base=True,
    ),
    "echo": Item(("-m", "benchmarks", "latency", "pipeline", "--quick"), 60),
    "chain": _of("chain"),
    "graph": _of("graph"),
    "hosts": Item(("-m", "benchmarks.hosts", "pulls", "--quick"), 240, no_hosts),
    "objects": _one("objects"),
    "sockets": _one("sockets"),
    "adoption": _one("adoption"),
    "passed-on": _one("passed-on"),
    "table": _one("table"),
    "shared": _one("shared"),
    "shared-beside-base": Item((*_PAIRED, "--rounds", "2", "shared-1000"), 120, needs_base=True),
    "all-to-all": _one("all-to-all"),
    "fake-calls": Item(("-m", "benchmarks.guarantees", "fake-calls", "--quick"), 60, needs_base=True),
    "ending": _one("ending"),
    "registering": _one("registering"),
    "idle": _one("idle"),
    "stale": _one("stale"),
    "switching": Item(("-m", "benchmarks.guarantees", "switching"), 90),
    "keeping": _one("keeping"),
    "scale": Item(("-m", "benchmarks", "scale"), 120),
    "arrays": _of("arrays"),
    "topology": Item(("-m", "benchmarks", "topology", "--quick"), 120),
    "shuffle": Item(("-m", "benchmarks", "shuffle", "--runs", "3"), 200),
    "numpy": _of("numpy"),
    "startup": _of("startup"),
    "memory": _of("memory"),
    "collective": _of("collective"),
    "death": _of("death"),
    "leaks": _of("leaks"),
    "broadcast": Item(("-m", "benchmarks.hosts", "broadcast", "--quick"), 120, no_hosts),
    "group-hosts": Item(("-m", "benchmarks.hosts", "group", "--quick"), 180, no_hosts),
    "cluster": Item(("-m", "benchmarks.cluster"), 60),
    "engines": Item(("-m", "benchmarks.engines", "--quick"), 300),
    "thesis": Item(("-m", "benchmarks.thesis", "local", "tcp", "--quick"), 120),
    "thesis-hosts": Item(("-m", "benchmarks.thesis", "veth", "--quick"), 120, no_hosts),
    "thesis-guest": Item(("-m", "benchmarks.thesis", "rxe", "--quick"), 610, no_guest),
    "rdma": Item(
        ("tools/vm.py", "run", "--timeout", "600", "--", sys.executable, "-m", "benchmarks.rdma", "pulls", "calls",
         "--quick"),
        610, no_guest,
    ),
    "graph-guest": Item(
        ("tools/vm.py", "run", "--timeout", "600", "--", sys.executable, "-m", "benchmarks.rdma", "graph", "--quick"),
        610, no_guest,
    ),
    "guest": Item(
        ("tools/vm.py", "run", "--counting", "--timeout", "600", "--", sys.executable, "-m", "benchmarks.rdma", "guest",
         "--quick"),
        610, no_guest, needs_base=True,
    ),
}  # fmt: skip
"""The items by name, in the order they run."""

_ECHOED: Final = (("sync", 3.0), ("async", 2.0), ("inline", 2.0))
_SHARED: Final = "1,000 shared actors with a plain call each"
_IDLE: Final = "1,000 TCP peers that pulled once, a minute later"
_SWITCHING: Final = "array results for 60 s with a switch interval of 1 us"
_BUSY: Final = "48 actors that all call all beside 8 busy processes"

GUARANTEES: Final[tuple[Row, ...]] = (
    *(
        Row("calls", f"{kind}, {name}, next to the base", f"{kind}, {way}", at_most(1.03))
        for way, name in _WAYS.items()
        for kind in _KINDS
    ),
    *(
        Row("echo", f"{kind} method next to an echo over a unix socket", f"{kind} method, one core", at_most(limit))
        for kind, limit in _ECHOED
    ),
    *(
        Row("echo", f"{kind} method, 1,000 in flight, next to echoes", f"{kind} method, 1,000 in flight",
            at_least(0.35))
        for kind, _ in _ECHOED
    ),
    *(
        Row("hosts", f"{how}{kind} call between two namespaces next to an echo",
            f"{how}{kind} call, each host on a core", at_most(limit))
        for how, limit in (("", 1.6), ("sealed ", 2.0))
        for kind, _ in _ECHOED
    ),
    *(
        Row("hosts", f"pull of {mib} MiB, frames sealed, next to sendfile to recv", f"pull of {mib} MiB, frames sealed",
            at_least(0.9))
        for mib in (64, 256)
    ),
    *(
        Row("hosts", f"pull of {mib} MiB, arrays authenticated, next to frames alone",
            f"pull of {mib} MiB, authenticated, next to frames alone", at_least(0.5))
        for mib in (64, 256)
    ),
    *(
        Row("hosts", f"pull of {mib} MiB, arrays authenticated, next to TLS",
            f"pull of {mib} MiB, authenticated, next to TLS", at_least(2.0))
        for mib in (64, 256)
    ),
    Row("hosts", "pull of 64 MiB over 4 Gbit/s, arrays authenticated, next to frames alone",
        "pull of 64 MiB over 4 Gbit/s, authenticated", at_least(0.97)),
    *(
        Row("objects", f"{size} object as argument over sealed TCP, next to `sealing=\"off\"`",
            f"{size} object as argument, sealed TCP", at_most(1.3))
        for size in ("20 KiB", "100 KiB", "1 MiB")
    ),
    Row("guest", "sync call by RDMA in a guest, sealed next to not sealed", "sync call in a guest, sealed",
        at_most(1.3)),
    *(
        Row("sockets", f"opening a data socket{how}: computing at both ends, its handshake and its keys",
            f"opening a data socket{how}, computing of both ends", at_most(0.2, "value"), "ms")
        for how in ("", ", sealed")
    ),
    Row("adoption", "bytes copied when a mapped 256 MiB array is adopted, next to its bytes",
        "first call with 256 MiB whose maker has ended: copied", at_most(1.0)),
    Row("passed-on", "bytes copied by a holder that pulled the array",
        "256 MiB that was pulled and whose maker has ended: copied", exactly(0), "B"),
    Row("adoption", "first call with an adopted array of 256 MiB, next to a memcpy into touched memory",
        "first call with 256 MiB whose maker has ended", at_most(1.3)),
    Row("adoption", "the same with a store that is still empty, whose pages the system has to give first",
        "first call with 256 MiB whose maker has ended, store still empty", at_most(1.3)),
    Row("table", "Arrow table of 36 MB: bytes copied, next to its own", "Arrow table of 36 MB: copied", at_most(1.05)),
    Row("table", "Arrow table of 36 MB as argument, next to a memcpy of it", "Arrow table of 36 MB", at_most(1.5)),
    Row("shared", f"{_SHARED}: threads of a process", f"{_SHARED}: threads of a process", at_most(64, "value")),
    Row("shared", f"{_SHARED}: all spawns and calls", _SHARED, at_most(1.0, "value"), "s"),
    Row("shared-beside-base", f"{_SHARED}: each, its end included, next to the base",
        "spawn, plain call and end of a shared actor, 1,000 at once, local", at_most(0.5)),
    Row("all-to-all", f"{_BUSY}: calls that nobody answered", f"{_BUSY}: unanswered", exactly(0)),
    Row("all-to-all", f"{_BUSY}: connections of an actor (47, node and driver)", f"{_BUSY}: connections, most",
        at_most(49, "value")),
)  # fmt: skip

SECOND: Final[tuple[Row, ...]] = (
    Row("fake-calls", "async call over the fake device, next to the base", "async call over the fake device",
        at_most(1.03)),
    Row("fake-calls", "call over the fake device, 1,000 in flight, next to the base",
        "call over the fake device, 1,000 in flight", at_most(1.03)),
    Row("guest", "sync call by RDMA in a guest, next to the base", "sync call in a guest", at_most(1.03)),
    Row("guest", "call by RDMA in a guest, 1,000 in flight, next to the base", "call in a guest, 1,000 in flight",
        at_most(1.03)),
    Row("guest", "pull of a 16 MiB argument in a guest, next to the base", "16 MiB array as argument in a guest",
        at_most(1.03)),
    Row("ending", "244 connections that end at once, fake device: blocked loop", "244 connections that end at once",
        at_most(50, "value"), "ms"),
    Row("registering", "registered after 2,000 arrays of 65 to 300 MiB, fake device, next to arena and slots",
        "registered after 2,000 arrays of 65 to 300 MiB", at_most(1.1)),
    Row("idle", f"{_IDLE} (all idle times 20 times shorter): threads", f"{_IDLE}: threads", exactly(0)),
    Row("idle", f"{_IDLE} (all idle times 20 times shorter): data sockets", f"{_IDLE}: data sockets of both ends",
        exactly(0)),
    Row("stale", "pull of 64 MiB while the peer repeats stale READs, fake device, next to its time alone",
        "pull of 64 MiB beside stale READs", at_most(3.0)),
    Row("switching", f"{_SWITCHING}: connections lost", f"{_SWITCHING}: connections lost and calls failed",
        exactly(0)),
    Row("switching", f"{_SWITCHING}: wrong arrays", f"{_SWITCHING}: wrong arrays", exactly(0)),
    Row("keeping", "8 results of 100 MiB held and dropped over TCP, store of 1 GiB: used one turn later, next to"
        " `store_keep_nbytes`", "8 results of 100 MiB held and dropped over TCP: used", at_most(128, "value"), "MiB"),
)  # fmt: skip

_BLOCKED: Final = "80 other calls beside 80 methods that block for 6 s"
_CALLED: Final = "process that has called 8 others, 6 s later with idle_timeout=1"

SCALE: Final[tuple[Row, ...]] = (
    Row("scale", "10,000 shared actors: all spawns and a plain call each",
        "10,000 shared actors, spawned and called once", at_most(10.0, "value"), "s"),
    Row("scale", _BLOCKED, _BLOCKED, at_most(4.5, "value"), "s"),
    Row("scale", f"{_BLOCKED}: threads of a process", f"{_BLOCKED}: threads of a process", at_most(64, "value")),
    Row("scale", f"{_CALLED}: descriptors beyond those before", f"{_CALLED}: descriptors beyond those before",
        at_most(2, "value")),
    Row("scale", f"{_CALLED}: calls that fail then", f"{_CALLED}: calls that fail then", at_most(0, "value")),
    Row("scale", "head of 2 nodes, 16 actors of the other one that hold and look up each other: descriptors",
        "head, 16 actors of another node that hold and look up each other: descriptors", at_most(38, "value")),
    Row("scale", "head's time for the end of a process with 64 actors: of 64,000 next to of 640",
        "head, 64 of 64,000 actors end with their process", at_most(1.5)),
)  # fmt: skip

_IDLED: Final = (("sync", 2.15), ("async", 1.55), ("inline", 1.29))
_GIB: Final = 1 << 30

ON_ONE_HOST: Final[tuple[Row, ...]] = (
    *(
        Row("echo", f"{kind} method after 0.2 s of idling, next to an echo that idled",
            f"{kind} method after 0.2 s of idling, one core", at_most(limit))
        for kind, limit in _IDLED
    ),
    *(
        Row("chain", f"3 chained calls of {name} on one core, next to the same awaited",
            f"3 chained calls, {name}, one core", at_most(limit))
        for name, limit in CHAIN_LIMITS.items()
    ),
    Row("graph", "hop from actor to actor in a graph, int, one core, next to half a round trip", "hop, int, one core",
        at_most(1.5)),
    Row("graph", "processors that an idle graph takes", "idle graph, processors", at_most(0.01, "value")),
    Row("graph", "64 MiB to 8 actors in a graph, one core, next to 8 calls", "fan-out of 64 MiB to 8, one core",
        at_most(1.0)),
    Row("graph", "64 MiB to 8 actors in a graph: bytes copied", "fan-out, copied by zcactor", at_most(0, "value"), "B"),
    Row("arrays", "1 GiB born in the store as argument, next to a small sync call", "1 GiB born in the store",
        at_most(1.3)),
    Row("arrays", "1 GiB that NumPy allocated as argument, next to a small sync call", "1 GiB that NumPy allocated",
        at_most(1.3)),
    Row("arrays", "1 GiB from malloc as argument, next to a memcpy", "1 GiB from malloc", at_most(1.15)),
    Row("arrays", "born in the store, all sizes: bytes copied", "born in the store, all sizes: copied", exactly(0),
        "B"),
    *(
        Row("arrays", f"{size} from malloc: bytes copied by each pass", f"{size} from malloc: copied by each pass",
            exactly(nbytes), "B")
        for size, nbytes in (("64 MiB", _GIB >> 4), ("1 GiB", _GIB))
    ),
    *(
        Row("arrays", f"{size} as a result: bytes copied", f"{size} as a result, born in the store: copied",
            exactly(0), "B")
        for size in ("1 MiB", "64 MiB", "1 GiB")
    ),
    Row("startup", "import zcactor", "import zcactor", at_most(150, "value"), "ms"),
    Row("startup", "zc.init()", "zc.init()", at_most(300, "value"), "ms"),
    Row("startup", "first spawn", "first spawn", at_most(60, "value"), "ms"),
    Row("startup", "20th spawn", "20th spawn", at_most(60, "value"), "ms"),
    Row("startup", "20 spawns at once", "20 spawns at once", at_most(600, "value"), "ms"),
    Row("memory", "idle actor, alone", "idle actor, alone", at_most(30, "value"), "MB"),
    Row("memory", "idle actor, one of 20", "idle actor, one of 20", at_most(30, "value"), "MB"),
    Row("memory", "idle shared actor, one of 1,000", "idle shared actor, one of 1,000", at_most(30, "value"), "KB"),
    *(
        Row("collective", f"allreduce of {size} over 2 ranks{on}, next to an inline call",
            f"allreduce, {size}, 2 ranks{on}", at_most(limit))
        for on in _ON
        for size, limit in (("1 KiB", 2.0), ("16 KiB", 2.0), ("1 MiB", 4.0))
        if not (on and size == "1 MiB")
    ),
    *(
        Row("collective", f"{what} of {size}{on}, next to an inline call with it", f"{what}, {size}, 2 ranks{on}",
            at_most(1.3))
        for on in _ON
        for what in ("allgather by reference", "broadcast")
        for size in ("1 KiB", "64 MiB")
    ),
    Row("collective", "allreduce of 64 MiB, next to the sum alone", "allreduce, 64 MiB, 2 ranks", at_most(1.25)),
    Row("collective", "the same in place, next to it and a memcpy", "allreduce in place, 64 MiB", at_most(1.25)),
    Row("collective", "SIGKILL to GroupBroken", "SIGKILL to GroupBroken", at_most(20, "value"), "ms"),
    Row("death", "SIGKILL to ActorDied", "SIGKILL to ActorDied", at_most(20, "value"), "ms"),
    *(
        Row("leaks", f"{what} after 3 rounds of actors and references, next to before",
            f"{what} after each of 3 rounds, most", at_most(1.0))
        for what in ("descriptors", "threads", "processes")
    ),
    Row("leaks", "bytes in the store after 3 rounds of actors and references",
        "bytes in the store after each of 3 rounds, most", at_most(0, "value"), "B"),
)  # fmt: skip

NUMPY: Final[tuple[Row, ...]] = (
    *(
        Row("numpy", f"{operation}, {size}, next to NumPy's allocator", f"{operation}, {size}", at_most(1.03))
        for size in ("64 KiB", "1 MiB", "4 MiB", "16 MiB", "64 MiB", "256 MiB")
        for operation in ("x + y", "x.copy()", "np.concatenate", "np.sort")
        if operation != "np.sort" or size not in ("64 MiB", "256 MiB")
    ),
    Row("numpy", "allocate and free 128 KiB", "allocate and free 128 KiB", at_most(1, "value"), "us"),
)

BETWEEN_HOSTS: Final[tuple[Row, ...]] = (
    *(
        Row("hosts", f"pull of {mib} MiB between two namespaces: bytes copied", f"bytes copied for {mib} MiB",
            exactly(0))
        for mib in (64, 256)
    ),
    *(
        Row("broadcast", f"{what}: leaves the owner", f"{what}: leaves the owner", at_most(2, "value"), "arrays")
        for what in ("256 MiB to 8 hosts", "64 MiB to 8 hosts, 1gbit each")
    ),
    Row("broadcast", "256 MiB and 64 MiB to 8 hosts: bytes copied", "bytes copied", exactly(0)),
    *(
        Row("group-hosts", f"reduce_scatter of {mib} MiB over 4 namespaces next to sendfile to recv",
            f"reduce_scatter of {mib} MiB over 4 hosts", at_least(0.85))
        for mib in (16, 64)
    ),
    *(
        Row("group-hosts", f"reduce_scatter of {mib} MiB over 4 namespaces: bytes copied",
            f"bytes copied for {mib} MiB", exactly(0), "B")
        for mib in (16, 64)
    ),
    *(
        Row("cluster", f"zcactor start {option}, until it is ready", f"zcactor start {option}, until it is ready",
            at_most(0.5, "value"), "s")
        for option in ("--head", "--address")
    ),
    Row("cluster", "64 nodes on one machine", "64 nodes on one machine", at_most(10, "value"), "s"),
    Row("cluster", "memory of a node", "memory of a node", at_most(40, "value"), "MiB"),
)  # fmt: skip

_LOGS: Final = (("in a file", "SQLite"), ("in etcd", "etcd"))

ENGINES: Final[tuple[Row, ...]] = (
    Row("engines", "zcactor start --head, until it is ready, next to an interpreter with NumPy",
        "zcactor start --head, until it is ready", at_most(2.5)),
    Row("engines", "zcactor run -- true, without a launcher, next to zcactor start --head", "zcactor run -- true",
        at_most(2.5)),
    Row("engines", "a run of 4 ranks under mpirun, from the last rank's process until the program runs",
        "a run of 4 ranks under mpirun, until the program runs", at_most(2, "value"), "s"),
    Row("engines", "a run on 8 virtual nodes of Slurm, from the last rank's process until the program runs",
        "a run on 8 nodes of Slurm, until the program runs", at_most(2, "value"), "s"),
    Row("engines", "SIGTERM to a run of 4 ranks, until its actors are closed and no process is left",
        "SIGTERM to a run of 4 ranks, until no process is left", at_most(5, "value"), "s"),
    Row("engines", "scancel of a run on 8 virtual nodes of Slurm, until its actors are closed and no process is left",
        "scancel of a run on 8 nodes of Slurm, until no process is left", at_most(5, "value"), "s"),
    Row("engines", "a node of a run is killed, until it is lost", "a node of a run is killed, until it is lost",
        at_most(7, "value"), "s"),
    Row("engines", "slurmd, step and tasks of a node are killed, until an actor is elsewhere and another one dead",
        "a node of Slurm is killed, until its actors are elsewhere or dead", at_most(7, "value"), "s"),
    *(
        Row("engines", f"call with {what} between nodes {where}, next to nodes started one by one",
            f"call with {what} to another node {where}", at_most(1.1))
        for where in ("of a run", "placed by Ray", "with the head's log in etcd")
        for what in ("an int", "an array of 64 MiB")
    ),
    Row("engines", "memory of a head with 8 nodes", "memory of a head with 8 nodes", at_most(40, "value"), "MiB"),
    Row("engines", "a head with its log in a file is killed and started again, next to its first start",
        "a head that was killed, until it leads again", at_most(1.5)),
    Row("engines", "a head with its log in etcd and a standby is killed, until the control plane is back",
        "a head with a standby is killed, until the control plane is back", at_most(4, "value"), "s"),
    Row("engines", "a head with its log in etcd and a standby is killed: failed calls",
        "a head with a standby is killed: failed calls", exactly(0)),
    Row("engines", "a head with its log in etcd and a standby is killed: longest call, next to the longest before",
        "a head with a standby is killed: longest call between actors", at_most(5)),
    Row("engines", "such a head is stopped for 20 s, until the control plane is back",
        "a head with a standby is stopped, until the control plane is back", at_most(12, "value"), "s"),
    Row("engines", "such a head goes on after 20 s: actors that it still makes",
        "a head that was stopped goes on: actors that it still makes", exactly(0)),
    *(
        Row("engines", f"a spawn with a log {where}, next to one without and 3 bare commits of {store}",
            f"a spawn with a log {where}", at_most(1.0))
        for where, store in _LOGS
    ),
    *(
        Row("engines", f"spawns at once with a log {where}, next to those without",
            f"spawns at once with a log {where}", at_most(1.3))
        for where, _ in _LOGS
    ),
    Row("engines", "drain of a node with 50 idle actors that may restart, next to spawning them",
        "drain of a node with 50 idle actors", at_most(2)),
    Row("engines", "drain of a node with 50 idle actors that may restart: failed calls",
        "drain of a node with 50 idle actors: failed calls", exactly(0)),
)  # fmt: skip

_READ: Final = (256, 1), (5124, 6)
"""KiB of an array, and READs for it."""

IN_A_GUEST: Final[tuple[Row, ...]] = (
    *(
        Row("rdma", f"pull of {mib} MiB in a guest, next to bare READs", f"pull of {mib} MiB ({mib} READs)",
            at_least(0.9))
        for mib in (1, 4, 16)
    ),
    *(
        Row("rdma", f"{kind} call with an int in a guest, next to a bare ping-pong", f"{kind} call with an int",
            at_most(2.5))
        for kind in ("sync", "async", "inline")
    ),
    Row("graph-guest", "graph edge of 1 MiB in a guest: frames of a run, next to those with ints",
        "graph edge of 1 MiB: frames of a run", at_most(1.2)),
    *(
        Row("graph-guest", f"graph edge of 1 MiB in a guest: {what}", f"graph edge of 1 MiB: {what}", exactly(0), unit)
        for what, unit in (("memory regions registered", ""), ("bytes copied", "B"))
    ),
    *(
        Row("rdma", f"array of {kib} KiB in a guest: {what}", f"array of {kib} KiB: {measurement}", budget)
        for kib, reads in _READ
        for what, measurement, budget in (
            ("bytes copied", "bytes copied", exactly(0)),
            ("READs of each", "READs of each (pieces of 1024 KiB)", exactly(reads)),
            ("frames of each call", "frames of each call", exactly(2)),
            ("share into used destinations", "share into used destinations", at_least(0.9, "value")),
            ("memory regions registered", "memory regions registered", exactly(0)),
        )
    ),
)  # fmt: skip

_WAY: Final = "zero copy", "private buffers", "encode"
_TRANSFERS: Final = "1 MiB", "16 MiB", "64 MiB", "Inception step"
_MEDIA: Final = (
    ("thesis", "local", "on one host", _TRANSFERS),
    ("thesis", "tcp", "over the loopback device", _TRANSFERS),
    ("thesis-hosts", "veth", "between two namespaces", _TRANSFERS),
    ("thesis-guest", "rxe", "by RDMA in a guest", ("1 MiB", "4 MiB")),
)
"""The item, the medium, its name, and what is transferred."""

THREE_WAYS: Final[tuple[Row, ...]] = tuple(
    Row(item, what, measurement, budget)
    for item, medium, name, transfers in _MEDIA
    for what, measurement, budget in (
        *(
            (f"{transfer} {name}: {way} next to {slower}", f"{medium}, {transfer}, {way}", at_most(1.0))
            for transfer in transfers
            for way, slower in pairwise(_WAY)
        ),
        *(
            (f"copies of each byte in memory, {name}: {way}", f"{medium}, {way}: copies of each byte", budget)
            for way, budget in zip(_WAY, (exactly(0), exactly(2), at_least(3.9, "value")), strict=True)
        ),
    )
)

SHUFFLES: Final[tuple[Row, ...]] = tuple(
    Row("shuffle", f"shuffle of {size} between two actors: {what}", f"{size}, {measurement}", budget, unit)
    for size in ("1,024 MiB", "4,096 MiB")
    for what, measurement, budget, unit in (
        ("exchange, next to a memcpy of the bytes", "exchange", at_most(1.3), ""),
        ("bytes copied", "copied by zcactor", at_most(0, "value"), "B"),
        ("memory at the peak, in times the bytes", "peak memory", at_most(2.2, "value"), "N"),
    )
)

TOPOLOGIES: Final[tuple[Row, ...]] = (
    *(
        Row("topology", f"an order of 1,024 hosts in a {network}", f"order of 1,024 hosts, {network}",
            at_most(1.0, "value"), "s")
        for network in ("torus of 32 x 32", "mesh of 32 x 32", "fat tree of radix 16 with 3 levels",
                        "dragonfly of 32 groups of 8 routers")
    ),
    *(
        Row("topology", f"a ring in the order found, {network}, next to the best of random orders",
            f"ring in the best order, {network}", at_most(1.1))
        for network in ("torus of 8 x 8", "fat tree of radix 8 with 3 levels and blocking 2",
                        "dragonfly of 8 groups of 4 routers")
    ),
    *(
        Row("topology", f"prediction of {plan} among {hosts}, {network}: apart from SimGrid",
            f"{plan} among {hosts}, {network}: apart from SimGrid", at_most(15.0, "value"), "%")
        for hosts, network, plans in (
            ("16 hosts", "torus of 4 x 4", ("ring", "halving", "direct")),
            ("16 hosts", "fat tree of radix 4 with 3 levels", ("ring", "halving", "direct")),
            ("64 hosts", "torus of 8 x 8", ("ring", "halving")),
            ("64 hosts", "dragonfly of 8 groups of 4 routers", ("ring", "halving")),
        )
        for plan in plans
    ),
)  # fmt: skip

TABLES: Final = (
    ("Guarantees", GUARANTEES),
    ("Calls, arrays and actors on one host", ON_ONE_HOST),
    ("NumPy in the store", NUMPY),
    ("Shuffles", SHUFFLES),
    ("Topologies", TOPOLOGIES),
    ("Hosts, broadcasts and clusters", BETWEEN_HOSTS),
    ("Launchers, and heads that may die", ENGINES),
    ("RDMA in a guest", IN_A_GUEST),
    ("Three ways of an array to another process", THREE_WAYS),
    ("RDMA and the memory of the store", SECOND),
    ("Many actors and idle connections", SCALE),
)
"""The titles and rows of the tables."""


# ---- the page

PAGE: Final = ROOT / "docs" / "budgets.md"
RECORD: Final = ROOT / "docs" / "figures" / "budgets.jsonl"
SECONDS: Final = 20 * 60.0
"""Seconds of all items together."""
LEAST: Final = 5.0
"""The least remaining seconds with which an item is begun."""
_COLUMNS: Final = ("What", "Budget", "Measured", "Spread", "", "Command")


class Outcome:
    """The result of an item, and the reason where it is incomplete.

    Args:
        found: its measurements.
        problem: why the others are missing; empty where nothing went wrong.
        failed: whether that is an error, and not a lack of the machine.
        absent: the measures for which this machine lacks something.
    """

    def __init__(
        self, found: Iterable[Measurement] = (), problem: str = "", *, failed: bool = False,
        absent: Iterable[Unmeasured] = (),
    ) -> None:  # fmt: skip
        self.found = {measurement.name: measurement for measurement in found}
        self.absent = {each.name: each.reason for each in absent}
        self.problem = problem
        self.failed = failed


def cells(row: Row, outcome: Outcome) -> tuple[str, ...]:
    """The cells of one line of a table."""
    command = f"`python -m benchmarks.budgets {row.item}`"
    measured = outcome.found.get(row.measurement)
    if row.measurement in outcome.absent:
        return row.what, row.limit(""), _plain(outcome.absent[row.measurement]), "", "not measured", command
    if measured is None:
        reason = outcome.problem or "the program has not measured it"
        verdict = "**error**" if outcome.failed or not outcome.problem else "not measured"
        return row.what, row.limit(""), _plain(reason), "", verdict, command
    budget, unit = row.budget, measured.unit
    figure = measured.ratio if budget.of == "ratio" else measured.value
    if figure is None:
        return row.what, row.limit(unit), "nothing to compare with was measured", "", "**error**", command
    text = quantity(measured.value, unit)
    if measured.floor is not None:
        beside = f"{quantity(measured.floor, unit)} ({measured.floor_name})"
        text = f"{figure:.2f}x: {text}, {beside}" if budget.of == "ratio" else f"{text}, {beside}"
    if measured.runs > 1:
        text += f"; {measured.statistic} of {measured.runs}"
    spread = ""
    if measured.spread is not None:
        least, most = measured.spread
        spread = f"{quantity(least, unit)} to {quantity(most, unit)}"
    return row.what, row.limit(unit), text, spread, "holds" if budget.holds(figure) else "**missed**", command


def _plain(text: str) -> str:
    """`text` without characters that would end a cell."""
    return " ".join(text.replace("|", "/").split())


def page(outcomes: Mapping[str, Outcome], about: Sequence[str]) -> str:
    """The text of the whole page."""
    lines = [
        "# Budgets",
        "",
        "What must hold, what was measured, and whether it holds. `python -m benchmarks --markdown` writes this",
        "page; a row's command measures that row and its neighbours alone. Counts and rounds are small, so that all",
        f"of it takes at most {SECONDS / 60:.0f} minutes. A figure of several rounds is their median, or their least",
        "where the row says so; the spread is from the least to the most. A ratio is to what stands beside the figure,",
        f"measured in the same run, in turns; *the base* is revision {BASE}, built for the purpose. What needs network",
        "namespaces runs where the program is root, what needs an RDMA device in a virtual machine, whose times mean",
        "nothing and whose ratios do.",
        "",
        *about,
    ]
    for title, rows in TABLES:
        lines += ["", f"## {title}", "", f"| {' | '.join(_COLUMNS)} |", "|---|---:|---|---:|---|---|"]
        lines += [f"| {' | '.join(cells(row, outcomes.get(row.item, Outcome())))} |" for row in rows]
    verdicts = [cells(row, outcomes.get(row.item, Outcome()))[4] for _, rows in TABLES for row in rows]
    held, missed = verdicts.count("holds"), verdicts.count("**missed**")
    errors, absent = verdicts.count("**error**"), verdicts.count("not measured")
    lines += ["", f"{held} rows hold, {missed} are missed, {errors} are errors, {absent} are not measured.", ""]
    return "\n".join(lines)


def about(found: Mapping[str, Any], seconds: float) -> list[str]:
    """The place, time, revision and load of the measurement, as lines.

    Args:
        found: of `machine.describe`, before the measurement began.
        seconds: of all of it.
    """
    return [
        f"- Machine: {found['cpu']}, {found['cores']} cores, {found['memory'] / 2**30:.1f} GiB, "
        f"Linux {found['kernel']}, Python {found['python']}",
        f"- Load before it began, of 1, 5 and 15 minutes: {', '.join(map(str, found['load']))}",
        f"- Commit: {found['commit']}",
        f"- Date: {found['date']}, {seconds:.0f} s in all",
    ]


def run_item(item: Item, limit: float, base: Path | None = None) -> Outcome:
    """Run the program of an item in a process of its own.

    Args:
        item: the item.
        limit: seconds that are left for it.
        base: the folder with the package of the base, where the item needs it.
    """
    if reason := item.missing():
        return Outcome(problem=reason)
    if limit < LEAST:
        return Outcome(problem=f"the {SECONDS / 60:.0f} minutes of the whole were over")
    command = [sys.executable, *item.arguments]
    if item.needs_base:
        assert base is not None
        command += ["--built", str(base)]
    seconds = min(limit, item.limit)
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            [*command, "--json", "/dev/stdout"], stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL,
            text=True, errors="replace", cwd=ROOT, start_new_session=True,
        ) as process:  # fmt: skip
            late = False
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                late = True
                output = _ended(process)
            except BaseException:
                _ended(process)
                raise
        errors.seek(0)
        said = errors.read()
    sys.stderr.write(said)
    plain = [json.loads(line) for line in output.splitlines() if line.startswith('{"item"')]
    found = [Measurement.from_plain(each) for each in plain if "value" in each]
    absent = [Unmeasured(**each) for each in plain if "value" not in each]
    if late:
        return Outcome(found, f"took longer than {seconds:.0f} s", failed=True, absent=absent)
    if process.returncode == 124:  # as `timeout` and tools/vm.py say it
        return Outcome(found, "took longer than it may: ended with status 124", failed=True, absent=absent)
    if process.returncode:
        lines = [line for line in (output + "\n" + said).splitlines() if line.strip()]
        last = lines[-1] if lines else "it said nothing"
        return Outcome(found, f"ended with status {process.returncode}: {last[:200]}", failed=True, absent=absent)
    return Outcome(found, absent=absent)


def _ended(process: subprocess.Popen[str]) -> str:
    """End all processes of the item, in order where they can; the output until then."""
    for number, seconds in ((signal.SIGINT, 10.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            continue
    return ""  # another process holds its output


def measure(names: Sequence[str]) -> dict[str, Outcome]:
    """Run these items, one after the other; they share one build of the base."""
    outcomes: dict[str, Outcome] = {}
    end = time.monotonic() + SECONDS
    with contextlib.ExitStack() as stack:
        base: Path | None = None
        problem = ""
        if any(ITEMS[name].needs_base for name in names):
            try:
                base = stack.enter_context(built(BASE))
            except subprocess.CalledProcessError as error:
                problem = f"the base {BASE} was not built: {str(error.stderr).strip()[-200:]}"
        for name in names:
            began = time.monotonic()
            if ITEMS[name].needs_base and base is None:
                outcomes[name] = Outcome(problem=problem, failed=True)
            else:
                outcomes[name] = run_item(ITEMS[name], end - began, base)
            print(f"{name}: {time.monotonic() - began:.0f} s {outcomes[name].problem}", file=sys.stderr, flush=True)
    return outcomes


def write(path: Path) -> int:
    """Measure everything; write the page, and beside it the record.

    Returns:
        0, or 1 when an item failed.
    """
    began, found = time.monotonic(), machine.describe()
    outcomes = measure(list(ITEMS))
    path.write_text(page(outcomes, about(found, time.monotonic() - began)))
    record = RECORD if path == PAGE else path.with_suffix(".jsonl")
    lines = [{"machine": found, "command": "python -m benchmarks --markdown"}]
    lines += [
        {key: value for key, value in each.plain().items() if value not in (None, "")}
        for outcome in outcomes.values()
        for each in outcome.found.values()
    ]
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"wrote {path} and {record}")
    return int(any(outcome.failed for outcome in outcomes.values()))


def main(arguments: list[str] | None = None) -> int:
    """Measure some items and print their rows.

    Returns:
        0, or 1 when an item failed.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budgets", description="Rows of the page of budgets.")
    parser.add_argument("items", nargs="+", metavar="ITEM", choices=list(ITEMS), help=f"which: {', '.join(ITEMS)}")
    names = parser.parse_args(arguments).items
    outcomes = measure(names)
    print(f"| {' | '.join(_COLUMNS)} |\n|---|---:|---|---:|---|---|")
    for _, rows in TABLES:
        for row in rows:
            if row.item in outcomes:
                print(f"| {' | '.join(cells(row, outcomes[row.item]))} |")
    return int(any(outcome.failed for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
