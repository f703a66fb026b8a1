"""Every exception zcactor raises, in one tree.

::

    ZcactorError
    ├── ActorError
    │   ├── ActorDied(actor, cause, maybe_executed)
    │   ├── ActorUnavailable(actor, cause, maybe_executed)
    │   ├── MailboxFull
    │   ├── NameTaken
    │   ├── NoSuchActor
    │   └── InsufficientResources
    ├── RemoteError                  also an instance of the original exception's type when that type can be pickled
    ├── DeadlineExceeded             also a TimeoutError
    ├── ObjectLost
    ├── OutOfMemory(requested, used, capacity, largest_free)   also a MemoryError
    ├── ConnectionLost(maybe_executed)                         also a ConnectionError
    ├── ProtocolError
    │   ├── VersionMismatch
    │   └── AuthenticationError
    ├── NotInitialized
    │   └── ForkedProcess
    └── AlreadyInitialized

Each message says what happened, where, the limit and the value, and the next step. The exceptions pickle, because they
travel between actors like any other.
"""

from __future__ import annotations

import functools
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

__all__ = [
    "ActorDied",
    "ActorError",
    "ActorUnavailable",
    "AlreadyInitialized",
    "AuthenticationError",
    "ConnectionLost",
    "DeadlineExceeded",
    "ForkedProcess",
    "InsufficientResources",
    "MailboxFull",
    "NameTaken",
    "NoSuchActor",
    "NotInitialized",
    "ObjectLost",
    "OutOfMemory",
    "ProtocolError",
    "RemoteError",
    "VersionMismatch",
    "ZcactorError",
    "make_remote_error",
    "put_together",
    "take_apart",
]


class ZcactorError(Exception):
    """The base of everything zcactor raises on its own account."""


class ActorError(ZcactorError):
    """Something about one actor: it is dead, unreachable, full, unnamed or cannot be placed."""


class _ActorGone(ActorError):
    """What `ActorDied` and `ActorUnavailable` share: the actor, the cause, and whether the call may have run."""

    _what = "is gone"

    def __init__(self, actor: str, cause: str = "", maybe_executed: bool = False) -> None:
        super().__init__(actor, cause, maybe_executed)
        self.actor = actor
        self.cause = cause
        self.maybe_executed = maybe_executed

    def __str__(self) -> str:
        return self._said(self.maybe_executed)

    def _said(self, maybe_executed: bool) -> str:
        ran = "the call may have run" if maybe_executed else "the call did not run"
        return f"actor {self.actor} {self._what}: {self.cause or 'no cause is known'}; {ran}"


class ActorDied(_ActorGone):
    """The actor's process ended, or the actor was stopped or killed. It does not come back.

    `maybe_executed` is False only when the call certainly never started.
    """

    _what = "died"


class ActorUnavailable(_ActorGone):
    """The actor is being restarted or cannot be reached now; a later call may succeed."""

    _what = "is not available now"


class MailboxFull(ActorError):
    """One caller has `max_pending_calls` unfinished calls to one actor; await some before sending more."""


class NameTaken(ActorError):
    """An actor of that name lives in the namespace already; use ``get_if_exists=True`` or another name."""


class NoSuchActor(ActorError):
    """No living actor has that name in the namespace, or the handle's actor is unknown to the node."""


class InsufficientResources(ActorError):
    """The node can never satisfy the request, not even when it is idle."""


class RemoteError(ZcactorError):
    """A method raised. `except ValueError` works too when the original exception was a picklable ``ValueError``.

    ``str()`` of it is ``str()`` of the original exception, led by the type's name where it could not be rebuilt as that
    type. Where it was raised and the remote traceback are a note (PEP 678), which printed tracebacks show.

    An `ActorDied`, `ActorUnavailable` or `ConnectionLost` that comes out of a method has ``maybe_executed=True`` here,
    because that method ran; what the inner call's own error said is ``original.maybe_executed``.

    Attributes:
        type_name: qualified name of the original type.
        message: ``str()`` of the original exception.
        remote_traceback: the traceback as text, as the actor's process saw it.
        actor: label of the actor that raised.
        host: its host name.
        pid: its process id.
        original: the exception as it was rebuilt here, None when it could not be.
    """

    type_name: str = ""
    message: str = ""
    remote_traceback: str = ""
    actor: str = ""
    host: str = ""
    pid: int = 0
    original: BaseException | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        parts = None if self.original is None else take_apart(self.original)
        return _restore, (parts, {name: getattr(self, name) for name in _REMOTE_FIELDS})

    def __str__(self) -> str:
        if type(self) is RemoteError:
            return f"{self.type_name}: {self.message}" if self.message else self.type_name
        return self.original._said(True) if isinstance(self.original, _TELLING) else self.message


