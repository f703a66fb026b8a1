"""The tree of errors, their messages, and remote errors that are two types at once."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import pytest

import zcactor
from zcactor import errors
from zcactor.errors import (
    ActorDied,
    ActorUnavailable,
    ConnectionLost,
    DeadlineExceeded,
    DeviceError,
    GroupBroken,
    GroupMismatch,
    GroupTimeout,
    HeadUnavailable,
    OutOfMemory,
    RemoteError,
    ZcactorError,
    make_remote_error,
)

NAMES = [name for name in errors.__all__ if name != "CopyWarning"]  # a warning, outside of the tree
CLASSES = [getattr(errors, name) for name in NAMES if isinstance(getattr(errors, name), type)]
FIELDS: dict[str, Any] = {
    "type_name": "module.Name",
    "message": "text",
    "remote_traceback": "Traceback\n  line",
    "actor": "A(b)",
    "host": "h",
    "pid": 3,
}


def test_one_tree() -> None:
    assert all(issubclass(cls, ZcactorError) for cls in CLASSES)
    assert {cls.__name__ for cls in CLASSES} - {"ActorError", "ForkedProcess"} <= set(zcactor.__all__)
    assert issubclass(DeadlineExceeded, TimeoutError)
    assert issubclass(OutOfMemory, MemoryError)
    assert issubclass(ConnectionLost, ConnectionError)
    assert all(f"{cls.__name__}" in str(errors.__doc__) for cls in CLASSES)


@pytest.mark.parametrize(
    "error",
    [
        ActorDied("A(b)", "killed", True),
        ActorUnavailable("A(b)", "restarting", False),
        OutOfMemory(1, 2, 3, 4, "note"),
        ConnectionLost("gone", True),
        GroupBroken(1, "A(b)", "killed", 2),
        GroupMismatch((0, 2), ("barrier()", "broadcast(root=0)")),
        GroupTimeout("Group.barrier", 0.5, (1, 2)),
        HeadUnavailable("/state/log.db", 10.0, "head"),
        DeviceError("copy", 700, 1, True, "nothing is mapped"),
        *(
            cls("text")
            for cls in CLASSES
            if cls
            not in (
                ActorDied,
                ActorUnavailable,
                OutOfMemory,
                ConnectionLost,
                RemoteError,
                GroupBroken,
                GroupMismatch,
                GroupTimeout,
                HeadUnavailable,
                DeviceError,
            )
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_they_pickle(error: ZcactorError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert again.args == error.args
    assert again.__dict__ == error.__dict__
    assert str(again) == str(error)


def test_messages_of_groups() -> None:
    broken = GroupBroken(1, "A(b)", "killed", 2)
    assert "the group of epoch 2 is broken: rank 1, actor A(b), is gone: killed" in str(broken)
    assert "epoch 3 has replaced it" in str(GroupBroken(-1, "", "epoch 3 has replaced it", 2))
    mismatch = GroupMismatch((0, 2), ("barrier()", "broadcast(root=0)"))
    assert "rank 0 called barrier(), and rank 2 called broadcast(root=0)" in str(mismatch)
    assert str(DeviceError("copy", 700, 1, True, "it is odd")) == (
        "copy on GPU 1 failed with error 700: it is odd; this process can use the GPU no more, so start it again"
    )
    assert str(DeviceError("pin", 1, -1)) == "pin failed with error 1: the driver gives no reason"
    assert "missing ranks: 1, 2;" in str(GroupTimeout("Group.barrier", 0.5, (1, 2)))
    assert "only bytes are on their way" in str(GroupTimeout("Group.barrier", 0.5, ()))


def test_messages_of_a_head_that_is_away() -> None:
    away = str(HeadUnavailable("/state/log.db", 10.04, "head"))
    assert away.startswith("the cluster's head has not answered for 10.0 s; calls between actors go on")
    assert "'zcactor start --head'" in away
    silent = str(HeadUnavailable("/state/log.db", 1.0))
    assert "its log /state/log.db has not answered for 1.0 s; nothing was done" in silent


def test_messages() -> None:
    assert str(ActorDied("A(b)", "it was killed", True)) == "actor A(b) died: it was killed; the call may have run"
    assert "no cause is known; the call did not run" in str(ActorDied("A(b)"))
    assert "is not available now" in str(ActorUnavailable("A(b)", "x", False))
    assert "nothing was sent" in str(ConnectionLost("gone"))
    full = str(OutOfMemory(10_000, 20_000, 30_000, 4_000))
    assert all(number in full for number in ("10,000", "20,000", "30,000", "4,000"))
    assert "store_capacity" in full


# ---------------------------------------------------------------- remote errors


class Odd(Exception):
    def __init__(self, a: int, *, b: int) -> None:
        super().__init__(f"{a} {b}")
        self.sum = a + b


class OddNew(ValueError):
    def __new__(cls, a: int, b: int) -> OddNew:
        return super().__new__(cls, a)

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a}{b}")


class OddFile(OSError):
    def __init__(self, code: int) -> None:
        super().__init__(code, "odd", "name")


class Reduced(Exception):
    """An exception that defines how it is pickled."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(a)
        self.b = b

    def __reduce__(self) -> Any:
        return Reduced, (self.args[0], self.b)


