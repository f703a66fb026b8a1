"""Random programs that pass arrays, go on to write to them, and look at what the receivers have.

::

    python -m tests.promises.snapshots --programs 10000 --seed 1 [--worlds local,tcp,fabric] [--first 17] [--careful]

Each program is drawn by the seed and its number alone. The rule: a receiver has, now and later, the bytes of the moment
of the call. A program that breaks it is made shorter, and printed as a list of steps. ``--careful`` draws only programs
that pass whole arrays under a name of their own.

Not written to: views, and other objects over the same memory, that were taken before their whole owner was passed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import signal
import sys
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

import zcactor as zc
from tests.promises.recipes import (
    DTYPES,
    FRAMES,
    IDIOMS,
    MAKERS,
    PARTS,
    SIZES,
    can_travel,
    digest,
    make,
    part_of,
    write,
)

__all__ = ["PATIENCE", "WORLDS", "Desk", "Fabric", "World", "draw", "play", "shown", "shrink", "world"]

PATIENCE: Final = 60.0
"""Seconds after which a program counts as hanging: a watchdog, no statement about speed."""
WORLDS: Final = ("local", "tcp", "fabric")
OVER: Final = frozenset(
    {
        "memoryview", "memoryview.cast", "frombuffer", "asarray(memoryview)", "ctypes", "pa.array", "pa.table",
        "pa.py_buffer", "Boxed(x)", "Boxed(memoryview)", "x.view(Sub)",
    }
)  # fmt: skip
"""Parts that hold the array itself and not its owner: nobody can tell them from further names of the array."""
WRAPPERS: Final = ("Boxed", "Series", "DataFrame", "pa.", "torch")
"""Beginnings of the names of parts that pass another object's memory as their own."""
Step = tuple[Any, ...]


@dataclass(eq=False)
class Thing:
    """An object of a desk that has memory.

    Attributes:
        value: the object.
        name: the maker or part.
        parent: the thing that it was taken from.
        passed: whether its whole owner was passed after it was taken.
    """

    value: Any
    name: str
    parent: Thing | None = None
    passed: bool = False

    @property
    def whole(self) -> bool:
        """Whether it is the owner of its memory."""
        return self.parent is None and (
            not isinstance(self.value, np.ndarray) or self.value.base is None or self.name == "zc.zeros"
        )

    def comes_from(self, other: Thing) -> bool:
        """Whether it was taken from `other`, or from a part of it."""
        return self.parent is not None and (self.parent is other or self.parent.comes_from(other))


@dataclass
class Wrapped:
    """A dataclass around an array."""

    value: Any


def wrapped(value: Any, way: int) -> Any:
    """`value` in a container, or as it is."""
    return {1: [value], 2: {"x": value}, 3: (1, value), 4: Wrapped(value)}.get(way, value)


def unwrapped(value: Any) -> Any:
    """The opposite of `wrapped`."""
    if isinstance(value, Wrapped):
        return value.value
    if isinstance(value, (list, tuple)):
        return value[-1]
    return value["x"] if isinstance(value, dict) else value


