"""The program of a member that is alone in its process: ``python -m tests.hosts.member HOST [CAPACITY_MIB]``.

It does what lines of JSON on its standard input say, all at once, and answers each; see `tests.hosts.netns.Program`.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import sys
import time
from typing import Any

import numpy as np
import uvloop

import zcactor as zc
from tests.hosts.members import MIB, Member, call, checksum, outcome_of, pattern
from zcactor.errors import ZcactorError
from zcactor.handle import RemoteActor
from zcactor.observe.stats import stats_of

LOOK = 0.005
"""Seconds between two looks at what nobody tells."""


class Commands:
    """What the program does; each method is a command."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._actors: dict[str, RemoteActor] = {}
        self._begun: list[asyncio.Task[tuple[float, Any]]] = []

    async def about(self) -> dict[str, Any]:
        """Who this is."""
        return {
            "name": self._member.name.hex(), "address": self._member.endpoint.address, "index": self._member.index
        }  # fmt: skip

    async def meet(self, name: str, address: str, index: int) -> None:
        """Somebody else; calls go to the last one that was met. Nothing is connected yet."""
        self._member.addresses[name] = address
        self._actor = self._member.probe_at(bytes.fromhex(name), index)

    async def exchange(self, nbytes: int, seed: int) -> bool:
        """Pass an array, and get one, and get twice of one; whether each byte was right."""
        ours = zc.empty(nbytes // 8)
        ours[:] = pattern(seed, nbytes)
        passed = await call(self._actor, "received", ours) == checksum(ours)
        theirs = await call(self._actor, "made", seed + 1, nbytes)
        got = checksum(theirs) == checksum(pattern(seed + 1, nbytes))
        twice = await call(self._actor, "doubled", ours)
        return passed and got and bool(np.array_equal(twice, 2 * ours))

    async def add(self, count: int, at_once: int) -> int:
        """How many of so many small calls had the right result."""
        right = 0
        for start in range(0, count, at_once):
            numbers = range(start, min(start + at_once, count))
            sums = await asyncio.gather(*(call(self._actor, "add", number, 7) for number in numbers))
            right += sum(found == number + 7 for found, number in zip(sums, numbers, strict=True))
        return right

    async def note(self, start: int, stop: int, nbytes: int) -> None:
        """Numbers, in order and all at once, and an array now and then between them."""
        refs = []
        for number in range(start, stop):
            refs.append(call(self._actor, "note", number))
            if nbytes and number % 16 == 0:
                array = zc.empty(nbytes // 8)
                array[:] = number
                refs.append(call(self._actor, "received", array))
        await asyncio.gather(*refs)

    async def noted(self) -> list[int]:
        """The numbers that others had this one note."""
        return self._member.probe.noted

    async def begin(self, method: str, count: int, args: list[Any]) -> None:
        """Calls whose end is asked for later."""
        for _ in range(count):
            self._begun.append(asyncio.create_task(self._watched(method, args)))
        await asyncio.sleep(0)

    async def _watched(self, method: str, args: list[Any]) -> tuple[float, Any]:
        try:
            await call(self._actor, method, *args)
        except ZcactorError as error:
            return time.monotonic(), outcome_of(error)
        return time.monotonic(), outcome_of(None)

    async def talk(self, interval: float) -> list[Any]:
        """A number every so often, until a call fails; of each number when its call ended, and how."""
        numbers = itertools.count()
        talking = True

        async def watched(number: int) -> tuple[float, Any]:
            nonlocal talking
            found = await self._watched("note", [number])
            talking = talking and found[1][0] == "value"
            return found

        tasks = []
        while talking:
            tasks.append(asyncio.create_task(watched(next(numbers))))
            await asyncio.sleep(interval)
        return [await task for task in tasks]

    async def outcomes(self) -> list[Any]:
        """When each call that was begun ended, and how, once all have."""
        found = [await task for task in self._begun]
        self._begun.clear()
        return found

    async def noting(self, number: int, times: int) -> None:
        """Return when this number has been noted here so many times, by as many others."""
        while self._member.probe.noted.count(number) < times:
            await asyncio.sleep(LOOK)

    async def waiting(self, count: int) -> None:
        """Return when so many calls wait here."""
        while self._member.probe.waiting < count:
            await asyncio.sleep(LOOK)

    async def cancelled(self, count: int) -> None:
        """Return when so many calls were cancelled here."""
        while self._member.probe.cancelled < count:
            await asyncio.sleep(LOOK)

    async def receiving(self, nbytes: int) -> None:
        """Return when so many bytes of arrays have memory here: a pull of them is under way."""
        while self._member.process.store.stats().used < nbytes:
            await asyncio.sleep(LOOK)

    async def alone(self) -> list[Any]:
        """When each session ended, and why, once there is none."""
        await self._member.alone()
        return self._member.lost

    async def lost(self) -> list[Any]:
        """When each session ended that has, and why."""
        return self._member.lost

    async def settle(self) -> None:
        """Return when nothing is leased, and nothing of the store in use."""
        while (found := stats_of(self._member.process)).leases or found.store_used:
            gc.collect()
            await asyncio.sleep(LOOK)

    async def stats(self) -> dict[str, Any]:
        """What the process has done."""
        return stats_of(self._member.process).plain()


async def main(host: str, mib: str = "16") -> None:
    """Serve commands until there are no more."""
    member = Member(host, int(mib) * MIB)
    member.be_current()
    await member.start()
    commands = Commands(member)
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def do(line: str) -> None:
        command = json.loads(line)
        number, name = command.pop("id"), command.pop("do")
        try:
            answer = {"id": number, "value": await getattr(commands, name)(**command)}
        except (ZcactorError, OSError) as error:
            answer = {"id": number, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)

    while line := await loop.run_in_executor(None, sys.stdin.readline):
        task = asyncio.create_task(do(line))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
