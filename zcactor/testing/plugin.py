"""The plugin for pytest: opt in by ``pytest_plugins = ["zcactor.testing.plugin"]`` in the root ``conftest.py``.

Each fixture fails its test at the end where the test has left something: a task, a thread, a child, a descriptor, a
lease or bytes of a store. The message names each of them.

It needs pytest-asyncio, in its strict or its auto mode; ``pip install 'zcactor[testing]'`` brings that.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, Final

import pytest

from zcactor.api.actor import spawn
from zcactor.testing.faults import LinkFaults, check_faults
from zcactor.testing.leaks import Snapshot, memory_left, settled
from zcactor.testing.runtime import LoopbackRuntime, end_runtime, start_runtime
from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.driver.fake_nic import INLINE_LIMITS

try:
    from pytest_asyncio import fixture as async_fixture
except ImportError:
    async_fixture = pytest.fixture  # type: ignore[assignment]  # `pytest_configure` ends the run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Mapping
    from types import TracebackType

__all__ = [
    "Pair", "PairStart", "async_fixture", "check_left", "make_fabric", "pytest_configure", "pytest_runtest_makereport",
    "resources_left", "zc_loopback", "zc_rdma", "zc_runtime",
]  # fmt: skip


class Pair:
    """A runtime in this process, whose actors are beyond a connection with faults. See the fixture `zc_loopback`.

    Attributes:
        runtime: the runtime.
    """

    def __init__(self, runtime: LoopbackRuntime, faults: LinkFaults) -> None:
        self.runtime = runtime
        self._faults = faults

    async def spawn(self, cls: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Start an actor beyond the connection. When this returns for the first time, the faults begin.

        Args:
            cls: the class, or a class with options: ``Counter.options(name="c")``.
            args, kwargs: of its constructor.

        Returns:
            A handle. Raises as `zcactor.spawn`.
        """
        handle = await (cls.spawn(*args, **kwargs) if hasattr(cls, "spawn") else spawn(cls, *args, **kwargs))
        self._faults.begin()
        return handle

    async def aclose(self) -> None:
        """End the actors and the runtime. Idempotent. The fixture calls this."""
        runtime = self.runtime
        if runtime.process.loop is asyncio.get_running_loop():
            await end_runtime(runtime)
        elif not runtime.closed:
            runtime.end_now()  # its own loop has ended


class PairStart:
    """The result of a call of `zc_loopback`: await it, or use it with ``async with``."""

    def __init__(self, seed: int, faults: Mapping[str, Any], pairs: list[Pair]) -> None:
        self._seed = seed
        self._faults = faults
        self._pairs = pairs
        self._pair: Pair | None = None

    def __await__(self) -> Generator[Any, None, Pair]:
        return self._start().__await__()

    async def _start(self) -> Pair:
        faults = LinkFaults(asyncio.get_running_loop().time, self._seed, self._faults)
        self._pair = Pair(await start_runtime(faults), faults)
        self._pairs.append(self._pair)
        return self._pair

    async def __aenter__(self) -> Pair:
        return await self._start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pair is not None:
            await self._pair.aclose()


def make_fabric(adapters: int, seed: int) -> FakeFabric:
    """Make a fabric, whose adapters take as much inline data as `seed` draws. See the fixture `zc_rdma`.

    Raises:
        TypeError: `adapters` is no int.
        ValueError: `adapters` is less than 1.
    """
    if type(adapters) is not int:
        raise TypeError(f"zc_rdma: adapters is a number of adapters, such as 2, not {adapters!r}")
    if adapters < 1:
        raise ValueError(f"zc_rdma: adapters is {adapters}, at least 1 is possible")
    fabric = FakeFabric(seed=seed)
    draw = random.Random(seed)
    for number in range(adapters):
        fabric.add_nic(f"fake{number}", max_inline=draw.choice(INLINE_LIMITS))
    return fabric


def resources_left(fabric: FakeFabric) -> list[str]:
    """The devices that are open, and the memory registered with them, a line for each."""
    found = []
    for adapter in fabric.devices:
        for device in adapter.devices:
            found.append(f"device {adapter.name}, which is open")
            found += [
                f"a memory region of {region.nbytes:,} bytes registered with device {adapter.name}"
                for region in device.regions.values()
            ]
    return found


_RAISED: Final = pytest.StashKey[bool]()
"""Whether a test has raised: its frames, and the arrays in them, live on for the report."""


