"""The one runtime of a process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

import zcactor as zc
from zcactor.errors import ForkedProcess, NotInitialized
from zcactor.process import context

PROCESS: Any = object()


@pytest.fixture(autouse=True)
def nothing_runs() -> Iterator[None]:
    assert context.current_or_none() is None
    yield
    context.set_current(PROCESS)  # clears the mark of a fork
    context.clear_current()


def test_nothing_runs() -> None:
    with pytest.raises(NotInitialized, match=r"async with zc\.init\(\)"):
        context.current()
    assert context.call_deadline.get() is None
    assert context.current_host.get() is None


def test_set_and_clear() -> None:
    context.set_current(PROCESS)
    assert context.current() is PROCESS
    assert context.current_or_none() is PROCESS
    context.clear_current()
    with pytest.raises(NotInitialized):
        context.current()


def test_after_a_fork() -> None:
    context.set_current(PROCESS)
    context.mark_forked(4242)
    assert context.current_or_none() is None
    with pytest.raises(ForkedProcess, match="4242"):
        context.current()
    context.set_current(PROCESS)  # the child starts a runtime of its own
    assert context.current() is PROCESS


async def test_everything_public_says_so() -> None:
    class Some:
        pass

    for operation in (
        lambda: zc.spawn(Some),
        lambda: zc.get_actor("x"),
        lambda: zc.nodes(),
        lambda: zc.actors(),
        lambda: zc.available_resources(),
        lambda: zc.cluster_resources(),
    ):
        with pytest.raises(NotInitialized):
            await operation()
    for function in (lambda: zc.put(1), lambda: zc.zeros(3), lambda: zc.stats(), lambda: zc.current_actor()):
        with pytest.raises(NotInitialized):
            function()
    with pytest.raises(NotInitialized):
        await zc.shutdown()


@pytest.mark.slow
async def test_a_forked_child_is_told() -> None:
    async with zc.init(num_cpus=1):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                context.current()
            except ForkedProcess as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.close(write)
        os.waitpid(pid, 0)
        with os.fdopen(read) as pipe:
            assert f"forked from process {os.getpid()}" in pipe.read()

        class Fine:
            def method(self) -> str:
                return "fine"

        handle: Any = await zc.spawn(Fine)
        assert await handle.method() == "fine"
