"""Several `Process` objects in one interpreter: which of them is the current one."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import zcactor as zc
from zcactor.process import context
from zcactor.testing.runtime import LoopbackRuntime


@zc.actor
class Asker:
    def __init__(self) -> None:
        self.at_birth = here()

    def plain(self) -> Any:
        return self.at_birth, here()

    async def later(self) -> Any:
        await asyncio.sleep(0)
        made = await asyncio.create_task(self.task())
        return made, await asyncio.to_thread(here)

    async def task(self) -> str:
        await asyncio.sleep(0)
        return here()

    @zc.method(inline=True)
    def inline(self, array: Any) -> str:
        return here()


def here() -> str:
    return context.current().process.hex()


async def test_each_process_finds_itself(zc_runtime: LoopbackRuntime) -> None:
    head, driver = (inner.process.process.hex() for inner in zc_runtime.all)
    first: Any = await Asker.spawn()
    second: Any = await Asker.spawn()
    found: list[str] = []
    for asker in (first, second):
        places = {*await asker.plain(), *await asker.later(), await asker.inline(zc.zeros(1 << 16))}
        assert len(places) == 1
        found += places
    assert len({head, driver, here(), *found}) == 4
    assert here() == driver


async def test_all_else_belongs_to_the_test(zc_runtime: LoopbackRuntime) -> None:
    found: list[str] = []
    asyncio.get_running_loop().call_soon(lambda: found.append(here()), context=contextvars.Context())
    thread = threading.Thread(target=lambda: found.append(here()))
    thread.start()
    await asyncio.to_thread(thread.join)
    await asyncio.sleep(0)
    assert found == [here(), here()] and here() == zc_runtime.process.process.hex()


async def test_system_and_user_tasks_are_told_apart(zc_runtime: LoopbackRuntime) -> None:
    asker: Any = await Asker.spawn()
    await asker.later()
    head, driver, worker = zc_runtime.all
    assert asyncio.current_task() not in {*head.tasks(), *driver.tasks(), *worker.tasks()}
    assert [task.get_name() for task in worker.tasks()] == ["zcactor.testing Asker"]
    await zc.kill(asker)
    assert worker.ended and not head.ended
    assert worker.left == []
