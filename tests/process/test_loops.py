"""The choice of event loop."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from zcactor.process.loops import fine_time, loop_name, new_event_loop, run


async def loop_type() -> type:
    return type(asyncio.get_running_loop())


@pytest.mark.parametrize(
    ("value", "name", "module"),
    [(None, "uvloop", "uvloop"), ("uvloop", "uvloop", "uvloop"), ("asyncio", "asyncio", "asyncio")],
)
def test_the_loop_that_is_told(monkeypatch: pytest.MonkeyPatch, value: str | None, name: str, module: str) -> None:
    if value is None:
        monkeypatch.delenv("ZCACTOR_LOOP", raising=False)
    else:
        monkeypatch.setenv("ZCACTOR_LOOP", value)
    assert loop_name() == name
    assert run(loop_type()).__module__.startswith(module)
    loop = new_event_loop(name)
    assert isinstance(loop, uvloop.Loop) is (name == "uvloop")
    loop.close()


def test_an_unknown_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCACTOR_LOOP", "trio")
    with pytest.raises(ValueError, match="'trio'; valid values: uvloop, asyncio"):
        loop_name()
    coroutine = loop_type()
    with pytest.raises(ValueError, match="trio"):
        run(coroutine)


async def test_inside_a_running_loop() -> None:
    coroutine = loop_type()
    with pytest.raises(RuntimeError, match="await main"):
        run(coroutine)


def test_exceptions_come_out() -> None:
    async def fail() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run(fail())


def test_the_finer_clock() -> None:
    async def seconds() -> tuple[float, float, float, float]:
        loop = asyncio.get_running_loop()
        return loop.time(), time.perf_counter(), fine_time(loop), loop.time()

    before, _, found, after = asyncio.run(seconds())
    assert before <= found <= after
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        _, before, found, _ = runner.run(seconds())
    assert before <= found