class Slotted(Exception):
    __slots__ = ("extra",)


class Final(Exception):
    def __init_subclass__(cls) -> None:
        raise RuntimeError("no subclasses")


class Refusing(type):
    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if len(bases) > 1:
            raise RuntimeError("no second base")
        return super().__new__(cls, name, bases, namespace)

    def mro(cls) -> list[type]:
        if len(cls.__bases__) > 1 and getattr(cls.__bases__[1], "final", False):
            raise RuntimeError("no order")
        return super().mro()


class OddMeta(Exception, metaclass=Refusing):
    pass


class NotDerived(Exception, metaclass=Refusing):
    final = True


class Two(KeyError, OSError):
    pass


def unicode_error() -> UnicodeDecodeError:
    try:
        b"\xff".decode()
    except UnicodeDecodeError as error:
        return error
    raise AssertionError


def syntax_error() -> SyntaxError:
    try:
        compile("a b", "<file>", "exec")
    except SyntaxError as error:
        return error
    raise AssertionError


def noted() -> ValueError:
    error = ValueError("noted")
    error.add_note("a note")
    return error


PLAIN: list[Exception] = [
    ValueError("x"),
    ValueError(),
    ValueError(1, [2], {"a": 3}),
    KeyError("key"),
    FileNotFoundError(2, "no such", "name"),
    OSError("only text"),
    BlockingIOError(11, "again"),
    unicode_error(),
    UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogate"),
    syntax_error(),
    ImportError("text", name="module", path="path"),
    AttributeError("text", name="attribute", obj=object()),
    NameError("text", name="name"),
    ExceptionGroup("group", [ValueError(1), ExceptionGroup("inner", [KeyError(2)])]),
    Odd(1, b=2),
    OddNew(1, 2),
    OddFile(5),
    Reduced(1, 2),
    Slotted("slotted"),
    Final("x"),
    OddMeta("x"),
    Two("two"),
    noted(),
    TimeoutError("late"),
    RecursionError("deep"),
    DeadlineExceeded("late"),
    ActorDied("A(b)", "killed", True),
]


@pytest.mark.parametrize("error", PLAIN, ids=lambda error: type(error).__name__)
def test_two_types_at_once(error: Exception) -> None:
    remote = make_remote_error(error, FIELDS)
    for one in (remote, pickle.loads(pickle.dumps(remote))):
        assert isinstance(one, RemoteError)
        assert isinstance(one, type(error))
        assert (type(one).__module__, type(one).__name__) == (type(error).__module__, type(error).__name__)
        assert repr(one.args) == repr(error.args)
        assert one.remote[:-1] == tuple(FIELDS.values())
        assert type(one.remote.original) is type(error)
        assert str(one) == (str(error) if isinstance(error, ActorDied) else "text")
        assert one.__notes__ == [
            *getattr(error, "__notes__", ()),
            "raised in actor A(b), pid 3, host h\nTraceback\n  line",
        ]
        printed = "".join(traceback.format_exception(one))
        assert "raised in actor A(b), pid 3, host h\nTraceback\n  line\n" in printed.replace("  | ", "")
        for name in ("errno", "strerror", "filename", "reason", "start", "lineno", "name", "sum", "b"):
            assert repr(getattr(one, name, None)) == repr(getattr(error, name, None))
        with pytest.raises(type(error)):
            raise one
    assert remote.original is error


