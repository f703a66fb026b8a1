"""The benchmarks: the costs of zcactor, each next to a floor that was measured in the same run the same way.

::

    python -m benchmarks --quick              # everything, under a minute
    python -m benchmarks                      # everything, under six minutes on two cores
    python -m benchmarks latency arrays       # two of them
    python -m benchmarks --json out.jsonl     # the figures, one JSON object a line
    python -m benchmarks --table              # and the measures that have a budget, as a Markdown table
    python -m benchmarks --markdown           # the page of all budgets, docs/performance.md, in at most 20 minutes

Each item is one module with a function ``measure(scale)`` that yields `benchmarks.harness.Measurement` objects, and
runs in a fresh interpreter of its own. A floor is the least that any implementation would pay: an echo over a unix
socket for a call, memcpy for a copy, fork for a new process. A value is the median of several runs, with those of the
floor in between, so that a slow moment of the machine meets both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ITEMS"]

ITEMS: Mapping[str, tuple[str, str]] = {
    "latency": ("benchmarks.latency", "One call at a time"),
    "pipeline": ("benchmarks.pipeline", "1,000 calls in flight"),
    "chain": ("benchmarks.chain", "Chained calls"),
    "graph": ("benchmarks.graph", "Compiled graphs"),
    "many": ("benchmarks.many", "n actors calling n actors"),
    "arrays": ("benchmarks.arrays", "Passing arrays of float64"),
    "snapshots": ("benchmarks.snapshots", "Pieces of open arrays, and forks"),
    "numpy": ("benchmarks.numpy_memory", "NumPy's own arrays in the store"),
    "gpu": ("benchmarks.gpu", "Arrays on the fake GPU"),
    "collective": ("benchmarks.collective", "Groups of actors on one host"),
    "startup": ("benchmarks.startup", "Import, start and spawn"),
    "memory": ("benchmarks.memory", "Memory of an idle actor"),
    "death": ("benchmarks.death", "An actor is killed"),
    "leaks": ("benchmarks.leaks", "What is left behind"),
    "codec": ("benchmarks.bench_codec", "Encoding and decoding frames"),
    "guarantees": ("benchmarks.guarantees", "What guarantees cost"),
    "scale": ("benchmarks.scale", "Many actors, idle connections"),
    "shuffle": ("benchmarks.shuffle", "Shuffling between two actors"),
    "topology": ("benchmarks.topology", "Orders of ranks and predictions"),
}
"""Module and title by name, in the order they run."""