_REMOTE_FIELDS = ("type_name", "message", "remote_traceback", "actor", "host", "pid")


class DeadlineExceeded(ZcactorError, TimeoutError):
    """The call's timeout passed before its result came. The call was told to cancel and may have had effects."""


class ObjectLost(ZcactorError):
    """The process that owned the object ended, or the object is unknown to it; compute the value again."""


class OutOfMemory(ZcactorError, MemoryError):
    """The store has no free block that large.

    Args:
        requested: bytes asked for.
        used: bytes allocated now.
        capacity: bytes the store may grow to; 0 where there can be none, for the reason in `note`.
        largest_free: bytes of the largest block that could still be had.
    """

    def __init__(self, requested: int, used: int, capacity: int, largest_free: int, note: str = "") -> None:
        super().__init__(requested, used, capacity, largest_free, note)
        self.requested = requested
        self.used = used
        self.capacity = capacity
        self.largest_free = largest_free
        self.note = note

    def __str__(self) -> str:
        if not self.capacity and self.note:
            return self.note
        text = (
            f"the store cannot hold {self.requested:,} more bytes: {self.used:,} of {self.capacity:,} are used and the "
            f"largest free block is {self.largest_free:,}; drop arrays that are no longer needed, or pass a larger "
            "store_capacity to zc.init()"
        )
        return f"{text} ({self.note})" if self.note else text


class ConnectionLost(ZcactorError, ConnectionError):
    """The connection to a process ended. `maybe_executed` is False only when the call was never sent."""

    def __init__(self, message: str = "", maybe_executed: bool = False) -> None:
        super().__init__(message, maybe_executed)
        self.maybe_executed = maybe_executed

    def __str__(self) -> str:
        return self._said(self.maybe_executed)

    def _said(self, maybe_executed: bool) -> str:
        return f"{self.args[0]}; {'the call may have run' if maybe_executed else 'nothing was sent'}"


_TELLING = (_ActorGone, ConnectionLost)
"""Types whose text says whether a call may have run."""


class ProtocolError(ZcactorError):
    """The peer sent something that is not valid; its connection is closed and no other is touched."""


class VersionMismatch(ProtocolError):
    """The peer speaks another protocol version or runs another Python minor version; both are named."""


class AuthenticationError(ProtocolError):
    """The peer is another user's process, does not hold this cluster's token, or has no certificate that is accepted;
    or what this process was to show is not there or not safe."""


class NotInitialized(ZcactorError):
    """No runtime is running in this process: use ``async with zc.init():`` around the program."""


class ForkedProcess(NotInitialized):
    """This process was forked from one that runs zcactor: handles and references work in the parent only."""


class AlreadyInitialized(ZcactorError):
    """`zc.init` was called twice without `zc.shutdown` between."""


def _restore(parts: Any, fields: dict[str, Any]) -> RemoteError:
    """The inverse of ``RemoteError.__reduce__``."""
    return make_remote_error(None if parts is None else put_together(parts), fields)


_HEAP_TYPE = 1 << 9
"""Bit of ``type.__flags__``: the class was made at run time, unlike Python's own."""
_REDUCTIONS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
_PLAIN = (StopIteration, StopAsyncIteration)
"""Raised at the caller they would mean something else: the end of an iteration there."""
_NOT_CARRIED = frozenset({"args", "obj", "characters_written"})
"""Fields that are set otherwise, hold the object an attribute was missing from, or are there in some instances only."""