def test_a_class_that_cannot_be_hashed() -> None:
    class Unhashable(type):
        __hash__ = None  # type: ignore[assignment]

    class Odd(Exception, metaclass=Unhashable):
        pass

    assert isinstance(make_remote_error(Odd("x"), FIELDS), Odd)


def test_the_fields_of_the_original_stay() -> None:
    class Fields(Exception):
        message = "of the class"

        def __init__(self) -> None:
            super().__init__("text")
            self.host, self.original, self.remote = "db-3", 7, 8

        @property
        def actor(self) -> str:
            return "of the property"

    error: Any = make_remote_error(Fields(), FIELDS)
    assert (error.message, error.host, error.original, error.actor) == ("of the class", "db-3", 7, "of the property")
    assert (error.pid, error.type_name) == (3, "module.Name")
    assert error.remote[:-1] == tuple(FIELDS.values())
    assert error.remote.original.remote == 8
    del vars(error)["__notes__"]
    assert vars(error) == {"host": "db-3", "original": 7, "remote": 8}


@pytest.mark.parametrize(
    "error",
    [
        None,
        NotDerived("x"),
        StopIteration(3),
        StopAsyncIteration(),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_those_that_stay_plain(error: BaseException | None) -> None:
    remote = make_remote_error(error, FIELDS)
    assert type(remote) is RemoteError
    assert remote.original is error
    assert str(remote) == "module.Name: text"
    assert remote.__notes__[-1] == "raised in actor A(b), pid 3, host h\nTraceback\n  line"


def test_text_without_a_message() -> None:
    assert str(make_remote_error(None, {**FIELDS, "message": ""})) == "module.Name"
    assert str(make_remote_error(ValueError(), {**FIELDS, "message": ""})) == ""
    untold = make_remote_error(ValueError(), {**FIELDS, "remote_traceback": ""})
    assert untold.__notes__ == ["raised in actor A(b), pid 3, host h"]


@pytest.mark.parametrize(
    "error",
    [ActorDied("A(b)", "gone"), ActorUnavailable("A(b)", "gone"), ConnectionLost("gone")],
    ids=lambda error: type(error).__name__,
)
def test_what_comes_out_of_a_method_may_have_run(error: Any) -> None:
    remote: Any = make_remote_error(error, {**FIELDS, "message": str(error)})
    again: Any = make_remote_error(pickle.loads(pickle.dumps(remote)).original, FIELDS)
    for one in (remote, pickle.loads(pickle.dumps(remote)), again):
        assert isinstance(one, type(error))
        assert one.maybe_executed
        assert str(one) == str(type(error)(*error.args[:-1], True))
        assert not one.original.maybe_executed
    assert not error.maybe_executed, "it is about another call"


def test_a_remote_error_of_a_remote_error_is_not_nested() -> None:
    first = make_remote_error(ValueError("x"), FIELDS)
    second = make_remote_error(first, {**FIELDS, "actor": "other"})
    assert type(second) is RemoteError
    assert second.original is first


def test_groups_can_be_split() -> None:
    remote = make_remote_error(ExceptionGroup("g", [ValueError(1), KeyError(2)]), FIELDS)
    caught = []
    try:
        raise remote
    except* ValueError as group:
        caught.append(group.exceptions)
    except* KeyError as group:
        caught.append(group.exceptions)  # type: ignore[arg-type]
    assert [type(error) for errors_ in caught for error in errors_] == [ValueError, KeyError]
