"""Check mode finds arrays that change after they were passed, and names their makers. Other programs are clean."""

from __future__ import annotations

import asyncio
import inspect
import io
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.promises import spoilers
from tests.promises.spoilers import COUNT, Spoiler
from zcactor.config import load_config
from zcactor.marshal.packing import Packing
from zcactor.objectstore.table import LeaseTable
from zcactor.process.context import current
from zcactor.rpc.grants import Grants

pytestmark = pytest.mark.slow

PATIENCE = 30.0
"""Seconds after which a test counts as hanging: a watchdog, no statement about speed."""
EAGER = 16384
"""Bytes of `Config.eager_limit`."""


class Errors(logging.Handler):
    """The errors of the logger, and an event that the first one sets."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []
        self.came = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self._loop.call_soon_threadsafe(self.came.set)


class Screen(io.StringIO):
    """A standard error output that tells when a text was written to it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self.came = asyncio.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._text in self.getvalue():
            self.came.set()
        return written


@pytest.fixture(params=["local", "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Check mode, over a transport that maps memory, and over one that copies."""
    monkeypatch.setenv("ZCACTOR_CHECK", "bytes")
    monkeypatch.setenv("ZCACTOR_TRANSPORTS", str(request.param))
    return str(request.param)


@pytest.fixture
def errors() -> Iterator[Callable[[], Errors]]:
    """A function that begins to collect errors."""
    logger = logging.getLogger("zcactor")
    made: list[Errors] = []

    def collect() -> Errors:
        made.append(Errors())
        logger.addHandler(made[-1])
        return made[-1]

    yield collect
    for each in made:
        logger.removeHandler(each)


async def spawned(**options: Any) -> Any:
    """A `Spoiler` with these options."""
    return await Spoiler.options(**options).spawn()


def line_of(function: Any, text: str) -> str:
    """The place of the line with `text` in `function`, as errors say it."""
    lines, first = inspect.getsourcelines(function)
    return f"{inspect.getsourcefile(function)}:{first + next(i for i, line in enumerate(lines) if text in line)}"


# ---------------------------------------------------------------- what is found


async def test_a_write_is_found_when_the_lease_ends(transport: str, errors: Callable[[], Errors]) -> None:
    with pytest.raises(RuntimeError, match=r"check mode: .*float64 of shape \(100000,\)") as raised:
        async with asyncio.timeout(PATIENCE), zc.init():
            logged = errors()
            actor = await spawned()
            array = np.zeros(COUNT)
            view = array[5:10]
            await actor.drop()  # connected, so that calls are sent at once
            sent = [actor.keep(array)]  # the maker
            sent.append(actor.keep(array[100:90_000]))
            view[0] = 1  # before anything is received: a receiver by TCP gives the lease back with the last byte
            await zc.get(sent)
            await actor.drop()
            await logged.came.wait()
            await actor.keep(np.zeros(COUNT))
            await actor.drop()
    assert logged.texts == [str(raised.value)], "each change is told once"
    place = line_of(test_a_write_is_found_when_the_lease_ends, "# the maker")
    assert f"first passed at {place} in {test_a_write_is_found_when_the_lease_ends.__qualname__}" in logged.texts[0]
    assert "Bytes 0 to 800,000 of object 0x" in logged.texts[0]
    assert "the last lease of a peer on it ended" in logged.texts[0]
    assert "zc.freeze(x)" in logged.texts[0]


async def test_a_write_is_found_when_the_array_is_passed_again(transport: str) -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        actor = await spawned()
        array = np.zeros(COUNT)
        view = array[5:10]
        await actor.keep(array)
        await actor.keep(array)
        view[0] = 1
        for again in (array, array[2:50_000], [array], {"x": array[:6000]}):
            with pytest.raises(RuntimeError, match="found when it was passed again"):
                await actor.keep(again)


async def test_a_write_to_what_was_put_is_found_when_it_is_sent(transport: str) -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        actor = await spawned()
        array = np.zeros(COUNT)
        view: Any = memoryview(array.data).cast("B").cast("d")
        reference = zc.put(array)
        view[3] = 1.0
        with pytest.raises((RuntimeError, zc.RemoteError), match="check mode: an array has changed"):
            await actor.keep(reference)


@pytest.mark.parametrize("process", ["own", "shared"])
async def test_a_write_in_an_actor_reaches_the_log_of_the_driver(
    transport: str, process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen("the last lease of a peer on it ended")
    monkeypatch.setattr(sys, "stderr", screen)
    async with asyncio.timeout(PATIENCE), zc.init():
        actor, other = await spawned(process=process), await spawned()
        await actor.spoil_sent(other)
        await screen.came.wait()
    told = screen.getvalue()
    assert told.count("ERROR zcactor: check mode: ") == 1
    assert f"at {spoilers.__file__}:" in told
    assert "in Spoiler.spoil_sent" in told
    assert re.search(r"first passed by Spoiler\S* at ", told)


async def test_a_result_has_the_name_of_its_actor(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCACTOR_TRANSPORTS", "local")  # by TCP the lease ends when the copy is made
    screen = Screen("the last lease of a peer on it ended")
    monkeypatch.setattr(sys, "stderr", screen)
    async with asyncio.timeout(PATIENCE), zc.init():
        actor = await spawned()
        array = await actor.give()
        await actor.spoil()
        del array
        await screen.came.wait()
    assert re.search(r"first passed by Spoiler\S* as a result or an item", screen.getvalue())


@pytest.mark.parametrize("process", ["own", "shared"])
async def test_an_actor_that_passes_a_changed_array_gets_the_error(transport: str, process: Any) -> None:
    async with asyncio.timeout(PATIENCE), zc.init(log_to_driver=False):
        one, other = [await spawned(process=process) for _ in range(2)]
        await one.hand_on(other)
        await one.hand_on(other)
        await one.spoil()
        with pytest.raises(RuntimeError, match="check mode: an array has changed"):
            await one.hand_on(other)
        with pytest.raises(RuntimeError, match="check mode: an array has changed"):
            await one.give()


async def test_leases_that_end_with_the_runtime_are_checked(
    transport: str, errors: Callable[[], Errors], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZCACTOR_TRANSPORTS", "local")  # by TCP the lease ends when the copy is made
    runtime = await zc.init()
    logged = errors()
    actor = await spawned()
    array = np.zeros(COUNT)
    view = array[5:10]
    await actor.keep(array)
    view[0] = 1
    with pytest.raises(RuntimeError, match="check mode: an array has changed"):
        await zc.shutdown()
    assert len(logged.texts) == 1
    del runtime
    with pytest.raises(zc.NotInitialized):
        await zc.shutdown()


async def test_the_program_s_own_exception_comes_first(transport: str, errors: Callable[[], Errors]) -> None:
    with pytest.raises(KeyError, match="own"):
        async with asyncio.timeout(PATIENCE), zc.init():
            logged = errors()
            actor = await spawned()
            array = np.zeros(COUNT)
            view = array[5:10]
            await actor.drop()
            sent = actor.keep(array)
            view[0] = 1
            await sent
            await actor.drop()
            await logged.came.wait()
            raise KeyError("own")
    assert len(logged.texts) == 1


@pytest.mark.parametrize("nbytes", [0, 1, EAGER - 1, EAGER, EAGER + 1, 65536, 1 << 20])
async def test_sizes(transport: str, nbytes: int) -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        actor = await spawned()
        array = zc.zeros(nbytes, "u1")
        view = array[-1:]
        await actor.keep(array)
        view[:] = 1
        if nbytes >= EAGER:
            with pytest.raises(RuntimeError, match="check mode"):
                await actor.keep(array)
        else:
            assert await actor.keep(array) == min(nbytes, 1), "it goes in the frame, as it is now"


# ---------------------------------------------------------------- what is not


async def test_ordinary_programs_are_clean(transport: str, errors: Callable[[], Errors]) -> None:
    async with asyncio.timeout(PATIENCE), zc.init(num_cpus=8):
        logged = errors()
        one, two = [await spawned() for _ in range(2)]
        shared = await spawned(process="shared")
        for actor in (one, two, shared):
            array = np.arange(COUNT, dtype="f8").reshape(100, -1)
            assert await actor.keep(array, array[3:], array.T, array[:, 5:900]) == array.sum()
            array = await actor.double(array)
            await zc.get([one.keep(array), two.keep(array), shared.keep(array[10:])])
            assert [item[0] async for item in actor.items()] == [0, 1, 2]
            reference = zc.put(np.ones(COUNT))
            assert await zc.get([one.keep(reference), two.keep(reference), shared.keep(reference)]) == [COUNT] * 3
            await one.keep(two.double(np.ones(COUNT)))

            moved = await actor.fill(zc.move(zc.zeros(COUNT)))
            moved += 1
            assert await actor.keep(moved) == 8 * COUNT
            back = await actor.fill(zc.move(np.zeros(COUNT)))
            back[:] = 2
            assert (await actor.fill(zc.move(back)))[0] == 7

            piece = np.zeros((2, COUNT))
            await actor.keep(piece[0])
            piece += 1
            await actor.keep(piece[0])
            await actor.keep(piece)
        group = await zc.group([one, two])
        sums: list[float] = await zc.get([actor.summed(group, rank) for rank, actor in enumerate((one, two))])
        assert sums == [2 * (3 + 2 * 2)] * 2
        async with zc.graph() as g:
            first = g.input()
            g.output(two.double.bind(one.double.bind(first)))
        run = await g.compile()
        for value in range(3):
            assert (await run(np.full(COUNT, float(value))))[0] == 4.0 * value
        for actor in (one, two, shared):
            await actor.drop()
    assert not logged.texts


async def test_an_array_that_was_not_sent_may_be_written_to(transport: str) -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        actor = await spawned()
        array = np.zeros(COUNT)
        for value in range(3):
            with pytest.raises(TypeError):
                await actor.keep(array, (each for each in "a generator cannot be passed"))
            array[:] = value
        assert await actor.keep(array) == 2 * COUNT


# ---------------------------------------------------------------- the setting


@pytest.mark.parametrize("value", ["byte", "1", "true", "BYTES", "off"])
def test_other_values_are_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"ZCACTOR_CHECK: check = '{value}' must be Literal\['', 'bytes'\]"):
        load_config(environ={"ZCACTOR_CHECK": value}, directory=tmp_path, user_directory=tmp_path)


async def test_without_it_nothing_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCACTOR_CHECK", "")
    async with asyncio.timeout(PATIENCE), zc.init():
        actor = await spawned()
        await actor.keep(np.zeros(COUNT))
        process: Any = current()
        assert process.checker is None
        assert process.marshaller._packing is Packing
        for session in process.sessions.all():
            assert type(session.leases) is LeaseTable
            assert type(session._grants) is Grants


def test_programs_without_it_do_not_import_it() -> None:
    modules = "sys, zcactor.driver.driver, zcactor.node.worker_main"
    program = f"import {modules}; print('zcactor.objectstore.checking' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.strip() == "False"