def _own_bases(cls: type) -> list[type]:
    """The classes of `cls` that are Python's own, nearest first."""
    return [base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE and issubclass(base, BaseException)]


def _native_state(error: BaseException) -> dict[str, Any]:
    """The fields that Python's own exceptions keep outside ``__dict__``: ``errno``, ``reason``, ``lineno`` and such."""
    return {
        name: value
        for base in _own_bases(type(error))
        if base not in (BaseException, Exception)
        for name, field in vars(base).items()
        if isinstance(field, MemberDescriptorType | GetSetDescriptorType) and name not in _NOT_CARRIED
        if (value := getattr(error, name, None)) is not None
    }


def take_apart(error: BaseException) -> Any:
    """`error` in a form that can be pickled whatever its constructor takes: its parts, or itself when its class says
    how it is pickled."""
    cls = type(error)
    if any(name in vars(base) for base in cls.__mro__ if base.__flags__ & _HEAP_TYPE for name in _REDUCTIONS):
        return error
    return cls, error.args, _native_state(error), error.__dict__


def put_together(parts: Any) -> BaseException:
    """The inverse of `take_apart`. Neither ``__init__`` nor a ``__new__`` of the class's own is run.

    Raises:
        TypeError: `parts` is something else, or none of Python's own constructors accepts the class.
    """
    if isinstance(parts, BaseException):
        return parts
    cls, args, native, state = parts
    for base in _own_bases(cls):
        try:
            error: BaseException = base.__new__(cls, *args)
        except TypeError:  # not the base that decides the layout
            continue
        BaseException.__setattr__(error, "args", args)
        for name, value in native.items():
            try:
                BaseException.__setattr__(error, name, value)  # its own __setattr__ may refuse
            except (AttributeError, TypeError):  # read-only, and then given by args; or not set
                continue
        error.__dict__.update(state)
        return error
    raise TypeError(f"{cls!r} cannot be built from its parts")


@functools.lru_cache(maxsize=256)
def _dual_class(cls: Any) -> type[Exception]:
    """The class whose instances are both a `RemoteError` and a `cls`."""
    return type(cls.__name__, (RemoteError, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def make_remote_error(original: BaseException | None, fields: dict[str, Any]) -> RemoteError:
    """Build the `RemoteError` for `fields`, of `original`'s own type as well where Python allows such a class.

    The original's ``__init__`` is not run again: its ``args`` and ``__dict__`` are carried over, so exceptions with
    unusual constructors keep their state. Types outside ``Exception`` (``SystemExit``, ``KeyboardInterrupt``) stay
    plain, because they would end the caller, and so do those that would end an iteration there.
    """
    error: Any = None
    stranger = ""
    if isinstance(original, Exception) and not isinstance(original, (RemoteError, *_PLAIN)):
        try:
            cls: Any = type(original)
            dual = _dual_class(cls)
            error = put_together((dual, original.args, _native_state(original), original.__dict__))
        except Exception as failure:
            # Deriving from a stranger's class runs its code (``__init_subclass__``, a metaclass), which may raise
            # anything. The call has failed by its own error, which must get through: as a plain `RemoteError`.
            stranger = type(failure).__name__
    if error is None:
        error = RemoteError(fields["type_name"], fields["message"])
        if stranger:
            error.add_note(f"it is not an instance of its own type: deriving from that raised {stranger}")
    error.__dict__.update(fields)
    error.__dict__["original"] = original
    if isinstance(error, _TELLING):  # it comes out of a method, which has run, whatever the call inside it did
        error.__dict__["maybe_executed"] = True
    where = f"raised in actor {fields['actor']}, pid {fields['pid']}, host {fields['host']}"
    trace = fields["remote_traceback"].rstrip()
    notes = error.__dict__.get("__notes__")
    # A list of its own: the one that is there is the original's, too.
    error.__dict__["__notes__"] = [
        *(notes if isinstance(notes, list) else ()), f"{where}\n{trace}" if trace else where
    ]  # fmt: skip
    return error  # type: ignore[no-any-return]
