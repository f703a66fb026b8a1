"""The program of a member that is alone in its process: ``python -m tests.hosts.member HOST [CAPACITY_MIB]``.

It takes commands as lines of JSON on its standard input, runs them side by side, and answers each; see
`tests.hosts.netns.Program`.
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
from zcactor.api.remote_actor import RemoteActor
from zcactor.errors import ZcactorError
from zcactor.observe.stats import stats_of

LOOK = 0.005
"""Seconds between two looks at a state that has no event."""


class Commands:
    """The commands of the program: each method is one."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._actors: dict[str, RemoteActor] = {}
        self._begun: list[asyncio.Task[tuple[float, Any]]] = []

    async def about(self) -> dict[str, Any]:
        """The name, address and actor of this member."""
        return {
            "name": self._member.name.hex(), "address": self._member.endpoint.address, "index": self._member.index
        }  # fmt: skip

    async def meet(self, name: str, address: str, index: int) -> None:
        """Make another member known; later calls go to its actor. This opens no connection."""
        self._member.addresses[name] = address
        self._actor = self._member.probe_at(bytes.fromhex(name), index)

    async def exchange(self, nbytes: int, seed: int) -> bool:
        """Pass an array, get one, and get a doubled one; return whether every byte was right."""
        ours = zc.empty(nbytes // 8)
        ours[:] = pattern(seed, nbytes)
        passed = await call(self._actor, "received", ours) == checksum(ours)
        theirs = await call(self._actor, "made", seed + 1, nbytes)
        got = checksum(theirs) == checksum(pattern(seed + 1, nbytes))
        twice = await call(self._actor, "doubled", ours)
        return passed and got and bool(np.array_equal(twice, 2 * ours))

    async def add(self, count: int, at_once: int) -> int:
        """Make `count` small calls; return how many had the right result."""
        right = 0
        for start in range(0, count, at_once):
            numbers = range(start, min(start + at_once, count))
            sums = await asyncio.gather(*(call(self._actor, "add", number, 7) for number in numbers))
            right += sum(found == number + 7 for found, number in zip(sums, numbers, strict=True))
        return right

    async def note(self, start: int, stop: int, nbytes: int) -> None:
        """Let the actor note numbers, all at once, with an array after every 16th number where `nbytes` is not 0."""
        refs = []
        for number in range(start, stop):
            refs.append(call(self._actor, "note", number))
            if nbytes and number % 16 == 0:
                array = zc.empty(nbytes // 8)
                array[:] = number
                refs.append(call(self._actor, "received", array))
        await asyncio.gather(*refs)

    async def noted(self) -> list[int]:
        """The numbers that this member's actor has noted."""
        return self._member.probe.noted

    async def begin(self, method: str, count: int, args: list[Any]) -> None:
        """Begin calls; `outcomes` returns their ends."""
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
        """Let the actor note a number in every interval until a call fails; return each call's end, time and kind."""
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
        """Wait for the begun calls; return the time and the kind of each one's end."""
        found = [await task for task in self._begun]
        self._begun.clear()
        return found

    async def noting(self, number: int, times: int) -> None:
        """Return when the actor here has noted this number so many times."""
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
        """Return when arrays take so many bytes of the store here, which shows that a pull of them is under way."""
        while self._member.process.store.stats().used < nbytes:
            await asyncio.sleep(LOOK)

    async def alone(self) -> list[Any]:
        """Wait until no session is left; return the time and the cause of each one's end."""
        await self._member.alone()
        return self._member.lost

    async def lost(self) -> list[Any]:
        """The time and the cause of the end of each session that has ended."""
        return self._member.lost

    async def settle(self) -> None:
        """Return when no lease is left, and no byte of the store is in use."""
        while (found := stats_of(self._member.process)).leases or found.store_used:
            gc.collect()
            await asyncio.sleep(LOOK)

    async def stats(self) -> dict[str, Any]:
        """The statistics of the process."""
        return stats_of(self._member.process).plain()


async def main(host: str, mib: str = "16") -> None:
    """Serve commands until the input ends."""
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
