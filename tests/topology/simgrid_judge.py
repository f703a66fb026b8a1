"""SimGrid as the judge of predictions: the interpreter that has it gets networks and flows by `judge.py`."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Hashable, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from zcactor.topology import Topology, plans

JUDGE = Path(__file__).with_name("judge.py")
PATHS = 64
"""The number of equal paths that are taken for each flow, at random."""


@functools.cache
def interpreter() -> str | None:
    """The interpreter that has the module ``simgrid``; None where none has."""
    for python in dict.fromkeys([sys.executable, shutil.which("python3", path="/usr/bin:/usr/local/bin")]):
        if python is None:
            continue
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            [python, "-c", "import simgrid"], capture_output=True, env=environment, timeout=60, check=False
        )
        if done.returncode == 0:
            return python
    return None


def needs_simgrid() -> str:
    """The interpreter for `judge.py`; skips the test with the reason where there is none."""
    found = interpreter()
    if found is None:
        pytest.skip("SimGrid is not installed: as root on Debian, apt-get install python3-simgrid")
    return found


def judged(
    topology: Topology, nbytes: int, plan: str, hosts: Sequence[Hashable] | None = None, model: str = "raw"
) -> float:
    """Seconds of an allreduce by SimGrid, as `Topology.predict` predicts them."""
    python = needs_simgrid()
    chosen = list(topology.hosts if hosts is None else hosts)
    arcs: dict[tuple[Any, Any], int] = {}
    rates = []
    for one, other, facts in topology.graph.edges(data=True):
        rate = facts.get("links", 1) * facts.get("bandwidth", topology.bandwidth)
        for pair in ((one, other), (other, one)):
            arcs[pair] = len(arcs)
            rates.append((rate, facts.get("latency", topology.latency)))
    rng = random.Random(0)

    @functools.cache
    def ways(giver: int, taker: int) -> list[list[int]]:
        paths = list(islice(nx.all_shortest_paths(topology.graph, chosen[giver], chosen[taker]), 400))
        if len(paths) > PATHS:
            paths = rng.sample(paths, PATHS)
        return [[arcs[pair] for pair in pairwise(path)] for path in paths]

    steps = []
    for step in plans.steps(plan, len(chosen)):
        pairs = step.flows or [(a, b) for a in range(len(chosen)) for b in range(len(chosen)) if a != b]
        flows = [(giver, taker, step.part * nbytes, ways(giver, taker)) for giver, taker in pairs]
        steps += [flows] * step.times
    told = {"ranks": len(chosen), "arcs": rates, "steps": steps, "model": model}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [python, JUDGE],
        input=json.dumps(told),
        capture_output=True,
        text=True,
        env=environment,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return float(json.loads(done.stdout.splitlines()[-1]))
