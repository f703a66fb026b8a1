"""Run pytest, and run the few tests that failed once more, alone.

    python tools/rerun.py [PYTEST'S ARGUMENTS]

Many tests start processes and wait for them, on a machine where others do the same. A test that fails there may have
found a defect, or a machine that had no time for it. The second run tells which: it has the machine to itself, one
test after another. A test that fails twice fails the whole. One that passes is named at the end, as something is wrong
all the same: the test, or the code under test. More than `MOST` failures are not run again: so many have one cause.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MOST", "failed", "main"]

MOST: Final = 3
"""Tests that are run again; a few of thirteen thousand may fail together where the machine stood still."""
_TESTS_FAILED: Final = 1
"""Pytest's exit status where tests have failed; any other says that the run itself did not come to its end."""


def failed(cache: Path) -> list[str]:
    """The tests that pytest's last run with this cache directory has seen fail, in order of their names."""
    record = cache / "v/cache/lastfailed"
    return sorted(json.loads(record.read_text())) if record.exists() else []


def _pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests, and those few that fail again. Returns pytest's exit status, of the second run where there is one.

    Args:
        arguments: pytest's arguments; those of the command line by default. Its cache directory is replaced.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    with tempfile.TemporaryDirectory() as name:
        cache = Path(name)
        status = _pytest(*given, "-o", f"cache_dir={cache}")
        names = failed(cache)
        if status != _TESTS_FAILED or not 0 < len(names) <= MOST:
            return status
        print(f"\n{len(names)} failed beside other tests, and run once more alone", flush=True)
        status = _pytest("-n", "0", "-p", "no:cacheprovider", *names)
    if status == 0:
        print("passed alone, and failed beside others: look for the cause with ARGS='-k name --rounds 10'")
        print("\n".join(f"  {each}" for each in names), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