def pytest_configure(config: pytest.Config) -> None:
    """Check that the fixtures can work.

    Raises:
        pytest.UsageError: pytest-asyncio is not installed, or is switched off.
    """
    if not config.pluginmanager.hasplugin("asyncio"):
        raise pytest.UsageError("zcactor.testing needs pytest-asyncio: pip install 'zcactor[testing]'")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Note whether the test has raised."""
    if call.excinfo is not None:
        item.stash[_RAISED] = True
    return (yield)


async def check_left(
    request: pytest.FixtureRequest, before: Snapshot, own: Callable[[], list[str]] = list
) -> None:  # fmt: skip
    """Fail the test where it has left something.

    Args:
        request: of the fixture.
        before: the state of this process before the test.
        own: returns a line for each thing that is left of the fixture's own. Not asked where the test has raised.
    """
    raised = request.node.stash.get(_RAISED, False)

    def look() -> list[str]:
        return before.left() + ([] if raised else own())

    if look():
        request.node.funcargs.clear()  # it has the values of fixtures that have ended, and what they keep
    left = await settled(look)
    if left:
        what = "".join(f"\n  - {each}" for each in left)
        pytest.fail(f"{request.fixturename}: the test has left{what}", pytrace=False)


@async_fixture
async def zc_runtime(request: pytest.FixtureRequest) -> AsyncIterator[LoopbackRuntime]:
    """A runtime wholly in this process, on the test's loop: head, driver and actors, over loopback connections.

    All of ``zc.*`` works in the test, and no process is forked and no socket opened. Arrays lie in real arenas, and are
    mapped, not copied. Each test has a runtime of its own; it starts in a few milliseconds. Settings come from the
    environment, as for `zcactor.init`. The page "Test your actors" has the differences to a real node.

    Returns:
        The runtime, as `zcactor.init` does; its `processes` is an empty list.

    Raises:
        AlreadyInitialized: a runtime is running in this process.
    """
    before = Snapshot(asyncio.get_running_loop())
    runtime = await start_runtime()
    yield runtime
    await end_runtime(runtime)
    await check_left(request, before, lambda: memory_left(runtime))


@async_fixture
async def zc_loopback(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., PairStart]]:
    """A factory of pairs: this process, and actors beyond a connection with faults.

    ``await zc_loopback(seed=0, faults={})`` starts a runtime like that of `zc_runtime`, and gives a `Pair`.
    """
    before = Snapshot(asyncio.get_running_loop())
    pairs: list[Pair] = []

    def make(*, seed: int = 0, faults: Mapping[str, Any] = {}) -> PairStart:
        """Start a pair.

        Args:
            seed: decides the delays: the same seed draws the same ones.
            faults: the faults of connections between this process and the pair's actors, from the moment on at which
                `Pair.spawn` has returned for the first time.

                - ``delay``: ``(low, high)``, seconds that each batch of frames takes. Order is kept.
                - ``break_after``: number of frames, of both directions together, after which the connection breaks,
                  once. These frames still arrive, and the actor lives on.
                - ``stall``: ``(at, seconds)``: nothing arrives for `seconds` from the moment on that is `at` seconds
                  after the faults have begun. It arrives then.

        Returns:
            An object to await, which gives the `Pair`, or to enter by ``async with``. The fixture ends it.

        Raises:
            TypeError: a fault is unknown, or its value has the wrong type; at the call.
            ValueError: a number is negative or not finite, or a pair in the wrong order; at the call.

        Raises when awaited:
            AlreadyInitialized: a runtime is running in this process: one test has one pair at a time.
        """
        check_faults(faults)
        return PairStart(seed, faults, pairs)

    yield make
    for pair in pairs:
        await pair.aclose()
    await check_left(request, before, lambda: [line for pair in pairs for line in memory_left(pair.runtime)])


@async_fixture
async def zc_rdma(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., FakeFabric]]:
    """A factory of fake RDMA fabrics: adapters that all reach each other, and move real bytes of this process.

    ``zc_rdma(adapters=1, seed=0)`` gives a fabric, whose `devices` are the adapters. Tests of transports open them, and
    break them: see `zcactor.transport.verbs.driver.fake.FakeFabric`. At the end no device may be open.
    """
    before = Snapshot(asyncio.get_running_loop())
    fabrics: list[FakeFabric] = []

    def make(*, adapters: int = 1, seed: int = 0) -> FakeFabric:
        """Make a fabric.

        Args:
            adapters: number of adapters, named ``fake0``, ``fake1`` and so on.
            seed: decides the order in which queue pairs get their turn, the keys of memory, and how many bytes each
                adapter takes inline.

        Returns:
            The fabric. Its `devices` are the adapters, each with its `name`.

        Raises:
            TypeError: `adapters` is no int.
            ValueError: `adapters` is less than 1.
        """
        fabrics.append(make_fabric(adapters, seed))
        return fabrics[-1]

    yield make
    await check_left(request, before, lambda: [line for fabric in fabrics for line in resources_left(fabric)])
