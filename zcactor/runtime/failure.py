"""A method's exception on its way to the caller: its own type where it can be pickled, and always its text."""

from __future__ import annotations

import os
import socket
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zcactor.errors import ProtocolError, RemoteError, make_remote_error, put_together, take_apart
from zcactor.marshal import pickling
from zcactor.marshal.values import Code, decode_small, encode, register

if TYPE_CHECKING:
    from zcactor.marshal.marshaller import Packing, Unpacking

__all__ = ["Failure"]

_FIELDS = ("type_name", "message", "remote_traceback", "actor", "host", "pid")

_OWN_FRAMES = str(Path(__file__).parent)
"""The traceback starts where the user's code does."""


class Failure:
    """What is sent for an exception; the receiver unpacks it as a `RemoteError`."""

    __slots__ = ("actor", "error")

    def __init__(self, error: BaseException, actor: str) -> None:
        self.error = error
        self.actor = actor


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException as broken:  # a stranger's __str__ may raise anything; the report must not
        return f"<str() of the exception raised {type(broken).__name__}>"
    return _encodable(text)


def _encodable(text: str) -> str:
    """`text` without lone surrogates, which no encoding has."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _dumps(packing: Packing, error: Exception) -> Any:
    """The pickled exception, or None when it cannot be pickled."""
    mark = len(packing.parts)
    try:
        return pickling.dumps(packing, take_apart(error))
    except BaseException:  # whatever a stranger's __reduce__ raises: the text goes without it
        del packing.parts[mark:]
        return None


def lower_failure(packing: Packing, failure: Failure) -> bytes:
    """The fields as text, and the pickled original where there is one that can be pickled."""
    error = failure.error
    cls = type(error)
    original: BaseException | None = error
    if isinstance(error, RemoteError):  # passed through from an actor further on
        original, name, message = error.original, error.type_name, error.message
    else:
        name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
        message = _text(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN_FRAMES):
        trace = trace.tb_next
    try:
        lines = _encodable("".join(traceback.format_exception(cls, error, trace)))
    except BaseException as broken:  # a stranger's __getattr__: `traceback` asks for notes and causes
        where = "".join(traceback.format_tb(trace))
        lines = f"{where}{name}: {message}\n(the exception could not be formatted: {type(broken).__name__})\n"
    pickled = _dumps(packing, original) if isinstance(original, Exception) else None
    return encode((name, message, lines, failure.actor, socket.gethostname(), os.getpid(), pickled))


def lift_failure(unpacking: Unpacking, data: memoryview) -> RemoteError:
    """The exception to raise at the caller."""
    fields = decode_small(data)
    if type(fields) is not list or len(fields) != len(_FIELDS) + 1:
        raise ProtocolError("a failure is malformed")
    named: dict[str, Any] = dict(zip(_FIELDS, fields[:-1], strict=True))
    original: BaseException | None = None
    if fields[-1] is not None:
        try:
            stream, buffers = fields[-1]
            original = put_together(pickling.loads(unpacking, stream, buffers))
        except (Exception, SystemExit) as error:  # whatever a stranger's constructor raises
            named["remote_traceback"] += (
                f"\n(the exception could not be rebuilt here: {type(error).__name__}: {_text(error)})"
            )
    return make_remote_error(original, named)


register(Failure, Code.FAILURE, lower_failure, lift_failure)
