"""Calls run the methods that they name, or raise, also where caller and actor have two versions of a class."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zcactor as zc
from tests.assembly.test_process import Pair as LoopbackPair
from tests.assembly.test_process_verbs import Pair as VerbsPair
from tests.cluster.hosts import Hosts
from zcactor.api.handle import ActorHandle
from zcactor.api.remote_actor import RemoteActor
from zcactor.assembly.process import Process
from zcactor.cluster.daemon import KeptState, StartedNode
from zcactor.ids import new_actor
from zcactor.interface import Interface, MethodKind
from zcactor.transport.loopback.connection import LoopbackFaults

PATIENCE = 120.0

# ---------------------------------------------------------------- one name


@zc.actor
class Replaced:
    """An actor whose methods are replaced while it lives."""

    def plain(self) -> str:
        return "old"

    @zc.method(inline=True)
    def inline(self) -> str:
        return "old"

    async def later(self) -> str:
        return "old"

    def items(self) -> Iterator[str]:
        yield "old"

    def replace(self, how: str) -> None:
        """Replace all methods, on the instance or on the class."""

        def new(*_: object) -> str:
            return "new"

        async def new_later(*_: object) -> str:
            return "new"

        def new_items(*_: object) -> Iterator[str]:
            yield "new"

        target: Any = self if how == "instance" else type(self)
        target.plain = target.inline = new
        target.later, target.items = new_later, new_items

    def own(self) -> list[Any]:
        """The methods as the actor itself calls them."""
        return [self.plain(), self.inline(), list(self.items())]


@pytest.mark.parametrize("how", ["instance", "class"])
@pytest.mark.parametrize("process", ["own", "shared"])
async def test_a_method_that_was_replaced_is_the_one_that_runs(how: str, process: Literal["own", "shared"]) -> None:
    async with zc.init():
        actor: Any = await Replaced.options(process=process).spawn()
        for wanted in ("old", "new"):
            assert [await actor.plain(), await actor.inline(), [each async for each in actor.items()]] == (
                await actor.own()
            )
            assert await actor.later() == await actor.plain() == wanted
            await actor.replace(how)


# ---------------------------------------------------------------- two versions, over each transport

PARAMETERS = (
    "", "a", "a, b", "b, a", "a, b=0", "a=0", "a, *rest", "*rest", "a, /", "a, *, c=0", "a, **more", "*rest, **more",
)  # fmt: skip
FORMS = {
    "plain": "def {name}(self, {parameters}): return [VERSION + {name!r}, {bound}]",
    "inline": "@zc.method(inline=True)\n    def {name}(self, {parameters}): return [VERSION + {name!r}, {bound}]",
    "async": "async def {name}(self, {parameters}): return [VERSION + {name!r}, {bound}]",
    "static": "@staticmethod\n    def {name}({parameters}): return [VERSION + {name!r}, {bound}]",
    "generator": "def {name}(self, {parameters}): yield [VERSION + {name!r}, {bound}]",
    "async generator": "async def {name}(self, {parameters}): yield [VERSION + {name!r}, {bound}]",
    "property": "@property\n    def {name}(self): raise AssertionError('a property was read')",
    "attribute": "{name} = 7",
    "class": "class {name}: pass",
    "private": "def _{name}(self, {parameters}): raise AssertionError('a private method ran')",
    "gone": "",
}
STREAMS = (MethodKind.GENERATOR, MethodKind.ASYNC_GENERATOR)
Member = tuple[str, str, bool]
"""A method's form and parameters, and whether a base class has it, too."""
members = st.tuples(
    st.sampled_from(["plain", "plain", *FORMS]), st.sampled_from(PARAMETERS), st.booleans()
)  # fmt: skip
versions = st.dictionaries(st.sampled_from("abcd"), members)


def made(version: str, described: dict[str, Member]) -> type:
    """The class of one version. A method that its base has, too, is overridden there or inherited."""
    base: list[str] = []
    own: list[str] = []
    for name, (form, parameters, inherits) in described.items():
        names = [each.strip("* ").partition("=")[0] for each in parameters.split(",")]
        bound = f"dict({', '.join(f'{each}={each}' for each in names if each and each != '/')})"
        bound = bound.replace("rest=rest", "rest=list(rest)")
        (base if inherits else own).append(FORMS[form].format(name=name, parameters=parameters, bound=bound))
    source = "class Base:\n    pass\n" + "".join(f"    {each}\n" for each in base)
    source += "class Shop(Base):\n    pass\n" + "".join(f"    {each}\n" for each in own)
    room: dict[str, Any] = {"zc": zc, "VERSION": version, "__name__": __name__}
    exec(source, room)
    return room["Shop"]  # type: ignore[no-any-return]


