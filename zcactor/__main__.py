"""``python -m zcactor`` and the script ``zcactor``: the command line, or a hint how to install its dependencies."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from zcactor.standard import open_standard

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main"]

_EXTRA = frozenset({"click", "rich"})


class _Output(io.FileIO):
    """The file behind standard output. It remembers why it could not be written to: elsewhere such an error looks like
    one of a command's own files."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


def _watched() -> _Output:
    """Have ``sys.stdout`` write to a file that remembers its failure, and return that file."""
    now = sys.stdout
    if now is None:  # descriptor 1 was closed, and is another file by now, as libraries keep some open (libffi its own)
        output = _Output(os.devnull, "w")
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(output), "utf-8")
        return output
    output = _Output(1, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(output), now.encoding, now.errors, line_buffering=getattr(now, "line_buffering", False),
        write_through=getattr(now, "write_through", False),
    )  # fmt: skip
    return output


def main() -> None:
    """Run the command line, then end the process with its exit status: 2 where the ``cli`` extra is not installed and
    the command needs it, and 1 where the output of a command that has succeeded could not be written."""
    open_standard()
    output = _watched()
    gc.disable()  # all that importing makes stays: to look for garbage takes a tenth of its time
    try:
        command = _command()
        gc.freeze()
        gc.enable()
        command()
    except ModuleNotFoundError as error:
        missing = _package(error)
        if missing not in _EXTRA:
            raise
        print(f"zcactor: the command line needs {missing}: pip install 'zcactor[cli]'", file=sys.stderr)
        sys.exit(2)
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        _end(ended.code, output)
    except OSError as error:
        if error is not output.failure:
            raise
        _end(0, output)


def _package(error: ModuleNotFoundError) -> str:
    """The name of the package that is missing."""
    return (error.name or "").partition(".")[0]


def _command() -> Callable[[], object]:
    """The command line; or the one command that needs no extra, where that is missing."""
    try:
        from zcactor.cli.main import app
    except ModuleNotFoundError as error:
        if _package(error) not in _EXTRA or sys.argv[1:2] != ["demo"]:
            raise
        from zcactor.cli.demo import main as demo

        return lambda: sys.exit(demo(sys.argv[2:]))
    return lambda: app(prog_name="zcactor")


def _end(status: int, output: _Output) -> NoReturn:
    """End the process without finalizing the interpreter, which takes longer than some commands. A node that was forked
    from this process shares its memory, and the kernel would first have to copy the pages that finalizing writes to."""
    with contextlib.suppress(OSError):  # the file remembers it
        sys.stdout.flush()
    failure = output.failure
    with contextlib.suppress(OSError):  # nobody is left to be told
        if failure is not None and failure.errno != errno.EPIPE and not status:  # the reader has closed a pipe
            status = 1
            print(f"zcactor: standard output cannot be written to: {failure.strerror}", file=sys.stderr)
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
