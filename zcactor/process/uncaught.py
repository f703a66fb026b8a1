"""The error that ends a program: its traceback begins and ends at the program's own lines, and usual mistakes get a
note."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from zcactor.exception_pickling import (
    class_name,
    exceptions_of,
    fields_of,
    hides,
    mro_of,
    namespace_of,
    shown_class,
    text_of,
    traceback_of,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["between", "note_read_only", "present"]

_OTHERS: Final = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(asyncio.__file__).parent}{os.sep}", "uvloop")
"""Beginnings of the names of files that are not the program's: those of this package and of the event loops."""
_NOT_AWAITED: Final = re.compile(r"^(object \w+ can't be used in 'await' expression|'\w+' object can't be awaited)$")
_MISSING: Final = re.compile(r"^([\w.<>]+)\.\w+\(\) missing \d+ required positional argument")
_READ_ONLY: Final = re.compile(r"\b(array|assignment destination) is read-only$|^cannot set WRITEABLE flag to True")
_REMEDY: Final = (
    "an array that was passed is read-only for all who hold it: write to x.copy(), or pass zc.move(x), which gives the "
    "receiver an array of its own; zc.freeze(x) closes one before it is passed"
)


def present(error: BaseException) -> None:
    """Prepare an error that ends a program for its reader: cut frames that are not the program's off the two ends of
    its traceback, and of those of a group's errors, and add a note about a usual mistake.

    Frames at the inner end stay where no ``raise`` of this package has raised the error, which may be a defect of it
    then, and so do all in Python's development mode.
    """
    if sys.flags.dev_mode:
        return
    trace = between(error, _OTHERS)
    if trace is not None:
        error.with_traceback(trace)
    note = _note(error)
    if note:
        error.add_note(note)
    if issubclass(type(error), BaseExceptionGroup):
        for each in exceptions_of(error):
            present(each)


def note_read_only(error: BaseException) -> None:
    """Add what to write instead to NumPy's error of writing to an array that was passed. It is added once."""
    if issubclass(type(error), ValueError) and _READ_ONLY.search(text_of(error)):
        notes = dict.setdefault(fields_of(error), "__notes__", [])
        if type(notes) is list and not any(type(each) is str and each == _REMEDY for each in notes):
            notes.append(_REMEDY)


def between(error: BaseException, before: tuple[str, ...]) -> TracebackType | None:
    """The traceback of an error without the frames at its two ends that nobody looks for; None where none is left.

    Args:
        error: the error, which keeps its traceback.
        before: beginnings of the names of files whose frames the traceback does not begin with. It does not end with
            those of this package and of event loops, where `hides` is true of the error.
    """
    entries = _entries(error)
    while entries and entries[0].tb_frame.f_code.co_filename.startswith(before):
        entries.pop(0)
    while entries and hides(error) and entries[-1].tb_frame.f_code.co_filename.startswith(_OTHERS):
        entries.pop()
    trace = None
    for entry in reversed(entries):
        trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace


def _entries(error: BaseException) -> list[TracebackType]:
    entries, trace = [], traceback_of(error)
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    return entries


def _note(error: BaseException) -> str:
    """Describe the usual mistake that has led to `error`, and its remedy; empty for other errors."""
    entries = _entries(error)
    if not entries:
        return ""
    text, frame = text_of(error), entries[-1].tb_frame
    if type(error) is TypeError and _NOT_AWAITED.match(text):
        for name, value in frame.f_locals.items():
            if _is_actor_class(type(value)):
                cls = shown_class(type(value))
                return (
                    f"{name!r} is an object of this process, made by {cls}(...): 'await {cls}.spawn(...)' makes an "
                    "actor, whose methods can be awaited"
                )
    if type(error) is TypeError and (found := _MISSING.match(text)):
        for each in _classes(frame):
            if class_name(each) == found[1] and _is_actor_class(each):
                name = shown_class(each)
                return f"{name} is the class: 'handle = await {name}.spawn(...)' makes an actor, which has the method"
    if type(error) is AttributeError and type(error.name) is str and error.name == "spawn":
        if not issubclass(type(error.obj), type):
            return ""
        name = shown_class(error.obj)  # type: ignore[arg-type]
        return f"{name} is no actor class: write @zc.actor above it, or 'await zc.spawn({name}, ...)'"
    note_read_only(error)
    return ""


def _classes(frame: FrameType) -> Iterator[type]:
    for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
        if issubclass(type(value), type):
            yield value


def _is_actor_class(cls: Any) -> bool:
    """Whether a class has what `@zc.actor` adds, without asking the class, which may answer for any name."""
    return all(any(name in namespace_of(base) for base in mro_of(cls)) for name in ("spawn", "options"))