async def seen(result: Any) -> Any:
    """A result, or the items of a stream."""
    if hasattr(result, "__aiter__"):
        return [item async for item in result]
    if inspect.isgenerator(result):
        return list(result)
    return await result if inspect.isawaitable(result) else result


async def outcome(call: Callable[[], Any]) -> Any:
    """The result of a call, or its exception."""
    try:
        return await seen(call())
    except (TypeError, AttributeError) as error:
        return error


def names_of(function: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*args).arguments
    return {name: list(value) if isinstance(value, tuple) else value for name, value in bound.items()}


class Versions:
    """A caller and a process with actors, each of a class of which the caller knows another version."""

    def __init__(self, caller: Process, owner: Process) -> None:
        self.caller, self.owner = caller, owner

    def handle(self, known: type, there: type) -> tuple[ActorHandle, Any]:
        index, instance = self.owner.hosts.take_index(), there()
        agreed = Interface.of(there).seen_as(Interface.from_wire(Interface.of(known).wire()), there)
        self.owner.hosts.add(index, there, "Shop", interface=agreed).adopt(instance)
        place = (self.owner.process, index)
        actor = RemoteActor(self.caller, new_actor(), Interface.of(known), place, None, "default", 100, 0)
        return ActorHandle(actor), instance

    async def check(self, old: dict[str, Member], new: dict[str, Member], count: int, way: str) -> None:
        known, there = made("old ", old), made("new ", new)
        handle, instance = self.handle(known, there)
        args = tuple(range(count))
        for spec in Interface.of(known).methods:
            method: Any = getattr(handle, spec.name)
            arguments: tuple[Any, ...] = args
            expected_args: tuple[Any, ...] = args
            if way == "deadline":
                method = method.options(timeout=60.0)
            elif way == "reference":
                arguments = tuple(await_later(self, each) for each in args)
            elif way == "array":
                expected_args = arguments = tuple(np.full(4096, each) for each in args)
            if not fits(getattr(known(), spec.name), args):
                continue
            found = await outcome(partial(method, *arguments))
            actual = Interface.of(there).by_name.get(spec.name)
            if actual is None:
                assert isinstance(found, AttributeError)
            elif (actual.kind in STREAMS) != (spec.kind in STREAMS):
                assert isinstance(found, TypeError)
            elif isinstance(found, Exception):
                assert isinstance(found, TypeError) and actual.parameters != spec.parameters
            else:
                same = await seen(getattr(instance, spec.name)(*expected_args))
                np.testing.assert_equal(found, same)
                label, bound = found[0] if actual.kind in STREAMS else found
                assert label == f"new {spec.name}"
                if "rest" not in bound:  # each argument has the name that the caller's version gives it
                    for name, value in names_of(getattr(known(), spec.name), expected_args).items():
                        np.testing.assert_equal(bound[name], value)
                continue
            if "was not called" not in str(found):
                raise found
            assert spec.shown in str(found) and "spawn the actor anew" in str(found)


