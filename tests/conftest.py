"""What every test shares: both event loops, and markers that skip where the machine lacks what they name."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop
from xdist.scheduler import LoadScopeScheduling

# Before NumPy is imported, and for the thousand interpreters that tests start: in each of them OpenBLAS would have
# threads spin for a while, on processors that the tests need.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A failing assertion there shows its values, too.
pytest.register_assert_rewrite("tests.conformance.connection", "tests.conformance.session", "tests.conformance.talk")

LOOPS: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}
"""The event loops that are supported, by the name that `Config.loop` has for them."""

LONGEST = ("test_heap_stress.py", "test_faults.py", "test_memory.py")
"""Modules that keep a process busy for a minute and more."""


@pytest.fixture(autouse=True)
def _workers_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors of a test run on the same kind of loop as the test."""
    callspec = getattr(request.node, "callspec", None)
    for name in LOOPS:
        if callspec is not None and name in callspec.id.split("-"):
            monkeypatch.setenv("ZCACTOR_LOOP", name)


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_left() -> Iterator[None]:
    """What a module's tests leave is collected before the next module's begin, which may count descriptors."""
    yield
    gc.collect()


_directories = itertools.count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like pytest's own, with a short name: the path of a unix socket has 107 bytes at most."""
    name = re.sub(r"\W", "_", request.node.name)[:12]
    path = tmp_path_factory.getbasetemp() / f"{name}{next(_directories)}"
    path.mkdir(mode=0o700)
    return path


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--loops``, by which a quick run takes one loop only, and ``--rounds``, by which seeded tests draw more."""
    parser.addoption(
        "--loops",
        default=",".join(LOOPS),
        help="event loops that each async test runs on, separated by commas (default: %(default)s)",
    )

    parser.addoption(
        "--rounds",
        type=int,
        default=1,
        help="how many times as many draws seeded tests make (default: %(default)s)",
    )


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    """What the number of draws of a seeded test is multiplied by."""
    factor: int = request.config.getoption("--rounds")
    if factor < 1:
        raise pytest.UsageError(f"--rounds: {factor} is less than 1")
    return factor


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Each async test runs once per loop, or on those that its module has as ``LOOP_FACTORIES``; pytest-asyncio asks
    this at collection."""
    own: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] | None = None
    if isinstance(item, pytest.Function):
        own = getattr(item.module, "LOOP_FACTORIES", None)
    if own is not None:
        return own
    names = str(config.getoption("--loops")).split(",")
    unknown = sorted(set(names) - set(LOOPS))
    if unknown:
        raise pytest.UsageError(f"--loops: {', '.join(unknown)} is none of {', '.join(LOOPS)}")
    return {name: LOOPS[name] for name in names}


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis sets no time limits: a busy machine is no counterexample. (Guests leave its plugin out: importing it
    takes them seconds.)"""
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import settings

        settings.register_profile("patient", deadline=None)
        settings.load_profile("patient")


class Spread(LoadScopeScheduling):  # type: ignore[misc]
    """Which tests go to the same process: those of a module, and all that start virtual machines, as the machine has no
    room for two at once."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return "virtual machines" if "/vm/" in module else module


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Spread:
    """How tests are spread over processes; pytest-xdist asks this where it has several."""
    return Spread(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run, with the reason. What takes longest comes first, so that no process has it
    left when the others are done."""
    items.sort(key=_turn)
    infiniband = Path("/sys/class/infiniband")
    missing = {
        "root": os.geteuid() != 0,
        "rdma": not (infiniband.is_dir() and any(infiniband.iterdir())),
        "gpu": not Path("/dev/nvidiactl").exists(),
    }
    reasons = {
        "root": "needs to be root",
        "rdma": "no RDMA device in /sys/class/infiniband",
        "gpu": "no NVIDIA GPU: /dev/nvidiactl is missing",
    }
    for item in items:
        for name, absent in missing.items():
            if absent and item.get_closest_marker(name) is not None:
                item.add_marker(pytest.mark.skip(reason=reasons[name]))


def pytest_collection_finish() -> None:
    """What was imported is left out of garbage collections from here on. Tests ask for hundreds of them, to see what
    goes, and all that pytest, its plugins and the tests' modules consist of would be searched each time."""
    gc.collect()
    gc.freeze()


def _turn(item: pytest.Item) -> int:
    """A number; items of lower ones are run first."""
    parts = item.path.parts
    if "vm" in parts:
        return 0
    return 1 if item.path.name in LONGEST else 2
