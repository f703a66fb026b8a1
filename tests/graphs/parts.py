"""The actor whose methods the tests of graphs bind."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

import zcactor as zc
from zcactor.errors import ProtocolError
from zcactor.graphs.layout import RUN_BITS
from zcactor.graphs.values import PLAIN, Outcome
from zcactor.process.context import current

__all__ = ["Node", "Opened", "Refused", "failure_of", "line"]


class Refused(BaseException):
    """An error that is no ``Exception``."""


class Opened:
    """A value that raises an error where it is unpickled."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return refuse, (self.kind,)


def refuse(kind: type[BaseException]) -> None:
    """Raise an error in the place of unpickling."""
    raise kind("unpickled")


@zc.actor
class Node:
    """An actor with a method of each kind."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.entered = 0
        self.order: list[Any] = []
        self.kept: list[Any] = []

    def add(self, a: Any, b: Any = 1) -> Any:
        """Add in the actor's thread, and note the first value."""
        self.order.append(a if isinstance(a, int) else None)
        return a + b

    @zc.method(inline=True)
    def inline(self, a: Any, b: Any = 1) -> Any:
        """Add on the loop."""
        return a + b

    async def later(self, a: Any, b: Any = 1, *, c: Any = 0) -> Any:
        """Add in a task."""
        await asyncio.sleep(0)
        return a + b + c

    async def passes(self, a: Any) -> Any:
        """Give the value back once `open` was called."""
        self.entered += 1
        self.order.append(a)
        await self.gate.wait()
        return a

    async def open(self) -> None:
        """Let `passes` go on."""
        self.gate.set()

    async def seen(self) -> list[Any]:
        """The values that the methods have got, in order."""
        return self.order

    async def has_entered(self) -> int:
        """The number of calls of `passes` that have begun."""
        return self.entered

    def raises(self, a: Any) -> Any:
        """Raise where the value is odd."""
        if a % 2:
            raise KeyError(f"odd {a}")
        return a

    def unpicklable(self, a: Any) -> Any:
        """Return a value that cannot travel."""
        return {"lock": a, "gate": os.scandir("/")}

    def array(self, number: float, nbytes: int = 1 << 20) -> Any:
        """Make an array, above the eager limit by default."""
        return np.full(nbytes // 8, float(number))

    def moved(self, number: float) -> Any:
        """Make an array, and hand it over."""
        return zc.move(np.full(1 << 17, float(number)))

    def describe(self, array: Any) -> tuple[bool, float, int]:
        """Whether the array is writable, its first element, and its length."""
        return bool(array.flags.writeable), float(array[0]), len(array)

    def keep(self, array: Any) -> float:
        """Keep the array. Returns its first element."""
        self.kept.append(array)
        return float(array[0])

    def opened(self, kind: type[BaseException] | None) -> Any:
        """Return a value that raises an error where it is unpickled, or none of that kind."""
        return {} if kind is None else Opened(kind)

    def small(self, number: Any) -> Any:
        """Make an array below the eager limit, and hand it over."""
        return zc.move(np.ones(4))

    def length(self, text: str) -> int:
        """The length of a text."""
        return len(text)

    def pair(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Both values."""
        return a, b

    async def items(self, a: int) -> Any:
        """Give numbers."""
        for number in range(a):
            yield number

    async def runs(self, other: Any, numbers: list[int]) -> list[int]:
        """Make a graph of this actor's and another's methods, and run it."""
        own = zc.current_actor().handle
        async with zc.graph() as g:
            g.output(other.add.bind(own.inline.bind(g.input())))
        run = await g.compile()
        found = [await run(number) for number in numbers]
        await run.close()
        return found

    async def break_connection(self, process: bytes) -> None:
        """Note the end of one of two connections to another process."""
        session: Any = SimpleNamespace(peer_process=process, is_replaced=False, given_up="")
        local: Any = current()
        local.graphs().session_left(session, session)

    async def repeat_value(self, key: bytes) -> None:
        """Take the value of a run that has not come, twice."""
        local: Any = current()
        share = local.graphs()._shares[key]
        (duty,) = share._duties.values()
        for run in (3, 2):
            share.arrived(duty.needs[0] << RUN_BITS | run, 7, (), PLAIN)
            refused = ""
            try:
                share.take(duty.needs[0] << RUN_BITS | run, Outcome(0, 7))
            except ProtocolError as error:
                refused = str(error)
            assert refused == f"the value of node 0 in run {run} came twice"
        duty.gathered.clear()

    async def figures(self) -> tuple[int, int]:
        """The number of shares of graphs in this process, and of blocks in its store that others hold."""
        process: Any = current()
        gc.collect()
        return len(process.graphs()._shares), sum(len(session.leases) for session in process.sessions.all())

    def pid(self) -> int:
        """The process id."""
        return os.getpid()


async def line(*methods: Callable[..., Any], in_flight: int = 4, **options: Any) -> Any:
    """Compile a graph of one input that goes through one method after another."""
    async with zc.graph(in_flight=in_flight, **options) as g:
        node = g.input()
        for method in methods:
            node = method.bind(node)  # type: ignore[attr-defined]
        g.output(node)
    return await g.compile()


async def failure_of(reference: Any) -> BaseException:
    """The exception of a run."""
    try:
        await reference
    except Exception as error:
        return error
    raise AssertionError("the run did not fail")