def fits(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> bool:
    """Whether a function takes these arguments."""
    try:
        inspect.signature(function).bind(*args, **(kwargs or {}))
    except TypeError:
        return False
    return True


class Source:
    """An actor whose results are passed on as references."""

    async def same(self, value: Any) -> Any:
        return value


def await_later(versions: Versions, value: Any) -> Any:
    if not hasattr(versions, "source"):
        versions.source, _ = versions.handle(Source, Source)  # type: ignore[attr-defined]
    return versions.source.same(value)  # type: ignore[attr-defined]


PAIRS: dict[str, Callable[[], AbstractAsyncContextManager[Any]]] = {
    "late": lambda: LoopbackPair(LoopbackFaults(delay_turns=3)),
    "tcp": lambda: VerbsPair((False, False)),
    "fabric": lambda: VerbsPair((True, True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("transport", PAIRS)
async def test_any_two_versions(transport: str) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(PATIENCE), PAIRS[transport]() as (caller, owner, _):
        pair = Versions(caller, owner)

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(versions, versions, st.integers(0, 3), st.sampled_from(["plain", "deadline", "reference", "array"]))
        def check(old: dict[str, Member], new: dict[str, Member], count: int, way: str) -> None:
            asyncio.run_coroutine_threadsafe(pair.check(old, new, count, way), loop).result(PATIENCE)

        await asyncio.to_thread(check)


# ---------------------------------------------------------------- parameters


def _parameters(text: str) -> Any:
    room: dict[str, Any] = {}
    exec(f"class Shop:\n    def call(self, {text}): return {{**locals()}}", room)
    return room["Shop"]()


MORE = (
    *PARAMETERS, "a, b, /", "a, /, b", "a, *, b", "a, *, b=0", "*, a", "*, a=0", "*, b=0, a", "a, *rest, b=0",
    "a=0, *rest", "a=0, **more", "b, **more", "a, b=0, *rest, **more",
)  # fmt: skip


@pytest.mark.parametrize("known", MORE)
def test_arguments_never_get_another_name(known: str) -> None:
    """Each call that fits binds alike where a method of other parameters is taken for the same."""
    local = _parameters(known)
    calls = [
        (args, dict(zip(names, named, strict=True)))
        for args in ((), (1,), (1, 2), (1, 2, 3))
        for names in ((), ("a",), ("b",), ("a", "b"), ("c",))
        for named in [range(10, 10 + len(names))]
    ]
    taken = 0
    for text in MORE:
        there = _parameters(text)
        seen_there = Interface.of(type(there)).seen_as(Interface.of(type(local)), type(there))
        if seen_there.refusals:
            assert text != known
            continue
        taken += 1
        for args, kwargs in calls:
            if not fits(local.call, args, kwargs):
                continue
            before, after = local.call(*args, **kwargs), there.call(*args, **kwargs)
            for name in set(before) & set(after) - {"self", "rest", "more"}:
                passed = inspect.signature(local.call).bind(*args, **kwargs).arguments
                assert name not in passed or before[name] == after[name], (known, text, args, kwargs)
    assert taken


def test_a_class_has_so_many_methods_as_frames_have_numbers() -> None:
    def method(self: Any) -> None:
        """A function of Python, whose signature is read much faster than that of a built-in one."""

    functions = {f"m{number}": method for number in range(1 << 16)}
    assert len(Interface.of(type("Most", (), functions)).methods) == 1 << 16
    with pytest.raises(TypeError, match="65537 public methods, and a class of actors may have 65536"):
        Interface.of(type("More", (), {**functions, "further": method}))


# ---------------------------------------------------------------- a file that is edited

OLD = """
import os
import zcactor as zc

@zc.actor(max_restarts=-1)
class Trainer:
    def __init__(self, scale=1): self.scale = scale
    def crash(self): os._exit(1)
    def load(self, x=0): return f"load {x}"
    def save(self, x=0): return f"save {x}"
    def rows(self): yield from ("row 1", "row 2")
    async def state(self): return "state"
    def turn(self, x): return f"turn {x}"
    def me(self): return zc.current_actor().handle
    async def ask(self, other, name, *args): return await getattr(other["it"], name)(*args)

@zc.actor
class Other:
    async def ask(self, other, name, *args): return await getattr(other["it"], name)(*args)
"""
NEW = (
    OLD.replace("    def load", "    def delete_all(self, x=0): return 'DELETE ALL RAN'\n    def load")
    .replace("    async def state(self): return", "    @property\n    def state(self): return")
    .replace("def turn(self, x): return", "def turn(self, x): yield")
    .replace("def save(self, x=0)", "async def save(self, x=0, y=1)")
)
_stamps = itertools.count(2_000_000_000)


class Edited:
    """A module of actors in a file that the test edits."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "edited_trainer.py"
        self.write(OLD)

    def write(self, source: str) -> None:
        self.path.write_text(source)
        os.utime(self.path, (0, next(_stamps)))


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edited]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Edited(tmp_path)
    sys.modules.pop("edited_trainer", None)


async def check_new_actor(actor: Any) -> None:
    """An actor of the new version, by a handle of the old one."""
    assert await actor.load() == "load 0" and await actor.load(x=2) == "load 2"
    assert await actor.save(3) == "save 3" and await actor.save.options(timeout=60.0)(4) == "save 4"
    assert [item async for item in actor.rows()] == ["row 1", "row 2"]
    with pytest.raises(AttributeError, match=r"state\(\) was not called: .* has state as a property") as gone:
        await actor.state()
    assert "turn(x)" in str(gone.value) and "delete_all(x=...)" in str(gone.value), "it has both versions"
    with pytest.raises(TypeError, match=r"spawner, has turn\(x\), and .* has the generator turn\(x\)"):
        await actor.turn(1)
    with pytest.raises(AttributeError, match="no method 'delete_all'"):
        actor.delete_all()


@pytest.mark.slow
@pytest.mark.parametrize("process", ["own", "shared"])
async def test_an_actor_after_its_file_was_edited(edited: Edited, process: str) -> None:
    async with asyncio.timeout(PATIENCE), zc.init(num_cpus=8):
        import edited_trainer as module  # type: ignore[import-not-found]

        trainer = module.Trainer.options(process=process, name="t")
        first, other = await trainer.spawn(), await module.Other.spawn()
        kept = first.load
        assert await first.state() == "state" and await first.turn(1) == "turn 1"
        edited.write(NEW)
        with pytest.raises(zc.ActorUnavailable):
            await first.crash()
        await check_new_actor(first)
        assert await kept(5) == "load 5", "a method that was kept over the restart"
        second = await module.Trainer.spawn()
        await check_new_actor(second)
        assert (await first.me()) == first
        for actor in (await first.me(), await zc.get_actor("t"), second):
            await check_new_actor(actor)
            assert await other.ask({"it": actor}, "load", 6) == "load 6"
            with pytest.raises(AttributeError, match="was not called"):
                await other.ask({"it": actor}, "state")
        assert await second.load(first.load(7)) == "load load 7", "a result that is pushed"
        await check_graphs(first, second)


async def check_graphs(first: Any, second: Any) -> None:
    async def compiled(method: Any) -> Any:
        async with zc.graph() as graph:
            graph.output(method.bind(first.load.bind(graph.input())))
        return await graph.compile()

    run = await compiled(second.save)
    assert await run(1) == "save load 1"
    await run.close()
    with pytest.raises(TypeError, match="was not called"):
        await compiled(second.turn)


@pytest.mark.slow
async def test_a_constructor_of_other_parameters(edited: Edited) -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        import edited_trainer as module

        edited.write(OLD.replace("scale=1", "epochs=1, scale=1"))
        with pytest.raises(TypeError, match=r"Trainer\(scale=...\), as .* spawner has it, is Trainer\(epochs=..., sc"):
            await module.Trainer.spawn(2)


@pytest.mark.slow
async def test_another_class_of_the_same_name(edited: Edited) -> None:
    async with asyncio.timeout(PATIENCE), zc.init():
        import edited_trainer as module

        edited.write("class Trainer:\n    def __init__(self, scale=1): pass\n    def purge(self): raise SystemExit\n")
        actor = await module.Trainer.spawn()
        for name in ("load", "save", "crash", "state", "me"):
            with pytest.raises(AttributeError, match=r"has only purge\(\)"):
                await getattr(actor, name)()
        with pytest.raises(AttributeError, match=r"has only purge\(\)"):
            async for _ in actor.rows():
                pytest.fail("an item came")


# ---------------------------------------------------------------- nodes with two versions

PROGRAM = """
import edited_trainer as module

async def outcomes(actor):
    found = {}
    for name in ("load", "save", "turn", "delete_all"):
        try:
            found[name] = await getattr(actor, name)(1)
        except (AttributeError, TypeError) as error:
            found[name] = ("TypeError" if isinstance(error, TypeError) else "AttributeError")
    return found

async def main():
    async with zc.init(ADDRESS):
        actors = []
        for n in range(2) if SPAWN else ():
            actors.append(await module.Trainer.options(node="spread", lifetime="detached", name=f"t{n}").spawn())
        tell(first=[await outcomes(actor) for actor in actors])
        while not os.path.exists(GO):
            await asyncio.sleep(0.01)
        tell(kept=[await outcomes(actor) for actor in actors])
        tell(named=[await outcomes(await zc.get_actor(f"t{n}")) for n in range(2)])

zc.run(main())
"""
RIGHT = {"load": "load 1", "save": "save 1", "turn": "turn 1", "delete_all": "AttributeError"}
CHANGED = {**RIGHT, "turn": "TypeError"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nodes_with_two_versions_that_drain_and_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {}
    for version, source in (("old", OLD), ("new", NEW)):
        (tmp_path / version).mkdir()
        files[version] = tmp_path / version / "edited_trainer.py"
        files[version].write_text(source)
    with Hosts() as hosts:

        def start(where: str, version: str, head: StartedNode | None = None, **more: Any) -> StartedNode:
            with monkeypatch.context() as patched:  # nodes search where their starter does
                patched.syspath_prepend(str(files[version].parent))
                environ = {"PYTHONPATH": str(files[version].parent), "PYTHONDONTWRITEBYTECODE": "1"}
                return hosts.start(where, head, environ=environ, **more)

        head = start("a", "new", state=KeptState(hosts.directory / "log"))
        start("b", "old", head)
        go = tmp_path / "go"

        def text(spawns: bool) -> str:
            path = f"sys.path.insert(0, {str(files['old'].parent)!r})\n"
            return f"SPAWN, GO = {spawns}, {str(go)!r}\n{path}{PROGRAM}"

        with hosts.program(text(True), head.record.address) as program:
            first = program.told("first", patience=60.0)
            assert sorted(first, key=lambda each: each["turn"]) == [CHANGED, RIGHT]
            files["old"].write_text(NEW)
            os.utime(files["old"], (0, next(_stamps)))
            drained = hosts.zcactor("drain", "--each", "--restart")
            assert drained.returncode == 0, drained.stdout + drained.stderr
            go.touch()
            assert program.told("kept", patience=60.0) == [CHANGED, CHANGED]
            assert program.told("named", patience=60.0) == [CHANGED, CHANGED]
            assert program.status() == 0
        with hosts.program(text(False), head.record.address) as program:  # it has the new version
            assert program.told("named", patience=60.0) == [CHANGED, CHANGED]
            assert program.status() == 0
        hosts.zcactor("stop")
        hosts.zcactor("stop", host="b")
