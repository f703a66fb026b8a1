"""``python -m zcactor``, and the script ``zcactor``: the command line, or how to install what it needs."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

__all__ = ["main"]

_EXTRA = frozenset({"click", "rich"})


def main() -> None:
    """Run the command line; ends the process with its exit status, 2 where the ``cli`` extra is not installed."""
    try:
        from zcactor.cli.main import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        print(f"zcactor: the command line needs {error.name}: pip install 'zcactor[cli]'", file=sys.stderr)
        sys.exit(2)
    try:
        app(prog_name="zcactor")
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        _end(ended.code)


def _end(status: int) -> NoReturn:
    """End the process without taking the interpreter apart, which takes longer than some commands do: a node that was
    forked from this process shares its memory, and what is freed here the kernel has to copy first."""
    with contextlib.suppress(BrokenPipeError):  # whoever read our output has seen enough
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
