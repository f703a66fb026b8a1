"""A process without graphs does not import the modules for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

import zcactor as zc
from zcactor.process.context import current

PROGRAM = """
import asyncio, sys
import zcactor as zc

async def main():
    async with zc.init():
        pass
    print(sorted(name for name in sys.modules if name.startswith("zcactor.graphs.")))

asyncio.run(main())
"""


@pytest.fixture
def node(zc_runtime: zc.Runtime) -> zc.Runtime:
    return zc_runtime


@pytest.mark.slow
def test_a_program_without_graphs_imports_little() -> None:
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.strip() == "['zcactor.graphs.service']"


async def test_graphs_are_made_once(node: zc.Runtime) -> None:
    assert current().graphs() is current().graphs()
