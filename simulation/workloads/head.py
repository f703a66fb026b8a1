"""Actors under heads that are killed and started again: names, restarts and detached actors that no head may forget."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

import zcactor as zc
from simulation import record as records
from simulation.schedule import TAKE_OVER
from zcactor.errors import NoSuchActor, ZcactorError

if TYPE_CHECKING:
    from simulation.workloads.scene import Scene

__all__ = ["Subject", "Subjects"]

_REFUSALS: Final = ("so it is not restarted again", "could not be restarted")
"""Parts of the causes for which an actor ends that may be restarted any number of times."""
_UNHELD: Final = "so it is not started again"
"""A part of the cause for which an actor with an array among its arguments ends, too: those are with agents and not in
the log, and all of these may be gone."""
_ELEMENTS: Final = 10_000
"""Elements of such an array: more than go with a frame."""


@zc.actor
class Subject:
    """An actor that knows its name.

    Args:
        name: in the record of the run.
        array: an array of ones, for some.
    """

    def __init__(self, name: str, array: Any = None) -> None:
        record = records.current
        record.constructed(name)
        if array is not None and array.sum() != _ELEMENTS:
            record.break_("I5", f"{name} was constructed with an array of other elements")
        self.name = name
        self.life = record.lives(name)

    @zc.method
    async def who(self, number: int) -> tuple[str, int]:
        """The actor's name, and the number of this life."""
        records.current.ran(number, self)
        return self.name, self.life


class Subjects:
    """A driver that spawns, looks up and ends actors, whether there is a head or not. See
    `simulation.workloads.scene.Workload`.

    An actor that was spawned and may be started again any number of times lives until it is ended.

    Args:
        scene: of the run.
    """

    name: ClassVar[str] = TAKE_OVER

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._count = 0
        self._lasting: dict[str, Any] = {}
        """The actors that have to live, by name, each with its handle; None where it is detached and its handle was
        dropped."""
        self._brief: list[tuple[str, Any]] = []
        """Handles of actors that end with their processes."""
        self._with_array: dict[str, None] = {}
        """The names of those that were spawned with an array."""
        self._maybe: dict[str, None] = {}
        """Names of actors of which it is not known whether they live."""

    async def prepare(self) -> None:
        """Spawn an actor of each kind."""
        for lasting in (True, False):
            for detached in (True, False):
                await self._spawn(lasting=lasting, detached=detached)

    async def run(self) -> None:
        """See `Workload.run`."""
        await asyncio.gather(*(self._work() for _ in range(2)))

    async def _work(self) -> None:
        rng = self._scene.rng
        while not self._scene.over:
            what = rng.choice((self._any_spawn, self._call, self._look_up, self._end, self._drop))
            try:
                await what()
            except ZcactorError as error:
                self._scene.record.saw(f"no subject: {type(error).__name__}")
            await self._scene.pause(1.0)

    # ---------------------------------------------------------------- steps

    async def _any_spawn(self) -> None:
        rng = self._scene.rng
        await self._spawn(lasting=rng.random() < 0.6, detached=rng.random() < 0.5)

    async def _spawn(self, *, lasting: bool, detached: bool) -> None:
        rng = self._scene.rng
        self._count += 1
        name = f"subject{self._count}"
        options: dict[str, Any] = {
            "name": name, "node": rng.choice(("spread", "pack", None)), "max_restarts": -1 if lasting else 0,
            "lifetime": "detached" if detached else "owned", "num_cpus": rng.choice((0, 1)),
        }  # fmt: skip
        if rng.random() < 0.3:
            options["process"] = "shared"
        self._maybe[name] = None
        args: list[Any] = [name]
        if rng.random() < 0.3:
            args.append(np.ones(_ELEMENTS))
            self._with_array[name] = None
        handle = await Subject.options(**options).spawn(*args)
        del self._maybe[name]
        if lasting:
            self._lasting[name] = handle
        else:
            self._brief.append((name, handle))

    def _check(self, name: str, said: Any) -> None:
        if said is not None and said[0] != name:
            self._scene.record.break_("I3", f"an actor called {name} says that it is {said[0]}")

    def _lost(self, name: str, why: str) -> None:
        record = self._scene.record
        cause = record.ends.get(name, "")
        unheld = name in self._with_array and _UNHELD in cause
        if not unheld and not any(refusal in cause for refusal in _REFUSALS):
            record.break_("I4", f"{name} was spawned and is lost: {cause or why}")
        self._lasting.pop(name, None)

    async def _call(self) -> None:
        named = [(name, handle) for name, handle in self._lasting.items() if handle is not None] + self._brief
        if named:
            name, handle = self._scene.rng.choice(named)
            _, said = await self._scene.ask("subject", handle.who)
            self._check(name, said)

    async def _look_up(self) -> None:
        if self._lasting:
            name = self._scene.rng.choice(list(self._lasting))
            try:
                handle = await zc.get_actor(name)
            except NoSuchActor as error:
                if name in self._lasting:  # it was not ended meanwhile
                    self._lost(name, str(error))
                return
            _, said = await self._scene.ask("subject", handle.who)
            self._check(name, said)

    async def _end(self) -> None:
        rng = self._scene.rng
        if len(self._lasting) > 2:
            name = rng.choice(list(self._lasting))
            handle = self._lasting.pop(name)
            self._maybe[name] = None
            if handle is None:
                handle = await zc.get_actor(name)
            await (zc.kill if rng.random() < 0.5 else zc.stop)(handle)
            del self._maybe[name]
        elif self._brief:
            self._brief.pop(rng.randrange(len(self._brief)))

    async def _drop(self) -> None:
        """Drop a handle: a named actor needs none."""
        for name, handle in self._lasting.items():
            if handle is not None and self._scene.rng.random() < 0.3:
                self._lasting[name] = None
                self._scene.record.saw("a handle dropped")
                break

    # ---------------------------------------------------------------- the end

    async def finish(self) -> None:
        """Check that each actor lives which has to, and end all of them."""
        record = self._scene.record
        self._brief.clear()
        told = {each.name: each for each in await zc.actors() if each.name is not None and each.state != "dead"}
        drains = record.sometimes.get("a drain began", 0)  # each may move the actor once, which is no restart
        for name in list(self._lasting):
            info = told.get(name)
            if info is None:
                self._lost(name, "the head does not know it")
                continue
            if record.lives(name) > info.restarts + 1 + drains + record.take_overs:
                record.break_("I4", f"{name} has lived {record.lives(name)} times with {info.restarts} restarts")
            operation, said = await self._scene.ask("subject", (await zc.get_actor(name)).who)
            self._check(name, said)
            if operation.outcome != "ok":
                record.break_("I10", f"{name} does not answer at rest: {operation.outcome}")
        self._lasting.clear()
        for name in [name for name in told if name.startswith("subject")]:
            try:
                await zc.kill(await zc.get_actor(name))
            except NoSuchActor:
                continue
