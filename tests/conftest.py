"""Fixtures and hooks of all tests: both event loops, and markers that skip where the machine lacks something."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import re
import subprocess
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop
from xdist.scheduler import LoadScopeScheduling

# This comes before NumPy is imported, and holds for the thousand interpreters that tests start: in each of them the
# threads of OpenBLAS would spin for a while, on processors that the tests need.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

pytest_plugins = ["pytester", "zcactor.testing.plugin", "simulation.plugin"]
pytest.register_assert_rewrite("tests.conformance")  # its modules are imported later

LOOPS: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}
"""The event loops that are supported, by the name that `Config.loop` has for them."""

BOTH = "transport"
"""The folder whose parametrized tests run each case on both loops, because its code calls the loop itself."""

LONGEST = ("test_heap_stress.py", "test_faults.py", "test_memory.py")
"""Modules that keep a process busy for a minute and more."""


GUESTS = {"test_rdma.py": "{test}", "test_two_hosts.py": "{module}", "test_bindings.py": "{test}"}
"""Modules whose virtual machines run beside each other, and what shares one in each: its test, or all of the module."""


@pytest.fixture(autouse=True)
def _workers_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the actors of a test on the same kind of loop as the test."""
    callspec = getattr(request.node, "callspec", None)
    for name in LOOPS:
        if callspec is not None and name in callspec.id.split("-"):
            monkeypatch.setenv("ZCACTOR_LOOP", name)


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_left() -> Iterator[None]:
    """Collect a module's garbage before the next module begins, whose tests may count descriptors.

    What is left then belongs to pytest, its reports and the modules: later collections need not search it.
    """
    yield
    gc.collect()
    gc.freeze()


LAUNCHING = ("driver", "node", "workers")
"""Folders of tests of how agents start, live and end."""


@pytest.fixture(scope="module", autouse=True)
def _agents(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a module's runtimes have forked agents, except in `LAUNCHING`."""
    from tests.forked_agents import forked_agents

    launching = Path(__file__).parent.joinpath
    with contextlib.nullcontext() if request.path.parent in map(launching, LAUNCHING) else forked_agents():
        yield


_directories = itertools.count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory like pytest's own, with a short name: the path of a unix socket has 107 bytes at most."""
    name = re.sub(r"\W", "_", request.node.name)[:12]
    path = tmp_path_factory.getbasetemp() / f"{name}{next(_directories)}"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A child process."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--loops``, which limits the loops of a quick run, and ``--rounds``, which multiplies the draws of seeded
    tests."""
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
    """The factor by which a seeded test multiplies its number of draws."""
    factor: int = request.config.getoption("--rounds")
    if factor < 1:
        raise pytest.UsageError(f"--rounds: {factor} is less than 1")
    return factor


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run each async test once per loop, or on the loops that its module lists in ``LOOP_FACTORIES``.

    pytest-asyncio calls this hook at collection.
    """
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
    """Switch off Hypothesis's time limits, because a busy machine is no counterexample.

    Guests leave its plugin out: they take seconds to import it.
    """
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import settings

        settings.register_profile("patient", deadline=None)
        settings.load_profile("patient")


class Spread(LoadScopeScheduling):  # type: ignore[misc]
    """The choice of tests that run in one process: the tests of a module, and all tests that start virtual machines,
    because the machine has no room for two of them at once.

    The modules of `GUESTS` are for a run of their own, which says by its number of processes for how many there is
    room.
    """

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        if "/vm/" not in module:
            return module
        return GUESTS.get(module.rpartition("/")[2], "virtual machines").format(module=module, test=nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Spread:
    """Spread the tests over processes; pytest-xdist calls this hook where it has several."""
    return Spread(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave each case of a matrix on one loop, and skip the tests that this machine cannot run, with the reason.

    The longest tests come first, so that no process still has one to run when the others are done.
    """
    taken = _on_one_loop(items)
    items[:] = sorted((item for item in items if item not in taken), key=_turn)
    config.hook.pytest_deselected(items=list(taken))
    infiniband = Path("/sys/class/infiniband")
    missing = {
        "root": os.geteuid() != 0 and "needs to be root",
        "rdma": not (infiniband.is_dir() and any(infiniband.iterdir())) and f"no RDMA device in {infiniband}",
        "gpu": not Path("/dev/nvidiactl").exists() and "no NVIDIA GPU: /dev/nvidiactl is missing",
    }
    for item in items:
        for name, reason in missing.items():
            if reason and item.get_closest_marker(name) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Leave all imported objects out of later garbage collections.

    Tests run hundreds of collections to see objects go, and each would search all of pytest, its plugins and the tests'
    modules.
    """
    gc.collect()
    gc.freeze()


def _on_one_loop(items: list[pytest.Item]) -> dict[pytest.Item, None]:
    """The items that repeat on another loop what one case of a parametrized test shows.

    The cases of a test take the loops in turns, in the order of a checksum of their names: parameters follow each other
    in an order of their own, by which one of them could meet one loop only.
    """
    tests: dict[str, dict[str, dict[str, pytest.Item]]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        parts = [] if callspec is None else callspec.id.split("-")
        loop = next((name for name in LOOPS if name in parts), None)
        if loop is None or Path(__file__).parent / BOTH in item.path.parents:
            continue
        parts.remove(loop)
        cases = tests.setdefault(item.nodeid.partition("[")[0], {})
        cases.setdefault("-".join(parts), {})[loop] = item
    taken: dict[pytest.Item, None] = {}
    for cases in tests.values():
        if len(cases) == 1:
            continue
        for turn, case in enumerate(sorted(cases, key=lambda name: (zlib.crc32(name.encode()), name))):
            loops = cases[case]
            kept = sorted(loops)[turn % len(loops)]
            taken.update((item, None) for loop, item in loops.items() if loop != kept)
    return taken


def _turn(item: pytest.Item) -> int:
    """The rank of an item; lower ranks run first."""
    parts = item.path.parts
    if "vm" in parts:
        return 0
    return 1 if item.path.name in LONGEST else 2
