"""``python -m zcactor`` and the script ``zcactor``: the command line, or a hint how to install its dependencies."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from typing import NoReturn

from zcactor.standard import open_standard

__all__ = ["main"]

_EXTRA = frozenset({"click", "rich"})


def main() -> None:
    """Run the command line, then end the process with its exit status: 2 where the ``cli`` extra is not installed."""
    open_standard()
    gc.disable()  # all that importing makes stays: to look for garbage takes a tenth of its time
    try:
        from zcactor.cli.main import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        print(f"zcactor: the command line needs {error.name}: pip install 'zcactor[cli]'", file=sys.stderr)
        sys.exit(2)
    gc.freeze()
    gc.enable()
    try:
        app(prog_name="zcactor")
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        _end(ended.code)


def _end(status: int) -> NoReturn:
    """End the process without finalizing the interpreter, which takes longer than some commands. A node that was forked
    from this process shares its memory, and the kernel would first have to copy the pages that finalizing writes to."""
    with contextlib.suppress(BrokenPipeError):  # the reader of our output has closed it
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
