"""Methods of handles: arguments, options, and values that cannot travel."""

from __future__ import annotations

import inspect
import pydoc
from typing import Any

import pytest

import tests.api.test_handle as handles
import zcactor as zc
from tests.api.test_handle import Signatures
from tests.steps import act_at_step
from zcactor.api.remote_method import RemoteMethod
from zcactor.testing import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

node = handles.node


@pytest.mark.slow
async def test_wrong_arguments_are_refused_without_a_message() -> None:
    handle: Any = await Signatures.spawn()
    await handle.none()
    before = zc.stats()
    for wrong in (
        lambda: handle.none(1),
        lambda: handle.none(a=1),
        lambda: handle.two(),
        lambda: handle.two(1, 2, 3),
        lambda: handle.two(1, a=2),
        lambda: handle.two(b=2),
        lambda: handle.two(1, c=2),
        lambda: handle.keywords(),
        lambda: handle.keywords(1),
        lambda: handle.keywords(other=1),
        lambda: handle.positional(a=1, b=2),
        lambda: handle.positional(1),
        lambda: handle.coroutine(),
        lambda: handle.generator(),
        lambda: handle.generator(1, 2),
        lambda: handle.static(),
        lambda: handle.of_class(1, 2),
    ):
        with pytest.raises(TypeError, match=r"Signatures\.\w+\(\): "):
            wrong()  # type: ignore[no-untyped-call]
    after = zc.stats()
    assert (after.calls, after.frames_sent) == (before.calls, before.frames_sent)


@pytest.mark.slow
async def test_right_arguments() -> None:
    handle: Any = await Signatures.spawn()
    assert await handle.none() == "none"
    assert await handle.two(1) == (1, 2)
    assert await handle.two(b=4, a=3) == (3, 4)
    assert await handle.keywords(key=1) == (1, 5)
    assert await handle.positional(1, b=2) == (1, 2)
    assert await handle.anything() == ((), {})
    assert await handle.anything(1, [2], x={"y": 3}) == ((1, [2]), {"x": {"y": 3}})
    assert await handle.anything({}) == (({},), {})
    assert await handle.anything({"a": 1}, {"b": 2}) == (({"a": 1}, {"b": 2}), {})
    assert await handle.static(3) == -3
    assert await handle.of_class(3) == "Signatures 3"
    assert await handle.self_as_keyword(timeout=3, retries=4, args=5, kwargs=6, spec=7) == {
        "timeout": 3,
        "retries": 4,
        "args": 5,
        "kwargs": 6,
        "spec": 7,
    }


@pytest.mark.slow
async def test_wrong_options_of_a_call() -> None:
    handle: Any = await Signatures.spawn()
    for options, text in (
        ({"timeuot": 1}, "did you mean 'timeout'"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "1"}, "timeout"),
        ({"retries": -1}, "retries"),
        ({"idempotent": 1}, "idempotent"),
        ({"name": "x"}, "unknown option 'name'"),
    ):
        with pytest.raises(TypeError, match=text):
            handle.none.options(**options)
    with pytest.raises(ValueError, match="idempotent"):
        handle.none.options(retries=1)
    assert await handle.none.options(retries=1, idempotent=True)() == "none"
    assert await handle.none.options(timeout=20).options(retries=1, idempotent=True)() == "none"
    assert handle.none.options(timeout=20).options(retries=1, idempotent=True)._timeout == 20
    assert [x async for x in handle.generator.options(timeout=20)(2)] == [0, 1]


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("stays here")


class Exploding:
    """A value that can be pickled but not unpickled."""

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise RuntimeError("over there")


