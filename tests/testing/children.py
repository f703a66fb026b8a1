"""Child pytests: small projects that use the plugin, each run in a process of its own."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Final

import pytest

__all__ = ["BRIEF", "MODES", "actors", "conftest", "run", "written"]

ROOT: Final = Path(__file__).resolve().parents[2]
"""The clone, which has the simulation."""
MODES: Final = ("strict", "auto")
WATCHDOG: Final = 150.0
"""Seconds."""
BRIEF: Final = 0.2
"""Seconds for which tests that leave something wait for its end, which does not come."""
actors: Final = """
    import asyncio, os, subprocess, threading, time
    import numpy as np
    import pytest
    import zcactor as zc

    KEPT = []
    {mark}

    @zc.actor
    class Counter:
        def __init__(self, start=0):
            self.count = start

        def add(self, amount):
            self.count += amount
            return self.count

        async def echo(self, value):
            return value

        def zeros(self, nbytes):
            return zc.zeros(nbytes, dtype="u1")

        def hold(self, array):
            KEPT.append(array)

        async def begin(self):
            KEPT.append(asyncio.create_task(asyncio.sleep(3600), name="poll"))

        def wait(self, path):
            with open(path) as file:
                file.read()
"""
"""The beginning of each test file."""


def conftest(settling: float = WATCHDOG / 2) -> str:
    """The source of ``conftest.py``, with the plugins.

    Args:
        settling: seconds in which what a test has left may end: by default as many as nothing needs.
    """
    return f"""
import sys

import zcactor.testing.leaks

sys.path.insert(0, {str(ROOT)!r})
pytest_plugins = ["zcactor.testing.plugin", "simulation.plugin"]
zcactor.testing.leaks.SETTLING = {settling}
"""


def written(pytester: pytest.Pytester, mode: str, tests: str, *, settling: float = WATCHDOG / 2) -> None:
    """Write a project.

    Args:
        pytester: the fixture.
        mode: of pytest-asyncio.
        tests: the source of the test file, behind `actors`.
        settling: see `conftest`.
    """
    mark = "pytestmark = pytest.mark.asyncio" if mode == "strict" else ""
    pytester.makeini(
        f"[pytest]\nasyncio_mode = {mode}\nasyncio_default_fixture_loop_scope = function\n"
        "filterwarnings = error\n    ignore:The test .* is marked with:pytest.PytestWarning\n"
    )
    pytester.makeconftest(conftest(settling))
    pytester.makepyfile(textwrap.dedent(actors.replace("{mark}", mark)) + textwrap.dedent(tests))


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    """Run the project's tests, without plugins that it does not need."""
    return pytester.runpytest_subprocess(
        "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-ra", *options, timeout=WATCHDOG
    )
