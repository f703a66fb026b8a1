"""A method's exception on its way to the caller: with its own type where it can be pickled, and always as text."""

from __future__ import annotations

import contextlib
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.msgpack import Ext

from zcactor import errors
from zcactor.errors import ProtocolError, RemoteError, ZcactorError, make_remote_error, remote_of
from zcactor.exception_pickling import shown, text_of, type_name
from zcactor.logs import logger
from zcactor.marshal import pickling
from zcactor.marshal.values import SCALARS, Code, decode_small, encode, register
from zcactor.process.context import current_or_none
from zcactor.process.place import Place
from zcactor.process.uncaught import between, note_read_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zcactor.marshal.packing import Packing
    from zcactor.marshal.unpacking import Unpacking

__all__ = ["TEXT_NBYTES", "Failure", "log_failure", "pack_as_text", "passable", "traced", "without_frames"]

TEXT_NBYTES = 64 << 10
"""The limit of bytes of a failure as text: enough for any readable traceback."""

_NAME_LENGTH = 1000
"""Characters of a type's qualified name."""
_OURS = frozenset(
    id(cls) for name in errors.__all__ if isinstance(cls := getattr(errors, name), type) and cls is not RemoteError
)
"""Errors of zcactor's own, by id: the metaclass of another may refuse to be hashed."""
_FIELDS = ("type_name", "message", "remote_traceback", "actor", "host", "pid")

_OWN_FRAMES = tuple(
    f"{Path(__file__).parents[1] / room}{os.sep}"
    for room in ("assembly", "control", "driver", "execution", "node", "objects", "peers", "process", "workers")
)
"""Files of this package, which the traceback leaves out: it starts where the user's code does."""

_formatted: Callable[[Any, BaseException, Any], list[str]] = traceback.format_exception


@contextlib.contextmanager
def without_frames() -> Iterator[None]:
    """Leave the places out of failures: a simulated run is the same in any directory of the package, and spends no time
    on reading source files."""
    global _formatted
    before, _formatted = _formatted, lambda cls, error, _: traceback.format_exception_only(cls, error)
    try:
        yield
    finally:
        _formatted = before


class Failure:
    """The packed form of an exception; the receiver unpacks it as a `RemoteError`."""

    __slots__ = ("actor", "error")

    def __init__(self, error: BaseException, actor: str) -> None:
        self.error = error
        self.actor = actor


def passable(error: BaseException, actor: str) -> BaseException:
    """An error of an actor as a coroutine can raise it: in the place of a StopIteration Python raises an error of its
    own (PEP 479)."""
    if not issubclass(type(error), StopIteration):
        return error
    return make_remote_error(None, dict(zip(_FIELDS, _fields(Failure(error, actor)), strict=True)))


def _plain(error: BaseException) -> tuple[str, tuple[Any, ...]] | None:
    """The name and the arguments of an error of zcactor's own; None for other exceptions. They get through where
    pickling fails, for example because no descriptor is left to import a module with."""
    cls = type(error)
    if id(cls) not in _OURS or hasattr(error, "__notes__") or not SCALARS.issuperset(map(type, error.args)):
        return None
    return cls.__name__, error.args


def _own(name: str, args: Any) -> BaseException:
    """The error with a name and arguments that `_plain` gave.

    Raises:
        TypeError: zcactor has no such error, or the error takes other arguments.
    """
    cls = getattr(errors, name, None) if name in errors.__all__ else None
    if not isinstance(cls, type) or not issubclass(cls, ZcactorError) or type(args) is not list:
        raise TypeError(f"{name!r} is no error of zcactor's")
    return cls(*args)


def _dumps(packing: Packing, error: BaseException) -> Any:
    """The pickled exception, or None when it cannot be pickled."""
    plain = _plain(error)
    if plain is not None and error.__cause__ is None and error.__context__ is None:
        return plain
    mark = packing.mark()
    try:
        return pickling.dumps(packing, error)
    except BaseException:  # a foreign __reduce__ may raise anything, and then the text goes alone
        packing.go_back(mark)
        return plain


def traced(error: BaseException) -> str:
    """The printed traceback of any exception: it begins and ends where the user's code does."""
    cls, trace = type(error), between(error, _OWN_FRAMES)
    try:
        lines = "".join(_formatted(cls, error, trace))
    except BaseException as broken:  # a foreign __getattr__, for `traceback` asks for notes and causes
        where = "".join(traceback.format_tb(trace))
        return (
            f"{where}{type_name(cls)}: {text_of(error)}\n"
            f"(the exception could not be formatted: {type_name(type(broken))})\n"
        )
    return lines if lines.isascii() else lines.encode("utf-8", "backslashreplace").decode()