@pytest.mark.slow
async def test_values_that_cannot_travel() -> None:
    @zc.actor
    class Bad:
        def result(self) -> Any:
            return Unpicklable()

        async def aresult(self) -> Any:
            return [Unpicklable()]

        @zc.method(inline=True)
        def iresult(self) -> Any:
            return Unpicklable()

        def items(self) -> Any:
            try:
                yield 1
                yield Unpicklable()
            finally:
                self.closed = True

        async def aitems(self) -> Any:
            try:
                yield 1
                yield Unpicklable()
            finally:
                self.closed = True

        def was_closed(self) -> bool:
            return self.__dict__.pop("closed", False)  # type: ignore[no-any-return]

        def exploding(self) -> Any:
            return Exploding()

        def take(self, value: Any) -> str:
            return "taken"

        async def atake(self, value: Any) -> str:
            return "taken"

    handle: Any = await Bad.spawn()
    await handle.was_closed()
    before = zc.stats().calls
    with pytest.raises(RuntimeError, match="stays here"):
        handle.take(Unpicklable())
    with pytest.raises(RuntimeError, match="stays here"):
        handle.atake(value=[Unpicklable()])
    assert zc.stats().calls == before
    for method in (handle.result, handle.aresult, handle.iresult):
        with pytest.raises(RuntimeError, match="stays here"):
            await method()
    for method in (handle.items, handle.aitems):
        got = []
        with pytest.raises(RuntimeError, match="stays here"):
            async for item in method():
                got.append(item)
        assert got == [1]
        assert await handle.was_closed()
    for method in (handle.take, handle.atake):
        with pytest.raises(RuntimeError, match="over there"):
            await method(Exploding())
    with pytest.raises(RuntimeError, match="over there"):
        await handle.exploding()
    assert await handle.take(1) == "taken"


class Scaling:
    def scale(self, x: float, factor: float = 2.0) -> float:
        """Scale x.

        By a factor."""
        return x * factor

    def items(self, n: int) -> Any:
        yield from range(n)

    @staticmethod
    def plain(x: int) -> int:
        """No self."""
        return x


async def test_a_method_has_the_signature_and_the_docstring_of_the_actors_own() -> None:
    handle: Any = await zc.spawn(Scaling)
    assert str(inspect.signature(handle.scale)) == "(x: 'float', factor: 'float' = 2.0) -> 'float'"
    assert handle.scale.__doc__ == "Scale x.\n\nBy a factor." and handle.scale.__name__ == "scale"
    assert str(inspect.signature(handle.items)) == "(n: 'int') -> 'Any'"
    assert handle.items.__doc__.startswith("Scaling.items: a method of Scaling(")
    assert (str(inspect.signature(handle.plain)), handle.plain.__doc__) == ("(x: 'int') -> 'int'", "No self.")
    shown = pydoc.plain(pydoc.render_doc(handle.scale))
    assert "scale(x, factor=...)" in shown and "Scale x." in shown
    assert (inspect.getdoc(type(handle.scale)) or "").startswith("A method of a handle.")
    assert list(inspect.signature(type(handle.items)).parameters) == ["actor", "spec", "options"]


async def test_a_method_of_a_class_that_this_process_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    handle: Any = await zc.spawn(Scaling)
    monkeypatch.setattr("zcactor.interface._declared", {})
    assert str(inspect.signature(handle.scale)) == "(x, factor=Ellipsis)"
    assert handle.scale.__doc__.startswith("Scaling.scale: a method of Scaling(")


async def test_a_notebook_shows_handles_and_references() -> None:
    handle: Any = await zc.spawn(Scaling)
    assert "<td>scale(x, factor=...)</td>" in handle._repr_html_()
    ref = zc.put(3)
    assert ref._repr_html_() == "<code>&lt;ObjectRef put(int) 1 bytes&gt;</code> a promise: await it"


class Interrupted(Exception):
    """The exception of a signal's handler."""


def interrupt() -> None:
    raise Interrupted


async def test_a_call_that_is_interrupted_at_any_step_leaves_nothing() -> None:
    handle: Any = await zc.spawn(Scaling)
    assert await handle.scale(1.0) == 2.0
    method, step, interrupted = handle.scale, 0, True
    while interrupted:
        interrupted = False
        try:
            act_at_step(lambda: method(1.0), step, interrupt, lambda code: code is RemoteMethod.__call__.__code__)
        except Interrupted:
            interrupted = True
        step += 1
    assert step > 50
    assert await method(2.0) == 4.0
    await until(lambda: not handle._remote.unfinished, "all calls have ended")
