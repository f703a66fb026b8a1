"""``python -m zcactor``, and the script ``zcactor``: the command line, or how to install what it needs."""

from __future__ import annotations

import sys

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
    app(prog_name="zcactor")


if __name__ == "__main__":
    main()
