"""The package's loggers."""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import threading
import traceback
from typing import Any, Final

__all__ = ["logger", "transport_log"]


class _Guarded:
    """The part of a logger that lets no exception of the user's filters, handlers and factories of records reach the
    code that logs: that code has something to end. As logging itself does it for handlers, the exception is printed."""

    _takes_level = True
    """Whether the class of the program takes the number of frames to the one that logs."""

    def _log(self, *arguments: Any, **more: Any) -> None:
        if self._takes_level:
            more["stacklevel"] = more.get("stacklevel", 1) + 1
        try:
            super()._log(*arguments, **more)  # type: ignore[misc]
        except Exception as error:  # of the user's code
            _print(error)


_printing: Final = threading.local()
"""Whether a thread prints: standard error may be the user's, and log what is written to it."""


def _print(error: Exception) -> None:
    if logging.raiseExceptions and not getattr(_printing, "now", False):
        _printing.now = True
        with contextlib.suppress(Exception):  # standard error may be closed
            print("--- Logging error ---", file=sys.stderr)
            traceback.print_exception(error, file=sys.stderr)
        _printing.now = False


def _guarded(name: str) -> logging.Logger:
    found = logging.getLogger(name)
    kind = type(found)  # a program may have set a class of its own
    if not issubclass(kind, _Guarded):
        with contextlib.suppress(Exception):  # such a class may refuse to be the base of another
            parameters = inspect.signature(kind._log).parameters.values()
            takes = any(each.name == "stacklevel" or each.kind == each.VAR_KEYWORD for each in parameters)
            members = {"__module__": kind.__module__, "_takes_level": takes}
            found.__class__ = type(kind.__name__, (_Guarded, kind), members)
    return found


logger: Final = _guarded("zcactor")
transport_log: Final = _guarded("zcactor.transport")
"""The choice of transports, and the peers that they refuse."""