class Desk:
    """The objects of one place of a program, an actor or the driver: those to pass, and those that were received."""

    def __init__(self) -> None:
        self.things: list[Thing] = []
        self.kept: dict[int, tuple[Any, int]] = {}
        self.sent: dict[int, int] = {}
        self.forks: list[tuple[int, int]] = []

    def reset(self) -> None:
        """Forget all, and let the children end."""
        self.join()
        self.things.clear()
        self.kept.clear()
        self.sent.clear()

    # ------------------------------------------------------------ objects

    def thing(self, which: int) -> Thing | None:
        """The thing of that number, counted from the newest, among those that can travel."""
        can = [each for each in self.things if can_travel(each.value)]
        return can[-1 - which % len(can)] if can else None

    def make(self, name: str, size: int, dtype: int, value: int) -> None:
        """Make a thing."""
        self.things.append(Thing(make(name, size, DTYPES[dtype], value), name))

    def part(self, which: int, name: str) -> None:
        """Take a part of a thing, where it has such a part."""
        if not self.things:
            return
        thing = self.things[-1 - which % len(self.things)]
        made = part_of(thing.value, name)
        if made is not None:
            self.things.append(Thing(made, name, thing, thing.passed))

    def drop(self, which: int) -> None:
        """Drop the name of a thing. Its parts stay."""
        if self.things:
            thing = self.things.pop(-1 - which % len(self.things))
            for each in self.things:
                if each.parent is thing:
                    each.parent = Thing(None, f"{thing.name}, dropped", thing.parent)
            del thing

    def write(self, which: int, value: int) -> None:
        """Write to a thing, or with a number below zero to all of them."""
        for index, thing in enumerate(self.things):
            if not thing.passed and (which < 0 or index == which % len(self.things)):
                write(thing.value, value + index)

    def note(self, thing: Thing | None, label: int) -> Any:
        """Note that a thing is passed now, with its bytes. Returns the object."""
        if thing is None:
            self.sent[label] = digest(b"")
            return b""
        top = thing
        while top.parent is not None and top.name.startswith(WRAPPERS):
            top = top.parent
        for each in self.things:
            if each is not thing and each.comes_from(top):
                each.passed = each.passed or top.whole or _through_buffer(each, top)
        self.sent[label] = digest(thing.value)
        return thing.value

    # ------------------------------------------------------------ passing

    def fresh(self, label: int, name: str, size: int, dtype: int, value: int) -> Any:
        """Make an array that nobody else holds, and note its bytes."""
        made = make(name, size, DTYPES[dtype], value)
        self.sent[label] = digest(made)
        return made

    def give(self, which: int, label: int, way: int) -> Any:
        """A result."""
        return wrapped(self.note(self.thing(which), label), way)

    def put(self, which: int, label: int) -> list[Any]:
        """A reference to a thing."""
        return [zc.put(self.note(self.thing(which), label))]

    def items(self, which: int, label: int, value: int) -> Iterator[Any]:
        """Yield a thing three times, and write in between."""
        for number in range(3):
            yield self.note(self.thing(which), label + number)
            self.write(-1, value + number)

    def give_away(self, which: int, label: int) -> Any:
        """Move a thing out, or return a text that says why not."""
        thing = self.thing(which)
        if thing is None or not isinstance(thing.value, np.ndarray):
            return "no array"
        self.sent[label] = digest(thing.value)
        try:
            moved = zc.move(thing.value)
        except (TypeError, ValueError) as error:
            return repr(error)
        # Objects that hold the array itself cannot use it any more, either.
        self.things = [each for each in self.things if getattr(each.value, "buffer", each.value) is not thing.value]
        return moved

    def freeze(self, which: int, label: int) -> str:
        """Freeze a thing, and keep what that gives."""
        thing = self.thing(which)
        if thing is None or not isinstance(thing.value, np.ndarray):
            return ""
        for each in self.things:
            if each is not thing and each.comes_from(thing):
                each.passed = each.passed or thing.whole or _through_buffer(each, thing)
        before = digest(thing.value)
        frozen = zc.freeze(thing.value)  # type: ignore[attr-defined, unused-ignore]
        self.kept[label] = frozen, before
        self.things.append(Thing(frozen, "freeze"))
        if frozen.flags.writeable or digest(frozen) != before:
            return "what zc.freeze gives is writable, or has other bytes"
        return ""

    def sent_as(self, label: int) -> int:
        """The digest at the moment of passing."""
        return self.sent[label]

    def keep(self, label: int, value: Any = None, own: bool = False) -> int:
        """Keep what was received. Returns its digest.

        Args:
            label: its number in the program.
            value: the object.
            own: whether it was moved here.
        """
        value = unwrapped(value)
        seen = digest(value)
        if own:
            self.things.append(Thing(value, "zc.zeros"))
            return seen
        used = label % 4 == 0 and isinstance(value, np.ndarray)
        if used:
            self.things.append(Thing(value, "received"))
        if not used or not value.flags.writeable:  # a small argument is this actor's to write to
            self.kept[label] = value, seen
        return seen

    def changed(self) -> list[int]:
        """The labels of objects that have changed since they were received."""
        return [label for label, (value, seen) in self.kept.items() if digest(value) != seen]

    # ------------------------------------------------------------ forks

    def digests(self) -> list[int]:
        """The digests of all that the desk has."""
        return [digest(each.value) for each in self.things] + [digest(value) for value, _ in self.kept.values()]

    def fork(self, value: int) -> None:
        """Fork a child that looks at what it has when `join` lets it, and then writes to all of it."""
        before = self.digests()
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: the process has threads
            pid = os.fork()
        if pid == 0:
            code = 2
            try:
                gc.disable()
                signal.alarm(int(PATIENCE))
                os.close(writing)
                os.read(reading, 1)
                code = int(self.digests() != before)
                for thing in self.things:
                    write(thing.value, value)
            finally:
                os._exit(code)
        os.close(reading)
        self.forks.append((pid, writing))

    def join(self) -> str:
        """Let the children end. Returns what was wrong in one, or with what they left here."""
        said = ""
        before = self.digests() if self.forks else []
        while self.forks:
            pid, writing = self.forks.pop()
            os.close(writing)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if status:
                said = "a forked child sees changes" if status == 1 else f"a forked child ended with {status}"
        if before and self.digests() != before:
            said = "the writes of a forked child show in its parent"
        return said

    # ------------------------------------------------------------ groups

    async def reduce(self, group: Any, making: Sequence[Any], part: str, value: int, into: bool) -> str:
        """Sum an array over the group, and write to all that can still write while the sum is under way.

        Returns:
            The fault, or an empty text.
        """
        name, size = making
        desk = Desk()
        desk.make(name, size, 0, value + group.rank)
        taken = part_of(desk.things[0].value, part)
        taken = desk.things[0].value if not isinstance(taken, np.ndarray) else taken
        both = await group.allgather(np.array([digest(taken)], "u8"))
        parts = [each.copy() for each in await group.allgather(taken.copy(), concat=False)]
        desk.note(desk.things[0], 0)  # views taken before are not written to
        if taken is not desk.things[0].value:
            desk.things.append(Thing(taken, part, desk.things[0]))
        out = np.zeros(taken.shape, taken.dtype) if into else None
        work = group.allreduce(taken, out=out) if into else group.allreduce(taken)
        desk.write(-1, value + 7)
        result = await work
        want = np.sum(parts, axis=0, dtype=taken.dtype)
        good = np.array_equal(result, want) and len(both) == group.size
        desk.write(-1, value + 9)
        return "" if good and np.array_equal(result, want) else f"rank {group.rank}: a sum of other bytes"

    def through_graph(self, value: Any, constant: Any) -> tuple[int, int]:
        """A step of a graph."""
        self.kept[-len(self.kept) - 1] = value, digest(value)
        return digest(value), digest(constant)


