"""The rows of ``docs/performance.md`` and the programs whose figures they show."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.harness import Budget, at_least, at_most, exactly, quantity
from tests.hosts.netns import missing as no_hosts

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BASE", "ITEMS", "TABLES", "Item", "Row"]

BASE: Final = "c211237"
"""The revision before the guarantees."""
ROOT: Final = Path(__file__).resolve().parents[1]


def _nothing() -> str | None:
    return None


def no_guest() -> str | None:
    """Why no virtual machine can run here; None where one can."""
    found = subprocess.run(
        [sys.executable, "tools/vm.py", "check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = (found.stderr + found.stdout).strip().splitlines()
    return None if found.returncode == 0 else lines[-1] if lines else "tools/vm.py check failed"


@dataclass(frozen=True, slots=True)
class Item:
    """A program whose figures are rows.

    Attributes:
        arguments: of the interpreter. It takes ``--json FILE``.
        limit: seconds that it may take.
        missing: says what the machine lacks for it.
        needs_base: it takes ``--built FOLDER``, the package of the base.
    """

    arguments: tuple[str, ...]
    limit: float
    missing: Callable[[], str | None] = _nothing
    needs_base: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A budget, and which measurement of which item shows whether it holds."""

    item: str
    what: str
    measurement: str
    budget: Budget
    unit: str = ""
    """Of a budget for the value itself."""

    def limit(self, unit: str) -> str:
        """The budget as text; `unit` is the measurement's, where there is one."""
        budget, unit = self.budget, unit or self.unit
        return f"{budget.compare} {budget.limit:g}x" if budget.of == "ratio" else (
            f"{budget.compare} {quantity(budget.limit, unit)}"
        )  # fmt: skip


def _one(name: str, limit: float = 60.0) -> Item:
    return Item(("-m", "benchmarks.budgets", name, "--quick"), limit)


_WAYS: Final = {"local": "local", "tcp": "TCP", "sealed": "sealed TCP"}
_KINDS: Final = ("sync call", "async call", "inline call", "call, 1,000 in flight")
_PAIRED: Final = ("-m", "benchmarks.paired", "--base", BASE)

ITEMS: Final[dict[str, Item]] = {
    "calls": Item(
        (*_PAIRED, "--rounds", "64", "--over", "local", "--over", "tcp", "--over", "sealed", "sync", "async", "inline",
         "pipelined"),
        240, needs_base=True,
    ),
    "echo": Item(("-m", "benchmarks", "latency", "pipeline", "--quick"), 60),
    "hosts": Item(("-m", "benchmarks.hosts", "--quick"), 240, no_hosts),
    "objects": _one("objects"),
    "sockets": _one("sockets"),
    "adoption": _one("adoption"),
    "passed-on": _one("passed-on"),
    "table": _one("table"),
    "shared": _one("shared"),
    "shared-beside-base": Item((*_PAIRED, "--rounds", "2", "shared-1000"), 120, needs_base=True),
    "all-to-all": _one("all-to-all"),
    "fake-calls": Item(("-m", "benchmarks.budgets", "fake-calls", "--quick"), 60, needs_base=True),
    "ending": _one("ending"),
    "registering": _one("registering"),
    "idle": _one("idle"),
    "stale": _one("stale"),
    "switching": Item(("-m", "benchmarks.budgets", "switching"), 90),
    "keeping": _one("keeping"),
    "guest": Item(
        ("tools/vm.py", "run", "--timeout", "400", "--", sys.executable, "-m", "benchmarks.guest", "--quick"),
        410, no_guest, needs_base=True,
    ),
}  # fmt: skip
"""By name, in the order they run."""

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

TABLES: Final = (
    ("Guarantees", GUARANTEES),
    ("RDMA and the memory of the store", SECOND),
)
"""Title and rows."""
