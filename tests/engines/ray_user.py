"""A real Ray cluster of two nodes, and a made-up user beside it."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from tests.driver.programs import ROOT, processes, until
from tests.engines.launching import User

__all__ = ["PATIENCE", "RayUser", "missing"]

PATIENCE = 600.0
"""Seconds after which a test stops waiting: each process that Ray starts imports Ray, a second of CPU time."""

PRELUDE = """
import asyncio, functools, os
import numpy as np
import ray
import zcactor as zc
from ray.util import placement_group_table
from zcactor.cluster import on_ray, sweep_ray

@zc.actor
class Sum:
    def __init__(self, path=""): self.path = path
    def of(self, x): return float(x.sum())
    def close(self):
        if self.path: open(self.path, "w").close()

on_ray = functools.partial(on_ray, timeout=300.0)

def groups():
    return sorted(each["name"] for each in placement_group_table().values() if each["state"] != "REMOVED")

async def until(condition):
    while not condition(): await asyncio.sleep(0.05)

"""


def missing() -> str | None:
    """The reason why Ray cannot run here; None where it can."""
    return "ray is not installed: make test-engines does that" if importlib.util.find_spec("ray") is None else None


class RayUser(User):
    """A user beside a Ray cluster; programs find it by ``RAY_ADDRESS``.

    Args:
        environ: further variables of the user.
    """

    def __init__(self, **environ: str) -> None:
        super().__init__()
        self.variables |= {"RAY_TMPDIR": str(self.folder), "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
        self.variables |= environ
        with open(self.folder / "ray.out", "w") as file:
            self.engine = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "engines" / "ray_cluster.py")], cwd=self.folder,
                env=self.variables, stdin=subprocess.PIPE, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        self._started.append(self.engine)  # type: ignore[arg-type]  # it is only waited for

    def wait_for_ray(self) -> None:
        """Wait until Ray runs, which has begun with the user."""
        found = until(lambda: re.search(r"ready (\S+)", self.text("ray")), "Ray", PATIENCE)
        self.variables["RAY_ADDRESS"] = found[1]

    def end_ray(self) -> None:
        """End the Ray cluster in order."""
        assert self.engine.stdin is not None
        self.engine.stdin.close()
        self.engine.wait(PATIENCE)

    def tell(self, line: str) -> None:
        """Tell the Ray cluster to change; see `tests.engines.ray_cluster`."""
        assert self.engine.stdin is not None
        self.engine.stdin.write(f"{line}\n".encode())
        self.engine.stdin.flush()

    def begin(self, source: str, **environ: str) -> subprocess.Popen[str]:
        """Start a program of this text, after `PRELUDE`."""
        (self.folder / "program.py").write_text(PRELUDE + source)
        return self.start(sys.executable, "program.py", **environ)

    def says(self, words: str) -> None:
        """Wait until the program's output has these words."""
        until(lambda: words in self.text(), f"the words {words!r}", PATIENCE)

    def succeeds(self, source: str) -> str:
        """Run a program to its end. Returns its output."""
        status = self.begin(source).wait(PATIENCE)
        assert status == 0, self.text()
        return self.text()

    def agents(self) -> list[int]:
        """The pids of node agents and their workers."""
        pids = {*processes(self.mark), *self._here()}
        found = []
        for pid in pids:
            with contextlib.suppress(OSError):
                if b"zcactor.node.agent_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found
