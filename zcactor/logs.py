"""The package's loggers."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from typing import Any, Final

__all__ = ["logger", "transport_log"]


class _Guarded:
    """The part of a logger that lets no exception of the user's filters, handlers and factories of records reach the
    code that logs: that code has something to end. As logging itself does it for handlers, the exception is printed."""

    def _log(self, *arguments: Any, stacklevel: int = 1, **more: Any) -> None:
        try:
            super()._log(*arguments, stacklevel=stacklevel + 1, **more)  # type: ignore[misc]
        except Exception as error:  # of the user's code
            if logging.raiseExceptions:
                with contextlib.suppress(Exception):  # standard error is the user's, too, and may be closed
                    print("--- Logging error ---", file=sys.stderr)
                    traceback.print_exception(error, file=sys.stderr)


def _guarded(name: str) -> logging.Logger:
    found = logging.getLogger(name)
    kind = type(found)  # a program may have set a class of its own
    if not issubclass(kind, _Guarded):
        found.__class__ = type(kind.__name__, (_Guarded, kind), {"__module__": kind.__module__})
    return found


logger: Final = _guarded("zcactor")
transport_log: Final = _guarded("zcactor.transport")
"""The choice of transports, and the peers that they refuse."""