def log_failure(what: str, error: BaseException) -> None:
    """Log an exception of the user's code. Nothing is raised, also where its class or the user's log handlers raise."""
    try:
        logger.error("%s\n%s", what, traced(error).rstrip())
    except BaseException as broken:  # a handler or a filter of the user's
        os.write(2, f"{what}: {type_name(type(error))} (logging raised {type_name(type(broken))})\n".encode())


def pack_failure(packing: Packing, failure: Failure) -> bytes:
    """The fields as text, and the pickled original where it can be pickled."""
    error: BaseException | None = failure.error
    if issubclass(type(error), RemoteError):  # passed through from an actor further on
        error = remote_of(error).original
    pickled = _dumps(packing, error) if error is not None and issubclass(type(error), Exception) else None
    return encode((*_fields(failure), pickled))


def pack_as_text(failure: Failure, unsendable: BaseException, room: int) -> bytes:
    """The payload of a failure that cannot be sent as a whole: text only, cut to fit, which needs no store.

    Args:
        failure: the failure.
        unsendable: the exception of packing or sending it.
        room: bytes that the payload may have; never more than `TEXT_NBYTES` are used.
    """
    name, message, lines, actor, host, pid = _fields(failure)
    lines += f"\n(the exception itself could not be sent: {type_name(type(unsendable))}: {text_of(unsendable)})\n"
    room = max(min(room, TEXT_NBYTES) - _FRAMING, 0)
    name, actor = _cut(name, room // 16), _cut(actor, room // 16)
    message = _cut(message, room // 4)
    left = room - sum(len(text.encode()) for text in (name, actor, message, host))
    return encode(Ext(Code.FAILURE, encode((name, message, _cut(lines, left, tail=True), actor, host, pid, None))))


_TRACE_LENGTH = 16 << 10
"""Characters of a traceback that travel, at most: some forty hops from actor to actor."""
_FRAMING = 64
"""Bytes of MessagePack around the texts: an extension's head, a list's, those of five strings of 5 each, and the
process id."""


def _cut(text: str, nbytes: int, *, tail: bool = False) -> str:
    """`text` in at most `nbytes` of UTF-8, with a mark in place of the missing part: at its end, or with `tail` at its
    beginning."""
    raw = text.encode()
    if len(raw) <= nbytes:
        return text
    kept = max(nbytes - 3, 0)
    raw = raw[len(raw) - kept :] if tail else raw[:kept]
    short = raw.decode(errors="ignore")
    return f"...{short}" if tail else f"{short}..."


def _shortened(lines: str) -> str:
    """A traceback without its middle where it is too long: one that has come through many actors names them all."""
    if len(lines) <= _TRACE_LENGTH:
        return lines
    half = _TRACE_LENGTH // 2
    return f"{lines[:half]}\n(... {len(lines) - 2 * half:,} characters are left out ...)\n{lines[-half:]}"


def _fields(failure: Failure) -> tuple[str, str, str, str, str, int]:
    """The fields of a failure as text, in the order of `_FIELDS`."""
    error = failure.error
    cls = type(error)
    if issubclass(cls, RemoteError):
        remote = remote_of(error)
        name, message = remote.type_name, remote.message
    else:
        name, message = shown(type_name(cls), _NAME_LENGTH), text_of(error)
    lines = _shortened(traced(error))
    process = current_or_none()
    place = Place.here() if process is None else process.place
    return name, message, lines, failure.actor, place.host, place.pid


def unpack_failure(unpacking: Unpacking, data: memoryview) -> RemoteError:
    """The exception to raise at the caller."""
    fields = decode_small(data)
    if type(fields) is not list or len(fields) != len(_FIELDS) + 1:
        raise ProtocolError("a failure is malformed")
    named: dict[str, Any] = dict(zip(_FIELDS, fields[:-1], strict=True))
    original: BaseException | None = None
    if fields[-1] is not None:
        try:
            stream, buffers = fields[-1]
            found = _own(stream, buffers) if type(stream) is str else pickling.loads(unpacking, stream, buffers)
            if not issubclass(type(found), BaseException):
                raise TypeError(f"it became a {type_name(type(found))}")
            note_read_only(found)
            original = found
        except BaseException as error:  # a foreign constructor may raise anything
            named["remote_traceback"] += (
                f"\n(the exception could not be rebuilt here: {type_name(type(error))}: {text_of(error)})"
            )
    return make_remote_error(original, named)


register(Failure, Code.FAILURE, pack_failure, unpack_failure)
