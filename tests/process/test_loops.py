"""The choice of event loop."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.driver.programs import ROOT, Program
from zcactor.process.loops import chosen_loop, fine_time, loop_name, new_event_loop, run


async def loop_type() -> type:
    return type(asyncio.get_running_loop())


@pytest.mark.parametrize(
    ("value", "name", "module"),
    [
        (None, "auto", "uvloop"),
        ("", "auto", "uvloop"),
        ("auto", "auto", "uvloop"),
        ("uvloop", "uvloop", "uvloop"),
        ("asyncio", "asyncio", "asyncio"),
    ],
)
def test_the_loop_that_is_told(monkeypatch: pytest.MonkeyPatch, value: str | None, name: str, module: str) -> None:
    if value is None:
        monkeypatch.delenv("ZCACTOR_LOOP", raising=False)
    else:
        monkeypatch.setenv("ZCACTOR_LOOP", value)
    assert loop_name() == name
    assert run(loop_type()).__module__.startswith(module)
    loop = new_event_loop(name)
    assert isinstance(loop, uvloop.Loop) is (module == "uvloop")
    loop.close()


@pytest.mark.parametrize("broken", ["import no_such_module", "raise ImportError('cannot open a shared object')"])
def test_programs_run_where_uvloop_cannot_be_imported(tmp_path: Path, broken: str) -> None:
    (tmp_path / "uvloop.py").write_text(broken)
    program = """
class Where:
    async def loop(self):
        return type(asyncio.get_running_loop()).__module__
async def main():
    async with zc.init(num_cpus=1):
        where = await zc.spawn(Where)
        tell(loops=[type(asyncio.get_running_loop()).__module__, await where.loop()])
zc.run(main())
"""
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    with Program(program, env={"PYTHONPATH": path, "ZCACTOR_LOOP": ""}) as ran:
        assert all(name.startswith("asyncio") for name in ran.told("loops"))
        assert ran.status() == 0
        assert ran.stderr().count("asyncio's event loop is used, as uvloop cannot be imported (") == 1


def test_uvloop_is_asked_for_and_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "uvloop.py").write_text("import its_missing_part")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "uvloop")
    monkeypatch.setenv("ZCACTOR_LOOP", "uvloop")
    chosen_loop.cache_clear()
    message = r"the setting loop is 'uvloop', .*its_missing_part.*: pip install uvloop, or set loop to 'auto'"
    with pytest.raises(ValueError, match=message):
        new_event_loop("uvloop")
    coroutine = loop_type()
    with pytest.raises(ValueError, match=message):
        run(coroutine)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


def test_a_program_asks_for_uvloop_which_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "uvloop.py").write_text("raise ImportError('cannot open a shared object')")
    program = """
async def main():
    try:
        async with zc.init(num_cpus=1, loop="uvloop"):
            pass
    except ValueError as error:
        tell(error=str(error))
    async with zc.init(num_cpus=1, loop="asyncio"):
        tell(begun=True)
asyncio.run(main())
"""
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    with Program(program, env={"PYTHONPATH": path}) as ran:
        assert ran.told("error").startswith("the setting loop is 'uvloop', which cannot be imported (cannot open")
        assert ran.told("begun")
        assert ran.status() == 0


def test_an_unknown_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCACTOR_LOOP", "trio")
    with pytest.raises(ValueError, match="'trio'; valid values: auto, uvloop, asyncio"):
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


def test_a_program_that_is_no_coroutine() -> None:
    async def main() -> None: ...

    async def many() -> AsyncIterator[int]:
        yield 1

    wrong: list[tuple[Any, str]] = [
        (main, r"got the function itself: call it, zc.run\(main\(\)\)$"),
        (None, r"got None, what a plain function has returned: define it by 'async def main\(\):'$"),
        (many(), "got an async_generator, because there is a yield in its function: return instead$"),
        (3, "got an object of type int$"),
    ]
    for given, advice in wrong:
        with pytest.raises(TypeError, match=f"^zc.run takes the coroutine that an async function makes, .*{advice}"):
            run(given)


def test_the_finer_clock() -> None:
    async def seconds() -> tuple[float, float, float, float]:
        loop = asyncio.get_running_loop()
        return loop.time(), time.perf_counter(), fine_time(loop), loop.time()

    before, _, found, after = asyncio.run(seconds())
    assert before <= found <= after
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        _, before, found, _ = runner.run(seconds())
    assert before <= found


TERMINATED = """
async def main():
    tell(up=True)
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        tell(left_in_order=True)
zc.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_sigterm_cancels_a_program(loop: str) -> None:
    with Program(TERMINATED, env={"ZCACTOR_LOOP": loop}) as program:
        assert program.told("up")
        program.process.send_signal(signal.SIGTERM)
        assert program.told("left_in_order")
        assert program.status() == 143
        assert program.stderr() == ""


def test_a_handler_of_the_program_stays() -> None:
    async def mine() -> object:
        return signal.getsignal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert run(mine()) is signal.SIG_IGN
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert callable(run(mine()))
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_cancels_once_and_not_beside_ctrl_c() -> None:
    cancelled = []

    async def main(ctrl_c: bool) -> str:
        if ctrl_c:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(2):
            try:
                for _ in range(20):
                    await asyncio.sleep(0)
            except asyncio.CancelledError:
                cancelled.append(ctrl_c)
        if ctrl_c:
            return "main decides"
        raise asyncio.CancelledError

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert run(main(ctrl_c=True)) == "main decides"
        with pytest.raises(SystemExit) as raised:
            run(main(ctrl_c=False))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert raised.value.code == 143
    assert cancelled == [True, False]


def test_sigterm_ends_forks_whenever_it_comes() -> None:
    async def main() -> int:
        for _ in range(100):
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)  # ends it where the signal was lost
                ctypes.CDLL(None).sem_wait(ctypes.create_string_buffer(64))
                os._exit(0)
            os.kill(pid, signal.SIGTERM)
            if (status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) != -signal.SIGTERM:
                return status
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return -signal.SIGTERM

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert run(main()) == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
