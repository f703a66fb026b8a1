"""Actors end to end: declaring, spawning, finding and ending them."""

from __future__ import annotations

import abc
import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

import zcactor as zc
from tests.actors import Caller, Plain, Probe
from zcactor.api.actor import declared_options
from zcactor.exception_pickling import shown_class

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=2, log_to_driver=False) as node:
        yield node


class Odd(Exception):
    """An exception whose constructor does not take its own args."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.detail = detail


async def dead(handle: Any) -> None:
    """Return once the node says that the actor is dead."""
    key = handle._remote.actor_id.hex()
    del handle
    async with asyncio.timeout(20):
        while True:
            gc.collect()
            if [actor.state for actor in await zc.actors() if actor.actor_id == key] == ["dead"]:
                return


# ---------------------------------------------------------------- declaring


async def test_a_local_instance_is_an_ordinary_object() -> None:
    plain = Plain()
    assert plain.echo(3) == 3
    assert plain.seen() == [((3,), {})]
    assert isinstance(plain, Plain)
    assert await Probe().anote("x") == "x"

    @zc.actor
    class Typed:
        total = 0

        @zc.method(timeout=3)
        def add(self, n: int) -> int:
            self.total += n
            return self.total

        @zc.method
        @staticmethod
        def twice(n: int) -> int:
            return 2 * n

    local: Any = Typed()
    assert local.add(2) == 2
    assert local.add(n=3) == 5
    assert local.twice(4) == 8
    assert Typed.__name__ == "Typed"  # type: ignore[attr-defined, unused-ignore]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: zc.actor(3), "decorates a class, not int"),  # type: ignore[call-overload]
        (lambda: zc.actor(lambda: 0), "decorates a class, not function"),
        (lambda: zc.actor(nmae="x"), "'nmae'; did you mean 'name'"),  # type: ignore[call-overload]
        (lambda: zc.actor(max_concurrency=0), "max_concurrency"),
        (lambda: Plain.options(max_restarts="2"), "max_restarts"),  # type: ignore[arg-type]
        (lambda: Plain.options(concurrency_groups={"a": 1}), "concurrency_groups"),  # type: ignore[call-arg]
        (lambda: Plain.options(lifetime="forever"), "lifetime"),  # type: ignore[arg-type]
        (lambda: zc.method(inline=1), "inline"),  # type: ignore[call-overload]
        (lambda: zc.method(3), "decorates a function"),  # type: ignore[call-overload]
        (lambda: zc.actor(type("Own", (), {"spawn": lambda self: 0})), "defines 'spawn'"),
    ],
)
async def test_wrong_declarations(wrong: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        wrong()


async def test_a_decorated_class_may_be_decorated_again() -> None:
    @zc.actor(max_restarts=1, max_concurrency=2)
    class Twice:
        pass

    cls: Any = Twice
    assert zc.actor(cls) is cls
    assert declared_options(cls) == {"max_restarts": 1, "max_concurrency": 2}
    assert zc.actor(max_concurrency=3)(cls) is cls
    assert declared_options(cls) == {"max_restarts": 1, "max_concurrency": 3}
    await zc.stop(await cls.spawn())


@pytest.mark.parametrize("name", ["spawn", "options"])
async def test_a_class_that_is_refused_is_unchanged(name: str) -> None:
    refused = type("Own", (), {name: lambda self: 0})
    before = dict(vars(refused))
    with pytest.raises(TypeError, match=f"defines '{name}'"):
        zc.actor(refused)
    assert dict(vars(refused)) == before


async def test_a_spawn_that_is_not_awaited_is_called_by_its_class() -> None:
    class Based(zc.Actor):
        pass

    operations: list[Any] = [Plain.spawn(), Plain.options(name="x").spawn(), Based.spawn()]
    names = [repr(operation) for operation in operations]
    assert names == ["<Plain.spawn pending>", "<Plain.spawn pending>", f"<{shown_class(Based)}.spawn pending>"]
    for operation in operations:
        await operation


async def test_inline_is_for_plain_methods() -> None:
    async def coroutine(self: Any) -> None: ...

    with pytest.raises(TypeError, match="inline"):
        zc.method(inline=True)(coroutine)

    async def generator(self: Any) -> AsyncIterator[int]:
        yield 1

    with pytest.raises(TypeError, match="inline"):
        zc.method(inline=True)(generator)


async def test_retries_need_idempotent() -> None:
    with pytest.raises(ValueError, match="idempotent"):
        zc.method(retries=2)(lambda self: 0)
    with pytest.raises(ValueError, match="idempotent"):
        zc.method(retries=2, idempotent=False)(lambda self: 0)


async def test_options_are_inherited_and_overridden() -> None:
    @zc.actor(max_pending_calls=3)
    class Parent:
        def hello(self) -> str:
            return "hello"

    @zc.actor(namespace="children")
    class Child(Parent):  # type: ignore[misc, valid-type, unused-ignore]
        pass

    child: Any = await Child.options(max_pending_calls=5).spawn()  # type: ignore[attr-defined, unused-ignore]
    assert child._remote.max_pending == 5
    assert child._remote.namespace == "children"
    assert await child.hello() == "hello"
    other: Any = await Child.spawn()  # type: ignore[attr-defined, unused-ignore]
    assert other._remote.max_pending == 3


async def test_classes_made_here_and_the_base_class() -> None:
    class Based(zc.Actor):
        def __init__(self, n: int = 1) -> None:
            self.n = n

        @zc.method
        def get(self) -> int:
            return self.n

    assert await (await Based.spawn()).get() == 1
    assert await (await Based.options(max_restarts=1).spawn(n=4)).get() == 4
    assert Based(2).get() == 2  # type: ignore[comparison-overlap]

    class Undecorated:
        def options(self) -> str:
            return "mine"

    handle: Any = await zc.spawn(Undecorated)
    assert await handle.options() == "mine"


# ---------------------------------------------------------------- constructing


async def test_wrong_constructor_arguments_are_refused_here() -> None:
    calls = zc.stats().calls
    with pytest.raises(TypeError, match=r"Plain\(\)"):
        await Plain.spawn(1)  # type: ignore[call-arg, unused-ignore]
    with pytest.raises(TypeError, match=r"Plain\(\)"):
        await zc.spawn(Plain, x=1)  # type: ignore[call-arg, unused-ignore]
    with pytest.raises(TypeError, match="takes a class"):
        await zc.spawn(lambda: 3)

    class Abstract(abc.ABC):
        @abc.abstractmethod
        def must(self) -> None: ...

    with pytest.raises(TypeError, match="abstract.*must"):
        await zc.spawn(Abstract)
    assert zc.stats().calls == calls, "nothing was sent"


class Failing:
    def __init__(self, how: str) -> None:
        if how == "odd":
            raise Odd(7, detail="seven")
        if how == "exit":
            sys.exit(3)
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "gone":
            os._exit(4)
        self.how = how

    async def __aenter__(self) -> None:
        if self.how == "enter":
            raise LookupError("entering")

    def get(self) -> str:
        return self.how


@pytest.mark.slow
async def test_constructor_errors_are_raised_by_spawn() -> None:
    with pytest.raises(Odd) as odd:
        await zc.spawn(Failing, "odd")
    assert isinstance(odd.value, zc.RemoteError)
    assert (odd.value.code, odd.value.detail) == (7, "seven")
    assert "Failing(" in odd.value.actor
    assert "raise Odd(7" in odd.value.remote_traceback
    for how, name in (("exit", "SystemExit"), ("interrupt", "KeyboardInterrupt")):
        with pytest.raises(zc.RemoteError) as caught:
            await zc.spawn(Failing, how)
        assert caught.value.type_name == name
        assert not isinstance(caught.value, SystemExit | KeyboardInterrupt)
    with pytest.raises(LookupError, match="entering"):
        await zc.spawn(Failing, "enter")
    async with asyncio.timeout(20):
        while {actor.state for actor in await zc.actors() if actor.class_name == "Failing"} != {"dead"}:
            pass


@pytest.mark.slow
async def test_a_process_that_ends_in_the_constructor() -> None:
    with pytest.raises(zc.ActorDied) as died:
        await zc.spawn(Failing, "gone")
    assert died.value.maybe_executed


async def test_a_group_that_is_not_declared() -> None:
    class Undeclared:
        @zc.method(concurrency_group="io")
        def read(self) -> None: ...

    with pytest.raises(ValueError, match="'io'.*does not declare"):
        await zc.spawn(Undeclared)


async def test_constructor_arguments_are_those_of_a_call() -> None:
    class Holder:
        def __init__(self, value: Any, box: list[Any], *, named: Any = None) -> None:
            self.types = [type(value).__name__, type(box[0]).__name__, type(named).__name__]

        def kinds(self) -> list[str]:
            return self.types

    plain = await Plain.spawn()
    handle: Any = await zc.spawn(Holder, zc.put(3), [zc.put(4)], named=plain.echo("x"))
    assert await handle.kinds() == ["int", "ObjectRef", "str"]
    with pytest.raises(ValueError, match="not yet"):
        await zc.spawn(Holder, plain.fail("not yet"), [])  # type: ignore[func-returns-value]


async def test_unpicklable_constructor_arguments() -> None:
    class Taker:
        def __init__(self, value: Any) -> None: ...

    with pytest.raises(TypeError):
        await zc.spawn(Taker, (i for i in range(3)))


async def test_cancelling_a_spawn_ends_the_actor() -> None:
    probe = await Probe.spawn()

    class Slow:
        def __init__(self, probe: Any) -> None:
            self.probe = probe

        async def __aenter__(self) -> None:
            await self.probe.note("constructing")
            await asyncio.Event().wait()

    task = asyncio.create_task(zc.spawn(Slow, probe))
    await probe.until("constructing")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(20):
        while {a.state for a in await zc.actors() if a.class_name == "Slow"} != {"dead"}:
            pass


# ---------------------------------------------------------------- names


async def test_names_that_no_actor_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"zc.get_actor: name must be a text that UTF-8 can encode, got '\\udc80'"):
        await zc.get_actor("\udc80")
    with pytest.raises(ValueError, match=r"zc.get_actor: namespace must be a text .*, got '\\udc80'"):
        await zc.get_actor("one", namespace="\udc80")
    wrong: Any
    for wrong in (None, 5, ["one"], b"one", Plain, "", "x" * 1_001):
        with pytest.raises(TypeError, match=r"zc.get_actor: name must be a str of 1 to 1,000 characters, got "):
            await zc.get_actor(wrong)
        if wrong is not None:
            with pytest.raises(TypeError, match=r"zc.get_actor: namespace must be a str of 1 to 1,000 characters, got"):
                await zc.get_actor("one", namespace=wrong)


async def test_a_name_is_looked_up_as_a_plain_text() -> None:
    class Text(str):
        def __reduce__(self) -> Any:
            raise AssertionError("the head would run the code of this class")

    first = await Plain.options(name="plain", namespace="texts").spawn()
    assert await zc.get_actor(Text("plain"), namespace=Text("texts")) == first
    await zc.stop(first)


async def test_names() -> None:
    first = await Plain.options(name="one").spawn()
    assert await zc.get_actor("one") == first
    with pytest.raises(zc.NameTaken, match="'one'"):
        await Plain.options(name="one").spawn()
    again = await Plain.options(name="one", get_if_exists=True).spawn()
    assert again == first
    elsewhere = await Plain.options(name="one", namespace="elsewhere").spawn()
    assert elsewhere != first
    assert await zc.get_actor("one", namespace="elsewhere") == elsewhere
    with pytest.raises(zc.NoSuchActor, match=r"'two'.*one"):
        await zc.get_actor("two")
    with pytest.raises(ValueError, match="needs a name"):
        await Plain.options(get_if_exists=True).spawn()
    await zc.kill(first)
    with pytest.raises(zc.NoSuchActor):
        await zc.get_actor("one")
    third = await Plain.options(name="one").spawn()
    assert third != first
    caller = await Caller.spawn()
    assert await caller.call(third, "echo", 5) == 5
    await zc.stop(third)
    await zc.stop(elsewhere)


async def test_a_named_actor_outlives_its_handles() -> None:
    handle = await Plain.options(name="kept").spawn()
    await handle.echo(1)
    del handle
    gc.collect()
    found: Any = await zc.get_actor("kept")
    assert await found.seen() == [((1,), {})]
    await zc.stop(found)


async def test_get_if_exists_at_the_same_time_makes_one() -> None:
    handles = await asyncio.gather(*(Plain.options(name="only", get_if_exists=True).spawn() for _ in range(5)))
    assert len(set(handles)) == 1
    await zc.stop(handles[0])


# ---------------------------------------------------------------- the actor about itself


class Selfish:
    async def handle(self) -> Any:
        return zc.current_actor().handle

    async def about(self) -> tuple[str, str, int]:
        current = zc.current_actor()
        return current.id, current.node, current.restarts

    def about_sync(self) -> str:
        return zc.current_actor().id

    @zc.method(inline=True)
    def about_inline(self) -> str:
        return zc.current_actor().id

    def about_generator(self) -> Any:
        yield zc.current_actor().id

    async def call_myself(self) -> str:
        me: Any = zc.current_actor().handle
        return (await me.about())[0]  # type: ignore[no-any-return]


@pytest.mark.slow
async def test_current_actor(node: zc.Runtime) -> None:
    handle: Any = await zc.spawn(Selfish)
    key = handle._remote.actor_id.hex()
    assert await handle.about() == (key, node.node_id, 0)
    assert await handle.about_sync() == key
    assert await handle.about_inline() == key
    assert [item async for item in handle.about_generator()] == [key]
    assert await handle.handle() == handle
    assert await handle.call_myself() == key
    with pytest.raises(zc.NotInitialized, match="inside an actor"):
        zc.current_actor()


# ---------------------------------------------------------------- ending


class Closing:
    def __init__(self, probe: Any, how: str) -> None:
        self.probe = probe
        self.how = how

    async def work(self, key: str) -> str:
        await self.probe.ahold(key)
        return key

    def close(self) -> None:
        if self.how == "raise":
            raise ValueError("while closing")
        asyncio.run(self._tell())

    async def _tell(self) -> None:
        await self.probe.anote("closed")


class Leaving(Closing):
    async def __aexit__(self, *_: object) -> None:
        await self.probe.anote("left")


@pytest.mark.slow
async def test_stop_runs_what_is_pending_then_closes() -> None:
    probe = await Probe.spawn()
    for cls, last in ((Closing, "closed"), (Leaving, "left")):
        actor: Any = await zc.spawn(cls, probe, "")
        pending = [actor.work(f"{last} {i}") for i in range(3)]
        await probe.until(*(f"{last} {i} began" for i in range(3)))
        stopping = asyncio.create_task(zc.stop(actor))
        for i in range(3):
            await probe.open(f"{last} {i}")
        assert await zc.get(pending) == [f"{last} {i}" for i in range(3)]
        await stopping
        entries = await probe.entries()
        assert entries.count(last) == 1
        assert entries.index(last) > entries.index(f"{last} 2 ended")
        with pytest.raises(zc.ActorDied, match="stopped") as died:
            await actor.work("x")
        assert not died.value.maybe_executed
        await zc.stop(actor)  # does nothing


@pytest.mark.parametrize("process", ["own", "shared"])
@pytest.mark.parametrize("way", ["astop", "sync_stop"])
async def test_an_actor_that_stops_itself(process: Any, way: str) -> None:
    probe = await Probe.spawn()

    class Resigning:
        async def work(self) -> str:
            await probe.ahold(f"{process} {way}")
            return "worked"

        async def astop(self) -> str:
            await zc.stop(zc.current_actor().handle)
            return "stopped"

        def sync_stop(self) -> str:
            asyncio.run(zc.stop(zc.current_actor().handle))
            return "stopped"

        def close(self) -> None:
            asyncio.run(closed())

    async def closed() -> None:
        await probe.anote(f"{process} {way} closed")

    actor: Any = await zc.actor(process=process)(Resigning).spawn()  # type: ignore[attr-defined, unused-ignore]
    running = actor.work()
    await probe.until(f"{process} {way} began")
    async with asyncio.timeout(20):
        assert await getattr(actor, way)() == "stopped"
        with pytest.raises(zc.ActorDied, match="stopped") as died:
            while True:
                await getattr(actor, way)()
        assert not died.value.maybe_executed
        assert f"{process} {way} closed" not in await probe.entries(), "a call still runs"
        await probe.open(f"{process} {way}")
        assert await running == "worked"
        await probe.until(f"{process} {way} closed")
        await zc.stop(actor)  # waits for the actor's end


@pytest.mark.slow
async def test_stop_survives_a_close_that_raises() -> None:
    probe = await Probe.spawn()
    actor: Any = await zc.spawn(Closing, probe, "raise")
    await zc.stop(actor)
    with pytest.raises(zc.ActorDied):
        await actor.work("x")


async def test_stop_runs_all_that_was_sent_before() -> None:
    plain = await Plain.spawn()
    refs = [plain.echo(i) for i in range(3000)]  # far beyond what one connection has credit for
    await zc.stop(plain)
    assert await zc.get(refs) == list(range(3000))


async def test_stop_runs_calls_made_before_there_was_a_connection() -> None:
    plain = await Plain.spawn()
    caller = await Caller.spawn()

    class Stopper:
        async def run(self, handle: Any) -> list[int]:
            refs = [handle.echo(i) for i in range(10)]
            await zc.stop(handle)
            return await zc.get(refs)

    stopper: Any = await zc.spawn(Stopper)
    assert await stopper.run(plain) == list(range(10))
    await zc.kill(caller)


async def test_stop_with_a_call_that_waits_for_an_argument() -> None:
    probe = await Probe.spawn()
    caller = await Caller.spawn()
    for cls in (Plain, Caller):
        actor: Any = await zc.spawn(cls)
        key = cls.__name__
        late = probe.ahold(key)
        pending = actor.echo(late) if cls is Plain else actor.keep(late)
        await probe.until(f"{key} began")
        stopping = asyncio.create_task(zc.stop(actor))
        with pytest.raises(zc.ActorDied):
            while True:  # from now on the actor takes no more calls
                await caller.call(actor, "seen" if cls is Plain else "kept")
        await probe.open(key)
        async with asyncio.timeout(20):
            assert await pending == (key if cls is Plain else 1)
            await stopping


async def test_kill_is_immediate() -> None:
    probe = await Probe.spawn()
    held, queued = probe.hold("k"), probe.note("never")
    suspended = probe.ahold("a")
    await probe.until("k began")
    await zc.kill(probe)
    for ref in (held, queued, suspended):
        with pytest.raises(zc.ActorDied, match=r"zc\.kill"):
            await ref  # type: ignore[misc]
    with pytest.raises(zc.ActorDied) as died:
        await held  # type: ignore[misc]
    assert died.value.maybe_executed
    with pytest.raises(zc.ActorDied) as died:
        await probe.note(1)
    assert not died.value.maybe_executed
    await zc.kill(probe)  # does nothing


async def test_kill_in_a_shared_process() -> None:
    victim = await Probe.options(process="shared").spawn()
    others = [
        await Probe.options(process="shared").spawn() for _ in range(os.cpu_count() or 1)
    ]  # one of them a neighbour
    running, waiting = victim.ahold("a"), victim.hold("s")
    queued = victim.note("never")
    await victim.until("a began", "s began")
    await zc.kill(victim)
    for ref, maybe in ((running, True), (queued, False)):
        async with asyncio.timeout(20):
            with pytest.raises(zc.ActorDied) as died:
                await ref
        assert died.value.maybe_executed is maybe
    del waiting
    assert await zc.get([other.note(1) for other in others]) == [1] * len(others)
    with pytest.raises(zc.ActorDied):
        await victim.note(2)


async def test_wrong_things_to_end() -> None:
    for function in (zc.stop, zc.kill):
        with pytest.raises(TypeError, match="takes a handle, not int"):
            await function(3)


@pytest.mark.slow
async def test_the_last_handle_stops_an_unnamed_actor() -> None:
    probe = await Probe.spawn()
    actor: Any = await zc.spawn(Closing, probe, "")
    alias = actor
    ref = actor.work("sent")
    await probe.until("sent began")
    waiter = asyncio.create_task(dead(actor))
    del actor
    del alias
    gc.collect()
    await zc.nodes()
    await probe.open("sent")
    assert await ref == "sent", "calls already sent still run"
    del ref
    await waiter
    assert "closed" in await probe.entries()


async def test_a_handle_held_by_another_actor_keeps_it_alive() -> None:
    plain = await Plain.spawn()
    caller = await Caller.spawn()
    await caller.keep([plain])
    key = plain._remote.actor_id.hex()  # type: ignore[attr-defined]
    del plain
    gc.collect()
    ((kept,),) = await caller.kept()
    assert await kept.echo(1) == 1
    del kept
    gc.collect()
    states = {a.actor_id: a.state for a in await zc.actors()}
    assert states[key] == "alive"
    await caller.drop()
    async with asyncio.timeout(20):
        while {a.actor_id: a.state for a in await zc.actors()}[key] != "dead":
            pass


async def test_a_finished_reference_does_not_keep_its_actor() -> None:
    plain = await Plain.spawn()
    ref = plain.echo(1)
    await ref
    key = plain._remote.actor_id.hex()  # type: ignore[attr-defined]
    del plain
    async with asyncio.timeout(20):
        while {a.actor_id: a.state for a in await zc.actors()}[key] != "dead":
            pass
    assert await ref == 1


async def test_owned_actors_end_with_their_owner() -> None:
    class Owner:
        async def spawn(self) -> Any:
            return [await Plain.spawn(), await Plain.options(lifetime="detached").spawn()]

    owner: Any = await zc.spawn(Owner)
    owned, detached = await owner.spawn()
    assert await zc.get([owned.echo(1), detached.echo(2)]) == [1, 2]
    await zc.kill(owner)
    with pytest.raises(zc.ActorDied, match="owner"):
        while True:
            await owned.echo(1)
    assert await detached.echo(3) == 3
    await zc.kill(detached)


# ---------------------------------------------------------------- resources


async def test_resources() -> None:
    with pytest.raises(zc.InsufficientResources):
        await Plain.options(num_cpus=3).spawn()
    first = await Plain.options(num_cpus=2).spawn()
    waiting = asyncio.create_task(Plain.options(num_cpus=1).spawn())
    assert (await zc.available_resources())["CPU"] == 0
    assert not waiting.done()
    await zc.kill(first)
    assert await (await waiting).echo(1) == 1


async def test_environment() -> None:
    class Reader:
        def get(self, name: str) -> str | None:
            return os.environ.get(name)

    handle: Any = await zc.actor(Reader).options(env={"ZC_TEST_VARIABLE": "x"}).spawn()  # type: ignore[attr-defined, unused-ignore]
    assert await handle.get("ZC_TEST_VARIABLE") == "x"
    with pytest.raises(ValueError, match="env"):
        await Plain.options(env={"A": "b"}, process="shared").spawn()
