"""The benchmarks: rows for users, beside what they use now, and rows for developers, each beside a floor.

::

    python -m benchmarks peers                # for users: beside multiprocessing, joblib, Ray, Dask and MPI
    python -m benchmarks --quick              # for developers: everything, under a minute
    python -m benchmarks                      # everything, under six minutes on two cores
    python -m benchmarks latency arrays       # two of them
    python -m benchmarks --json out.jsonl     # the figures, one JSON object a line
    python -m benchmarks --table              # and the measures that have a budget, as a Markdown table
    python -m benchmarks --markdown           # the page of all budgets, docs/budgets.md, in at most 20 minutes

Each item is a function ``measure_ITEM(scale)`` that yields `benchmarks.harness.Measurement` objects, and runs in a
fresh interpreter of its own. A floor is the least that any implementation would pay: an echo over a unix socket for a
call, memcpy for a copy, fork for a new process. A value is the median of several runs, with those of the floor in
between, so that a slow moment of the machine meets both.

For users are `peers` and `thesis`: zcactor beside other libraries, and beside copies and pickles. For developers are
`calls`, `graphs`, `arrays`, `shuffle`, `processes` and `groups`, whose items are below; `hosts`, `rdma`, `cluster`,
`engines` and `guarantees`, which are programs of their own; `paired`, which compares two revisions; and `budgets`,
which runs all of them and writes the page. They stand on `harness`, `machine` and `floors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEVELOPERS", "ITEMS", "USERS"]

USERS: Mapping[str, tuple[str, str]] = {"peers": ("peers", "Beside what you use now")}
DEVELOPERS: Mapping[str, tuple[str, str]] = {
    "latency": ("calls", "One call at a time"),
    "pipeline": ("calls", "1,000 calls in flight"),
    "blocking": ("calls", "Calls from a thread without an event loop"),
    "chain": ("graphs", "Chained calls"),
    "graph": ("graphs", "Compiled graphs"),
    "many": ("calls", "n actors calling n actors"),
    "arrays": ("arrays", "Passing arrays of float64"),
    "snapshots": ("arrays", "Pieces of open arrays, and forks"),
    "numpy": ("arrays", "NumPy's own arrays in the store"),
    "gpu": ("arrays", "Arrays on the fake GPU"),
    "collective": ("groups", "Groups of actors on one host"),
    "startup": ("processes", "Import, start and spawn"),
    "memory": ("processes", "Memory of an idle actor"),
    "death": ("processes", "An actor is killed"),
    "leaks": ("processes", "What is left behind"),
    "codec": ("calls", "Encoding and decoding frames"),
    "guarantees": ("guarantees", "What guarantees cost"),
    "scale": ("processes", "Many actors, idle connections"),
    "shuffle": ("shuffle", "Shuffling between two actors"),
    "topology": ("groups", "Orders of ranks and predictions"),
}
ITEMS: Mapping[str, tuple[str, str]] = {**USERS, **DEVELOPERS}
"""Module and title by name, in the order they run."""
