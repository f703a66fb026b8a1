"""One item in an interpreter of its own: ``python -m benchmarks.child NAME FD RUNS SHARE``.

Started by ``python -m benchmarks``. Each measurement is one line of JSON on descriptor FD.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from benchmarks import ITEMS
from benchmarks.harness import Scale


def main(name: str, fd: str, runs: str, share: str) -> None:
    """Measure item `name` and write the lines to `fd`."""
    os.set_inheritable(int(fd), False)  # actors that outlived a crash must not keep the reader waiting
    with open(int(fd), "w", buffering=1) as lines:
        lines.writelines(
            json.dumps(measurement.plain()) + "\n"
            for measurement in importlib.import_module(ITEMS[name][0]).measure(Scale(int(runs), float(share)))
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
