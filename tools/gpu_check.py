"""Check what the GPUs of this machine, and arrays on them between actors, do here.

    python tools/gpu_check.py [--driver cuda|fake] --out DIR [--only NAME,...] [--limit SECONDS]

Each check is a process of its own with a time limit, so that one that hangs costs one row. With the fake GPU as many
run at once as there are processors. The rows are printed, and
written to DIR/gpu_check.jsonl: ``{"check", "status", "seconds", "detail", "figures"}``, with the status pass, fail,
skip or timeout. The exit status is 0 when no row is fail or timeout, 1 when one is, 2 for wrong arguments, and 3
without a GPU. With the fake GPU no figure says anything about a real one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]

from tools import gpu_array_rows, gpu_driver_rows, gpu_probe_rows  # noqa: E402 # they are found by the line above
from tools.gpu_row import Skip  # noqa: E402

CHECKS: Final = {**gpu_driver_rows.CHECKS, **gpu_array_rows.CHECKS, **gpu_probe_rows.CHECKS}
LIMIT: Final = 20.0
"""Seconds that a check may take."""
MARK: Final = "GPU_CHECK_ROW "
"""The beginning of the line with which a check's process reports."""
NO_DEVICE: Final = 3


class Begun(NamedTuple):
    """A check that runs in a process of its own."""

    name: str
    process: subprocess.Popen[str]
    at: float
    """The time of its beginning."""


def begin(name: str, driver: str) -> Begun:
    """Begin a check in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--driver", driver, "--child", name]
    at = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, cwd=ROOT
    )
    return Begun(name, process, at)


def row(begun: Begun, limit: float) -> dict[str, Any]:
    """Wait for the end of a check. Returns its row."""
    name, process, began = begun
    try:
        printed, _ = process.communicate(timeout=max(0.0, began + limit - time.monotonic()))
    except subprocess.TimeoutExpired:
        end(process)
        printed, _ = process.communicate()
        found = {"status": "timeout", "detail": f"not done after {limit:g} s; {printed[-2000:]}", "figures": {}}
    else:
        lines = [line for line in printed.splitlines() if line.startswith(MARK)]
        ended = {"status": "fail", "detail": f"ended with {process.returncode}: {printed[-2000:]}", "figures": {}}
        found = json.loads(lines[-1].removeprefix(MARK)) if lines else ended
    finally:
        end(process)
    return {"check": name, "status": found["status"], "seconds": round(time.monotonic() - began, 2)} | found


def end(process: subprocess.Popen[str]) -> None:
    """Kill a check that has not ended, and what it has started. It may hang in the driver."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def child(name: str, driver: str) -> None:
    """Run a check here, and print its report. A check that fails ends this process, whose output then is the report."""
    try:
        detail, figures = CHECKS[name](driver)
        status = "pass"
    except Skip as reason:
        status, detail, figures = "skip", str(reason), {}
    print(MARK + json.dumps({"status": status, "detail": detail, "figures": figures}), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the checks. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", choices=("cuda", "fake"), default="cuda")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--only", metavar="NAME,...", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="of one check")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(options.child, options.driver)
        return 0
    names = list(CHECKS) if options.only is None else options.only.split(",")
    if unknown := [name for name in names if name not in CHECKS]:
        parser.error(f"unknown checks: {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    if options.out is None:
        parser.error("--out DIR is needed, for gpu_check.jsonl")
    if reason := gpu_driver_rows.without(options.driver):
        print(f"no GPU: {reason}")
        return NO_DEVICE
    if options.driver == "fake":
        print("the GPU is the fake one: no figure says anything about a real GPU")
    options.out.mkdir(parents=True, exist_ok=True)
    at_once = 1 if options.driver == "cuda" else os.cpu_count() or 1  # on a real GPU one check would slow the other
    statuses, begun, waiting = set(), deque[Begun](), deque(names)
    with contextlib.ExitStack() as whatever_happens, (options.out / "gpu_check.jsonl").open("w") as file:
        while begun or waiting:
            while waiting and len(begun) < at_once:
                begun.append(begin(waiting.popleft(), options.driver))
                whatever_happens.callback(end, begun[-1].process)
            found = row(begun.popleft(), options.limit)
            file.write(json.dumps(found) + "\n")
            file.flush()
            statuses.add(found["status"])
            print(f"{found['check']:17} {found['status']:8} {found['seconds']:6.2f} s  {found['detail']}")
            for figure, value in found["figures"].items():
                print(f"{'':28}{figure}: {value}")
    return 1 if statuses & {"fail", "timeout"} else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that checks are ended, too
    sys.exit(main())