def _through_buffer(thing: Thing, top: Thing) -> bool:
    while thing.parent is not None and thing.parent is not top:
        thing = thing.parent
    return thing.name in OVER


DeskActor: Any = zc.actor(Desk)


# ---------------------------------------------------------------- worlds


class World:
    """A runtime with a desk in the driver, and one in each of several actors.

    Attributes:
        desks: the actors' handles.
        group: of the first two actors.
    """

    able: frozenset[str] = frozenset(
        {"give", "put", "items", "move", "take", "graph", "reduce", "fork", "freeze", "fresh_result"}
    )

    def __init__(self, desks: list[Any], group: Any) -> None:
        self.desks = desks
        self.group = group

    def call(self, place: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a desk; 0 is the driver's, whose methods are not called by this."""
        return getattr(self.desks[(place - 1) % len(self.desks)], method)(*args, **kwargs)


class Fabric(World):
    """Two processes on a fake RDMA fabric, in this one. They only have calls with arguments."""

    able = frozenset({"freeze"})

    def call(self, place: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """See `World.call`."""
        from zcactor.api.future import ObjectRef

        actor = self.desks[0]
        return ObjectRef(actor.call(actor.interface.by_name[method], args, kwargs, None, 0))


@asynccontextmanager
async def world(name: str) -> AsyncIterator[World]:
    """Start a world.

    Args:
        name: one of `WORLDS`.
    """
    if name == "fabric":
        async with _fabric() as actor:
            yield Fabric([actor], None)
        return
    async with zc.init(transports=[name], log_to_driver=False):
        own = [await DeskActor.spawn() for _ in range(2)]
        shared = [await DeskActor.options(process="shared").spawn() for _ in range(2)]
        yield World(own + shared, await zc.group(own))


@asynccontextmanager
async def _fabric() -> AsyncIterator[Any]:
    from tests.assembly.test_process_verbs import Pair
    from zcactor.api.remote_actor import RemoteActor
    from zcactor.ids import ActorId
    from zcactor.interface import Interface
    from zcactor.objectstore.heap import use_handler

    async with Pair() as (caller, owner, _):
        index = owner.hosts.take_index()
        owner.hosts.add(index, Desk, "Desk").adopt(Desk())
        previous = caller.use_numpy()
        try:
            place = (owner.process, index)
            yield RemoteActor(caller, ActorId(b"d" * 16), Interface.of(Desk), place, None, "default", 100, 0)
        finally:
            use_handler(previous)


# ---------------------------------------------------------------- programs

_SLOW: Final = {"asarray(list)", "vectorize", "genfromtxt", "loadtxt", "column_stack", "take", "svd", "qr", "solve"}


def draw(seed: object, *, careful: bool = False) -> list[Step]:
    """The program of a seed.

    Args:
        seed: any object, of whose text all follows.
        careful: draw a program that passes whole arrays by name only.
    """
    chance = random.Random(str(seed))
    small = chance.randrange

    def making() -> tuple[str, int]:
        if careful:
            return chance.choice(("np.zeros", "zc.zeros")), chance.choice(SIZES)
        name = chance.choice(tuple(chance.choice((tuple(MAKERS), tuple(IDIOMS), tuple(IDIOMS), FRAMES))))
        sizes = SIZES if name in MAKERS else SIZES[2:8] if name in _SLOW else SIZES[2:]
        return name, chance.choice(sizes)

    def place() -> int:
        return chance.choice((0, 0, 1, 2, 3, 4))

    def one(kind: str) -> Step:
        if kind == "make":
            return "make", place(), *making(), small(len(DTYPES)), small(250)
        if kind == "part":
            return "part", place(), small(3), chance.choice(list(PARTS))
        if kind == "drop":
            return "drop", place(), small(4)
        if kind == "write":
            return "write", place(), chance.choice((-1, -1, 0, 1, 2)), small(250)
        if kind == "pass":
            return "pass", small(1, 5), small(4), small(6), small(2), small(250)
        if kind == "fresh":
            return "fresh", place(), small(1, 5), *making(), small(len(DTYPES)), small(250)
        if kind == "give":
            return "give", small(1, 5), small(5), small(4), small(6)
        if kind == "put":
            return "put", place(), small(4)
        if kind == "read":
            return "read", place(), small(6)
        if kind == "items":
            return "items", small(1, 5), small(4), small(250)
        if kind == "move":
            return "move", small(1, 5), small(4)
        if kind == "take":
            return "take", small(1, 5), small(4)
        if kind == "freeze":
            return "freeze", place(), small(4)
        if kind == "graph":
            return "graph", small(1, 5), small(4), small(4), small(250)
        if kind == "reduce":
            name, size = chance.choice(list(IDIOMS)), chance.choice(SIZES[2:])
            return (
                "reduce",
                name,
                min(size, SIZES[7]) if name in _SLOW else size,
                chance.choice(list(PARTS)),
                small(250),
                small(2),
            )
        return "fork", place(), small(250)

    careful_kinds = "make make write write write pass pass pass give give put read read check"
    kinds = (
        "make make part part part part write write write write drop drop pass pass pass pass fresh give give give "
        "put put read read read items move take freeze check check"
    )
    weights = (careful_kinds if careful else kinds).split() * 3 + (
        [] if careful else ["graph", "reduce", "reduce", "fork"]
    )
    steps = [("make", place(), *making(), small(len(DTYPES)), small(250)) for _ in range(3)]
    steps += [("check",) if kind == "check" else one(kind) for kind in chance.choices(weights, k=chance.randint(8, 24))]
    return steps


class _Broken(AssertionError):
    """The fault that a program found."""


class _Play:
    """One run of a program."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.desk = Desk()
        self.refs: list[tuple[Any, int, int, int]] = []
        self.labels = 0

    def label(self) -> int:
        self.labels += 3
        return self.labels

    def on(self, place: int, method: str, *args: Any) -> Any:
        """Call a method of a desk. Its result can be awaited."""
        if place:
            return self.world.call(place, method, *args)

        async def local() -> Any:
            return getattr(self.desk, method)(*args)

        return local()

    def same(self, seen: int, sent: int, what: str) -> None:
        if seen != sent:
            raise _Broken(f"{what}: the receiver has other bytes than those of the moment of the call")

    async def step(self, step: Step) -> None:
        kind, *args = step
        if kind in ("make", "part", "drop", "write"):
            place, *rest = args
            if place and "give" not in self.world.able:
                place = 0
            await self.on(place, kind, *rest)
        elif kind == "check":
            await self.check()
        elif kind in {"pass", "fresh"} or (kind == "freeze" and not hasattr(zc, "freeze")):
            if kind != "freeze":
                await getattr(self, "_pass" if kind == "pass" else "_fresh")(*args)
        elif kind == "read" or kind in self.world.able:
            await getattr(self, f"_{kind}")(*args)

    async def _pass(self, to: int, which: int, way: int, late: int, value: int) -> None:
        label = self.label()
        thing = self.desk.thing(which)
        sent = self.desk.note(thing, label)
        if way == 5:
            done = self.world.call(to, "keep", label, value=sent)
        else:
            done = self.world.call(to, "keep", label, wrapped(sent, way))
        del sent, thing
        if late:
            self.desk.write(-1, value)
        self.same(await done, self.desk.sent[label], f"argument {label}")

    async def _fresh(self, place: int, to: int, *making: Any) -> None:
        label = self.label()
        if place and "fresh_result" in self.world.able:
            self.same(self.desk.keep(label, await self.world.call(place, "fresh", label, *making)),
                      await self.world.call(place, "sent_as", label), f"fresh result {label}")  # fmt: skip
        else:
            seen = await self.world.call(to, "keep", label, self.desk.fresh(label, *making))
            self.same(seen, self.desk.sent[label], f"fresh argument {label}")

    async def _give(self, place: int, to: int, which: int, way: int) -> None:
        label = self.label()
        ref = self.world.call(place, "give", which, label, way)
        sent = await self.world.call(place, "sent_as", label)
        seen = await self.world.call(to, "keep", label, ref) if to else self.desk.keep(label, await ref)
        self.same(seen, sent, f"result {label}")
        self.refs.append((ref, sent, label, place))

    async def _put(self, place: int, which: int) -> None:
        label = self.label()
        (ref,) = await self.on(place, "put", which, label)
        self.refs.append((ref, await self.on(place, "sent_as", label), label, place))

    async def _read(self, place: int, which: int) -> None:
        if self.refs:
            ref, sent, origin, _ = self.refs[which % len(self.refs)]
            label = self.label()
            seen = await self.world.call(place, "keep", label, ref) if place else self.desk.keep(label, await ref)
            self.same(seen, sent, f"read {label} of reference {origin}")

    async def _items(self, place: int, which: int, value: int) -> None:
        label = self.label()
        seen = [self.desk.keep(label, item) async for item in self.world.call(place, "items", which, label, value)]
        for number, each in enumerate(seen):
            self.same(each, await self.world.call(place, "sent_as", label + number), f"item {label + number}")

    async def _move(self, to: int, which: int) -> None:
        label = self.label()
        before = self.desk.digests()
        moved = self.desk.give_away(which, label)
        if isinstance(moved, str):
            return
        left = self.desk.digests()
        try:
            done = self.world.call(to, "keep", label, moved, True)
            del moved
            seen = await done
        except (TypeError, ValueError) as error:
            if "zc.move" not in str(error):
                raise
            return  # refused
        self.same(seen, self.desk.sent[label], f"moved argument {label}")
        await self.world.call(to, "write", -1, label)
        if self.desk.digests() != left:
            raise _Broken(f"move {label} of one of {len(before)}: the new owner's writes show at the sender")
        at = self.world.call(to, "digests")
        there = await at
        self.desk.write(-1, label + 5)
        if await self.world.call(to, "digests") != there:
            raise _Broken(f"move {label}: the sender's writes show at the new owner")

    async def _take(self, place: int, which: int) -> None:
        label = self.label()
        try:
            moved = await self.world.call(place, "give_away", which, label)
        except (TypeError, ValueError) as error:
            if "zc.move" not in str(error):
                raise
            return  # refused
        if isinstance(moved, str):
            return
        self.same(
            self.desk.keep(label, moved, True), await self.world.call(place, "sent_as", label), f"moved result {label}"
        )
        left = await self.world.call(place, "digests")
        self.desk.write(-1, label)
        if await self.world.call(place, "digests") != left:
            raise _Broken(f"taking {label}: the new owner's writes show at the sender")

    async def _freeze(self, place: int, which: int) -> None:
        if place and "give" not in self.world.able:
            place = 0
        said = await self.on(place, "freeze", which, self.label())
        if said:
            raise _Broken(said)

    async def _graph(self, to: int, which: int, other: int, value: int) -> None:
        first, second = self.label(), self.label()
        constant = self.desk.note(self.desk.thing(other), second)
        async with zc.graph() as graph:
            given = graph.input()
            bound = self.world.desks[(to - 1) % len(self.world.desks)].through_graph.bind(given, constant)
            graph.output(bound)
        del constant
        run = await graph.compile()
        for number in range(3):
            done = run(self.desk.note(self.desk.thing(which), first))
            sent = self.desk.sent[first]
            self.desk.write(-1, value + number)
            seen, was = await done
            self.same(seen, sent, f"run {number}: input {first} of a graph")
            self.same(was, self.desk.sent[second], f"run {number}: constant {second} of a graph")
        await run.close()

    async def _reduce(self, *args: Any) -> None:
        name, size, part, value, into = args
        calls = [
            self.world.call(place, "reduce", self.world.group, (name, size), part, value, into) for place in (1, 2)
        ]
        said = [each for each in await asyncio.gather(*calls) if each]
        if said:
            raise _Broken(f"allreduce: {', '.join(said)}")

    async def _fork(self, place: int, value: int) -> None:
        await self.on(place, "fork", value)

    def places(self) -> range:
        return range(len(self.world.desks) + 1)

    async def check(self) -> None:
        """Look at all that was received."""
        for place in self.places():
            changed = await self.on(place, "changed")
            if changed:
                raise _Broken(
                    f"what {'the driver' if not place else f'actor {place}'} received as {changed} has changed"
                )

    async def join(self) -> None:
        """Let all forked children end."""
        said = [await self.on(place, "join") for place in self.places()]
        if any(said):
            raise _Broken(", ".join(filter(None, said)))


async def play(world: World, steps: Sequence[Step]) -> str:
    """Run a program.

    Returns:
        The fault, or an empty text.
    """
    run = _Play(world)
    number = -1
    try:
        async with asyncio.timeout(PATIENCE):
            try:
                for number, step in enumerate(steps):  # noqa: B007  # read below
                    await run.step(step)
                number += 1
                await run.check()
                await run.join()
            finally:
                run.refs.clear()
                for place in run.places():
                    await run.on(place, "reset")
    except _Broken as broken:
        return f"step {number}: {broken}"
    except TimeoutError:
        return f"step {number}: no end in {PATIENCE:.0f} s"
    except (TypeError, ValueError, BufferError, zc.ZcactorError) as error:
        return f"step {number}: raised {type(error).__name__}: {error}"
    return ""


async def shrink(world: World, steps: list[Step], tries: int = 80) -> list[Step]:
    """A shorter program that is wrong as well.

    Args:
        world: where it is wrong.
        steps: the program.
        tries: how many programs are run for this at most.
    """
    length = max(1, len(steps) // 2)
    while length and tries:
        at = 0
        while at < len(steps) and tries:
            tries -= 1
            shorter = steps[:at] + steps[at + length :]
            if await play(world, shorter):
                steps = shorter
            else:
                at += length
        length //= 2
    return steps


def shown(steps: Sequence[Step]) -> str:
    """A program as a text."""
    return "\n".join(f"    {number:2d} {' '.join(map(repr, step))}" for number, step in enumerate(steps))


async def find(
    name: str, seed: object, numbers: range, *, careful: bool = False, without: Sequence[str] = (), stop: int = 1
) -> list[str]:
    """Run programs in one world, and describe those that are wrong, `stop` at most."""
    found: list[str] = []
    async with world(name) as place:
        for number in numbers:
            steps = [step for step in draw(f"{seed}/{number}", careful=careful) if step[0] not in without]
            said = await play(place, steps)
            if said:
                steps = await shrink(place, steps)
                again = (
                    f"python -m tests.promises.snapshots --worlds {name} --seed {seed} --first {number} --programs 1"
                )
                found.append(f"{name}: {await play(place, steps) or said}\n{shown(steps)}\n  again: {again}")
                if len(found) >= stop:
                    break
    return found


__all__ += ["find"]


def main(words: Sequence[str] | None = None) -> int:
    """Run programs, and print those that are wrong. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.promises.snapshots", description=__doc__)
    parser.add_argument("--programs", type=int, default=300, help="how many, divided among the worlds")
    parser.add_argument("--seed", default=str(random.randrange(1 << 30)))
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--worlds", default=",".join(WORLDS))
    parser.add_argument("--careful", action="store_true", help="pass only whole arrays")
    parser.add_argument("--without", default="", help="kinds of steps to leave out: reduce,fork,graph,move,take,...")
    parser.add_argument("--stop", type=int, default=1, help="how many wrong programs to look for in each world")
    options = parser.parse_args(words)
    names = options.worlds.split(",")
    each = -(-options.programs // len(names))
    print(f"seed {options.seed}", flush=True)
    status = 0
    for turn, name in enumerate(names):
        first = options.first + turn * each
        numbers, without = range(first, first + each), options.without.split(",")
        found = zc.run(find(name, options.seed, numbers, careful=options.careful, without=without, stop=options.stop))
        print(f"{name}: {each} programs, {len(found)} wrong", *found, sep="\n", flush=True)
        status |= bool(found)
    return status


if __name__ == "__main__":
    sys.exit(main())
