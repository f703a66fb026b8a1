"""A process without groups does not import the modules for them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import zcactor as zc
from tests.collectives.ranks import everywhere, ranks
from zcactor.process.context import current

PROGRAM = """
import asyncio, sys
import zcactor as zc

async def main():
    async with zc.init():
        assert zc.stats().collectives == 0
    print(sorted(name for name in sys.modules if name.startswith("zcactor.collectives.")))

asyncio.run(main())
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=4, log_to_driver=False) as node:
        yield node


@pytest.mark.slow
def test_a_program_without_groups_imports_little() -> None:
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.strip() == "['zcactor.collectives.lazy_groups', 'zcactor.collectives.service']"


@pytest.mark.asyncio(loop_scope="module")
async def test_groups_are_made_once(node: zc.Runtime) -> None:
    assert current().groups() is current().groups()
    async with ranks(2) as (group, actors):
        assert await everywhere(actors, "rank", group) == [0, 1]
