"""Exceptions on their way to the caller: a table of their faults."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from zcactor.errors import (
    ActorDied,
    ConnectionLost,
    DeadlineExceeded,
    InsufficientResources,
    MailboxFull,
    OutOfMemory,
    ProtocolError,
    RemoteError,
    ZcactorError,
    make_remote_error,
)
from zcactor.execution.failure import TEXT_NBYTES, Failure, pack_as_text, without_frames
from zcactor.marshal import Marshaller
from zcactor.marshal.values import Code
from zcactor.native import hot
from zcactor.objectstore.copies import CopyCounter
from zcactor.objectstore.store import Store


@pytest.fixture
def marshaller() -> Iterator[Marshaller]:
    store = Store(1 << 22, bytes(16))
    yield Marshaller(store, CopyCounter(), hot.Counters(), 1024)
    store.close()


def travel(marshaller: Marshaller, error: BaseException) -> RemoteError:
    """The error that a caller sees for `error`, raised and sent."""
    try:
        raise error
    except BaseException as raised:
        payload, parts, flags = marshaller.pack(Failure(raised, "Actor(a)"))
    received = marshaller.unpack(payload, parts, flags)
    assert isinstance(received, RemoteError)
    return received


class WrongArguments(Exception):
    def __init__(self, a: int, *, b: int) -> None:
        super().__init__("text")
        self.a = a
        self.b = b


class ReduceRaises(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


class ReduceExits(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit(3)


class RebuildRaises(Exception):
    def __reduce__(self) -> Any:
        return _rebuild, ()


def _rebuild() -> None:
    raise RuntimeError("not here")


class RebuildsSomethingElse(Exception):
    def __reduce__(self) -> Any:
        return int, ()


class StrRaises(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class StrExits(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class StrIsNone(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]


class ReprRaises(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class NoAttributes(Exception):
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no attribute {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise RuntimeError(f"{name} cannot be set")


class ArgsProperty(Exception):
    args = property(lambda self: 1 / 0)


def with_state(**state: Any) -> ValueError:
    error = ValueError("with state")
    error.__dict__.update(state)
    return error


def chained() -> ValueError:
    error = ValueError("outer")
    error.__cause__ = KeyError("the cause")
    return error


def cyclic() -> ValueError:
    error, other = ValueError("a"), ValueError("b")
    error.__cause__, other.__cause__ = other, error
    return error


def deep() -> ValueError:
    error = ValueError("last")
    for i in range(2000):
        following = ValueError(i)
        following.__context__ = error
        error = following
    return error


OWN_TYPE: list[tuple[Exception, str]] = [
    (ValueError("simple"), "simple"),
    (ValueError(), ""),
    (ValueError("x" * 100_000), "x" * 100_000),
    (ValueError("\ud800 surrogate"), "\\ud800 surrogate"),
    (ValueError("ünïcode \N{SNOWMAN}"), "ünïcode \N{SNOWMAN}"),
    (KeyError("key"), "'key'"),
    (FileNotFoundError(2, "no such", "name"), "[Errno 2] no such: 'name'"),
    (
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        "'utf-8' codec can't decode byte 0xff in position 0: invalid",
    ),
    (ExceptionGroup("group", [ValueError(1), KeyError(2)]), "group (2 sub-exceptions)"),
    (WrongArguments(1, b=2), "text"),
    (with_state(extra=[1, 2], array=np.arange(5000)), "with state"),
    (chained(), "outer"),
    (cyclic(), "a"),
    (deep(), "1999"),
    (RecursionError("deep"), "deep"),
    (StrRaises("x"), "<str() of the exception raised RuntimeError>"),
    (StrExits("x"), "<str() of the exception raised KeyboardInterrupt>"),
    (StrIsNone("x"), "<str() of the exception raised TypeError>"),
    (ReprRaises("x"), "x"),
    (ReduceRaises("x"), "x"),
    (ReduceExits("x"), "x"),
    (ArgsProperty("x"), "x"),
]


@pytest.mark.parametrize(("error", "message"), OWN_TYPE, ids=lambda value: type(value).__name__)
def test_exceptions_of_their_own_type(marshaller: Marshaller, error: Exception, message: str) -> None:
    remote = travel(marshaller, error)
    assert isinstance(remote, type(error))
    assert remote.remote.message == message
    assert remote.type_name.rpartition(".")[2] == type(error).__qualname__
    assert remote.actor == "Actor(a)"
    assert remote.pid == os.getpid()
    assert remote.host
    assert "raise error" in remote.remote_traceback
    assert "could not be rebuilt" not in remote.remote_traceback
    assert repr(vars(remote.remote.original)) == repr(vars(error))
    assert {**vars(remote), "__notes__": None} == {**vars(remote.remote.original), "__notes__": None}
    assert isinstance(str(remote), str)


TEXT_ONLY: list[BaseException] = [
    RebuildRaises("x"),
    RebuildsSomethingElse("x"),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError("why"),
    BaseException("base"),
    BaseExceptionGroup("group", [SystemExit(1)]),
    StopIteration(3),
    StopAsyncIteration(),
]


@pytest.mark.parametrize("error", TEXT_ONLY, ids=lambda value: type(value).__name__)
def test_exceptions_that_arrive_as_text(marshaller: Marshaller, error: BaseException) -> None:
    remote = travel(marshaller, error)
    assert type(remote) is RemoteError
    assert type(error).__name__ in remote.type_name
    assert "raise error" in remote.remote_traceback
    assert isinstance(str(remote), str)


def test_why_it_could_not_be_rebuilt(marshaller: Marshaller) -> None:
    remote = travel(marshaller, RebuildRaises("x"))
    assert "could not be rebuilt here: RuntimeError: not here" in remote.remote_traceback
    assert remote.message == "x"


def test_attributes_are_not_trusted(marshaller: Marshaller) -> None:
    error = BaseException.__new__(NoAttributes, "x")
    assert isinstance(travel(marshaller, error), NoAttributes)


def test_the_chain_is_in_the_text(marshaller: Marshaller) -> None:
    remote = travel(marshaller, chained())
    assert "KeyError: 'the cause'" in remote.remote_traceback
    assert "direct cause" in remote.remote_traceback


def test_a_text_without_frames_does_not_depend_on_where_files_lie(marshaller: Marshaller) -> None:
    with without_frames():
        assert travel(marshaller, SystemExit(3)).remote_traceback.count("\n") <= 1
        assert "File" not in travel(marshaller, chained()).remote_traceback
    assert "File" in travel(marshaller, chained()).remote_traceback


def test_what_does_not_fit_the_store_arrives_as_text(marshaller: Marshaller) -> None:
    remote = travel(marshaller, with_state(array=np.zeros(1 << 23, np.uint8), small=1))
    assert isinstance(remote, ValueError)
    assert remote.message == "with state"
    assert remote.small == 1  # type: ignore[attr-defined]
    assert "field 'array' (zcactor.errors.OutOfMemory: the store cannot hold" in remote.__notes__[0]


OWN: list[ZcactorError] = [
    InsufficientResources("no process could be started"),
    ActorDied("A(a)", "killed", True),
    OutOfMemory(1, 2, 3, 4, "note"),
    ConnectionLost("gone", True),
    DeadlineExceeded("late"),
]


@pytest.mark.parametrize("error", OWN, ids=lambda error: type(error).__name__)
def test_errors_of_our_own_need_no_pickle(
    marshaller: Marshaller, monkeypatch: pytest.MonkeyPatch, error: ZcactorError
) -> None:
    def fails(*_: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("zcactor.marshal.pickling.dumps", fails)
    remote = travel(marshaller, error)
    assert type(remote.original) is type(error)
    assert remote.original.args == error.args
    assert vars(remote.original) == vars(error)
    assert isinstance(remote, type(error))


def test_errors_that_only_seem_our_own(marshaller: Marshaller) -> None:
    class InsufficientResources(Exception):
        pass

    noted = ConnectionLost("gone")
    noted.add_note("a note")
    for error in (InsufficientResources("x"), noted, MailboxFull(np.ones(3))):
        remote = travel(marshaller, error)
        assert type(remote.original).__name__ == type(error).__name__
        assert isinstance(remote.original, ZcactorError) == isinstance(error, ZcactorError)
    assert travel(marshaller, noted).__notes__[0] == "a note"


@pytest.mark.parametrize("own", [["SystemExit", []], ["ActorDied", 3], ["annotations", []], ["OutOfMemory", []]])
def test_malformed_errors_of_our_own_leave_the_text(marshaller: Marshaller, own: Any) -> None:
    content = msgspec.msgpack.encode(["Name", "message", "trace", "actor", "host", 3, own])
    payload = msgspec.msgpack.encode(msgspec.msgpack.Ext(Code.FAILURE, content))
    remote = marshaller.unpack(payload, (), 0)
    assert type(remote) is RemoteError
    assert remote.message == "message"
    assert "could not be rebuilt here" in remote.remote_traceback


class TwoArguments(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)


@pytest.mark.parametrize("room", [200, 5_000, 30_000, TEXT_NBYTES, 1 << 20])
@pytest.mark.parametrize("text", ["x", "\u20ac" * 40_000, "line\n" * 40_000], ids=["short", "euros", "lines"])
def test_as_text_it_needs_no_store_and_fits(marshaller: Marshaller, room: int, text: str) -> None:
    try:
        raise TwoArguments(text, "second")
    except TwoArguments as raised:
        payload = pack_as_text(Failure(raised, "Actor(a)"), MemoryError("no room"), room)
    assert len(payload) <= min(room, TEXT_NBYTES)
    remote = marshaller.unpack(payload, (), 0)
    assert type(remote) is RemoteError
    assert remote.original is None
    assert (remote.actor, remote.pid) == ("Actor(a)", os.getpid()) or room == 200
    if room > 200:
        assert remote.type_name == f"{__name__}.TwoArguments"
        assert remote.message.startswith(f"('{text[:50]}".replace("\n", "\\n"))
        assert remote.remote_traceback.endswith("could not be sent: MemoryError: no room)\n")
    if text == "x" and room > 5_000:
        assert remote.message == "('x', 'second')"
        assert "raise TwoArguments" in remote.remote_traceback


def test_passed_on_by_another_actor(marshaller: Marshaller) -> None:
    first = travel(marshaller, WrongArguments(1, b=2))
    second = travel(marshaller, first)
    assert isinstance(second, WrongArguments)
    assert (second.b, second.message) == (2, "text")
    assert second.type_name == first.type_name
    assert not isinstance(second.original, RemoteError)
    assert first.remote_traceback.strip().splitlines()[-1] in second.remote_traceback
    text = travel(marshaller, travel(marshaller, SystemExit(3)))
    assert text.type_name == "SystemExit"
    assert text.message == "3"


def test_raised_before_it_is_sent_or_not(marshaller: Marshaller) -> None:
    payload, parts, flags = marshaller.pack(Failure(ValueError("never raised"), "a"))
    assert isinstance(marshaller.unpack(payload, parts, flags), ValueError)


@pytest.mark.parametrize("content", [None, 3, [], [1, 2, 3], {"a": 1}, ["n", "m", "t", "a", "h", 1]])
def test_malformed_failures(marshaller: Marshaller, content: Any) -> None:
    payload = msgspec.msgpack.encode(msgspec.msgpack.Ext(Code.FAILURE, msgspec.msgpack.encode(content)))
    with pytest.raises(ProtocolError):
        marshaller.unpack(payload, (), 0)


@pytest.mark.parametrize("pickled", [3, [], [b"junk", []], [b"junk"], ["text", None], b"x"])
def test_malformed_pickles_leave_the_text(marshaller: Marshaller, pickled: Any) -> None:
    content = msgspec.msgpack.encode(["Name", "message", "trace", "actor", "host", 3, pickled])
    payload = msgspec.msgpack.encode(msgspec.msgpack.Ext(Code.FAILURE, content))
    remote = marshaller.unpack(payload, (), 0)
    assert type(remote) is RemoteError
    assert remote.message == "message"


def test_dual_classes_are_made_once() -> None:
    fields = {"type_name": "T", "message": "m", "remote_traceback": "", "actor": "", "host": "", "pid": 1}
    assert type(make_remote_error(ValueError(1), fields)) is type(make_remote_error(ValueError(2), fields))


def test_a_traceback_through_many_actors_keeps_its_ends(marshaller: Marshaller) -> None:
    error: BaseException = ValueError("the first cause")
    for number in range(300):
        payload, parts, flags = marshaller.pack(Failure(error, f"Hop({number})"))
        error = marshaller.unpack(payload, parts, flags)
    assert isinstance(error, RemoteError) and error.actor == "Hop(299)"
    trace = error.remote_traceback
    assert len(trace) < 20_000 and "characters are left out" in trace
    assert "Hop(298)" in trace and "Hop(0)" in trace and "the first cause" in trace
